"""A stage's part in the hand-over of KV between engines: what it holds for others, and what it fetches (PROTOCOL.md 19, 20).

Everything begins and ends by plan records; pulls and parts are served between steps. It knows blocks, layers and tags; not links, not the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.core.provenance import VOID, Provenance
from lockstep.core.records import StepPlan, Transfer
from lockstep.core.table import SlotTable
from lockstep.core.types import I32, U64
from lockstep.runtime.messages import ImportReport, KVPart, KVPull

GONE = (0, 0)
"""`KVPart.layers` where nothing comes."""

TransferId = tuple[str, int, int, int]


class KVAccess(Protocol):
    """The KV of one stage, by layer."""

    def read_kv(self, layers: range, blocks: Sequence[I32], count: int) -> Mapping[str, NDArray[Any]]:
        """A copy of positions 0 .. count of these blocks (one array a KV group) in these layers, by name."""
        ...

    def write_kv(self, layers: range, blocks: Sequence[I32], count: int, values: Mapping[str, NDArray[Any]]) -> None:
        """The reverse. Raises ValueError if the values do not fit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToStage:
    """A message for a stage of another engine."""

    instance: str
    stage: int
    message: KVPull | KVPart


@dataclass(frozen=True, slots=True, kw_only=True)
class _Export:
    blocks: tuple[I32, ...]
    computed: int


@dataclass(slots=True, kw_only=True)
class _Import:
    slot: int
    generation: int
    transfer: Transfer
    missing: set[int]
    tags: U64 | None = None


def _id(transfer: Transfer) -> TransferId:
    return (transfer.instance, transfer.epoch, transfer.step, transfer.number)


class Handover:
    """layers: that the stage holds. provenance: one a KV group."""

    def __init__(self, *, stage: int, epoch: int, layers: range, table: SlotTable, provenance: Sequence[Provenance], kv: KVAccess) -> None:
        self._stage = stage
        self._epoch = epoch
        self._layers = layers
        self._table = table
        self._provenance = provenance
        self._kv = kv
        self._exports: dict[TransferId, _Export] = {}
        self._waiting: list[tuple[str, KVPull]] = []
        self._imports: dict[TransferId, _Import] = {}

    def note(self, plan: StepPlan) -> list[ToStage]:
        """What a plan that has just been replayed begins and ends. Returns the pulls that it wants sent."""
        for i, transfer in enumerate(plan.exports.transfers):
            self._exports[_id(transfer)] = _Export(blocks=tuple(rows.row(i) for rows in plan.exports.blocks), computed=int(plan.exports.computed[i]))
        for transfer in plan.unexports:
            self._exports.pop(_id(transfer), None)
        over = set(plan.releases.generations.tolist()) | set(plan.ready.generations.tolist())
        self._imports = {key: entry for key, entry in self._imports.items() if entry.generation not in over}
        pulls: list[ToStage] = []
        for i, wanted in enumerate(plan.admissions.transfers):
            if wanted is not None:
                slot, generation = int(plan.admissions.slots[i]), int(plan.admissions.values["generation"][i])
                pulls += self._begin_import(slot, generation, wanted)
        return pulls

    def _begin_import(self, slot: int, generation: int, transfer: Transfer) -> list[ToStage]:
        self._imports[_id(transfer)] = _Import(slot=slot, generation=generation, transfer=transfer, missing=set(self._layers))
        pulls = []
        for source, (first, end) in enumerate(transfer.layers):
            shared = (max(first, self._layers.start), min(end, self._layers.stop))
            if shared[0] < shared[1]:
                pulls.append(ToStage(instance=transfer.instance, stage=source, message=KVPull(transfer=transfer, layers=shared, reader=self._stage)))
        return pulls

    # Serving

    def offer_pull(self, reader: str, pull: KVPull, next_step: int) -> list[ToStage]:
        """reader: the instance that asks. A pull for an export that has not begun waits; one that has ended, or is of another epoch, is told so."""
        transfer = pull.transfer
        if _id(transfer) in self._exports:
            return [self._part(reader, pull)]
        if transfer.epoch == self._epoch and transfer.step >= next_step:
            self._waiting.append((reader, pull))
            return []
        gone = KVPart(transfer=transfer, layers=GONE, tags=np.zeros(0, np.uint64), values={})
        return [ToStage(instance=reader, stage=pull.reader, message=gone)]

    def serve_waiting(self, next_step: int) -> list[ToStage]:
        """Pulls that came early, once their export has begun."""
        waiting, self._waiting = self._waiting, []
        return [part for reader, pull in waiting for part in self.offer_pull(reader, pull, next_step)]

    def _part(self, reader: str, pull: KVPull) -> ToStage:
        export = self._exports[_id(pull.transfer)]
        layers = range(max(pull.layers[0], self._layers.start), min(pull.layers[1], self._layers.stop))
        part = KVPart(
            transfer=pull.transfer,
            layers=(layers.start, layers.stop),
            tags=self._provenance[0].read(export.blocks[0], export.computed),
            values=self._kv.read_kv(layers, export.blocks, export.computed),
        )
        return ToStage(instance=reader, stage=pull.reader, message=part)

    # Fetching

    def take_part(self, part: KVPart) -> ImportReport | None:
        """Copy a part into the slot's blocks, if that (slot, generation) with that transfer is still in the table. The report, once it is complete or
        cannot become so. Late parts find nothing and are dropped."""
        entry = self._imports.get(_id(part.transfer))
        if entry is None:
            return None
        computed, layers = len(part.tags), range(*part.layers)
        if part.layers == GONE:
            return self._end(entry, 0)
        if wrong := self._misfit(entry, part, layers):
            return self._end(entry, 0, wrong)
        blocks = [self._table.blocks[group, entry.slot, : self._table.block_counts[group, entry.slot]] for group in range(len(self._provenance))]
        try:
            self._kv.write_kv(layers, blocks, computed, part.values)
        except ValueError as error:
            return self._end(entry, 0, f"its values do not fit: {error}")
        entry.missing.difference_update(layers)
        entry.tags = part.tags
        if entry.missing:
            return None
        for provenance, held in zip(self._provenance, blocks, strict=True):
            provenance.write_source(held, part.tags)
        return self._end(entry, computed)

    def _misfit(self, entry: _Import, part: KVPart, layers: range) -> str:
        """Why the part cannot be one of this import, or nothing."""
        known = int(self._table.columns["known"][entry.slot])
        if not 0 < len(part.tags) < known:
            return f"it has {len(part.tags)} positions, the request knows {known} tokens"
        if not entry.missing.issuperset(layers):
            return f"it has layers {part.layers}, {sorted(entry.missing)} are missing"
        if entry.tags is not None and not np.array_equal(entry.tags, part.tags):
            return "its tags are not those of the parts before"
        return "it holds positions that were never computed" if (part.tags == VOID).any() else ""

    def _end(self, entry: _Import, computed: int, refused: str = "") -> ImportReport:
        del self._imports[_id(entry.transfer)]
        return ImportReport(stage=self._stage, epoch=self._epoch, slot=entry.slot, generation=entry.generation, computed=computed, refused=refused)

    def audit(self) -> list[str]:
        wrong = [f"stage {self._stage}: import {key} is open" for key in self._imports]
        return wrong + [f"stage {self._stage}: a pull waits" for _ in self._waiting]
