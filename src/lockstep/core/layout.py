"""`BatchLayout`: every value that one step's compute may read, copied out of the table (PROTOCOL.md 8).

Axes: T tokens of the step, R rows, Q rows that sample, S sampled positions (a row with d drafts samples d + 1), G KV groups, W blocks of the
longest row, P prompt tokens whose log probabilities are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.core.ragged import Ragged
from lockstep.core.records import Columns, Side, named
from lockstep.core.types import F32, I32, I64, U64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """Per sampled position [S]. index: which of the T tokens' hidden states is sampled. position: of the token to be sampled.
    The others are the request's own columns, repeated for each of its positions."""

    index: I32
    position: I32
    seed: U64
    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    logprob_count: I32

    def columns(self) -> Columns:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTargets:
    """Prompt tokens whose log probabilities the step tells [P]. index: which of the T tokens' hidden states foretells it. position, token: of the
    prompt token itself. logprob_count: alternatives to tell."""

    index: I32
    position: I32
    token: I32
    logprob_count: I32

    def columns(self) -> Columns:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """slot, generation, start, count, known [R]: row r computes positions start[r] .. start[r] + count[r].
    token_ids, positions [T]; marks [T] what each position is; tags uint64 [T]: cumulative provenance tag up to and including that token.
    row_starts [R + 1]: row r owns tokens row_starts[r] .. row_starts[r + 1].
    block_tables: per group int32 [R, W], -1 beyond the row's last block and before the first that its window reaches.
    block_tags uint64 [R, W']: expected tag at the end of each full block below start, 0 beyond. tail_tags [R]: expected tag at start - 1 where that
    is inside a block, else 0.
    sample_row [Q], sample_starts [Q + 1] into S, sampling columns [S]; prompt_length, length_cap [Q]; stop_ids: one row a sampling row; side_hash
    [Q]. history: one row a sampling row, its known tokens where the request's shaping reads them, else nothing.
    draft_ids: one row a sampling row, the drafts being verified.
    """

    step: int
    block_size: int
    slot: I32
    generation: I64
    start: I32
    count: I32
    known: I32
    token_ids: I32
    positions: I32
    marks: I32
    tags: U64
    row_starts: I32
    block_tables: tuple[I32, ...]
    block_tags: U64
    tail_tags: U64
    sample_row: I32
    sample_starts: I32
    sampling: SamplingColumns
    prompt_targets: PromptTargets
    prompt_length: I32
    length_cap: I32
    draft_ids: Ragged
    stop_ids: Ragged
    history: Ragged
    side_hash: U64
    sides: tuple[Side, ...]

    @property
    def token_count(self) -> int:
        return len(self.token_ids)

    @property
    def row_count(self) -> int:
        return len(self.slot)

    def columns(self) -> Columns:
        """What the digest folds: everything above, side records by their hash."""
        return {
            "head": np.array([self.step, self.block_size], np.int64),
            "slot": self.slot,
            "generation": self.generation,
            "start": self.start,
            "count": self.count,
            "known": self.known,
            "token_ids": self.token_ids,
            "positions": self.positions,
            "marks": self.marks,
            "tags": self.tags,
            "row_starts": self.row_starts,
            **{f"block_tables{group}": table for group, table in enumerate(self.block_tables)},
            "block_tags": self.block_tags,
            "tail_tags": self.tail_tags,
            "sample_row": self.sample_row,
            "sample_starts": self.sample_starts,
            **named("sampling", self.sampling.columns()),
            **named("prompt_targets", self.prompt_targets.columns()),
            "prompt_length": self.prompt_length,
            "length_cap": self.length_cap,
            "draft_ids.starts": self.draft_ids.starts,
            "draft_ids": self.draft_ids.values,
            "stop_ids.starts": self.stop_ids.starts,
            "stop_ids": self.stop_ids.values,
            "history.starts": self.history.starts,
            "history": self.history.values,
            "side_hash": self.side_hash,
        }

    def row_of_token(self) -> I32:
        """int32 [T]: the row that each token belongs to."""
        return np.repeat(np.arange(self.row_count, dtype=np.int32), self.count)
