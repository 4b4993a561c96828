"""`WatchedScheduler`: a scheduler that says where it did otherwise, and the one way to make a mutant of it."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.core.request import EngineRequest, LiveRequest
from lockstep.core.scheduler import Scheduler
from lockstep.sim.mutants.mutant import UNSEEN, MakeParts, Mutant, of_scheduler
from lockstep.sim.mutants.setting import ANY, Setting


class WatchedScheduler(Scheduler):
    witness = UNSEEN

    def did(self, otherwise: bool = True) -> None:
        if otherwise:
            self.witness.note(self.epoch, self.next_step)


class OtherRequests(WatchedScheduler):
    """Requests of class `kind`, which adds no field."""

    kind: type[LiveRequest] = LiveRequest

    def submit(self, spec: EngineRequest) -> None:
        super().submit(spec)
        self._requests[spec.request_id].__class__ = self.kind


def decider(
    kind: str,
    name: str,
    loosens: str,
    scheduler: type[Scheduler],
    setting: Setting = ANY,
    *,
    bound: str | None = None,
    equivalent: str | None = None,
) -> Mutant:
    parts: Mapping[str, MakeParts] = of_scheduler(scheduler)
    return Mutant(name=name, kind=kind, loosens=loosens, parts=parts, setting=setting, bound=bound, equivalent=equivalent)
