"""GGUF's formats with super-blocks of 256 values: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K. Knows their bits; does not know files.

Source: ggml-common.h (`block_q2_K` and others) and ggml-quants.c (`dequantize_row_q2_K` and others). A super-block is cut into groups of consecutive
values. Each group has a small integer scale, s, that a float16 of the super-block, d, multiplies; Q2_K, Q4_K and Q5_K have a minimum, m, too.

    format   groups      value                            group scales                 codes lie in
    Q2_K     16 of 16    (d * s) * code - (dmin * m)      4 bits, m 4 bits             fields of 2 bits
    Q3_K     16 of 16    (d * (s - 32)) * (code - 4)      6 bits in 12 bytes           fields of 2 bits, a mask of third bits
    Q4_K      8 of 32    (d * s) * code - (dmin * m)      6 bits, m 6, in 12 bytes     pairs of 4 bits
    Q5_K      8 of 32    (d * s) * code - (dmin * m)      as Q4_K                      pairs of 4 bits, a mask of fifth bits
    Q6_K     16 of 16    (d * s) * (code - 32)            signed bytes                 pairs of 4 bits, fields of 2 bits

Runs of 32 values share 32 bytes: a run's codes are one field of each of those bytes, so that 32 values are unpacked by one shift.
Widened with one rounding an operation, as `gguf.quants.dequantize` does, so the two agree bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.weights.number_format import F32, U8, Blocks, NumberFormat, block_format

Integers = NDArray[np.integer[Any]]

VALUES = 256
_Q2_K = np.dtype([("scales", "u1", 16), ("quads", "u1", (2, 1, 32)), ("scale", "<f2"), ("minimum", "<f2")])
_Q3_K = np.dtype([("mask", "u1", (1, 32)), ("quads", "u1", (2, 1, 32)), ("scales", "u1", (3, 4)), ("scale", "<f2")])
_Q4_K = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("scales", "u1", (3, 4)), ("pairs", "u1", (4, 32))])
_Q5_K = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("scales", "u1", (3, 4)), ("mask", "u1", (1, 32)), ("pairs", "u1", (4, 32))])
_Q6_K = np.dtype([("pairs", "u1", (2, 2, 32)), ("quads", "u1", (2, 1, 32)), ("scales", "i1", 16), ("scale", "<f2")])
# Shifts to each 2-bit field and to each bit of a byte, beside an axis of 32 bytes.
_QUADS = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
_BITS = np.arange(8, dtype=np.uint8)[:, None]


def _unpack_q2_k(blocks: Blocks, out: F32) -> None:
    out[:] = _two_bits(blocks).reshape(out.shape)
    _scale_groups(out, blocks, blocks["scales"] & 15)
    _lower_groups(out, blocks, blocks["scales"] >> 4)


def _unpack_q3_k(blocks: Blocks, out: F32) -> None:
    codes = _two_bits(blocks).reshape(out.shape)
    codes |= _mask_bits(blocks) << 2
    out[:] = codes
    out -= np.float32(4)
    scales = blocks["scales"]
    # Scales 0..16 of 6 bits: low 4 bits are the low halves of bytes 0..8, then the high halves; high 2 bits are fields of bytes 8..12, as in quads.
    low = np.concatenate([scales[:, :2] & 15, scales[:, :2] >> 4], axis=1).reshape(-1, 16)
    high = (scales[:, 2:] >> _QUADS & 3).reshape(-1, 16)
    _scale_groups(out, blocks, (low | high << 4).astype(np.int8) - np.int8(32))


def _unpack_q4_k(blocks: Blocks, out: F32) -> None:
    out[:] = _four_bits(blocks).reshape(out.shape)
    scales, minima = _six_bit_pairs(blocks)
    _scale_groups(out, blocks, scales)
    _lower_groups(out, blocks, minima)


def _unpack_q5_k(blocks: Blocks, out: F32) -> None:
    codes = _four_bits(blocks).reshape(out.shape)
    codes |= _mask_bits(blocks) << 4
    out[:] = codes
    scales, minima = _six_bit_pairs(blocks)
    _scale_groups(out, blocks, scales)
    _lower_groups(out, blocks, minima)


def _unpack_q6_k(blocks: Blocks, out: F32) -> None:
    # Of each half, runs 0 and 1 are the low halves of 64 bytes, runs 2 and 3 the high halves of the same.
    codes = np.concatenate([blocks["pairs"] & 15, blocks["pairs"] >> 4], axis=2)
    codes |= (blocks["quads"] >> _QUADS & 3) << 4
    out[:] = codes.reshape(out.shape)
    out -= np.float32(32)
    _scale_groups(out, blocks, blocks["scales"])


def _two_bits(blocks: Blocks) -> U8:
    """Codes [blocks, 2, 4, 32] from 0 to 3: run j of a half is field j of its 32 bytes."""
    codes = blocks["quads"] >> _QUADS
    codes &= 3
    return np.asarray(codes)


def _four_bits(blocks: Blocks) -> U8:
    """Codes [blocks, 4, 2, 32] from 0 to 15: of 32 bytes the low halves are a run, the high halves are the next."""
    codes = np.empty((len(blocks), 4, 2, 32), np.uint8)
    codes[:, :, 0] = blocks["pairs"] & 15
    codes[:, :, 1] = blocks["pairs"] >> 4
    return codes


def _mask_bits(blocks: Blocks) -> U8:
    """[blocks, 256] of 0 or 1: bit j of the mask's 32 bytes belongs to run j."""
    bits = blocks["mask"] >> _BITS
    bits &= 1
    return np.asarray(bits.reshape(-1, VALUES))


def _six_bit_pairs(blocks: Blocks) -> tuple[U8, U8]:
    """Scales and minima [blocks, 8]. Bytes 0..4 are scales 0..4 and bytes 4..8 minima 0..4, their 2 spare bits the top of scales and minima 4..8,
    whose low 4 bits are the halves of bytes 8..12."""
    first, second, third = (blocks["scales"][:, row] for row in range(3))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales, minima


def _scale_groups(out: F32, blocks: Blocks, scales: Integers) -> None:
    """out *= d * scale of its group; scales: integers [blocks, groups]."""
    groups = out.reshape(*scales.shape, -1)
    groups *= (blocks["scale"].astype(np.float32)[:, None] * scales.astype(np.float32))[:, :, None]


def _lower_groups(out: F32, blocks: Blocks, minima: Integers) -> None:
    """out -= dmin * minimum of its group; minima: integers [blocks, groups]."""
    groups = out.reshape(*minima.shape, -1)
    groups -= (blocks["minimum"].astype(np.float32)[:, None] * minima.astype(np.float32))[:, :, None]


BLOCKS_OF_256: tuple[NumberFormat, ...] = (
    block_format("Q2_K", _Q2_K, VALUES, _unpack_q2_k),
    block_format("Q3_K", _Q3_K, VALUES, _unpack_q3_k),
    block_format("Q4_K", _Q4_K, VALUES, _unpack_q4_k),
    block_format("Q5_K", _Q5_K, VALUES, _unpack_q5_k),
    block_format("Q6_K", _Q6_K, VALUES, _unpack_q6_k),
)
