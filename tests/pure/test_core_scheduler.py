"""What a plan may say, under random loads: budget, share, horizon, reservation, victims. The test keeps its own books from the plans alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from core_loop import TOKEN, Answer, Loop, make_request, make_result, make_scheduler

from lockstep.core.records import Side, StepPlan
from lockstep.core.request import EngineRequest, LiveRequest
from lockstep.core.types import ceil_div
from lockstep.errors import LogError

BLOCK_SIZE, LENGTH = 4, 40


def draw(generation: int, position: int) -> int:
    """A token that depends on the position alone, so that drafts can be right by plan."""
    return position * 7 % 11


def propose(generation: int, known: int) -> list[int]:
    """Up to three drafts, of which every third is wrong. The first follows the token that this result brings, so it guesses at known + 1."""
    count = (generation + known) % 4
    return [draw(0, known + 1 + i) if (known + i) % 3 else 99 for i in range(count)]


@dataclass(slots=True)
class Held:
    """What the plans so far have said about one generation. most: by step of a row that samples, the most tokens that its result can add."""

    request: LiveRequest
    cap: int
    rank: tuple[int, int]
    blocks: int = 0
    last_sample: int = -1
    slot: int = -1
    most: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Ledger:
    """Reads plans as they are written, before their results; shares no code with the scheduler."""

    loop: Loop
    held: dict[int, Held] = field(default_factory=dict)
    horizon: int = 0
    preempted: int = 0

    def note(self, plan: StepPlan) -> None:
        config = self.loop.scheduler.config
        assert plan.step == self.loop.scheduler.next_step - 1
        assert int(plan.rows.counts.sum()) <= config.token_budget
        assert (plan.rows.counts > 0).all()
        assert len(set(plan.rows.slots.tolist())) == len(plan.rows)
        released = [self.held.pop(generation) for generation in plan.releases.generations.tolist()]
        self._note_admissions(plan)
        self._note_blocks(plan)
        self._note_horizon(plan)
        self._note_victims(plan, released)
        self._note_rows(plan)

    def _note_admissions(self, plan: StepPlan) -> None:
        a = plan.admissions
        for i in range(len(a.slots)):
            generation = int(a.values["generation"][i])
            assert generation not in self.held
            known, cap = int(a.values["known"][i]), int(a.values["length_cap"][i])
            request = self.loop.scheduler._by_generation[generation]
            rank = (request.spec.priority if self.loop.scheduler.config.priorities else 0, request.arrival)
            self.held[generation] = Held(request, cap, rank, slot=int(a.slots[i]))
            assert a.values["computed"][i] % BLOCK_SIZE == 0
            assert 0 <= a.values["computed"][i] <= known - 1, "rule 4: hits lie below known - 1"

    def _note_blocks(self, plan: StepPlan) -> None:
        by_slot = {one.slot: one for one in self.held.values()}
        for i, slot in enumerate(plan.new_blocks.slots.tolist()):
            by_slot[slot].blocks += len(plan.new_blocks.blocks.row(i))
        for one in self.held.values():
            assert one.blocks <= ceil_div(one.cap - 1, BLOCK_SIZE), "rule 16: reservation is clipped at the length cap"

    def _note_horizon(self, plan: StepPlan) -> None:
        """Rule 2: never decreases, covers what was received and every result that a row depends on."""
        assert plan.horizon >= self.horizon
        assert plan.horizon >= self.loop.scheduler.received
        assert plan.horizon <= plan.step
        self.horizon = plan.horizon
        for generation in plan.rows.generations.tolist():
            assert self.held[generation].last_sample < plan.horizon

    def _note_victims(self, plan: StepPlan, released: list[Held]) -> None:
        """Rule 17: a victim has no row in the plan that drops it, nobody comes in by that plan, and it ranks strictly below whoever gains."""
        live = self.loop.scheduler.request_ids
        victims = [one for one in released if one.request.spec.request_id in live]
        self.preempted += len(victims)
        rows = [self.held[generation] for generation in plan.rows.generations.tolist()]
        gainers = [one.rank for one in rows if one.slot in plan.new_blocks.slots.tolist()] or [one.rank for one in self.held.values()]
        for victim in victims:
            assert min(gainers) < victim.rank
            assert not any(one.request is victim.request for one in rows)
            assert len(plan.admissions.slots) == 0

    def _note_rows(self, plan: StepPlan) -> None:
        """Rule 16: the blocks cover every position that may be written once all outstanding results have added as much as they can."""
        for generation, count, samples in zip(plan.rows.generations.tolist(), plan.rows.counts.tolist(), plan.rows.samples.tolist(), strict=True):
            one = self.held[generation]
            if samples:
                one.most[plan.step] = count if one.last_sample >= 0 else 1
                one.last_sample = plan.step
                outstanding = sum(most for step, most in one.most.items() if step >= self.loop.scheduler.received)
                assert one.blocks * BLOCK_SIZE >= min(one.cap, one.request.known + outstanding) - 1


def random_load(rng: random.Random) -> list[EngineRequest]:
    requests = []
    for i in range(rng.randrange(4, 14)):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
        stops = Side(stop_ids=(rng.randrange(11),)) if rng.random() < 0.3 else Side()
        requests.append(make_request(f"r{i}", prompt, rng.randrange(1, LENGTH - len(prompt)), priority=rng.randrange(3), side=stops))
    return requests


@pytest.mark.parametrize("seed", range(40))
def test_every_plan_of_a_random_load_keeps_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(
        slot_count=rng.randrange(1, 6),
        token_budget=rng.choice([2, 5, 16]),
        microbatch_count=rng.randrange(1, 4),
        asynchronous=bool(seed % 2),
        block_counts=(rng.randrange(10, 16),),
        prefix_caching=rng.random() < 0.7,
        priorities=rng.random() < 0.5,
        drafts_max=rng.choice([0, 3]),
    )
    loop = Loop(scheduler, length_max=LENGTH, draw=draw, propose=propose if scheduler.config.drafts_max else None)
    ledger, waiting = Ledger(loop), random_load(rng)
    requests = list(waiting)
    while waiting or scheduler.has_work:
        if waiting and rng.random() < 0.3:
            scheduler.submit(waiting.pop(0))
        if rng.random() < 0.6 and (plan := loop.plan()) is not None:
            ledger.note(plan)
        elif loop.plans:
            loop.answer()
    for request in requests:
        expected: list[int] = []
        for position in range(len(request.prompt), request.length_cap):
            expected.append(draw(0, position))
            if expected[-1] in request.side.stop_ids:
                break
        assert loop.tokens[request.request_id] == expected
    assert scheduler.audit() == []
    assert ledger.preempted == scheduler.stats.preemptions


def test_random_loads_preempt_and_verify_drafts() -> None:
    """The property above means little if nobody is ever preempted; a pool of 10 blocks for requests of up to 10 sees to it."""
    scheduler = make_scheduler(block_counts=(10,), drafts_max=3)
    loop = Loop(scheduler, length_max=LENGTH, draw=draw, propose=propose)
    for i in range(4):
        scheduler.submit(make_request(f"r{i}", [i] * 6, 30))
    loop.run()
    assert scheduler.stats.preemptions > 0
    assert max(int(layout.draft_ids.lengths().max(initial=0)) for layout in loop.layouts) == 3


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_microbatch_takes_its_share_of_the_live_requests_and_no_more(microbatches: int, asynchronous: bool) -> None:
    """Rule 23: with 6 requests that decode, a plan has ceil(6 / M) rows, and M plans are in flight."""
    scheduler = make_scheduler(slot_count=6, token_budget=64, microbatch_count=microbatches, asynchronous=asynchronous, block_counts=(64,))
    loop = Loop(scheduler)
    for i in range(6):
        scheduler.submit(make_request(f"r{i}", [i], 40))
    for _ in range(30):
        while (plan := loop.plan()) is not None:
            if plan.step >= 2 * microbatches:
                assert 0 < len(plan.rows) <= ceil_div(6, microbatches)
        assert scheduler.plans_in_flight <= microbatches + asynchronous
        if scheduler.next_step > 3 * microbatches:
            assert scheduler.plans_in_flight >= ceil_div(6, ceil_div(6, microbatches))
        loop.answer()


@pytest.mark.parametrize("drafts_max", [0, 2, 5])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_pool_that_exactly_fits_the_request_is_enough(drafts_max: int, asynchronous: bool) -> None:
    """Rule 16: drafts and outstanding results are cut at the cap and give way to the pool; the request ends with all its tokens."""
    for new in range(1, 14):
        prompt = [1, 2, 3]
        scheduler = make_scheduler(block_counts=(ceil_div(len(prompt) + new - 1, BLOCK_SIZE),), drafts_max=drafts_max, asynchronous=asynchronous)
        loop = Loop(scheduler, propose=lambda _generation, known: [TOKEN if known % 3 else 99] * drafts_max)
        scheduler.submit(make_request("r", prompt, new))
        loop.run()
        assert loop.tokens["r"] == [TOKEN] * new
        assert scheduler.audit() == []


def test_highest_ranking_request_is_never_preempted() -> None:
    scheduler = make_scheduler(block_counts=(12,), priorities=True)
    loop = Loop(scheduler)
    names = [("low", 5), ("middle", 3), ("high", 0)]
    for name, priority in names:
        scheduler.submit(make_request(name, [priority] * 10, 30, priority=priority))
    requests = {name: scheduler._requests[name] for name, _ in names}
    loop.run()
    assert requests["high"].preemptions == 0
    assert requests["low"].preemptions > 0
    assert all(loop.tokens[name] == [TOKEN] * 30 for name, _ in names)


def test_victim_with_a_row_in_the_plan_is_spared() -> None:
    """Rule 17: the lowest takes the last block for its row; a higher one that is short of one in the same plan waits."""
    loop = Loop(make_scheduler(token_budget=9, block_counts=(5,), priorities=True))
    loop.scheduler.submit(make_request("first", [1] * 2, 6, priority=1))
    loop.scheduler.submit(make_request("lowest", [2] * 3, 6, priority=2))
    loop.expect_plan()
    loop.scheduler.submit(make_request("high", [3] * 12, 3, priority=0))
    assert loop.expect_plan().rows.counts.tolist() == [1, 1, 7]
    loop.answer()
    plan = loop.expect_plan()
    assert loop.scheduler.pools[0].free_count == 0
    assert (len(plan.rows), len(plan.releases.slots)) == (2, 0)
    loop.run()
    assert {name: len(tokens) for name, tokens in loop.tokens.items()} == {"first": 6, "lowest": 6, "high": 3}


def test_results_out_of_turn_and_of_unknown_size_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("r", [1, 2], 9))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(LogError, match="result of step 0 comes next"):
        scheduler.receive(make_result(1))
    with pytest.raises(LogError, match="at most 1 tokens; step 0 brought 2"):
        scheduler.receive(make_result(0, [Answer(0, 0, [5, 6])]))


def test_plans_are_a_function_of_what_came_in() -> None:
    """The same submissions and results in the same order give the same plans, bit for bit."""

    def record() -> list[list[list[int]]]:
        loop = Loop(make_scheduler(block_counts=(12,), drafts_max=3), length_max=LENGTH, draw=draw, propose=propose)
        for request in random_load(random.Random(3)):
            loop.scheduler.submit(request)
        written = []
        for _ in range(400):
            while (plan := loop.plan()) is not None:
                written.append([np.asarray(array).reshape(-1).tolist() for array in plan.columns().values()])
            if not loop.plans:
                break
            loop.answer()
        assert not loop.scheduler.has_work
        return written

    first = record()
    assert len(first) > 20
    assert first == record()
