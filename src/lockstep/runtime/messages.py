"""What travels between the driver and the stages besides the log's own records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.core.types import F32, U64


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """From stage to stage for step `step`. digests: uint64, of every rank the step passed so far, first stage first.
    tensors: by name, float32 [T, width]; empty for a step without rows."""

    epoch: int
    step: int
    digests: U64
    tensors: Mapping[str, F32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHello:
    """A stage's side of the handshake: what must be equal on all stages (agreement), what it holds, and what its memory allows.

    agreement: names and values compared one by one. layers: first and one past the last. kv_block_bytes: bytes of one block in all its layers.
    weight_bytes: resident weights. kv_bytes_max: memory it may spend on KV.
    """

    stage: int
    pid: int
    agreement: Mapping[str, str]
    layers: tuple[int, int]
    kv_block_bytes: int
    weight_bytes: int
    kv_bytes_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStart:
    """The driver's answer to all hellos: the pool, and the epoch to start."""

    epoch: int
    block_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReady:
    stage: int
    kv_bytes: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The stage's loop turns. step: the next step it will run. waits_for: what that step still lacks, for the watchdog's message."""

    stage: int
    step: int
    waits_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFailure:
    """The stage stops. code: of the error's kind in `errors`; message: its text."""

    stage: int
    code: str
    message: str
    step: int = -1
