"""`lockstep sim --mutants`: loosens one rule after another and says what notices. Exit status 1 if a mutant survives that some check could see.

"oracle" under `by` means that only the closed form of the simulation saw it, after the run: no check in production would.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

from lockstep.errors import ConfigError
from lockstep.sim.mutants import NO_CODE_YET
from lockstep.sim.mutation import Verdict, cases, judge_all


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mutants", action="store_true", help="loosen one rule after another and say which check notices")
    parser.add_argument("--name", default=None, metavar="MUTANT", help="with --mutants: this one alone")


def run(arguments: argparse.Namespace) -> int:
    chosen = cases(arguments.name)
    if not chosen:
        raise ConfigError(f"--name: there is no mutant {arguments.name!r}; `lockstep sim --mutants` lists them")
    began = time.monotonic()
    verdicts = []
    for verdict in judge_all(chosen, arguments.jobs):
        verdicts.append(verdict)
        if not arguments.json:
            print(_line(verdict), flush=True)
    wrong = [verdict for verdict in verdicts if not verdict.right]
    seconds = time.monotonic() - began
    if arguments.json:
        print(json.dumps({"mutants": [_entry(v) for v in verdicts], "no_code_yet": dict(NO_CODE_YET), "seconds": round(seconds, 1)}))
    else:
        for rule, why in NO_CODE_YET.items():
            print(f"{rule}: {why}")
        print(f"{len(verdicts)} mutants, {sum(v.killed for v in verdicts)} killed, {len(wrong)} not as they should be, {seconds:.1f} s")
    for verdict in wrong:
        print(f"not as it should be: {_line(verdict)}", file=sys.stderr)
    return 1 if wrong else 0


def _entry(verdict: Verdict) -> dict[str, Any]:
    return dataclasses.asdict(verdict) | {"by": list(verdict.by)}


def _line(verdict: Verdict) -> str:
    name = f"{verdict.kind}: {verdict.name} ({verdict.applied})"
    if verdict.broken:
        return f"{name}: broken: {verdict.broken}"
    if not verdict.killed:
        return f"{name}: survives {verdict.runs} runs" + (f"; equivalent: {verdict.equivalent}" if verdict.equivalent else "")
    steps = "" if verdict.steps_to_detect is None else f", {verdict.steps_to_detect} steps after it first did otherwise"
    return f"{name}: killed by {', '.join(verdict.by)} (seed {verdict.first_seed}{steps})"
