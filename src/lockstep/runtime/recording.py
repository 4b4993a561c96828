"""A recording as a file: a magic line, then frames of msgpack with length and checksum, compressed as a whole. Nothing is ever unpickled.

The frames: one `Head`, one `Start`, an `Entry` a step, one `Rest`, and `StepColumns` of each rank that sent them. It knows how a recording is written
and read and what it holds; not how it comes about (`recorder`) nor how it is replayed (`retrace`).
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.records import StepPlan, StepResult
from lockstep.core.snapshot import TableSnapshot
from lockstep.core.table import TableShape
from lockstep.errors import CallerError, LinkError
from lockstep.runtime.messages import StepColumns
from lockstep.runtime.transport.codec import Codec

VERSION = 3
"""Of the file's format."""

SUFFIX = ".lockstep"

UNPACKED_BYTES_MAX = 2 << 30
"""A file that unpacks to more is refused, whatever it says of itself."""

_SHAPE_MAX = 1 << 40
"""Product of a table's sizes; above it a file speaks of a table that no memory holds."""

_MAGIC = b"lockstep recording "
_FRAME = struct.Struct("<BIQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What was recorded, and why. lockstep: the version that wrote it. time: UTC, ISO 8601. error_*: of the failure, the step -1 if it has none.
    with_tokens: ids are the true ones; else keyed hashes stand for them. departs: the first step at which a replay, made when the file was written,
    did not give the driver's own digest; -1 if none."""

    lockstep: str
    epoch: int
    incident: str
    time: str
    error_kind: str
    error_code: str
    error_text: str
    error_step: int
    shape: TableShape
    rank_count: int
    fingerprint: str
    with_tokens: bool
    departs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where the replay begins: the table, the digest's value, and results that had come and that no plan had needed yet."""

    table: TableSnapshot
    digest: int
    results: tuple[StepResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One step: its plan, the result that answered it with every rank's digest, and the driver's own digest. Without tokens these digests are keyed
    hashes of the true ones, equal where those are. replayed: what the digest of a replay of this file must be after the step, None if it ended before
    that."""

    plan: StepPlan
    result: StepResult
    digest: int
    replayed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Plans without a result, and how many entries and columns of ranks the file has."""

    plans: tuple[StepPlan, ...]
    entry_count: int
    column_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """columns: what ranks folded in the failing step (`stage` -1: the driver), where they could still say it."""

    head: Head
    start: Start
    entries: tuple[Entry, ...]
    unresolved: tuple[StepPlan, ...]
    columns: tuple[StepColumns, ...]


_FRAMES: tuple[type[Any], ...] = (Head, Start, Entry, Rest, StepColumns)


def to_bytes(recording: Recording) -> bytes:
    codec = Codec(_FRAMES)
    packer = zlib.compressobj(1)
    parts = [_MAGIC + f"{VERSION}\n".encode()]
    rest = Rest(plans=recording.unresolved, entry_count=len(recording.entries), column_count=len(recording.columns))
    for message in (recording.head, recording.start, *recording.entries, rest, *recording.columns):
        kind, body = codec.encode(message)
        parts.append(packer.compress(_FRAME.pack(kind, zlib.crc32(body), len(body)) + body))
    return b"".join([*parts, packer.flush()])


def write(path: Path, recording: Recording) -> None:
    """All of it or nothing, readable by this user alone. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(to_bytes(recording))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> Recording:
    """Raises CallerError for a file that is not there, is no recording, is of another version, or is damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CallerError(f"{path}: {error.strerror}; name a recording that an engine has written, *{SUFFIX}") from None
    line = data[:64].partition(b"\n")[0]
    if not line.startswith(_MAGIC):
        raise CallerError(f"{path} is not a recording: it should begin with {_MAGIC.decode()!r} and begins with {data[: len(_MAGIC)]!r}")
    if line != _MAGIC + str(VERSION).encode():
        found = line[len(_MAGIC) :].decode(errors="replace")
        raise CallerError(f"{path} has format {found}, this lockstep reads format {VERSION}; replay it with the version that wrote it")
    try:
        return _assemble(list(_frames(_unpack(data[len(line) + 1 :]))))
    except (ValueError, LinkError) as error:
        raise CallerError(f"{path} is damaged: {error}. Copy it again from where it was written; what is missing cannot be made again") from None


def _unpack(packed: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, UNPACKED_BYTES_MAX)
    except zlib.error as error:
        raise ValueError(f"it does not decompress ({error})") from None
    if unpacker.unconsumed_tail:
        raise ValueError(f"it unpacks to more than {UNPACKED_BYTES_MAX} bytes")
    if not unpacker.eof:
        raise ValueError(f"it ends early, after {len(packed)} compressed bytes")
    if unpacker.unused_data:
        raise ValueError(f"{len(unpacker.unused_data)} bytes follow its end")
    return data


def _frames(data: bytes) -> Iterator[Any]:
    codec, at, view = Codec(_FRAMES), 0, memoryview(data)
    while at < len(data):
        if at + _FRAME.size > len(data):
            raise ValueError(f"a frame begins at byte {at} of {len(data)} and has no room for its head")
        kind, checksum, length = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        if length > len(data) - at:
            raise ValueError(f"the frame at byte {at} should have {length} bytes, {len(data) - at} are left")
        body = view[at : at + length]
        if zlib.crc32(body) != checksum:
            raise ValueError(f"the frame at byte {at} has checksum {zlib.crc32(body):#010x}, should have {checksum:#010x}")
        yield codec.decode(kind, body)
        at += length


def _assemble(frames: Sequence[Any]) -> Recording:
    kinds = [type(frame) for frame in frames]
    rests = [i for i, frame in enumerate(frames) if isinstance(frame, Rest)]
    count = rests[0] - 2 if rests else 0
    if not rests or kinds != [Head, Start, *[Entry] * count, Rest, *[StepColumns] * (len(frames) - rests[0] - 1)]:
        raise ValueError(f"it should hold a head, a start, entries, a rest and columns, and holds {[kind.__name__ for kind in kinds[:4]]} ...")
    rest: Rest = frames[rests[0]]
    columns = frames[rests[0] + 1 :]
    if (count, len(columns)) != (rest.entry_count, rest.column_count):
        raise ValueError(f"it should hold {rest.entry_count} entries and {rest.column_count} columns, and holds {count} and {len(columns)}")
    shape = frames[0].shape
    sizes = (shape.slot_count, shape.length_max, shape.block_size, shape.group_count, shape.drafts_max + 1)
    if min(sizes) < 1 or math.prod(sizes) > _SHAPE_MAX:
        raise ValueError(f"no engine has a table of {shape}")
    entries = frames[2 : 2 + count]
    return Recording(head=frames[0], start=frames[1], entries=tuple(entries), unresolved=rest.plans, columns=tuple(columns))
