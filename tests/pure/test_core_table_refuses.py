"""Whatever a correct driver or sampling rank would not have written is a LogError: one record a condition that breaks it and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_loop import Admission, Answer, Row, make_plan, make_result, run_plan

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


def blocks(slot: int, *given: int) -> Callable[[SlotTable], object]:
    return lambda table: run_plan(table, make_plan(1, 0, blocks=[(slot, given)]))


def ready(slot: int, generation: int, computed: int) -> Callable[[SlotTable], object]:
    return lambda table: run_plan(table, make_plan(1, 0, ready=[(slot, generation, computed)]))


def late_row(table: SlotTable) -> None:
    """The second decode row of slot 0, at position 4, lies in a block that it does not have."""
    for step, token in ((0, 4), (1, 5)):
        table.apply_result(make_result(step, [Answer(0, 10, [token])]))
        run_plan(table, make_plan(step + 1, step + 1, rows=[Row(0, 10, 1, 3 + step, True)]))


def filled_cap(table: SlotTable) -> None:
    """Slot 3 has room for one token; its result brings that and says that the request goes on."""
    admission = Admission(slot=3, generation=13, tokens=[1, 2, 3], cap=4)
    run_plan(table, make_plan(1, 0, admits=[admission], blocks=[(3, [7])], rows=[Row(3, 13, 3, 0, True)]))
    table.apply_result(make_result(0))
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


REFUSED: dict[str, tuple[Callable[[SlotTable], object], str]] = {
    "a result out of turn": (lambda table: table.apply_result(make_result(1)), "result of step 0 comes next"),
    "a result for a slot that waits for none": (answer(Answer(1, 11, [6])), "do not wait for it"),
    "a result without a token": (answer(Answer(0, 10, [])), "without a token"),
    "a result past the length cap": (answer(Answer(0, 10, [4] * 6)), "length cap"),
    "a result with more tokens than were sampled": (answer(Answer(0, 10, [4, 5])), "positions were sampled"),
    "a result that fills the cap and ends nothing": (filled_cap, "does not end the request"),
    "a result with more drafts than fit": (answer(Answer(0, 10, [4], 0, [1, 2, 3])), "at most 2 fit"),
    "a known token that has changed": (changed_token, "are not those that were written there"),
    "a plan out of turn": (lambda table: table.apply_plan(make_plan(2, 0)), "plan 1 comes next"),
    "a plan run again": (lambda table: table.apply_plan(make_plan(0, 0)), "plan 1 comes next"),
    "a horizon above the results": (lambda table: table.apply_plan(make_plan(1, 1)), "horizon 1, 0 results"),
    "a release of another generation": (lambda table: run_plan(table, make_plan(1, 0, releases=[(0, 9)])), "release of slots"),
    "a release of a free slot": (lambda table: run_plan(table, make_plan(1, 0, releases=[(3, 13)])), "release of slots"),
    "an admission to a held slot": (admit(slot=1), "slots that are held"),
    "two admissions to one slot": (
        lambda table: run_plan(table, make_plan(1, 0, admits=[Admission(slot=3, generation=g, tokens=[1, 2], cap=8) for g in (13, 14)])),
        "two admissions",
    ),
    "an admission with fewer tokens than it says": (admit(columns={"known": 4}), "known tokens and brings"),
    "an admission with all computed": (admit(computed=3), "computed < known"),
    "an admission with computed below zero": (admit(computed=-1), "computed < known"),
    "an admission at its cap": (admit(cap=3), "known < cap"),
    "an admission of nothing": (admit(tokens=[]), "computed < known"),
    "an admission with more tokens than fit": (admit(tokens=[1] * 17), "a slot holds 16"),
    "an admission with a cap above what fits": (admit(cap=17), "a slot holds 16"),
    "a ready record for a slot that imports nothing": (ready(1, 11, 0), "import nothing"),
    "a ready record for another generation": (ready(2, 11, 0), "import nothing"),
    "a ready record with all computed": (ready(2, 12, 3), "ready record with computed"),
    "a ready record with computed below zero": (ready(2, 12, -1), "ready record with computed"),
    "blocks for a free slot": (blocks(3, 7), "which is free"),
    "more blocks than a slot can hold": (blocks(1, 7, 8, 9, 10), "at most 4 fit"),
    "a row of another generation": (rows(Row(1, 10, 1, 2, False)), "in generations"),
    "a row on a free slot": (rows(Row(3, 13, 1, 0, False)), "in generations"),
    "a row on a pending slot": (rows(Row(0, 10, 1, 2, True)), "outstanding"),
    "two rows on one slot": (rows(Row(1, 11, 1, 2, False), Row(1, 11, 1, 2, False)), "two rows on one slot"),
    "a row on a slot that imports": (rows(Row(2, 12, 1, 0, False)), "importing"),
    "a row without a token": (rows(Row(1, 11, 0, 2, False)), "without a token"),
    "a row that starts elsewhere": (rows(Row(1, 11, 1, 3, False)), "assumed starts"),
    "a row that samples though it was not to": (unplanned_sample, "assumed samples"),
    "a row that does not sample though it was to": (rows(Row(1, 11, 1, 2, True)), "assumed samples"),
    "a row that reaches past its blocks": (rows(Row(1, 11, 3, 2, True)), "have [1] blocks"),
    "a decode row that reaches past its blocks": (late_row, "have [1] blocks"),
    "a row over positions that hold nothing": (unlawful_void, "hold nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_table_refuses(name: str) -> None:
    act, words = REFUSED[name]
    with pytest.raises(LogError) as caught:
        act(make_table())
    assert words in str(caught.value)


def test_the_lawful_next_records_are_taken() -> None:
    """The records above are wrong by one thing each; these are their lawful neighbours."""
    for act in (
        answer(Answer(0, 10, [4])),
        admit(),
        ready(2, 12, 2),
        blocks(1, 7, 8, 9),
        rows(Row(1, 11, 1, 2, False)),
        lambda table: run_plan(table, make_plan(1, 0, releases=[(0, 10)])),
        lambda table: run_plan(table, make_plan(1, 0, blocks=[(1, [7])], rows=[Row(1, 11, 3, 2, True)])),
    ):
        act(make_table())
