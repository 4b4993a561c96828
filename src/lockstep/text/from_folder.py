"""A tokenizer from a Hugging Face folder: tokenizer.json and the files around it. Knows their forms; does not know GGUF."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.text.spelling import SPACE_MARK, ByteFallback, ByteLevel, Metaspace, Spelling
from lockstep.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_from_folder(path: Path) -> Tokenizer:
    """Raises CheckpointError for missing or damaged files, UnsupportedError for a decoder whose text cannot be streamed exactly."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{path}: expected a tokenizer.json in the folder, found none; download it beside the weights, or use a GGUF file")
    raw = file.read_bytes()
    description = _json_object(file, raw)
    try:
        backend = tokenizers.Tokenizer.from_buffer(raw)
    except ValueError as error:
        raise CheckpointError(f"{file}: the tokenizers library cannot read it ({error}); download the file again") from None
    backend.no_truncation()
    backend.no_padding()
    settings = _optional_object(path / "tokenizer_config.json")
    special_tokens = _special_tokens({**_optional_object(path / "special_tokens_map.json"), **settings})
    # A named token of the vocabulary is special even if tokenizer.json forgot to say so; one outside the vocabulary has no embedding and stays out.
    backend.add_special_tokens([token for token in special_tokens.values() if backend.token_to_id(token) is not None])
    ids: dict[str, int | None] = {name: backend.token_to_id(token) for name, token in special_tokens.items()}
    end = ids.get("eos_token")
    return Tokenizer(
        backend,
        _spelling(file, description.get("decoder")),
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=[] if end is None else [end],
        chat_templates=_chat_templates(path, settings),
        special_tokens=special_tokens,
    )


def _spelling(file: Path, decoder: Any) -> Spelling:
    """The spelling that agrees with a decoder of tokenizer.json."""
    parts = decoder["decoders"] if isinstance(decoder, dict) and decoder.get("type") == "Sequence" else [decoder]
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if kinds == ["ByteLevel"]:
        return ByteLevel()
    if kinds == ["Metaspace"] and parts[0].get("replacement", SPACE_MARK) == SPACE_MARK:
        return Metaspace(first_piece_unspaced=parts[0].get("prepend_scheme", "always") != "never")
    space = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and parts[0] == space:
        if len(parts) == 3:
            return ByteFallback(strips_first_space=False)
        if parts[3:] == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
            return ByteFallback(strips_first_space=True)
    raise UnsupportedError(f"{file}: decoder {' + '.join(map(str, kinds))} is not supported; ByteLevel, Metaspace and byte fallback (Llama 2) are")


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text, from the plain form ("</s>") or the long one ({"content": "</s>", ...})."""
    found = {name: settings.get(name) for name in SPECIAL_TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """By name. chat_template.jinja comes first, then chat_template.json, then tokenizer_config.json: one template or a list of named ones."""
    if (path / "chat_template.jinja").is_file():
        named = {file.stem: _text(file) for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
        return {**named, "default": _text(path / "chat_template.jinja")}
    value = _optional_object(path / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(value, str):
        return {"default": value}
    if value is None:
        return {}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError):
        raise CheckpointError(f"{path}: chat_template must be a string or a list of {{name, template}}, got {value!r:.200}") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read as UTF-8 ({error}); download the file again") from None


def _optional_object(file: Path) -> dict[str, Any]:
    return _json_object(file, file.read_bytes()) if file.is_file() else {}


def _json_object(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not JSON ({error}); download the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: is not a JSON object; download the file again")
    return value
