"""SentencePiece vocabularies: from GGUF fields and from the file of its own."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.text import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from lockstep.text.sentencepiece import PieceKind
from lockstep.text.sentencepiece_file import read_sentencepiece

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = PieceKind
PIECES: list[tuple[str, float, int]] = [
    ("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<|end|>", 0.0, CONTROL), ("<tool>", 0.0, USER), ("ab", -9.0, UNUSED),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    ("▁a", -1.0, NORMAL), ("bc", -2.0, NORMAL), ("▁ab", -3.0, NORMAL), ("abc", -4.0, NORMAL), ("▁", -5.0, NORMAL), ("a", -6.0, NORMAL),
    ("b", -7.0, NORMAL), ("c", -8.0, NORMAL),
]  # fmt: skip


def gguf_fields(**changes: Any) -> dict[str, Any]:
    pieces, scores, kinds = (list(column) for column in zip(*PIECES, strict=True))
    fields = {"model": "llama", "tokens": pieces, "scores": scores, "token_type": kinds, **changes}
    return {"general.architecture": "llama", **{f"tokenizer.ggml.{name}": value for name, value in fields.items()}}


def spelled(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token_piece(token) for token in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", ["▁a", "bc"]),  # the highest score first, not from left to right
        (" abc", ["▁", "▁a", "bc"]),
        ("ab", ["▁ab"]),
        ("b", ["▁", "b"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("", []),
        ("a<|end|>a", ["▁a", "<|end|>", "▁a"]),
        ("a<tool>a", ["▁a", "<tool>", "▁a"]),
        ("cab", ["▁", "c", "a", "b"]),  # an unused piece is not made
        ("<0x41>", ["▁", "<0x3C>", "<0x30>", "<0x78>", "<0x34>", "<0x31>", "<0x3E>"]),  # nor a byte's name taken for the byte
    ],
)
def test_text_is_encoded_by_scores_with_a_space_before_each_part(text: str, expected: list[str]) -> None:
    assert spelled(tokenizer_from_gguf(gguf_fields(add_bos_token=False)), text) == expected


def test_flags_of_the_file_decide_what_is_put_around_a_text() -> None:
    assert spelled(tokenizer_from_gguf(gguf_fields()), "ab") == ["<s>", "▁ab"]
    assert spelled(tokenizer_from_gguf(gguf_fields(add_space_prefix=False)), "ab") == ["<s>", "a", "b"]
    assert spelled(tokenizer_from_gguf(gguf_fields(add_bos_token=False, add_eos_token=True)), "ab") == ["▁ab", "</s>"]
    assert spelled(tokenizer_from_gguf(gguf_fields(remove_extra_whitespaces=True)), "  ab  a ") == ["<s>", "▁ab", "▁a"]
    assert spelled(tokenizer_from_gguf(gguf_fields(bos_token_id=3)), "ab") == ["<|end|>", "▁ab"]


def test_the_space_before_a_text_is_not_in_what_comes_back() -> None:
    for text in ("abc", " abc", "  é", "a b"):
        for prefixes in (True, False):
            tokenizer = tokenizer_from_gguf(gguf_fields(add_space_prefix=prefixes))
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_that_the_file_lists_go_before_scores() -> None:
    tokenizer = tokenizer_from_gguf(gguf_fields(merges=["▁ a", "▁a b"], add_bos_token=False))
    assert spelled(tokenizer, "abc") == ["▁ab", "c"]


def test_gemmas_order_of_pieces_goes_before_its_scores() -> None:
    reordered = dict(zip(("tokens", "scores", "token_type"), map(list, zip(*PIECES[:5], ("  ", 0.0, USER), *PIECES[5:], strict=True)), strict=True))
    fields = {**gguf_fields(**reordered), "general.architecture": "gemma2"}
    tokenizer = tokenizer_from_gguf(fields)
    assert spelled(tokenizer, "a  a") == ["<s>", "a", "▁▁", "a"]
    assert spelled(tokenizer, " abc") == ["<s>", "▁a", "bc"]
    assert tokenizer.decode(tokenizer.encode("a  a")) == "a  a"


def test_phi3s_tokens_swallow_the_spaces_after_them() -> None:
    tokenizer = tokenizer_from_gguf({**gguf_fields(), "general.architecture": "phi3"})
    assert spelled(tokenizer, "<|end|>\n  ab<s> a") == ["<s>", "<|end|>", "▁ab", "<s>", "▁", "▁a"]


def test_unigrams_are_the_likeliest_division() -> None:
    tokenizer = tokenizer_from_gguf(gguf_fields(model="t5", unknown_token_id=0, eos_token_id=2))
    assert spelled(tokenizer, "abc") == ["▁a", "bc", "</s>"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"scores": None}, "scores is missing"),
        ({"scores": [1.0]}, "1 long"),
        ({"scores": 3}, "no list"),
        ({"scores": [float("nan")] * len(PIECES)}, "NaN"),
        ({"token_type": [1]}, "1 entries"),
        ({"tokens": ["a"] * len(PIECES)}, "twice"),
        ({"merges": ["a c"]}, "does not make a token"),
        ({"precompiled_charsmap": [1, 2, 3]}, "damaged"),
        ({"precompiled_charsmap": [4, 0, 0, 0, *b"abcd"]}, "damaged"),
        ({"add_space_prefix": "yes"}, "add_space_prefix is 'yes'"),
        ({"unknown_token_id": -1}, "unknown_token_id is -1"),
    ],
)
def test_fields_that_do_not_fit_are_refused(changes: dict[str, Any], match: str) -> None:
    fields = gguf_fields(**changes)
    with pytest.raises(CheckpointError, match=match):
        tokenizer_from_gguf({key: value for key, value in fields.items() if value is not None})


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def text(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def model_file(*, trainer: bytes = number(3, 2), normalizer: bytes = number(4, 0)) -> bytes:
    """PIECES in SentencePiece's form."""
    pieces = b"".join(
        text(1, text(1, piece.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + (b"" if kind == NORMAL else number(3, kind)))
        for piece, score, kind in PIECES
    )
    return pieces + text(2, trainer) + text(3, normalizer)


def write_model(folder: Path, content: bytes) -> Path:
    (folder / "tokenizer.model").write_bytes(content)
    return folder


def test_sentencepieces_file_gives_the_ids_of_the_gguf_file(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(write_model(tmp_path, model_file()))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (1, (2,), {0, 1, 2, 3})
    other = tokenizer_from_gguf(gguf_fields(add_bos_token=False))
    for line in ("abc", " abc", "é", "cab", "<|end|>ab"):
        assert tokenizer.encode(line) == other.encode(line)
    assert spelled(tokenizer, "a<tool>a") == ["▁a", "<tool>", "a"]  # SentencePiece puts no space after a piece of the user's


def test_settings_of_sentencepieces_file_are_honoured(tmp_path: Path) -> None:
    file = model_file(trainer=number(3, 1) + number(41, 3) + number(42, -1), normalizer=number(3, 0))
    tokenizer = tokenizer_from_folder(write_model(tmp_path, file))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (3, ())
    assert spelled(tokenizer, "  b   c ") == ["b", "▁", "c"]


@pytest.mark.parametrize(
    ("content", "error", "match"),
    [
        (b"", CheckpointError, "no pieces"),
        (b"IQ== 0\nIg== 1\n", CheckpointError, "expected a SentencePiece vocabulary"),
        (text(1, text(1, b"\xff")), CheckpointError, "not UTF-8"),
        (number(1, 3), CheckpointError, "number where text"),
        (text(1, b"a" * 5)[:-1], CheckpointError, "ends inside a field"),
        (b"\xff" * 11, CheckpointError, "more than ten bytes"),
        (model_file(trainer=number(3, 3)), UnsupportedError, "whole words"),
        (model_file(trainer=number(24, 1)), UnsupportedError, "ends of words"),
        (model_file(normalizer=number(5, 0)), UnsupportedError, "keeps spaces"),
        (model_file(trainer=text(3, b"a")), CheckpointError, "field 3"),
    ],
)
def test_files_that_are_no_sentencepiece_vocabulary_say_so(content: bytes, error: type[Exception], match: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=match):
        tokenizer_from_folder(write_model(tmp_path, content))


def test_a_damaged_file_is_a_clear_error_or_another_vocabulary(tmp_path: Path) -> None:
    draw = random.Random(5)
    whole = model_file()
    refused = 0
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        cut = bytes(content[: draw.choice((len(content), draw.randrange(len(content))))])
        try:
            read_sentencepiece(write_model(tmp_path, cut) / "tokenizer.model")
        except (CheckpointError, UnsupportedError):
            refused += 1
    assert refused > 100
