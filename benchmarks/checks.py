"""What the run-time checks cost: paired decode steps with checks on and off, in one run. usage: checks.py [--rounds N] [--stages S] [--out CSV]

Two engines of one process share the packed weights and take turns at the same work (1 and 64 requests, the prompts of `workload.py`), the order
reversed every round, so that the machine's moods hit both. The figure is the median over rounds of seconds with checks / seconds without, and where
that median lies in 95 of 100 runs. Beside it: what the driver and the stages say their checks took, as a share of the run. Without checks there is no
recorder either. With more than one stage the stages are in this process too, behind the same frames and checksums.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import figures
from workload import generate, prompts

from lockstep.config import EngineConfig
from lockstep.launch import RunningEngine, launch_engine, resolve_model
from lockstep.launch.stages import PackedWeights, make_backend

OUTPUT_TOKENS = {1: 64, 64: 24}


def told_seconds(running: RunningEngine) -> float:
    """Seconds of checks so far, by the engine's own account."""
    return running.engine.driver.check_seconds + sum(running.cluster.check_seconds().values())


def interval(ratios: list[float]) -> tuple[float, float]:
    """In which the median of such ratios lies in 95 of 100 runs, by their ranks: of each ratio it is as likely above as below."""
    ordered = sorted(ratios)
    low = max(0, int((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2) - 1)
    return round(ordered[low], 4), round(ordered[-1 - low], 4)


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
    without = replace(config, runtime_checks=False, recorder_steps=0)
    engines = {on: launch_engine(config if on else without, model=model, weights=weights) for on in (True, False)}
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
                    **dict(zip(("on_over_off_low95", "on_over_off_high95"), interval(ratios), strict=True)),
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
    figures.append(arguments.out, measure(arguments.stages, arguments.rounds))


if __name__ == "__main__":
    sys.exit(main())
