"""`BlockBook`: which KV blocks each request holds, and which prefixes may be hit. The scheduler decides; this keeps the books.

One way in for each need (`attach` hits, `extend` by fresh ones) and one way out (`release`). A hold for another engine is a reference of its own, so
an export outlives the request that it came from.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.core.pool import BlockPool
from lockstep.core.prefix import PrefixHasher
from lockstep.core.request import LiveRequest
from lockstep.core.types import ceil_div

GroupBlocks = tuple[tuple[int, ...], ...]
"""Blocks by KV group."""


class BlockBook:
    """block_counts: blocks in the pool, one a KV group. hasher: of prefix-cache keys, or None for no prefix cache."""

    def __init__(self, block_counts: Sequence[int], block_size: int, hasher: PrefixHasher | None) -> None:
        self.pools = [BlockPool(count) for count in block_counts]
        self._size = block_size
        self._hasher = hasher

    def find_hits(self, request: LiveRequest) -> list[list[int]]:
        """Per group the blocks of the longest cached prefix: whole blocks below known - 1, so that no row is empty and no row writes a shared block.
        Nor may a position be hit that has yet to tell its next token's log probability (PROTOCOL.md 18). An import brings its own KV."""
        if self._hasher is None or request.transfer is not None:
            return [[] for _ in self.pools]
        end = request.prompt_logprob_start if request.lacks_prompt_logprobs else request.known
        count = (end - 1) // self._size
        self._hasher.extend(request.chain, request.tokens, request.spec.side.cache_salt, count)
        found = [pool.find(request.chain[:count]) for pool in self.pools]
        shortest = min(len(blocks) for blocks in found)
        return [blocks[:shortest] for blocks in found]

    def fits_beside(self, hits: list[list[int]], end: int) -> bool:
        """Positions below `end` find blocks if these are hit."""
        needed = ceil_div(end, self._size)
        return all(
            pool.can_take(needed - len(found) + sum(pool.is_free(block) for block in found)) for pool, found in zip(self.pools, hits, strict=True)
        )

    def attach(self, request: LiveRequest, hits: list[list[int]]) -> None:
        """A request that gets a slot begins with the blocks that it hit."""
        assert not request.blocks, (request.spec.request_id, request.blocks)
        request.blocks = [list(blocks) for blocks in hits]
        request.published = len(hits[0])
        for pool, blocks in zip(self.pools, hits, strict=True):
            pool.share(blocks)

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
                    pool.publish(blocks[index], request.chain[index])
            request.published = count

    def release(self, request: LiveRequest) -> None:
        for pool, blocks in zip(self.pools, request.blocks, strict=True):
            pool.release(blocks)
        request.blocks = []
        request.published = 0

    def hold(self, request: LiveRequest, end: int) -> GroupBlocks:
        """One more reference to the request's blocks of positions below `end`, until `let_go`."""
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
