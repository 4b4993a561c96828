"""Random runs: no failure in a fixed set of seeds, nor in a fresh one, whose first seed is printed."""

from __future__ import annotations

import os
import time

import pytest

from lockstep.sim.campaign import Report, campaign, run_seeds
from lockstep.sim.faults import KINDS

FIXED, FRESH = 600, 300
JOBS = min(4, os.cpu_count() or 1)


def words(report: Report) -> list[str]:
    return [f"lockstep sim --seed {seed}: {failure.kind}: {failure.text}" for seed, failure in report.failures]


def _family(kind: str) -> str:
    """So few runs need not show every column of a table flipped."""
    return kind.split("-")[0] if kind.startswith("flip-") else kind


def test_no_run_of_the_fixed_seeds_fails() -> None:
    report = campaign(range(FIXED), jobs=JOBS)
    assert words(report) == []
    assert report.runs == FIXED
    assert report.liveness < 0.5, "the bound of the liveness phase is meant to be far from what right runs need"
    seen = {_family(cell.split(" / ")[0]) for cell in report.coverage}
    assert sorted({_family(kind) for kind in KINDS} - seen) == [], "faults that took effect in no run"
    assert all(report.counts[name] for name in ("preemptions", "prefix_hits", "imports", "imports_failed", "restarts")), report.counts


def test_no_run_of_fresh_seeds_fails(capsys: pytest.CaptureFixture[str]) -> None:
    first = 1_000_000 + int(time.time())
    with capsys.disabled():
        print(f"\nfresh seeds: lockstep sim --first {first} --seeds {FRESH}")
    assert words(campaign(range(first, first + FRESH), jobs=JOBS)) == []


def test_seeds_that_run_again_do_the_same() -> None:
    """Once in this process, once in another, whose string hashes are other ones."""
    here = run_seeds([0, 10, 20])
    there = campaign(range(21), jobs=2)
    assert sorted(here.logs) == [0, 10, 20]
    assert {seed: there.logs[seed] for seed in here.logs} == here.logs
