"""The matrix product: right within rounding, and the same bits whatever the batch, the row's place in it, and the thread count."""

from __future__ import annotations

import numpy as np
import pytest
from native_programs import DTYPES, SETS, compiled, linear_program, rounded, run_rows

from lockstep.ops.backend import DType
from lockstep.ops.step import F32

SHAPES = [(1, 1), (3, 5), (17, 33), (64, 64), (95, 130), (576, 300), (577, 129)]


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_product_is_that_of_rounded_operands_within_float32_rounding(instruction_set: str, dtype: DType) -> None:
    for k, n in SHAPES:
        x, w, b, y = normal(1, 13, k), normal(2, n, k), normal(3, n), normal(4, 13, n)
        x64, w64 = rounded(x, dtype).astype(np.float64), rounded(w, dtype).astype(np.float64)
        exact = x64 @ w64.T
        # A chain of k float32 roundings, each relative to a partial sum that is at most the sum of magnitudes.
        bound = (np.abs(x64) @ np.abs(w64).T + np.abs(b) + np.abs(y)) * (k + 4) * 2.0**-24
        for bias in (False, True):
            for accumulate in (False, True):
                program = linear_program(k, n, bias=bias, accumulate=accumulate)
                executable = compiled(program, {"w": w, "b": b}, instruction_set=instruction_set, dtype=dtype)
                got = run_rows(executable, x, n, y=y if accumulate else None)
                wanted = exact + (b if bias else 0) + (y if accumulate else 0)
                assert np.all(np.abs(got - wanted) <= bound), (k, n, bias, accumulate, np.abs(got - wanted).max())


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_has_the_same_bits_alone_and_in_any_batch(instruction_set: str, dtype: DType) -> None:
    random = np.random.default_rng(5)
    for k, n in [(95, 130), (577, 129), (64, 70)]:
        x, w = normal(6, 17, k), normal(7, n, k)
        executable = compiled(linear_program(k, n), {"w": w}, instruction_set=instruction_set, dtype=dtype)
        alone = np.concatenate([run_rows(executable, x[i : i + 1], n) for i in range(17)])
        for rows in range(1, 18):
            order = random.permutation(17)[:rows]
            assert np.array_equal(run_rows(executable, x[order], n), alone[order]), (k, n, rows)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads(instruction_set: str, dtype: DType) -> None:
    k, n = 161, 331
    x, w = normal(8, 200, k), normal(9, n, k)
    executables = [
        compiled(linear_program(k, n), {"w": w}, instruction_set=instruction_set, dtype=dtype, threads=threads) for threads in (1, 2, 3, 8)
    ]
    for rows in (1, 2, 7, 64, 200):
        first, *others = [run_rows(executable, x[:rows], n) for executable in executables]
        for other in others:
            assert np.array_equal(first, other), rows


def test_bfloat16_bits_of_portable_and_wide_kernels_without_bfloat16_products_are_equal() -> None:
    k, n = 577, 129
    x, w = normal(10, 9, k), normal(11, n, k)
    plain = [name for name in SETS if name != "avx512_bf16"]
    results = [run_rows(compiled(linear_program(k, n), {"w": w}, instruction_set=name, dtype="bfloat16"), x, n) for name in plain]
    for name, result in zip(plain, results, strict=True):
        assert np.array_equal(result, results[0]), name


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_with_nan_or_infinity_does_not_touch_its_neighbours(instruction_set: str, dtype: DType) -> None:
    k, n = 95, 130
    x, w = normal(12, 8, k), normal(13, n, k)
    executable = compiled(linear_program(k, n), {"w": w}, instruction_set=instruction_set, dtype=dtype)
    clean = run_rows(executable, x, n)
    dirty = x.copy()
    dirty[3, -1] = np.nan
    dirty[5, 0] = np.inf
    got = run_rows(executable, dirty, n)
    others = [0, 1, 2, 4, 6, 7]
    assert np.array_equal(got[others], clean[others])
    assert np.all(np.isnan(got[3]))
    assert not np.any(np.isfinite(got[5]))
