"""Names for the integers and arrays that the core passes around."""

from __future__ import annotations

from typing import NewType

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

UNKNOWN_START = -1
"""In a plan's row: the scheduler did not know where the row starts, because an outstanding result decides it."""


def ceil_div(value: int, divisor: int) -> int:
    assert divisor > 0, divisor
    return -(-value // divisor)
