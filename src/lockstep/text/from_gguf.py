"""A tokenizer from a GGUF file's metadata: the byte-level BPE kind. Knows GGUF's tokenizer keys; does not know files.

`tokenizer.ggml.pre` names how text is cut before merging; the cuts are those of llama.cpp (llama-vocab.cpp) and of the models' own tokenizer.json.
(transformers 5 has no entry for "smollm" and falls back on GPT-2's cut, which differs where digits follow spaces or are not ASCII.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.text.spelling import ByteLevel
from lockstep.text.tokenizer import Tokenizer

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SUPPORTED_CUTS = ("smollm", "gpt-2", "qwen2", "llama-bpe")
# Words with their contraction, {digits}, punctuation with line ends, line ends, spaces: the cut of cl100k and its heirs.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator"}


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """fields: a GGUF file's metadata. Raises CheckpointError if keys are missing or do not fit together, UnsupportedError for other kinds."""
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedError(
            f"GGUF tokenizer kind {kind!r} is not supported; 'gpt2' (byte-level BPE) is: use the model's Hugging Face folder instead"
        )
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    cut = fields.get("tokenizer.ggml.pre")
    backend = _backend(tokens, _strings(fields, "tokenizer.ggml.merges"), cut)
    special, plain = _added_tokens(fields, tokens)
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
    ids = {name: _token_id(fields, key, len(tokens)) for name, key in (*_NAMED_TOKENS.items(), ("eot", "eot"), ("eom", "eom"))}
    named = {name: tokens[index] for name in _NAMED_TOKENS if (index := ids[name]) is not None}
    before = ["bos_token"] if fields.get("tokenizer.ggml.add_bos_token", cut == "llama-bpe") and "bos_token" in named else []
    after = ["eos_token"] if fields.get("tokenizer.ggml.add_eos_token") and "eos_token" in named else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*(named[name] for name in before), "$A", *(named[name] for name in after)],
            special_tokens=[(named[name], ids[name]) for name in (*before, *after)],
        )
    template = fields.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        ByteLevel(),
        bos_token_id=ids["bos_token"],
        eos_token_ids=[index for name in ("eos_token", "eot", "eom") if (index := ids[name]) is not None],
        chat_templates={"default": template} if isinstance(template, str) else {},
        special_tokens=named,
    )


def _backend(tokens: Sequence[str], merges: Sequence[str], cut: object) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens names a token twice; copy or download the file again")
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(f"tokenizer.ggml.merges has {merge!r}, which does not make a token of two tokens; copy or download the file again")
        pairs.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=cut == "llama-bpe"))
    backend.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(cut)
    return backend


def _pre_tokenizer(cut: object) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if cut == "gpt-2":
        return words
    if cut == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if cut in ("qwen2", "llama-bpe"):
        digits = "{1,3}" if cut == "llama-bpe" else ""
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS.replace("{DIGITS}", digits)), "isolated"), whole])
    raise UnsupportedError(
        f"tokenizer.ggml.pre {cut!r} is not supported; supported are {', '.join(SUPPORTED_CUTS)}: use the model's Hugging Face folder"
    )


def _added_tokens(fields: Mapping[str, Any], tokens: Sequence[str]) -> tuple[list[AddedToken], list[AddedToken]]:
    """Tokens that are cut out of a text before anything else: special ones, and plain ones that the maker defined."""
    types = fields.get("tokenizer.ggml.token_type")
    if types is None:
        types = [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens; copy or download the file again")
    kinds = list(map(int, types))
    special = [AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind in (UNKNOWN, CONTROL)]
    plain = [AddedToken(token, special=False, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    return special, plain


def _token_id(fields: Mapping[str, Any], key: str, token_count: int) -> int | None:
    value = fields.get(f"tokenizer.ggml.{key}_token_id")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < token_count:
        raise CheckpointError(f"tokenizer.ggml.{key}_token_id is {value!r}; an id below {token_count} was expected; copy or download the file again")
    return value


def _strings(fields: Mapping[str, Any], key: str) -> Sequence[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{key} is missing or not a list of strings; copy or download the file again")
    return value
