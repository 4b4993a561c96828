"""The records of the log, in their final shape: what the driver writes (`StepPlan`) and what the sampling rank writes (`StepResult`).

One frozen object a message with columns inside. `columns()` of a record names what the digest folds, in order.
Records say nothing about how they travel; `runtime.transport.codec` turns them into bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.logprobs import LogprobColumns
from lockstep.core.ragged import Ragged
from lockstep.core.schema import ADMITTED
from lockstep.core.shaping import PLAIN, Shaping
from lockstep.core.types import I32, I64, U8, U64

Columns = dict[str, NDArray[Any]]
"""What the digest folds of a record or a layout, by name, in order."""


def _int32(count: int = 0) -> I32:
    return np.zeros(count, np.int32)


def _int64(count: int = 0) -> I64:
    return np.zeros(count, np.int64)


def _ragged() -> Ragged:
    return Ragged(starts=_int32(1), values=_int32())


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What an admission carries beside its columns, of a size that no column can have. `hash64` goes into the digest of every step that samples it.

    stop_ids: token ids that end the request. shaping: what changes its logits. cache_salt: prefix-cache blocks are shared only between equal salts.
    extras: named byte strings for later use (grammar, bias, adapter); whoever adds one gives it a meaning here.
    """

    stop_ids: tuple[int, ...] = ()
    shaping: Shaping = PLAIN
    cache_salt: bytes = b""
    extras: Mapping[str, bytes] = field(default_factory=dict)

    def hash64(self) -> int:
        """Of the whole record: the column `side_hash`."""
        extras = [part for key in sorted(self.extras) for part in (key.encode(), self.extras[key])]
        return _hash64(np.array(self.stop_ids, np.int64).tobytes(), self.shaping.data(), self.cache_salt, *extras)

    def kv_salt(self) -> int:
        """Of what shapes KV besides tokens: the column `kv_salt`. Requests that may share blocks have it equal."""
        return _hash64(self.cache_salt)


def named(prefix: str, columns: Mapping[str, NDArray[Any]]) -> Columns:
    """columns under `prefix.name`."""
    return {f"{prefix}.{name}": array for name, array in columns.items()}


