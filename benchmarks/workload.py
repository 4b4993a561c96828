"""Start to ready, memory, and throughput of the embedded model at 1 and 2 stages. usage: workload.py [--dtype DTYPE] [--out CSV]

The work: 64 prompts of 64 to 255 random token ids (seed 0), 128 new tokens each, greedy, end tokens ignored; then one stream alone. Every engine
can be measured on it, since no tokenizer differs. The prefix cache is off. Figures are of this machine at this moment: run it when nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path

import figures
import psutil

from lockstep.config import EngineConfig
from lockstep.core.params import SamplingParams
from lockstep.launch import RunningEngine, launch_engine
from lockstep.runtime.client import collect

OUTPUT_TOKENS = 128


def prompts(count: int = 64, low: int = 64, high: int = 256, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(rng.randrange(low, high))] for _ in range(count)]


def generate(running: RunningEngine, name: str, ids: list[list[int]], count: int) -> float:
    """Seconds for `count` new tokens of every prompt, all at once; asserts that they came."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    requests = [running.factory.build(f"{name}-{i}", prompt, params) for i, prompt in enumerate(ids)]
    start = time.perf_counter()
    tokens = sum(len(event.token_ids) for batch in collect(running.engine, requests) for event in batch)
    assert tokens == len(ids) * count, (tokens, len(ids), count)
    return time.perf_counter() - start


def measure(stages: int, threads: int, dtype: str) -> dict[str, object]:
    config = EngineConfig(
        model="smollm2",
        dtype=dtype,
        pipeline_parallel_size=stages,
        threads=threads,
        enable_prefix_caching=False,
        max_model_len=2048,
    )
    start = time.perf_counter()
    running = launch_engine(config)
    ready_s = time.perf_counter() - start
    try:
        work = prompts()
        generate(running, "warm", work[:4], 8)
        batch_s = min(generate(running, f"batch-{i}", work, OUTPUT_TOKENS) for i in range(2))
        single_s = generate(running, "single", work[:1], OUTPUT_TOKENS)
        pids = running.cluster.describe()["pids"]
        assert isinstance(pids, list)
        memory = {pid: psutil.Process(pid).memory_info().rss for pid in dict.fromkeys([os.getpid(), *pids])}
    finally:
        running.close()
    output = len(work) * OUTPUT_TOKENS
    return {
        "dtype": dtype,
        "stages": stages,
        "threads_per_stage": threads,
        "ready_s": round(ready_s, 2),
        "single_output_tok_s": round(OUTPUT_TOKENS / single_s, 1),
        "batch_output_tok_s": round(output / batch_s, 1),
        "batch_total_tok_s": round((output + sum(map(len, work))) / batch_s, 1),
        "rss_mb": "+".join(str(round(value / 1e6)) for value in memory.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--out", type=Path, help="append to this CSV")
    arguments = parser.parse_args()
    rows = []
    for stages, threads in ((1, 1), (1, 2), (2, 1)):
        rows.append(measure(stages, threads, arguments.dtype))
        print(rows[-1], flush=True)
    figures.append(arguments.out, rows)


if __name__ == "__main__":
    sys.exit(main())
