"""Rotation, KV write and paged attention: right within rounding, and the same bits for any chunking, block size, batch and thread count."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from native_programs import DTYPES, SETS, compiled, rounded, step_of

from lockstep.backends.native.executable import NativeExecutable
from lockstep.ops.backend import DType
from lockstep.ops.program import Program, ProgramBuilder
from lockstep.ops.step import F32, I32


@dataclass(frozen=True, slots=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    soft_cap: float = 0.0
    pairs: int = 0  # that turn; 0: all
    magnitude: float = 1.0

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def frequencies(self) -> F32:
        half = self.pairs or self.head_dim // 2
        return (10_000.0 ** -(np.arange(half) / half)).astype(np.float32)


WINDOWED = [
    Heads(6, 2, 16, window=8),
    Heads(4, 2, 10, window=1, soft_cap=2.0),
    Heads(3, 1, 34, window=33, pairs=7, magnitude=1.25),
    Heads(4, 1, 12, window=32, soft_cap=0.5),
    Heads(4, 4, 16, window=50),
]
SHAPES = [Heads(9, 3, 64), Heads(4, 4, 10), Heads(8, 1, 34), *WINDOWED, Heads(4, 2, 16, soft_cap=1.0, pairs=3), Heads(7, 1, 2)]


def attention_program(shape: Heads) -> Program:
    build = ProgramBuilder()
    build.input(build.buffer("qkv", "T", shape.width))
    build.buffer("q", "T", shape.heads * shape.head_dim)
    build.output(build.buffer("y", "T", shape.heads * shape.head_dim))
    layer = build.kv_layer(shape.kv_heads, shape.head_dim)
    sizes = {"kv_layer": layer, "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    build.call("rope_write", ("qkv",), ("q",), (build.weight("f", 1, len(shape.frequencies), "vector"),), **sizes, magnitude=shape.magnitude)
    build.call("paged_attention", ("q",), ("y",), (), scale=shape.head_dim**-0.5, **sizes, window=shape.window, soft_cap=shape.soft_cap)
    return build.build()


def attention_executable(
    shape: Heads, instruction_set: str, dtype: DType, block_size: int = 16, block_count: int = 64, threads: int = 1
) -> NativeExecutable:
    program = attention_program(shape)
    return compiled(
        program,
        {"f": shape.frequencies},
        instruction_set=instruction_set,
        dtype=dtype,
        block_size=block_size,
        block_count=block_count,
        threads=threads,
    )


def run_step(executable: NativeExecutable, shape: Heads, rows: list[tuple[int, int]], tables: I32, qkv: F32) -> F32:
    out = np.full((len(qkv), shape.heads * shape.head_dim), np.nan, dtype=np.float32)
    executable.run(step_of(rows, tables), {"qkv": qkv}, {"y": out})
    return out


def table_of(blocks: list[int] | range) -> I32:
    return np.array([list(blocks)], dtype=np.int32)


def random_qkv(seed: int, tokens: int, shape: Heads) -> F32:
    return np.random.default_rng(seed).standard_normal((tokens, shape.width)).astype(np.float32)


def twin(shape: Heads, qkv: F32, dtype: DType) -> np.ndarray:
    """Plain float64 causal attention over one whole request."""
    tokens, half, d = len(qkv), len(shape.frequencies), shape.head_dim
    angles = (np.arange(tokens, dtype=np.float32)[:, None] * shape.frequencies).astype(np.float64)[:, None, :]
    x = qkv.astype(np.float64).reshape(tokens, -1, d)
    a, b, cos, sin = x[..., :half], x[..., half : 2 * half], np.cos(angles) * shape.magnitude, np.sin(angles) * shape.magnitude
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)
    q = turned[:, : shape.heads]
    k = rounded(turned[:, shape.heads : shape.heads + shape.kv_heads], dtype).astype(np.float64)
    v = rounded(qkv.reshape(tokens, -1, d)[:, shape.heads + shape.kv_heads :], dtype).astype(np.float64)
    group = shape.heads // shape.kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) * d**-0.5
    if shape.soft_cap:
        scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
    ago = np.arange(tokens)[:, None] - np.arange(tokens)
    scores[:, (ago < 0) | (ago >= (shape.window or tokens))] = -np.inf
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shd->thd", p, v).reshape(tokens, -1)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_softmax_attention_over_the_rounded_cache(instruction_set: str, dtype: DType) -> None:
    for shape in SHAPES:
        tokens = 101
        qkv = random_qkv(1, tokens, shape)
        got = run_step(attention_executable(shape, instruction_set, dtype), shape, [(0, tokens)], table_of(range(7)), qkv)
        # bfloat16: a key whose float32 rotation lies at a rounding boundary may round the other way in the float64 twin.
        np.testing.assert_allclose(got, twin(shape, qkv, dtype), rtol=0, atol=3e-6 if dtype == "float32" else 1e-3)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_any_size_give_the_bits_of_one_prefill(instruction_set: str, dtype: DType) -> None:
    for shape in SHAPES[:-1]:
        tokens = 77
        qkv = random_qkv(2, tokens, shape)
        whole = run_step(attention_executable(shape, instruction_set, dtype), shape, [(0, tokens)], table_of(range(5)), qkv)
        for chunk in (1, 3, 7, 32):
            executable = attention_executable(shape, instruction_set, dtype)
            pieces = [
                run_step(executable, shape, [(start, min(chunk, tokens - start))], table_of(range(5)), qkv[start : start + chunk])
                for start in range(0, tokens, chunk)
            ]
            assert np.array_equal(np.concatenate(pieces), whole), (shape, chunk)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_size_and_the_blocks_that_hold_the_cache_change_no_bit(instruction_set: str, dtype: DType) -> None:
    random = np.random.default_rng(3)
    for shape in SHAPES[:-1]:
        tokens = 75
        qkv = random_qkv(4, tokens, shape)
        whole = run_step(attention_executable(shape, instruction_set, dtype), shape, [(0, tokens)], table_of(range(5)), qkv)
        for block_size in (1, 3, 4, 16, 32, 48, 128):
            needed = -(-tokens // block_size)
            executable = attention_executable(shape, instruction_set, dtype, block_size, block_count=needed + 9)
            table = random.permutation(needed + 9)[:needed].astype(np.int32)[None]
            assert np.array_equal(run_step(executable, shape, [(0, tokens)], table, qkv), whole), (shape, block_size)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[0], *WINDOWED[:3]])
def test_batch_mates_and_threads_change_no_bit(instruction_set: str, dtype: DType, shape: Heads) -> None:
    lengths = [70, 1, 33, 32, 50]
    qkvs = [random_qkv(10 + i, length + 2, shape) for i, length in enumerate(lengths)]
    tables = np.random.default_rng(5).permutation(64)[:25].reshape(5, 5).astype(np.int32)
    alone = []
    for i, qkv in enumerate(qkvs):
        executable = attention_executable(shape, instruction_set, dtype)
        prefill = run_step(executable, shape, [(0, lengths[i])], tables[i : i + 1], qkv[:-2])
        alone.append((prefill, run_step(executable, shape, [(lengths[i], 2)], tables[i : i + 1], qkv[-2:])))
    for threads in (1, 2, 3):
        executable = attention_executable(shape, instruction_set, dtype, threads=threads)
        prefill = run_step(executable, shape, [(0, length) for length in lengths], tables, np.concatenate([qkv[:-2] for qkv in qkvs]))
        verify = run_step(executable, shape, [(length, 2) for length in lengths], tables, np.concatenate([qkv[-2:] for qkv in qkvs]))
        assert np.array_equal(prefill, np.concatenate([pair[0] for pair in alone]))
        assert np.array_equal(verify, np.concatenate([pair[1] for pair in alone]))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("shape", [SHAPES[0], *WINDOWED[1:3]])
def test_what_lies_beyond_a_position_never_reaches_it(instruction_set: str, dtype: DType, block_size: int, shape: Heads) -> None:
    tokens = 40
    qkv = random_qkv(6, tokens, shape)
    poisoned = np.full((80, shape.width), np.nan, dtype=np.float32)
    clean = run_step(attention_executable(shape, instruction_set, dtype, block_size), shape, [(0, tokens)], table_of(range(16)), qkv)
    used = attention_executable(shape, instruction_set, dtype, block_size)
    run_step(used, shape, [(0, 80)], table_of(range(16)), poisoned)
    assert np.array_equal(run_step(used, shape, [(0, tokens)], table_of(range(16)), qkv), clean)
    # And a NaN in a later token of the same chunk stays there.
    dirty = qkv.copy()
    dirty[37] = np.nan
    got = run_step(attention_executable(shape, instruction_set, dtype, block_size), shape, [(0, tokens)], table_of(range(16)), dirty)
    assert np.array_equal(got[:37], clean[:37])
    assert np.all(np.isnan(got[37 : 37 + (shape.window or tokens)]))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("shape", WINDOWED)
def test_what_lies_before_a_window_never_reaches_it(instruction_set: str, dtype: DType, block_size: int, shape: Heads) -> None:
    tokens = 90
    qkv = random_qkv(6, tokens, shape)
    clean = run_step(attention_executable(shape, instruction_set, dtype, block_size), shape, [(0, tokens)], table_of(range(18)), qkv)
    dirty = qkv.copy()
    dirty[35] = np.nan
    for chunks in ([tokens], [40, 1, 49], [1] * tokens):
        executable, parts, start = attention_executable(shape, instruction_set, dtype, block_size), [], 0
        for chunk in chunks:
            parts.append(run_step(executable, shape, [(start, chunk)], table_of(range(18)), dirty[start : start + chunk]))
            start += chunk
        got = np.concatenate(parts)
        assert np.all(np.isnan(got[35 : min(tokens, 35 + shape.window)]))
        assert np.array_equal(got[:35], clean[:35])
        assert np.array_equal(got[35 + shape.window :], clean[35 + shape.window :])


def test_a_window_as_wide_as_the_sequence_has_the_bits_of_none() -> None:
    """What a model without windows computes does not know that there are any."""
    for instruction_set in SETS:
        qkv = random_qkv(9, 70, SHAPES[0])
        plain, wide = (
            run_step(attention_executable(shape, instruction_set, "float32"), shape, [(0, 70)], table_of(range(5)), qkv)
            for shape in (SHAPES[0], replace(SHAPES[0], window=70))
        )
        assert np.array_equal(plain, wide)


@pytest.mark.parametrize("instruction_set", SETS)
def test_queries_are_rotated_by_the_float32_angle_at_positions_up_to_a_million(instruction_set: str) -> None:
    shape = Heads(1, 1, 34)
    executable = attention_executable(shape, instruction_set, "float32", block_size=1 << 20, block_count=1)
    for position in (0, 1, 1000, 123_456, (1 << 20) - 1):
        qkv = random_qkv(8, 1, shape)
        run_step(executable, shape, [(position, 1)], table_of([0]), qkv)
        angles = (np.float32(position) * shape.frequencies).astype(np.float64)
        a, b = qkv[0, :17].astype(np.float64), qkv[0, 17:34].astype(np.float64)
        wanted = np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)])
        np.testing.assert_allclose(executable.read_buffer("q", 1)[0], wanted, rtol=0, atol=5e-7)


def test_values_and_keys_far_apart_in_size_stay_finite() -> None:
    shape = SHAPES[0]
    qkv = random_qkv(7, 50, shape)
    qkv[10:30] *= 1e4
    got = run_step(attention_executable(shape, SETS[0], "float32"), shape, [(0, 50)], table_of(range(4)), qkv)
    assert np.all(np.isfinite(got))
