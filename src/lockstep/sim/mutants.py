"""Mutants: parts in which one rule is loosened as the four faults that started this project loosened it (S1 to S4).

Each takes the place of a real part by a constructor argument, on the first replica (scope ONE) or on all alike (scope ALL). A mutant must run: it
may be wrong, but what it raises must come from the checks of the real parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.acceptance import accept
from lockstep.core.layout import BatchLayout
from lockstep.core.ragged import Ragged
from lockstep.core.records import Admissions, StepResult
from lockstep.core.table import SlotTable, TableShape
from lockstep.core.types import I32
from lockstep.runtime.messages import Activations
from lockstep.runtime.stage import DRIVER, Send, Stage
from lockstep.sim.parts import Parts
from lockstep.sim.rig import plain_table

ONE, ALL = "one", "all"
"""Scopes: the first stage or replica only, or the driver and every stage. A mutant of what a stage sends acts on the one that sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """fault: whose rule it loosens, S1 to S4. parts: by scope."""

    name: str
    fault: str
    loosens: str
    parts: Mapping[str, Parts]


# S1: known and computed are two counts; a slot is not a row of the batch


class AppendsAtComputed(SlotTable):
    """Takes the computed count for the known one when a result comes."""

    def apply_result(self, result: StepResult) -> None:
        live = result.slots[self.columns["generation"][result.slots] == result.generations]
        self.columns["known"][live] = self.columns["computed"][live]
        super().apply_result(result)


class WritesAtComputed(SlotTable):
    """Counts right, and writes the tokens where the row began."""

    def _append(self, slots: I32, known: I32, counts: I32, tokens: Ragged, rows: NDArray[np.intp]) -> None:
        super()._append(slots, self.columns["computed"][slots], counts, tokens, rows)


class WritesByRow(SlotTable):
    """Writes the tokens of the batch's row i to slot i."""

    def _append(self, slots: I32, known: I32, counts: I32, tokens: Ragged, rows: NDArray[np.intp]) -> None:
        super()._append(rows.astype(np.int32), known, counts, tokens, rows)


class ChunkSetsKnown(SlotTable):
    """A chunk that is not the prompt's last overwrites the known count with what is computed so far."""

    def note(self, layout: BatchLayout) -> None:
        super().note(layout)
        quiet = np.setdiff1d(np.arange(layout.row_count), layout.sample_row)
        self.columns["known"][layout.slot[quiet]] = self.columns["computed"][layout.slot[quiet]]


class MarksAsBefore(SlotTable):
    """A token written later is marked as what stands before it."""

    def _append(self, slots: I32, known: I32, counts: I32, tokens: Ragged, rows: NDArray[np.intp]) -> None:
        super()._append(slots, known, counts, tokens, rows)
        for slot, first, count in zip(slots, known, counts, strict=True):
            self.marks[slot, first : first + count] = self.marks[slot, first - 1]


# S2: who sends and who takes results, also at a step that samples nothing


class WaitsWhenEmpty(Stage):
    """The last stage, too, waits for the tokens of a step that samples nothing."""

    def advance(self) -> list[Send] | None:
        plan = self._plans.get(self.next_step)
        return None if self.is_last and plan is not None and not plan.rows.samples.any() else super().advance()


class ChangesSends(Stage):
    """changed: what takes the place of the sends of a step on the last stage."""

    def _compute(self, layout: BatchLayout, received: Activations | None) -> list[Send]:
        sends = super()._compute(layout, received)
        return self.changed(layout, sends) if self.is_last else sends

    def changed(self, layout: BatchLayout, sends: list[Send]) -> list[Send]:
        return sends


class SendsNothingWhenEmpty(ChangesSends):
    def changed(self, layout: BatchLayout, sends: list[Send]) -> list[Send]:
        return sends if len(layout.sample_row) else []


class TellsOnlyDriverWhenEmpty(ChangesSends):
    def changed(self, layout: BatchLayout, sends: list[Send]) -> list[Send]:
        return sends if len(layout.sample_row) else [send for send in sends if send.destination == DRIVER]


