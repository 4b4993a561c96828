"""`SlotTable` against a dumb twin: one Python object a slot, lists of ints, no columns. What a step may read is the same in both, value for value."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from core_loop import Admission, Answer, Row, make_plan, make_result, run_plan

from lockstep.core.digest import mix64
from lockstep.core.layout import BatchLayout
from lockstep.core.records import Side, StepPlan
from lockstep.core.schema import COLUMNS, MARK_TOKEN, POISON
from lockstep.core.shaping import Shaping
from lockstep.core.table import FREE, SlotTable, TableShape

SLOTS, LENGTH, BLOCK_SIZE, DRAFTS = 4, 24, 4, 3
SHAPE = TableShape(slot_count=SLOTS, length_max=LENGTH, block_size=BLOCK_SIZE, drafts_max=DRAFTS)
MASK = (1 << 64) - 1


@dataclass(slots=True)
class TwinSlot:
    admission: Admission
    tokens: list[int]
    computed: int
    drafts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    pending: int | None = None
    finished: int = 0
    sampled: int = 0

    def tag(self, tokens: list[int]) -> int:
        """Of a whole prefix: the sum of its tokens' mixes."""
        salt = self.admission.side.kv_salt()
        words = (token | position << 32 | MARK_TOKEN << 63 for position, token in enumerate(tokens))
        return sum(mix64(mix64(word + 0x9E3779B97F4A7C15) + salt) for word in words) & MASK


