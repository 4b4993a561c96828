"""Loosened lives of requests: what a new epoch makes of them, strikes, aborts, preemption. The driver's business, so each has the scope ALL."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.core.arrivals import Delivery
from lockstep.core.plan_builder import PlanBuilder
from lockstep.core.records import StepResult
from lockstep.core.request import STRIKES_MAX, LiveRequest
from lockstep.sim.mutants.mutant import Mutant
from lockstep.sim.mutants.setting import Setting
from lockstep.sim.mutants.watched_scheduler import OtherRequests, WatchedScheduler, decider

# Rules 21, 22: epochs and poison


class ReusesGenerations(WatchedScheduler):
    """Generations count from 0 in every epoch."""

    def _begin(self, epoch: int, first_transfer: int) -> None:
        super()._begin(epoch, first_transfer)
        self.did(self._next_generation > 0)
        self._next_generation = 0


class AdmitsFinishedAgain(WatchedScheduler):
    """A request whose finish came in the epoch that failed is admitted again with the others."""

    def _begin(self, epoch: int, first_transfer: int) -> None:
        super()._begin(epoch, first_transfer)
        self._ended_here: list[LiveRequest] = []

    def _accept(self, request: LiveRequest, result: StepResult, row: int) -> Delivery:
        delivery = super()._accept(request, result, row)
        if delivery.finish is not None:
            self._ended_here.append(request)
        return delivery

    def restart(self, epoch: int, *, strikes: bool) -> list[LiveRequest]:
        again = [request for request in self._ended_here if request.spec.request_id not in self._requests]
        for request in again:
            request.finished = False
            self._requests[request.spec.request_id] = request
        poison = super().restart(epoch, strikes=strikes)
        self.did(bool(again))
        return poison


class ForgetsAnswers(WatchedScheduler):
    """A new epoch begins every answer again."""

    def restart(self, epoch: int, *, strikes: bool) -> list[LiveRequest]:
        poison = super().restart(epoch, strikes=strikes)
        self.did(any(request.known > request.prompt_length for request in self._requests.values()))
        for request in self._requests.values():
            request.known = request.prompt_length
        return poison


class NoStrikes(WatchedScheduler):
    """The engine begins again, however often one request brings it down."""

    def restart(self, epoch: int, *, strikes: bool) -> list[LiveRequest]:
        self.did(strikes)
        return super().restart(epoch, strikes=False)


class NeverIsolated(LiveRequest):
    __slots__ = ()

    @property
    def isolated(self) -> bool:
        return False


class IsolatesNobody(OtherRequests):
    """Struck requests run with others and with each other, however often they were there when the engine failed."""

    kind = NeverIsolated

    def _plan_admissions(self, build: PlanBuilder) -> None:
        self.did(any(request.strikes >= STRIKES_MAX for request in self._waiting))
        super()._plan_admissions(build)


class EndsAnyStruck(WatchedScheduler):
    """Whoever has too many strikes is ended, also one that was not alone."""

    def restart(self, epoch: int, *, strikes: bool) -> list[LiveRequest]:
        poison = super().restart(epoch, strikes=strikes)
        struck = [request for request in self._requests.values() if request.strikes >= STRIKES_MAX]
        self.did(bool(struck))
        for request in struck:
            del self._requests[request.spec.request_id]
            self._waiting.remove(request)
        return [*poison, *struck]


# The field's kinds: aborts and preemption


class AbortsOneMicrobatch(WatchedScheduler):
    """C1-11: an abort looks at the newest plan only; a request elsewhere in the pipeline is missed."""

    def abort(self, request_id: str) -> LiveRequest | None:
        request = self._requests.get(request_id)
        if request is None or request.slot is None or request.last_step == self.next_step - 1:
            return super().abort(request_id)
        self.did()
        return request


class DeliversLateResults(WatchedScheduler):
    """C1-12: what was in flight for a request that has ended is delivered."""

    def receive(self, result: StepResult) -> list[Delivery]:
        ended = [request for generation in result.generations.tolist() if (request := self._ended_under(generation)) is not None]
        for request in ended:
            self.did()
            self._requests[request.spec.request_id] = request
            self._running.append(request)
        deliveries = super().receive(result)
        for request in ended:
            if self._requests.pop(request.spec.request_id, None) is not None:
                self._running.remove(request)
        return deliveries

    def _ended_under(self, generation: int) -> LiveRequest | None:
        """Who has been aborted and still holds its slot, unless its client has sent it again."""
        request = self._by_generation.get(generation)
        return None if request is None or request.finished or request.spec.request_id in self._requests else request


class MatchesByName(WatchedScheduler):
    """C4-02, C4-03: what was in flight at a preemption is booked on the request's next admission."""

    def _begin(self, epoch: int, first_transfer: int) -> None:
        super()._begin(epoch, first_transfer)
        self._by_name: dict[int, LiveRequest] = {}

    def _admit(self, request: LiveRequest, hits: list[list[int]], build: PlanBuilder) -> None:
        super()._admit(request, hits, build)
        self._by_name[request.generation] = request

    def request_of(self, generation: int) -> LiveRequest | None:
        return super().request_of(generation) or self._live(self._by_name.get(generation))

    def _live(self, request: LiveRequest | None) -> LiveRequest | None:
        """If it has a slot again."""
        here = request is not None and request.slot is not None and self._requests.get(request.spec.request_id) is request
        return request if here else None

    def _check_awaited(self, request: LiveRequest, result: StepResult, row: int) -> None:
        if int(result.generations[row]) != request.generation:
            self.did()
            request.outstanding.appendleft((result.step, len(result.tokens.row(row))))
        super()._check_awaited(request, result, row)


