"""What `BlockPool` audits, refuses and gives away first, and the keys of the prefix cache. `test_stateful_pool.py` runs it against a dumb twin."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.pool import BlockPool
from lockstep.core.prefix import KEY_BYTES, PrefixHasher

BLOCKS = 6
KEYS = [bytes([i]) * KEY_BYTES for i in range(5)]


def test_later_blocks_of_a_prefix_are_given_away_before_earlier_ones() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block, key in zip(blocks, KEYS, strict=False):
        pool.publish(block, key)
    pool.release(blocks)
    assert pool.take(1) == blocks[2:]
    assert pool.find(KEYS[:3]) == blocks[:2]


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda pool: pool._references.__setitem__(0, 0), "held"),
        (lambda pool: pool._references.__setitem__(0, -1), "references"),
        (lambda pool: pool._empty.append(pool._empty[0]), "twice"),
        (lambda pool: pool._block_of.__setitem__(b"other", 0), "key"),
        (lambda pool: pool._key_of.__setitem__(pool._empty[0], b"other"), "empty"),
    ],
)
def test_audit_names_what_is_wrong(damage: Callable[[BlockPool], None], word: str) -> None:
    pool = BlockPool(4)
    assert pool.take(1) == [0]
    pool.publish(0, KEYS[0])
    assert pool.audit() == []
    damage(pool)
    assert any(word in line for line in pool.audit())


# Keys of the prefix cache


def keys_of(secret: bytes, salt: bytes, tokens: list[int], block_size: int) -> list[bytes]:
    chain: list[bytes] = []
    PrefixHasher(secret, block_size).extend(chain, np.array(tokens, np.int32), salt, len(tokens) // block_size)
    return chain


Prefix = tuple[bytes, list[int]]

SALTS = st.sampled_from([b"", b"a", b"ab", b"salt", b"\x00", b"\x00\x00\x00\x00", b"a\x00\x00\x00"])
TOKENS = st.lists(st.integers(0, 2), min_size=2, max_size=8)


@given(first=st.tuples(SALTS, TOKENS), second=st.tuples(SALTS, TOKENS), block_size=st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_keys_are_equal_exactly_for_equal_salts_and_prefixes(
    first: tuple[bytes, list[int]], second: tuple[bytes, list[int]], block_size: int
) -> None:
    one, two = (keys_of(b"secret", salt, tokens, block_size) for salt, tokens in (first, second))
    for i, key in enumerate(one):
        for j, other in enumerate(two):
            same = i == j and first[0] == second[0] and first[1][: (i + 1) * block_size] == second[1][: (j + 1) * block_size]
            assert (key == other) == same
    assert all(len(key) == KEY_BYTES for key in one)


@given(tokens=st.lists(st.integers(0, 300), min_size=4, max_size=20), cut=st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_chain_grown_in_steps_is_the_chain_grown_at_once(tokens: list[int], cut: int) -> None:
    hasher, array, count = PrefixHasher(b"s", 3), np.array(tokens, np.int32), len(tokens) // 3
    chain: list[bytes] = []
    hasher.extend(chain, array, b"x", min(cut, count))
    hasher.extend(chain, array, b"x", count)
    assert chain == keys_of(b"s", b"x", tokens, 3)


def test_keys_depend_on_the_engine_s_secret() -> None:
    assert not set(keys_of(b"secret", b"", [1, 2, 3, 4], 2)) & set(keys_of(b"other", b"", [1, 2, 3, 4], 2))
