"""One request's way through the scheduler: cache hits and when they are visible, siblings, aborts in every phase, ends with rows still in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from core_loop import TOKEN, Loop, make_request, make_scheduler

from lockstep.core.outputs import FinishReason
from lockstep.core.records import Side, StepPlan
from lockstep.core.shaping import Shaping
from lockstep.errors import InternalError

PROMPT = list(range(100, 112))
"""Three blocks of four."""


def computed_of(plan: StepPlan) -> list[int]:
    """Positions that the plan's admissions take from the cache."""
    return plan.admissions.values["computed"].tolist() if len(plan.admissions.slots) else []


# Prefix cache


def test_prompt_is_hit_from_the_plan_after_the_one_that_computes_it() -> None:
    """Rule 15: not in the same plan, and then at once, before its result is in."""
    loop = Loop(make_scheduler(token_budget=64, microbatch_count=2))
    loop.scheduler.submit(make_request("a", PROMPT, 8))
    loop.scheduler.submit(make_request("b", PROMPT, 8))
    assert computed_of(loop.expect_plan()) == [0, 0]
    loop.scheduler.submit(make_request("c", PROMPT, 8))
    second = loop.expect_plan()
    assert loop.scheduler.received == 0
    assert computed_of(second) == [8]
    loop.run()
    assert loop.tokens["a"] == loop.tokens["b"] == loop.tokens["c"]


def test_chunk_publishes_no_more_than_it_computes() -> None:
    loop = Loop(make_scheduler(token_budget=6, microbatch_count=3, slot_count=2))
    loop.scheduler.submit(make_request("a", PROMPT, 8))
    loop.expect_plan()
    found = loop.scheduler.pools[0]
    assert found.free_count == 32 - 2
    loop.scheduler.submit(make_request("b", PROMPT, 8, priority=0))
    second = loop.expect_plan()
    assert computed_of(second) == []
    third = loop.expect_plan()
    assert computed_of(third) == [8]


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_hits_are_whole_blocks_below_the_last_known_token(length: int, hit: int) -> None:
    """Rule 4: at least one token is left to compute, so no row is empty and no row writes a shared block."""
    loop = Loop(make_scheduler())
    loop.scheduler.submit(make_request("a", PROMPT, 4))
    loop.run()
    loop.scheduler.submit(make_request("b", PROMPT[:length], 4))
    plan = loop.expect_plan()
    assert computed_of(plan) == [hit]
    assert plan.rows.counts.tolist() == [length - hit]
    assert plan.rows.starts.tolist() == [hit]
    shared = plan.new_blocks.blocks.row(0).tolist() if hit else []
    written = [block for i in range(len(plan.new_blocks.slots)) for block in plan.new_blocks.blocks.row(i).tolist()][len(shared) :]
    assert not set(shared) & set(written)