class ResumesWithPrompt(WatchedScheduler):
    """C4-01: a preempted request comes again with its prompt alone."""

    def _preempt(self, request: LiveRequest, build: PlanBuilder) -> None:
        self.did(request.known > request.prompt_length)
        request.known = request.prompt_length
        super()._preempt(request, build)


class PreemptedKeepSlot(WatchedScheduler):
    """C4-12: preemption gives the blocks back and not the slot."""

    def _preempt(self, request: LiveRequest, build: PlanBuilder) -> None:
        slot = request.slot
        super()._preempt(request, build)
        self.did()
        self._free_slots = sorted(other for other in self._free_slots if other != slot)


class NeverDrains(WatchedScheduler):
    """C7-07: what is kept of a plan stays after its result."""

    def receive(self, result: StepResult) -> list[Delivery]:
        kept = self._generations_in_plan.get(result.step)
        deliveries = super().receive(result)
        self.did()
        if kept is not None:
            self._generations_in_plan[result.step] = kept
        return deliveries


_ASYNC, _ABORTS = Setting(asynchronous=True), Setting(aborts=True)
_CRASHES, _POISON = Setting(faults=("crash",)), Setting(faults=("poison", "poison"))

MUTANTS: Sequence[Mutant] = (
    decider(
        "rule 21",
        "reuses-generations",
        "generations count from 0 in each epoch",
        ReusesGenerations,
        _CRASHES,
        equivalent="nothing that outlives an epoch goes by generation: links drop what is of an older epoch, and everything else is made anew",
    ),
    decider("rule 21", "admits-finished-again", "a finish that was received is admitted again", AdmitsFinishedAgain, _CRASHES),
    decider("rule 21", "forgets-answers", "an epoch begins every answer again", ForgetsAnswers, _CRASHES),
    decider("rule 22", "no-strikes", "nobody is struck", NoStrikes, _POISON),
    decider("rule 22", "isolates-nobody", "nobody runs alone, however often it was struck", IsolatesNobody, _POISON),
    decider("rule 22", "ends-any-struck", "who was struck too often is ended, though others ran beside it", EndsAnyStruck, _POISON),
    decider("C1-11", "aborts-one-microbatch", "an abort looks at the newest plan only", AbortsOneMicrobatch, _ABORTS),
    decider("C1-12", "delivers-late-results", "results of a request that has ended are delivered", DeliversLateResults, _ABORTS),
    decider("C4-01", "resumes-with-prompt", "a preempted request comes again with its prompt alone", ResumesWithPrompt),
    decider("C4-02", "matches-by-name", "a result of an earlier admission is booked on the present one", MatchesByName, _ASYNC),
    decider("C4-12", "preempted-keep-slot", "preemption does not free the slot", PreemptedKeepSlot),
    decider("C7-07", "never-drains", "what is kept of a plan stays after its result", NeverDrains),
)
