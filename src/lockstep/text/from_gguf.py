"""A tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2"), SentencePiece's BPE ("llama") and unigrams ("t5"). Knows GGUF's tokenizer keys;
does not know files.

The keys and their defaults are those of llama.cpp (docs of GGUF, src/llama-vocab.cpp). Where the key `add_space_prefix` asks for it, a space is put
before a text and before what follows a special token: so llama.cpp reads it, and so do the tokenizer.json files of these models. transformers 5
reads such a GGUF otherwise: no space after special tokens, and none before a text that begins with one. It also has no entry for the cut "smollm"
and falls back on GPT-2's, and does not put text into NFC for "qwen2", as it does for the same model in a folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, processors

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.text.cuts import cut_named
from lockstep.text.sentencepiece import PieceKind, SentencePieceVocabulary
from lockstep.text.spelling import SPACE_MARK, ByteLevel, Spelling
from lockstep.text.tokenizer import Tokenizer

KINDS = ("gpt2", "llama", "t5")
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator"}
_SPECIAL_IF_NAMED = ("bos", "eos", "unknown", "padding")
# Ids of a kind that the file need not name.
_USUAL_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "t5": {"eos": 1, "unknown": 2, "padding": 0}, "gpt2": {}}
# Gemma's scores do not follow its merges, the order of its pieces does; pieces of several spaces are written with spaces in the file.
_GEMMA = ("gemma", "gemma2", "gemma3")
# Phi-3's tokens of a chat swallow the spaces and line ends after them, but for these (its tokenizer.json; llama-vocab.cpp has the same list).
_PHI3_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")
_TEMPLATE = "tokenizer.chat_template"


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """fields: a GGUF file's metadata. Raises CheckpointError if keys are missing or do not fit together, UnsupportedError for other kinds."""
    kind = fields.get("tokenizer.ggml.model")
    if kind not in KINDS:
        raise UnsupportedError(
            f"GGUF tokenizer kind {kind!r} is not supported; supported are 'gpt2' (byte-level BPE), 'llama' and 't5' (SentencePiece): "
            "use the model's Hugging Face folder instead"
        )
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    if len(frozenset(tokens)) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens names a token twice; copy or download the file again")
    kinds = _token_kinds(fields, len(tokens))
    usual = _USUAL_IDS[kind]
    ids = {name: _token_id(fields, name, usual.get(name), len(tokens)) for name in (*_NAMED_TOKENS.values(), "eot", "eom")}
    backend, spelling = _byte_level(fields, tokens, kinds) if kind == "gpt2" else _sentencepiece(fields, kind, tokens, kinds, ids["unknown"])
    named = {name: tokens[index] for name, key in _NAMED_TOKENS.items() if (index := ids[key]) is not None}
    _make_named_special(fields, backend, tokens)
    before, after = _tokens_around(fields, kind)
    _surround(backend, [ids["bos"]] if before else [], [ids["eos"]] if after else [], tokens)
    return Tokenizer(
        backend,
        spelling,
        bos_token_id=ids["bos"],
        eos_token_ids=[index for name in ("eos", "eot", "eom") if (index := ids[name]) is not None],
        chat_templates=_chat_templates(fields),
        special_tokens=named,
    )


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> tuple[tokenizers.Tokenizer, Spelling]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    cut = cut_named(fields.get("tokenizer.ggml.pre"))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, _merges(fields, vocabulary), ignore_merges=cut.words_first))
    backend.decoder = decoders.ByteLevel()
    if (normalizer := cut.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = cut.pre_tokenizer()
    paired = list(zip(tokens, kinds, strict=True))
    control = [token for token, kind in paired if kind in (PieceKind.UNKNOWN, PieceKind.CONTROL)]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    _add_user_tokens(backend, [token for token, kind in paired if kind == PieceKind.USER_DEFINED])
    return backend, ByteLevel()


def _sentencepiece(
    fields: Mapping[str, Any], kind: str, tokens: Sequence[str], kinds: Sequence[int], unknown_id: int | None
) -> tuple[tokenizers.Tokenizer, Spelling]:
    architecture = fields.get("general.architecture")
    scores = _numbers(fields, "tokenizer.ggml.scores", len(tokens))
    pieces, merged_kinds = list(tokens), list(kinds)
    if architecture in _GEMMA:
        scores = [-float(index) for index in range(len(tokens))]
        for index, token in enumerate(tokens):
            if token and not token.strip(" "):
                pieces[index], merged_kinds[index] = SPACE_MARK * len(token), PieceKind.NORMAL
    vocabulary = SentencePieceVocabulary(
        pieces=pieces,
        scores=scores,
        kinds=merged_kinds,
        unigram=kind == "t5",
        merges=_merges(fields, frozenset(pieces)) if "tokenizer.ggml.merges" in fields and kind == "llama" else None,
        unknown_id=unknown_id,
        prefixes_space=_flag(fields, "add_space_prefix", architecture not in _GEMMA),
        squeezes_spaces=_flag(fields, "remove_extra_whitespaces", False),
        character_map=_bytes(fields, "tokenizer.ggml.precompiled_charsmap"),
    )
    backend = vocabulary.backend()
    swallowing: frozenset[str] = frozenset()
    if architecture == "phi3":
        swallowing = frozenset(pieces).difference(_PHI3_KEEP_SPACES)
    backend.add_special_tokens(vocabulary.special_tokens(takes_spaces_after=swallowing))
    user_tokens = [piece for piece, piece_kind in zip(pieces, merged_kinds, strict=True) if piece_kind == PieceKind.USER_DEFINED]
    _add_user_tokens(backend, user_tokens, takes_spaces_after=swallowing)
    return backend, vocabulary.spelling()


def _add_user_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], takes_spaces_after: frozenset[str] = frozenset()) -> None:
    """Tokens that the maker defined: cut out of a text before anything else, and part of its text."""
    backend.add_tokens([AddedToken(token, special=False, normalized=False, rstrip=token in takes_spaces_after) for token in tokens])


