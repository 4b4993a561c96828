"""Arithmetic whose result for one row is the same bits whatever stands beside it: sums in a fixed order, the rest on tiles of fixed size.

torch picks its kernels by the shape of a call, and they round differently: a product of fewer than 8 rows, a function on the last few elements of
an array, a sum that is shared between threads. Here every call that may round is made on shapes that do not depend on the number of rows.
Single additions, multiplications, divisions and square roots are exact by IEEE 754 and need no such care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as functional
from torch import Tensor

ROW_TILE = 16
COLUMN_MULTIPLE = 16
OUTPUT_MULTIPLE = 64
_LANE_MULTIPLE = 64
_FUNCTION_TILE = 32768
"""torch shares a longer array between threads, wherever that cuts it."""


def fold(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim`, which is dropped: zeros up to a power of two, then the second half is added to the first until one is left.

    More zeros at the end do not change the result, so neither does the extent that a caller pads to.
    """
    x = x.movedim(dim, -1)
    width = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = functional.pad(x, (0, width - x.shape[-1]))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0] + 0.0  # minus zero becomes zero, as it does wherever a zero was added


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for a function that torch approximates (exp, log, sin, cos), on whole vector lanes only, and by one thread."""
    flat = x.reshape(-1)
    padded = functional.pad(flat, (0, -flat.numel() % _LANE_MULTIPLE))
    parts = [function(part) for part in padded.split(_FUNCTION_TILE)]
    return torch.cat(parts)[: flat.numel()].reshape(x.shape)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def padded_matrix(matrix_NK: Tensor) -> Tensor:
    """The matrix with zeros up to whole multiples, so that no edge of it is computed by another kernel than the rest."""
    rows, columns = matrix_NK.shape
    return functional.pad(matrix_NK, (0, -columns % COLUMN_MULTIPLE, 0, -rows % OUTPUT_MULTIPLE)).contiguous()


def rows_times_matrix(x_TK: Tensor, padded_NK: Tensor, rows: int) -> Tensor:
    """x @ matrix.T for a matrix of `rows` rows that `padded_matrix` padded: ROW_TILE rows of x a call, the last tile filled up with zeros.
    By one thread: some shapes, such as 16 x 128 over 1536, are otherwise shared along the sum."""
    count, columns = x_TK.shape
    x = functional.pad(x_TK, (0, padded_NK.shape[1] - columns, 0, -count % ROW_TILE))
    with _one_thread():
        tiles = [functional.linear(tile, padded_NK) for tile in x.split(ROW_TILE)]
    return torch.cat(tiles)[:count, :rows] if tiles else x.new_zeros((0, rows))