class SendsTwiceWhenEmpty(ChangesSends):
    def changed(self, layout: BatchLayout, sends: list[Send]) -> list[Send]:
        return sends if len(layout.sample_row) else sends + sends


# S3: an admission overwrites the whole row


class Keeps(SlotTable):
    """An admission leaves columns `kept` as the slot's former owner had them."""

    kept: tuple[str, ...] = ()

    def _admit(self, admissions: Admissions) -> None:
        slots = admissions.slots
        before = {name: self.columns[name][slots] for name in self.kept}
        used = self.columns["known"][slots] > 0
        drafts = self.drafts[slots]
        super()._admit(admissions)
        for name, values in before.items():
            self.columns[name][slots[used]] = values[used]
        if "draft_count" in self.kept:
            self.drafts[slots] = drafts


class KeepsDrafts(Keeps):
    kept = ("draft_count",)


class KeepsFinish(Keeps):
    kept = ("finished",)


class KeepsPending(Keeps):
    kept = ("pending",)


class KeepsLastToken(SlotTable):
    """The first input of a decode is what the slot sampled last, whoever owned it then."""

    def _admit(self, admissions: Admissions) -> None:
        slots = admissions.slots
        known = self.columns["known"][slots]
        last = self.tokens[slots, np.maximum(known - 1, 0)]
        super()._admit(admissions)
        used = known > 0
        self.tokens[slots[used], self.columns["known"][slots[used]] - 1] = last[used]


# S4: every row that samples is delivered; nothing predicts an end


def without_rows(result: StepResult, left_out: NDArray[np.bool_]) -> StepResult:
    kept = np.flatnonzero(~left_out)
    return replace(
        result,
        slots=result.slots[kept],
        generations=result.generations[kept],
        tokens=Ragged.of([result.tokens.row(int(i)) for i in kept]),
        finishes=result.finishes[kept],
        drafts=Ragged.of([result.drafts.row(int(i)) for i in kept]),
    )


def will_fill_cap(layout: BatchLayout) -> NDArray[np.bool_]:
    """Of the rows that sample: whether all that is scheduled, if accepted, fills the cap. The prediction that S4 made."""
    return np.asarray(layout.known[layout.sample_row] + layout.draft_ids.lengths() + 1 >= layout.length_cap)


class LeavesOutOfBroadcast(ChangesSends):
    """A row that will end anyway is not told to the other stages."""

    def changed(self, layout: BatchLayout, sends: list[Send]) -> list[Send]:
        left_out = will_fill_cap(layout)
        told: list[Send] = []
        for send in sends:
            if isinstance(send.message, StepResult) and send.destination != DRIVER:
                send = replace(send, message=without_rows(send.message, left_out))
            told.append(send)
        return told


class SkipsPredictedEnd(SlotTable):
    """A row that will end anyway is not applied."""

    def apply_result(self, result: StepResult) -> None:
        c, slots = self.columns, result.slots
        super().apply_result(without_rows(result, c["known"][slots] + c["draft_count"][slots] + 1 >= c["length_cap"][slots]))


class AppliesLateResults(SlotTable):
    """Results go to whoever holds the slot now."""

    def apply_result(self, result: StepResult) -> None:
        held = result.slots[self.columns["generation"][result.slots] >= 0]
        self.columns["pending"][held] = result.step
        super().apply_result(replace(result, generations=self.columns["generation"][result.slots]))


class AdmitsPastCap(SlotTable):
    """Checks no admission against its cap."""

    def _expect(self, right: bool | NDArray[np.bool_], message: Callable[[], str], *concerned: Any) -> None:
        super()._expect(True if message().startswith("admission wants") else right, message, *concerned)


