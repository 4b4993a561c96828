"""The four faults that started this project, S1 to S4: rules loosened as they were loosened there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.acceptance import accept
from lockstep.core.layout import BatchLayout
from lockstep.core.plan_builder import PlanBuilder
from lockstep.core.ragged import Ragged
from lockstep.core.records import Admissions, StepPlan, StepResult
from lockstep.core.scheduler import Scheduler
from lockstep.core.schema import MARK_EMBEDDING, MARK_TOKEN
from lockstep.core.table import TableShape
from lockstep.core.types import I32, U64
from lockstep.runtime.messages import Activations
from lockstep.runtime.stage import DRIVER, Send, Stage
from lockstep.sim.mutants.mutant import ALL, PLAIN, UNSEEN, MakeParts, Mutant, of_accept, of_last_stage, of_table
from lockstep.sim.mutants.setting import ANY, Setting
from lockstep.sim.mutants.watched_table import WatchedTable
from lockstep.sim.parts import Parts

# S1: known and computed are two counts; a slot is not a row of the batch


class AppendsAtComputed(WatchedTable):
    """Takes the computed count for the known one when a result comes."""

    def apply_result(self, result: StepResult) -> None:
        live = result.slots[self.columns["generation"][result.slots] == result.generations]
        known, computed = self.columns["known"][live], self.columns["computed"][live]
        self.columns["known"][live] = computed
        super().apply_result(result)
        self.did(known != computed)


class WritesAtComputed(WatchedTable):
    """Counts right, and writes the tokens where the row began."""

    def _append(self, slots: I32, known: I32, counts: I32, tokens: Ragged, rows: NDArray[np.intp]) -> None:
        self.did(known != self.columns["computed"][slots])
        super()._append(slots, self.columns["computed"][slots], counts, tokens, rows)


class WritesByRow(WatchedTable):
    """Writes the tokens of the batch's row i to slot i."""

    def _append(self, slots: I32, known: I32, counts: I32, tokens: Ragged, rows: NDArray[np.intp]) -> None:
        self.did(slots != rows)
        super()._append(rows.astype(np.int32), known, counts, tokens, rows)


class ChunkSetsKnown(WatchedTable):
    """A chunk that is not the prompt's last overwrites the known count with what is computed so far."""

    def note(self, layout: BatchLayout) -> None:
        super().note(layout)
        quiet = np.setdiff1d(np.arange(layout.row_count), layout.sample_row)
        self.columns["known"][layout.slot[quiet]] = self.columns["computed"][layout.slot[quiet]]
        self.did(len(quiet) > 0)


class MarksAsBefore(WatchedTable):
    """A token written later is marked as what stands before it."""

    def _append(self, slots: I32, known: I32, counts: I32, tokens: Ragged, rows: NDArray[np.intp]) -> None:
        super()._append(slots, known, counts, tokens, rows)
        for slot, first, count in zip(slots, known, counts, strict=True):
            self.marks[slot, first : first + count] = self.marks[slot, first - 1]
        self.did(self.marks[slots, known] != MARK_TOKEN)


class EmbedsPrompts(Scheduler):
    """Every prompt is given as embeddings; nothing is loosened here. The engine has no such requests yet, and MarksAsBefore needs them."""

    def _commit(self, build: PlanBuilder) -> StepPlan:
        plan = super()._commit(build)
        admissions = plan.admissions
        if not len(admissions.slots):
            return plan
        marks = admissions.marks.copy()
        for start, count in zip(admissions.tokens.starts, admissions.values["prompt_length"], strict=False):
            marks[start : start + count] = MARK_EMBEDDING
        return replace(plan, admissions=replace(admissions, marks=marks))


class WritesFullAdmissions(Scheduler):
    """An admission's cap is what it knows, so that it must be refused. AdmitsPastCap needs a driver that is wrong."""

    def _commit(self, build: PlanBuilder) -> StepPlan:
        plan = super()._commit(build)
        if not len(plan.admissions.slots):
            return plan
        values = {**plan.admissions.values, "length_cap": plan.admissions.values["known"]}
        return replace(plan, admissions=replace(plan.admissions, values=values))


class WidensRows(Scheduler):
    """The first row of a request that samples has room for drafts, which it cannot have yet; nothing is loosened here. KeepsDrafts needs them: the
    engine's own rows are as wide as what is known."""

    def _commit(self, build: PlanBuilder) -> StepPlan:
        plan = super()._commit(build)
        first = [request.known == request.admitted_known and len(request.outstanding) == 1 for request in build.row_owners.values()]
        wider = plan.rows.counts + plan.rows.samples * np.array(first, np.int32) * np.int32(self.config.drafts_max)
        return replace(plan, rows=replace(plan.rows, counts=wider))