class Twin:
    """The log's rules in the plainest words. It also makes up what happens next, always lawfully."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.slots: dict[int, TwinSlot] = {}
        self.generation = 0
        self.out: list[tuple[int, int, int]] = []

    def invent_plan(self, step: int, horizon: int) -> StepPlan:
        """Release some, admit some, give blocks, compute some. Applies all of it to the twin but the rows, which `expected` does."""
        rng = self.rng
        releases = [(slot, one.admission.generation) for slot, one in self.slots.items() if rng.random() < (0.5 if one.finished else 0.05)]
        for slot, _ in releases:
            del self.slots[slot]
        admits = [self._invent_admission(slot) for slot in range(SLOTS) if slot not in self.slots and rng.random() < 0.5]
        for admission in admits:
            self.slots[admission.slot] = TwinSlot(admission, list(admission.tokens), admission.computed)
        rows = [(slot, rng.randrange(1, 8)) for slot, one in self.slots.items() if one.pending is None and rng.random() < 0.8]
        rng.shuffle(rows)
        blocks, written = [], []
        for slot, budget in rows:
            one = self.slots[slot]
            count = self.count(one, budget)
            short = -(-(one.computed + count) // BLOCK_SIZE) - len(one.blocks)
            if short > 0:
                fresh = [rng.randrange(1000) for _ in range(short)]
                blocks.append((slot, fresh))
                one.blocks.extend(fresh)
            start = one.computed if rng.random() < 0.7 else -1
            written.append(Row(slot, one.admission.generation, budget, start, one.computed + count >= len(one.tokens)))
        return make_plan(step, horizon, releases=releases, admits=admits, blocks=blocks, rows=written)

    def _invent_admission(self, slot: int) -> Admission:
        rng = self.rng
        self.generation += 1
        tokens = [rng.randrange(300) for _ in range(rng.randrange(1, 14))]
        columns = {
            "seed": rng.getrandbits(64),
            "temperature": np.float32(rng.random()),
            "top_k": rng.randrange(50),
            "top_p": np.float32(rng.random()),
            "min_p": np.float32(rng.random()),
            "logprob_count": rng.randrange(-1, 5),
            "prompt_length": rng.randrange(1, len(tokens) + 1),
        }
        shaping = rng.choice([Shaping(), Shaping(min_tokens=2), Shaping(presence_penalty=0.5), Shaping(bad_words=((1, 2),))])
        side = Side(stop_ids=tuple(rng.randrange(300) for _ in range(rng.randrange(3))), shaping=shaping, cache_salt=rng.choice([b"", b"tenant"]))
        cap = rng.randrange(len(tokens) + 1, LENGTH + 1)
        return Admission(slot=slot, generation=self.generation, tokens=tokens, cap=cap, side=side, columns=columns)

    @staticmethod
    def count(one: TwinSlot, budget: int) -> int:
        return min(budget, len(one.tokens) + len(one.drafts) - one.computed)

    def check_and_note(self, plan: StepPlan, layout: BatchLayout) -> None:
        """Every value of the layout, row by row, from the lists; then what the step changes."""
        rows = [
            (slot, budget) for slot, budget in zip(plan.rows.slots.tolist(), plan.rows.counts.tolist(), strict=True) if not self.slots[slot].finished
        ]
        assert layout.slot.tolist() == [slot for slot, _ in rows]
        sampling_row = 0
        for r, (slot, budget) in enumerate(rows):
            one = self.slots[slot]
            count, start = self.count(one, budget), one.computed
            self._check_row(layout, r, one, start, count)
            samples = start + count >= len(one.tokens)
            assert (r in layout.sample_row.tolist()) == samples
            if samples:
                self._check_samples(layout, sampling_row, r, one, start + count)
                sampling_row += 1
                one.pending = plan.step
                one.sampled = start + count - len(one.tokens) + 1
                self.out.append((plan.step, slot, one.admission.generation))
            else:
                one.computed += count
        assert len(layout.sample_row) == sampling_row

    def _check_row(self, layout: BatchLayout, r: int, one: TwinSlot, start: int, count: int) -> None:
        sequence, end = one.tokens + one.drafts, start + count
        at = slice(int(layout.row_starts[r]), int(layout.row_starts[r + 1]))
        assert (layout.start[r], layout.count[r], layout.known[r]) == (start, count, len(one.tokens))
        assert layout.generation[r] == one.admission.generation
        assert layout.positions[at].tolist() == list(range(start, end))
        assert layout.token_ids[at].tolist() == sequence[start:end]
        assert layout.tags[at].tolist() == [one.tag(sequence[: position + 1]) for position in range(start, end)]
        assert set(layout.marks[at].tolist()) == {MARK_TOKEN}
        used = -(-end // BLOCK_SIZE)
        table = layout.block_tables[0][r].tolist()
        assert table == one.blocks[:used] + [-1] * (len(table) - used)
        full = start // BLOCK_SIZE
        tags = layout.block_tags[r].tolist()
        assert tags == [one.tag(sequence[: (b + 1) * BLOCK_SIZE]) for b in range(full)] + [0] * (len(tags) - full)
        assert layout.tail_tags[r] == (one.tag(sequence[:start]) if start % BLOCK_SIZE else 0)

    def _check_samples(self, layout: BatchLayout, q: int, r: int, one: TwinSlot, end: int) -> None:
        known, s, at = len(one.tokens), layout.sampling, slice(int(layout.sample_starts[q]), int(layout.sample_starts[q + 1]))
        verified = end - known
        assert layout.sample_row[q] == r
        assert s.index[at].tolist() == [int(layout.row_starts[r]) + position - int(layout.start[r]) for position in range(known - 1, end)]
        assert s.position[at].tolist() == list(range(known, end + 1))
        assert layout.draft_ids.row(q).tolist() == one.drafts[:verified]
        columns = one.admission.values()
        for name in ("seed", "temperature", "top_k", "top_p", "min_p", "logprob_count"):
            assert getattr(s, name)[at].tolist() == [columns[name]] * (verified + 1), name
        assert (layout.prompt_length[q], layout.length_cap[q], layout.side_hash[q]) == (
            columns["prompt_length"],
            one.admission.cap,
            one.admission.side.hash64(),
        )
        assert tuple(layout.stop_ids.row(q).tolist()) == one.admission.side.stop_ids
        assert layout.sides[q] == one.admission.side
        reads = one.admission.side.shaping in (Shaping(presence_penalty=0.5), Shaping(bad_words=((1, 2),)))
        assert layout.history.row(q).tolist() == (one.tokens if reads else [])

    def invent_answers(self, step: int) -> list[Answer]:
        """The result of a step: tokens within the cap, the next drafts, sometimes an end. Applied to the twin by `take`."""
        rng, answers = self.rng, []
        for _, slot, generation in [entry for entry in self.out if entry[0] == step]:
            one = self.slots.get(slot)
            alive = one is not None and one.admission.generation == generation
            most = min(one.sampled, one.admission.cap - len(one.tokens)) if alive and one is not None else 3
            tokens = [rng.randrange(300) for _ in range(rng.randrange(1, most + 1))]
            finish = rng.choice([0, 0, 0, 1])
            drafts = []
            if alive and one is not None:
                room = one.admission.cap - len(one.tokens) - len(tokens)
                finish = finish or (2 if room == 0 else 0)
                drafts = [] if finish else [rng.randrange(300) for _ in range(rng.randrange(0, min(DRAFTS, room - 1) + 1))]
            answers.append(Answer(slot, generation, tokens, finish, drafts))
        self.out = [entry for entry in self.out if entry[0] != step]
        return answers

    def take(self, answers: list[Answer]) -> None:
        for answer in answers:
            one = self.slots.get(answer.slot)
            if one is None or one.admission.generation != answer.generation:
                continue
            one.tokens.extend(answer.tokens)
            one.computed = len(one.tokens) - 1
            one.drafts, one.finished, one.pending = list(answer.drafts), answer.finish, None

    def check_table(self, table: SlotTable) -> None:
        assert table.held_slots() == sorted(self.slots)
        for slot, one in self.slots.items():
            assert table.known_tokens(slot) == one.tokens
            columns = {name: table.columns[name][slot] for name in ("computed", "finished", "draft_count", "pending")}
            pending = -1 if one.pending is None else one.pending
            assert columns == {"computed": one.computed, "finished": one.finished, "draft_count": len(one.drafts), "pending": pending}
            assert 0 <= one.computed < len(one.tokens)


@pytest.mark.parametrize("seed", range(40))
def test_layouts_and_table_are_those_of_the_dumb_twin(seed: int) -> None:
    rng = random.Random(seed)
    table, twin = SlotTable(SHAPE, poison=True), Twin(rng)
    ready: list[tuple[int, list[Answer]]] = []
    compared = 0
    for step in range(40):
        while ready and rng.random() < 0.6:
            number, answers = ready.pop(0)
            table.apply_result(make_result(number, answers))
            twin.take(answers)
        plan = twin.invent_plan(step, table.applied)
        layout = run_plan(table, plan)
        twin.check_and_note(plan, layout)
        twin.check_table(table)
        compared += layout.token_count
        ready.append((step, []))
        ready = [(number, answers or twin.invent_answers(number)) for number, answers in ready]
    assert compared > 60


def _released_table() -> SlotTable:
    table = SlotTable(SHAPE, poison=True)
    first = make_plan(0, 0, admits=[Admission(slot=1, generation=5, tokens=[1, 2, 3], cap=9)], blocks=[(1, [4, 5])], rows=[Row(1, 5, 3, 0, True)])
    run_plan(table, first)
    table.apply_result(make_result(0, [Answer(1, 5, [8], 0, [9, 9])]))
    run_plan(table, make_plan(1, 1, releases=[(1, 5)]))
    return table


def test_free_slots_are_poisoned() -> None:
    table = _released_table()
    for column in COLUMNS:
        value = table.columns[column.name][1]
        expected = FREE if column.name == "generation" else POISON[column.dtype]
        assert np.array_equal(value, expected, equal_nan=column.dtype is np.float32), column.name
    for array in (table.tokens, table.marks, table.tags, table.drafts):
        assert (array[1] == POISON[array.dtype.type]).all()
    assert (table.blocks[:, 1] == POISON[np.int32]).all()
    assert (table.block_counts[:, 1] == 0).all()


def test_admission_overwrites_every_column_of_a_reused_slot() -> None:
    """S3, C4-04: nothing of the former owner is left, neither its values nor its drafts nor its blocks."""
    fresh, used = SlotTable(SHAPE, poison=True), _released_table()
    admission = Admission(slot=1, generation=6, tokens=[3, 1], cap=8, columns={"seed": 5, "temperature": 0.5})
    run_plan(fresh, make_plan(0, 0, admits=[admission]))
    run_plan(used, make_plan(2, 1, admits=[admission]))
    for column in COLUMNS:
        assert fresh.columns[column.name][1] == used.columns[column.name][1], column.name
    assert used.known_tokens(1) == [3, 1]
    assert (used.marks[1, 2:] == 0).all()
    assert (used.drafts[1] == 0).all()
    assert used.block_counts[0, 1] == 0


def test_result_of_an_older_generation_is_dropped() -> None:
    table = SlotTable(SHAPE, poison=True)
    admit = Admission(slot=0, generation=1, tokens=[1, 2], cap=9)
    run_plan(table, make_plan(0, 0, admits=[admit], blocks=[(0, [0])], rows=[Row(0, 1, 2, 0, True)]))
    again = Admission(slot=0, generation=2, tokens=[5, 6, 7], cap=9)
    run_plan(table, make_plan(1, 0, releases=[(0, 1)], admits=[again], blocks=[(0, [1])], rows=[Row(0, 2, 1, 0, False)]))
    table.apply_result(make_result(0, [Answer(0, 1, [99], 1)]))
    assert table.known_tokens(0) == [5, 6, 7]
    assert table.columns["finished"][0] == 0
