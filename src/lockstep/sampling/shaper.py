"""`Shaper`: the logit edits of a step, from its rows: penalties, biases, min_tokens, bad words, allowed ids, position by position inside a draft.

The order is vLLM's: allowed ids, biases and what is taken away, then penalties. It knows token prefixes and vocabularies; not who holds a slot, nor
how logits are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.core.shaping import Shaping
from lockstep.ops.step import F32, I32, U32, LogitEdits
from lockstep.sampling.counts import TokenCounts

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
    masks: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, ids: I32, *, bias: F32 | float = 0.0, penalty: float = 1.0, subtract: F32 | float = 0.0) -> None:
        count = len(ids)
        self.ids.append(ids)
        for column, value in ((self.biases, bias), (self.penalties, penalty), (self.subtracts, subtract)):
            column.append(np.broadcast_to(np.asarray(value, np.float32), count))

    def end_position(self, allowed: tuple[int, ...]) -> None:
        self.starts.append(self.starts[-1] + sum(map(len, self.ids[self._parts_ended :])))
        self._parts_ended = len(self.ids)
        self.mask_rows.append(self.masks.setdefault(allowed, len(self.masks)) if allowed else -1)

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
    """vocab_size: width of the logits. For a step's rows in their order; keeps per slot what it counted."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: dict[int, tuple[int, TokenCounts]] = {}

    def edits(self, rows: Sequence[ShapedRow]) -> LogitEdits | None:
        """None if no sampled position of the rows has any."""
        found = _Edits()
        for row in rows:
            self._add_row(found, row)
        if found.starts[-1] == 0 and not found.masks:
            return None
        return self._built(found)

    def _add_row(self, found: _Edits, row: ShapedRow) -> None:
        shaping = row.shaping
        if shaping.is_plain:
            for _ in range(len(row.drafts) + 1):
                found.end_position(())
            return
        counts = self._counted(row) if shaping.penalises else None
        output = row.prefix[row.prompt_length :][-_longest(shaping) :].tolist()
        for j in range(len(row.drafts) + 1):
            output_count = row.known + j - row.prompt_length
            if shaping.logit_bias:
                ids, biases = zip(*shaping.logit_bias, strict=True)
                found.add(np.array(ids, np.int32), bias=np.array(biases, np.float32))
            stops = row.stop_ids if output_count < shaping.min_tokens else ()
            never = _never(shaping, [*output, *row.drafts[:j]], stops, self._vocab_size)
            if never:
                found.add(np.array(never, np.int32), bias=NEVER)
            if counts is not None:
                _penalise(found, shaping, counts, row.drafts[:j])
            found.end_position(shaping.allowed_token_ids)

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
        for allowed, row in found.masks.items():
            masks[row] = allowed_mask(allowed, masks.shape[1])
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


def _longest(shaping: Shaping) -> int:
    """Tokens that a bad word's beginning may have, at least 1."""
    return max([1, *(len(word) - 1 for word in shaping.bad_words)])


def _never(shaping: Shaping, behind: Sequence[int], stops: Sequence[int], vocab_size: int) -> list[int]:
    """Ids that must not come next. behind: the end of the output. Bad words give way where nothing else would be allowed: then the answer goes on
    with one rather than end in an error."""
    bad = [word[-1] for word in shaping.bad_words if len(word) == 1 or tuple(behind[1 - len(word) :]) == word[:-1]]
    taken = dict.fromkeys([*stops, *bad])
    allowed = shaping.allowed_token_ids or range(vocab_size)
    if bad and len(taken) >= len(allowed) and taken.keys() >= set(allowed):
        taken = dict.fromkeys(stops)
    return list(taken)


def _penalise(found: _Edits, shaping: Shaping, counts: TokenCounts, drafts: Sequence[int]) -> None:
    ids, outputs = counts.with_drafts(drafts)
    subtract = np.float32(shaping.frequency_penalty) * outputs.astype(np.float32) + np.float32(shaping.presence_penalty) * (outputs > 0)
    found.add(ids, penalty=shaping.repetition_penalty, subtract=subtract.astype(np.float32))
