"""Every mutant of S1 to S4 is killed by the transcripts of its fault, and by the checks that are named here; every mutant of another kind of fault
that has transcripts changes one of them.

A check is the class of the first error in a transcript that expects none; "digest" where tables fed by hand only said that digests differ; "output"
where no run-time check fired and only the answer is another one: a rule that is wrong everywhere alike, which replicas cannot see.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.core.scheduler import Scheduler
from lockstep.sim.mutants import ALL, MUTANTS, ONE, Mutant
from lockstep.sim.mutants.mutant import UNSEEN
from lockstep.sim.parts import Parts
from lockstep.sim.transcript import OUTPUT, Played, parse, play
from lockstep.sim.transcript_words import DIGESTS_DIFFER
from lockstep.sim.transcript_world import World

HERE = Path(__file__).parent

KILLED_BY: dict[tuple[str, str], set[str]] = {
    ("appends-at-computed", ONE): {"LogError"},
    ("appends-at-computed", ALL): {"LogError"},
    ("writes-at-computed", ONE): {"LogError"},
    ("writes-at-computed", ALL): {"LogError"},
    ("writes-by-row", ONE): {"LogError", "ProvenanceError"},
    ("writes-by-row", ALL): {"LogError", "ProvenanceError"},
    ("chunk-sets-known", ONE): {"LogError"},
    ("chunk-sets-known", ALL): {"LogError"},
    ("marks-as-before", ONE): {"LogError"},
    ("marks-as-before", ALL): {"LogError"},
    ("waits-when-empty", ONE): {"output"},
    ("sends-nothing-when-empty", ONE): {"LogError"},
    ("tells-driver-when-empty", ONE): {"output"},
    ("sends-twice-when-empty", ONE): {"LogError"},
    ("keeps-drafts", ONE): {"digest"},
    ("keeps-drafts", ALL): {"output"},
    ("keeps-last-token", ONE): {"LogError"},
    ("keeps-last-token", ALL): {"LogError"},
    ("keeps-finish", ONE): {"digest", "DivergenceError"},
    ("keeps-finish", ALL): {"LedgerError", "output"},
    ("keeps-pending", ONE): {"LogError"},
    ("keeps-pending", ALL): {"LogError"},
    ("leaves-out-of-broadcast", ONE): {"LogError"},
    ("skips-predicted-end", ONE): {"LogError"},
    ("skips-predicted-end", ALL): {"LogError"},
    ("accepts-without-predicted-ends", ALL): {"LedgerError", "LogError"},
    ("accepts-without-end-at-cap", ALL): {"LedgerError", "LogError"},
    ("accepts-by-order", ALL): {"LogError"},
    ("applies-late-results", ONE): {"LogError"},
    ("applies-late-results", ALL): {"LogError"},
    ("admits-past-cap", ALL): {"output"},
}

FIRST_FAULTS = ("S1", "S2", "S3", "S4")

SEEN_ELSEWHERE = {"reuses-send-buffer": "what a link has sent is frozen, so that nothing can write it (tests/pure/test_runtime_frames.py)"}
"""Mutants that no transcript can play, and why."""

CASES = [(mutant, scope) for mutant in MUTANTS if mutant.kind in FIRST_FAULTS for scope in mutant.parts]


def parts_of(mutant: Mutant, scope: str) -> Parts:
    """With the real scheduler: what a simulated run needs to meet the mutant at all, a transcript has by itself."""
    return replace(mutant.parts[scope](UNSEEN), make_scheduler=Scheduler)


def caught_by(played: Played) -> str:
    return "digest" if played.caught_by == OUTPUT and DIGESTS_DIFFER in played.text else played.caught_by


@pytest.mark.parametrize(("mutant", "scope"), CASES, ids=[f"{mutant.kind}-{mutant.name}-{scope}" for mutant, scope in CASES])
def test_mutant_is_killed_by_the_transcripts_of_its_fault(mutant: Mutant, scope: str) -> None:
    runs = [play(parse(path.read_text()), World(parts_of(mutant, scope))) for path in sorted(HERE.glob(f"{mutant.kind}-*.txt"))]
    checks = {caught_by(played) for played in runs if played.differs_at is not None}
    assert checks, f"{mutant.name} ({mutant.loosens}), {scope}: every transcript of {mutant.kind} reads as with the real parts"
    assert checks == KILLED_BY[mutant.name, scope]


FIELD_CASES = [
    (mutant, scope)
    for mutant in MUTANTS
    if any(HERE.glob(f"{mutant.kind}-*.txt")) and mutant.kind not in FIRST_FAULTS and mutant.equivalent is None and mutant.name not in SEEN_ELSEWHERE
    for scope in mutant.parts
]


@pytest.mark.parametrize(("mutant", "scope"), FIELD_CASES, ids=[f"{mutant.kind}-{mutant.name}-{scope}" for mutant, scope in FIELD_CASES])
def test_mutant_of_a_kind_from_the_field_changes_a_transcript_of_that_kind(mutant: Mutant, scope: str) -> None:
    runs = [play(parse(path.read_text()), World(mutant.parts[scope](UNSEEN))) for path in sorted(HERE.glob(f"{mutant.kind}-*.txt"))]
    assert any(played.differs_at is not None for played in runs), f"{mutant.name} ({mutant.loosens}), {scope}: its transcripts read the same"


def test_each_fault_has_mutants_and_each_mutant_its_checks() -> None:
    assert {mutant.kind for mutant, _ in CASES} == set(FIRST_FAULTS)
    assert {(mutant.name, scope) for mutant, scope in CASES} == set(KILLED_BY)
