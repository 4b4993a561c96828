"""A finished matrix as JSON, and its lines on a terminal."""

from __future__ import annotations

import dataclasses
import json

from lockstep.verify.matrix import Report


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


def summary(report: Report) -> str:
    lines = [
        f"{report.cells} cells x {report.requests} requests, {report.tokens} tokens compared bit for bit with the plain way",
        f"fingerprint {report.fingerprint}",
    ]
    for m in report.mismatches[:20]:
        lines.append(f"MISMATCH {m.cell}: {m.request} at {m.position}, {m.what}: expected {m.expected}, got {m.got}")
    for name, missed in report.missed.items():
        lines.extend(f"NOT AS NAMED {name}: {line}" for line in missed)
    lines.append("FAILED" if report.failed else "every token and log probability is the same")
    return "\n".join(lines)
