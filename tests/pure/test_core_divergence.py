"""A difference between replicas is named by column, request, position and both values, and concerns nobody else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_loop import Admission, Answer, Row, make_plan, make_result, run_plan

from lockstep.core.digest import Digest
from lockstep.core.divergence import NOBODY, differences
from lockstep.core.records import Columns, Side, named
from lockstep.core.table import SlotTable, TableShape
from lockstep.runtime.replay import Replica

FIRST, IMPORTING, SECOND = (0, 1), (3, 3), (1, 2)


def rich_columns() -> Columns:
    """What is folded of a step in which every part but exports has something in it."""
    replica = Replica(SlotTable(TableShape(slot_count=4, length_max=24, block_size=4, drafts_max=2)), Digest(0))
    side = Side(stop_ids=(3, 4), cache_salt=b"tenant")
    sampled = {"seed": 1 << 63, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "logprob_count": 2}
    first = Admission(slot=0, generation=1, tokens=[5, 6, 7, 8, 9], cap=20, side=side, columns=sampled)
    importing = Admission(slot=3, generation=3, tokens=[1, 2], cap=9, columns={"importing": 1})
    replica.run(make_plan(0, 0, admits=[first, importing], blocks=[(0, [3, 1])], rows=[Row(0, 1, 5, 0, True)]))
    replica.offer(make_result(0, [Answer(0, 1, [11], 0, [12, 13])]))
    second = Admission(slot=1, generation=2, tokens=[21, 22, 23, 24, 25, 26], cap=9)
    rows = [Row(0, 1, 3, 5, True), Row(1, 2, 6, 0, True)]
    replica.run(make_plan(1, 1, admits=[second], ready=[(3, 3, 1)], blocks=[(1, [2, 4]), (0, [6])], rows=rows))
    columns = replica.columns_of(1)
    assert columns is not None
    return columns


COLUMNS = rich_columns()


def changed(name: str, index: int | tuple[int, ...], value: Any) -> Columns:
    array = COLUMNS[name].copy()
    array[index] = value
    return {**COLUMNS, name: array}


def flipped(name: str, flat: int) -> Columns:
    array = COLUMNS[name].copy()
    array.reshape(-1).view(np.uint8)[flat * array.itemsize] ^= np.uint8(1)
    return {**COLUMNS, name: array}


def test_equal_columns_do_not_differ() -> None:
    assert differences(COLUMNS, {name: array.copy() for name, array in COLUMNS.items()}) is None


@pytest.mark.parametrize(
    ("name", "index", "owner", "words"),
    [
        ("layout.token_ids", 1, FIRST, "layout.token_ids of slot 0 generation 1 at position 6 is 12 here and 99 there"),
        ("layout.token_ids", 4, SECOND, "layout.token_ids of slot 1 generation 2 at position 1 is 22 here and 99 there"),
        ("layout.known", 1, SECOND, "layout.known of slot 1 generation 2 is 6 here and 99 there"),
        ("layout.block_tables0", (0, 1), FIRST, "layout.block_tables0 of slot 0 generation 1 at 1 is 1 here and 99 there"),
        ("layout.sampling.seed", 0, FIRST, "layout.sampling.seed of slot 0 generation 1 at position 6 is 9223372036854775808 here and 99 there"),
        ("layout.sampling.seed", 3, SECOND, "layout.sampling.seed of slot 1 generation 2 at position 6 is 0 here and 99 there"),
        ("layout.prompt_length", 0, FIRST, "layout.prompt_length of slot 0 generation 1 is 5 here and 99 there"),
        ("layout.stop_ids", 1, FIRST, "layout.stop_ids of slot 0 generation 1 is 4 here and 99 there"),
        ("layout.draft_ids", 0, FIRST, "layout.draft_ids of slot 0 generation 1 is 12 here and 99 there"),
        ("plan.rows.counts", 0, FIRST, "plan.rows.counts of slot 0 generation 1 is 3 here and 99 there"),
        ("plan.admissions.length_cap", 0, SECOND, "plan.admissions.length_cap of slot 1 generation 2 is 9 here and 99 there"),
        ("plan.admissions.tokens", 5, SECOND, "plan.admissions.tokens of slot 1 generation 2 is 26 here and 99 there"),
        ("plan.admissions.marks", 5, SECOND, "plan.admissions.marks of slot 1 generation 2 is 1 here and 99 there"),
        ("plan.ready.computed", 0, IMPORTING, "plan.ready.computed of slot 3 generation 3 is 1 here and 99 there"),
        ("plan.new_blocks.blocks", 2, FIRST, "plan.new_blocks.blocks of slot 0 generation 1 is 6 here and 99 there"),
        ("result 0.tokens", 0, FIRST, "result 0.tokens of slot 0 generation 1 is 11 here and 99 there"),
        ("result 0.drafts", 1, FIRST, "result 0.drafts of slot 0 generation 1 is 13 here and 99 there"),
        ("plan.head", 1, NOBODY, "plan.head at 1 is 1 here and 99 there"),
    ],
)
def test_difference_is_said_in_words(name: str, index: int | tuple[int, ...], owner: tuple[int, int], words: str) -> None:
    found = differences(COLUMNS, changed(name, index, 99))
    assert found is not None
    assert (found.owner, found.describe()) == (owner, words)
    assert found.slots == (() if owner == NOBODY else (owner,))


def test_any_flipped_bit_of_any_column_is_found_and_belongs_to_somebody_known() -> None:
    heads = {"plan.head", "layout.head", "result 0.head"}
    flips = 0
    for name, array in COLUMNS.items():
        for flat in range(array.size):
            flips += 1
            found = differences(COLUMNS, flipped(name, flat))
            assert found is not None, (name, flat)
            assert found.column == name, (name, flat)
            if not name.endswith("starts"):  # what they would divide may belong to anybody
                assert (found.slots == ()) == (name in heads), (name, flat, found)
            assert set(found.slots) <= {FIRST, SECOND, IMPORTING} or name.endswith(("slots", "slot", "generation", "generations")), (name, found)
    assert flips > 100
    parts = {name.partition(".")[0] for name in COLUMNS}
    assert parts == {"plan", "layout", "result 0"}


def test_first_difference_is_first_in_the_order_of_the_fold() -> None:
    both = {**flipped("layout.known", 0), "result 0.tokens": COLUMNS["result 0.tokens"] + 1}
    found = differences(COLUMNS, both)
    assert found is not None
    assert found.column == "result 0.tokens"


def test_every_request_with_a_difference_is_concerned() -> None:
    found = differences(COLUMNS, {**flipped("layout.known", 0), "layout.start": COLUMNS["layout.start"] ^ np.array([0, 1], np.int32)})
    assert found is not None
    assert found.slots == (FIRST, SECOND)


def test_a_row_that_one_replica_leaves_out_concerns_its_own_request_only() -> None:
    """All columns after it have other sizes, and its neighbour's entries stand elsewhere."""

    found = differences(COLUMNS, columns_without_first())
    assert found is not None
    assert found.slots == (FIRST,)
    assert found.column == "layout.slot"
    assert found.describe("here", "there") == "layout.slot of slot 0 generation 1 has shape [2] here and [1] there"


