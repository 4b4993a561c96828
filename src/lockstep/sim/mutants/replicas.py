"""Loosened replicas: tables, what the digest covers, provenance. On the first stage's replica only, or on all alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.core.digest import Digest
from lockstep.core.layout import BatchLayout
from lockstep.core.provenance import Provenance
from lockstep.core.records import NewBlocks, Ready, StepPlan, StepResult, named
from lockstep.core.table import SlotTable
from lockstep.core.types import F32
from lockstep.runtime.driver import Driver
from lockstep.runtime.messages import Activations
from lockstep.runtime.replay import Replica
from lockstep.runtime.stage import Send, Stage
from lockstep.sim.mutants.mutant import (
    ALL,
    ONE,
    UNSEEN,
    MakeParts,
    Mutant,
    Witness,
    of_provenance,
    of_stage,
    of_table,
    watched,
)
from lockstep.sim.mutants.setting import ANY, Setting
from lockstep.sim.mutants.watched_table import WatchedTable
from lockstep.sim.parts import Parts

# Rules 1 and 3: what a step changes, and when


class ComputedWaits(WatchedTable):
    """A chunk advances `computed` only once the step's result is in."""

    def __init__(self, *given: Any, **named_given: Any) -> None:
        super().__init__(*given, **named_given)
        self._quiet: dict[int, tuple[Any, Any, Any]] = {}

    def note(self, layout: BatchLayout) -> None:
        quiet = np.setdiff1d(np.arange(layout.row_count), layout.sample_row)
        slots = layout.slot[quiet]
        before = self.columns["computed"][slots]
        super().note(layout)
        self.did(len(quiet) > 0)
        self._quiet[layout.step] = (slots, layout.generation[quiet], self.columns["computed"][slots])
        self.columns["computed"][slots] = before

    def apply_result(self, result: StepResult) -> None:
        super().apply_result(result)
        slots, generations, computed = self._quiet.pop(result.step)
        same = self.columns["generation"][slots] == generations
        self.columns["computed"][slots[same]] = computed[same]


class OptimisticComputed(WatchedTable):
    """C1-04: positions run ahead as if every draft had been accepted."""

    def apply_result(self, result: StepResult) -> None:
        c, slots = self.columns, result.slots
        live = np.flatnonzero(c["generation"][slots] == result.generations)
        slots, most = slots[live], c["pending_count"][slots[live]]
        super().apply_result(result)
        rejected = most - result.tokens.lengths()[live]
        self.did(rejected > 0)
        c["computed"][slots] += rejected


class DraftsPastCap(WatchedTable):
    """Rule 16: drafts are not cut where the reservation ends."""

    def resolve(self, plan: StepPlan) -> BatchLayout:
        cap = self.columns["length_cap"]
        asked = cap.copy()
        cap[:] = self.shape.length_max
        layout = super().resolve(plan)
        cap[:] = asked
        past = layout.start + layout.count > asked[layout.slot] - 1
        self.did(past & (layout.count > 1) & (layout.start + layout.count > layout.known))
        return replace(layout, length_cap=asked[layout.slot[layout.sample_row]])


class ComputesFinished(WatchedTable):
    """Rows of a request that has ended, in plans already written, are computed, and their results applied. (Harmless in the protocol's model, which
    checks neither caps nor deliveries.)"""

    def resolve(self, plan: StepPlan) -> BatchLayout:
        finished = self.columns["finished"]
        self.did(finished[plan.rows.slots] != 0)
        before = finished.copy()
        finished[:] = 0
        layout = super().resolve(plan)
        finished[:] = before
        return layout


class SchedulesForItself(WatchedTable):
    """C1-15: the replica leaves out the last row of a plan with more tokens than it would have taken."""

    def resolve(self, plan: StepPlan) -> BatchLayout:
        rows = plan.rows
        if len(rows) < 2 or int(rows.counts.sum()) <= 6:
            return super().resolve(plan)
        self.did(True)
        fewer = {name: array[:-1] for name, array in rows.columns().items()}
        return super().resolve(replace(plan, rows=replace(rows, **fewer)))


class TakesItsOwnBlocks(WatchedTable):
    """A wrong entry in a block table: the block below the one that the plan gave."""

    def _extend(self, new: NewBlocks) -> None:
        super()._extend(new)
        for slot, group in zip(new.slots.tolist(), new.groups.tolist(), strict=True):
            last = self.block_counts[group, slot] - 1
            self.did(self.blocks[group, slot, last] > 0)
            self.blocks[group, slot, last] = max(0, self.blocks[group, slot, last] - 1)


class AddsToSeeds(WatchedTable):
    """The draws of a request are keyed by another seed than was asked for."""

    def resolve(self, plan: StepPlan) -> BatchLayout:
        layout = super().resolve(plan)
        self.did(len(layout.sample_row) > 0)
        return replace(layout, sampling=replace(layout.sampling, seed=layout.sampling.seed + np.uint64(1)))


