"""Whatever a correct driver or sampling rank would not have written is a LogError: one record a condition that breaks it and nothing else.

It names the requests concerned, no others, and comes before the record changed anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from core_loop import Admission, Answer, Row, make_plan, make_result, run_plan
from numpy.typing import NDArray

from lockstep.core.records import NewBlocks
from lockstep.core.table import SlotTable, TableShape
from lockstep.errors import LogError

SHAPE = TableShape(slot_count=4, length_max=16, block_size=4, drafts_max=2)


def make_table() -> SlotTable:
    """After plan 0. Slot 0 (generation 10): known 3 of at most 8, its sample of step 0 outstanding. Slot 1 (11): known 5, computed 2, one block.
    Slot 2 (12): importing. Slot 3: free. Plan 1 and result 0 come next."""
    table = SlotTable(SHAPE, poison=True)
    admits = [
        Admission(slot=0, generation=10, tokens=[1, 2, 3], cap=8),
        Admission(slot=1, generation=11, tokens=[1, 2, 3, 4, 5], cap=8),
        Admission(slot=2, generation=12, tokens=[1, 2, 3], cap=8, columns={"importing": 1}),
    ]
    rows = [Row(0, 10, 3, 0, True), Row(1, 11, 2, 0, False)]
    run_plan(table, make_plan(0, 0, admits=admits, blocks=[(0, [0]), (1, [1]), (2, [2])], rows=rows))
    return table


def admit(**changes: object) -> Callable[[SlotTable], object]:
    """A plan that admits to the free slot, so and not otherwise."""
    settings: dict[str, object] = {"slot": 3, "generation": 13, "tokens": [1, 2, 3], "cap": 8, **changes}
    return lambda table: run_plan(table, make_plan(1, 0, admits=[Admission(**settings)]))  # type: ignore[arg-type]


def rows(*given: Row) -> Callable[[SlotTable], object]:
    return lambda table: run_plan(table, make_plan(1, 0, rows=given))


def answer(*given: Answer) -> Callable[[SlotTable], object]:
    return lambda table: table.apply_result(make_result(0, given))


def release(*given: tuple[int, int]) -> Callable[[SlotTable], object]:
    return lambda table: run_plan(table, make_plan(1, 0, releases=given))


def admit_both(first: Admission, second: Admission) -> Callable[[SlotTable], object]:
    """In a plan that frees slot 1 for one of them."""
    return lambda table: run_plan(table, make_plan(1, 0, releases=[(1, 11)], admits=[first, second]))


def blocks_in_group(group: int) -> Callable[[SlotTable], object]:
    plan = make_plan(1, 0, blocks=[(1, [7]), (2, [8])])
    new = NewBlocks(slots=plan.new_blocks.slots, groups=np.array([0, group], np.int32), blocks=plan.new_blocks.blocks)
    return lambda table: run_plan(table, replace(plan, new_blocks=new))


def ready_twice(table: SlotTable) -> None:
    run_plan(table, make_plan(1, 0, ready=[(2, 12, 1)]))
    run_plan(table, make_plan(2, 0, ready=[(2, 12, 1)]))


def blocks(slot: int, *given: int) -> Callable[[SlotTable], object]:
    return lambda table: run_plan(table, make_plan(1, 0, blocks=[(slot, given)]))


def ready(*given: tuple[int, int, int]) -> Callable[[SlotTable], object]:
    return lambda table: run_plan(table, make_plan(1, 0, ready=given))


def late_row(table: SlotTable) -> None:
    """The second decode row of slot 0, at position 4, lies in a block that it does not have."""
    for step, token in ((0, 4), (1, 5)):
        table.apply_result(make_result(step, [Answer(0, 10, [token])]))
        run_plan(table, make_plan(step + 1, step + 1, rows=[Row(0, 10, 1, 3 + step, True)]))


def filled_cap(table: SlotTable) -> None:
    """Slot 3 has room for one token; its result brings that and says that the request goes on."""
    admission = Admission(slot=3, generation=13, tokens=[1, 2, 3], cap=4)
    run_plan(table, make_plan(1, 0, admits=[admission], blocks=[(3, [7])], rows=[Row(3, 13, 3, 0, True)]))
    table.apply_result(make_result(0, [Answer(0, 10, [4])]))
    table.apply_result(make_result(1, [Answer(3, 13, [4])]))


def changed_token(table: SlotTable) -> None:
    """A known token of slot 1 is no longer the one that came with the admission."""
    table.tokens[1, 2] += 1
    run_plan(table, make_plan(1, 0, rows=[Row(1, 11, 1, 2, False)]))


def unlawful_void(table: SlotTable) -> None:
    """An admission whose positions are marked as holding nothing."""
    admission = Admission(slot=3, generation=13, tokens=[1, 2], cap=8, mark=0)
    run_plan(table, make_plan(1, 0, admits=[admission], blocks=[(3, [7])], rows=[Row(3, 13, 2, 0, True)]))


def unplanned_sample(table: SlotTable) -> None:
    """A row that reaches the end of what slot 1 knows, written as if it did not."""
    run_plan(table, make_plan(1, 0, blocks=[(1, [7])], rows=[Row(1, 11, 3, 2, False)]))


FIRST, SECOND, IMPORTING, NEW = (0, 10), (1, 11), (2, 12), (3, 13)
"""What errors say is concerned."""

REFUSED: dict[str, tuple[Callable[[SlotTable], object], str, tuple[tuple[int, int], ...]]] = {
    "a result out of turn": (lambda table: table.apply_result(make_result(1)), "result of step 0 comes next", ()),
    "a result for a slot that waits for none": (answer(Answer(0, 10, [4]), Answer(1, 11, [6])), "do not wait for it", (SECOND,)),
    "a result without a slot that waits": (answer(), "no row for slots that wait", (FIRST,)),
    "a result with another generation of a slot that waits": (answer(Answer(0, 9, [4])), "no row for slots that wait", (FIRST,)),
    "a result with two answers for a slot": (answer(Answer(0, 10, [4]), Answer(0, 10, [5])), "names one slot twice: [0 0]", (FIRST,)),
    "a result for a slot below zero": (answer(Answer(-4, 10, [4])), "names slots [-4], the table has slots 0 .. 3", ()),
    "a result for a slot that does not exist": (answer(Answer(4, 10, [4])), "names slots [4], the table has slots 0 .. 3", ()),
    "a result without a token": (answer(Answer(0, 10, [])), "without a token", (FIRST,)),
    "a result past the length cap": (answer(Answer(0, 10, [4] * 6)), "length cap: [6] more tokens on [3], caps [8]", (FIRST,)),
    "a result with more tokens than were sampled": (answer(Answer(0, 10, [4, 5])), "[2] tokens a row, [1] positions were sampled", (FIRST,)),
    "a result that fills the cap and ends nothing": (filled_cap, "does not end the request", (NEW,)),
    "a result with more drafts than fit": (answer(Answer(0, 10, [4], 0, [1, 2, 3])), "at most 2 fit", (FIRST,)),
    "a known token that has changed": (changed_token, "are not those that were written there", (SECOND,)),
    "a plan out of turn": (lambda table: table.apply_plan(make_plan(2, 0)), "plan 1 comes next", ()),
    "a plan run again": (lambda table: table.apply_plan(make_plan(0, 0)), "plan 1 comes next", ()),
    "a horizon above the results": (lambda table: table.apply_plan(make_plan(1, 1)), "horizon 1, 0 results", ()),
    "a release of another generation": (release((0, 9), (1, 11)), "release of slots", (FIRST,)),
    "a release of a free slot": (release((3, 13)), "release of slots", ()),
    "a release of a free slot as such": (release((3, -1)), "release of slots", ()),
    "a release twice": (release((0, 10), (1, 11), (0, 10)), "release names one slot twice: [0 1 0]", (FIRST,)),
    "a release of a slot below zero": (release((-3, 11)), "release names slots [-3]", ()),
    "a release of a slot that does not exist": (release((1, 11), (4, 11)), "release names slots [4]", ()),
    "an admission to a held slot": (admit(slot=1), "slots that are held: [1], in generations [11]", ((1, 13),)),
    "two admissions to one slot": (
        lambda table: run_plan(table, make_plan(1, 0, admits=[Admission(slot=3, generation=g, tokens=[1, 2], cap=8) for g in (13, 14)])),
        "admission names one slot twice",
        (),
    ),
    "two admissions in one generation": (
        admit_both(*(Admission(slot=slot, generation=13, tokens=[1, 2], cap=8) for slot in (1, 3))),
        "two admissions in one generation: [13 13]",
        (),
    ),
    "an admission in a generation that another slot has": (admit(generation=11), "admission in generations [11], the table holds", ((3, 11),)),
    "an admission in a generation below zero": (admit(generation=-2), "admission in generations [-2], wants 0 or above", ()),
    "an admission to a slot below zero": (admit(slot=-1), "admission names slots [-1]", ()),
    "an admission to a slot that does not exist": (admit(slot=4), "admission names slots [4]", ()),
    "an admission with fewer tokens than it says": (admit(columns={"known": 4}), "known tokens and brings", (NEW,)),
    "an admission with all computed": (admit(computed=3), "computed < known", (NEW,)),
    "an admission with computed below zero": (admit(computed=-1), "computed < known", (NEW,)),
    "an admission at its cap": (admit(cap=3), "known < cap", (NEW,)),
    "an admission of nothing": (admit(tokens=[]), "computed < known", (NEW,)),
    "an admission with more tokens than fit": (admit(tokens=[1] * 17), "a slot holds 16", (NEW,)),
    "an admission with a cap above what fits": (admit(cap=17), "a slot holds 16", (NEW,)),
    "a ready record for a slot that imports nothing": (ready((2, 12, 1), (1, 11, 0)), "import nothing", (SECOND,)),
    "a ready record for another generation": (ready((2, 11, 0)), "import nothing", (IMPORTING,)),
    "a ready record twice in a plan": (ready((2, 12, 1), (2, 12, 1)), "ready record names one slot twice", (IMPORTING,)),
    "a ready record again": (ready_twice, "import nothing", (IMPORTING,)),
    "a ready record for a slot below zero": (ready((-2, 12, 0)), "ready record names slots [-2]", ()),
    "a ready record for a slot that does not exist": (ready((4, 12, 0)), "ready record names slots [4]", ()),
    "a ready record with all computed": (ready((2, 12, 3)), "ready record with computed [3], known [3]", (IMPORTING,)),
    "a ready record with computed below zero": (ready((2, 12, -1)), "ready record with computed", (IMPORTING,)),
    "blocks for a free slot": (blocks(3, 7), "one of which is free", ()),
    "blocks for a slot below zero": (blocks(-3, 7), "new blocks names slots [-3]", ()),
    "blocks for a slot that does not exist": (blocks(4, 7), "new blocks names slots [4]", ()),
    "blocks in a group below zero": (blocks_in_group(-1), "KV groups [ 0 -1], there are groups 0 .. 0", (IMPORTING,)),
    "blocks in a group that does not exist": (blocks_in_group(1), "KV groups [0 1], there are groups 0 .. 0", (IMPORTING,)),
    "blocks below zero": (blocks(1, 7, -1), "numbers below 0: [ 7 -1]", (SECOND,)),
    "more blocks than a slot can hold": (blocks(1, 7, 8, 9, 10), "at most 4 fit", (SECOND,)),
    "more blocks than a slot can hold, in two parts": (
        lambda table: run_plan(table, make_plan(1, 0, blocks=[(1, [7, 8]), (2, [6]), (1, [9, 10])])),
        "at most 4 fit",
        (SECOND,),
    ),
    "a row of another generation": (rows(Row(1, 10, 1, 2, False)), "in generations", (SECOND,)),
    "a row on a free slot": (rows(Row(3, 13, 1, 0, False)), "in generations", ()),
    "a row on a free slot as such": (rows(Row(3, -1, 1, 0, False)), "in generations", ()),
    "a row on a slot below zero": (rows(Row(-3, 11, 1, 2, False)), "in its rows, names slots [-3]", ()),
    "a row on a slot that does not exist": (rows(Row(4, 11, 1, 2, False)), "in its rows, names slots [4]", ()),
    "a row on a pending slot": (rows(Row(1, 11, 1, 2, False), Row(0, 10, 1, 2, True)), "outstanding", (FIRST,)),
    "two rows on one slot": (rows(Row(1, 11, 1, 2, False), Row(1, 11, 1, 2, False)), "names one slot twice", (SECOND,)),
    "a row on a slot that imports": (rows(Row(1, 11, 1, 2, False), Row(2, 12, 1, 0, False)), "importing", (IMPORTING,)),
    "a row without a token": (rows(Row(1, 11, 0, 2, False)), "without a token", (SECOND,)),
    "a row that starts elsewhere": (rows(Row(1, 11, 1, 3, False)), "assumed starts", (SECOND,)),
    "a row that samples though it was not to": (unplanned_sample, "assumed samples", (SECOND,)),
    "a row that does not sample though it was to": (rows(Row(1, 11, 1, 2, True)), "assumed samples", (SECOND,)),
    "a row that reaches past its blocks": (rows(Row(1, 11, 3, 2, True)), "have [1] blocks", (SECOND,)),
    "a decode row that reaches past its blocks": (late_row, "have [1] blocks", (FIRST,)),
    "a row over positions that hold nothing": (unlawful_void, "hold nothing", (NEW,)),
}

OF_SEVERAL_PARTS = (
    "a result that fills the cap and ends nothing",
    "a known token that has changed",
    "two admissions in one generation",
    "a ready record again",
    "a row that samples though it was not to",
    "a decode row that reaches past its blocks",
    "a row over positions that hold nothing",
)
"""Before the part that is refused they have lawful ones, which do change the table."""


@pytest.mark.parametrize("name", REFUSED)
def test_table_refuses(name: str) -> None:
    act, words, concerned = REFUSED[name]
    with pytest.raises(LogError) as caught:
        act(make_table())
    assert words in str(caught.value)
    assert caught.value.concerned == concerned
    assert caught.value.step >= 0


def state(table: SlotTable) -> dict[str, NDArray[np.generic]]:
    """A copy of all that a record could change."""
    wide = {"tokens": table.tokens, "marks": table.marks, "tags": table.tags, "drafts": table.drafts}
    lists = {"blocks": table.blocks, "block_counts": table.block_counts, "applied": np.array(table.applied)}
    stop_ids = {"stop_ids": np.array([len(side.stop_ids) for side in table.sides])}
    return {name: array.copy() for name, array in {**table.columns, **wide, **lists, **stop_ids}.items()}


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in OF_SEVERAL_PARTS])
def test_refused_record_has_changed_nothing(name: str) -> None:
    table = make_table()
    before = state(table)
    with pytest.raises(LogError):
        REFUSED[name][0](table)
    after = state(table)
    assert [column for column in before if before[column].tobytes() != after[column].tobytes()] == []


def test_error_names_all_that_are_at_fault_and_no_others() -> None:
    table = make_table()
    table.tokens[0, 1] += 1
    table.apply_result(make_result(0, [Answer(0, 10, [4])]))
    table.tokens[0, 3] += 1
    table.tokens[1, 2] += 1
    run_plan(table, make_plan(1, 1, ready=[(2, 12, 0)]))
    with pytest.raises(LogError) as caught:
        run_plan(table, make_plan(2, 1, rows=[Row(2, 12, 2, 0, False), Row(1, 11, 1, 2, False), Row(0, 10, 1, 3, True)]))
    assert caught.value.concerned == (SECOND, FIRST)
    assert caught.value.step == 2


def test_the_lawful_next_records_are_taken() -> None:
    """The records above are wrong by one thing each; these are their lawful neighbours."""
    for act in (
        answer(Answer(0, 10, [4])),
        answer(Answer(0, 10, [4]), Answer(3, 9, [4])),
        admit(),
        admit_both(*(Admission(slot=slot, generation=13 + slot, tokens=[1, 2], cap=8) for slot in (1, 3))),
        ready((2, 12, 2)),
        blocks(1, 7, 8, 9),
        lambda table: run_plan(table, make_plan(1, 0, blocks=[(1, [7]), (2, [6]), (1, [8, 9])])),
        blocks_in_group(0),
        rows(Row(1, 11, 1, 2, False)),
        release((0, 10), (1, 11)),
        lambda table: run_plan(table, make_plan(1, 0, blocks=[(1, [7])], rows=[Row(1, 11, 3, 2, True)])),
    ):
        act(make_table())