def columns_without_first() -> Columns:
    """The second step's columns where the first request's row resolves to nothing."""
    table = SlotTable(TableShape(slot_count=4, length_max=24, block_size=4, drafts_max=2))
    second = Admission(slot=1, generation=2, tokens=[21, 22, 23, 24, 25, 26], cap=9)
    run_plan(table, make_plan(0, 0))
    table.apply_result(make_result(0))
    layout = run_plan(table, make_plan(1, 1, admits=[second], blocks=[(1, [2, 4])], rows=[Row(1, 2, 6, 0, True)]))
    logged = {name: array for name, array in COLUMNS.items() if not name.startswith("layout.")}
    return logged | named("layout", layout.columns())


def test_a_missing_column_is_a_difference() -> None:
    fewer = {name: array for name, array in COLUMNS.items() if name != "result 0.tokens"}
    one, other = differences(COLUMNS, fewer), differences(fewer, COLUMNS)
    assert one is not None
    assert other is not None
    assert one.describe() == "result 0.tokens is here and not there"
    assert other.describe() == "result 0.tokens is there and not here"
    assert one.slots == other.slots == ()


def test_another_dtype_is_a_difference() -> None:
    found = differences(COLUMNS, {**COLUMNS, "layout.known": COLUMNS["layout.known"].astype(np.int64)})
    assert found is not None
    assert found.describe() == "layout.known has shape [2] of int32 here and [2] of int64 there"


def test_equal_nans_do_not_differ_and_signs_of_zero_do() -> None:
    nan = {"layout.sampling.top_p": np.array([np.nan], np.float32)}
    assert differences(nan, {name: array.copy() for name, array in nan.items()}) is None
    assert differences({"x": np.array([0.0], np.float32)}, {"x": np.array([-0.0], np.float32)}) is not None


@pytest.mark.parametrize(
    "name", ["layout.row_starts", "layout.sample_starts", "layout.sample_row", "result 0.tokens.starts", "plan.new_blocks.blocks.starts"]
)
@pytest.mark.parametrize("value", [-1000, 1 << 30])
def test_offsets_that_point_nowhere_are_reported_and_not_followed(name: str, value: int) -> None:
    found = differences(COLUMNS, changed(name, 0, value))
    assert found is not None
    assert found.column == name
    found = differences(changed(name, 0, value), COLUMNS)
    assert found is not None
