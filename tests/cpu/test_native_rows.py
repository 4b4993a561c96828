"""The ops that work on one row at a time: embed, rms_norm, gated_activation, soft_cap, select."""

from __future__ import annotations

import numpy as np
import pytest
from native_programs import DTYPES, SETS, compiled, one_op_program, plain_step, rounded, run_rows, sampling

from lockstep.errors import InternalError, UnsupportedError
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
def test_rms_norm_adds_to_its_gain_and_to_what_was_there(instruction_set: str) -> None:
    for width in WIDTHS:
        x, gain, held = normal(1, 9, width) * 3, normal(2, width), normal(3, 9, width)
        build = ProgramBuilder()
        build.input(build.buffer("x", "T", width))
        build.input(build.output(build.buffer("y", "T", width)))
        build.call("rms_norm", ("x",), ("y",), (build.weight("w", 1, width, "vector"),), eps=1e-5, offset=1.0, accumulate=True)
        got = run_rows(compiled(build.build(), {"w": gain}, instruction_set=instruction_set), x, width, y=held)
        x64 = x.astype(np.float64)
        wanted = held + x64 / np.sqrt(np.mean(x64 * x64, axis=1, keepdims=True) + 1e-5) * (1.0 + gain.astype(np.float64))
        np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("instruction_set", SETS)
def test_rms_norm_of_heads_gives_each_the_bits_it_has_alone_and_leaves_the_rest(instruction_set: str) -> None:
    """In place, as for queries and keys inside their buffer."""
    for width, column, groups, total in [(16, 0, 4, 96), (10, 7, 3, 41), (64, 64, 1, 192)]:
        x, gain = normal(1, 9, total), normal(2, width)
        build = ProgramBuilder()
        build.input(build.output(build.buffer("x", "T", total)))
        build.call("rms_norm", ("x",), ("x",), (build.weight("w", 1, width, "vector"),), eps=1e-6, column=column, groups=groups)
        got = np.empty_like(x)
        compiled(build.build(), {"w": gain}, instruction_set=instruction_set).run(plain_step(9), {"x": x}, {"x": got})
        alone = compiled(one_op_program("rms_norm", width, width, (1, width), eps=1e-6), {"w": gain}, instruction_set=instruction_set)
        wanted = x.copy()
        for group in range(groups):
            part = slice(column + group * width, column + (group + 1) * width)
            wanted[:, part] = run_rows(alone, np.ascontiguousarray(x[:, part]), width)
        assert np.array_equal(got, wanted)


def test_rms_norm_that_does_not_fit_its_buffers_is_refused() -> None:
    for settings in ({"groups": 3, "column": 0}, {"groups": 2, "column": 1}, {"groups": 1, "column": -1}, {"groups": -1, "column": 0}, {"groups": 0}):
        program = one_op_program("rms_norm", 32, 32, (1, 16), eps=1e-6, **settings)
        with pytest.raises(InternalError, match="rms_norm"):
            compiled(program, {"w": normal(1, 16)})
    build = ProgramBuilder()
    build.input(build.output(build.buffer("x", "T", 16)))
    build.call("rms_norm", ("x",), ("x",), (build.weight("w", 1, 16, "vector"),), eps=1e-6, accumulate=True)
    with pytest.raises(InternalError, match="cannot add to the buffer that it reads"):
        compiled(build.build(), {"w": normal(1, 16)})


@pytest.mark.parametrize("instruction_set", SETS)
def test_gelu_by_tanh_of_gate_times_up(instruction_set: str) -> None:
    for width in WIDTHS:
        x = normal(3, 9, 2 * width) * 4
        x[0, 0], x[1, 0], x[2, 0] = 1e20, -1e20, 0.0
        executable = compiled(one_op_program("gated_activation", 2 * width, width, kind="gelu_tanh"), {}, instruction_set=instruction_set)
        gate, up = x[:, :width].astype(np.float64), x[:, width:].astype(np.float64)
        wanted = gate / (1 + np.exp(-2 * np.clip(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3), -300, 300))) * up
        np.testing.assert_allclose(run_rows(executable, x, width), wanted, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("instruction_set", SETS)
def test_soft_cap_is_tanh_scaled(instruction_set: str) -> None:
    for width in WIDTHS:
        x = normal(3, 9, width) * 40
        x[0, 0], x[1, 0], x[2, 0] = 1e30, -1e30, 0.0
        got = run_rows(compiled(one_op_program("soft_cap", width, width, cap=30.0), {}, instruction_set=instruction_set), x, width)
        np.testing.assert_allclose(got, 30 * np.tanh(x.astype(np.float64) / 30), rtol=6e-7, atol=0)


def test_soft_cap_of_nothing_is_refused() -> None:
    with pytest.raises(InternalError, match="cap must be above 0"):
        compiled(one_op_program("soft_cap", 4, 4, cap=0.0), {})


def test_activation_that_the_backend_lacks_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="'relu'; the native backend has"):
        compiled(one_op_program("gated_activation", 8, 4, kind="relu"), {})


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("kind", ["rms_norm", "silu", "gelu_tanh", "soft_cap"])
def test_row_ops_have_the_same_bits_in_any_batch_and_with_any_threads(instruction_set: str, kind: str) -> None:
    width = 1001
    if kind == "rms_norm":
        program, values, x = one_op_program(kind, width, width, (1, width), eps=1e-6, offset=1.0), {"w": normal(4, width)}, normal(5, 90, width)
    elif kind == "soft_cap":
        program, values, x = one_op_program(kind, width, width, cap=2.0), {}, normal(5, 90, width)
    else:
        program, values, x = one_op_program("gated_activation", 2 * width, width, kind=kind), {}, normal(5, 90, 2 * width)
    one, three = (compiled(program, values, instruction_set=instruction_set, threads=threads) for threads in (1, 3))
    alone = np.concatenate([run_rows(one, x[i : i + 1], width) for i in range(len(x))])
    order = np.random.default_rng(6).permutation(len(x))
    assert np.array_equal(run_rows(one, x[order], width), alone[order])
    assert np.array_equal(run_rows(three, x[order], width), alone[order])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scale", [1.0, 75**0.5])
def test_embed_gives_the_rounded_rows_of_the_table_times_its_scale(dtype: DType, tied: bool, scale: float) -> None:
    vocabulary, width = 131, 75
    build = ProgramBuilder()
    build.output(build.buffer("y", "T", width))
    table = build.weight("w", vocabulary, width, "embedding")
    if tied:
        build.weight("w", vocabulary, width, "matrix")
    build.call("embed", (), ("y",), (table,), scale=scale)
    values = normal(7, vocabulary, width)
    executable = compiled(build.build(), {"w": values}, dtype=dtype)
    ids = [0, 130, 64, 63, 5, 5]
    out = np.zeros((len(ids), width), dtype=np.float32)
    executable.run(plain_step(len(ids), token_ids=ids), {}, {"y": out})
    assert np.array_equal(out, rounded(values, dtype)[ids] * np.float32(scale))


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