def accept_without_end_at_cap(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    return accept(replace(layout, length_cap=layout.length_cap + np.int32(1000)), sampled, **others)


def accept_without_predicted_ends(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    return without_rows(accept(layout, sampled, **others), will_fill_cap(layout))


def accept_by_order(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    """Takes the first rows of the batch for those that sample."""
    count = len(layout.sample_row)
    return replace(accept(layout, sampled, **others), slots=layout.slot[:count], generations=layout.generation[:count])


# All of them


def _of_table(table: type[SlotTable]) -> Mapping[str, Parts]:
    """Without poison, as in production: a mutant that reads what a former owner left must find it."""

    def everywhere(shape: TableShape, _replica: int) -> SlotTable:
        return table(shape)

    def on_first(shape: TableShape, replica: int) -> SlotTable:
        return table(shape) if replica == 0 else plain_table(shape, replica)

    return {ONE: Parts(make_table=on_first), ALL: Parts(make_table=everywhere)}


def _of_stage(stage: type[Stage]) -> Mapping[str, Parts]:
    return {ONE: Parts(make_stage=stage)}


def _of_accept(function: Callable[..., StepResult]) -> Mapping[str, Parts]:
    """One rank decides for all."""
    return {ALL: Parts(accept=function)}


def _mutant(fault: str, name: str, loosens: str, parts: Mapping[str, Parts]) -> Mutant:
    return Mutant(name=name, fault=fault, loosens=loosens, parts=parts)


MUTANTS: Sequence[Mutant] = (
    _mutant("S1", "appends-at-computed", "the known count of a result's rows is the computed one", _of_table(AppendsAtComputed)),
    _mutant("S1", "writes-at-computed", "accepted tokens are written from the computed count on", _of_table(WritesAtComputed)),
    _mutant("S1", "writes-by-row", "accepted tokens are written to the slot whose number is the row's", _of_table(WritesByRow)),
    _mutant("S1", "chunk-sets-known", "a chunk sets the known count to the computed one", _of_table(ChunkSetsKnown)),
    _mutant("S1", "marks-as-before", "a token written after an embedding is marked as an embedding", _of_table(MarksAsBefore)),
    _mutant("S2", "waits-when-empty", "the last stage waits for a result at a step that samples nothing", _of_stage(WaitsWhenEmpty)),
    _mutant("S2", "sends-nothing-when-empty", "a step that samples nothing has no result", _of_stage(SendsNothingWhenEmpty)),
    _mutant("S2", "tells-driver-when-empty", "a step that samples nothing has a result for the driver alone", _of_stage(TellsOnlyDriverWhenEmpty)),
    _mutant("S2", "sends-twice-when-empty", "a step that samples nothing has two results", _of_stage(SendsTwiceWhenEmpty)),
    _mutant("S3", "keeps-drafts", "an admission leaves the former owner's drafts", _of_table(KeepsDrafts)),
    _mutant("S3", "keeps-last-token", "the first decode reads the former owner's last token", _of_table(KeepsLastToken)),
    _mutant("S3", "keeps-finish", "an admission leaves the former owner's finish", _of_table(KeepsFinish)),
    _mutant("S3", "keeps-pending", "an admission leaves what the former owner waited for", _of_table(KeepsPending)),
    _mutant("S4", "leaves-out-of-broadcast", "a row that may fill its cap is not told to other stages", _of_stage(LeavesOutOfBroadcast)),
    _mutant("S4", "skips-predicted-end", "a row that may fill its cap is not applied", _of_table(SkipsPredictedEnd)),
    _mutant("S4", "accepts-without-predicted-ends", "a row that may fill its cap is not in the result", _of_accept(accept_without_predicted_ends)),
    _mutant("S4", "accepts-without-end-at-cap", "a run that fills the cap does not end the request", _of_accept(accept_without_end_at_cap)),
    _mutant("S4", "accepts-by-order", "the first rows of a batch are taken for those that sample", _of_accept(accept_by_order)),
    _mutant("S4", "applies-late-results", "a result for an older generation is applied to the new owner", _of_table(AppliesLateResults)),
    _mutant("S4", "admits-past-cap", "an admission is not checked against its cap", {ALL: _of_table(AdmitsPastCap)[ALL]}),
)
