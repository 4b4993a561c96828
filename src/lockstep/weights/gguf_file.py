"""The GGUF container (ggml's docs/gguf.md, versions 2 and 3, little-endian). Knows metadata and the directory; does not know what a key means.

Every count, length and offset is checked against the file before it is used, so a damaged file is a CheckpointError and never a large allocation.
Metadata values are skipped when the file is opened and decoded when they are asked for: a stage that needs no vocabulary does not pay for it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.weights.formats import FORMATS
from lockstep.weights.mapped_file import map_file
from lockstep.weights.number_format import U8, NumberFormat

NAME_BYTES_MAX = 65535
DIMENSIONS_MAX = 4
# The fewest bytes that an entry can take; they bound the counts in the header.
METADATA_ENTRY_BYTES_MIN = 8 + 4 + 1
TENSOR_ENTRY_BYTES_MIN = 8 + 4 + 8 + 4 + 8

_STRING, _ARRAY = 8, 9
# Value type id -> (numpy type, bytes). Booleans are one byte.
_SCALARS: dict[int, tuple[str, int]] = {
    0: ("<u1", 1), 1: ("<i1", 1), 2: ("<u2", 2), 3: ("<i2", 2), 4: ("<u4", 4), 5: ("<i4", 4),
    6: ("<f4", 4), 7: ("?", 1), 10: ("<u8", 8), 11: ("<i8", 8), 12: ("<f8", 8),
}  # fmt: skip
# Tensor type id -> name, for messages; those in FORMATS can be read. Those with two sizes behind the name (and Q4_2, Q4_3) are of older files.
_TENSOR_TYPES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "Q4_2", 5: "Q4_3", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    34: "TQ1_0", 35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """shape: outermost axis first (the file has it the other way round). data: the tensor's own bytes, mapped."""

    name: str
    shape: tuple[int, ...]
    number_format: NumberFormat
    data: memoryview

    def stored(self) -> U8:
        """The bytes as a read-only uint8 [n]."""
        return np.frombuffer(self.data, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """data: all bytes of the file, mapped. tensors: in the order of the file's directory. alignment: of the tensors' starts, in bytes."""

    path: Path
    data: memoryview
    metadata: Metadata
    alignment: int
    tensors: Mapping[str, GgufTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One entry of the tensor directory. offset: from the start of the data."""

    name: str
    shape: tuple[int, ...]
    number_format: NumberFormat
    offset: int
    nbytes: int


class Metadata(Mapping[str, Any]):
    """The file's key/value pairs. A value is decoded at each look-up: a bool, int, float, str, numpy array of numbers or list of str."""

    def __init__(self, path: Path, data: memoryview, places: Mapping[str, int]) -> None:
        self._path = path
        self._data = data
        self._places = places

    def __getitem__(self, key: str) -> Any:
        return _Cursor(self._path, self._data, self._places[key]).value(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def open_gguf(path: Path) -> GgufFile:
    """Read the header and the tensor directory of `path`. Raises CheckpointError if they do not fit the file, UnsupportedError for kinds we lack."""
    data = map_file(path)
    cursor = _Cursor(path, data, 0)
    if bytes(data[:4]) != b"GGUF":
        cursor.fail(f"starts with {bytes(data[:4])!r}, not with b'GGUF'; it is not a GGUF file")
    cursor.position = 4
    version = cursor.u32()
    if version in (0x02000000, 0x03000000):
        raise UnsupportedError(f"{path}: is a big-endian GGUF file; convert it to little-endian (gguf-convert-endian)")
    if version not in (2, 3):
        raise UnsupportedError(f"{path}: GGUF version {version} is not supported; versions 2 and 3 are")
    tensor_count, metadata_count = cursor.u64(), cursor.u64()
    cursor.check_count("metadata entries", metadata_count, METADATA_ENTRY_BYTES_MIN)
    cursor.check_count("tensors", tensor_count, TENSOR_ENTRY_BYTES_MIN)
    places: dict[str, int] = {}
    for _ in range(metadata_count):
        key = cursor.name("metadata key")
        if key in places:
            cursor.fail(f"has metadata key {key!r} twice")
        places[key] = cursor.position
        cursor.skip_value(key)
    metadata = Metadata(path, data, places)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        cursor.fail(f"has general.alignment {alignment!r}; a power of two was expected")
    entries = [_read_entry(cursor) for _ in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = _place_tensors(cursor, entries, data_start, alignment)
    return GgufFile(path=path, data=data, metadata=metadata, alignment=alignment, tensors=tensors)


def _read_entry(cursor: _Cursor) -> _Entry:
    name = cursor.name("tensor name")
    dimension_count = cursor.u32()
    if not 1 <= dimension_count <= DIMENSIONS_MAX:
        cursor.fail(f"tensor {name!r} has {dimension_count} dimensions; 1 to {DIMENSIONS_MAX} were expected")
    shape = tuple(reversed([cursor.u64() for _ in range(dimension_count)]))
    type_id, offset = cursor.u32(), cursor.u64()
    type_name = _TENSOR_TYPES.get(type_id)
    if type_name is None:
        cursor.fail(f"tensor {name!r} has the unknown type id {type_id}")
    number_format = FORMATS.get(type_name)
    if number_format is None:
        raise UnsupportedError(f"{cursor.path}: tensor {name!r} has type {type_name}, which is not supported; supported are {', '.join(FORMATS)}")
    value_count = 1
    for extent in shape:
        value_count *= extent
    if value_count == 0 or shape[-1] % number_format.block_values:
        cursor.fail(
            f"tensor {name!r} of type {type_name} has shape {shape}; rows of whole blocks of {number_format.block_values} values were expected"
        )
    nbytes = value_count // number_format.block_values * number_format.block_bytes
    return _Entry(name=name, shape=shape, number_format=number_format, offset=offset, nbytes=nbytes)


def _place_tensors(cursor: _Cursor, entries: list[_Entry], data_start: int, alignment: int) -> dict[str, GgufTensor]:
    """The directory with each tensor's bytes, checked: aligned, inside the file, no name twice, no tensor over another."""
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            cursor.fail(f"has tensor {entry.name!r} twice")
        if entry.offset % alignment:
            cursor.fail(f"tensor {entry.name!r} starts at {entry.offset}, which is not a multiple of the alignment {alignment}")
        start, end = data_start + entry.offset, data_start + entry.offset + entry.nbytes
        if end > len(cursor.data):
            cursor.fail(f"tensor {entry.name!r} needs bytes {start} to {end} of a file of {len(cursor.data)}; it was cut short")
        tensors[entry.name] = GgufTensor(name=entry.name, shape=entry.shape, number_format=entry.number_format, data=cursor.data[start:end])
    for first, second in itertools.pairwise(sorted(entries, key=lambda entry: entry.offset)):
        if first.offset + first.nbytes > second.offset:
            cursor.fail(f"tensors {first.name!r} and {second.name!r} lie over each other")
    return tensors


class _Cursor:
    """A position in the file; every read is checked against the end of the file first."""

    def __init__(self, path: Path, data: memoryview, position: int) -> None:
        self.path = path
        self.data = data
        self.position = position

    def fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {what}; copy or download the file again")

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self.data):
            self.fail(f"ends at byte {len(self.data)}, inside its header (which goes on to byte {end} at least); it was cut short or damaged")
        start, self.position = self.position, end
        return self.data[start:end]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def name(self, what: str) -> str:
        length = self.u64()
        if not 1 <= length <= NAME_BYTES_MAX:
            self.fail(f"has a {what} of {length} bytes; 1 to {NAME_BYTES_MAX} were expected")
        return self._text(self.take(length), what)

    def check_count(self, what: str, count: int, entry_bytes_min: int) -> None:
        if count * entry_bytes_min > len(self.data) - self.position:
            self.fail(f"claims {count} {what}, more than the file of {len(self.data)} bytes can hold")

    def skip_value(self, key: str) -> None:
        """Move past one value; checks its type and that it lies within the file."""
        value_type = self.u32()
        if value_type in _SCALARS:
            self.take(_SCALARS[value_type][1])
        elif value_type == _STRING:
            self.take(self.u64())
        elif value_type == _ARRAY:
            item_type, count = self._array_header(key)
            if item_type == _STRING:
                for _ in self._strings(count):
                    pass
            else:
                self.take(count * _SCALARS[item_type][1])
        else:
            self.fail(f"metadata key {key!r} has the unknown value type {value_type}")

    def value(self, key: str) -> Any:
        """Decode one value that `skip_value` has been over."""
        value_type = self.u32()
        if value_type == _STRING:
            return self._text(self.take(self.u64()), key)
        if value_type != _ARRAY:
            kind, size = _SCALARS[value_type]
            return np.frombuffer(self.take(size), kind)[0].item()
        item_type, count = self._array_header(key)
        if item_type == _STRING:
            return [self._text(self.data[start:end], key) for start, end in self._strings(count)]
        kind, size = _SCALARS[item_type]
        return np.frombuffer(self.take(count * size), kind)

    def _array_header(self, key: str) -> tuple[int, int]:
        item_type, count = self.u32(), self.u64()
        if item_type != _STRING and item_type not in _SCALARS:
            self.fail(f"metadata key {key!r} is an array of the unknown or nested value type {item_type}")
        self.check_count(f"items in metadata key {key!r}", count, 8 if item_type == _STRING else _SCALARS[item_type][1])
        return item_type, count

    def _strings(self, count: int) -> Iterator[tuple[int, int]]:
        """Start and end of each of `count` strings; leaves the position after them. A plain loop: vocabularies have 10**5 entries."""
        data, size, position, length_at = self.data, len(self.data), self.position, struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = position + 8
            if start > size:
                self.fail(f"ends at byte {size}, inside an array of strings; it was cut short or damaged")
            position = start + length_at(data, position)[0]
            if position > size:
                self.fail(f"ends at byte {size}, but a string in its header goes on to byte {position}; it was cut short or damaged")
            yield start, position
        self.position = position

    def _text(self, raw: memoryview, what: str) -> str:
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8 ({error.reason} at byte {error.start} of it)")
