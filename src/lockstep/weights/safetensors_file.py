"""One safetensors file (the format's README at huggingface/safetensors). Knows its header; does not know folders or models.

Our own reader, because the library's numpy side has no bfloat16 and copies what we map.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.weights.formats import FORMATS
from lockstep.weights.mapped_file import map_file

HEADER_BYTES_MAX = 100_000_000
DIMENSIONS_MAX = 8
# Bytes a value of each type that the format has; F32, F16 and BF16 can be read.
_VALUE_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
READABLE = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """start, end: bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFile:
    """data: all bytes of the file, mapped."""

    path: Path
    data: memoryview
    tensors: Mapping[str, StoredTensor]

    def read(self, name: str) -> NDArray[np.float32]:
        """float32 in the stored shape; a read-only view of the file where it can be. Raises UnsupportedError for other number types."""
        tensor = self.tensors[name]
        if tensor.dtype not in READABLE:
            raise UnsupportedError(
                f"{self.path}: tensor {name!r} has type {tensor.dtype}, which is not supported; use a checkpoint in {', '.join(READABLE)}"
            )
        return FORMATS[tensor.dtype].widen(self._bytes(tensor)).reshape(tensor.shape)

    def read_bytes(self, name: str, dtype: str) -> NDArray[np.uint8]:
        """uint8 in the stored shape, with a last axis more where a number has several bytes. Raises CheckpointError if the tensor has another
        type."""
        tensor = self.tensors[name]
        if tensor.dtype != dtype:
            raise CheckpointError(f"{self.path}: tensor {name!r} has type {tensor.dtype}, expected {dtype}; copy or download the file again")
        size = _VALUE_BYTES[dtype]
        return self._bytes(tensor).reshape(tensor.shape if size == 1 else (*tensor.shape, size))

    def _bytes(self, tensor: StoredTensor) -> NDArray[np.uint8]:
        return np.frombuffer(self.data, np.uint8, tensor.end - tensor.start, tensor.start)


def open_safetensors(path: Path) -> SafetensorsFile:
    """Read and check the header of `path`: every offset against the file, no gaps, no overlaps. Raises CheckpointError."""
    data = map_file(path)
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > HEADER_BYTES_MAX or 8 + length > len(data):
        _fail(path, f"claims a header of {length} bytes in a file of {len(data)}; it was cut short or is no safetensors file")
    try:
        header = json.loads(str(data[8 : 8 + length], "utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        _fail(path, f"its header is not JSON in UTF-8 ({error})")
    if not isinstance(header, dict):
        _fail(path, "its header is not a JSON object")
    tensors = {name: _entry(path, name, value, 8 + length) for name, value in header.items() if name != "__metadata__"}
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != end:
            _fail(path, f"tensor {name!r} starts at byte {tensor.start} where {end} was expected: tensors lie over each other or leave gaps")
        end = tensor.end
    if end != len(data):
        _fail(path, f"its tensors end at byte {end}, but the file has {len(data)}; it was cut short or damaged")
    return SafetensorsFile(path=path, data=data, tensors=tensors)


def _entry(path: Path, name: str, value: Any, data_start: int) -> StoredTensor:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        _fail(path, f"tensor {name!r} is {value!r:.200}; dtype, shape and data_offsets were expected")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _VALUE_BYTES:
        _fail(path, f"tensor {name!r} has the unknown type {dtype!r:.200}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(shape) > DIMENSIONS_MAX or len(offsets) != 2:
        _fail(path, f"tensor {name!r} has shape {shape!r:.200} and data_offsets {offsets!r:.200}; lists of integers, two offsets were expected")
    nbytes, widened_bytes = _VALUE_BYTES[dtype], 4
    for extent in shape:
        nbytes *= extent
        widened_bytes *= max(extent, 1)
    # Without a 0 among the extents the file's size bounds them; with one, only this does: arrays cannot have such shapes, though they hold nothing.
    if widened_bytes >= 1 << 63:
        _fail(path, f"tensor {name!r} has shape {shape}, larger than any memory")
    if offsets[1] - offsets[0] != nbytes:
        _fail(
            path, f"tensor {name!r} of type {dtype} and shape {shape} needs {nbytes} bytes, its data_offsets {offsets} give {offsets[1] - offsets[0]}"
        )
    return StoredTensor(dtype=dtype, shape=tuple(shape), start=data_start + offsets[0], end=data_start + offsets[1])


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _fail(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"{path}: {what}; copy or download the file again")
