"""`SlotTable`: the state that replays the log, one row a slot. Driver and ranks run this very code, in this order:

    table.apply_result(r)         for results below the plan's horizon
    table.apply_plan(plan)        releases, admissions, ready records, new blocks
    layout = table.resolve(plan)  everything that compute may read
    table.note(layout)            what the step itself changes

It knows nothing of ranks, stages, links or the model. Whatever a correct driver or sampling rank would not have written is a LogError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.layout import BatchLayout, SamplingColumns
from lockstep.core.provenance import token_mix
from lockstep.core.ragged import Ragged
from lockstep.core.records import Admissions, NewBlocks, Ready, Side, Slots, StepPlan, StepResult
from lockstep.core.schema import COLUMNS, FINISH_NONE, MARK_TOKEN, MARK_VOID, POISON
from lockstep.core.types import I32, U64, ceil_div
from lockstep.errors import LogError

FREE = -1
"""Generation of a slot that nobody holds."""

_NO_SIDE = Side()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """slot_count slots, each of at most length_max tokens, drafts_max drafts a step, group_count KV groups of blocks of block_size positions."""

    slot_count: int
    length_max: int
    block_size: int
    drafts_max: int = 0
    group_count: int = 1

    @property
    def blocks_max(self) -> int:
        return ceil_div(self.length_max, self.block_size)


class SlotTable:
    """columns[name] is an array [slots] for each of `schema.COLUMNS`; tokens, marks, tags are [slots, length], drafts [slots, drafts],
    blocks [groups, slots, blocks], block_counts [groups, slots]. poison: fill free slots with garbage (tests)."""

    def __init__(self, shape: TableShape, *, poison: bool = False) -> None:
        self.shape = shape
        self._poison = poison
        slots = shape.slot_count
        self.columns: dict[str, NDArray[Any]] = {column.name: np.zeros(slots, column.dtype) for column in COLUMNS}
        self.columns["generation"][:] = FREE
        self.tokens = np.zeros((slots, shape.length_max), np.int32)
        self.marks = np.zeros((slots, shape.length_max), np.uint8)
        self.tags = np.zeros((slots, shape.length_max), np.uint64)
        self.drafts = np.zeros((slots, shape.drafts_max), np.int32)
        self.blocks = np.zeros((shape.group_count, slots, shape.blocks_max), np.int32)
        self.block_counts = np.zeros((shape.group_count, slots), np.int32)
        self.sides: list[Side] = [_NO_SIDE] * slots
        self.next_step = 0
        self.applied = 0

    # Results

    def apply_result(self, result: StepResult) -> None:
        """Append accepted tokens, set computed, drafts and finished. A row whose generation is not the slot's is dropped."""
        self._expect(result.step == self.applied, lambda: f"result of step {self.applied} comes next, got step {result.step}")
        self.applied += 1
        if not len(result):
            return
        c = self.columns
        live = np.flatnonzero(c["generation"][result.slots] == result.generations)
        slots = result.slots[live]
        self._expect(
            bool((c["pending"][slots] == result.step).all()),
            lambda: f"result of step {result.step} has rows for slots that do not wait for it: {slots}",
        )
        counts = result.tokens.lengths()[live]
        self._expect(bool((counts > 0).all()), lambda: f"result of step {result.step} has a row without a token")
        known, cap = c["known"][slots], c["length_cap"][slots]
        self._expect(bool((known + counts <= cap).all()), lambda: f"result of step {result.step} goes past a length cap")
        most = c["pending_count"][slots]
        self._expect(
            bool((counts <= most).all()), lambda: f"result of step {result.step} brings {counts} tokens a row, {most} positions were sampled"
        )
        ended = result.finishes[live] != FINISH_NONE
        self._expect(
            bool((ended | (known + counts < cap)).all()), lambda: f"result of step {result.step} fills a length cap and does not end the request"
        )
        self._append(slots, known, counts, result.tokens, live)
        c["known"][slots] = known + counts
        c["computed"][slots] = known + counts - 1
        c["finished"][slots] = result.finishes[live]
        c["pending"][slots] = -1
        draft_counts = result.drafts.lengths()[live]
        fit = self.shape.drafts_max
        self._expect(bool((draft_counts <= fit).all()), lambda: f"result of step {result.step} brings {draft_counts} drafts a row, at most {fit} fit")
        c["draft_count"][slots] = draft_counts
        for i in np.flatnonzero(draft_counts):
            self.drafts[slots[i], : draft_counts[i]] = result.drafts.row(int(live[i]))

    def _append(self, slots: I32, known: I32, counts: I32, tokens: Ragged, rows: NDArray[np.intp]) -> None:
        """Write row rows[i] of tokens at positions known[i] .. of slots[i], with marks and cumulative tags."""
        which = np.repeat(np.arange(len(slots)), counts)
        offset = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        slot, position = slots[which], (known[which] + offset).astype(np.int32)
        values = tokens.values[tokens.starts[rows][which] + offset]
        self.tokens[slot, position] = values
        self.marks[slot, position] = MARK_TOKEN
        marks = np.full(len(values), MARK_TOKEN, np.int32)
        self.tags[slot, position] = self._chain(slot, values, position, marks, which, self.tags[slots, known - 1])

    def _chain(self, slot: I32, values: I32, positions: I32, marks: I32, which: NDArray[np.intp], before: U64) -> U64:
        """Cumulative tags of tokens that follow a prefix with tag before[i], for groups `which` = 0 0 1 1 1 ... in order."""
        sums = np.cumsum(token_mix(values, positions, marks, self.columns["kv_salt"][slot]), dtype=np.uint64)
        first = np.searchsorted(which, np.arange(len(before)))
        base = np.where(first > 0, sums[first - 1], np.uint64(0))
        return before[which] + sums - base[which]

    # Plans

    def apply_plan(self, plan: StepPlan) -> None:
        """Releases, admissions, ready records, new blocks, in this order. Results below the plan's horizon have been applied, and no others."""
        self._expect(plan.step == self.next_step, lambda: f"plan {self.next_step} comes next, got plan {plan.step}")
        self._expect(self.applied == plan.horizon, lambda: f"plan {plan.step} has horizon {plan.horizon}, {self.applied} results are applied")
        self.next_step += 1
        self._release(plan.releases)
        self._admit(plan.admissions)
        self._make_ready(plan.ready)
        self._extend(plan.new_blocks)

    def _release(self, releases: Slots) -> None:
        held = self.columns["generation"][releases.slots] == releases.generations
        self._expect(bool(held.all()), lambda: f"release of slots {releases.slots} in generations that do not hold them: {releases.generations}")
        for slot in releases.slots:
            if self._poison:
                self._fill_with_poison(int(slot))
            self.columns["generation"][slot] = FREE
            self.block_counts[:, slot] = 0
            self.sides[slot] = _NO_SIDE

    def _fill_with_poison(self, slot: int) -> None:
        wide = (self.tokens, self.marks, self.tags, self.drafts)
        for array in (*self.columns.values(), *wide):
            array[slot] = POISON[array.dtype.type]
        self.blocks[:, slot] = POISON[np.int32]

    def _admit(self, admissions: Admissions) -> None:
        slots = admissions.slots
        if not len(slots):
            return
        self._expect(bool((self.columns["generation"][slots] == FREE).all()), lambda: f"admission to slots that are held: {slots}")
        self._expect(len(set(slots.tolist())) == len(slots), lambda: f"two admissions to one slot: {slots}")
        caps = admissions.values["length_cap"]
        fit = bool((np.maximum(caps, admissions.tokens.lengths()) <= self.shape.length_max).all())
        self._expect(fit, lambda: f"admission of {admissions.tokens.lengths()} tokens with caps {caps}, a slot holds {self.shape.length_max}")
        for column in COLUMNS:
            self.columns[column.name][slots] = admissions.values[column.name] if column.initial is None else column.initial
        self.block_counts[:, slots] = 0
        salts = self.columns["kv_salt"][slots]
        for i, slot in enumerate(slots):
            self._write_tokens(
                int(slot), admissions.tokens.row(i), admissions.marks[admissions.tokens.starts[i] : admissions.tokens.starts[i + 1]], salts[i : i + 1]
            )
            self.sides[slot] = admissions.sides[i]
        lengths = admissions.tokens.lengths()
        computed, known, cap = (self.columns[name][slots] for name in ("computed", "known", "length_cap"))
        self._expect(bool((known == lengths).all()), lambda: f"admission says {known} known tokens and brings {lengths}")
        self._expect(
            bool(((computed >= 0) & (computed < known) & (known < cap)).all()),
            lambda: f"admission wants 0 <= computed < known < cap: {computed}, {known}, {cap}",
        )

    def _write_tokens(self, slot: int, tokens: I32, marks: NDArray[np.uint8], salt: U64) -> None:
        """The whole row from one record: what lies behind the known tokens is void, and no draft of a former owner is left."""
        count = len(tokens)
        self.tokens[slot, :count] = tokens
        self.marks[slot, :count] = marks
        self.marks[slot, count:] = MARK_VOID
        mixed = token_mix(tokens, np.arange(count, dtype=np.int32), marks.astype(np.int32), salt)
        self.tags[slot, :count] = np.cumsum(mixed, dtype=np.uint64)
        self.drafts[slot] = 0

    def _make_ready(self, ready: Ready) -> None:
        c, slots = self.columns, ready.slots
        right = (c["generation"][slots] == ready.generations) & (c["importing"][slots] == 1)
        self._expect(bool(right.all()), lambda: f"ready record for slots that import nothing: {slots}")
        self._expect(
            bool(((ready.computed >= 0) & (ready.computed < c["known"][slots])).all()),
            lambda: f"ready record with computed {ready.computed}, known {c['known'][slots]}",
        )
        c["computed"][slots] = ready.computed
        c["importing"][slots] = 0

    def _extend(self, new: NewBlocks) -> None:
        for i, (slot, group) in enumerate(zip(new.slots.tolist(), new.groups.tolist(), strict=True)):
            self._extend_one(slot, group, new.blocks.row(i))

    def _extend_one(self, slot: int, group: int, blocks: I32) -> None:
        self._expect(self.columns["generation"][slot] != FREE, lambda: f"new blocks for slot {slot}, which is free")
        have = int(self.block_counts[group, slot])
        end = have + len(blocks)
        self._expect(end <= self.shape.blocks_max, lambda: f"slot {slot} gets {end} blocks, at most {self.shape.blocks_max} fit")
        self.blocks[group, slot, have:end] = blocks
        self.block_counts[group, slot] = end

    # Resolving

    def resolve(self, plan: StepPlan) -> BatchLayout:
        """What the plan's rows mean in this table, a function of (table, plan). Rows of finished requests resolve to nothing."""
        c, rows = self.columns, plan.rows
        self._expect(
            bool((c["generation"][rows.slots] == rows.generations).all()),
            lambda: f"plan {plan.step} has rows for slots {rows.slots} in generations {rows.generations}",
        )
        self._expect(len(set(rows.slots.tolist())) == len(rows), lambda: f"plan {plan.step} has two rows on one slot: {rows.slots}")
        live = np.flatnonzero(c["finished"][rows.slots] == 0)
        slot, budget = rows.slots[live], rows.counts[live]
        self._expect(
            bool((c["pending"][slot] < 0).all()),
            lambda: f"plan {plan.step} has a row on a slot whose result is outstanding: {slot}, pending {c['pending'][slot]}",
        )
        self._expect(bool((c["importing"][slot] == 0).all()), lambda: f"plan {plan.step} has a row on a slot that is importing: {slot}")
        start, known = c["computed"][slot], c["known"][slot]
        end = np.minimum(known + c["draft_count"][slot], c["length_cap"][slot] - 1)  # drafts end where blocks are reserved to (PROTOCOL.md 16)
        count = np.minimum(budget, end - start)
        samples = start + count >= known
        self._expect(bool((count > 0).all()), lambda: f"plan {plan.step} has rows without a token: slots {slot}, counts {count}")
        assumed = rows.starts[live]
        self._expect(bool(((assumed < 0) | (assumed == start)).all()), lambda: f"plan {plan.step} assumed starts {assumed}, the table has {start}")
        self._expect(
            bool((rows.samples[live] == samples).all()),
            lambda: f"plan {plan.step} assumed samples {rows.samples[live]}, the table has {samples.astype(int)}",
        )
        return self._layout(plan.step, slot, start, count, known, np.flatnonzero(samples).astype(np.int32))

    def _layout(self, step: int, slot: I32, start: I32, count: I32, known: I32, sample_row: I32) -> BatchLayout:
        c = self.columns
        row_starts = np.zeros(len(slot) + 1, np.int32)
        np.cumsum(count, out=row_starts[1:])
        row = np.repeat(np.arange(len(slot)), count)
        position = (np.arange(row_starts[-1]) - row_starts[row] + start[row]).astype(np.int32)
        token_ids, tags, marks = self._sequence(slot, start, known, row, position)
        size, end = self.shape.block_size, start + count
        full = start // size
        width = int(full.max(initial=0))
        block_tags = np.where(np.arange(width) < full[:, None], self.tags[:, size - 1 :: size][slot, :width], np.uint64(0))
        tail_tags = np.where(start % size > 0, self.tags[slot, start - 1], np.uint64(0))
        sampled = slot[sample_row]
        drafts = end[sample_row] - known[sample_row]
        sample_starts = np.zeros(len(sampled) + 1, np.int32)
        np.cumsum(drafts + 1, out=sample_starts[1:])
        of = np.repeat(np.arange(len(sampled)), drafts + 1)
        index = (row_starts[sample_row + 1] - drafts - 1)[of] + np.arange(len(of)) - sample_starts[of]
        by_position = sampled[of]
        return BatchLayout(
            step=step,
            block_size=size,
            slot=slot,
            generation=c["generation"][slot],
            start=start,
            count=count,
            known=known,
            token_ids=token_ids,
            positions=position,
            marks=marks,
            tags=tags,
            row_starts=row_starts,
            block_tables=tuple(self._block_table(group, slot, end) for group in range(self.shape.group_count)),
            block_tags=block_tags,
            tail_tags=tail_tags,
            sample_row=sample_row,
            sample_starts=sample_starts,
            sampling=SamplingColumns(
                index=index.astype(np.int32),
                position=position[index] + np.int32(1),
                **{name: c[name][by_position] for name in ("seed", "temperature", "top_k", "top_p", "min_p", "logprob_count")},
            ),
            prompt_length=c["prompt_length"][sampled],
            length_cap=c["length_cap"][sampled],
            draft_ids=Ragged.of([self.drafts[s, :d] for s, d in zip(sampled, drafts, strict=True)]) if drafts.any() else _empty_rows(len(sampled)),
            stop_ids=Ragged.of([self.sides[s].stop_ids for s in sampled]),
            side_hash=c["side_hash"][sampled],
            sides=tuple(self.sides[s] for s in sampled),
        )

    def _sequence(self, slot: I32, start: I32, known: I32, row: NDArray[np.intp], position: I32) -> tuple[I32, U64, I32]:
        """Token ids, tags and marks at `position` of each row: known tokens from the table, what lies behind them from the drafts.
        Tags are made again from what compute will read, and must be those that the tokens came with."""
        of = slot[row]
        token_ids, marks = self.tokens[of, position], self.marks[of, position].astype(np.int32)
        is_known = position < known[row]
        draft = np.flatnonzero(~is_known)
        if len(draft):
            token_ids[draft] = self.drafts[of[draft], position[draft] - known[row[draft]]]
            marks[draft] = MARK_TOKEN
        self._expect(bool((marks != MARK_VOID).all()), lambda: f"a row reads positions that hold nothing: {position[marks == MARK_VOID]}")
        before = np.where(start > 0, self.tags[slot, start - 1], np.uint64(0))
        tags = self._chain(of, token_ids, position, marks, row, before)
        changed = is_known & (tags != self.tags[of, position])
        self._expect(not changed.any(), lambda: f"known tokens of slots {of[changed]} at {position[changed]} are not those that were written there")
        return token_ids, tags, marks

    def _block_table(self, group: int, slot: I32, end: I32) -> I32:
        used = -(-end // self.shape.block_size)
        self._expect(
            bool((used <= self.block_counts[group, slot]).all()),
            lambda: f"rows of slots {slot} end at {end} and have {self.block_counts[group, slot]} blocks",
        )
        width = int(used.max(initial=0))
        return np.where(np.arange(width) < used[:, None], self.blocks[group, slot, :width], np.int32(-1))

    def note(self, layout: BatchLayout) -> None:
        """A row that does not sample advances `computed` at once; one that samples marks its slot pending until its result (PROTOCOL.md 3)."""
        samples = np.zeros(layout.row_count, bool)
        samples[layout.sample_row] = True
        quiet = ~samples
        self.columns["computed"][layout.slot[quiet]] = (layout.start + layout.count)[quiet]
        self.columns["pending"][layout.slot[samples]] = layout.step
        self.columns["pending_count"][layout.slot[samples]] = np.diff(layout.sample_starts)

    # Looking in

    def known_tokens(self, slot: int) -> list[int]:
        return [int(t) for t in self.tokens[slot, : self.columns["known"][slot]]]

    def held_slots(self) -> list[int]:
        return [int(s) for s in np.flatnonzero(self.columns["generation"] != FREE)]

    def _expect(self, condition: bool, message: Callable[[], str]) -> None:
        """message: made only if it is needed; writing out arrays costs more than checking them."""
        if not condition:
            raise LogError(message())


def _empty_rows(count: int) -> Ragged:
    return Ragged(starts=np.zeros(count + 1, np.int32), values=np.zeros(0, np.int32))
