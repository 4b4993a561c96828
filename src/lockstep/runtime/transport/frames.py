"""Numbered, checksummed frames: what makes a link out of a socket (PROTOCOL.md 9, 21; DESIGN.md "Numbered links").

A message is a list of parts: a fixed header, the encoded body, then each activation tensor's memory as it is. The checksum is taken when the
message is handed to the link and covers header, body and tensors; the number counts the messages of one (sender, receiver) pair within an epoch.
"""

from __future__ import annotations

import dataclasses
import struct
import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lockstep.errors import LinkError
from lockstep.runtime.messages import Activations, StageStart
from lockstep.runtime.stage import DRIVER
from lockstep.runtime.transport.codec import KIND_OF, VERSION, Codec, array_from_parts, array_parts
from lockstep.runtime.transport.numbers import LinkNumbers, Verdict

_HEADER = struct.Struct("<4sHHiiQQII")
_MAGIC = b"LKST"
MESSAGE_BYTES_MAX = 1 << 32
"""A larger message is refused by whoever would send it."""

Part = bytes | memoryview


class LinkWriter:
    """The sending end of the link from `source` to `destination`. checks: False takes no checksum, to measure what they cost; both ends alike.
    check_seconds: what checksums have taken here."""

    def __init__(self, source: int, destination: int, *, epoch: int = 0, checks: bool = True) -> None:
        self.check_seconds = 0.0
        self._source = source
        self._destination = destination
        self._epoch = epoch
        self._checks = checks
        self._number = 0
        self._codec = Codec()

    def begin(self, epoch: int) -> None:
        """What is packed from now on belongs to this epoch, and counts from 0."""
        assert epoch > self._epoch, (epoch, self._epoch)
        self._epoch, self._number = epoch, 0

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
        header = (_MAGIC, VERSION, kind, self._source, self._destination, self._epoch, self._number, len(parts))
        self._number += 1
        began = time.perf_counter()
        checksum = _checksum(header, parts) if self._checks else 0
        self.check_seconds += time.perf_counter() - began
        return [_HEADER.pack(*header, checksum), *parts]


class LinkReader:
    """The receiving end of every link that leads to `destination`. checks, check_seconds: as the writers'."""

    def __init__(self, destination: int, *, epoch: int = 0, checks: bool = True) -> None:
        self.check_seconds = 0.0
        self._destination = destination
        self._checks = checks
        self._numbers = LinkNumbers(destination, epoch)
        self._codec = Codec()
        self._waiting: list[Sequence[Any]] = []
        self._due: deque[Sequence[Any]] = deque()

    @property
    def epoch(self) -> int:
        return self._numbers.epoch

    def begin(self, epoch: int) -> None:
        """A new epoch begins at this end; what came for it early is due (`take_due`)."""
        self._numbers.begin(epoch)
        self._due.extend(self._waiting)
        self._waiting = []

    def renew(self, source: int, life: int) -> None:
        """As `LinkNumbers.renew`."""
        self._numbers.renew(source, life)

    def take_due(self) -> tuple[int, Any] | None:
        """The next (source, message) that had to wait for the present epoch, or None."""
        while self._due:
            if (found := self.unpack(self._due.popleft())) is not None:
                return found
        return None

    def unpack(self, frames: Sequence[Any]) -> tuple[int, Any] | None:
        """(source, message), or None for one of an older epoch, which is dropped, or of a newer one, which is kept. But the driver's StageStart of a
        newer epoch is the announcement that begins it here. Raises LinkError for damage, a gap, a repeat or disorder: at once."""
        if len(frames[0]) != _HEADER.size:
            raise LinkError(f"a header of {len(frames[0])} bytes, expected {_HEADER.size}")
        *header, checksum = _HEADER.unpack(frames[0])
        magic, version, kind, source, destination, epoch, number, count = header
        parts = list(frames[1:])
        if magic != _MAGIC or version != VERSION:
            raise LinkError(f"a message of format {magic!r} version {version}, this process speaks {_MAGIC!r} version {VERSION}")
        began = time.perf_counter()
        is_whole = count == len(parts) and (not self._checks or checksum == _checksum(tuple(header), parts))
        self.check_seconds += time.perf_counter() - began
        if not is_whole:
            raise LinkError(f"message {number} on the link {source} -> {destination} arrived damaged (checksum or number of parts)")
        if destination != self._destination:
            raise LinkError(f"a message for {destination} arrived at {self._destination}")
        if source == DRIVER and kind == KIND_OF[StageStart] and epoch > self._numbers.epoch:
            self.begin(epoch)
        verdict = self._numbers.accept(source, epoch, number)
        if verdict is Verdict.WAIT:
            self._waiting.append(frames)
        if verdict is not Verdict.TAKE:
            return None
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
