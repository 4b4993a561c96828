"""SentencePiece's own file, tokenizer.model. Knows the few fields of its protocol buffer that decide how text is encoded; does not know how.

A small reader of its own stands here in place of the sentencepiece and protobuf packages, of which the first does not give out the settings without
the second (field numbers: sentencepiece_model.proto; encoding: protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.text.sentencepiece import PieceKind, SentencePieceVocabulary

BYTES_MAX = 256 << 20
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_UNIGRAM, _BPE, _WORD, _CHARACTER = 1, 2, 3, 4
_VARINT, _EIGHT_BYTES, _LENGTH_GIVEN, _FOUR_BYTES = 0, 1, 2, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceFile:
    """special_tokens: the names that the file has for its special pieces: "bos_token", "eos_token", "unk_token", "pad_token"."""

    vocabulary: SentencePieceVocabulary
    special_tokens: dict[str, str]


def read_sentencepiece(path: Path) -> SentencePieceFile:
    """Raises CheckpointError for a file that is damaged or of another kind, UnsupportedError for vocabularies of words or characters."""
    if path.stat().st_size > BYTES_MAX:
        raise CheckpointError(f"{path}: has {path.stat().st_size} bytes, too many for a vocabulary (at most {BYTES_MAX}); download the file again")
    reader = _Reader(path)
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in reader.fields(path.read_bytes()):
        if number == _PIECES:
            pieces.append(_piece(reader, reader.message(value)))
        elif number == _TRAINER:
            trainer = dict(reader.fields(reader.message(value)))
        elif number == _NORMALIZER:
            normalizer = dict(reader.fields(reader.message(value)))
    if not pieces:
        reader.fail("has no pieces")
    kind = reader.integer(trainer, 3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise UnsupportedError(f"{path}: a vocabulary of whole words or single characters is not supported; unigrams and BPE are")
    if not reader.integer(normalizer, 5, 1):
        raise UnsupportedError(f"{path}: a vocabulary that keeps spaces as they are (escape_whitespaces false) is not supported")
    if reader.integer(trainer, 24, 0):
        raise UnsupportedError(f"{path}: a vocabulary with spaces at the ends of words (treat_whitespace_as_suffix) is not supported")
    texts, scores, kinds = ([entry[column] for entry in pieces] for column in range(3))
    usual = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2), "pad_token": (43, -1)}
    ids = {name: reader.integer(trainer, field, default) for name, (field, default) in usual.items()}
    vocabulary = SentencePieceVocabulary(
        pieces=[str(text) for text in texts],
        scores=[float(score) for score in scores],
        kinds=[int(entry) for entry in kinds],
        unigram=kind == _UNIGRAM,
        unknown_id=ids["unk_token"] if 0 <= ids["unk_token"] < len(pieces) else None,
        prefixes_space=bool(reader.integer(normalizer, 3, 1)),
        squeezes_spaces=bool(reader.integer(normalizer, 4, 1)),
        character_map=reader.message(normalizer.get(2, b"")),
        splits_user_pieces=True,
    )
    return SentencePieceFile(
        vocabulary=vocabulary, special_tokens={name: pieces[index][0] for name, index in ids.items() if 0 <= index < len(pieces)}
    )


def _piece(reader: _Reader, message: bytes) -> tuple[str, float, int]:
    fields = dict(reader.fields(message))
    score = fields.get(2, 0)
    try:
        text = reader.message(fields.get(1, b"")).decode()
    except UnicodeDecodeError:
        reader.fail("has a piece that is not UTF-8")
    return text, struct.unpack("<f", struct.pack("<I", score if isinstance(score, int) else 0))[0], reader.integer(fields, 3, PieceKind.NORMAL)


class _Reader:
    """Protocol buffers without a schema. Every value is an int (of a number of any width, as its bits) or bytes (of text and nested messages)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fields(self, message: bytes) -> Iterator[tuple[int, int | bytes]]:
        """(field number, value) in the order of the file."""
        position = 0
        while position < len(message):
            key, position = self._varint(message, position)
            width = key & 7
            if width == _VARINT:
                value, position = self._varint(message, position)
                yield key >> 3, value
                continue
            if width == _LENGTH_GIVEN:
                size, position = self._varint(message, position)
            elif width in (_FOUR_BYTES, _EIGHT_BYTES):
                size = 4 if width == _FOUR_BYTES else 8
            else:
                self.fail(f"has a field of the unknown kind {width}")
            if size > len(message) - position:
                self.fail("ends inside a field")
            part = message[position : position + size]
            position += size
            yield key >> 3, part if width == _LENGTH_GIVEN else int.from_bytes(part, "little")

    def integer(self, fields: dict[int, int | bytes], number: int, usual: int) -> int:
        value = fields.get(number, usual)
        if isinstance(value, bytes):
            self.fail(f"has text in field {number}, where a number was expected")
        return value - (1 << 64) if value >= 1 << 63 else value

    def message(self, value: int | bytes) -> bytes:
        if isinstance(value, int):
            self.fail("has a number where text was expected")
        return value

    def _varint(self, message: bytes, position: int) -> tuple[int, int]:
        value = 0
        for index in range(10):
            if position + index >= len(message):
                self.fail("ends inside a number")
            byte = message[position + index]
            value |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                return value, position + index + 1
        self.fail("has a number of more than ten bytes")

    def fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {what}; expected a SentencePiece vocabulary: download the file again, or use one with a tokenizer.json")
