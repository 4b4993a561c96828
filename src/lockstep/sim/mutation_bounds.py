"""Bounds on speed that the real parts keep: mutants which only make the engine slower, or its queues longer, break one of these and nothing else.

Each looks at one small engine without faults. `broken_bound` says in words what was out of bounds, or ''.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lockstep.core.records import StepPlan, StepResult
from lockstep.core.types import ceil_div
from lockstep.runtime.transport.cluster import FromStages
from lockstep.sim.parts import Parts
from lockstep.sim.scenario import Ask, EngineShape, Scenario
from lockstep.sim.simulation import Simulation

STAGES, BLOCK = 3, 4


def _scenario(asks: tuple[Ask, ...], *, token_budget: int, drafts_max: int = 0) -> Scenario:
    shape = EngineShape(
        stage_count=STAGES,
        asynchronous=True,
        block_size=BLOCK,
        block_count=64,
        slot_count=8,
        token_budget=token_budget,
        microbatch_count=STAGES,
        prefix_caching=True,
        priorities=False,
        drafts_max=drafts_max,
        work_s=(0.01,) * STAGES,
    )
    return Scenario(seed=1, engines=(shape,), asks=asks)


def _asks(count: int, *, prompt_length: int, tokens_max: int, every_s: float = 0.0, siblings: bool = False) -> tuple[Ask, ...]:
    return tuple(
        Ask(
            name=f"r{i}",
            prompt=tuple(range(1, prompt_length + 1)) if siblings else tuple((7 * i + j) % 300 for j in range(prompt_length)),
            tokens_max=tokens_max,
            seed=i + 1,
            at=i * every_s,
            sibling_of="r0" if siblings and i else "",
        )
        for i in range(count)
    )


class _Observed(Simulation):
    """plans_before_result: written before the first result came. buffered_most: results that any replica kept at once. rows_over: most rows of a plan
    of decodes beyond the share of a microbatch. passed: (who was admitted, who had come before and still waited)."""

    def __init__(self, scenario: Scenario, parts: Parts) -> None:
        super().__init__(scenario, parts, None)
        self.plans_before_result = 0
        self.buffered_most = 0
        self.rows_over = 0
        self.passed: list[tuple[str, str]] = []
        self._results = 0

    def note_plan(self, engine: int, plan: StepPlan) -> None:
        super().note_plan(engine, plan)
        self.plans_before_result += not self._results
        scheduler = self.engines[engine].driver.scheduler
        if not len(plan.admissions.slots) and len(plan.rows):
            self.rows_over = max(self.rows_over, len(plan.rows) - ceil_div(scheduler.running_count, STAGES))
        live = [found for ask in self.scenario.asks if (found := scheduler.find(ask.name)) is not None]
        for number, request in enumerate(live):
            if request.slot is not None and request.admitted_step == plan.step:
                self.passed += [(request.spec.request_id, other.spec.request_id) for other in live[:number] if other.slot is None]

    def note_taken(self, engine: int, message: FromStages) -> None:
        super().note_taken(engine, message)
        self._results += isinstance(message, StepResult)
        stages = [host.stage for host in self.engines[engine].hosts if host.stage is not None]
        replicas = [self.engines[engine].driver._replica, *(stage._replica for stage in stages)]
        self.buffered_most = max(self.buffered_most, *(replica.buffered_count for replica in replicas))


def _queues(parts: Parts) -> str:
    """PROTOCOL.md 2: traffic of one-token requests advances horizons too."""
    seen = _Observed(_scenario(_asks(40, prompt_length=3, tokens_max=1, every_s=0.01), token_budget=8), parts)
    seen.run()
    most = seen.engines[0].driver.scheduler.config.plans_in_flight_max + 1
    return "" if seen.buffered_most <= most else f"{seen.buffered_most} results are kept at once by a replica, {most} plans are in flight"


def _chunks(parts: Parts) -> str:
    """PROTOCOL.md 24: chunks of one prompt follow each other into the pipeline without waiting."""
    seen = _Observed(_scenario(_asks(1, prompt_length=24, tokens_max=1), token_budget=4), parts)
    seen.run()
    most = seen.engines[0].driver.scheduler.config.plans_in_flight_max
    return "" if seen.plans_before_result >= most else f"{seen.plans_before_result} chunks are on their way at once, {most} could be"


def _shares(parts: Parts) -> str:
    """PROTOCOL.md 23: a plan takes its share of the live rows."""
    seen = _Observed(_scenario(_asks(6, prompt_length=1, tokens_max=12), token_budget=16), parts)
    seen.run()
    return "" if seen.rows_over <= 0 else f"a plan has {seen.rows_over} rows more than its share"


def _siblings(parts: Parts) -> str:
    """PROTOCOL.md 26: choices of one prompt hit the first one's blocks."""
    count, length = 3, 17
    seen = _Observed(_scenario(_asks(count, prompt_length=length, tokens_max=4, siblings=True), token_budget=64), parts)
    hits, least = seen.run().counts["prefix_hits"], (count - 1) * (length - 1) // BLOCK * BLOCK
    return "" if hits >= least else f"{count - 1} siblings hit {hits} tokens of {least}"