class ReversesRows(Scheduler):
    """Rows come in the other order, a chunk before the decodes, which must not matter; nothing is loosened here."""

    def _commit(self, build: PlanBuilder) -> StepPlan:
        plan = super()._commit(build)
        return replace(plan, rows=replace(plan.rows, **{name: array[::-1].copy() for name, array in plan.rows.columns().items()}))


# S2: who sends and who takes results, also at a step that samples nothing


class WaitsWhenEmpty(Stage):
    """The last stage, too, waits for the tokens of a step that samples nothing."""

    witness = UNSEEN

    def advance(self) -> list[Send] | None:
        plan = self._plans.get(self.next_step)
        if self.is_last and plan is not None and not plan.rows.samples.any():
            self.witness.note(self.epoch, self.next_step)
            return None
        return super().advance()


class ChangesSends(Stage):
    """changed: what takes the place of the sends of a step on the last stage."""

    witness = UNSEEN

    def _compute(self, layout: BatchLayout, received: Activations | None) -> list[Send]:
        sends = super()._compute(layout, received)
        changed = self.changed(layout, sends) if self.is_last else sends
        if changed is not sends:
            self.witness.note(self.epoch, layout.step)
        return changed

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


class Keeps(WatchedTable):
    """An admission leaves columns `kept` as the slot's former owner had them."""

    kept: tuple[str, ...] = ()

    def _admit(self, admissions: Admissions) -> None:
        slots = admissions.slots
        before = {name: self.columns[name][slots] for name in self.kept}
        used = self.columns["known"][slots] > 0
        drafts = self.drafts[slots]
        super()._admit(admissions)
        for name, values in before.items():
            self.did(used & (self.columns[name][slots] != values))
            self.columns[name][slots[used]] = values[used]
        if "draft_count" in self.kept:
            self.drafts[slots] = drafts


class KeepsDrafts(Keeps):
    kept = ("draft_count",)


class KeepsFinish(Keeps):
    kept = ("finished",)


class KeepsPending(Keeps):
    kept = ("pending",)


class ReadsFormerToken(WatchedTable):
    """The last input of a request's first row that samples is what the slot sampled last, whoever owned it then."""

    def __init__(self, shape: TableShape, *, poison: bool = False) -> None:
        super().__init__(shape, poison=poison)
        self._sampled: dict[int, int] = {}
        self._former: dict[int, int] = {}

    def apply_result(self, result: StepResult) -> None:
        super().apply_result(result)
        for slot in result.slots[self.columns["generation"][result.slots] == result.generations].tolist():
            self._sampled[slot] = int(self.tokens[slot, self.columns["known"][slot] - 1])
            self._former.pop(slot, None)

    def _admit(self, admissions: Admissions) -> None:
        super()._admit(admissions)
        for slot in admissions.slots.tolist():
            if slot in self._sampled:
                self._former[slot] = self._sampled.pop(slot)

    def _sequence(self, slot: I32, start: I32, known: I32, row: NDArray[np.intp], position: I32) -> tuple[I32, U64, I32]:
        owned = self.tokens.copy()
        for i, each in enumerate(slot.tolist()):
            if each in self._former and (position[row == i] == known[i] - 1).any():
                self.did(owned[each, known[i] - 1] != self._former[each])
                self.tokens[each, known[i] - 1] = self._former[each]
        found = super()._sequence(slot, start, known, row, position)
        self.tokens[:] = owned
        return found


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
        if not left_out.any():
            return sends
        told: list[Send] = []
        for send in sends:
            if isinstance(send.message, StepResult) and send.destination != DRIVER:
                send = replace(send, message=without_rows(send.message, left_out))
            told.append(send)
        return told


class SkipsPredictedEnd(WatchedTable):
    """A row that will end anyway is not applied."""

    def apply_result(self, result: StepResult) -> None:
        c, slots = self.columns, result.slots
        ends = c["known"][slots] + c["draft_count"][slots] + 1 >= c["length_cap"][slots]
        live = c["generation"][slots] == result.generations
        if (ends & live).any():
            self.witness.note(result.epoch, self.next_step)
        super().apply_result(without_rows(result, ends))


class AppliesLateResults(WatchedTable):
    """Results go to whoever holds the slot now."""

    def apply_result(self, result: StepResult) -> None:
        generations = self.columns["generation"][result.slots]
        if (generations != result.generations).any():
            self.witness.note(result.epoch, self.next_step)
        held = result.slots[generations >= 0]
        self.columns["pending"][held] = result.step
        super().apply_result(replace(result, generations=generations))


