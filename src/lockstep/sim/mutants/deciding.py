"""Loosened plans: horizons, full pipelines, reservation, victims, spacing. One party decides, so each has the scope ALL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.core.arrivals import Delivery
from lockstep.core.plan_builder import PlanBuilder
from lockstep.core.records import StepPlan, StepResult
from lockstep.core.request import LiveRequest
from lockstep.core.types import UNKNOWN_START
from lockstep.sim.mutants.mutant import Mutant
from lockstep.sim.mutants.setting import Setting
from lockstep.sim.mutants.watched_scheduler import OtherRequests, WatchedScheduler, decider

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
            eligible = request.slot is not None and not request.ending and self._dependency_met(request, newest)
            if eligible and build.budget_used < self.config.token_budget:
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


# C1-03: spacing


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


_DRAFTS, _TIGHT = Setting(drafts=True), Setting(tight=True)
_ASYNC, _SYNC = Setting(asynchronous=True), Setting(asynchronous=False)
_HAND_OVER = Setting(hand_over=True, tight=True)

MUTANTS: Sequence[Mutant] = (
    decider("rule 2", "horizon-forgets-received", "a horizon covers only what its rows depend on", HorizonForgetsReceived, bound="queues"),
    decider("rule 2", "horizon-one-short", "a horizon leaves out the newest result that a row depends on", HorizonOneShort, _ASYNC),
    decider("rule 2", "horizon-decreases", "a horizon may be lower than the one before", HorizonDecreases, _ASYNC),
    decider("rule 3", "chunks-wait-for-results", "a chunk waits for the step of the one before it", ChunksWaitForResults, bound="chunks"),
    decider("rule 16", "reserves-by-flag", "blocks are reserved for one outstanding result", ReservesByFlag, _DRAFTS),
    decider("rule 16", "reserves-past-cap", "the reservation is not clipped at the length cap", ReservesPastCap, _DRAFTS),
    decider("rule 16", "keeps-drafts-when-short", "drafts are not dropped when blocks are short", KeepsDraftsWhenShort, _DRAFTS, bound="drafts"),
    decider("rule 17", "victim-of-any-rank", "a victim may rank above the beneficiary", VictimOfAnyRank, _TIGHT),
    decider("rule 17", "victim-with-row", "a victim may have a row in the plan", VictimWithRow, _TIGHT),
    decider("rule 17", "victim-with-ready", "a victim may have a ready record in the plan", VictimWithReady, _HAND_OVER),
    decider("rule 17", "preempted-go-last", "arrival does not survive preemption", PreemptedGoLast, _TIGHT, bound="order"),
    decider("rule 23", "no-share", "a plan takes every row that is eligible", NoShare, bound="shares"),
    decider("rule 26", "siblings-together", "siblings are admitted in one plan", SiblingsTogether, bound="siblings"),
    decider("C1-03", "anchors-too-early", "a decode does not wait for the token that it starts from", AnchorsTooEarly, _SYNC),
    decider(
        "C1-03",
        "spreads-nothing",
        "two decodes of one request may follow each other at once in either mode",
        SpreadsNothing,
        equivalent="its horizon makes the second wait for the first's result on every replica; only the time differs",
    ),
)
