"""`BlockPool`: which KV blocks are held, by how many, and which free ones still hold a prefix that may be hit.

The driver's alone; ranks only see block numbers in plans. A block is in exactly one of three states:

    held     references > 0
    cached   references = 0 and it has a key: free, and hit by that key until it is given away
    empty    references = 0 and no key

Free blocks are given away empty ones first, then cached ones, least recently released first. One function lets go of a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from lockstep.errors import LogError


class BlockPool:
    """block_count blocks, numbered from 0, of one KV group."""

    def __init__(self, block_count: int) -> None:
        assert block_count >= 0, block_count
        self.block_count = block_count
        self._references = [0] * block_count
        self._key_of: list[bytes | None] = [None] * block_count
        self._block_of: dict[bytes, int] = {}
        self._empty: list[int] = list(range(block_count - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free_count(self) -> int:
        """Blocks that `take` could give away: empty and cached."""
        return len(self._empty) + len(self._cached)

    @property
    def cached_count(self) -> int:
        return len(self._cached)

    def can_take(self, count: int) -> bool:
        return count <= self.free_count

    def take(self, count: int) -> list[int]:
        """count blocks with one reference each; what they held is forgotten."""
        if not self.can_take(count):
            raise LogError(f"{count} blocks wanted, {self.free_count} of {self.block_count} are free")
        blocks = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            assert self._references[block] == 0, (block, self._references[block])
            assert self._key_of[block] is None, (block, self._key_of[block])
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of `keys` that is cached or held. Takes no reference."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_last(self, keys: Sequence[bytes]) -> int:
        """How many of the last of `keys`, in a row, are cached or held."""
        return next((count for count, key in enumerate(reversed(keys)) if key not in self._block_of), len(keys))

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these blocks, which `find` returned."""
        for block in blocks:
            self._expect_exists(block)
            if self._references[block] == 0:
                if block not in self._cached:
                    raise LogError(f"block {block} is shared while it is free and holds no prefix")
                del self._cached[block]
            self._references[block] += 1

    def publish(self, block: int, key: bytes) -> None:
        """A held block may be hit by this key from now on. If another block has the key already, that one stays."""
        self._expect_exists(block)
        if self._references[block] <= 0:
            raise LogError(f"block {block} is published while nobody holds it")
        if self._key_of[block] is None and key not in self._block_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. The last one makes a block free. Later blocks of a prefix are given away before earlier ones."""
        for block in reversed(blocks):
            self._expect_exists(block)
            if self._references[block] <= 0:
                raise LogError(f"block {block} is released and nobody holds it")
            self._references[block] -= 1
            if self._references[block] == 0:
                assert block not in self._cached, (block, self._key_of[block])
                if self._key_of[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None

    def clear_cache(self) -> None:
        """Forget every key: no prefix is hit until it is published again."""
        for block in list(self._cached):
            self._empty.append(block)
        self._cached.clear()
        self._block_of.clear()
        self._key_of = [None] * self.block_count

    def audit(self) -> list[str]:
        """What is wrong with the pool's books, in words; empty if nothing is."""
        wrong = []
        held = sum(count > 0 for count in self._references)
        if held + self.free_count != self.block_count:
            wrong.append(f"{held} held + {self.free_count} free blocks, pool has {self.block_count}")
        for block, count in enumerate(self._references):
            if count < 0:
                wrong.append(f"block {block} has {count} references")
        if len(set(self._empty)) != len(self._empty) or set(self._empty) & set(self._cached):
            wrong.append("a block is free twice")
        for key, block in self._block_of.items():
            if self._key_of[block] != key:
                wrong.append(f"block {block} is found by a key that is not its own")
        for block in self._empty:
            if self._key_of[block] is not None or self._references[block]:
                wrong.append(f"block {block} is listed as empty and is not")
        return wrong

    def _expect_exists(self, block: int) -> None:
        if not 0 <= block < self.block_count:
            raise LogError(f"block {block} is named, the pool has blocks 0 .. {self.block_count - 1}")

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            assert self._block_of[key] == block, (block, self._block_of[key])
            del self._block_of[key]
            self._key_of[block] = None
