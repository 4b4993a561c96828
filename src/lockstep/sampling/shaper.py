"""`Shaper`: the logit edits of a step, from its rows: penalties, biases, min_tokens, bad words, allowed ids, grammars, logits processors, position by
position inside a draft.

The order is vLLM's: allowed ids, biases and what is taken away, then penalties. It knows token prefixes and vocabularies; not who holds a slot, nor
how logits are made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.core.shaping import Shaping
from lockstep.errors import InternalError, PluginError
from lockstep.ops.step import F32, I32, U32, LogitEdits
from lockstep.sampling.counts import TokenCounts
from lockstep.sampling.grammar import GrammarState, may_come
from lockstep.sampling.grammar_shelf import GrammarShelf
from lockstep.sampling.processor_set import CheckedEdit, ProcessorSet

NEVER = float("-inf")

_NO_IDS, _NO_VALUES = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass(slots=True)
class _Edits:
    """Entries of one step, as they are found."""

    starts: list[int] = field(default_factory=lambda: [0])
    ids: list[I32] = field(default_factory=list)
    biases: list[F32] = field(default_factory=list)
    penalties: list[F32] = field(default_factory=list)
    subtracts: list[F32] = field(default_factory=list)
    mask_rows: list[int] = field(default_factory=list)
    masks: dict[bytes, int] = field(default_factory=dict)

    def add(self, ids: I32, *, bias: F32 | float = 0.0, penalty: float = 1.0, subtract: F32 | float = 0.0) -> None:
        count = len(ids)
        self.ids.append(ids)
        for column, value in ((self.biases, bias), (self.penalties, penalty), (self.subtracts, subtract)):
            column.append(np.broadcast_to(np.asarray(value, np.float32), count))

    def end_position(self, mask: U32 | None) -> None:
        self.starts.append(self.starts[-1] + sum(map(len, self.ids[self._parts_ended :])))
        self._parts_ended = len(self.ids)
        self.mask_rows.append(-1 if mask is None else self.masks.setdefault(mask.tobytes(), len(self.masks)))

    _parts_ended: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedRow:
    """One sampling row: its known tokens, then each of its drafts, are followed by a sampled position. prefix: int32, its known tokens, or nothing
    where the shaping does not read them. stop_ids: that end the request."""

    slot: int
    generation: int
    shaping: Shaping
    prompt_length: int
    known: int
    prefix: I32
    drafts: Sequence[int]
    stop_ids: Sequence[int]


class Shaper:
    """vocab_size: width of the logits. shelf: of compiled grammars, processors: logits processors, if requests may have some. For a step's rows in
    their order; keeps per slot what it counted and where it is in its grammar. failures: sampled positions of the last step at which no id may come,
    and what a processor failed with there, empty if none did."""

    def __init__(self, vocab_size: int, shelf: GrammarShelf | None = None, processors: ProcessorSet | None = None) -> None:
        self._vocab_size = vocab_size
        self._shelf = shelf
        self._processors = processors or ProcessorSet({}, vocab_size)
        self._counts: dict[int, tuple[int, TokenCounts]] = {}
        self._states: dict[int, tuple[int, GrammarState]] = {}
        self.failures: dict[int, str] = {}

    def edits(self, rows: Sequence[ShapedRow]) -> LogitEdits | None:
        """None if no sampled position of the rows has any."""
        found = _Edits()
        self.failures.clear()
        for row in rows:
            self._add_row(found, row)
        if found.starts[-1] == 0 and not found.masks:
            return None
        return self._built(found)

    def _add_row(self, found: _Edits, row: ShapedRow) -> None:
        shaping = row.shaping
        if shaping.is_plain:
            for _ in range(len(row.drafts) + 1):
                found.end_position(None)
            return
        counts = self._counted(row) if shaping.penalises else None
        output = row.prefix[row.prompt_length :][-_longest(shaping) :].tolist()
        first = len(found.mask_rows)
        masks = self._masks(row, first)
        asked = self._asked(row, first, masks)
        for j in range(len(row.drafts) + 1):
            output_count = row.known + j - row.prompt_length
            if shaping.logit_bias:
                ids, biases = zip(*shaping.logit_bias, strict=True)
                found.add(np.array(ids, np.int32), bias=np.array(biases, np.float32))
            edit = asked[j]
            if edit is not None:
                found.add(edit.ids, bias=edit.biases)
            stops = row.stop_ids if output_count < shaping.min_tokens else ()
            never = _never(shaping, [*output, *row.drafts[:j]], stops, masks[j], self._vocab_size)
            if never:
                found.add(np.array(never, np.int32), bias=NEVER)
            if counts is not None:
                _penalise(found, shaping, counts, row.drafts[:j])
            found.end_position(masks[j])

    def _masks(self, row: ShapedRow, first: int) -> list[U32 | None]:
        """Of each of the row's positions, None where every id may come: ids that the request allows and that its grammar does. A position where
        neither does, or where the grammar fails, is among `failures` and has none. first: its number among the step's."""
        shaping, count = row.shaping, len(row.drafts) + 1
        words = -(-self._vocab_size // 32)
        allowed = allowed_mask(shaping.allowed_token_ids, words) if shaping.allowed_token_ids else None
        if not shaping.grammar:
            return [allowed] * count
        masks: list[U32 | None] = []
        for j, mask in enumerate(self._followed(row).masks(row.prefix[row.prompt_length :].tolist(), row.drafts)):
            both = mask if mask is None or allowed is None else mask & allowed
            if both is None or not both.any():
                self.failures[first + j] = ""
                both = None
            masks.append(both)
        return masks

    def _asked(self, row: ShapedRow, first: int, masks: list[U32 | None]) -> list[CheckedEdit | None]:
        """What the request's processors change at each of the row's positions; narrows `masks` by what they allow. Behind a draft that may not come
        they are not asked: nobody gets there. A position at which they fail, or leave nothing, is among `failures` and has no mask."""
        edits: list[CheckedEdit | None] = [None] * len(masks)
        if not row.shaping.processors:
            return edits
        prompt, output = row.prefix[: row.prompt_length], row.prefix[row.prompt_length :]
        for j in range(len(masks)):
            if first + j in self.failures:
                break
            behind = np.concatenate([output, np.array(row.drafts[:j], np.int32)])
            try:
                edit = self._processors.edit(row.shaping.processors, prompt, behind)
            except PluginError as error:
                self.failures[first + j], masks[j] = str(error), None
                break
            edits[j], masks[j] = edit, _both(masks[j], edit.mask)
            mask = masks[j]
            if mask is not None and not mask.any():
                self.failures[first + j], masks[j] = "", None
                break
            if j < len(row.drafts) and mask is not None and not may_come(mask, row.drafts[j]):
                break
        return edits

    def _followed(self, row: ShapedRow) -> GrammarState:
        held, state = self._states.get(row.slot, (-1, None))
        if held != row.generation or state is None:
            if self._shelf is None:
                raise InternalError(f"slot {row.slot} has a grammar, and the sampler none to compile it with")
            state = self._shelf.state_of(row.shaping.grammar_key, row.shaping.grammar)
            self._states[row.slot] = (row.generation, state)
        return state

    def _counted(self, row: ShapedRow) -> TokenCounts:
        """What was counted in the slot, if it was for this admission and for a beginning of this prefix; else all of it, counted again."""
        held, counts = self._counts.get(row.slot, (-1, None))
        if held != row.generation or counts is None or not counts.follow(row.prefix):
            counts = TokenCounts(row.prompt_length)
            followed = counts.follow(row.prefix)
            assert followed, row
            self._counts[row.slot] = (row.generation, counts)
        return counts

    def _built(self, found: _Edits) -> LogitEdits:
        masks = np.zeros((len(found.masks), -(-self._vocab_size // 32)), np.uint32)
        for mask, row in found.masks.items():
            masks[row] = np.frombuffer(mask, np.uint32)
        return LogitEdits(
            mask_rows=np.array(found.mask_rows, np.int32),
            masks=masks,
            starts=np.array(found.starts, np.int32),
            ids=np.concatenate([_NO_IDS, *found.ids]),
            biases=np.concatenate([_NO_VALUES, *found.biases]),
            penalties=np.concatenate([_NO_VALUES, *found.penalties]),
            subtracts=np.concatenate([_NO_VALUES, *found.subtracts]),
        )


def allowed_mask(ids: Sequence[int], words: int) -> U32:
    """uint32 [words]: bit id % 32 of word id // 32 is set for each of `ids`."""
    bits = np.zeros(words * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _both(one: U32 | None, other: U32 | None) -> U32 | None:
    return other if one is None else one if other is None else one & other


def _longest(shaping: Shaping) -> int:
    """Tokens that a bad word's beginning may have, at least 1."""
    return max([1, *(len(word) - 1 for word in shaping.bad_words)])


def _never(shaping: Shaping, behind: Sequence[int], stops: Sequence[int], mask: U32 | None, vocab_size: int) -> list[int]:
    """Ids that must not come next. behind: the end of the output. mask: ids that may, None for all. Bad words give way where nothing else would be
    allowed: then the answer goes on with one rather than end in an error. So does min_tokens where what guides the request leaves nothing but the
    end."""
    bad = [word[-1] for word in shaping.bad_words if len(word) == 1 or tuple(behind[1 - len(word) :]) == word[:-1]]
    taken = dict.fromkeys([*stops, *bad])
    if bad and _takes_all(taken, mask, vocab_size):
        taken = dict.fromkeys(stops)
    if shaping.is_guided and taken and _takes_all(taken, mask, vocab_size):
        return []
    return list(taken)


def _takes_all(taken: Collection[int], mask: U32 | None, vocab_size: int) -> bool:
    """Nothing of what may come is left without these ids."""
    if mask is None:
        return len(taken) >= vocab_size
    return not (mask & ~allowed_mask(list(taken), len(mask))).any()


def _penalise(found: _Edits, shaping: Shaping, counts: TokenCounts, drafts: Sequence[int]) -> None:
    ids, outputs = counts.with_drafts(drafts)
    subtract = np.float32(shaping.frequency_penalty) * outputs.astype(np.float32) + np.float32(shaping.presence_penalty) * (outputs > 0)
    found.add(ids, penalty=shaping.repetition_penalty, subtract=subtract.astype(np.float32))
