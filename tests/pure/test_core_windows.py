"""KV groups with windows: blocks that no later token sees are let go of, hits need what the window reaches, and nobody reads behind it."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from core_loop import Admission, Loop, Row, make_plan, make_request, make_scheduler, run_plan

from lockstep.core.blocks import held_blocks_most
from lockstep.core.layout import BatchLayout
from lockstep.core.provenance import Provenance
from lockstep.core.ragged import Ragged
from lockstep.core.records import NewBlocks, StepPlan
from lockstep.core.scheduler import Scheduler
from lockstep.core.table import SlotTable, TableShape
from lockstep.core.types import ceil_div, first_block_read
from lockstep.errors import LogError, ProvenanceError

SIZE, LENGTH = 4, 96


def drawn(_generation: int, position: int) -> int:
    return 1000 + position


class TaggedLoop(Loop):
    """Keeps tags as a stage does, one pool a group, and checks every step's reads against them."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, length_max=LENGTH, draw=drawn)
        c = scheduler.config
        self.tags = [Provenance(count, SIZE, g, w) for g, (count, w) in enumerate(zip(c.block_counts, c.windows, strict=True))]
        self.most_held: deque[list[int]] = deque()

    def _replay(self, plan: StepPlan) -> BatchLayout:
        layout = super()._replay(plan)
        for step in ("check", "void", "set"):
            for tags in self.tags:
                getattr(tags, step)(layout)
        self.most_held.append([pool.block_count - pool.free_count for pool in self.scheduler.pools])
        return layout


def windowed(*windows: int, block_counts: tuple[int, ...], **settings: object) -> TaggedLoop:
    return TaggedLoop(make_scheduler(windows=windows, block_counts=block_counts, **{"asynchronous": False, **settings}))


@pytest.mark.parametrize("window", range(1, 20))
def test_first_block_read_is_that_of_the_first_position_that_the_token_sees(window: int) -> None:
    for start in range(60):
        seen = [p for p in range(start + 1) if p > start - window]
        assert first_block_read(start, window, SIZE) == seen[0] // SIZE
    assert first_block_read(50, 0, SIZE) == 0
    assert first_block_read(np.array([3, 50]), np.array([0, 5]), SIZE).tolist() == [0, 11]