class DrawsOnePositionLater(WatchedTable):
    """C3-09: draws are keyed by the position of the last input, not by that of the token to be drawn."""

    def resolve(self, plan: StepPlan) -> BatchLayout:
        layout = super().resolve(plan)
        self.did(len(layout.sample_row) > 0)
        return replace(layout, sampling=replace(layout.sampling, position=layout.sampling.position - np.int32(1)))


class StartsImportsAtKnown(WatchedTable):
    """A ready record is taken for a whole import, whatever it says."""

    def _make_ready(self, ready: Ready) -> None:
        super()._make_ready(ready)
        whole = self.columns["known"][ready.slots] - 1
        self.did(self.columns["computed"][ready.slots] != whole)
        self.columns["computed"][ready.slots] = whole


# Rule 2: no more results than the horizon says


class EagerReplica(Replica):
    """Applies whatever results have come."""

    witness = UNSEEN

    def run(self, plan: StepPlan) -> BatchLayout:
        if self.buffered_count > plan.horizon - self.table.applied:
            self.witness.note(plan.epoch, plan.step)
        while self.buffered_count:
            self.table.apply_result(self._results.pop(self.table.applied))
        return super().run(plan)


class EagerStage(Stage):
    witness = UNSEEN

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._replica = watched(EagerReplica, self.witness)(self.table, Digest(self.epoch))


# Rule 8: a digest of less than all, and what then goes unseen


class NarrowReplica(Replica):
    """Folds ids, positions, block tables and sample marks only."""

    def _fold(self, plan: StepPlan, applied: Sequence[StepResult], layout: BatchLayout) -> None:
        columns = named("layout", layout.columns())
        kept = ("layout.token_ids", "layout.positions", "layout.block_tables0", "layout.sample_row")
        self.digest.fold([columns[name] for name in kept])
        self._folded.append((plan.step, columns))


class NarrowStage(Stage):
    """flips: a class of table for the stage that samples."""

    witness = UNSEEN
    flips: type[WatchedTable] = WatchedTable

    def __init__(self, **given: Any) -> None:
        table: SlotTable = given["table"]
        if given["index"] == given["count"] - 1:
            table = watched(self.flips, self.witness)(table.shape)
        super().__init__(**{**given, "table": table})
        self._replica = NarrowReplica(table, Digest(self.epoch))


class NarrowDriver(Driver):
    def _begin(self) -> None:
        super()._begin()
        self._replica = NarrowReplica(self._replica.table, Digest(self.scheduler.epoch))


class OtherSeedUnseen(NarrowStage):
    flips = AddsToSeeds


class ForgetsStops(WatchedTable):
    """The stop ids of the layout are empty."""

    def resolve(self, plan: StepPlan) -> BatchLayout:
        layout = super().resolve(plan)
        self.did(len(layout.stop_ids.values) > 0)
        none = replace(layout.stop_ids, starts=np.zeros_like(layout.stop_ids.starts), values=layout.stop_ids.values[:0])
        return replace(layout, stop_ids=none)


class StopsUnseen(NarrowStage):
    flips = ForgetsStops


class PromptLengthUnseen(NarrowStage):
    class OtherPromptLength(WatchedTable):
        def resolve(self, plan: StepPlan) -> BatchLayout:
            layout = super().resolve(plan)
            self.did(len(layout.prompt_length) > 0)
            return replace(layout, prompt_length=layout.prompt_length + np.int32(1))

    flips = OtherPromptLength


# Rules 12 and 13: provenance, which knows no epoch; what is noted as epoch 0 is right in runs without a failure


class OneTagABlock(Provenance):
    """The tag of a block is that of whatever was written there last."""

    witness = UNSEEN

    def set(self, layout: BatchLayout) -> None:
        if (layout.count > 1).any():
            self.witness.note(0, layout.step)
        super().set(layout)
        blocks, _ = self._addresses(layout)
        for block, tag in zip(blocks, layout.tags, strict=True):
            self.tags[block] = tag


class VoidsNothing(Provenance):
    """A write leaves the tags that stand behind it in its blocks."""

    witness = UNSEEN

    def void(self, layout: BatchLayout) -> None:
        self.witness.note(0, layout.step)


class TagsBeforeWriting(Provenance):
    """A tag is set before the layers have written."""

    witness = UNSEEN

    def void(self, layout: BatchLayout) -> None:
        self.witness.note(0, layout.step)
        super().void(layout)
        super().set(layout)


def _kept_provenance() -> Mapping[str, MakeParts]:
    """Tags outlive the epoch, as the KV of a stage that lives on does."""

    def parts(witness: Witness) -> Parts:
        kept: dict[tuple[int, ...], Provenance] = {}

        def make(*given: int, stage: int) -> Provenance:
            if (*given, stage) in kept:
                witness.note(0, 0)
            return kept.setdefault((*given, stage), Provenance(*given))

        return Parts(make_provenance=make)

    return {ALL: parts}


# C1-02, C7-07: what a stage keeps and sends