def _hash64(*parts: bytes) -> int:
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return int.from_bytes(hasher.digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Names KV that is held for another engine: the exporting engine's instance, its epoch and step, and a number (PROTOCOL.md 19, 20).
    address: where the source stages serve pulls; empty in a record that ends a transfer. layers: of each source stage, first and one past the last;
    empty where the reader knows nothing of stages."""

    instance: str
    epoch: int
    step: int
    number: int
    address: str = ""
    layers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """(slot, generation) pairs: releases; also the slots of exports and unexports."""

    slots: I32 = field(default_factory=_int32)
    generations: I64 = field(default_factory=_int64)

    def __post_init__(self) -> None:
        assert len(self.slots) == len(self.generations), (len(self.slots), len(self.generations))

    def columns(self) -> Columns:
        return {"slots": self.slots, "generations": self.generations}


@dataclass(frozen=True, slots=True, kw_only=True)
class Admissions:
    """Requests that get a slot. values: every admitted column of `schema.COLUMNS` [A], and per admission its known tokens, their marks, its
    side record, and for an import (column `importing`) the transfer to fetch. marks: uint8, MARK_TOKEN or MARK_EMBEDDING for each of `tokens`."""

    slots: I32 = field(default_factory=_int32)
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    tokens: Ragged = field(default_factory=_ragged)
    marks: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))
    sides: tuple[Side, ...] = ()
    transfers: tuple[Transfer | None, ...] = ()

    def __post_init__(self) -> None:
        if len(self.slots):
            assert set(self.values) == set(ADMITTED), f"admission columns {sorted(self.values)}, schema wants {sorted(ADMITTED)}"
        count = len(self.slots)
        assert len(self.tokens) == len(self.sides) == len(self.transfers) == count, (count, len(self.tokens), len(self.sides), len(self.transfers))
        assert len(self.marks) == len(self.tokens.values), (len(self.marks), len(self.tokens.values))

    def columns(self) -> Columns:
        if not len(self.slots):
            return {"slots": self.slots}
        ordered = {name: self.values[name] for name in ADMITTED}
        transfers = np.array([-1 if transfer is None else transfer.number for transfer in self.transfers], np.int64)
        sequence: Columns = {
            "transfers": transfers,
            "tokens.starts": self.tokens.starts,
            "tokens": self.tokens.values,
            "marks": self.marks.astype(np.int32),
        }
        return {"slots": self.slots, **ordered, **sequence}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Imports that may start: computed positions per (slot, generation); 0 means that the transfer failed and the request prefills here."""

    slots: I32 = field(default_factory=_int32)
    generations: I64 = field(default_factory=_int64)
    computed: I32 = field(default_factory=_int32)

    def __post_init__(self) -> None:
        assert len(self.slots) == len(self.generations) == len(self.computed), (len(self.slots), len(self.generations), len(self.computed))

    def columns(self) -> Columns:
        return {"slots": self.slots, "generations": self.generations, "computed": self.computed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exports:
    """KV kept readable for another engine after its request's release: blocks per KV group and the number of computed positions.
    blocks[g] has one row an export."""

    transfers: tuple[Transfer, ...] = ()
    slots: Slots = field(default_factory=Slots)
    computed: I32 = field(default_factory=_int32)
    blocks: tuple[Ragged, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.transfers)
        assert len(self.slots.slots) == len(self.computed) == count, (len(self.slots.slots), len(self.computed), count)
        assert all(len(rows) == count for rows in self.blocks), (count, [len(rows) for rows in self.blocks])

    def columns(self) -> Columns:
        blocks = {f"blocks{g}{part}": array for g, of in enumerate(self.blocks) for part, array in ((".starts", of.starts), ("", of.values))}
        return {**self.slots.columns(), "computed": self.computed, **blocks}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What the step computes: for (slot, generation) up to `counts` tokens. starts and samples are what the scheduler assumed
    (starts -1: unknown to it); every replica checks them when it resolves (PROTOCOL.md 5)."""

    slots: I32 = field(default_factory=_int32)
    generations: I64 = field(default_factory=_int64)
    counts: I32 = field(default_factory=_int32)
    starts: I32 = field(default_factory=_int32)
    samples: I32 = field(default_factory=_int32)

    def __post_init__(self) -> None:
        lengths = (len(self.slots), len(self.generations), len(self.counts), len(self.starts), len(self.samples))
        assert len(set(lengths)) == 1, lengths

    def __len__(self) -> int:
        return len(self.slots)

    def columns(self) -> Columns:
        return {"slots": self.slots, "generations": self.generations, "counts": self.counts, "starts": self.starts, "samples": self.samples}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBlocks:
    """Blocks appended to slots' block lists: entry i gives blocks.row(i) to slots[i] in KV group groups[i]."""

    slots: I32 = field(default_factory=_int32)
    groups: I32 = field(default_factory=_int32)
    blocks: Ragged = field(default_factory=_ragged)

    def __post_init__(self) -> None:
        assert len(self.slots) == len(self.groups) == len(self.blocks), (len(self.slots), len(self.groups), len(self.blocks))

    def columns(self) -> Columns:
        return {"slots": self.slots, "groups": self.groups, "blocks.starts": self.blocks.starts, "blocks": self.blocks.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What step `step` computes. It is resolved when exactly the results of steps 0 .. horizon-1 have been applied.
    The order of work is the order of the fields (PROTOCOL.md 1)."""

    epoch: int
    step: int
    horizon: int
    releases: Slots = field(default_factory=Slots)
    admissions: Admissions = field(default_factory=Admissions)
    ready: Ready = field(default_factory=Ready)
    exports: Exports = field(default_factory=Exports)
    unexports: tuple[Transfer, ...] = ()
    new_blocks: NewBlocks = field(default_factory=NewBlocks)
    rows: Rows = field(default_factory=Rows)

    def columns(self) -> Columns:
        """Parts without an entry have one empty column, so that a plan's shape shows in what is folded."""
        ended = [t.number for t in self.exports.transfers] + [t.number for t in self.unexports]
        columns: Columns = {"head": np.array([self.epoch, self.step, self.horizon, *ended], np.int64)}
        parts = ("releases", "admissions", "ready", "exports", "new_blocks", "rows")
        for part in parts:
            columns |= named(part, getattr(self, part).columns())
        return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log probabilities of prompt tokens that a step told [N], keyed by where they stand: token `positions[i]` of (slots[i], generations[i]).
    Outside the digest, and for the driver alone (PROTOCOL.md 18)."""

    slots: I32
    generations: I64
    positions: I32
    columns: LogprobColumns

    def __post_init__(self) -> None:
        lengths = (len(self.slots), len(self.generations), len(self.positions), len(self.columns))
        assert len(set(lengths)) == 1, lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the sampling rank decided in step `step`: per sampled (slot, generation) the accepted tokens, the finish code and the next drafts.
    logprobs: of the accepted tokens, in their order; NaN for a row that asked for none.
    reasons: what a logits processor failed with, one a row, empty where none did; empty as a whole where no row's did. Outside the digest.
    digests: uint64, of every rank that the step passed through, first stage first; the last is the sampling rank's own."""

    epoch: int
    step: int
    slots: I32 = field(default_factory=_int32)
    generations: I64 = field(default_factory=_int64)
    tokens: Ragged = field(default_factory=_ragged)
    finishes: I32 = field(default_factory=_int32)
    drafts: Ragged = field(default_factory=_ragged)
    logprobs: LogprobColumns | None = None
    prompt_logprobs: PromptLogprobs | None = None
    digests: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        lengths = (len(self.slots), len(self.generations), len(self.tokens), len(self.finishes), len(self.drafts))
        assert len(set(lengths)) == 1, lengths
        assert len(self.reasons) in (0, len(self.slots)), (len(self.reasons), len(self.slots))

    def __len__(self) -> int:
        return len(self.slots)

    def columns(self) -> Columns:
        return {
            "head": np.array([self.epoch, self.step], np.int64),
            "slots": self.slots,
            "generations": self.generations,
            "tokens.starts": self.tokens.starts,
            "tokens": self.tokens.values,
            "finishes": self.finishes,
            "drafts.starts": self.drafts.starts,
            "drafts": self.drafts.values,
        }