@pytest.mark.parametrize("window", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("budget", [1, 7, 16])
def test_long_request_holds_no_more_blocks_of_a_group_than_its_window_and_a_step_need(window: int, budget: int) -> None:
    most = held_blocks_most(LENGTH, window, budget + 1, SIZE)
    loop = windowed(0, window, block_counts=(LENGTH // SIZE, most), token_budget=budget)
    loop.scheduler.submit(make_request("r", list(range(60)), 30))
    loop.run()
    assert loop.tokens["r"] == list(range(1060, 1090))
    assert max(held for _, held in loop.most_held) <= most < LENGTH // SIZE - 1
    assert max(held for held, _ in loop.most_held) == ceil_div(89, SIZE)
    assert loop.scheduler.stats.preemptions == 0
    assert loop.scheduler.audit() == []


def test_prefix_is_hit_where_all_of_it_is_cached_in_one_group_and_the_windows_reach_in_the_other() -> None:
    loop = windowed(0, 6, block_counts=(60, 60), token_budget=64)
    loop.scheduler.submit(make_request("first", list(range(40)), 2))
    loop.run()
    loop.scheduler.submit(make_request("same", list(range(40)), 2))
    loop.run()
    assert loop.scheduler.stats.prefix_hits == 36
    tables = next(layout for layout in loop.layouts if layout.start.tolist() == [36]).block_tables
    assert [(table[0] >= 0).sum() for table in tables] == [10, 3]
    assert (tables[1][0, :7] == -1).all()


def test_prefix_of_which_the_window_s_blocks_are_gone_is_hit_up_to_where_they_are() -> None:
    """The first request's early blocks of the group with a window are let go of and taken by others; its last ones stay cached."""
    loop = windowed(0, 6, block_counts=(60, 8), token_budget=8)
    loop.scheduler.submit(make_request("first", list(range(40)), 2))
    loop.run()
    loop.scheduler.submit(make_request("shorter", [*range(20), 99, 98], 2))
    loop.run()
    assert loop.scheduler.stats.prefix_hits == 20, "the window reaches into blocks 3 and 4, which nobody has taken"
    loop.scheduler.submit(make_request("shortest", [*range(12), 97, 96], 2))
    loop.run()
    assert loop.scheduler.stats.prefix_hits == 20, "blocks 0 to 2 are cached in the group that sees all alone"
    loop.scheduler.submit(make_request("whole", list(range(40)), 2))
    loop.run()
    assert loop.tokens["whole"] == [1040, 1041]
    assert loop.scheduler.audit() == []


@pytest.mark.parametrize("seed", range(60))
def test_random_loads_read_their_own_prefix_alone_and_leave_nothing_held(seed: int) -> None:
    rng = random.Random(seed)
    window, budget = rng.choice([1, 2, 5, 9, 17]), rng.choice([1, 5, 16])
    settings = {"microbatch_count": rng.randrange(1, 4), "asynchronous": rng.random() < 0.5, "slot_count": rng.randrange(1, 5)}
    least = held_blocks_most(LENGTH, window, budget + (settings["microbatch_count"] + settings["asynchronous"]), SIZE)
    windows = rng.choice([(0, window), (window,), (0, window, window + 3)])
    counts = tuple(least + 3 + rng.randrange(4) if w else LENGTH // SIZE + rng.randrange(8) for w in windows)
    loop = windowed(*windows, block_counts=counts, token_budget=budget, **settings)
    prompts = [[*([1, 2, 3, 4] * 8)[: rng.randrange(33)], *(rng.randrange(9) for _ in range(rng.randrange(1, 20)))] for _ in range(8)]
    for i, prompt in enumerate(prompts):
        loop.scheduler.submit(make_request(f"r{i}", prompt, rng.randrange(1, 40)))
    loop.run(turns_max=8000)
    for i, prompt in enumerate(prompts):
        told = loop.tokens[f"r{i}"]
        assert told == list(range(1000 + len(prompt), 1000 + len(prompt) + len(told)))
    assert loop.scheduler.audit() == []


def test_random_loads_hit_preempt_and_let_go() -> None:
    """The property above means little if none of these happens."""
    loop = windowed(0, 5, block_counts=(24, 12), token_budget=16, slot_count=4)
    for i in range(6):
        loop.scheduler.submit(make_request(f"r{i}", [1, 2, 3, 4] * 8, 30))
    loop.run()
    assert loop.scheduler.stats.preemptions > 0
    assert loop.scheduler.stats.prefix_hits > 0
    assert any((table == -1).any(1).all() for layout in loop.layouts if layout.row_count for table in layout.block_tables[1:])


# A replica on its own


def table_with(blocks: list[int], *, computed: int, window: int = 5) -> tuple[SlotTable, StepPlan]:
    """One request of 30 known tokens, with these blocks of one group with a window."""
    table = SlotTable(TableShape(slot_count=1, length_max=64, block_size=SIZE, windows=(window,)), poison=True)
    admission = Admission(slot=0, generation=1, tokens=list(range(30)), cap=60, computed=computed)
    return table, make_plan(0, 0, admits=[admission], blocks=[(0, blocks)], rows=[Row(0, 1, 30 - computed, -1, True)])


def test_blocks_behind_the_window_need_not_be_there_and_are_not_shown() -> None:
    table, plan = table_with([-1, -1, -1, -1, 7, 8, 9, 10], computed=20)
    assert run_plan(table, plan).block_tables[0].tolist() == [[-1, -1, -1, -1, 7, 8, 9, 10]]
    table, plan = table_with([1, 2, 3, 4, 7, 8, 9, 10], computed=20)
    assert run_plan(table, plan).block_tables[0].tolist() == [[-1, -1, -1, -1, 7, 8, 9, 10]]


@pytest.mark.parametrize(
    ("blocks", "computed", "window"),
    [
        ([-1, -1, -1, -1, -1, 8, 9, 10], 20, 5),
        ([-1, 1, 2, 3, 4, 5, 6, 7], 4, 5),
        ([1, 2, 3, 4, 5, -1, 7, 8], 20, 5),
        ([-1, 1, 2, 3, 4, 5, 6, 7], 28, 0),
    ],
    ids=["the window begins in it", "its first token is seen", "the row writes it", "all is seen"],
)
def test_block_that_is_read_or_written_must_be_there(blocks: list[int], computed: int, window: int) -> None:
    table, plan = table_with(blocks, computed=computed, window=window)
    with pytest.raises(LogError, match="new blocks with numbers below 0"):
        run_plan(table, plan)


def test_no_block_is_missing_later_in_a_list() -> None:
    table, plan = table_with([-1, -1, -1, -1, 7, 8, 9, 10], computed=20)
    run_plan(table, plan)
    more = NewBlocks(slots=np.array([0], np.int32), groups=np.array([0], np.int32), blocks=Ragged.of([[-1]]))
    with pytest.raises(LogError, match="new blocks with numbers below 0"):
        table._extend(more)


def test_tags_are_compared_from_the_window_s_first_block_on_and_not_before() -> None:
    loop = windowed(5, block_counts=(24,), token_budget=12)
    loop.scheduler.submit(make_request("r", list(range(30)), 10))
    for _ in range(2):
        loop.expect_plan()
        loop.answer()
    (tags,), slot = loop.tags, 0
    start = int(loop.table.columns["computed"][slot])
    blocks, first = loop.table.blocks[0, slot], int(first_block_read(start, 5, SIZE))
    assert first > 0
    tags.block_tags[blocks[first - 1]] ^= np.uint64(1)
    loop.expect_plan()
    loop.answer()
    tags.block_tags[blocks[26 // SIZE]] ^= np.uint64(1)  # the next token stands at position 30 and sees 26 to 30
    loop.expect_plan()
    with pytest.raises(ProvenanceError, match="generation 0"):
        loop.answer()
