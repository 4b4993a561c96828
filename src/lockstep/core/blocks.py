"""`BlockBook`: which KV blocks each request holds, and which prefixes may be hit. The scheduler decides; this keeps the books.

One way in for each need (`attach` hits, `extend` by fresh ones), one way out for a block that no later token of its request sees (`retire`) and one
for all (`release`). In a list of blocks NO_BLOCK stands for one that is gone or was never there. A hold for another engine is a reference of its own,
so an export outlives the request that it came from.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.core.pool import BlockPool
from lockstep.core.prefix import PrefixHasher
from lockstep.core.request import LiveRequest
from lockstep.core.types import NO_BLOCK, ceil_div, first_block_read

GroupBlocks = tuple[tuple[int, ...], ...]
"""Blocks by KV group."""


class BlockBook:
    """block_counts: blocks in the pool, one a KV group. windows: of each group, how many positions a token sees; 0: all. step_positions: most
    positions that one step computes of a request. hasher: of prefix-cache keys, or None for no prefix cache."""

    def __init__(
        self, block_counts: Sequence[int], block_size: int, hasher: PrefixHasher | None, windows: Sequence[int] = (0,), step_positions: int = 1
    ) -> None:
        assert len(block_counts) == len(windows), (block_counts, windows)
        self.pools = [BlockPool(count) for count in block_counts]
        self._size = block_size
        self._hasher = hasher
        self._windows = windows
        self._step_positions = step_positions

    def find_hits(self, request: LiveRequest) -> list[list[int]]:
        """Per group the blocks of the longest cached prefix: whole blocks below known - 1, so that no row is empty and no row writes a shared block.
        Of a group with a window those that the next token sees, NO_BLOCK before them. Nor may a position be hit that has yet to tell its next token's
        log probability (PROTOCOL.md 18). An import brings its own KV."""
        if self._hasher is None or request.transfer is not None:
            return [[] for _ in self.pools]
        end = request.prompt_logprob_start if request.lacks_prompt_logprobs else request.known
        count = (end - 1) // self._size
        self._hasher.extend(request.chain, request.tokens, request.spec.side.cache_salt, count)
        for pool, window in zip(self.pools, self._windows, strict=True):
            if not window:
                count = len(pool.find(request.chain[:count]))
        lacking = True
        while lacking:
            lacking = False
            for pool, window in zip(self.pools, self._windows, strict=True):
                found = pool.count_last(request.chain[self._first(count, window) : count])
                if found < count - self._first(count, window):  # whatever ends behind the one that is missing needs it too
                    count, lacking = count - found - 1, True
        hits = []
        for pool, window in zip(self.pools, self._windows, strict=True):
            first = self._first(count, window)
            hits.append([NO_BLOCK] * first + pool.find(request.chain[first:count]))
        return hits

    def _first(self, count: int, window: int) -> int:
        """The first block that is read once `count` whole blocks are there."""
        return int(first_block_read(count * self._size, window, self._size))

    def fits_beside(self, hits: list[list[int]], end: int) -> bool:
        """Positions below `end` find blocks if these are hit; in a group with a window as many as are held at once on the way there."""
        for pool, window, found in zip(self.pools, self._windows, hits, strict=True):
            kept = [block for block in found if block != NO_BLOCK]
            length = end - (len(found) - len(kept)) * self._size
            needed = held_blocks_most(length, window, self._step_positions, self._size)
            if not pool.can_take(max(0, needed - len(kept)) + sum(pool.is_free(block) for block in kept)):
                return False
        return True

    def attach(self, request: LiveRequest, hits: list[list[int]]) -> None:
        """A request that gets a slot begins with the blocks that it hit."""
        assert not request.blocks, (request.spec.request_id, request.blocks)
        request.blocks = [list(blocks) for blocks in hits]
        request.published = len(hits[0])
        request.retired = [0] * len(hits)
        for pool, blocks in zip(self.pools, hits, strict=True):
            pool.share(block for block in blocks if block != NO_BLOCK)

    def retire(self, request: LiveRequest, start: int) -> None:
        """Let go of blocks that no token from position `start` on sees. Who gets them writes in this step or a later one, and every rank executes in
        order (PROTOCOL.md 15)."""
        for group, (pool, window) in enumerate(zip(self.pools, self._windows, strict=True)):
            first = int(first_block_read(start, window, self._size))
            blocks = request.blocks[group]
            gone = [block for block in blocks[request.retired[group] : first] if block != NO_BLOCK]
            if first > request.retired[group]:
                blocks[request.retired[group] : first] = [NO_BLOCK] * (first - request.retired[group])
                request.retired[group] = first
                pool.release(gone[::-1])  # the earliest is given away first: a hit needs the last ones

    def fits(self, request: LiveRequest, end: int) -> bool:
        """Blocks for positions below `end` are held or free."""
        return all(pool.can_take(max(0, short)) for pool, short in zip(self.pools, self._short(request, end), strict=True))

    def extend(self, request: LiveRequest, end: int) -> list[tuple[int, list[int]]]:
        """(group, fresh blocks), so that positions below `end` have a block. They fit."""
        given = []
        for group, (pool, short) in enumerate(zip(self.pools, self._short(request, end), strict=True)):
            if short > 0:
                blocks = pool.take(short)
                request.blocks[group].extend(blocks)
                given.append((group, blocks))
        return given

    def _short(self, request: LiveRequest, end: int) -> list[int]:
        return [ceil_div(end, self._size) - len(blocks) for blocks in request.blocks]

    def publish(self, request: LiveRequest) -> None:
        """Blocks of tokens known at admission once planned (every rank executes in order); of later tokens once their result is in; of an import
        once it is ready (PROTOCOL.md 15, 19)."""
        if self._hasher is None or request.importing:
            return
        written = request.known - 1 if request.known > request.admitted_known else 0
        count = max(min(request.scheduled, request.admitted_known), written) // self._size
        if count > request.published:
            self._hasher.extend(request.chain, request.tokens, request.spec.side.cache_salt, count)
            for pool, blocks in zip(self.pools, request.blocks, strict=True):
                for index in range(request.published, count):
                    if blocks[index] != NO_BLOCK:
                        pool.publish(blocks[index], request.chain[index])
            request.published = count

    def release(self, request: LiveRequest) -> None:
        for pool, blocks in zip(self.pools, request.blocks, strict=True):
            pool.release([block for block in blocks if block != NO_BLOCK])
        request.blocks = []
        request.published = 0

    def hold(self, request: LiveRequest, end: int) -> GroupBlocks:
        """One more reference to the request's blocks of positions below `end`, until `let_go`. All of them are there: no group has a window."""
        assert not any(self._windows), self._windows
        count = ceil_div(end, self._size)
        held = tuple(tuple(blocks[:count]) for blocks in request.blocks)
        for pool, blocks in zip(self.pools, held, strict=True):
            pool.share(blocks)
        return held

    def let_go(self, held: GroupBlocks) -> None:
        for pool, blocks in zip(self.pools, held, strict=True):
            pool.release(blocks)

    def audit(self) -> list[str]:
        return [line for pool in self.pools for line in pool.audit()]


def held_blocks_most(length: int, window: int, step_positions: int, block_size: int) -> int:
    """Blocks that a request of `length` positions holds at once in a group where a token sees `window` positions, 0 for all, and a step computes at
    most `step_positions`: those before the step's first token, its own, and one more since neither need begin with a block."""
    whole = ceil_div(length, block_size)
    return min(whole, ceil_div(window - 1 + step_positions, block_size) + 1) if window else whole
