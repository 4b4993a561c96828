"""What travels between the driver and the stages besides the log's own records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from lockstep.core.records import Transfer
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

    agreement: names and values compared one by one. layers: first and one past the last. kv_block_bytes: of each KV group, bytes of one block in all
    its layers. weight_bytes: resident weights. kv_bytes_max: memory it may spend on KV.
    """

    stage: int
    pid: int
    agreement: Mapping[str, str]
    layers: tuple[int, int]
    kv_block_bytes: tuple[int, ...]
    weight_bytes: int
    kv_bytes_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStart:
    """Begins epoch `epoch`: the driver's answer to all hellos, and what ends the epoch before on a stage that lives on. It interrupts every wait;
    the stage drops table, provenance, imports and exports, keeps KV memory, and answers StageReady. weights: the checkpoint that every stage computes
    with in this epoch; empty: the one that the engine was started with."""

    epoch: int
    block_counts: tuple[int, ...]
    weights: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReady:
    """The stage has begun epoch `epoch`."""

    stage: int
    epoch: int
    kv_bytes: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The stage's loop turns. step: the next step it will run. waits_for: what that step still lacks, for the watchdog's message.
    check_seconds: what its run-time checks have taken since it started."""

    stage: int
    step: int
    waits_for: str
    check_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFailure:
    """The stage has stopped working in epoch `epoch` and waits for the next. code: of the error's kind in `errors`; message: its text; step and
    concerned as in `errors.InternalError`."""

    stage: int
    epoch: int
    code: str
    message: str
    step: int = -1
    concerned: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnsRequest:
    """Asks a stage what its digest folded for step `step` of epoch `epoch`; answered also after a failure, until the next epoch begins."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """The answer: names and arrays in the order in which they were folded; empty if the stage has not come to that step or has forgotten it."""

    stage: int
    epoch: int
    step: int
    columns: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarRequest:
    """To every stage: requests with this grammar wait until the one that samples has compiled it (PROTOCOL.md 26). key: names it by its content."""

    epoch: int
    key: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarReport:
    """The answer, of the stage that samples. error: why it does not compile, else empty."""

    epoch: int
    key: str
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPull:
    """From a stage that imports to a source stage: send your layers within layers[0] .. layers[1] of this transfer. reader: where the part goes."""

    transfer: Transfer
    layers: tuple[int, int]
    reader: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPart:
    """The answer. tags: uint64 [computed], the source's provenance tags, VOID where it has none. values: by name, what the executor's `read_kv` gave.
    layers (0, 0): the transfer is gone, nothing comes."""

    transfer: Transfer
    layers: tuple[int, int]
    tags: U64
    values: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """From a stage to its driver: the import into (slot, generation) is complete with `computed` positions, or has failed (computed 0). refused: what
    was wrong with what came; empty if nothing was, or nothing came."""

    stage: int
    epoch: int
    slot: int
    generation: int
    computed: int
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRequest:
    """To every stage: make these weights ready beside those that are computed with, for an epoch that names them. weights: names a checkpoint, its
    content and its path."""

    epoch: int
    weights: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReport:
    """A stage's answer. error: why it cannot; empty if they are ready."""

    epoch: int
    stage: int
    weights: str
    error: str
