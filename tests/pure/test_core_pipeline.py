"""How full the scheduler keeps a pipeline, in virtual time: stages that take 1, a driver turn and links that take a share of it (PROTOCOL.md 23, 24).

Only plans and their order are real here; a step costs the same whatever is in it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import pytest
from core_loop import Loop, make_request, make_scheduler

from lockstep.core.layout import BatchLayout
from lockstep.core.records import StepPlan

OVERHEAD = 0.05
"""A driver turn, and the way of a message over a link, in stage times."""


@dataclass(slots=True)
class StageClock:
    free: float = 0.0
    busy: float = 0.0


class Pipeline:
    """starts: when the first stage began and ended each plan. A plan's way through the stages is worked out when it is sent."""

    def __init__(self, loop: Loop, stage_count: int, overhead: float) -> None:
        self.loop = loop
        self.overhead = overhead
        self.clocks = [StageClock() for _ in range(stage_count)]
        self.driver_free = 0.0
        self.starts: list[tuple[float, float]] = []
        self._result_at: dict[int, float] = {}
        self._results: list[float] = []

    def run(self, until: float) -> None:
        """Driver turns until the clock passes `until`, or nothing is left. Each turn takes what has come and writes what can be written."""
        now = 0.0
        while now <= until:
            while self._results and self._results[0] <= now:
                heapq.heappop(self._results)
                self.loop.answer()
            done = now + self.overhead
            wrote = False
            while (plan := self.loop.plan()) is not None:
                self._send(plan, done + self.overhead)
                wrote = True
            if not self._results and not wrote:
                return
            now = max(done, self._results[0]) if self._results else done

    def _send(self, plan: StepPlan, arrives: float) -> None:
        """Carry a plan through all stages: each starts it when it is free, the stage before has sent, and the results below its horizon have come."""
        last = len(self.clocks) - 1
        for stage, clock in enumerate(self.clocks):
            known = max((self._result_at[step] + (self.overhead if stage < last else 0.0) for step in range(plan.horizon)), default=0.0)
            start = max(clock.free, arrives, known)
            clock.free = start + (1.0 if len(plan.rows) else 0.0)
            clock.busy += clock.free - start
            if stage == 0:
                self.starts.append((start, clock.free))
            arrives = clock.free + self.overhead
        self._result_at[plan.step] = self.clocks[-1].free
        heapq.heappush(self._results, arrives)


def decode_utilisation(stage_count: int, *, microbatches: int, asynchronous: bool, requests: int) -> float:
    """Share of the time that the first stage works once all requests decode."""
    settings = {"microbatch_count": microbatches, "asynchronous": asynchronous, "prefix_caching": False}
    loop = Loop(make_scheduler(slot_count=requests, token_budget=256, block_counts=(requests * 40,), **settings), length_max=160)
    for i in range(requests):
        loop.scheduler.submit(make_request(f"r{i}", [i], 150))
    pipeline = Pipeline(loop, stage_count, OVERHEAD)
    first, last = 40.0, 100.0
    pipeline.run(last + stage_count)
    return sum(max(0.0, min(end, last) - max(start, first)) for start, end in pipeline.starts) / (last - first)


@pytest.mark.parametrize("stage_count", [2, 4])
def test_microbatches_fill_the_pipeline_and_asynchronous_plans_fill_it_further(stage_count: int) -> None:
    """PROTOCOL.md 23 measured 0.47 (two stages) and 0.25 (four) without microbatches; 0.91 to 0.95 with one a stage; 1.00 with one more."""
    count = stage_count * (stage_count + 1)
    alone = decode_utilisation(stage_count, microbatches=1, asynchronous=False, requests=count)
    synchronous = decode_utilisation(stage_count, microbatches=stage_count, asynchronous=False, requests=count)
    asynchronous = decode_utilisation(stage_count, microbatches=stage_count, asynchronous=True, requests=count)
    assert 0.8 / stage_count < alone < 1.0 / stage_count
    assert synchronous >= 0.9
    assert asynchronous >= max(0.94, synchronous)
    for mode in (False, True):
        assert decode_utilisation(stage_count, microbatches=stage_count + 1, asynchronous=mode, requests=count) >= 0.99


@pytest.mark.parametrize("microbatches", [4, 5])
@pytest.mark.parametrize("requests", [1, 2, 3, 5, 7])
def test_few_requests_take_turns_in_both_modes_alike(requests: int, microbatches: int) -> None:
    """Too few to fill every microbatch: planning ahead may not put a row behind the result of the row before it while another could go."""
    synchronous = decode_utilisation(4, microbatches=microbatches, asynchronous=False, requests=requests)
    asynchronous = decode_utilisation(4, microbatches=microbatches, asynchronous=True, requests=requests)
    assert asynchronous >= synchronous - 0.02
    assert asynchronous >= 0.22 * min(4, requests // -(-requests // microbatches))


def test_prefill_chunks_go_back_to_back() -> None:
    """Rule 24, C1-14: 6 chunks over 3 stages take 8 stage times, not 18."""
    scheduler = make_scheduler(token_budget=4, microbatch_count=3, asynchronous=False)
    loop = Loop(scheduler, length_max=32)
    scheduler.submit(make_request("r", list(range(24)), 1))
    pipeline = Pipeline(loop, 3, 0.0)
    pipeline.run(100.0)
    assert [layout.count.tolist() for layout in loop.layouts if layout.row_count] == [[4]] * 6
    assert pipeline.clocks[-1].free == 8.0
    assert len(loop.tokens["r"]) == 1


def test_decode_of_others_goes_on_between_the_chunks_of_a_long_prompt() -> None:
    """A long prompt is computed beside the decodes, within the budget, and holds none of them up."""
    scheduler = make_scheduler(token_budget=8, microbatch_count=2, asynchronous=True, slot_count=3, block_counts=(64,))
    loop = Loop(scheduler, length_max=64)
    for name in ("a", "b"):
        scheduler.submit(make_request(name, [1, 2], 40))
    pipeline = Pipeline(loop, 2, OVERHEAD)
    pipeline.run(20.0)
    before = {name: len(loop.tokens[name]) for name in ("a", "b")}
    scheduler.submit(make_request("long", list(range(50)), 2))
    mixed = [layout for layout in _continue(loop, 16) if layout.row_count == 2 and layout.count.max() > 1]
    assert len(mixed) >= 6
    assert all(layout.token_count <= 8 for layout in mixed)
    assert all(len(loop.tokens[name]) > before[name] + 4 for name in ("a", "b"))


def _continue(loop: Loop, answers: int) -> list[BatchLayout]:
    seen = len(loop.layouts)
    for _ in range(answers):
        while loop.plan() is not None:
            pass
        if not loop.plans:
            break
        loop.answer()
    return loop.layouts[seen:]
