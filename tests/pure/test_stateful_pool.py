"""`BlockPool` against a pool of lists and counts that has no idea of speed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lockstep.core.pool import BlockPool
from lockstep.errors import LogError

BLOCKS = 4
KEYS = [bytes([i]) * 16 for i in range(3)]


class PoolAgainstTwin(RuleBasedStateMachine):
    """The twin: references and key per block, and one list of free blocks in the order of their release. What is given away next is searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.references = [0] * BLOCKS
        self.keys: list[bytes | None] = [None] * BLOCKS
        self.released: list[int] = []
        self.leases: list[list[int]] = []

    def free(self) -> list[int]:
        return [block for block in range(BLOCKS) if self.references[block] == 0]

    @rule(count=st.integers(0, BLOCKS + 1))
    def take(self, count: int) -> None:
        free = self.free()
        assert self.pool.can_take(count) == (count <= len(free))
        if count > len(free):
            with pytest.raises(LogError):
                self.pool.take(count)
            return
        empty = [block for block in free if self.keys[block] is None]
        cached = sorted((block for block in free if self.keys[block] is not None), key=self.released.index)
        blocks = self.pool.take(count)
        assert len(set(blocks)) == count
        assert set(blocks[: len(empty)]) <= set(empty), "empty blocks go before cached ones"
        assert blocks[len(empty) :] == cached[: max(0, count - len(empty))], "cached ones go least recently released first"
        for block in blocks:
            self.references[block], self.keys[block] = 1, None
        if blocks:
            self.leases.append(blocks)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.leases:
            return
        blocks = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.released = [b for b in self.released if b != block] + [block]

    @rule(block=st.integers(0, BLOCKS - 1))
    def free_block_is_not_published(self, block: int) -> None:
        if self.references[block] == 0:
            with pytest.raises(LogError):
                self.pool.publish(block, KEYS[0])

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        held = [block for block in range(BLOCKS) if self.references[block]]
        if not held:
            return
        block = data.draw(st.sampled_from(held))
        self.pool.publish(block, key)
        if self.keys[block] is None and key not in self.keys:
            self.keys[block] = key

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3, unique=True))
    def find_and_share(self, keys: list[bytes]) -> None:
        found = self.pool.find(keys)
        expected: list[int] = []
        for key in keys:
            if key not in self.keys:
                break
            expected.append(self.keys.index(key))
        assert found == expected
        self.pool.share(found)
        for block in found:
            self.references[block] += 1
        if found:
            self.leases.append(found)

    @rule(chance=st.integers(0, 15))
    def clear_cache(self, chance: int) -> None:
        """Seldom, else there is never a cache."""
        if chance == 15:
            self.pool.clear_cache()
            self.keys = [None] * BLOCKS

    @rule(block=st.integers(-1, BLOCKS))
    def what_nobody_holds_is_neither_released_nor_shared(self, block: int) -> None:
        exists = 0 <= block < BLOCKS
        if not exists or self.references[block] == 0:
            with pytest.raises(LogError):
                self.pool.release([block])
        if not exists or (self.references[block] == 0 and self.keys[block] is None):
            with pytest.raises(LogError):
                self.pool.share([block])

    @invariant()
    def books_agree(self) -> None:
        free = self.free()
        assert self.pool.free_count == len(free)
        assert self.pool.cached_count == sum(self.keys[block] is not None for block in free)
        assert [self.pool.is_free(block) for block in range(BLOCKS)] == [count == 0 for count in self.references]
        assert self.pool.audit() == []


PoolAgainstTwin.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, print_blob=True)
TestPoolAgainstTwin = PoolAgainstTwin.TestCase