class ReusesSendBuffer(Stage):
    """C1-02: activations are sent from one buffer, which the next step overwrites before they have arrived."""

    witness = UNSEEN

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._buffer: F32 = np.zeros((0, 0), np.float32)

    def _compute(self, layout: BatchLayout, received: Any) -> list[Send]:
        sends = super()._compute(layout, received)
        message = sends[0].message
        if not isinstance(message, Activations) or not message.tensors:
            return sends
        (name, hidden), before = next(iter(message.tensors.items())), self._buffer
        if len(before):
            self.witness.note(self.epoch, layout.step)
            shared = min(len(before), len(hidden))
            before[:shared] = hidden[:shared]
        self._buffer = hidden = hidden.copy()
        return [replace(sends[0], message=replace(message, tensors={name: hidden}))]


class KeepsActivations(Stage):
    """C7-07: what has been computed stays queued."""

    witness = UNSEEN

    def _compute(self, layout: BatchLayout, received: Any) -> list[Send]:
        if received is not None:
            self.witness.note(self.epoch, layout.step)
            self._activations[layout.step] = received
        return super()._compute(layout, received)


_DRAFTS, _ASYNC, _TWO_STAGES = Setting(drafts=True), Setting(asynchronous=True), Setting(stages_least=2)
_HAND_OVER = Setting(hand_over=True, faults=("kv-part-lost", "kv-pull-lost"))


def _mutant(kind: str, name: str, loosens: str, parts: Mapping[str, MakeParts], setting: Setting = ANY, equivalent: str | None = None) -> Mutant:
    return Mutant(name=name, kind=kind, loosens=loosens, parts=parts, setting=setting, equivalent=equivalent)


def _narrow(stage: type[NarrowStage]) -> Mapping[str, MakeParts]:
    """All fold too little; the table of the last stage alone is wrong."""
    return {ONE: lambda witness: Parts(make_stage=watched(stage, witness), make_driver=NarrowDriver)}


_REWRITTEN = "a position is read only below `computed`, and every position below it was written, and tagged, after whatever its block held before"
_BETWEEN_STEPS = "a stage that fails in a step loses its tags, and nobody reads them between their setting and the write"

MUTANTS: Sequence[Mutant] = (
    _mutant("rule 2", "applies-what-came", "a replica applies results beyond the horizon", of_stage(EagerStage), _ASYNC),
    _mutant("rule 3", "computed-waits", "a chunk advances `computed` when the result comes", of_table(ComputedWaits)),
    _mutant("rule 8", "seed-undigested", "the digest leaves out seeds; one is wrong on the last stage", _narrow(OtherSeedUnseen)),
    _mutant("rule 8", "stops-undigested", "the digest leaves out stop ids; the last stage has none", _narrow(StopsUnseen)),
    _mutant(
        "rule 8",
        "prompt-length-undigested",
        "the digest leaves out prompt lengths; the last stage's are wrong",
        _narrow(PromptLengthUnseen),
    ),
    _mutant("rule 12", "one-tag-a-block", "a block has one chain value", of_provenance(OneTagABlock), _DRAFTS),
    _mutant("rule 12", "voids-nothing", "a write leaves the tags behind it", of_provenance(VoidsNothing), _DRAFTS, _REWRITTEN),
    _mutant("rule 13", "tags-before-writing", "a tag is set before the write", of_provenance(TagsBeforeWriting), equivalent=_BETWEEN_STEPS),
    _mutant(
        "rule 16",
        "drafts-past-cap",
        "drafts are not cut where the reservation ends",
        of_table(DraftsPastCap),
        Setting(drafts=True, asynchronous=True),
    ),
    _mutant("rule 19", "ready-is-whole", "a ready record is taken for a whole import", of_table(StartsImportsAtKnown), _HAND_OVER),
    _mutant(
        "rule 21",
        "tags-outlive-epoch",
        "provenance is kept over an epoch",
        _kept_provenance(),
        Setting(faults=("crash",)),
        "every block is written before it is read in an epoch, since the prefix cache is dropped (PROTOCOL.md, tried and harmless)",
    ),
    _mutant("C1-02", "reuses-send-buffer", "activations are overwritten before they have arrived", of_stage(ReusesSendBuffer), _TWO_STAGES),
    _mutant("C1-04", "optimistic-computed", "positions run on after a rejected draft", of_table(OptimisticComputed), _DRAFTS),
    _mutant("C1-12", "computes-finished", "rows of a request that has ended are computed", of_table(ComputesFinished), _ASYNC),
    _mutant("C1-15", "schedules-for-itself", "a replica leaves out rows by a budget of its own", of_table(SchedulesForItself)),
    _mutant("C3-09", "other-seed", "draws are keyed by another seed", of_table(AddsToSeeds)),
    _mutant("C3-09", "draws-at-input", "draws are keyed by the position of the last input", of_table(DrawsOnePositionLater)),
    _mutant("C4 cache", "wrong-block", "a block table names another block", of_table(TakesItsOwnBlocks)),
    _mutant("C7-07", "keeps-activations", "activations stay queued after their step", {ALL: of_stage(KeepsActivations)[ALL]}, _TWO_STAGES),
)
