"""Keys of the prefix cache: a keyed cryptographic chain over whole blocks of tokens. Tenants choose tokens, so a sum of mixes would not do.

Every part of a key is tagged by its place: the key of the engine, the salt of the tenant, then block after block.
"""

from __future__ import annotations

import hashlib

import numpy as np

from lockstep.core.types import I32

KEY_BYTES = 16


class PrefixHasher:
    """secret: random bytes of this engine, at most 64, so that nobody outside can construct two prefixes with one key."""

    def __init__(self, secret: bytes, block_size: int) -> None:
        assert block_size > 0, block_size
        assert 0 < len(secret) <= hashlib.blake2b.MAX_KEY_SIZE, len(secret)
        self._secret = secret
        self._block_size = block_size

    def extend(self, chain: list[bytes], tokens: I32, salt: bytes, block_count: int) -> None:
        """Append to `chain` the keys of blocks len(chain) .. block_count of the request's tokens (int32, at least block_count * block_size of
        them)."""
        size = self._block_size
        assert len(tokens) >= block_count * size, (len(tokens), block_count, size)
        assert tokens.dtype == np.int32, tokens.dtype
        for block in range(len(chain), block_count):
            before = chain[-1] if chain else b"salt" + salt
            hasher = hashlib.blake2b(before, digest_size=KEY_BYTES, key=self._secret, person=b"prefix" if chain else b"first")
            hasher.update(np.ascontiguousarray(tokens[block * size : (block + 1) * size]).tobytes())
            chain.append(hasher.digest())
