"""`lockstep replay FILE`: run a recording again in one process and say at which step anything differs first. Needs no model.

Exit status: 0 nothing differs; 3 something differs; 2 the file is no recording that can be replayed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.cli.flags import count
from lockstep.runtime.recording import Recording, read
from lockstep.runtime.retrace import Finding, Retrace, compare, retrace
from lockstep.sim import transcript_words as words

DIFFERS = 3

SAME = "nothing differs: the replay gives every recorded digest, and every rank had the driver's"
SAME_AS_OTHER = "nothing differs: the recordings agree in every step that both hold"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "replay", help="run a flight recorder's file again and name the first step at which anything differs", description=__doc__
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a recording that an engine wrote when something failed")
    parser.add_argument("--against", metavar="FILE2", type=Path, help="compare with another recording of the same run")
    parser.add_argument("--rows", type=count, default=2, metavar="N", help="show so many steps on each side of it (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    recording = read(arguments.file)
    found = retrace(recording) if arguments.against is None else compare(recording, read(arguments.against))
    same = SAME if arguments.against is None else SAME_AS_OTHER
    print(_as_json(recording, found, arguments.rows) if arguments.json else "\n".join(_as_text(recording, found, arguments.rows, same)))
    return DIFFERS if found.finding is not None else 0


def _as_json(recording: Recording, found: Retrace, rows: int) -> str:
    head = recording.head
    described: dict[str, Any] = {name: getattr(head, name) for name in ("incident", "time", "epoch", "lockstep", "fingerprint", "with_tokens")}
    error = {"kind": head.error_kind, "code": head.error_code, "step": head.error_step, "message": head.error_text}
    first = None if found.finding is None else dataclasses.asdict(found.finding)
    shown = {step: list(_step(recording, found, step)) for step in _around(recording, found, rows)}
    steps = {"first": found.first, "reached": found.reached}
    return json.dumps({**described, "error": error, "steps": steps, "first_difference": first, "notes": found.notes, "rows": shown})


def _as_text(recording: Recording, found: Retrace, rows: int, same: str) -> Iterator[str]:
    head = recording.head
    ids = "true token ids" if head.with_tokens else "keyed hashes in place of token ids"
    yield f"incident {head.incident} at {head.time}, epoch {head.epoch}, {head.rank_count} ranks, lockstep {head.lockstep}, {ids}"
    step = f" in step {head.error_step}" if head.error_step >= 0 else ""
    yield f"{head.error_kind}{step}: {head.error_text}"
    yield f"steps {found.first} to {found.reached} looked at; {len(recording.entries)} have a result, {len(recording.unresolved)} plans were out"
    yield from (f"note: {note}" for note in found.notes)
    yield from _verdict(found.finding, same)
    for at in _around(recording, found, rows):
        yield f"--- step {at}"
        yield from _step(recording, found, at)


def _verdict(finding: Finding | None, same: str) -> Iterator[str]:
    if finding is None:
        yield same
        return
    yield f"first difference: step {finding.step}"
    yield from (f"  {line}" for line in finding.lines)
    if finding.slots:
        yield f"  concerned: {', '.join(f'slot {slot} generation {generation}' for slot, generation in finding.slots)}"


def _around(recording: Recording, found: Retrace, rows: int) -> list[int]:
    """Steps to show: those around the first difference, else around the step that failed, else the last ones."""
    error_step = recording.head.error_step
    middle = found.finding.step if found.finding is not None else error_step if error_step >= 0 else found.reached
    plans = [*(entry.plan.step for entry in recording.entries), *(plan.step for plan in recording.unresolved)]
    return [step for step in plans if abs(step - middle) <= rows]


def _step(recording: Recording, found: Retrace, step: int) -> Iterator[str]:
    """Plan, layout and result in words."""
    plans = {plan.step: plan for plan in recording.unresolved} | {entry.plan.step: entry.plan for entry in recording.entries}
    yield from words.plan(plans[step]).split("\n")
    layout = found.layouts.get(step)
    yield from (f"  computes {line}" for line in (words.layout_rows(layout) if layout is not None else ()))
    result = next((entry.result for entry in recording.entries if entry.plan.step == step), None)
    if result is None:
        yield "  no result"
    else:
        yield from (f"  result {line}" for line in words.result_rows(result))
