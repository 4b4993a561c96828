"""Many seeds, on several processes: how many runs failed, and which faults took effect where.

One seed in AGAIN_EACH runs twice, if it can in another process with other string hashes, and must do exactly the same.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from lockstep.sim.drawing import draw
from lockstep.sim.faults import cells
from lockstep.sim.log import Log
from lockstep.sim.simulation import Failure, run

AGAIN_EACH = 10
CHUNK = 20


@dataclass(slots=True, kw_only=True)
class Report:
    """failures: (seed, what). coverage: effects by cell; `empty` names those without any. logs: hashes by seed, of runs that run twice.
    repeat: of runs that another report counts."""

    repeat: bool = False
    runs: int = 0
    steps: int = 0
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    coverage: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    liveness: float = 0.0
    logs: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, other: Report) -> None:
        self.runs += other.runs
        self.steps += other.steps
        self.failures += other.failures
        self.coverage.update(other.coverage)
        self.counts.update(other.counts)
        self.liveness = max(self.liveness, other.liveness)

    @property
    def empty(self) -> list[str]:
        return [cell for cell in cells() if not self.coverage[cell]]

    def as_json(self) -> dict[str, Any]:
        """coverage: {kind: {phase: {mode: count}}}."""
        table: dict[str, dict[str, dict[str, int]]] = {}
        for cell in sorted({*cells(), *self.coverage}):
            kind, phase, mode = cell.split(" / ")
            table.setdefault(kind, {}).setdefault(phase, {})[mode] = self.coverage[cell]
        return {
            "runs": self.runs,
            "steps": self.steps,
            "failures": [
                {"seed": seed, "kind": failure.kind, "text": failure.text, "reproduce": f"lockstep sim --seed {seed}"}
                for seed, failure in self.failures
            ],
            "coverage": table,
            "empty_cells": self.empty,
            "counts": dict(sorted(self.counts.items())),
            "liveness_of_bound": round(self.liveness, 3),
            "seconds": round(self.seconds, 1),
        }


def run_seeds(seeds: Sequence[int], repeat: bool = False) -> Report:
    """In this process, each once. repeat: they have run before, only their logs are of interest."""
    report = Report(repeat=repeat)
    for seed in seeds:
        log = Log() if seed % AGAIN_EACH == 0 else None
        outcome = run(draw(seed), log=log)
        report.runs += 1
        report.steps += outcome.steps
        report.failures += [(seed, failure) for failure in outcome.failures[:1]]
        report.coverage.update(outcome.coverage)
        report.counts.update(outcome.counts)
        report.liveness = max(report.liveness, outcome.liveness)
        if log is not None:
            report.logs[seed] = outcome.log
    return report


def campaign(seeds: range, *, jobs: int, progress: Callable[[Report], None] | None = None) -> Report:
    """jobs: processes; 1 runs everything in this one. progress: is shown the report as it grows."""
    began = time.monotonic()
    report = Report()
    for part in _parts(_tasks(seeds), jobs):
        for seed, log in part.logs.items():
            if report.logs.setdefault(seed, log) != log:
                report.failures.append((seed, Failure(kind="not repeatable", text="a second run of it was another")))
        if not part.repeat:
            report.add(part)
        if progress is not None:
            progress(report)
    report.failures.sort(key=lambda entry: entry[0])
    report.seconds = time.monotonic() - began
    return report


def _tasks(seeds: range) -> Iterator[tuple[list[int], bool]]:
    """Chunks of seeds; now and then one of those among them that run again."""
    twice: list[int] = []
    for first in range(seeds.start, seeds.stop, CHUNK):
        chunk = list(range(first, min(first + CHUNK, seeds.stop)))
        yield chunk, False
        twice += [seed for seed in chunk if seed % AGAIN_EACH == 0]
        if len(twice) >= CHUNK:
            yield twice, True
            twice = []
    if twice:
        yield twice, True


def _parts(tasks: Iterator[tuple[list[int], bool]], jobs: int) -> Iterator[Report]:
    """The report of each task, in any order."""
    if jobs == 1:
        yield from itertools.starmap(run_seeds, tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=silence) as pool:
        running: set[Future[Report]] = set()
        for seeds, repeat in tasks:
            while len(running) >= 2 * jobs:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
            running.add(pool.submit(run_seeds, seeds, repeat))
        yield from (future.result() for future in running)


def silence() -> None:
    """The loop logs every failure, and there are many here."""
    logging.getLogger("lockstep.engine").setLevel(logging.CRITICAL)
