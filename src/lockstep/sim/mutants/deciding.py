"""Loosened deciders: horizons, chunks, reservation, victims, strikes, ends of requests. One party decides, so each has the scope ALL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lockstep.core.plan_builder import PlanBuilder
from lockstep.core.records import StepPlan, StepResult
from lockstep.core.request import STRIKES_MAX, EngineRequest, LiveRequest
from lockstep.core.scheduler import Delivery, Scheduler
from lockstep.core.types import UNKNOWN_START
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


# Rule 2: horizons


class HorizonForgetsReceived(WatchedScheduler):
    """A horizon covers what the plan's rows depend on, and no more of what has come."""

    def _begin(self, epoch: int, first_transfer: int) -> None:
        super()._begin(epoch, first_transfer)
        self._least = 0
        self._answered: dict[int, int] = {}

    def _accept(self, request: LiveRequest, result: StepResult, row: int) -> Delivery:
        self._answered[request.generation] = result.step
        return super()._accept(request, result, row)

    def _commit(self, build: PlanBuilder) -> StepPlan:
        depends = [self._answered.get(generation, -1) + 1 for generation in build.row_owners]
        self._least = max(self._least, build.horizon_least, *depends, 0)
        plan = super()._commit(build)
        return replace(plan, horizon=self._least)


class HorizonOneShort(WatchedScheduler):
    """A row is planned on a result that the horizon leaves out: the anchor of a decode has not come. (Spacing is somebody else's business.)"""

    def _commit(self, build: PlanBuilder) -> StepPlan:
        self.did(build.horizon_least > self.received)
        build.horizon_least = max(0, build.horizon_least - 1)
        return super()._commit(build)


class HorizonDecreases(WatchedScheduler):
    """A horizon covers what its own rows depend on, whatever an earlier plan's was."""

    def _commit(self, build: PlanBuilder) -> StepPlan:
        plan = super()._commit(build)
        self.did(plan.horizon > max(build.horizon_least, self.received))
        return replace(plan, horizon=max(build.horizon_least, self.received))


# Rules 3, 23, 24: full pipelines


class ChunksWaitForResults(WatchedScheduler):
    """The next chunk of a prompt waits until the step of the one before has come back."""

    def _try_prefill(self, request: LiveRequest, build: PlanBuilder) -> bool:
        return request.last_step < self.received and super()._try_prefill(request, build)


class NoShare(WatchedScheduler):
    """A plan takes every row that is eligible."""

    def _plan_decodes(self, build: PlanBuilder, *, newest: bool) -> None:
        for request in [request for request in self._running if not request.prefilling]:
            if build.budget_used < self.config.token_budget and not request.ending and self._dependency_met(request, newest):
                self._try_decode(request, build)


class SiblingsTogether(WatchedScheduler):
    """Choices of one prompt come in together."""

    def _waits_for_elder(self, request: LiveRequest, build: PlanBuilder) -> bool:
        self.did(super()._waits_for_elder(request, build))
        return False


# Rule 16: reservation


class CountsOneResult(LiveRequest):
    __slots__ = ()

    @property
    def known_most(self) -> int:
        most = self.outstanding[-1][1] if self.outstanding else 0
        return min(self.known + most, self.spec.length_cap)


class ReservesByFlag(OtherRequests):
    """Whether a result is outstanding, not how many are."""

    kind = CountsOneResult

    def _try_decode(self, request: LiveRequest, build: PlanBuilder) -> None:
        self.did(len(request.outstanding) > 1)
        super()._try_decode(request, build)


