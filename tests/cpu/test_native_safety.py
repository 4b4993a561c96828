"""A malformed step is refused, with the value at fault, before anything is touched; the next step works."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from native_programs import compiled, sampling, step_of

from lockstep.backends.native import NativeBackend, cpu_features, instruction_sets
from lockstep.backends.native.executable import NativeExecutable
from lockstep.errors import ConfigError, InternalError
from lockstep.ops.backend import Limits
from lockstep.ops.program import Program, ProgramBuilder
from lockstep.ops.step import StepInputs

VOCABULARY, HEADS, HEAD_DIM = 50, 2, 8
WIDTH = HEADS * HEAD_DIM


def small_model(window: int = 0) -> Program:
    """Embedding, one attention, head and sampling."""
    build = ProgramBuilder()
    for name, width in [("x", WIDTH), ("qkv", 3 * WIDTH), ("q", WIDTH), ("a", WIDTH)]:
        build.buffer(name, "T", width)
    build.buffer("last", "S", WIDTH)
    build.buffer("logits", "S", VOCABULARY)
    table = build.weight("table", VOCABULARY, WIDTH, "embedding")
    build.weight("table", VOCABULARY, WIDTH, "matrix")
    layer = build.kv_layer(HEADS, HEAD_DIM)
    sizes = {"kv_layer": layer, "heads": HEADS, "kv_heads": HEADS, "head_dim": HEAD_DIM}
    build.call("embed", (), ("x",), (table,))
    build.call("linear", ("x",), ("qkv",), (build.weight("qkv", 3 * WIDTH, WIDTH, "matrix"),), accumulate=False)
    build.call("rope_write", ("qkv",), ("q",), (build.weight("f", 1, HEAD_DIM // 2, "vector"),), **sizes)
    build.call("paged_attention", ("q",), ("a",), (), scale=1.0, window=window, **sizes)
    build.call("select", ("a",), ("last",))
    build.call("linear", ("last",), ("logits",), (table,), accumulate=False)
    build.call("sample", ("logits",))
    return build.build()


def small_executable(window: int = 0) -> NativeExecutable:
    random = np.random.default_rng(1)
    program = small_model(window)
    values = {name: random.standard_normal((w.rows, w.columns)).astype(np.float32) for name, w in program.weights.items()}
    return compiled(program, values, tokens_max=20, block_size=4, block_count=6, threads=2)


def good_step() -> StepInputs:
    """Two rows: positions 0..2 and 5..6, blocks scattered, both last tokens sampled."""
    tables = np.array([[5, -1], [0, 3]], dtype=np.int32)
    return step_of([(0, 3), (5, 2)], tables, [1, 2, 3, 4, 49], sampling([2, 4], positions=[3, 7], temperatures=[0.0, 1.0]))


def changed(array: np.ndarray, index: int | tuple[int, int], value: int) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


GOOD = good_step()
BAD: dict[str, tuple[StepInputs, str]] = {
    "token id negative": (replace(GOOD, token_ids=changed(GOOD.token_ids, 1, -1)), "id -1"),
    "token id too large": (replace(GOOD, token_ids=changed(GOOD.token_ids, 1, VOCABULARY)), "id 50"),
    "position negative": (replace(GOOD, positions=np.array([-1, 0, 1, 5, 6], dtype=np.int32)), "position -1"),
    "positions not consecutive": (replace(GOOD, positions=changed(GOOD.positions, 1, 7)), "7 follows 0"),
    "row starts do not begin at 0": (replace(GOOD, row_starts=changed(GOOD.row_starts, 0, 1)), "row_starts"),
    "row starts fall": (replace(GOOD, row_starts=changed(GOOD.row_starts, 1, 6)), "row_starts"),
    "row starts end early": (replace(GOOD, row_starts=changed(GOOD.row_starts, 2, 4)), "row_starts"),
    "table too narrow": (replace(GOOD, block_tables=(GOOD.block_tables[0][:, :1].copy(),)), "needs 2 blocks"),
    "block unset": (replace(GOOD, block_tables=(changed(GOOD.block_tables[0], (1, 0), -1),)), "is -1"),
    "block beyond the pool": (replace(GOOD, block_tables=(changed(GOOD.block_tables[0], (1, 1), 6),)), "is 6"),
    "table missing": (replace(GOOD, block_tables=()), "block tables"),
    "table of fewer rows": (replace(GOOD, block_tables=(GOOD.block_tables[0][:1].copy(),)), "block table"),
    "sample index too large": (replace(GOOD, sampling=replace(GOOD.sampling, index=changed(GOOD.sampling.index, 1, 5))), "index 5"),
    "sample index negative": (replace(GOOD, sampling=replace(GOOD.sampling, index=changed(GOOD.sampling.index, 1, -1))), "index -1"),
    "temperature not a number": (
        replace(GOOD, sampling=replace(GOOD.sampling, temperatures=np.array([0, np.nan], dtype=np.float32))),
        "temperature",
    ),
    "sampling column short": (replace(GOOD, sampling=replace(GOOD.sampling, seeds=GOOD.sampling.seeds[:1].copy())), "seeds"),
    "positions short": (replace(GOOD, positions=GOOD.positions[:-1].copy()), "positions"),
    "dtype wrong": (replace(GOOD, token_ids=GOOD.token_ids.astype(np.int64)), "token_ids int64"),  # type: ignore[arg-type]
    "strided": (replace(GOOD, token_ids=np.repeat(GOOD.token_ids, 2)[::2]), "strided"),
    "too many tokens": (step_of([(0, 21)], np.arange(6, dtype=np.int32)[None]), "21 tokens"),
    "too many rows": (step_of([(0, 0)] * 65, np.zeros((65, 1), dtype=np.int32)), "65 rows"),
    "too many samples": (
        replace(step_of([(0, 1)], np.zeros((1, 1), dtype=np.int32)), sampling=sampling([0] * 65)),
        "65 samples",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_step_is_refused_and_changes_nothing(name: str) -> None:
    step, message = BAD[name]
    executable = small_executable()
    executable.run(step_of([(0, 5)], np.array([[0, 3]], dtype=np.int32), [7, 8, 9, 10, 11]), {}, {})
    wanted = executable.run(GOOD, {}, {})
    with pytest.raises(InternalError, match=message):
        executable.run(step, {}, {})
    again = executable.run(GOOD, {}, {})
    assert wanted is not None
    assert again is not None
    assert wanted.tokens.tolist() == again.tokens.tolist()


@pytest.mark.parametrize(("window", "is_read"), [(1, False), (2, False), (3, True), (6, True)])
def test_block_may_be_missing_behind_the_window_alone(window: int, is_read: bool) -> None:
    """Row 1 begins at position 5, the second of its block: with a window of 3 it sees position 3, the last of the block before."""
    executable, absent = small_executable(window), replace(GOOD, block_tables=(changed(GOOD.block_tables[0], (1, 0), -1),))
    if is_read:
        with pytest.raises(InternalError, match="is -1"):
            executable.run(absent, {}, {})
        return
    whole, without = executable.run(GOOD, {}, {}), executable.run(absent, {}, {})
    assert whole is not None
    assert without is not None
    assert np.array_equal(whole.tokens, without.tokens)


def test_empty_step_gives_empty_samples() -> None:
    executable = small_executable()
    result = executable.run(step_of([], np.zeros((0, 2), dtype=np.int32)), {}, {})
    assert result is not None
    assert result.tokens.shape == (0,)
    assert result.top_ids.shape == (0, 0)


def test_step_without_samples_writes_kv_and_gives_none_sampled() -> None:
    executable = small_executable()
    tables = np.array([[0, 3]], dtype=np.int32)
    executable.run(step_of([(0, 4)], tables, [1, 2, 3, 4]), {}, {})
    split = executable.run(step_of([(4, 1)], tables, [5], sampling([0])), {}, {})
    whole = small_executable().run(step_of([(0, 5)], tables, [1, 2, 3, 4, 5], sampling([4])), {}, {})
    assert split is not None
    assert whole is not None
    assert split.tokens.tolist() == whole.tokens.tolist()


def test_activations_of_the_wrong_shape_are_refused() -> None:
    build = ProgramBuilder()
    build.input(build.buffer("x", "T", 8))
    build.output(build.buffer("y", "T", 8))
    build.call("rms_norm", ("x",), ("y",), (build.weight("w", 1, 8, "vector"),), eps=1e-6)
    executable = compiled(build.build(), {"w": np.ones(8, dtype=np.float32)})
    x, y = np.ones((3, 8), dtype=np.float32), np.zeros((3, 8), dtype=np.float32)
    step = step_of([(0, 3)])
    for bad_x, bad_y in [(x[:2], y), (x, y[:2]), (np.ones((3, 9), dtype=np.float32), y), (x.astype(np.float64), y), (x.T.copy().T, y)]:
        with pytest.raises(InternalError):
            executable.run(step, {"x": bad_x}, {"y": bad_y})
    with pytest.raises(InternalError, match="no activations"):
        executable.run(step, {}, {"y": y})
    with pytest.raises(InternalError, match="no output"):
        executable.run(step, {"x": x}, {})
    y.flags.writeable = False
    with pytest.raises(InternalError, match="read-only"):
        executable.run(step, {"x": x}, {"y": y})
    y.flags.writeable = True
    x.flags.writeable = False
    executable.run(step, {"x": x}, {"y": y})
    np.testing.assert_allclose(y, 1.0, rtol=1e-5)


def test_instruction_set_that_the_processor_lacks_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="portable"):
        NativeBackend(instruction_set="abacus")


def test_instruction_sets_follow_the_processors_features() -> None:
    features = cpu_features()
    assert instruction_sets()[-1] == "portable"
    assert ("avx512_bf16" in instruction_sets()) <= features["avx512_bf16"]
    assert ("avx512" in instruction_sets()) <= features["avx512f"]
    numerics = {NativeBackend(instruction_set=name).numerics for name in instruction_sets()}
    assert len(numerics) == len(instruction_sets())
    assert NativeBackend().instruction_set == instruction_sets()[0]


def test_program_that_does_not_fit_its_weights_or_limits_is_refused() -> None:
    program = small_model()
    backend = NativeBackend()
    values = {name: np.zeros((w.rows, w.columns), dtype=np.float32) for name, w in program.weights.items()}
    limits = Limits(tokens_max=8, rows_max=2, samples_max=2, block_size=4, block_counts=(2,))
    weights = {name: backend.pack(weight, values[name], "float32") for name, weight in program.weights.items()}
    with pytest.raises(InternalError, match="'qkv'"):
        backend.compile(program, {name: weight for name, weight in weights.items() if name != "qkv"}, "float32", limits, 1)
    with pytest.raises(InternalError, match="dtype"):
        backend.compile(program, weights, "bfloat16", limits, 1)
    with pytest.raises(InternalError, match="group"):
        backend.compile(program, weights, "float32", replace(limits, block_counts=()), 1)
    with pytest.raises(InternalError, match="block size 0"):
        backend.compile(program, weights, "float32", replace(limits, block_size=0), 1)
    with pytest.raises(ConfigError, match="threads"):
        backend.compile(program, weights, "float32", limits, 0)
    with pytest.raises(InternalError, match="shape"):
        backend.pack(program.weights["table"], np.zeros((3, 3), dtype=np.float32), "float32")


def test_kv_pool_is_counted_in_full() -> None:
    assert small_executable().kv_bytes == 2 * 6 * 4 * HEADS * HEAD_DIM * 4
