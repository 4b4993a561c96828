"""`lockstep sim`: random runs of the real driver, loop and stages in virtual time, on the oracle model, with faults. Exit status 1 if one fails, and
if after 20,000 of them or more some fault has not taken effect in some phase and mode.

A failing run is told by its seed alone: `lockstep sim --seed N` runs it again, makes it smaller and prints what happened.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from lockstep.cli import mutants
from lockstep.errors import ConfigError
from lockstep.sim.campaign import Report, campaign, silence
from lockstep.sim.drawing import draw
from lockstep.sim.shrink import shrink
from lockstep.sim.simulation import run as run_scenario
from lockstep.sim.story import tell

SEEDS_COVERING = 20_000
"""From so many runs on, a cell of the coverage table that stays empty is a failure too: what it stands for is not tested."""

SEEDS_TOLD = 3
"""So many failing runs of a campaign are made smaller and printed."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("sim", help="random runs in virtual time with faults, checked against an oracle", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many runs (1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seed", type=int, default=None, help="run this one alone and print what happened")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one a processor)")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True, help="make a failing run smaller before printing it")
    parser.add_argument("--transcript", action="store_true", help="with --seed: print what happened also if nothing failed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    mutants.add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    silence()
    if arguments.seeds < 1 or arguments.jobs < 1:
        raise ConfigError(f"--seeds and --jobs are at least 1, got {arguments.seeds} and {arguments.jobs}")
    if arguments.mutants:
        return mutants.run(arguments)
    if arguments.seed is not None:
        return _run_one(arguments)
    report = campaign(range(arguments.first, arguments.first + arguments.seeds), jobs=arguments.jobs, progress=_Progress(arguments.seeds))
    print(json.dumps(report.as_json()) if arguments.json else _summary(report))
    for seed, failure in report.failures[:SEEDS_TOLD]:
        print(f"reproduce: lockstep sim --seed {seed}\n{_story(seed, failure.kind, arguments.shrink)}", file=sys.stderr)
    return 1 if report.failures or (report.empty and report.runs >= SEEDS_COVERING) else 0


def _run_one(arguments: argparse.Namespace) -> int:
    outcome = run_scenario(draw(arguments.seed))
    failed = [{"kind": failure.kind, "text": failure.text} for failure in outcome.failures]
    if arguments.json:
        print(json.dumps({"seed": arguments.seed, "steps": outcome.steps, "failures": failed, "coverage": dict(outcome.coverage)}))
    elif failed:
        print(_story(arguments.seed, outcome.failures[0].kind, arguments.shrink))
    elif arguments.transcript:
        print(tell(draw(arguments.seed))[1])
    else:
        print(f"seed {arguments.seed}: {outcome.steps} steps, {len(outcome.detections)} failures of the engine, every check is content")
    return 1 if failed else 0


def _story(seed: int, kind: str, smaller: bool) -> str:
    scenario = draw(seed)
    return tell(shrink(scenario, kind) if smaller else scenario)[1]


def _summary(report: Report) -> str:
    lines = [f"seed {seed}: {failure.kind}: {failure.text}" for seed, failure in report.failures]
    lines += [f"never took effect: {cell}" for cell in report.empty]
    counts = ", ".join(f"{count} {name}" for name, count in sorted(report.counts.items()))
    rate = report.runs / max(report.seconds, 1e-9)
    lines.append(f"{report.runs} runs, {report.steps} steps, {len(report.failures)} failed; {counts}; {report.seconds:.1f} s, {rate:.1f} runs/s")
    return "\n".join(lines)


class _Progress:
    """To the standard error: each failure at once, and a line every EACH_S seconds."""

    EACH_S = 10.0

    def __init__(self, total: int) -> None:
        self._total = total
        self._failures = 0
        self._said_at = time.monotonic()

    def __call__(self, report: Report) -> None:
        for seed, failure in report.failures[self._failures :]:
            print(f"seed {seed}: {failure.kind}: {failure.text}", file=sys.stderr, flush=True)
        self._failures = len(report.failures)
        now = time.monotonic()
        if now - self._said_at > self.EACH_S:
            self._said_at = now
            print(f"{report.runs} of {self._total} runs, {self._failures} failed", file=sys.stderr, flush=True)
