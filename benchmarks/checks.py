"""What the run-time checks cost: paired decode steps with checks on and off, in one run. usage: checks.py [--rounds N] [--stages S] [--out CSV]

Two engines of one process share the packed weights and take turns at the same work (1 and 64 requests, the prompts of `workload.py`), the order
reversed every round, so that the machine's moods hit both. The figure is the median over rounds of seconds with checks / seconds without. Beside it:
what the driver and the stages say their checks took, as a share of the run. With more than one stage the stages are in this process too.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from workload import generate, prompts

from lockstep.config import EngineConfig
from lockstep.launch import RunningEngine, launch_engine, resolve_model
from lockstep.launch.stages import PackedWeights, make_backend

OUTPUT_TOKENS = {1: 64, 64: 24}


def told_seconds(running: RunningEngine) -> float:
    """Seconds of checks so far, by the engine's own account."""
    return running.engine.driver.check_seconds + sum(running.cluster.check_seconds().values())


def measure(stages: int, rounds: int) -> list[dict[str, object]]:
    config = EngineConfig(
        model="smollm2",
        pipeline_parallel_size=stages,
        distributed_executor_backend="local",
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_seqs=64,
    )
    model = resolve_model(config)
    weights = PackedWeights(make_backend(config), model)
    engines = {on: launch_engine(replace(config, runtime_checks=on), model=model, weights=weights) for on in (True, False)}
    rows: list[dict[str, object]] = []
    try:
        for count, tokens in OUTPUT_TOKENS.items():
            work = prompts(count)
            for running in engines.values():
                generate(running, "warm", work[:4], 8)
            seconds: dict[bool, list[float]] = {True: [], False: []}
            before = told_seconds(engines[True])
            for turn in range(rounds):
                for on in (True, False) if turn % 2 else (False, True):
                    seconds[on].append(generate(engines[on], f"{count}-{turn}", work, tokens))
            told = (told_seconds(engines[True]) - before) / sum(seconds[True])
            ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
            rows.append(
                {
                    "stages": stages,
                    "requests": count,
                    "rounds": rounds,
                    "on_over_off_median": round(statistics.median(ratios), 4),
                    "on_over_off_least": round(min(ratios), 4),
                    "on_over_off_most": round(max(ratios), 4),
                    "told_share": round(told, 5),
                }
            )
            print(rows[-1], flush=True)
    finally:
        for running in engines.values():
            running.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append to this CSV")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    rows = [{**row, "cores": os.cpu_count(), "commit": commit} for row in measure(arguments.stages, arguments.rounds)]
    if arguments.out is not None:
        new = not arguments.out.exists()
        with arguments.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if new:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