@pytest.mark.parametrize("known", range(4, 15))
def test_generated_blocks_are_hit_only_after_their_result(known: int) -> None:
    """Rule 15: the values of generated tokens are not known before. Another row is in flight all the while."""
    loop = Loop(make_scheduler(token_budget=64), draw=lambda _generation, position: position)
    loop.scheduler.submit(make_request("a", [0, 1, 2], 30))
    loop.expect_plan()
    while loop.scheduler._requests["a"].known < known:
        loop.answer()
        loop.expect_plan()
    loop.scheduler.submit(make_request("b", list(range(20)), 1))
    assert computed_of(loop.expect_plan()) == [(known - 1) // 4 * 4]


def test_tenants_with_other_salts_and_requests_that_need_prompt_logprobs_hit_nothing() -> None:
    """C4-07 and rule 18."""
    loop = Loop(make_scheduler())
    loop.scheduler.submit(make_request("a", PROMPT, 4, side=Side(cache_salt=b"one")))
    loop.run()
    for name, salt, count in (("b", b"two", -1), ("c", b"one", 0)):
        loop.scheduler.submit(make_request(name, PROMPT, 4, side=Side(cache_salt=salt), prompt_logprob_count=count))
        assert computed_of(loop.expect_plan()) == [0]
        loop.run()
    loop.scheduler.submit(make_request("d", PROMPT, 4, side=Side(cache_salt=b"one")))
    assert computed_of(loop.expect_plan()) == [8]


def test_without_prefix_caching_nothing_is_hit_and_nothing_is_kept() -> None:
    loop = Loop(make_scheduler(prefix_caching=False))
    for name in ("a", "b"):
        loop.scheduler.submit(make_request(name, PROMPT, 4))
        assert computed_of(loop.expect_plan()) == [0]
        loop.run()
    assert loop.scheduler.pools[0].cached_count == 0


# Siblings


def test_sibling_comes_one_plan_after_its_elder_and_hits_its_prompt() -> None:
    """Rule 26."""
    loop = Loop(make_scheduler(token_budget=64, microbatch_count=3))
    loop.scheduler.submit(make_request("r#0", PROMPT, 8))
    loop.scheduler.submit(make_request("r#1", PROMPT, 8, sibling_of="r#0"))
    loop.scheduler.submit(make_request("other", [1, 2], 8))
    first = loop.expect_plan()
    assert first.admissions.values["prompt_length"].tolist() == [12, 2], "who comes after the sibling passes it"
    second = loop.expect_plan()
    assert computed_of(second) == [8]
    loop.run()


def test_sibling_waits_until_the_last_chunk_of_its_elder_is_planned() -> None:
    loop = Loop(make_scheduler(token_budget=5, microbatch_count=8))
    loop.scheduler.submit(make_request("r#0", PROMPT, 8))
    loop.scheduler.submit(make_request("r#1", PROMPT, 8, sibling_of="r#0"))
    admitted = [len(loop.expect_plan().admissions.slots) for _ in range(4)]
    assert admitted == [1, 0, 0, 1]
    loop.run()


@pytest.mark.parametrize("phase", ["waiting", "planned"])
def test_sibling_of_an_aborted_elder_runs_alone(phase: str) -> None:
    loop = Loop(make_scheduler(token_budget=5))
    loop.scheduler.submit(make_request("r#0", PROMPT, 8))
    loop.scheduler.submit(make_request("r#1", PROMPT, 8, sibling_of="r#0"))
    if phase == "planned":
        loop.expect_plan()
    loop.scheduler.abort("r#0")
    loop.run()
    assert loop.tokens == {"r#1": [TOKEN] * 8}


# Aborts


def _in_decode(loop: Loop, answered: int) -> None:
    """Prompt computed, `answered` tokens in, one more plan out."""
    loop.expect_plan()
    for _ in range(answered):
        loop.answer()
        loop.expect_plan()


def _two_chunks(loop: Loop) -> None:
    loop.expect_plan()
    loop.expect_plan()


def _with_two_in_flight(loop: Loop) -> None:
    _in_decode(loop, 2)
    loop.expect_plan()


@dataclass(frozen=True, slots=True)
class Phase:
    reach: Callable[[Loop], object]
    budget: int
    tokens: int


PHASES: dict[str, Phase] = {
    "waiting": Phase(lambda loop: None, 16, 0),
    "in its first chunk": Phase(lambda loop: loop.expect_plan(), 5, 0),
    "between chunks in flight": Phase(_two_chunks, 5, 0),
    "with its first sample in flight": Phase(lambda loop: loop.expect_plan(), 16, 0),
    "in decode with one in flight": Phase(lambda loop: _in_decode(loop, 2), 16, 2),
    "in decode with two in flight": Phase(_with_two_in_flight, 16, 2),
}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", PHASES)
def test_aborted_request_returns_its_blocks_and_delivers_nothing_more(name: str, again: bool) -> None:
    """C4-03, C7-02; again: the same id is submitted at once, while the old one's rows are in flight. What they bring is not booked on it."""
    phase = PHASES[name]
    loop = Loop(make_scheduler(token_budget=phase.budget, block_counts=(16,)), draw=lambda generation, position: 1000 * generation + position)
    loop.scheduler.submit(make_request("x", PROMPT, 8))
    phase.reach(loop)
    assert loop.tokens.get("x", []) == list(range(12, 12 + phase.tokens))
    aborted = loop.scheduler.abort("x")
    assert aborted is not None
    assert aborted.delivered == phase.tokens
    assert loop.scheduler.abort("x") is None, "a second abort finds nothing"
    loop.tokens.pop("x", None)
    if again:
        loop.scheduler.submit(make_request("x", PROMPT, 8))
    loop.run()
    generation = 0 if name == "waiting" else 1
    assert loop.tokens == ({"x": [1000 * generation + position for position in range(12, 20)]} if again else {})
    assert loop.scheduler.audit() == []
    assert loop.table.held_slots() == []
    assert loop.scheduler.pools[0].free_count == 16


def test_request_aborted_after_its_end_is_unknown() -> None:
    loop = Loop(make_scheduler())
    loop.scheduler.submit(make_request("x", PROMPT, 1))
    loop.expect_plan()
    assert [d.finish for d in loop.answer()] == [FinishReason.LENGTH]
    assert loop.scheduler.abort("x") is None
    loop.run()
    assert loop.scheduler.audit() == []


def test_dropped_rows_are_counted() -> None:
    loop = Loop(make_scheduler())
    loop.scheduler.submit(make_request("x", PROMPT, 8))
    loop.expect_plan()
    loop.scheduler.abort("x")
    assert loop.answer() == []
    assert (loop.scheduler.stats.rows_dropped, loop.scheduler.stats.aborts_in_flight) == (1, 1)
    loop.run()


def test_same_id_twice_at_once_is_our_mistake() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("x", PROMPT, 8))
    with pytest.raises(InternalError, match="submitted twice"):
        scheduler.submit(make_request("x", PROMPT, 8))


