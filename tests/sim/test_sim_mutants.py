"""Mutants in simulated runs: S1 to S4 on one replica are noticed at run time and at once; rules have mutants; the runner tells a kill from a crash.

All of them together are `lockstep sim --mutants`, which takes minutes; here are those that say most, each for as few runs as will do.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lockstep.cli.main import main
from lockstep.core.records import StepResult
from lockstep.core.table import TableShape
from lockstep.sim.mutants import ALL, MUTANTS, NO_CODE_YET, ONE, Mutant, Witness
from lockstep.sim.mutants.mutant import of_table
from lockstep.sim.mutants.watched_table import WatchedTable
from lockstep.sim.mutation import AUDIT, LIVENESS, ORACLE, REFUSAL, judge
from lockstep.sim.mutation_bounds import BOUNDS, broken_bound
from lockstep.sim.parts import Parts

RULES_WITH_A_FIGURE = (2, 3, 4, 8, 9, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 28)
"""Rules that the protocol was modelled without, one at a time; what it found is beside each."""

STEPS_MOST = 2

FIRST_FAULTS = [(mutant, scope) for mutant in MUTANTS if mutant.kind.startswith("S") for scope in mutant.parts]

BY_RULE = {
    ("horizon-one-short", ALL): "LogError",
    ("victim-of-any-rank", ALL): "AssertionError",
    ("publishes-while-building", ALL): "ProvenanceError",
    ("key-without-parent", ALL): "ProvenanceError",
    ("one-tag-a-block", ONE): "ProvenanceError",
    ("other-seed", ONE): "DivergenceError",
    ("other-seed", ALL): ORACLE,
    ("other-history", ONE): "DivergenceError",
    ("history-undigested", ONE): ORACLE,
    ("keeps-counts", ALL): ORACLE,
    ("no-checksum", ALL): ORACLE,
    ("forgets-answers", ALL): "LedgerError",
    ("length-before-stop", ALL): "LedgerError",
    ("exports-unheld", ALL): "ProvenanceError",
    ("forgets-failed-import", ALL): LIVENESS,
    ("never-drains", ALL): AUDIT,
    ("announcement-waits", ALL): "StalledError",
}


def named(name: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if mutant.name == name)


@pytest.mark.parametrize(("mutant", "scope"), FIRST_FAULTS, ids=[f"{mutant.kind}-{mutant.name}-{scope}" for mutant, scope in FIRST_FAULTS])
def test_first_fault_on_one_replica_is_noticed_at_run_time_within_two_steps(mutant: Mutant, scope: str) -> None:
    verdict = judge(mutant, scope, seeds_after=1)
    assert verdict.right, verdict
    assert verdict.by[0] not in (ORACLE, AUDIT, LIVENESS), verdict
    if scope == ONE:
        assert verdict.steps_to_detect is not None, verdict
        assert verdict.steps_to_detect <= STEPS_MOST, verdict


@pytest.mark.parametrize(("name", "scope"), BY_RULE, ids=lambda value: value)
def test_looser_rule_is_noticed_by_the_check_that_is_for_it(name: str, scope: str) -> None:
    verdict = judge(named(name), scope, seeds_after=1)
    assert verdict.right, verdict
    assert verdict.by[0] == BY_RULE[name, scope], verdict


def test_an_export_that_nobody_holds_is_refused_too() -> None:
    """Where the blocks have another owner by then, its tags are not those that were asked for."""
    assert REFUSAL in judge(named("exports-unheld"), ALL, seeds_after=1).by


def test_every_rule_with_a_figure_has_a_mutant_or_no_code() -> None:
    have = {mutant.kind for mutant in MUTANTS} | set(NO_CODE_YET)
    assert {f"rule {number}" for number in RULES_WITH_A_FIGURE} <= have
    assert sum(mutant.kind.startswith("C") and mutant.equivalent is None for mutant in MUTANTS) >= 16
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_equivalent_mutants_say_why() -> None:
    reasons = [mutant.equivalent for mutant in MUTANTS if mutant.equivalent is not None]
    assert len(reasons) >= 3
    assert all(len(reason) > 40 for reason in reasons)


def test_real_parts_survive() -> None:
    nothing = Mutant(name="none", kind="none", loosens="nothing", parts={ALL: lambda _witness: Parts()})
    verdict = judge(nothing, ALL, seeds_most=6)
    assert not verdict.killed
    assert verdict.runs == 6


class ForgetsHow(WatchedTable):
    """Raises what no check raises."""

    def apply_result(self, result: StepResult) -> None:
        raise KeyError(result.step)


def test_python_error_in_a_mutant_is_no_kill() -> None:
    broken = Mutant(name="broken", kind="none", loosens="nothing", parts=of_table(ForgetsHow))
    verdict = judge(broken, ONE, seeds_most=3)
    assert not verdict.killed
    assert verdict.broken.startswith("KeyError")
    assert not verdict.right


def test_survivor_that_is_not_equivalent_is_wrong_and_so_is_a_killed_equivalent() -> None:
    survivor = judge(named("reuses-generations"), ALL, seeds_most=2)
    assert survivor.right
    assert not replace(survivor, equivalent=None).right
    killed = judge(named("appends-at-computed"), ONE, seeds_after=0)
    assert killed.right
    assert not replace(killed, equivalent="it is said to be").right


@pytest.mark.parametrize("name", BOUNDS)
def test_bound_is_kept_by_the_real_parts_and_broken_by_its_mutant(name: str) -> None:
    assert broken_bound(name, Parts()) == ""
    loose = next(mutant for mutant in MUTANTS if mutant.bound == name)
    assert broken_bound(name, loose.parts[ALL](Witness()))


def test_witness_knows_the_first_step_of_each_epoch() -> None:
    witness = Witness()
    assert witness.first_in(0) is None
    for at in ((0, 7), (1, 2), (0, 5)):
        witness.note(*at)
    assert (witness.first_in(0), witness.first_in(1)) == (5, 2)


def test_watched_table_notes_where_it_did_otherwise() -> None:
    table = WatchedTable(TableShape(slot_count=1, length_max=4, block_size=4))
    table.witness = witness = Witness()
    table.did(False)
    assert witness.noted == []
    table.did([False, True])
    assert witness.noted == [(0, 0)]


def test_command_prints_every_verdict_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--mutants", "--json", "--jobs", "1", "--name", "chunks-wait-for-results"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (entry,) = printed["mutants"]
    wanted = {"name": "chunks-wait-for-results", "applied": "all", "killed": True, "by": ["bound"], "first_seed": 0, "steps_to_detect": None}
    assert {key: entry[key] for key in wanted} == wanted
    assert entry["equivalent"] is None
    assert set(printed["no_code_yet"]) == set(NO_CODE_YET)


def test_command_refuses_a_name_that_no_mutant_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--mutants", "--name", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
