"""What a number format is, and how one made of blocks is widened piece by piece. Knows bytes of rows; does not know any format's layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
Blocks = NDArray[np.void]

# Values widened at a time, so that what lies between bytes and floats stays in the cache and never grows with the tensor.
PIECE_VALUES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """`block_values` consecutive values of a row take `block_bytes` bytes. widen: C-contiguous uint8 [n] to float32 [n / block_bytes * block_values];
    it may return a read-only view of the same memory. Scales that are not finite give values that are not, without a warning."""

    name: str
    block_values: int
    block_bytes: int
    widen: Callable[[U8], F32]


def block_format(name: str, block: np.dtype[np.void], block_values: int, unpack: Callable[[Blocks, F32], None]) -> NumberFormat:
    """A format of blocks. unpack: fills float32 [n, block_values], C-contiguous, from n records of type `block`."""
    piece = max(1, PIECE_VALUES // block_values)

    def widen(raw: U8) -> F32:
        blocks = raw.view(block)
        out = np.empty((len(blocks), block_values), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(blocks), piece):
                unpack(blocks[start : start + piece], out[start : start + piece])
        return out.reshape(-1)

    return NumberFormat(name=name, block_values=block_values, block_bytes=block.itemsize, widen=widen)
