"""`Scheduler` against an account kept from what it says alone: plans as they are written, deliveries as they come. The account decides nothing.

Per request its tokens; per admission its slot, blocks and outstanding samples. Requests come, are aborted and come again under the same name at any
moment; a result may bring one token or several, since drafts are right or wrong by position.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from core_loop import Loop, make_request, make_scheduler
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lockstep.core.arrivals import Delivery
from lockstep.core.outputs import FinishReason
from lockstep.core.records import Side, StepPlan

BLOCK_SIZE, LENGTH = 4, 24
NAMES = ("a", "b", "c", "d", "e")


def draw(_generation: int, position: int) -> int:
    return position * 7 % 11


def propose(generation: int, known: int) -> list[int]:
    """Up to three drafts for known + 1 and on, every third wrong."""
    return [draw(0, known + 1 + i) if (known + i) % 3 else 99 for i in range((generation + known) % 4)]


@dataclass(slots=True)
class Request:
    """name and tokens of one submission; seed tells submissions apart in plans."""

    name: str
    seed: int
    tokens: list[int]
    cap: int
    stops: tuple[int, ...]
    delivered: int = 0


@dataclass(slots=True)
class Admitted:
    """One generation. blocks: as often as it was given them. outstanding: (step, most tokens) of samples whose result has not come."""

    request: Request
    slot: int
    generation: int
    computed: int
    blocks: list[int] = field(default_factory=list)
    outstanding: list[tuple[int, int]] = field(default_factory=list)
    sampled: bool = False


class SchedulerAgainstAccount(RuleBasedStateMachine):
    @initialize(
        asynchronous=st.booleans(),
        microbatch_count=st.integers(1, 3),
        slot_count=st.integers(1, 4),
        token_budget=st.sampled_from([2, 5, 16]),
        blocks=st.integers(6, 12),
        prefix_caching=st.booleans(),
        priorities=st.booleans(),
        drafts_max=st.sampled_from([0, 3]),
    )
    def start(self, blocks: int, **settings_drawn: Any) -> None:
        self.scheduler = make_scheduler(block_counts=(blocks,), **settings_drawn)
        self.config = self.scheduler.config
        self.loop = Loop(self.scheduler, length_max=LENGTH, draw=draw, propose=propose if self.config.drafts_max else None)
        self.requests: dict[str, Request] = {}
        self.admitted: dict[int, Admitted] = {}
        self.released: set[int] = set()
        self.submitted = self.written = self.received = self.horizon = 0

    # What comes in

    @rule(name=st.sampled_from(NAMES), length=st.sampled_from([8, 1, 3, 4, 8, 11]), token=st.integers(0, 1), data=st.data())
    def submit(self, name: str, length: int, token: int, data: st.DataObject) -> None:
        """Prompts of one token again and again, so that the cache is hit."""
        if name in self.requests:
            return
        prompt = [token] * length
        new, priority = data.draw(st.integers(1, LENGTH - len(prompt))), data.draw(st.integers(0, 2))
        stops = data.draw(st.sampled_from([(), (), (3,)]))
        spec = make_request(name, prompt, new, priority=priority, side=Side(stop_ids=stops))
        self.requests[name] = Request(name, self.submitted, list(prompt), len(prompt) + new, stops)
        self.scheduler.submit(replace(spec, seed=self.submitted))
        self.submitted += 1

    @rule(name=st.sampled_from(NAMES))
    def abort(self, name: str) -> None:
        ended = self.scheduler.abort(name)
        assert (ended is not None) == (name in self.requests)
        self.loop.tokens.pop(name, None)
        self.requests.pop(name, None)

    @precondition(lambda self: self.loop.plans)
    @rule()
    def answer(self) -> None:
        step = self.loop.plans[0].step
        deliveries = self.loop.answer()
        result = self.received
        assert step == result
        waiting = [one for one in self.admitted.values() if one.outstanding and one.outstanding[0][0] == result]
        due = {one.request.seed for one in waiting if self.requests.get(one.request.name) is one.request}
        assert sorted(delivery.request.spec.seed for delivery in deliveries) == sorted(due), "each sample of a live request is delivered, once"
        self.received += 1
        for delivery in deliveries:
            (one,) = [one for one in waiting if one.request.seed == delivery.request.spec.seed]
            self._note_delivery(one, delivery)
        for one in waiting:
            one.outstanding.pop(0)

    def _note_delivery(self, one: Admitted, delivery: Delivery) -> None:
        request = one.request
        assert delivery.index == request.delivered
        assert 0 < len(delivery.tokens) <= one.outstanding[0][1]
        for token in delivery.tokens:
            assert token == draw(0, len(request.tokens))
            request.tokens.append(token)
        request.delivered += len(delivery.tokens)
        stopped = delivery.tokens[-1] in request.stops
        expected = FinishReason.STOP if stopped else FinishReason.LENGTH if len(request.tokens) == request.cap else None
        assert delivery.finish == expected
        assert not set(delivery.tokens[:-1]) & set(request.stops)
        if delivery.finish is not None:
            del self.requests[request.name]
            self.loop.tokens.pop(request.name)

    # What it says

    @rule()
    def plan(self) -> None:
        plan = self.loop.plan()
        if plan is None:
            return
        assert plan.step == self.written
        self.written += 1
        assert self.written - self.received <= self.config.microbatch_count + self.config.asynchronous
        assert max(self.horizon, self.received) <= plan.horizon <= plan.step
        self.horizon = plan.horizon
        assert self.config.asynchronous or plan.horizon == self.received
        self._note_releases(plan)
        self._note_admissions(plan)
        by_slot = {one.slot: one for one in self.admitted.values()}
        for i, slot in enumerate(plan.new_blocks.slots.tolist()):
            by_slot[slot].blocks += plan.new_blocks.blocks.row(i).tolist()
        self._note_rows(plan)

    def _note_releases(self, plan: StepPlan) -> None:
        for slot, generation in zip(plan.releases.slots.tolist(), plan.releases.generations.tolist(), strict=True):
            assert generation not in self.released, "released once"
            assert self.admitted.pop(generation).slot == slot
            self.released.add(generation)

    def _note_admissions(self, plan: StepPlan) -> None:
        values = plan.admissions.values
        for i, slot in enumerate(plan.admissions.slots.tolist()):
            generation, seed, computed = (int(values[name][i]) for name in ("generation", "seed", "computed"))
            assert generation not in self.released
            assert generation not in self.admitted
            assert slot not in [one.slot for one in self.admitted.values()]
            (request,) = [request for request in self.requests.values() if request.seed == seed]
            assert request not in [one.request for one in self.admitted.values()]
            assert plan.admissions.tokens.row(i).tolist() == request.tokens
            assert computed % BLOCK_SIZE == 0
            assert computed < len(request.tokens)
            assert computed == 0 or self.config.prefix_caching
            self.admitted[generation] = Admitted(request, slot, generation, computed)

    def _note_rows(self, plan: StepPlan) -> None:
        rows = plan.rows
        assert rows.counts.sum() <= self.config.token_budget
        assert len(set(rows.slots.tolist())) == len(rows)
        for slot, generation, count, start, samples in zip(
            rows.slots.tolist(), rows.generations.tolist(), rows.counts.tolist(), rows.starts.tolist(), rows.samples.tolist(), strict=True
        ):
            one = self.admitted[generation]
            assert one.slot == slot
            assert count > 0
            assert self.requests.get(one.request.name) is one.request, "no row for a request that has ended"
            assert all(step < plan.horizon for step, _ in one.outstanding), "no row on a slot that is pending"
            if not one.sampled:
                assert start == one.computed
                one.computed += count
                assert bool(samples) == (one.computed == len(one.request.tokens))
            elif not one.outstanding:
                assert start == len(one.request.tokens) - 1
            if samples:
                one.outstanding.append((plan.step, count if one.sampled else 1))
                one.sampled = True
            most = len(one.request.tokens) + sum(most for _, most in one.outstanding)
            needed = min(one.request.cap, most) - 1 if one.sampled else one.computed
            assert len(one.blocks) * BLOCK_SIZE >= needed, "blocks for all that may be written"
            assert len(one.blocks) <= -(-(one.request.cap - 1) // BLOCK_SIZE)

    # What must always hold

    @invariant()
    def books_agree(self) -> None:
        pool, held = self.scheduler.pools[0], {block for one in self.admitted.values() for block in one.blocks}
        assert pool.free_count == pool.block_count - len(held)
        assert len({one.slot for one in self.admitted.values()}) == len(self.admitted) <= self.config.slot_count
        assert sorted(self.scheduler.request_ids) == sorted(self.requests)
        assert self.scheduler.plans_in_flight == self.written - self.received
        written_to = [block for one in self.admitted.values() for block in one.blocks[len(one.request.tokens) // BLOCK_SIZE :]]
        assert len(written_to) == len(set(written_to)), "a block that is not full has one owner"
        assert self.scheduler.audit() == []

    def teardown(self) -> None:
        """Everything that was submitted and not aborted ends, and nothing is held then."""
        for _ in range(1500):
            before = self.written
            self.plan()
            if self.written == before:
                if not self.loop.plans:
                    break
                self.answer()
            self.books_agree()
        assert not self.scheduler.has_work
        assert (self.requests, self.admitted) == ({}, {})
        assert self.scheduler.pools[0].free_count == self.scheduler.pools[0].block_count
        assert self.scheduler.audit() == []


SchedulerAgainstAccount.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, print_blob=True)
TestSchedulerAgainstAccount = SchedulerAgainstAccount.TestCase
