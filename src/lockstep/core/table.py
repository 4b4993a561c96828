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

from lockstep.core.layout import BatchLayout, PromptTargets, SamplingColumns
from lockstep.core.provenance import token_mix
from lockstep.core.ragged import Ragged
from lockstep.core.records import Admissions, NewBlocks, Ready, Side, Slots, StepPlan, StepResult
from lockstep.core.schema import COLUMNS, FINISH_NONE, MARK_TOKEN, MARK_VOID, POISON
from lockstep.core.types import I32, I64, NO_BLOCK, NO_STEP, U64, ceil_div, first_block_read
from lockstep.errors import LogError

FREE = -1
"""Generation of a slot that nobody holds."""

_NO_SIDE = Side()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """slot_count slots, each of at most length_max tokens, drafts_max drafts a step, KV groups of blocks of block_size positions. windows: of each
    group, how many positions a token sees, its own the last of them; 0: all before it."""

    slot_count: int
    length_max: int
    block_size: int
    drafts_max: int = 0
    windows: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        assert min(self.slot_count, self.length_max, self.block_size, self.group_count) > 0, self
        assert min(self.drafts_max, *self.windows) >= 0, self

    @property
    def group_count(self) -> int:
        return len(self.windows)

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
        self._step = NO_STEP

    # Results

    def apply_result(self, result: StepResult) -> None:
        """Append accepted tokens, set computed, drafts and finished. A row whose generation is not the slot's is dropped.
        Nothing changes before all of the result is checked."""
        self._step = result.step
        self._expect(result.step == self.applied, lambda: f"result of step {self.applied} comes next, got step {result.step}")
        self._expect_slots(result.slots, lambda: f"result of step {result.step}")
        live = np.flatnonzero(self._holds(result.slots, result.generations))
        slots, counts, drafts = result.slots[live], result.tokens.lengths()[live], result.drafts.lengths()[live]
        self._check_answers(result, live, slots, counts, drafts)
        self.applied += 1
        if not len(live):
            return
        c = self.columns
        known = c["known"][slots]
        self._append(slots, known, counts, result.tokens, live)
        c["known"][slots] = known + counts
        c["computed"][slots] = known + counts - 1
        c["finished"][slots] = result.finishes[live]
        c["pending"][slots] = NO_STEP
        c["draft_count"][slots] = drafts
        for i in np.flatnonzero(drafts):
            self.drafts[slots[i], : drafts[i]] = result.drafts.row(int(live[i]))

    def _check_answers(self, result: StepResult, live: NDArray[np.intp], slots: I32, counts: I32, drafts: I32) -> None:
        """Rows `live` of the result, for `slots`, bring as many tokens and drafts as they may, and every slot that waits for the step has one."""
        c, name = self.columns, f"result of step {result.step}"
        pending, known, cap, most = c["pending"][slots], c["known"][slots], c["length_cap"][slots], c["pending_count"][slots]
        self._expect(pending == result.step, lambda: f"{name} has rows for slots that do not wait for it: {slots}, which wait for {pending}", slots)
        waits = (c["pending"] == result.step) & (c["generation"] != FREE)
        if np.count_nonzero(waits) != len(slots):
            waiting = np.flatnonzero(waits)
            self._expect(np.isin(waiting, slots), lambda: f"{name} has no row for slots that wait for it: {waiting} wait, {slots} have one", waiting)
        self._expect(counts > 0, lambda: f"{name} has a row without a token: {counts} tokens for slots {slots}", slots)
        self._expect(known + counts <= cap, lambda: f"{name} goes past a length cap: {counts} more tokens on {known}, caps {cap}", slots)
        self._expect(counts <= most, lambda: f"{name} brings {counts} tokens a row, {most} positions were sampled", slots)
        ended = result.finishes[live] != FINISH_NONE
        self._expect(ended | (known + counts < cap), lambda: f"{name} fills a length cap and does not end the request: slots {slots}", slots)
        fit = self.shape.drafts_max
        self._expect(drafts <= fit, lambda: f"{name} brings {drafts} drafts a row, at most {fit} fit", slots)

    def _append(self, slots: I32, known: I32, counts: I32, tokens: Ragged, rows: NDArray[np.intp]) -> None:
        """Write row rows[i] of tokens at positions known[i] .. of slots[i], with marks and cumulative tags."""
        which = np.repeat(np.arange(len(slots)), counts)
        offset = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        slot, position = slots[which], (known[which] + offset).astype(np.int32)
        assert len(slots) == len(known) == len(counts) == len(rows), (len(slots), len(known), len(counts), len(rows))
        values = tokens.values[tokens.starts[rows][which] + offset]
        self.tokens[slot, position] = values
        self.marks[slot, position] = MARK_TOKEN
        marks = np.full(len(values), MARK_TOKEN, np.int32)
        self.tags[slot, position] = self._chain(slot, values, position, marks, which, self.tags[slots, known - 1])

    def _chain(self, slot: I32, values: I32, positions: I32, marks: I32, which: NDArray[np.intp], before: U64) -> U64:
        """Cumulative tags of tokens that follow a prefix with tag before[i], for groups `which` = 0 0 1 1 1 ... in order."""
        sums = np.cumsum(token_mix(values, positions, marks, self.columns["kv_salt"][slot]), dtype=np.uint64)
        if len(sums) == len(before):  # one token each, as in a decode
            return before + np.diff(sums, prepend=np.uint64(0))
        first = np.searchsorted(which, np.arange(len(before)))
        base = np.where(first > 0, sums[first - 1], np.uint64(0))
        return before[which] + sums - base[which]

    # Plans

    def apply_plan(self, plan: StepPlan) -> None:
        """Releases, admissions, ready records, new blocks, in this order. Results below the plan's horizon have been applied, and no others.
        Each of the four is checked as a whole before it changes anything."""
        self._step = plan.step
        self._expect(plan.step == self.next_step, lambda: f"plan {self.next_step} comes next, got plan {plan.step}")
        self._expect(self.applied == plan.horizon, lambda: f"plan {plan.step} has horizon {plan.horizon}, {self.applied} results are applied")
        self.next_step += 1
        self._release(plan.releases)
        self._admit(plan.admissions)
        self._make_ready(plan.ready)
        self._extend(plan.new_blocks)

    def _release(self, releases: Slots) -> None:
        slots, generations = releases.slots, releases.generations
        if not len(slots):
            return
        self._expect_slots(slots, lambda: "release")
        held = self._holds(slots, generations)
        self._expect(held, lambda: f"release of slots {slots} in generations that do not hold them: {generations}", slots)
        for slot in slots:
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
        slots, tokens = admissions.slots, admissions.tokens
        if not len(slots):
            return
        self._check_admissions(admissions)
        for column in COLUMNS:
            self.columns[column.name][slots] = admissions.values[column.name] if column.initial is None else column.initial
        self.block_counts[:, slots] = 0
        salts = self.columns["kv_salt"][slots]
        for i, slot in enumerate(slots):
            self._write_tokens(int(slot), tokens.row(i), admissions.marks[tokens.starts[i] : tokens.starts[i + 1]], salts[i : i + 1])
            self.sides[slot] = admissions.sides[i]

    def _check_admissions(self, admissions: Admissions) -> None:
        slots, values, lengths, most = admissions.slots, admissions.values, admissions.tokens.lengths(), self.shape.length_max
        generations, known, computed, cap = (values[name] for name in ("generation", "known", "computed", "length_cap"))

        def expect(right: NDArray[np.bool_], message: Callable[[], str]) -> None:
            self._expect(right, message, slots, generations)

        self._expect_slots(slots, lambda: "admission")
        held = self.columns["generation"]
        expect(generations >= 0, lambda: f"admission in generations {generations}, wants 0 or above")
        expect(held[slots] == FREE, lambda: f"admission to slots that are held: {slots}, in generations {held[slots]}")
        expect(~np.isin(generations, held), lambda: f"admission in generations {generations}, the table holds {held}")
        self._expect(len(set(generations.tolist())) == len(slots), lambda: f"two admissions in one generation: {generations}")
        expect((cap <= most) & (lengths <= most), lambda: f"admission of {lengths} tokens with caps {cap}, a slot holds {most}")
        expect(known == lengths, lambda: f"admission says {known} known tokens and brings {lengths}")
        right = (computed >= 0) & (computed < known) & (known < cap)
        expect(right, lambda: f"admission wants 0 <= computed < known < cap: {computed}, {known}, {cap}")

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
        c, slots, computed = self.columns, ready.slots, ready.computed
        if not len(slots):
            return
        self._expect_slots(slots, lambda: "ready record")
        right = self._holds(slots, ready.generations) & (c["importing"][slots] == 1)
        self._expect(right, lambda: f"ready record for slots that import nothing: {slots} in generations {ready.generations}", slots)
        known = c["known"][slots]
        self._expect((computed >= 0) & (computed < known), lambda: f"ready record with computed {computed}, known {known}", slots)
        c["computed"][slots] = computed
        c["importing"][slots] = 0

    def _extend(self, new: NewBlocks) -> None:
        slots, groups = new.slots, new.groups
        if not len(slots):
            return
        lengths, fit, group_count = new.blocks.lengths(), self.shape.blocks_max, self.shape.group_count
        self._expect_slots(slots, lambda: "new blocks", distinct=False)
        self._expect(self.columns["generation"][slots] != FREE, lambda: f"new blocks for slots {slots}, one of which is free", slots)
        inside = (groups >= 0) & (groups < group_count)
        self._expect(inside, lambda: f"new blocks in KV groups {groups}, there are groups 0 .. {group_count - 1}", slots)
        self._check_numbers(new, slots, groups, lengths)
        counts = self.block_counts.copy()
        np.add.at(counts, (groups, slots), lengths)
        end = counts[groups, slots]
        self._expect(end <= fit, lambda: f"slots {slots} get {end} blocks, at most {fit} fit", slots)
        for i, (slot, group, count) in enumerate(zip(slots.tolist(), groups.tolist(), lengths.tolist(), strict=True)):
            have = int(self.block_counts[group, slot])
            self.blocks[group, slot, have : have + count] = new.blocks.row(i)
            self.block_counts[group, slot] = have + count

    def _check_numbers(self, new: NewBlocks, slots: I32, groups: I32, lengths: I32) -> None:
        """Block numbers are 0 or above; NO_BLOCK stands where a slot's list begins and every token from `computed` on has the block behind its
        window."""
        numbers = new.blocks.values
        if (numbers >= 0).all():
            return
        unread = first_block_read(self.columns["computed"][slots], np.array(self.shape.windows)[groups], self.shape.block_size)
        none_yet = self.block_counts[groups, slots] == 0
        which = np.repeat(np.arange(len(slots)), lengths)
        place = np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        right = (numbers >= 0) | ((numbers == NO_BLOCK) & none_yet[which] & (place < unread[which]))
        self._expect(right, lambda: f"new blocks with numbers below 0: {numbers}", slots[which])

    # Resolving

    def resolve(self, plan: StepPlan) -> BatchLayout:
        """What the plan's rows mean in this table, a function of (table, plan). Rows of finished requests resolve to nothing."""
        c, rows, name = self.columns, plan.rows, f"plan {plan.step}"
        self._step = plan.step
        self._expect_slots(rows.slots, lambda: f"{name}, in its rows,")
        held = self._holds(rows.slots, rows.generations)
        self._expect(held, lambda: f"{name} has rows for slots {rows.slots} in generations {rows.generations}", rows.slots)
        live = np.flatnonzero(c["finished"][rows.slots] == 0)
        slot, budget = rows.slots[live], rows.counts[live]
        pending = c["pending"][slot]
        self._expect(pending < 0, lambda: f"{name} has a row on a slot whose result is outstanding: {slot}, pending {pending}", slot)
        self._expect(c["importing"][slot] == 0, lambda: f"{name} has a row on a slot that is importing: {slot}", slot)
        start, known = c["computed"][slot], c["known"][slot]
        end = np.minimum(known + c["draft_count"][slot], c["length_cap"][slot] - 1)  # drafts end where blocks are reserved to (PROTOCOL.md 16)
        count = np.minimum(budget, end - start)
        samples = start + count >= known
        self._expect(count > 0, lambda: f"{name} has rows without a token: slots {slot}, counts {count}", slot)
        assumed = rows.starts[live]
        self._expect((assumed < 0) | (assumed == start), lambda: f"{name} assumed starts {assumed} of slots {slot}, the table has {start}", slot)
        as_assumed = rows.samples[live] == samples
        self._expect(as_assumed, lambda: f"{name} assumed samples {rows.samples[live]} of slots {slot}, the table has {samples.astype(int)}", slot)
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
        assert len(token_ids) == row_starts[-1], (len(token_ids), row_starts)
        assert len(index) == sample_starts[-1], (len(index), sample_starts)
        assert (position[index] < end[sample_row][of]).all(), (position[index], end)
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
            block_tables=tuple(self._block_table(group, slot, start, end) for group in range(self.shape.group_count)),
            block_tags=block_tags,
            tail_tags=tail_tags,
            sample_row=sample_row,
            sample_starts=sample_starts,
            sampling=SamplingColumns(
                index=index.astype(np.int32),
                position=position[index] + np.int32(1),
                **{name: c[name][by_position] for name in ("seed", "temperature", "top_k", "top_p", "min_p", "logprob_count")},
            ),
            prompt_targets=self._prompt_targets(slot, start, count, row_starts),
            prompt_length=c["prompt_length"][sampled],
            length_cap=c["length_cap"][sampled],
            draft_ids=Ragged.of([self.drafts[s, :d] for s, d in zip(sampled, drafts, strict=True)]) if drafts.any() else _empty_rows(len(sampled)),
            stop_ids=Ragged.of([self.sides[s].stop_ids for s in sampled]),
            history=self._history(sampled),
            side_hash=c["side_hash"][sampled],
            sides=tuple(self.sides[s] for s in sampled),
        )

    def _prompt_targets(self, slot: I32, start: I32, count: I32, row_starts: I32) -> PromptTargets:
        """The prompt tokens that follow the rows' tokens, of slots that want their log probabilities, from the first on that is lacking."""
        c = self.columns
        wanting = np.flatnonzero(c["prompt_logprob_count"][slot] >= 0)
        if not len(wanting):
            return _NO_TARGETS
        first = np.maximum(start, c["prompt_logprob_start"][slot] - 1)[wanting]
        end = np.minimum(start + count, c["prompt_length"][slot] - 1)[wanting]
        lengths = np.maximum(0, end - first)
        row = np.repeat(wanting, lengths)
        place = (np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(first, lengths)).astype(np.int32)
        return PromptTargets(
            index=row_starts[row] + place - start[row],
            position=place + np.int32(1),
            token=self.tokens[slot[row], place + 1],
            logprob_count=c["prompt_logprob_count"][slot[row]],
        )

    def _history(self, sampled: I32) -> Ragged:
        """Known tokens of the slots whose shaping reads them, read again at each step (PROTOCOL.md 8)."""
        reads = [self.sides[s].shaping.reads_history for s in sampled]
        if not any(reads):
            return _empty_rows(len(sampled))
        return Ragged.of([self.tokens[s, : self.columns["known"][s] if read else 0] for s, read in zip(sampled, reads, strict=True)])

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
        self._expect(marks != MARK_VOID, lambda: f"a row reads positions that hold nothing: {position[marks == MARK_VOID]}", of)
        before = np.where(start > 0, self.tags[slot, start - 1], np.uint64(0))
        tags = self._chain(of, token_ids, position, marks, row, before)
        changed = is_known & (tags != self.tags[of, position])
        self._expect(~changed, lambda: f"known tokens of slots {of[changed]} at {position[changed]} are not those that were written there", of)
        return token_ids, tags, marks

    def _block_table(self, group: int, slot: I32, start: I32, end: I32) -> I32:
        """Only what the rows read or write: of a group with a window nothing that lies behind it, for that may be somebody else's by now."""
        used, have = -(-end // self.shape.block_size), self.block_counts[group, slot]
        self._expect(used <= have, lambda: f"rows of slots {slot} end at {end} and have {have} blocks", slot)
        block = np.arange(int(used.max(initial=0)))
        first = first_block_read(start, self.shape.windows[group], self.shape.block_size)
        table = np.where((block >= first[:, None]) & (block < used[:, None]), self.blocks[group, slot, : len(block)], np.int32(NO_BLOCK))
        held = (table >= 0).sum(1) == used - first
        self._expect(held, lambda: f"rows of slots {slot} read blocks of KV group {group} from {first} on, one of which they do not hold", slot)
        return table

    def note(self, layout: BatchLayout) -> None:
        """A row that does not sample advances `computed` at once; one that samples marks its slot pending until its result (PROTOCOL.md 3)."""
        samples = np.zeros(layout.row_count, bool)
        samples[layout.sample_row] = True
        quiet = ~samples
        assert layout.step == self.next_step - 1, (layout.step, self.next_step)
        assert ((layout.start + layout.count)[quiet] < layout.known[quiet]).all(), (layout.start, layout.count, layout.known)
        self.columns["computed"][layout.slot[quiet]] = (layout.start + layout.count)[quiet]
        self.columns["pending"][layout.slot[samples]] = layout.step
        self.columns["pending_count"][layout.slot[samples]] = np.diff(layout.sample_starts)

    # Looking in

    def known_tokens(self, slot: int) -> list[int]:
        return [int(t) for t in self.tokens[slot, : self.columns["known"][slot]]]

    def held_slots(self) -> list[int]:
        return [int(s) for s in np.flatnonzero(self.columns["generation"] != FREE)]

    # Checking

    def _holds(self, slots: I32, generations: I64) -> NDArray[np.bool_]:
        """Whether each slot is held, and in that generation."""
        held: I64 = self.columns["generation"][slots]
        return np.asarray((held == generations) & (generations >= 0), np.bool_)

    def _expect_slots(self, slots: I32, what: Callable[[], str], *, distinct: bool = True) -> None:
        """Numbers of slots that exist, each but once."""
        count = self.shape.slot_count
        inside = (slots >= 0) & (slots < count)
        self._expect(inside, lambda: f"{what()} names slots {slots[~inside]}, the table has slots 0 .. {count - 1}")
        if distinct and len(set(slots.tolist())) < len(slots):
            times = np.bincount(slots, minlength=count)[slots]
            self._expect(times == 1, lambda: f"{what()} names one slot twice: {slots}", slots)

    def _expect(
        self, right: bool | NDArray[np.bool_], message: Callable[[], str], slots: NDArray[Any] | None = None, generations: I64 | None = None
    ) -> None:
        """right: one answer, or one for each of `slots`; those that are wrong concern the requests in these generations, or in the table's.
        message: made only if it is needed; writing out arrays costs more than checking them."""
        if right if isinstance(right, bool) else right.all():
            return
        concerned: dict[tuple[int, int], None] = {}
        if slots is not None:
            wrong = ~np.asarray(right)
            at = self.columns["generation"][slots[wrong]] if generations is None else generations[wrong]
            pairs = zip(slots[wrong].tolist(), at.tolist(), strict=True)
            concerned = dict.fromkeys((slot, generation) for slot, generation in pairs if generation >= 0)
        raise LogError(message(), step=self._step, concerned=tuple(concerned))


_NONE = np.zeros(0, np.int32)
_NO_TARGETS = PromptTargets(index=_NONE, position=_NONE, token=_NONE, logprob_count=_NONE)


def _empty_rows(count: int) -> Ragged:
    return Ragged(starts=np.zeros(count + 1, np.int32), values=np.zeros(0, np.int32))
