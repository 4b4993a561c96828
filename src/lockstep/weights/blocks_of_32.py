"""GGUF's formats with blocks of 32 values: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL. Knows their bits; does not know files.

Source: ggml-common.h (`block_q4_0` and others, `kvalues_iq4nl`). A block has a float16 scale d; in the formats that end in 1, a float16 minimum m.
Of the 16 bytes of 4-bit codes the low halves are values 0..16 and the high halves are values 16..32; fifth bits follow the order of values.

    Q8_0, Q4_0, Q5_0   d * code, codes signed or less 8 or 16          Q4_1, Q5_1   d * code + m          IQ4_NL   d * table[code]

Widened with one rounding an operation, as `gguf.quants.dequantize` does, so the two agree bit for bit.
"""

from __future__ import annotations

import numpy as np

from lockstep.weights.number_format import F32, U8, Blocks, NumberFormat, block_format

VALUES = 32
_Q8_0 = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])
_Q4_0 = np.dtype([("scale", "<f2"), ("pairs", "u1", 16)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("pairs", "u1", 16)])
_Q5_0 = np.dtype([("scale", "<f2"), ("fifths", "u1", 4), ("pairs", "u1", 16)])
_Q5_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("fifths", "u1", 4), ("pairs", "u1", 16)])
# Steps of IQ4_NL: finer near zero, where most weights are.
_IQ4_NL_STEPS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _unpack_q8_0(blocks: Blocks, out: F32) -> None:
    np.multiply(blocks["codes"], _column(blocks, "scale"), out=out)


def _unpack_q4_0(blocks: Blocks, out: F32) -> None:
    _unpack_halves(blocks["pairs"], out)
    out -= np.float32(8)
    out *= _column(blocks, "scale")


def _unpack_q4_1(blocks: Blocks, out: F32) -> None:
    _unpack_halves(blocks["pairs"], out)
    out *= _column(blocks, "scale")
    out += _column(blocks, "minimum")


def _unpack_q5_0(blocks: Blocks, out: F32) -> None:
    out[:] = _five_bits(blocks)
    out -= np.float32(16)
    out *= _column(blocks, "scale")


def _unpack_q5_1(blocks: Blocks, out: F32) -> None:
    out[:] = _five_bits(blocks)
    out *= _column(blocks, "scale")
    out += _column(blocks, "minimum")


def _unpack_iq4_nl(blocks: Blocks, out: F32) -> None:
    out[:, :16] = _IQ4_NL_STEPS[blocks["pairs"] & 15]
    out[:, 16:] = _IQ4_NL_STEPS[blocks["pairs"] >> 4]
    out *= _column(blocks, "scale")


def _column(blocks: Blocks, field: str) -> F32:
    """A float16 of each block as float32 [blocks, 1]."""
    return blocks[field].astype(np.float32)[:, None]


def _unpack_halves(pairs: U8, out: F32 | U8) -> None:
    """uint8 [blocks, 16] to [blocks, 32]: all low halves, then all high halves."""
    out[:, :16] = pairs & 15
    out[:, 16:] = pairs >> 4


def _five_bits(blocks: Blocks) -> U8:
    """Codes [blocks, 32] from 0 to 31."""
    codes = np.empty((len(blocks), VALUES), np.uint8)
    _unpack_halves(blocks["pairs"], codes)
    codes |= np.unpackbits(blocks["fifths"], axis=1, bitorder="little") << 4
    return codes


BLOCKS_OF_32: tuple[NumberFormat, ...] = (
    block_format("Q8_0", _Q8_0, VALUES, _unpack_q8_0),
    block_format("Q4_0", _Q4_0, VALUES, _unpack_q4_0),
    block_format("Q4_1", _Q4_1, VALUES, _unpack_q4_1),
    block_format("Q5_0", _Q5_0, VALUES, _unpack_q5_0),
    block_format("Q5_1", _Q5_1, VALUES, _unpack_q5_1),
    block_format("IQ4_NL", _Q4_0, VALUES, _unpack_iq4_nl),
)
