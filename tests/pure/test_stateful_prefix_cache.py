"""The prefix cache, `PrefixHasher` over `BlockPool`, against a dictionary from (engine's secret, tenant's salt, whole prefix) to block.

The twin knows no hashes: a prefix is found if and only if this very prefix was published by this engine for this tenant and its block was not given
away since.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lockstep.core.pool import BlockPool
from lockstep.core.prefix import PrefixHasher

BLOCKS, BLOCK_SIZE = 7, 2
SECRETS = (b"one", b"two")
SALTS = (b"", b"a", b"ab")
OWNERS = [(SECRETS[0], SALTS[0])] * 6 + [(secret, salt) for secret in SECRETS for salt in SALTS]
"""Mostly one tenant of one engine, so that there are hits."""

Prefix = tuple[bytes, bytes, tuple[int, ...]]


class PrefixCacheAgainstTwin(RuleBasedStateMachine):
    """leases: per request its blocks and the prefixes that they hold once they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.cache: dict[Prefix, int] = {}
        self.leases: list[tuple[list[int], list[Prefix], list[bytes]]] = []

    def holders(self, block: int) -> int:
        return sum(blocks.count(block) for blocks, _, _ in self.leases)

    @rule(owner=st.sampled_from(OWNERS), halves=st.lists(st.integers(0, 1), max_size=3), rest=st.integers(0, 1), cut=st.integers(0, 3))
    def lease(self, owner: tuple[bytes, bytes], halves: list[int], rest: int, cut: int) -> None:
        """A request for whole blocks, each of one token twice: hits are shared, the others are fresh. Its keys are made in two goes."""
        secret, salt = owner
        tokens = [token for half in halves for token in (half, half)] + [1] * rest
        count = len(tokens) // BLOCK_SIZE
        prefixes = [(secret, salt, tuple(tokens[: (i + 1) * BLOCK_SIZE])) for i in range(count)]
        chain: list[bytes] = []
        hasher = PrefixHasher(secret, BLOCK_SIZE)
        hasher.extend(chain, np.array(tokens, np.int32), salt, min(cut, count))
        hasher.extend(chain, np.array(tokens, np.int32), salt, count)
        expected: list[int] = []
        for prefix in prefixes:
            if prefix not in self.cache:
                break
            expected.append(self.cache[prefix])
        found = self.pool.find(chain)
        assert found == expected
        free = BLOCKS - sum(self.holders(block) > 0 for block in range(BLOCKS))
        if count - len(found) > free - sum(self.holders(block) == 0 for block in found):
            return
        self.pool.share(found)
        fresh = self.pool.take(count - len(found))
        assert all(self.holders(block) == 0 for block in fresh)
        assert not set(fresh) & set(found)
        self.cache = {prefix: block for prefix, block in self.cache.items() if block not in fresh}
        self.leases.append((found + fresh, prefixes, chain))

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """The first blocks of some request are written. Of two blocks with one prefix the first published stays the one that is found."""
        if not self.leases:
            return
        blocks, prefixes, chain = data.draw(st.sampled_from(self.leases))
        for i in range(data.draw(st.integers(0, len(blocks)))):
            self.pool.publish(blocks[i], chain[i])
            if prefixes[i] not in self.cache and blocks[i] not in self.cache.values():
                self.cache[prefixes[i]] = blocks[i]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            blocks, _, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            self.pool.release(blocks)

    @rule(chance=st.integers(0, 15))
    def clear(self, chance: int) -> None:
        """Seldom, else there is never a cache."""
        if chance == 15:
            self.pool.clear_cache()
            self.cache.clear()

    @invariant()
    def books_agree(self) -> None:
        held = {block for block in range(BLOCKS) if self.holders(block)}
        assert self.pool.free_count == BLOCKS - len(held)
        assert self.pool.cached_count == len(set(self.cache.values()) - held)
        assert self.pool.audit() == []


PrefixCacheAgainstTwin.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, print_blob=True)
TestPrefixCacheAgainstTwin = PrefixCacheAgainstTwin.TestCase