class Decodes(WatchedScheduler):
    """`_try_decode` as it is, in two parts: clipped (the reservation ends at the cap), drops (drafts are dropped before anybody is preempted)."""

    clipped = True
    drops = True

    def _try_decode(self, request: LiveRequest, build: PlanBuilder) -> None:
        drafts = self.config.drafts_max if request.outstanding else request.drafts
        certain = not request.outstanding or self.config.drafts_max == 0
        wanted = request.known + sum(most for _, most in request.outstanding) + drafts
        room = min(request.spec.length_cap - 1, request.known_most + drafts) if self.clipped else wanted
        self.did(not self.clipped and wanted > request.spec.length_cap - 1)
        count = min(1 + drafts, request.spec.length_cap - request.known_least, self.config.token_budget - build.budget_used)
        if drafts and not request.outstanding and not self.book.fits(request, room):
            self.did(not self.drops)
            count, room = (1, request.known) if self.drops else (count, room)
        if not self._reserve(request, room, build):
            return
        start = request.known_least - 1 if certain else UNKNOWN_START
        if request.outstanding:
            build.horizon_least = max(build.horizon_least, request.outstanding[-1][0] + 1)
        request.outstanding.append((build.step, count))
        request.scheduled = request.known_least - 1
        self._add_row(request, build, count=count, start=start, samples=True)


class ReservesPastCap(Decodes):
    clipped = False


class KeepsDraftsWhenShort(Decodes):
    drops = False


# Rule 17: victims


class VictimOfAnyRank(WatchedScheduler):
    """Whoever has no row yet, also one that ranks above the beneficiary."""

    def _victim(self, request: LiveRequest, build: PlanBuilder) -> LiveRequest | None:
        others = [other for other in self._running if other is not request and not build.has_row(other) and not build.has_ready(other)]
        self.did(bool(others) and self._rank(others[-1]) <= self._rank(request))
        return others[-1] if others else None


class VictimWithRow(WatchedScheduler):
    """Also one with a row in the plan that is being written."""

    def _victim(self, request: LiveRequest, build: PlanBuilder) -> LiveRequest | None:
        last = self._running[-1]
        if self._rank(last) <= self._rank(request) or build.has_ready(last):
            return None
        self.did(build.has_row(last))
        return last


class VictimWithReady(WatchedScheduler):
    """Also one with a ready record in the plan that is being written."""

    def _victim(self, request: LiveRequest, build: PlanBuilder) -> LiveRequest | None:
        last = self._running[-1]
        if self._rank(last) <= self._rank(request) or build.has_row(last):
            return None
        self.did(build.has_ready(last))
        return last


class PreemptedGoLast(WatchedScheduler):
    """Who is preempted queues again behind everybody else."""

    def _preempt(self, request: LiveRequest, build: PlanBuilder) -> None:
        self.did()
        request.arrival = self._next_arrival
        self._next_arrival += 1
        super()._preempt(request, build)


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

    def request_of(self, generation: int) -> LiveRequest | None:
        found = self._by_generation.get(generation)
        self.did(found is not super().request_of(generation))
        return found


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

    def _accept(self, request: LiveRequest, result: StepResult, row: int) -> Delivery:
        if int(result.generations[row]) != request.generation:
            self.did()
            request.outstanding.appendleft((result.step, len(result.tokens.row(row))))
        return super()._accept(request, result, row)


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


class AnchorsTooEarly(WatchedScheduler):
    """C1-03: without asynchronous scheduling nothing keeps two decodes of one request apart, and the second starts from a token that has not come."""

    def _dependency_met(self, request: LiveRequest, newest: bool) -> bool:
        return True

    def _commit(self, build: PlanBuilder) -> StepPlan:
        self.did(build.horizon_least > self.received)
        build.horizon_least = 0
        return super()._commit(build)


class SpreadsNothing(WatchedScheduler):
    """A decode may follow the one before it at once, in either mode. Its horizon waits for what it needs."""

    def _dependency_met(self, request: LiveRequest, newest: bool) -> bool:
        self.did(not super()._dependency_met(request, newest))
        return True


_DRAFTS = Setting(drafts=True)
_ASYNC, _SYNC = Setting(asynchronous=True), Setting(asynchronous=False)
_ABORTS = Setting(aborts=True)
_CRASHES = Setting(faults=("crash",))
_POISON = Setting(faults=("poison", "poison"))
_HAND_OVER = Setting(hand_over=True, tight=True)
_TIGHT = Setting(tight=True)


