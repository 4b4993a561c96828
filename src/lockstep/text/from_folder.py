"""A tokenizer from a Hugging Face folder: tokenizer.json or tokenizer.model, and the files around it. Knows their forms; does not know GGUF."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.text.sentencepiece_file import read_sentencepiece
from lockstep.text.spelling import SPACE_MARK, ByteFallback, ByteLevel, Metaspace, Spelling
from lockstep.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_from_folder(path: Path) -> Tokenizer:
    """tokenizer.json, or tokenizer.model where there is only that. What tokenizer_config.json says of added tokens and of BOS and EOS around a text
    goes before what they say, as in transformers.

    Raises CheckpointError for missing or damaged files, UnsupportedError for a decoder whose text cannot be streamed exactly."""
    backend, spelling, own_names = _backend(path)
    settings = _optional_object(path / "tokenizer_config.json")
    _add_listed_tokens(path, backend, settings.get("added_tokens_decoder"))
    special_tokens = {**own_names, **_special_tokens({**_optional_object(path / "special_tokens_map.json"), **settings})}
    # A named token of the vocabulary is special even if tokenizer.json forgot to say so; one outside the vocabulary has no embedding and stays out.
    backend.add_special_tokens([token for token in special_tokens.values() if backend.token_to_id(token) is not None])
    ids: dict[str, int | None] = {name: backend.token_to_id(token) for name, token in special_tokens.items()}
    _surround(backend, settings, special_tokens, ids)
    end = ids.get("eos_token")
    return Tokenizer(
        backend,
        spelling,
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=[] if end is None else [end],
        chat_templates=_chat_templates(path, settings),
        special_tokens=special_tokens,
    )


def _backend(path: Path) -> tuple[tokenizers.Tokenizer, Spelling, dict[str, str]]:
    """With the names that the file itself has for special tokens."""
    file = path / "tokenizer.json"
    if not file.is_file():
        if (path / "tokenizer.model").is_file():
            return _sentencepiece(path / "tokenizer.model")
        raise CheckpointError(
            f"{path}: expected a tokenizer.json or tokenizer.model in the folder, found neither; download it beside the weights, or use a GGUF file"
        )
    raw = file.read_bytes()
    description = _json_object(file, raw)
    try:
        backend = tokenizers.Tokenizer.from_buffer(raw)
    except ValueError as error:
        raise CheckpointError(f"{file}: the tokenizers library cannot read it ({error}); download the file again") from None
    backend.no_truncation()
    backend.no_padding()
    return backend, _spelling(file, description.get("decoder")), {}


def _sentencepiece(file: Path) -> tuple[tokenizers.Tokenizer, Spelling, dict[str, str]]:
    content = read_sentencepiece(file)
    backend = content.vocabulary.backend()
    backend.add_special_tokens(content.vocabulary.special_tokens())
    return backend, content.vocabulary.spelling(), content.special_tokens


def _add_listed_tokens(path: Path, backend: tokenizers.Tokenizer, listed: Any) -> None:
    """Tokens of tokenizer_config.json's added_tokens_decoder, which other versions of the folder's tools have written there alone."""
    where = f"{path / 'tokenizer_config.json'}: added_tokens_decoder"
    if not isinstance(listed, dict | None):
        raise CheckpointError(f"{where} must be an object of ids, got {listed!r:.200}; download the file again")
    try:
        entries = sorted((int(index), entry["content"], entry) for index, entry in (listed or {}).items())
        known = backend.get_added_tokens_decoder()
        for index, content, entry in entries:
            flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            token = AddedToken(content, **flags)
            if known.get(index) == token and known[index].special == token.special:
                continue
            found = backend.token_to_id(content)
            if index != (backend.get_vocab_size(with_added_tokens=True) if found is None else found):
                raise CheckpointError(f"{where} gives {content!r} the id {index}, the vocabulary {found}; the files are of different models")
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    except (TypeError, KeyError, ValueError, AttributeError):
        raise CheckpointError(f"{where} must hold tokens with their content, got {listed!r:.200}; download the file again") from None


def _surround(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special_tokens: Mapping[str, str], ids: Mapping[str, int | None]) -> None:
    """BOS and EOS around a text, where tokenizer_config.json says anything of them."""
    flags = {name: settings.get(f"add_{name}") for name in ("bos_token", "eos_token")}
    if all(flag is None for flag in flags.values()):
        return
    before, after = ([special_tokens[name]] if flags[name] and ids.get(name) is not None else [] for name in ("bos_token", "eos_token"))
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=[(token, backend.token_to_id(token)) for token in (*before, *after)]
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
