"""Where an accepted run ends: at a draft that the target would not have drawn, at a stop or at the cap, whichever is first (C3-01, C3-02)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from core_loop import Admission, Answer, Row, make_plan, make_result, run_plan

from lockstep.core.acceptance import accept
from lockstep.core.layout import BatchLayout
from lockstep.core.logprobs import LogprobColumns
from lockstep.core.records import Side, StepResult
from lockstep.core.schema import FINISH_FAILED, FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from lockstep.core.table import SlotTable, TableShape

STOP, WRONG = 99, 50
KNOWN = 4


def verifying_layout(drafts: list[int], room: int, stop_ids: tuple[int, ...] = (STOP,)) -> BatchLayout:
    """One row that verifies these drafts after 4 known tokens, `room` tokens below its cap."""
    table = SlotTable(TableShape(slot_count=1, length_max=32, block_size=4, drafts_max=8))
    admission = Admission(slot=0, generation=1, tokens=[1, 2, 3], cap=KNOWN + room, side=Side(stop_ids=stop_ids))
    run_plan(table, make_plan(0, 0, admits=[admission], blocks=[(0, list(range(8)))], rows=[Row(0, 1, 3, 0, True)]))
    table.apply_result(make_result(0, [Answer(0, 1, [4], 0, drafts)]))
    return run_plan(table, make_plan(1, 1, rows=[Row(0, 1, 1 + len(drafts), 3, True)]))


def accepted(layout: BatchLayout, draws: list[int], drafts: list[list[int]] | None = None) -> StepResult:
    """One draw a sampled position; of `draws` those behind the last one are left out."""
    sampled = np.array(draws[: layout.sample_starts[-1]], np.int32)
    return accept(layout, sampled, epoch=0, digests=np.zeros(1, np.uint64), drafts=drafts or [])


def dumb(draws: list[int], drafts: list[int], room: int) -> tuple[list[int], int]:
    """One token at a time, as without drafts: the engine draws, looks whether that ended it, and goes on only while the draft was right."""
    run: list[int] = []
    while True:
        token = draws[len(run)]
        run.append(token)
        if token == STOP:
            return run, FINISH_STOP
        if len(run) == room:
            return run, FINISH_LENGTH
        if len(run) > len(drafts) or drafts[len(run) - 1] != token:
            return run, FINISH_NONE


@pytest.mark.parametrize("count", range(5))
def test_stop_cap_and_wrong_draft_at_every_position(count: int) -> None:
    """Every stop position, cap and first wrong draft in 1 .. k + 1, also none: the earliest event in the run wins."""
    cases = 0
    none = count + 2
    for stop, cap, wrong in itertools.product(range(1, none + 1), range(1, none + 1), range(1, count + 2)):
        draws = [10 + i if i + 1 != stop else STOP for i in range(count + 1)]
        drafts = [draws[i] if i + 1 < wrong else WRONG for i in range(count)]
        result = accepted(verifying_layout(drafts, cap), draws)
        run, finish = dumb(draws, drafts, cap)
        assert (result.tokens.row(0).tolist(), result.finishes.tolist()) == (run, [finish]), (stop, cap, wrong)
        length = min(stop, cap, wrong)
        assert len(run) == length
        expected = FINISH_STOP if length == stop else FINISH_LENGTH if length == cap else FINISH_NONE
        assert finish == expected
        cases += 1
    assert cases == none * none * (count + 1)


def test_at_one_token_a_stop_wins_over_the_cap() -> None:
    result = accepted(verifying_layout([10], 2), [10, STOP])
    assert result.tokens.row(0).tolist() == [10, STOP]
    assert result.finishes.tolist() == [FINISH_STOP]


def test_stop_behind_a_rejected_draft_does_not_count() -> None:
    result = accepted(verifying_layout([WRONG, STOP], 9), [10, STOP, 11])
    assert result.tokens.row(0).tolist() == [10]
    assert result.finishes.tolist() == [FINISH_NONE]


def test_row_that_fills_its_cap_is_in_the_result_all_the_same() -> None:
    """S4: nothing leaves a row out because it is about to finish anyway."""
    result = accepted(verifying_layout([], 1), [10])
    assert (result.slots.tolist(), result.generations.tolist(), result.tokens.row(0).tolist()) == ([0], [1], [10])
    assert result.finishes.tolist() == [FINISH_LENGTH]


def test_next_drafts_go_with_a_live_row_and_not_with_an_ended_one() -> None:
    assert accepted(verifying_layout([], 5), [10], [[7, 8]]).drafts.row(0).tolist() == [7, 8]
    assert accepted(verifying_layout([], 5), [STOP], [[7, 8]]).drafts.row(0).tolist() == []
    assert accepted(verifying_layout([], 1), [10], [[7, 8]]).drafts.row(0).tolist() == []


def test_a_run_ends_before_a_position_without_a_next_token_and_a_row_that_begins_with_one_fails() -> None:
    def taken(failed: set[int]) -> tuple[list[int], int]:
        layout = verifying_layout([10, 11], 9)
        result = accept(layout, np.array([10, 11, 12], np.int32), epoch=0, digests=np.zeros(1, np.uint64), failed=dict.fromkeys(failed, ""))
        return result.tokens.row(0).tolist(), int(result.finishes[0])

    assert taken(set()) == ([10, 11, 12], FINISH_NONE)
    assert taken({1, 2}) == ([10], FINISH_NONE)
    assert taken({2}) == ([10, 11], FINISH_NONE)
    assert taken({0, 1, 2}) == ([10], FINISH_FAILED)


def test_a_row_that_fails_has_its_reason_and_no_other_row_has_one() -> None:
    def reasons(failed: dict[int, str]) -> tuple[str, ...]:
        layout = verifying_layout([10, 11], 9)
        return accept(layout, np.array([10, 11, 12], np.int32), epoch=0, digests=np.zeros(1, np.uint64), failed=failed).reasons

    assert reasons({0: "it raised"}) == ("it raised",)
    assert reasons({0: "", 1: "it raised"}) == ()
    assert reasons({1: "it raised"}) == ()


def test_log_probabilities_follow_the_accepted_tokens() -> None:
    """C3-10: the target's, at the position, one a delivered token; those of rejected positions go."""
    layout = verifying_layout([10, WRONG, 12], 9)
    columns = LogprobColumns(
        logprobs=np.array([-1, -2, -3, -4], np.float32),
        ranks=np.array([1, 5, 1, 2], np.int32),
        top_ids=np.arange(8, dtype=np.int32).reshape(4, 2),
        top_logprobs=-np.arange(8, dtype=np.float32).reshape(4, 2),
    )
    result = accept(layout, np.array([10, 11, 12, 13], np.int32), epoch=0, digests=np.zeros(1, np.uint64), logprobs=columns)
    assert result.tokens.row(0).tolist() == [10, 11]
    assert result.logprobs is not None
    assert result.logprobs.logprobs.tolist() == [-1, -2]
    assert result.logprobs.ranks.tolist() == [1, 5]
    assert result.logprobs.top_ids.tolist() == [[0, 1], [2, 3]]
    assert result.logprobs.top_logprobs.tolist() == [[0, -1], [-2, -3]]


def test_rows_of_one_batch_end_each_on_its_own() -> None:
    table = SlotTable(TableShape(slot_count=3, length_max=16, block_size=4))
    stops = [(STOP,), (10,), ()]
    admits = [Admission(slot=i, generation=i, tokens=[1, 2], cap=3 if i == 2 else 9, side=Side(stop_ids=stops[i])) for i in range(3)]
    plan = make_plan(0, 0, admits=admits, blocks=[(i, [i]) for i in range(3)], rows=[Row(i, i, 2, 0, True) for i in (2, 0, 1)])
    result = accepted(run_plan(table, plan), [10, 10, 10])
    assert result.slots.tolist() == [2, 0, 1]
    assert result.finishes.tolist() == [FINISH_LENGTH, FINISH_NONE, FINISH_STOP]


def test_step_without_samples_has_an_empty_result() -> None:
    """PROTOCOL.md 7: a step in which nothing samples still has a result."""
    layout = run_plan(SlotTable(TableShape(slot_count=1, length_max=8, block_size=4)), make_plan(0, 0))
    result = accepted(layout, [])
    assert (result.step, len(result), len(result.tokens), len(result.drafts)) == (0, 0, 0, 0)
