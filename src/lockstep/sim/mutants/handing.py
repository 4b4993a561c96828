"""Loosened hand-over of KV between engines: what a source serves and when, what a reader takes, and who ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.core.plan_builder import PlanBuilder
from lockstep.core.records import StepPlan, StepResult
from lockstep.core.request import LiveRequest
from lockstep.runtime.driver import Driver
from lockstep.runtime.handover import Handover, ToStage, _Export, _id
from lockstep.runtime.messages import Activations, GrammarRequest, ImportReport, KVPart, WeightsRequest
from lockstep.runtime.stage import Send, Stage
from lockstep.sim.mutants.booking import ExportsUnheld
from lockstep.sim.mutants.mutant import ALL, UNSEEN, MakeParts, Mutant, Witness, of_driver, of_scheduler, of_stage, watched
from lockstep.sim.mutants.setting import Setting
from lockstep.sim.mutants.watched_scheduler import OtherRequests
from lockstep.sim.parts import Parts


class WatchedHandover(Handover):
    witness = UNSEEN

    def did(self, otherwise: bool = True) -> None:
        if otherwise:
            self.witness.note(self._epoch, self._table.next_step - 1)


class OtherHandover(Stage):
    """A stage whose part in the hand-over is of class `kind`."""

    witness = UNSEEN
    kind: type[WatchedHandover] = WatchedHandover

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._handover = watched(self.kind, self.witness)(
            stage=self.index,
            epoch=self.epoch,
            layers=given["layers"],
            table=given["table"],
            provenance=given["provenance"],
            kv=given["kv"],
        )


# Rule 19: what a reader takes


class TakesLateParts(WatchedHandover):
    """C2-01, C2-09: a part is copied into the slot's blocks, whoever holds the slot by then."""

    def note(self, plan: StepPlan) -> list[ToStage]:
        before = dict(self._imports)
        pulls = super().note(plan)
        self.did(not before.keys() <= self._imports.keys())
        self._imports = before | self._imports
        return pulls

    def audit(self) -> list[str]:
        """Imports stay open here on purpose; that is not what is to be found."""
        return [line for line in super().audit() if " is open" not in line]


class LateParts(OtherHandover):
    kind = TakesLateParts


class ImportsOnArrival(OtherHandover):
    """C2-09: an import begins when its plan arrives, while earlier steps still write the slot and its blocks."""

    kind = WatchedHandover

    def offer(self, message: StepPlan | StepResult | Activations | GrammarRequest | WeightsRequest) -> None:
        super().offer(message)
        if isinstance(message, StepPlan) and any(transfer is not None for transfer in message.admissions.transfers):
            self.witness.note(message.epoch, message.step)
            self._to_others += self._handing().note(replace(message, exports=type(message.exports)(), unexports=()))

    def _hand_over(self, plan: StepPlan) -> None:
        """As it is, but for the import, which has begun."""
        admissions = plan.admissions
        super()._hand_over(replace(plan, admissions=replace(admissions, transfers=(None,) * len(admissions.transfers))))


class ReportsFirstPart(WatchedHandover):
    """An import is over when its first part is here, whatever other layers still lack."""

    def take_part(self, part: KVPart) -> ImportReport | None:
        entry = self._imports.get(_id(part.transfer))
        if entry is None or len(part.tags) == 0:
            return super().take_part(part)
        self.did(not set(range(*part.layers)).issuperset(entry.missing))
        entry.missing = set(range(*part.layers))
        return super().take_part(part)


class FirstPartIsAll(OtherHandover):
    kind = ReportsFirstPart


class RereadsReady(OtherHandover):
    """C2-03: the stage does what it sees itself, not what the plan says: an import that is whole here starts whole."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._whole: dict[int, int] = {}

    def offer_part(self, part: KVPart) -> list[Send]:
        sends = super().offer_part(part)
        for send in sends:
            if isinstance(send.message, ImportReport):
                self._whole[send.message.generation] = send.message.computed
        return sends

    def offer(self, message: StepPlan | StepResult | Activations | GrammarRequest | WeightsRequest) -> None:
        if isinstance(message, StepPlan) and len(message.ready.slots):
            own = np.array([self._whole.get(generation, 0) for generation in message.ready.generations.tolist()], np.int32)
            seen = np.where(own > 0, own, message.ready.computed).astype(np.int32)
            if (seen != message.ready.computed).any():
                self.witness.note(message.epoch, message.step)
                message = replace(message, ready=replace(message.ready, computed=seen))
        super().offer(message)


class NeverImporting(LiveRequest):
    __slots__ = ()

    @property  # type: ignore[override]
    def importing(self) -> bool:
        return False

    @importing.setter
    def importing(self, value: bool) -> None: ...


class StartsBeforeReady(OtherRequests):
    """Rows are planned for a request whose KV is still on its way."""

    kind = NeverImporting

    def _plan_admissions(self, build: PlanBuilder) -> None:
        self.did(any(request.transfer is not None for request in self._waiting))
        super()._plan_admissions(build)


class ForgetsFailedImport(OtherRequests):
    """An import that brought nothing is not prefilled here."""

    kind = LiveRequest

    def make_ready(self, generation: int, computed: int) -> None:
        self.did(computed == 0)
        if computed:
            super().make_ready(generation, computed)


class EndsImportAtFirstReport(Driver):
    """The first stage's report counts for all."""

    witness = UNSEEN

    def _note_import(self, report: ImportReport) -> None:
        if report.generation in self._imports:
            if self.rank_count > 1:
                self.witness.note(self.epoch, self.scheduler.next_step)
            self._end_import(report.generation, report.computed)