def _make_named_special(fields: Mapping[str, Any], backend: tokenizers.Tokenizer, tokens: Sequence[str]) -> None:
    """A token that the file names is special even if its type does not say so."""
    named = [_token_id(fields, key, None, len(tokens)) for key in _SPECIAL_IF_NAMED]
    special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    backend.add_special_tokens(
        [AddedToken(tokens[index], special=True, normalized=False) for index in named if index is not None and index not in special]
    )


def _merges(fields: Mapping[str, Any], vocabulary: Mapping[str, int] | frozenset[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for merge in _strings(fields, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(f"tokenizer.ggml.merges has {merge!r}, which does not make a token of two tokens; copy or download the file again")
        pairs.append((left, right))
    return pairs


def _tokens_around(fields: Mapping[str, Any], kind: str) -> tuple[bool, bool]:
    """Whether a text begins with BOS and ends with EOS; the usual of the kind where the file does not say."""
    adds_bos = cut_named(fields.get("tokenizer.ggml.pre")).adds_bos if kind == "gpt2" else kind == "llama"
    return _flag(fields, "add_bos_token", adds_bos), _flag(fields, "add_eos_token", kind == "t5")


def _surround(backend: tokenizers.Tokenizer, before: Sequence[int | None], after: Sequence[int | None], tokens: Sequence[str]) -> None:
    first, last = ([index for index in side if index is not None] for side in (before, after))
    if first or last:
        backend.post_processor = processors.TemplateProcessing(
            single=[*(tokens[index] for index in first), "$A", *(tokens[index] for index in last)],
            special_tokens=[(tokens[index], index) for index in (*first, *last)],
        )


def _chat_templates(fields: Mapping[str, Any]) -> dict[str, str]:
    """The default one, and those that `tokenizer.chat_templates` names, each under its own key."""
    names = fields.get("tokenizer.chat_templates")
    named = {name: fields.get(f"{_TEMPLATE}.{name}") for name in names if isinstance(name, str)} if isinstance(names, list) else {}
    found = {**named, "default": fields.get(_TEMPLATE, named.get("default"))}
    return {name: template for name, template in found.items() if isinstance(template, str)}


def _token_kinds(fields: Mapping[str, Any], token_count: int) -> list[int]:
    types = fields.get("tokenizer.ggml.token_type")
    if types is None:
        return [PieceKind.NORMAL] * token_count
    if len(types) != token_count:
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {token_count} tokens; copy or download the file again")
    return list(map(int, types))


def _token_id(fields: Mapping[str, Any], key: str, usual: int | None, token_count: int) -> int | None:
    value = fields.get(f"tokenizer.ggml.{key}_token_id")
    if value is None:
        return usual if usual is not None and usual < token_count else None
    if type(value) is not int or not 0 <= value < token_count:
        raise CheckpointError(f"tokenizer.ggml.{key}_token_id is {value!r}; an id below {token_count} was expected; copy or download the file again")
    return value


def _flag(fields: Mapping[str, Any], key: str, usual: bool) -> bool:
    value = fields.get(f"tokenizer.ggml.{key}", usual)
    if not isinstance(value, bool):
        raise CheckpointError(f"tokenizer.ggml.{key} is {value!r}; true or false was expected; copy or download the file again")
    return value


def _numbers(fields: Mapping[str, Any], key: str, count: int) -> list[float]:
    value = fields.get(key)
    if value is None or isinstance(value, str | bytes | int | float) or len(value) != count:
        found = "missing" if value is None else "no list" if not hasattr(value, "__len__") else f"{len(value)} long"
        raise CheckpointError(f"{key} is {found}; a number for each of {count} tokens was expected; copy or download the file again")
    numbers = [float(number) for number in value]
    if any(number != number for number in numbers):
        raise CheckpointError(f"{key} holds a value that is not a number (NaN); copy or download the file again")
    return numbers


def _bytes(fields: Mapping[str, Any], key: str) -> bytes:
    """An array of bytes, signed or not; empty if there is none."""
    value = fields.get(key)
    return b"" if value is None else bytes(int(number) & 0xFF for number in value)


def _strings(fields: Mapping[str, Any], key: str) -> Sequence[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{key} is missing or not a list of strings; copy or download the file again")
    return value