# Ends


def test_row_of_a_request_that_has_ended_resolves_to_nothing() -> None:
    """The plan after the stop was written before the stop was known; it computes nothing for it, and its result says nothing."""
    loop = Loop(make_scheduler(asynchronous=True), draw=lambda _generation, position: position)
    loop.scheduler.submit(make_request("x", [1, 2, 3], 20, side=Side(stop_ids=(4,))))
    loop.expect_plan()
    loop.expect_plan()
    loop.answer()
    third = loop.expect_plan()
    assert len(third.rows) == 1, "written while the stop is in flight"
    assert [d.finish for d in loop.answer()] == [FinishReason.STOP]
    assert loop.answer() == []
    assert loop.layouts[-1].row_count == 0
    loop.run()
    assert loop.tokens["x"] == [3, 4]
    assert loop.scheduler.audit() == []


def test_rows_past_the_cap_are_never_planned() -> None:
    """A cap is known beforehand, so no row is wasted on what lies behind it, however many plans are in flight."""
    loop = Loop(make_scheduler(asynchronous=True, microbatch_count=4))
    loop.scheduler.submit(make_request("x", PROMPT, 5))
    loop.run()
    assert sum(layout.row_count for layout in loop.layouts) == 5
    assert loop.scheduler.stats.rows == 5


def test_slot_of_an_ended_request_is_reused_in_the_next_generation_only() -> None:
    loop = Loop(make_scheduler(slot_count=1))
    for name in ("a", "b"):
        loop.scheduler.submit(make_request(name, PROMPT, 3))
    generations = []
    while loop.scheduler.has_work:
        plan = loop.plan()
        if plan is not None and len(plan.admissions.slots):
            generations += plan.admissions.values["generation"].tolist()
        if loop.plans:
            loop.answer()
    assert generations == [0, 1]


def test_preempted_request_comes_again_with_every_known_token() -> None:
    """C4-01, C4-02: also twice in a row, with results in flight that are dropped; tokens go on where the client's stream stands."""
    loop = Loop(make_scheduler(block_counts=(10,), slot_count=3), draw=lambda _generation, position: position)
    for name in ("a", "b", "c"):
        loop.scheduler.submit(make_request(name, [1, 2, 3, 4], 30))
    low = loop.scheduler._requests["c"]
    loop.run()
    assert low.preemptions >= 2
    assert loop.scheduler.stats.rows_dropped > 0
    assert all(loop.tokens[name] == list(range(4, 34)) for name in ("a", "b", "c"))


def test_a_prompt_is_cut_where_a_step_has_told_enough_log_probabilities() -> None:
    """Each takes a row of logits. Who wants none shares the step."""
    loop = Loop(make_scheduler(token_budget=64, prompt_logprobs_max=5))
    loop.scheduler.submit(make_request("a", list(range(13)), 1, prompt_logprob_count=0))
    loop.scheduler.submit(make_request("b", list(range(40, 60)), 1))
    counts = [loop.expect_plan().rows.counts.tolist()]
    loop.answer()
    counts += [loop.expect_plan().rows.counts.tolist() for _ in range(2)]
    assert counts == [[5, 20], [5], [3]]


def test_a_request_waits_for_its_grammar_and_nobody_waits_for_it() -> None:
    """Rule 26; in each epoch anew."""
    side = Side(shaping=Shaping(grammar="g"))
    loop = Loop(make_scheduler())
    loop.scheduler.submit(make_request("a", PROMPT, 4, side=side))
    assert loop.scheduler.plan() is None
    loop.scheduler.submit(make_request("b", PROMPT, 2))
    assert computed_of(loop.expect_plan()) == [0]
    assert [request.spec.request_id for request in loop.scheduler.running] == ["b"]
    while not loop.answer()[0].finish:
        loop.expect_plan()
    loop.scheduler.grammars.add(side.shaping.grammar_key)
    loop.expect_plan()
    assert [request.spec.request_id for request in loop.scheduler.running] == ["a"]
    loop.scheduler.restart(1, strikes=False)
    assert loop.scheduler.plan() is None