class AdmitsPastCap(WatchedTable):
    """Checks no admission against its cap."""

    def _expect(self, right: bool | NDArray[np.bool_], message: Callable[[], str], *concerned: Any) -> None:
        unchecked = message().startswith("admission wants")
        self.did(unchecked and not np.all(right))
        super()._expect(True if unchecked else right, message, *concerned)


def accept_without_end_at_cap(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    return accept(replace(layout, length_cap=layout.length_cap + np.int32(1000)), sampled, **others)


def accept_without_predicted_ends(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    return without_rows(accept(layout, sampled, **others), will_fill_cap(layout))


def accept_by_order(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    """Takes the first rows of the batch for those that sample."""
    count = len(layout.sample_row)
    return replace(accept(layout, sampled, **others), slots=layout.slot[:count], generations=layout.generation[:count])


_DRAFTS, _ABORTS, _TWO_STAGES = Setting(drafts=True), Setting(aborts=True), Setting(stages_least=2)
_TWO_ABORTS = Setting(aborts=True, stages_most=2)


def _mutant(kind: str, name: str, loosens: str, parts: Mapping[str, MakeParts], setting: Setting = ANY, beside: Parts = PLAIN) -> Mutant:
    return Mutant(name=name, kind=kind, loosens=loosens, parts=parts, setting=setting, beside=beside)


MUTANTS: Sequence[Mutant] = (
    _mutant("S1", "appends-at-computed", "the known count of a result's rows is the computed one", of_table(AppendsAtComputed)),
    _mutant("S1", "writes-at-computed", "accepted tokens are written from the computed count on", of_table(WritesAtComputed)),
    _mutant("S1", "writes-by-row", "accepted tokens are written to the slot whose number is the row's", of_table(WritesByRow)),
    _mutant("S1", "chunk-sets-known", "a chunk sets the known count to the computed one", of_table(ChunkSetsKnown)),
    _mutant(
        "S1",
        "marks-as-before",
        "a token written after an embedding is marked as an embedding",
        of_table(MarksAsBefore, make_scheduler=EmbedsPrompts),
        beside=Parts(make_scheduler=EmbedsPrompts),
    ),
    _mutant("S2", "waits-when-empty", "the last stage waits for a result at a step that samples nothing", of_last_stage(WaitsWhenEmpty)),
    _mutant("S2", "sends-nothing-when-empty", "a step that samples nothing has no result", of_last_stage(SendsNothingWhenEmpty)),
    _mutant(
        "S2",
        "tells-driver-when-empty",
        "a step that samples nothing has a result for the driver alone",
        of_last_stage(TellsOnlyDriverWhenEmpty),
        Setting(stages_least=2, plans_in_flight=2),
    ),
    _mutant("S2", "sends-twice-when-empty", "a step that samples nothing has two results", of_last_stage(SendsTwiceWhenEmpty)),
    _mutant(
        "S3",
        "keeps-drafts",
        "an admission leaves the former owner's drafts",
        of_table(KeepsDrafts, make_scheduler=WidensRows),
        _DRAFTS,
        Parts(make_scheduler=WidensRows),
    ),
    _mutant("S3", "keeps-last-token", "the first decode reads the former owner's last token", of_table(ReadsFormerToken)),
    _mutant("S3", "keeps-finish", "an admission leaves the former owner's finish", of_table(KeepsFinish)),
    _mutant("S3", "keeps-pending", "an admission leaves what the former owner waited for", of_table(KeepsPending), _ABORTS),
    _mutant(
        "S4",
        "leaves-out-of-broadcast",
        "a row that may fill its cap is not told to other stages",
        of_last_stage(LeavesOutOfBroadcast),
        _TWO_STAGES,
    ),
    _mutant("S4", "skips-predicted-end", "a row that may fill its cap is not applied", of_table(SkipsPredictedEnd)),
    _mutant("S4", "accepts-without-predicted-ends", "a row that may fill its cap is not in the result", of_accept(accept_without_predicted_ends)),
    _mutant("S4", "accepts-without-end-at-cap", "a run that fills the cap does not end the request", of_accept(accept_without_end_at_cap)),
    _mutant(
        "S4",
        "accepts-by-order",
        "the first rows of a batch are taken for those that sample",
        of_accept(accept_by_order, make_scheduler=ReversesRows),
        beside=Parts(make_scheduler=ReversesRows),
    ),
    _mutant("S4", "applies-late-results", "a result for an older generation goes to the new owner", of_table(AppliesLateResults), _TWO_ABORTS),
    _mutant(
        "S4",
        "admits-past-cap",
        "an admission is not checked against its cap",
        {ALL: of_table(AdmitsPastCap, make_scheduler=WritesFullAdmissions)[ALL]},
    ),
)