class CleansUpOnAdmission(Driver):
    """C2-10: late imports are looked for only when a request has been admitted."""

    witness = UNSEEN

    def tick(self, now: float) -> None:
        admitted = bool(self._unresolved) and len(self._unresolved[-1].admissions.slots) > 0
        late = not admitted and any(now > awaited.deadline for awaited in self._imports.values())
        if late:
            self.witness.note(self.epoch, self.scheduler.next_step)
            self._now = now
            return
        super().tick(now)


class EndlessLease(Driver):
    """C2-05: KV is held until its reader says so."""

    witness = UNSEEN

    def tick(self, now: float) -> None:
        if any(now > end for end in self._leases.values()):
            self.witness.note(self.epoch, self.scheduler.next_step)
        self._leases.clear()
        super().tick(now)


# Rule 20: what a source serves, and when


class ServesOnArrival(OtherHandover):
    """A pull is served as soon as the plan that exports has arrived, while earlier steps still compute what it names."""

    kind = WatchedHandover

    def offer(self, message: StepPlan | StepResult | Activations | GrammarRequest | WeightsRequest) -> None:
        super().offer(message)
        if isinstance(message, StepPlan) and message.exports.transfers:
            self.witness.note(message.epoch, message.step)
            handover, exports = self._handing(), message.exports
            for i, transfer in enumerate(exports.transfers):
                handover._exports[_id(transfer)] = _Export(blocks=tuple(rows.row(i) for rows in exports.blocks), computed=int(exports.computed[i]))
            self._to_others += handover.serve_waiting(self.table.next_step)


class KeepsExports(WatchedHandover):
    """C2-07: an export that has ended is still served, from blocks that may be somebody else's."""

    def note(self, plan: StepPlan) -> list[ToStage]:
        self.did(bool(plan.unexports))
        return super().note(replace(plan, unexports=()))


class ServesAfterEnd(OtherHandover):
    kind = KeepsExports


class StampsExpected(KeepsExports):
    """The same, and the reader stamps what it receives with the tags that it expects (rule 13)."""

    def take_part(self, part: KVPart) -> ImportReport | None:
        entry = self._imports.get(_id(part.transfer))
        if entry is None or len(part.tags) == 0:
            return super().take_part(part)
        expected = self._table.tags[entry.slot, : len(part.tags)].copy()
        self.did(not np.array_equal(expected, part.tags))
        return super().take_part(replace(part, tags=expected))


class StampsWhatItExpects(OtherHandover):
    kind = StampsExpected


def _unheld_and_stamped() -> Mapping[str, MakeParts]:
    def parts(witness: Witness) -> Parts:
        return Parts(make_stage=watched(StampsWhatItExpects, witness), make_scheduler=ExportsUnheld)

    return {ALL: parts}


_MOVES = Setting(hand_over=True)
_LATE = Setting(hand_over=True, faults=("kv-pull-late", "kv-part-late"), aborts=True)
_LOST = Setting(hand_over=True, faults=("kv-pull-lost", "kv-part-lost"))


def _mutant(kind: str, name: str, loosens: str, parts: Mapping[str, MakeParts], setting: Setting = _MOVES, equivalent: str | None = None) -> Mutant:
    return Mutant(name=name, kind=kind, loosens=loosens, parts=parts, setting=setting, equivalent=equivalent)


_COMPLETE = "an export follows the request's finish, and the result that brings it proves that every stage has computed all that is exported"

MUTANTS: Sequence[Mutant] = (
    _mutant("rule 13", "stamps-what-it-expects", "a reader stamps what an export without a hold brought", _unheld_and_stamped()),
    _mutant("rule 19", "late-parts-taken", "a part is copied whoever holds the slot by then", of_stage(LateParts), _LATE),
    _mutant("rule 19", "starts-before-ready", "rows are planned before the ready record", of_scheduler(StartsBeforeReady)),
    _mutant("rule 19", "forgets-failed-import", "a failed import is not prefilled here", of_scheduler(ForgetsFailedImport), _LOST),
    _mutant("rule 19", "first-report-is-all", "the first stage's report ends an import", of_driver(EndsImportAtFirstReport)),
    _mutant("rule 19", "first-part-is-all", "the first part ends a stage's import", of_stage(FirstPartIsAll)),
    _mutant("rule 20", "serves-on-arrival", "a pull is served before earlier steps have run", of_stage(ServesOnArrival), equivalent=_COMPLETE),
    _mutant("C2-03", "rereads-ready", "a stage starts an import by what it sees itself", of_stage(RereadsReady), _LATE),
    _mutant("C2-05", "endless-lease", "only its reader ends an export", of_driver(EndlessLease)),
    _mutant("C2-07", "serves-after-end", "an export that has ended is still served", of_stage(ServesAfterEnd), _LATE),
    _mutant("C2-09", "imports-on-arrival", "an import begins while earlier steps still run", of_stage(ImportsOnArrival)),
    _mutant("C2-10", "cleans-up-on-admission", "late imports are looked for at admissions only", of_driver(CleansUpOnAdmission), _LOST),
)