def _drafts(parts: Parts) -> str:
    """PROTOCOL.md 16: drafts are dropped before anybody is preempted. r0 needs its third block only for drafts while r1 still runs."""
    asks = (
        Ask(name="r0", prompt=tuple(range(1, 10)), tokens_max=15, seed=1, at=0.0, drafter="wrong"),
        Ask(name="r1", prompt=(7, 8), tokens_max=6, seed=2, at=0.0),
    )
    scenario = _scenario(asks, token_budget=64, drafts_max=4)
    shape = replace(
        scenario.engines[0], stage_count=1, asynchronous=False, block_size=8, block_count=3, microbatch_count=1, prefix_caching=False, work_s=(0.01,)
    )
    count = _Observed(replace(scenario, engines=(shape,)), parts).run().counts["preemptions"]
    return f"{count} requests are preempted to make room for drafts" if count else ""


def _order(parts: Parts) -> str:
    """PROTOCOL.md 17: who is preempted keeps its place. r1 loses its blocks to r0 while others arrive; else it could wait for ever."""
    first = (
        Ask(name="r0", prompt=tuple(range(1, 13)), tokens_max=16, seed=1, at=0.0),
        Ask(name="r1", prompt=tuple(range(21, 33)), tokens_max=12, seed=2, at=0.0),
    )
    later = tuple(Ask(name=f"r{i}", prompt=(i, i, i), tokens_max=3, seed=i, at=0.01 * i) for i in range(2, 24))
    scenario = _scenario((*first, *later), token_budget=64)
    shape = replace(scenario.engines[0], stage_count=1, asynchronous=False, block_count=8, microbatch_count=1, slot_count=3, work_s=(0.01,))
    seen = _Observed(replace(scenario, engines=(shape,)), parts)
    preempted = seen.run().counts["preemptions"]
    assert preempted, "the scenario is about preemption"
    return f"{seen.passed[0][0]} passes {seen.passed[0][1]}" if seen.passed else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    says: str
    look: Callable[[Parts], str]


BOUNDS = {
    "queues": Bound(says="no replica keeps more results than plans are in flight", look=_queues),
    "chunks": Bound(says="chunks of a lone prompt fill the pipeline", look=_chunks),
    "shares": Bound(says="a plan has at most a microbatch's share of the live rows", look=_shares),
    "drafts": Bound(says="nobody is preempted to make room for drafts", look=_drafts),
    "order": Bound(says="nobody passes who came earlier and was preempted", look=_order),
    "siblings": Bound(says="choices of one prompt share its blocks", look=_siblings),
}


def broken_bound(name: str, parts: Parts) -> str:
    return BOUNDS[name].look(parts)
