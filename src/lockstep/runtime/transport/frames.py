"""Numbered, checksummed frames: what makes a link out of a socket (PROTOCOL.md 9; DESIGN.md "Numbered links").

A message is a list of parts: a fixed header, the encoded body, then each activation tensor's memory as it is. The checksum is taken when the
message is handed to the link and covers header, body and tensors; the number counts the messages of one (sender, receiver) pair within an epoch.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lockstep.errors import LinkError
from lockstep.runtime.messages import Activations
from lockstep.runtime.transport.codec import VERSION, Codec, array_from_parts, array_parts

_HEADER = struct.Struct("<4sHHiiQII")
_MAGIC = b"LKST"
MESSAGE_BYTES_MAX = 1 << 32
"""A larger message is refused by whoever would send it."""

Part = bytes | memoryview


class LinkWriter:
    """The sending end of the link from `source` to `destination`."""

    def __init__(self, source: int, destination: int) -> None:
        self._source = source
        self._destination = destination
        self._number = 0
        self._codec = Codec()

    def pack(self, message: Any) -> list[Part]:
        """The message's parts. Tensor parts alias the message's arrays, which are frozen from now on and must not be written again."""
        tensors: list[Part] = []
        shapes: list[tuple[str, str, tuple[int, ...]]] = []
        if isinstance(message, Activations):
            for name, tensor in message.tensors.items():
                tensor.flags.writeable = False
                dtype, shape, data = array_parts(tensor)
                shapes.append((name, dtype, shape))
                tensors.append(data)
            message = dataclasses.replace(message, tensors={})
        kind, body = self._codec.encode(message)
        parts: list[Part] = [body, msgspec.msgpack.encode(shapes), *tensors] if shapes else [body]
        size = sum(len(part) for part in parts)
        if size > MESSAGE_BYTES_MAX:
            raise LinkError(f"a message of {size} bytes is over the limit of {MESSAGE_BYTES_MAX}")
        header = (_MAGIC, VERSION, kind, self._source, self._destination, self._number, len(parts))
        self._number += 1
        return [_HEADER.pack(*header, _checksum(header, parts)), *parts]


class LinkReader:
    """The receiving end of every link that leads to `destination`."""

    def __init__(self, destination: int) -> None:
        self._destination = destination
        self._numbers: dict[int, int] = {}
        self._codec = Codec()

    def unpack(self, frames: Sequence[Any]) -> tuple[int, Any]:
        """(source, message). Raises LinkError for damage, a gap, a repeat or disorder: at once, never a silent wait."""
        if len(frames[0]) != _HEADER.size:
            raise LinkError(f"a header of {len(frames[0])} bytes, expected {_HEADER.size}")
        *header, checksum = _HEADER.unpack(frames[0])
        magic, version, kind, source, destination, number, count = header
        parts = list(frames[1:])
        if magic != _MAGIC or version != VERSION:
            raise LinkError(f"a message of format {magic!r} version {version}, this process speaks {_MAGIC!r} version {VERSION}")
        if count != len(parts) or checksum != _checksum(tuple(header), parts):
            raise LinkError(f"message {number} on the link {source} -> {destination} arrived damaged (checksum or number of parts)")
        if destination != self._destination:
            raise LinkError(f"a message for {destination} arrived at {self._destination}")
        expected = self._numbers.get(source, 0)
        if number != expected:
            raise LinkError(f"link {source} -> {destination}: message {expected} comes next, got message {number}")
        self._numbers[source] = expected + 1
        message = self._codec.decode(kind, parts[0])
        if isinstance(message, Activations) and count > 1:
            message = dataclasses.replace(message, tensors=_tensors(parts))
        return source, message


def _tensors(parts: Sequence[Any]) -> dict[str, np.ndarray[Any, Any]]:
    try:
        shapes = msgspec.msgpack.decode(parts[1], type=list[tuple[str, str, tuple[int, ...]]])
        return {name: array_from_parts(dtype, shape, part) for (name, dtype, shape), part in zip(shapes, parts[2:], strict=True)}
    except (msgspec.DecodeError, ValueError) as error:
        raise LinkError(f"activation tensors do not decode: {error}") from error


def _checksum(header: tuple[Any, ...], parts: Sequence[Any]) -> int:
    value = zlib.crc32(_HEADER.pack(*header, 0))
    for part in parts:
        value = zlib.crc32(part, value)
    return value
