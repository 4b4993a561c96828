"""A table restored in mid-run goes on bit for bit as the one that it was taken from."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from core_loop import Admission, Row, make_plan, run_plan
from recorded_runs import RecordedRun

from lockstep.core.digest import Digest
from lockstep.core.ragged import Ragged
from lockstep.core.records import Side
from lockstep.core.schema import COLUMNS
from lockstep.core.snapshot import TableSnapshot, restore, snapshot
from lockstep.core.table import SlotTable, TableShape
from lockstep.errors import LogError
from lockstep.runtime.replay import Replica


def taken_after(run: RecordedRun, steps: int) -> TableSnapshot:
    run.run(steps)
    return snapshot(run.driver.table)


@pytest.mark.parametrize("seed", range(3))
def test_restored_table_gives_the_digests_of_the_original(seed: int) -> None:
    seen = {"drafts": False, "pending": False, "blocks": False, "finished": False}
    steps_replayed = 0
    for steps in range(0, 40, 5):
        run = RecordedRun(seed)
        taken = taken_after(run, steps)
        for name, count in (("drafts", len(taken.drafts.values)), ("blocks", len(taken.blocks[0].values))):
            seen[name] |= count > 0
        seen["pending"] |= bool((taken.columns["pending"] >= 0).any())
        seen["finished"] |= bool((taken.columns["finished"] > 0).any())
        other = Replica(restore(run.shape, taken), Digest(0))
        other.digest.value = run.driver.digest.value
        for result in run.driver.buffered:
            other.offer(result)
        while run.turn():
            plan, result, digest = run.recorder._spans[-1].entries[-1]
            other.run(plan)
            other.offer(result)
            assert other.digest.value == digest
            steps_replayed += 1
    assert steps_replayed > 60
    assert all(seen.values()), seen


def test_snapshot_shares_no_memory_with_the_table() -> None:
    run = RecordedRun()
    taken = taken_after(run, 12)
    before = restore(run.shape, taken)
    run.run()
    after = restore(run.shape, taken)
    for name in ("tokens", "marks", "tags", "drafts", "blocks", "block_counts"):
        assert np.array_equal(getattr(before, name), getattr(after, name)), name
    assert all(np.array_equal(before.columns[column.name], after.columns[column.name]) for column in COLUMNS)


def test_restored_tags_are_those_of_the_table() -> None:
    run = RecordedRun()
    restored = restore(run.shape, taken_after(run, 12))
    table = run.driver.table
    assert restored.held_slots() == table.held_slots() != []
    for slot in table.held_slots():
        known = int(table.columns["known"][slot])
        assert np.array_equal(restored.tags[slot, :known], table.tags[slot, :known])
        assert restored.sides[slot] == table.sides[slot]


def test_only_held_slots_and_known_tokens_are_taken() -> None:
    table = SlotTable(TableShape(slot_count=4, length_max=24, block_size=4, drafts_max=2), poison=True)
    side = Side(stop_ids=(3,))
    admits = [Admission(slot=2, generation=1, tokens=[5, 6, 7], cap=20, side=side), Admission(slot=0, generation=2, tokens=[1, 2], cap=9)]
    run_plan(table, make_plan(0, 0, admits=admits, blocks=[(2, [3]), (0, [1])], rows=[Row(2, 1, 3, 0, True)]))
    run_plan(table, make_plan(1, 0, releases=[(0, 2)]))
    taken = snapshot(table)
    assert (taken.slots.tolist(), taken.tokens.values.tolist(), taken.blocks[0].values.tolist()) == ([2], [5, 6, 7], [3])
    assert (taken.next_step, taken.applied, taken.sides) == (2, 0, (side,))


def _without_known(taken: TableSnapshot) -> dict[str, Any]:
    return {"columns": {name: values for name, values in taken.columns.items() if name != "known"}}


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("slots", lambda t: {"slots": t.slots + 100}),
        ("columns", _without_known),
        ("column known", lambda t: {"columns": {**t.columns, "known": t.columns["known"].astype(np.int64)}}),
        ("known", lambda t: {"columns": {**t.columns, "known": t.columns["known"] + 1}}),
        ("tokens", lambda t: {"tokens": Ragged.of([range(100)] * len(t.slots))}),
        ("tokens", lambda t: {"tokens": Ragged(starts=t.tokens.starts + 1, values=t.tokens.values)}),
        ("drafts", lambda t: {"drafts": Ragged.of([[]])}),
        ("blocks of group 0", lambda t: {"blocks": (Ragged.of([range(100)] * len(t.slots)),)}),
        ("KV groups", lambda t: {"blocks": ()}),
        ("marks", lambda t: {"marks": t.marks[1:]}),
        ("sides", lambda t: {"sides": t.sides[1:]}),
    ],
)
def test_snapshot_that_no_table_has_left_is_refused(what: str, change: Any) -> None:
    run = RecordedRun()
    taken = taken_after(run, 12)
    assert len(taken.slots) > 1
    with pytest.raises(LogError, match=what):
        restore(run.shape, dataclasses.replace(taken, **change(taken)))
