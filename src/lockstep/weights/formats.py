"""The number formats that can be read: plain ones, and the table of all. Knows how plain numbers lie in bytes; does not know files or names."""

from __future__ import annotations

import numpy as np

from lockstep.weights.blocks_of_32 import BLOCKS_OF_32
from lockstep.weights.blocks_of_256 import BLOCKS_OF_256
from lockstep.weights.number_format import F32, U8, NumberFormat


def _widen_f32(raw: U8) -> F32:
    values = raw.view("<f4")
    return values if values.flags.aligned else values.copy()


def _widen_f16(raw: U8) -> F32:
    with np.errstate(invalid="ignore"):
        return raw.view("<f2").astype(np.float32)


def _widen_bf16(raw: U8) -> F32:
    bits = raw.view("<u2").astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


FORMATS: dict[str, NumberFormat] = {
    number_format.name: number_format
    for number_format in (
        NumberFormat(name="F32", block_values=1, block_bytes=4, widen=_widen_f32),
        NumberFormat(name="F16", block_values=1, block_bytes=2, widen=_widen_f16),
        NumberFormat(name="BF16", block_values=1, block_bytes=2, widen=_widen_bf16),
        *BLOCKS_OF_32,
        *BLOCKS_OF_256,
    )
}
