"""The driver, without IO: commands and results in, plans and token events out.

It keeps a replica of the log's table like every rank and compares digests: a result reaches a client only when all ranks agree on its step
(PROTOCOL.md 10). It knows no links, processes or clocks.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from lockstep.core.digest import Digest
from lockstep.core.outputs import FinishReason, TokenEvent, TokenLogprobs
from lockstep.core.records import LogprobColumns, StepPlan, StepResult
from lockstep.core.request import EngineRequest, LiveRequest
from lockstep.core.scheduler import Delivery, Scheduler
from lockstep.core.schema import FINISH_STOP
from lockstep.core.table import SlotTable
from lockstep.errors import DivergenceError, LogError
from lockstep.runtime.replay import Replica


class Driver:
    """rank_count: ranks whose digests every result must carry."""

    def __init__(self, scheduler: Scheduler, table: SlotTable, rank_count: int) -> None:
        self.scheduler = scheduler
        self._replica = Replica(table, Digest(scheduler.epoch))
        self._rank_count = rank_count
        self._unresolved: deque[StepPlan] = deque()

    @property
    def table(self) -> SlotTable:
        return self._replica.table

    def submit(self, request: EngineRequest) -> None:
        self.scheduler.submit(request)

    def abort(self, request_id: str) -> TokenEvent | None:
        """The request's last event, or None if there is no such request."""
        request = self.scheduler.abort(request_id)
        return None if request is None else TokenEvent(request_id=request_id, index=request.delivered, finish_reason=FinishReason.ABORT)

    def next_plan(self) -> StepPlan | None:
        """The next plan to send to every stage, or None until a result, a submission or an abort changes something."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._unresolved.append(plan)
        return plan

    @property
    def waits(self) -> bool:
        """Plans are out whose results have not come."""
        return bool(self._unresolved)

    def receive(self, result: StepResult) -> list[TokenEvent]:
        """Replay the plan that the result answers, compare every rank's digest with this replica's, and hand out the tokens.
        Raises DivergenceError naming the step and the rank, LogError for a result that is not the next one."""
        if not self._unresolved or self._unresolved[0].step != result.step:
            awaited = [plan.step for plan in self._unresolved]
            raise LogError(f"result of step {result.step} came; results are awaited for steps {awaited}, in this order")
        plan = self._unresolved.popleft()
        self._replica.run(plan)
        self._compare(result)
        deliveries = self.scheduler.receive(result)
        self._replica.offer(result)
        return [_event(delivery, result.logprobs, result) for delivery in deliveries]

    def _compare(self, result: StepResult) -> None:
        found, own = result.digests, np.uint64(self._replica.digest.value)
        if len(found) != self._rank_count or (found != own).any():
            ranks = [f"stage {i}: {int(d):#018x}" for i, d in enumerate(found)]
            raise DivergenceError(
                f"step {result.step}: replicas of the log disagree; driver: {int(own):#018x}, {', '.join(ranks)} ({self._rank_count} expected). "
                "No token of this step is delivered",
                step=result.step,
            )


def _event(delivery: Delivery, logprobs: LogprobColumns | None, result: StepResult) -> TokenEvent:
    request: LiveRequest = delivery.request
    entries: tuple[TokenLogprobs, ...] = ()
    if logprobs is not None and request.spec.logprob_count >= 0:
        first = int(result.tokens.starts[delivery.row])
        entries = tuple(_logprobs(logprobs, i, request.spec.logprob_count) for i in range(first, first + len(delivery.tokens)))
    return TokenEvent(
        request_id=request.spec.request_id,
        index=delivery.index,
        token_ids=delivery.tokens,
        logprobs=entries,
        finish_reason=delivery.finish,
        stop_token=delivery.tokens[-1] if result.finishes[delivery.row] == FINISH_STOP else None,
        cached_tokens=max(0, request.cached_tokens),
    )


def _logprobs(columns: LogprobColumns, index: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_logprob=float(columns.logprobs[index]),
        top_ids=tuple(columns.top_ids[index, :count].tolist()),
        top_logprobs=tuple(columns.top_logprobs[index, :count].tolist()),
    )
