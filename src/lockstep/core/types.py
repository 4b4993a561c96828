"""Names for the integers and arrays that the core passes around."""

from __future__ import annotations

from typing import Any, NewType

import numpy as np
from numpy.typing import NDArray

SlotIndex = NewType("SlotIndex", int)
BlockIndex = NewType("BlockIndex", int)
StepNumber = NewType("StepNumber", int)
Generation = NewType("Generation", int)

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

NO_STEP = -1
"""In a column of steps: none."""

NO_BLOCK = -1
"""In a list of blocks: none, since nobody reads it any more."""

UNKNOWN_START = -1
"""In a plan's row: the scheduler did not know where the row starts, because an outstanding result decides it."""


def ceil_div(value: int, divisor: int) -> int:
    assert divisor > 0, divisor
    return -(-value // divisor)


def first_block_read(start: Any, window: Any, block_size: int) -> Any:
    """The first block that tokens from position `start` on read, where each sees the last `window` positions, its own included; 0: all. Integers, or
    arrays of them."""
    return np.where(window == 0, 0, np.maximum(0, start + 1 - window) // block_size)
