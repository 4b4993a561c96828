"""The ops that work on one row at a time: embed, rms_norm, gated_activation, select."""

from __future__ import annotations

import numpy as np
import pytest
from native_programs import DTYPES, SETS, compiled, one_op_program, plain_step, rounded, run_rows, sampling

from lockstep.ops.backend import DType
from lockstep.ops.program import ProgramBuilder
from lockstep.ops.step import F32

WIDTHS = [1, 7, 16, 33, 576, 1001]


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("instruction_set", SETS)
def test_rms_norm_is_within_four_roundings(instruction_set: str) -> None:
    for width in WIDTHS:
        x, gain = normal(1, 9, width) * 3, normal(2, width)
        executable = compiled(one_op_program("rms_norm", width, width, (1, width), eps=1e-5), {"w": gain}, instruction_set=instruction_set)
        got = run_rows(executable, x, width)
        x64 = x.astype(np.float64)
        wanted = x64 / np.sqrt(np.mean(x64 * x64, axis=1, keepdims=True) + 1e-5) * gain
        np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize("instruction_set", SETS)
def test_gated_activation_is_silu_of_gate_times_up(instruction_set: str) -> None:
    for width in WIDTHS:
        x = normal(3, 9, 2 * width) * 8
        x[0, 0], x[1, 0], x[2, 0] = 200.0, -200.0, 0.0
        got = run_rows(compiled(one_op_program("gated_activation", 2 * width, width, kind="silu"), {}, instruction_set=instruction_set), x, width)
        gate, up = x[:, :width].astype(np.float64), x[:, width:].astype(np.float64)
        np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, rtol=2e-6, atol=1e-35)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("kind", ["rms_norm", "gated_activation"])
def test_row_ops_have_the_same_bits_in_any_batch_and_with_any_threads(instruction_set: str, kind: str) -> None:
    width = 1001
    if kind == "rms_norm":
        program, values, x = one_op_program(kind, width, width, (1, width), eps=1e-6), {"w": normal(4, width)}, normal(5, 90, width)
    else:
        program, values, x = one_op_program(kind, 2 * width, width, kind="silu"), {}, normal(5, 90, 2 * width)
    one, three = (compiled(program, values, instruction_set=instruction_set, threads=threads) for threads in (1, 3))
    alone = np.concatenate([run_rows(one, x[i : i + 1], width) for i in range(len(x))])
    order = np.random.default_rng(6).permutation(len(x))
    assert np.array_equal(run_rows(one, x[order], width), alone[order])
    assert np.array_equal(run_rows(three, x[order], width), alone[order])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_embed_gives_the_rounded_rows_of_the_table(dtype: DType, tied: bool) -> None:
    vocabulary, width = 131, 75
    build = ProgramBuilder()
    build.output(build.buffer("y", "T", width))
    table = build.weight("w", vocabulary, width, "embedding")
    if tied:
        build.weight("w", vocabulary, width, "matrix")
    build.call("embed", (), ("y",), (table,))
    values = normal(7, vocabulary, width)
    executable = compiled(build.build(), {"w": values}, dtype=dtype)
    ids = [0, 130, 64, 63, 5, 5]
    out = np.zeros((len(ids), width), dtype=np.float32)
    executable.run(plain_step(len(ids), token_ids=ids), {}, {"y": out})
    assert np.array_equal(out, rounded(values, dtype)[ids])


def test_select_copies_the_sampled_rows() -> None:
    build = ProgramBuilder()
    build.input(build.buffer("x", "T", 5))
    build.buffer("y", "S", 5)
    build.call("select", ("x",), ("y",))
    executable = compiled(build.build(), {})
    x = normal(8, 6, 5)
    executable.run(plain_step(6, sampling([4, 0, 5])), {"x": x}, {})
    assert np.array_equal(executable.read_buffer("y", 3), x[[4, 0, 5]])


def test_input_that_an_op_writes_is_left_as_it_was() -> None:
    build = ProgramBuilder()
    build.input(build.buffer("x", "T", 16))
    build.output(build.buffer("y", "T", 16))
    gain = build.weight("w", 1, 16, "vector")
    build.call("rms_norm", ("x",), ("x",), (gain,), eps=1e-6)
    build.call("rms_norm", ("x",), ("y",), (gain,), eps=1e-6)
    executable = compiled(build.build(), {"w": np.full(16, 2, dtype=np.float32)})
    x = normal(9, 3, 16)
    before = x.copy()
    out = run_rows(executable, x, 16)
    assert np.array_equal(x, before)
    assert np.any(out != 0)
