"""A finished matrix as JSON, and as a table on a terminal."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

from lockstep.verify.matrix import Report

COLUMNS = (
    ("preempt", "preemptions"),
    ("hits", "prefix_hits"),
    ("mixed", "steps_mixed"),
    ("ahead", "steps_with_unknown_result"),
    ("at once", "requests_at_once_max"),
    ("rows", "rows_max"),
    ("chunks", "chunks"),
    ("aborts", "aborts_running"),
)
"""Heading and counter of each column of the table."""


def as_json(report: Report) -> str:
    """One object; `missed` beside the promised keys names counters that were not met, by cell."""
    return json.dumps(
        {
            "cells": report.cells,
            "requests": report.requests,
            "tokens": report.tokens,
            "mismatches": [dataclasses.asdict(mismatch) for mismatch in report.mismatches],
            "counters": report.counters,
            "missed": report.missed,
            "fingerprint": report.fingerprint,
        }
    )


def table(report: Report) -> str:
    """A line a way to run: verdict, what it did, its name."""
    mismatches = Counter(mismatch.cell for mismatch in report.mismatches)
    lines = ["verdict  " + " ".join(f"{heading:>7}" for heading, _ in COLUMNS) + "  way to run"]
    for name, counters in report.counters.items():
        verdict = "DIFFERS" if mismatches[name] else "MISSED" if name in report.missed else "same"
        lines.append(f"{verdict:<8} " + " ".join(f"{counters.get(key, ''):>7}" for _, key in COLUMNS) + f"  {name}")
    lines.append(f"{report.cells} ways x {report.requests} requests, {report.tokens} tokens compared bit for bit with the plain way")
    lines.append(f"fingerprint {report.fingerprint}")
    for m in report.mismatches[:20]:
        lines.append(f"MISMATCH {m.cell}: {m.request} at {m.position}, {m.what}: expected {m.expected}, got {m.got}")
    for name, missed in report.missed.items():
        lines.extend(f"NOT AS NAMED {name}: {line}" for line in missed)
    lines.append("FAILED" if report.failed else "every token and log probability is the same")
    return "\n".join(lines)
