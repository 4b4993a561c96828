"""Quantised Hugging Face folders: which schemes can be read, and how a scheme's pairs of tensors become plain ones. Knows bits; does not know models.

    mxfp4   NAME_blocks, NAME_scales   uint8 [..., out, in / 32, 16] and [..., out, in / 32]: two 4-bit codes a byte, the lower half first, times
                                       2 ** (scale - 127); becomes NAME [..., in, out], as the unquantised checkpoints have it
    fp8     NAME, NAME_scale_inv       E4M3 [out, in] and float32 [out / a, in / b]: a scale a block of `weight_block_size` [a, b]

Weights are widened and computed with like any others: activations are not rounded to the scheme's format. Sources: OCP Microscaling Formats 1.0
(MXFP4), arXiv 2209.05433 (E4M3), arXiv 2412.19437 section 3.3 (blocks).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import CheckpointError, UnsupportedError

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_FP4_BY_CODE = np.concatenate([_FP4, -_FP4])
FP4_PAIRS: F32 = np.stack([_FP4_BY_CODE[np.arange(256) & 15], _FP4_BY_CODE[np.arange(256) >> 4]], axis=1)
"""float32 [256, 2]: the two values of a byte."""
GROUP = 32


def _e4m3_values() -> F32:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7).astype(np.float64)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size[code & 127 == 127] = np.nan
    return np.where(code > 127, -size, size).astype(np.float32)


E4M3: F32 = _e4m3_values()
"""float32 [256]: the value of each byte; no infinities, the two largest codes are not numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Names and shapes of the two stored tensors of a quantised one."""

    codes: str
    codes_shape: tuple[int, ...]
    scales: str
    scales_shape: tuple[int, ...]


class Scheme(Protocol):
    """codes_type, scales_type: safetensors' names of the stored number types."""

    codes_type: str
    scales_type: str

    def names_of(self, name: str) -> tuple[str, str]:
        """Of codes and scales."""
        ...

    def quantised(self, stored: Iterable[str]) -> set[str]:
        """Names that are told by two stored tensors."""
        ...

    def shape(self, pair: Pair) -> tuple[int, ...]:
        """Of the plain tensor. Raises CheckpointError if the two do not fit together."""
        ...

    def widen(self, codes: U8, scales: U8) -> F32:
        """codes, scales: the stored bytes in their shapes, a last axis more for numbers of several bytes. May return a view that is not
        contiguous."""
        ...


class Mxfp4:
    codes_type, scales_type = "U8", "U8"

    def names_of(self, name: str) -> tuple[str, str]:
        return f"{name}_blocks", f"{name}_scales"

    def quantised(self, stored: Iterable[str]) -> set[str]:
        return {name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")}

    def shape(self, pair: Pair) -> tuple[int, ...]:
        if len(pair.codes_shape) < 3 or pair.codes_shape[:-1] != pair.scales_shape or pair.codes_shape[-1] != GROUP // 2:
            raise _unfit(pair, f"[..., out, in / {GROUP}, {GROUP // 2}] and the same without its last axis")
        *outer, rows, groups, _ = pair.codes_shape
        return (*outer, groups * GROUP, rows)

    def widen(self, codes: U8, scales: U8) -> F32:
        with np.errstate(over="ignore", invalid="ignore"):
            powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
            powers[scales == 255] = np.nan
            values = FP4_PAIRS[codes].reshape(*codes.shape[:-1], GROUP) * powers[..., None]
        widened: F32 = values.reshape(*codes.shape[:-2], -1).swapaxes(-1, -2)
        return widened


class BlockFp8:
    codes_type, scales_type = "F8_E4M3", "F32"

    def __init__(self, block: tuple[int, int]) -> None:
        self._block = block

    def names_of(self, name: str) -> tuple[str, str]:
        return name, f"{name}_scale_inv"

    def quantised(self, stored: Iterable[str]) -> set[str]:
        return {name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")}

    def shape(self, pair: Pair) -> tuple[int, ...]:
        blocks = tuple(-(-extent // size) for extent, size in zip(pair.codes_shape, self._block, strict=False))
        if len(pair.codes_shape) != 2 or pair.scales_shape != blocks:
            raise _unfit(pair, f"a matrix and a scale for each block of {self._block}")
        return pair.codes_shape

    def widen(self, codes: U8, scales: U8) -> F32:
        factors: F32 = np.ascontiguousarray(scales).view("<f4")[..., 0]
        values = E4M3[codes]
        rows, columns = values.shape
        for axis, (size, extent) in enumerate(zip(self._block, (rows, columns), strict=True)):
            factors = np.repeat(factors, size, axis=axis).take(np.arange(extent), axis=axis)
        values *= factors
        return values


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """None for a plain folder. Raises UnsupportedError for a scheme that is not read."""
    told = config.get("quantization_config")
    if not told:
        return None
    method = told.get("quant_method") if isinstance(told, Mapping) else told
    if method == "mxfp4":
        return Mxfp4()
    block = told.get("weight_block_size") if method == "fp8" and isinstance(told, Mapping) else None
    if method == "fp8" and isinstance(block, list) and len(block) == 2 and all(type(size) is int and 1 <= size <= 1 << 16 for size in block):
        return BlockFp8((block[0], block[1]))
    raise UnsupportedError(
        f"quantization_config with quant_method {method!r:.100} and weight_block_size {block!r:.100} is not supported; supported are mxfp4 and fp8 "
        f"with "
        "blocks of two sizes; otherwise use the unquantised checkpoint in F32, F16 or BF16, or a GGUF file"
    )


def _unfit(pair: Pair, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{pair.codes} {pair.codes_shape} and {pair.scales} {pair.scales_shape} do not fit together, expected {expected}; copy or download the files "
        f"again"
    )
