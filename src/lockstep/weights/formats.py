"""How numbers lie in bytes: plain and block-quantised formats, widened to float32. Knows one row of bytes; does not know files or names.

Block formats are those of ggml (ggml-common.h, `block_q4_0` and others): 32 consecutive values of a row share a float16 scale d and, in Q4_1,
a float16 minimum m. Of a 4-bit block's 16 bytes the low halves are values 0..16 and the high halves are values 16..32.
Every format is widened with one rounding an operation, as `gguf.quants.dequantize` does, so the two agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

BLOCK_VALUES = 32
_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
_Q4_0 = np.dtype([("scale", "<f2"), ("pairs", "u1", 16)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("pairs", "u1", 16)])


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """`block_values` consecutive values of a row take `block_bytes` bytes. widen: C-contiguous uint8 [n] to float32 [n / block_bytes * block_values];
    it may return a read-only view of the same memory."""

    name: str
    block_values: int
    block_bytes: int
    widen: Callable[[U8], F32]


def _widen_f32(raw: U8) -> F32:
    values = raw.view("<f4")
    return values if values.flags.aligned else values.copy()


def _widen_f16(raw: U8) -> F32:
    return raw.view("<f2").astype(np.float32)


def _widen_bf16(raw: U8) -> F32:
    bits = raw.view("<u2").astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _widen_q8_0(raw: U8) -> F32:
    blocks = raw.view(_Q8_0)
    out = np.empty((len(blocks), BLOCK_VALUES), np.float32)
    np.multiply(blocks["values"], blocks["scale"].astype(np.float32)[:, None], out=out)
    return out.reshape(-1)


def _widen_q4_0(raw: U8) -> F32:
    blocks = raw.view(_Q4_0)
    out = _unpack_halves(blocks["pairs"])
    out -= np.float32(8)
    out *= blocks["scale"].astype(np.float32)[:, None]
    return out.reshape(-1)


def _widen_q4_1(raw: U8) -> F32:
    blocks = raw.view(_Q4_1)
    out = _unpack_halves(blocks["pairs"])
    out *= blocks["scale"].astype(np.float32)[:, None]
    out += blocks["minimum"].astype(np.float32)[:, None]
    return out.reshape(-1)


def _unpack_halves(pairs: U8) -> F32:
    """uint8 [blocks, 16] to float32 [blocks, 32]: all low halves, then all high halves."""
    out = np.empty((len(pairs), BLOCK_VALUES), np.float32)
    out[:, :16] = pairs & 15
    out[:, 16:] = pairs >> 4
    return out


FORMATS: dict[str, NumberFormat] = {
    number_format.name: number_format
    for number_format in (
        NumberFormat(name="F32", block_values=1, block_bytes=4, widen=_widen_f32),
        NumberFormat(name="F16", block_values=1, block_bytes=2, widen=_widen_f16),
        NumberFormat(name="BF16", block_values=1, block_bytes=2, widen=_widen_bf16),
        NumberFormat(name="Q8_0", block_values=BLOCK_VALUES, block_bytes=_Q8_0.itemsize, widen=_widen_q8_0),
        NumberFormat(name="Q4_0", block_values=BLOCK_VALUES, block_bytes=_Q4_0.itemsize, widen=_widen_q4_0),
        NumberFormat(name="Q4_1", block_values=BLOCK_VALUES, block_bytes=_Q4_1.itemsize, widen=_widen_q4_1),
    )
}