def _mutant(
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


MUTANTS: Sequence[Mutant] = (
    _mutant("rule 2", "horizon-forgets-received", "a horizon covers only what its rows depend on", HorizonForgetsReceived, bound="queues"),
    _mutant("rule 2", "horizon-one-short", "a horizon leaves out the newest result that a row depends on", HorizonOneShort, _ASYNC),
    _mutant("rule 2", "horizon-decreases", "a horizon may be lower than the one before", HorizonDecreases, _ASYNC),
    _mutant("rule 3", "chunks-wait-for-results", "a chunk waits for the step of the one before it", ChunksWaitForResults, bound="chunks"),
    _mutant("rule 16", "reserves-by-flag", "blocks are reserved for one outstanding result", ReservesByFlag, _DRAFTS),
    _mutant("rule 16", "reserves-past-cap", "the reservation is not clipped at the length cap", ReservesPastCap, _DRAFTS),
    _mutant("rule 16", "keeps-drafts-when-short", "drafts are not dropped when blocks are short", KeepsDraftsWhenShort, _DRAFTS, bound="drafts"),
    _mutant("rule 17", "victim-of-any-rank", "a victim may rank above the beneficiary", VictimOfAnyRank, _TIGHT),
    _mutant("rule 17", "victim-with-row", "a victim may have a row in the plan", VictimWithRow, _TIGHT),
    _mutant("rule 17", "victim-with-ready", "a victim may have a ready record in the plan", VictimWithReady, _HAND_OVER),
    _mutant("rule 17", "preempted-go-last", "arrival does not survive preemption", PreemptedGoLast, _TIGHT, bound="order"),
    _mutant(
        "rule 21",
        "reuses-generations",
        "generations count from 0 in each epoch",
        ReusesGenerations,
        _CRASHES,
        equivalent="nothing that outlives an epoch goes by generation: links drop what is of an older epoch, and everything else is made anew",
    ),
    _mutant("rule 21", "admits-finished-again", "a finish that was received is admitted again", AdmitsFinishedAgain, _CRASHES),
    _mutant("rule 21", "forgets-answers", "an epoch begins every answer again", ForgetsAnswers, _CRASHES),
    _mutant("rule 22", "no-strikes", "nobody is struck", NoStrikes, _POISON),
    _mutant("rule 22", "isolates-nobody", "nobody runs alone, however often it was struck", IsolatesNobody, _POISON),
    _mutant("rule 22", "ends-any-struck", "who was struck too often is ended, though others ran beside it", EndsAnyStruck, _POISON),
    _mutant("rule 23", "no-share", "a plan takes every row that is eligible", NoShare, bound="shares"),
    _mutant("rule 26", "siblings-together", "siblings are admitted in one plan", SiblingsTogether, bound="siblings"),
    _mutant("C1-03", "anchors-too-early", "a decode does not wait for the token that it starts from", AnchorsTooEarly, _SYNC),
    _mutant("C1-11", "aborts-one-microbatch", "an abort looks at the newest plan only", AbortsOneMicrobatch, _ABORTS),
    _mutant("C1-12", "delivers-late-results", "results of a request that has ended are delivered", DeliversLateResults, _ABORTS),
    _mutant("C4-01", "resumes-with-prompt", "a preempted request comes again with its prompt alone", ResumesWithPrompt),
    _mutant("C4-02", "matches-by-name", "a result of an earlier admission is booked on the present one", MatchesByName, _ASYNC),
    _mutant("C4-12", "preempted-keep-slot", "preemption does not free the slot", PreemptedKeepSlot),
    _mutant("C7-07", "never-drains", "what is kept of a plan stays after its result", NeverDrains),
    _mutant(
        "C1-03",
        "spreads-nothing",
        "two decodes of one request may follow each other at once in either mode",
        SpreadsNothing,
        equivalent="its horizon makes the second wait for the first's result on every replica; only the time differs",
    ),
)
