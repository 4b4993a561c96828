"""Times of the native kernels on one model's shapes: matrix products at several row counts, decode attention at several lengths.

    python benchmarks/kernels.py [--threads 1] [--instruction-set avx512_bf16] [--seconds 0.2]

Prints a table; a time is the best of the runs that fit into --seconds. Weights of a product are cycled through copies larger than the caches,
as a decode step that passes over a whole model would see them. Default shapes: SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from lockstep.backends.native import NativeBackend
from lockstep.backends.native.executable import NativeExecutable
from lockstep.ops.backend import DType, Limits
from lockstep.ops.program import Program, ProgramBuilder
from lockstep.ops.step import SamplingInputs, StepInputs

ROWS = (1, 16, 64, 256)
MATRICES = {"qkv": (960, 576), "attention out": (576, 576), "gate and up": (3072, 576), "down": (576, 1536), "head": (49_152, 576)}
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
CACHE_BYTES = 96 << 20  # weights cycled through are at least this large


def step_of(rows: list[tuple[int, int]], tables: np.ndarray) -> StepInputs:
    """rows: (first position, token count)."""
    nothing = {name: np.zeros(0, dtype=np.float32) for name in ("temperatures", "top_ps", "min_ps")}
    integers = {name: np.zeros(0, dtype=np.int32) for name in ("index", "positions", "top_ks", "logprob_counts")}
    positions = np.concatenate([np.arange(first, first + count) for first, count in rows]).astype(np.int32)
    return StepInputs(
        token_ids=np.zeros(len(positions), dtype=np.int32),
        positions=positions,
        row_starts=np.cumsum([0, *(count for _, count in rows)]).astype(np.int32),
        block_tables=(tables,),
        sampling=SamplingInputs(seeds=np.zeros(0, dtype=np.uint64), **integers, **nothing),
    )


def best_seconds(run: Callable[[], object], seconds: float) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def linear_program(n: int, k: int, copies: int) -> Program:
    build = ProgramBuilder()
    build.input(build.buffer("x", "T", k))
    build.buffer("y", "T", n)
    for i in range(copies):
        build.call("linear", ("x",), ("y",), (build.weight(f"w{i}", n, k, "matrix"),), accumulate=False)
    return build.build()


def compile_program(backend: NativeBackend, program: Program, dtype: DType, threads: int, limits: Limits) -> NativeExecutable:
    random = np.random.default_rng(0)
    weights = {
        name: backend.pack(weight, random.standard_normal((weight.rows, weight.columns), dtype=np.float32), dtype)
        for name, weight in program.weights.items()
    }
    return backend.compile(program, weights, dtype, limits, threads)


def time_linear(backend: NativeBackend, threads: int, seconds: float) -> None:
    limits = Limits(tokens_max=max(ROWS), rows_max=1, samples_max=1, block_size=max(ROWS), block_counts=(1,))
    print(f"{'product':<16}{'dtype':<10}{'rows':>5}{'us':>11}{'GFLOP/s':>10}{'weights GB/s':>14}")
    dtypes: tuple[DType, ...] = ("bfloat16", "float32")
    for name, (n, k) in MATRICES.items():
        for dtype in dtypes:
            weight_bytes = n * k * (2 if dtype == "bfloat16" else 4)
            copies = max(1, CACHE_BYTES // weight_bytes)
            executable = compile_program(backend, linear_program(n, k, copies), dtype, threads, limits)
            for rows in ROWS:
                x = np.random.default_rng(1).standard_normal((rows, k)).astype(np.float32)
                step = step_of([(0, rows)], np.zeros((1, 1), dtype=np.int32))
                each = best_seconds(partial(executable.run, step, {"x": x}, {}), seconds) / copies
                print(f"{name:<16}{dtype:<10}{rows:>5}{each * 1e6:>11.1f}{2 * rows * n * k / each / 1e9:>10.1f}{weight_bytes / each / 1e9:>14.1f}")


def time_attention(backend: NativeBackend, threads: int, seconds: float) -> None:
    build = ProgramBuilder()
    build.input(build.buffer("q", "T", HEADS * HEAD_DIM))
    build.buffer("y", "T", HEADS * HEAD_DIM)
    layer = build.kv_layer(KV_HEADS, HEAD_DIM)
    build.call("paged_attention", ("q",), ("y",), (), kv_layer=layer, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)
    program = build.build()
    print(f"\n{'attention':<16}{'dtype':<10}{'rows':>5}{'tokens':>8}{'keys':>6}{'us':>11}{'GFLOP/s':>10}{'KV GB/s':>10}")
    dtypes: tuple[DType, ...] = ("bfloat16", "float32")
    for dtype in dtypes:
        for rows, tokens, keys in [(1, 1, 256), (1, 1, 4096), (16, 1, 256), (64, 1, 256), (64, 1, 1024), (1, 256, 256), (1, 256, 2048)]:
            blocks = -(-keys // 16)
            limits = Limits(tokens_max=256, rows_max=64, samples_max=1, block_size=16, block_counts=(rows * blocks,))
            executable = compile_program(backend, program, dtype, threads, limits)
            q = np.random.default_rng(1).standard_normal((rows * tokens, HEADS * HEAD_DIM)).astype(np.float32)
            tables = np.random.default_rng(2).permutation(rows * blocks).reshape(rows, blocks).astype(np.int32)
            step = step_of([(keys - tokens, tokens)] * rows, tables)
            each = best_seconds(partial(executable.run, step, {"q": q}, {}), seconds)
            seen = rows * sum(range(keys - tokens + 1, keys + 1))
            kv_bytes = rows * keys * KV_HEADS * HEAD_DIM * 2 * (2 if dtype == "bfloat16" else 4)
            kind = "decode" if tokens == 1 else "prefill"
            flops = 4 * seen * HEADS * HEAD_DIM
            print(f"{kind:<16}{dtype:<10}{rows:>5}{tokens:>8}{keys:>6}{each * 1e6:>11.1f}{flops / each / 1e9:>10.1f}{kv_bytes / each / 1e9:>10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--instruction-set", default=None)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each line")
    arguments = parser.parse_args()
    backend = NativeBackend(instruction_set=arguments.instruction_set)
    print(f"{backend.numerics}, {arguments.threads} thread(s)\n")
    time_linear(backend, arguments.threads, arguments.seconds)
    time_attention(backend, arguments.threads, arguments.seconds)


if __name__ == "__main__":
    main()
