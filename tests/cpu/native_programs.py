"""Small programs and steps for the tests of the native backend. Knows the op set; does not know what a right answer is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.backends.native import NativeBackend, instruction_sets
from lockstep.backends.native.executable import NativeExecutable
from lockstep.ops.backend import DType, Limits
from lockstep.ops.program import Program, ProgramBuilder
from lockstep.ops.step import F32, I32, SamplingInputs, StepInputs

SETS = instruction_sets()
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")


def rounded(values: NDArray[np.floating], dtype: DType) -> F32:
    """float32 values rounded to `dtype`, to nearest even; a twin of the kernels' rounding for finite values."""
    values = np.asarray(values, dtype=np.float32)
    if dtype == "float32":
        return values
    bits = values.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


def no_samples() -> SamplingInputs:
    return sampling([])


def sampling(
    index: Sequence[int],
    *,
    seeds: Sequence[int] = (),
    positions: Sequence[int] = (),
    temperatures: Sequence[float] = (),
    top_ks: Sequence[int] = (),
    top_ps: Sequence[float] = (),
    min_ps: Sequence[float] = (),
    logprob_counts: Sequence[int] = (),
) -> SamplingInputs:
    """Columns that are left out are greedy without filters or logprobs."""
    count = len(index)
    return SamplingInputs(
        index=np.array(index, dtype=np.int32),
        seeds=np.array(seeds or [0] * count, dtype=np.uint64),
        positions=np.array(positions or [1] * count, dtype=np.int32),
        temperatures=np.array(temperatures or [0.0] * count, dtype=np.float32),
        top_ks=np.array(top_ks or [0] * count, dtype=np.int32),
        top_ps=np.array(top_ps or [1.0] * count, dtype=np.float32),
        min_ps=np.array(min_ps or [0.0] * count, dtype=np.float32),
        logprob_counts=np.array(logprob_counts or [-1] * count, dtype=np.int32),
    )


def step_of(
    rows: Sequence[tuple[int, int]],
    tables: I32 | None = None,
    token_ids: Sequence[int] | None = None,
    samples: SamplingInputs | None = None,
) -> StepInputs:
    """rows: (first position, token count) each."""
    positions = np.concatenate([np.arange(first, first + count) for first, count in rows]) if rows else np.zeros(0)
    starts = np.cumsum([0, *(count for _, count in rows)])
    tokens = len(positions)
    return StepInputs(
        token_ids=np.array(token_ids if token_ids is not None else [0] * tokens, dtype=np.int32),
        positions=positions.astype(np.int32),
        row_starts=starts.astype(np.int32),
        block_tables=(np.zeros((len(rows), 1), dtype=np.int32) if tables is None else tables,),
        sampling=samples or no_samples(),
    )


def plain_step(tokens: int, samples: SamplingInputs | None = None, token_ids: Sequence[int] | None = None) -> StepInputs:
    """One row of `tokens` tokens for programs without attention."""
    return step_of([(0, tokens)], token_ids=token_ids, samples=samples)


def compiled(
    program: Program,
    values: Mapping[str, F32],
    *,
    instruction_set: str = SETS[0],
    dtype: DType = "float32",
    threads: int = 1,
    tokens_max: int = 512,
    block_size: int = 512,
    block_count: int = 1,
) -> NativeExecutable:
    backend = NativeBackend(instruction_set=instruction_set)
    weights = {name: backend.pack(weight, values[name], dtype) for name, weight in program.weights.items()}
    limits = Limits(tokens_max=tokens_max, rows_max=64, samples_max=64, block_size=block_size, block_counts=(block_count,))
    return backend.compile(program, weights, dtype, limits, threads)


def linear_program(k: int, n: int, *, bias: bool = False, accumulate: bool = False) -> Program:
    """y = x @ w.T; with accumulate, y is an input too."""
    build = ProgramBuilder()
    build.input(build.buffer("x", "T", k))
    build.output(build.buffer("y", "T", n))
    if accumulate:
        build.input("y")
    weights = [build.weight("w", n, k, "matrix")] + ([build.weight("b", 1, n, "vector")] if bias else [])
    build.call("linear", ("x",), ("y",), tuple(weights), accumulate=accumulate)
    return build.build()


def one_op_program(
    op: str, input_width: int, output_width: int, weight: tuple[int, int] | None = None, **attributes: int | float | str | bool
) -> Program:
    """x -> y by one op on T rows, with a vector weight 'w' where a shape is given."""
    build = ProgramBuilder()
    build.input(build.buffer("x", "T", input_width))
    build.output(build.buffer("y", "T", output_width))
    weights = (build.weight("w", *weight, "vector"),) if weight else ()
    build.call(op, ("x",), ("y",), weights, **attributes)
    return build.build()


def run_rows(executable: NativeExecutable, x: F32, width: int, *, y: F32 | None = None) -> F32:
    """Run a program from x to y on rows of x; y: what the output held before, where the program reads it."""
    out = np.zeros((len(x), width), dtype=np.float32)
    activations = {"x": x} if y is None else {"x": x, "y": y}
    executable.run(plain_step(len(x)), activations, {"y": out})
    return out
