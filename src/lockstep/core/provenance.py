"""Which prefix each stage's KV holds, position by position (PROTOCOL.md 12, 13).

A tag of a position is a running sum of mix64(token, position, what else shaped it) over the prefix up to and including it. A stage keeps one for
every position of every block, set once after the last write of all its layers; before attention reads a block table, the tags there must be the
request's.
Against faults; tenants' choice of tokens is the prefix cache's business, which uses a cryptographic chain.
"""

from __future__ import annotations

import numpy as np

from lockstep.core.digest import mix64_array
from lockstep.core.layout import BatchLayout
from lockstep.core.types import I32, U64, first_block_read
from lockstep.errors import ProvenanceError

VOID = 0
"""The tag of a position that holds nothing valid."""


def token_mix(tokens: I32, positions: I32, marks: I32, salt: U64) -> U64:
    """uint64 [n]: what each token adds to the running sum. salt uint64 (scalar or [n]): everything else that shaped the KV of the request."""
    words = tokens.astype(np.uint64) | (positions.astype(np.uint64) << np.uint64(32)) | (marks.astype(np.uint64) << np.uint64(63))
    return mix64_array(mix64_array(words + np.uint64(0x9E3779B97F4A7C15)) + salt)


class Provenance:
    """The tags of one KV group's pool on one stage. window: of the group, how many positions a token sees; 0 for all."""

    def __init__(self, block_count: int, block_size: int, group: int = 0, window: int = 0) -> None:
        self.block_size = block_size
        self.group = group
        self.window = window
        self.tags = np.zeros((block_count, block_size), np.uint64)
        self.block_tags = np.zeros(block_count, np.uint64)

    def check(self, layout: BatchLayout) -> None:
        """Compare the tags of everything that the step's attention will read from earlier steps. Raises ProvenanceError naming slot, position and
        both tags."""
        if not layout.row_count:
            return
        table = layout.block_tables[self.group]
        width = layout.block_tags.shape[1]
        if width:
            full, first = layout.start // self.block_size, first_block_read(layout.start, self.window, self.block_size)
            wanted, block = layout.block_tags, np.arange(width)
            found = self.block_tags[table[:, :width]]
            wrong = (found != wanted) & (block >= first[:, None]) & (block < full[:, None])
            if wrong.any():
                row, at = (int(i) for i in np.argwhere(wrong)[0])
                self._fail(layout, row, (at + 1) * self.block_size - 1, int(found[row, at]), int(wanted[row, at]))
        last = layout.start - 1
        inside = np.flatnonzero(layout.start % self.block_size)
        if len(inside):
            found = self.tags[table[inside, last[inside] // self.block_size], last[inside] % self.block_size]
            wrong_rows = np.flatnonzero(found != layout.tail_tags[inside])
            if len(wrong_rows):
                row = int(inside[wrong_rows[0]])
                self._fail(layout, row, int(last[row]), int(found[wrong_rows[0]]), int(layout.tail_tags[row]))

    def void(self, layout: BatchLayout) -> None:
        """Before the step writes: what it overwrites, and what lies behind that in the same blocks, holds nothing valid."""
        if not layout.row_count:
            return
        blocks, offsets = self._addresses(layout)
        self.tags[blocks, offsets] = VOID
        self.block_tags[blocks] = VOID
        table = layout.block_tables[self.group]
        last = layout.start + layout.count - 1
        last_blocks = table[np.arange(layout.row_count), last // self.block_size]
        behind = np.arange(self.block_size) > (last % self.block_size)[:, None]
        self.tags[last_blocks] = np.where(behind, np.uint64(VOID), self.tags[last_blocks])

    def set(self, layout: BatchLayout) -> None:
        """After the last write of all of the stage's layers."""
        if not layout.row_count:
            return
        blocks, offsets = self._addresses(layout)
        self.tags[blocks, offsets] = layout.tags
        ends = offsets == self.block_size - 1
        self.block_tags[blocks[ends]] = layout.tags[ends]

    def read(self, blocks: I32, count: int) -> U64:
        """uint64 [count]: tags of the first `count` positions of these blocks, for whoever fetches their KV."""
        return self.tags[blocks].reshape(-1)[:count].copy()

    def write_source(self, blocks: I32, tags: U64) -> None:
        """KV of positions 0 .. len(tags) of these blocks has come from elsewhere, complete in all of the stage's layers, with the source's own tags.
        What the receiver expects plays no part (PROTOCOL.md 13)."""
        size, count = self.block_size, len(tags)
        self.tags[blocks] = VOID
        self.block_tags[blocks] = VOID
        position = np.arange(count)
        self.tags[blocks[position // size], position % size] = tags
        full = count // size
        self.block_tags[blocks[:full]] = tags[size - 1 :: size][:full]

    def _addresses(self, layout: BatchLayout) -> tuple[I32, I32]:
        blocks = layout.block_tables[self.group][layout.row_of_token(), layout.positions // self.block_size]
        return blocks, layout.positions % self.block_size

    def _fail(self, layout: BatchLayout, row: int, position: int, found: int, wanted: int) -> None:
        slot = int(layout.slot[row])
        raise ProvenanceError(
            f"step {layout.step}, slot {slot} generation {int(layout.generation[row])}: KV at position {position} carries tag {found:#018x}, "
            f"the request's prefix has {wanted:#018x}; the request is stopped rather than answered from another prefix's KV",
            step=layout.step,
            concerned=[(slot, int(layout.generation[row]))],
        )
