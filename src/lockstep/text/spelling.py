"""How a vocabulary spells bytes, and how pieces of it become text one after the other. Knows decoders; does not know ids or special tokens.

Three spellings are known, after the decoders of the `tokenizers` library that they must agree with:

    byte-level     every byte is a printable character (GPT-2's table); text is the UTF-8 of all bytes, replacement characters where that is broken
    metaspace      a space is written U+2581
    byte fallback  so it is, and bytes without a piece of their own are written <0xNN>; a run of those is text if it is UTF-8 as a whole,
                   else a replacement character for each
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

SPACE_MARK = "\u2581"
REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER: Mapping[str, int] = MappingProxyType(_byte_characters())


class PieceStream(Protocol):
    """Pieces in, text out. The texts of all calls, joined, are the decoded text of all pieces."""

    def push(self, piece: str) -> str:
        """Text that is certain now; an unfinished character is kept back."""
        ...

    def flush(self) -> str:
        """What was kept back, broken bytes as replacement characters."""
        ...


class Spelling(Protocol):
    """The decoder of one vocabulary."""

    def piece_bytes(self, piece: str) -> bytes:
        """The bytes that a piece stands for, in the middle of a text."""
        ...

    def stream(self) -> PieceStream: ...


class ByteLevel:
    """GPT-2's byte-level vocabularies."""

    def piece_bytes(self, piece: str) -> bytes:
        try:
            return bytes([BYTE_OF_CHARACTER[character] for character in piece])
        except KeyError:  # an added token, spelled as itself
            return piece.encode()

    def stream(self) -> PieceStream:
        return _ByteLevelStream(self)


class _ByteLevelStream:
    def __init__(self, spelling: ByteLevel) -> None:
        self._spelling = spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> str:
        return self._decoder.decode(self._spelling.piece_bytes(piece))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class Metaspace:
    """Vocabularies that mark spaces. first_piece_unspaced: the marks in the very first piece of a text are not spaces of it."""

    def __init__(self, *, first_piece_unspaced: bool) -> None:
        self._first_piece_unspaced = first_piece_unspaced

    def piece_bytes(self, piece: str) -> bytes:
        return piece.replace(SPACE_MARK, " ").encode()

    def stream(self) -> PieceStream:
        return _MetaspaceStream("" if self._first_piece_unspaced else " ")


class _MetaspaceStream:
    def __init__(self, first_space: str) -> None:
        self._space = first_space

    def push(self, piece: str) -> str:
        space, self._space = self._space, " "
        return piece.replace(SPACE_MARK, space)

    def flush(self) -> str:
        return ""


class ByteFallback:
    """Vocabularies that mark spaces and spell other bytes <0xNN>. strips_first_space: one space at the very beginning of a text is not part of it."""

    def __init__(self, *, strips_first_space: bool) -> None:
        self._strips_first_space = strips_first_space

    def piece_bytes(self, piece: str) -> bytes:
        match = _BYTE_PIECE.fullmatch(piece)
        return piece.replace(SPACE_MARK, " ").encode() if match is None else bytes([int(match[1], 16)])

    def stream(self) -> PieceStream:
        return _ByteFallbackStream(self._strips_first_space)


class _ByteFallbackStream:
    def __init__(self, strips_first_space: bool) -> None:
        self._run = bytearray()
        self._strip_next = strips_first_space

    def push(self, piece: str) -> str:
        match = _BYTE_PIECE.fullmatch(piece)
        if match is not None:
            self._run.append(int(match[1], 16))
            return ""
        return self._strip(self._end_run() + piece.replace(SPACE_MARK, " "))

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        if not self._strip_next or not text:
            return text
        self._strip_next = False
        return text.removeprefix(" ")
