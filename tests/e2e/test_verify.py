"""`lockstep verify` on the embedded model: passes as it is, and fails when a row's start, one stage's table or one cell's counter is wrong."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

import lockstep.launch.engine as launch_engine_module
import lockstep.launch.stages as launch_stages_module
import lockstep.verify.matrix as matrix_module
from lockstep.config import EngineConfig
from lockstep.core.layout import BatchLayout
from lockstep.core.records import StepPlan
from lockstep.core.schema import COLUMNS
from lockstep.core.table import SlotTable, TableShape
from lockstep.verify.cells import CELLS_LEAST, FACTORS, Cell, covered, full_cells, possible, quick_cells, required
from lockstep.verify.matrix import Matrix, Report

CELL = Cell(
    settings={
        "stages": "2",
        "async": "on",
        "budget": "64",
        "at_once": "4",
        "cache": "cold",
        "preemption": "none",
        "order": "shuffled",
        "aborts": "none",
        "threads": "1",
    }
)


@pytest.fixture(scope="module")
def prepared() -> Matrix:
    matrix = Matrix(EngineConfig(model="smollm2"), quick=True)
    matrix.prepare()
    assert not matrix.report.failed, matrix.report
    return matrix


@pytest.fixture
def matrix(prepared: Matrix) -> Matrix:
    """The same plain answers, an empty report."""
    prepared.report = Report(fingerprint=prepared.report.fingerprint, requests=prepared.report.requests)
    return prepared


def test_cells_cover_every_pair_and_the_triples_that_matter() -> None:
    cells, wanted = full_cells(), required()
    assert set().union(*(covered(cell, wanted) for cell in cells)) == wanted
    assert len(cells) >= CELLS_LEAST
    assert all(possible(cell.settings) for cell in cells)
    assert len({cell.name for cell in cells}) == len(cells)
    in_processes = [(cell["stages"], cell["async"]) for cell in cells if cell.processes]
    assert sorted(in_processes) == sorted((s, a) for s in FACTORS["stages"] for a in FACTORS["async"])


def test_quick_has_at_least_twelve_cells_and_some_in_processes() -> None:
    cells = quick_cells()
    assert len(cells) >= 12
    assert sum(cell.processes for cell in cells) >= 2


def test_a_right_engine_passes(matrix: Matrix) -> None:
    matrix.run_cell(CELL)
    assert not matrix.report.failed, matrix.report
    assert matrix.report.tokens > 200


@pytest.mark.parametrize("preemption", ["none", "forced"])
def test_a_cell_in_processes_and_one_with_preemption_pass(matrix: Matrix, preemption: str) -> None:
    settings = {**CELL.settings, "preemption": preemption, "budget": "8", "aborts": "neighbours"}
    matrix.run_cell(Cell(settings=settings, processes=preemption == "none"))
    assert not matrix.report.failed, matrix.report


class LateStart(SlotTable):
    """Every replica computes decode rows one position too far on."""

    def resolve(self, plan: StepPlan) -> BatchLayout:
        layout = super().resolve(plan)
        shift = np.where(layout.positions > 0, 1, 0) * (layout.count[layout.row_of_token()] == 1)
        return dataclasses.replace(layout, tags=layout.tags, positions=(layout.positions - shift * (layout.positions % 4 == 3)).astype(np.int32))


def test_a_wrong_start_of_rows_on_all_replicas_is_found(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_stages_module, "SlotTable", LateStart)
    monkeypatch.setattr(launch_engine_module, "SlotTable", LateStart)
    matrix.run_cell(CELL)
    assert matrix.report.failed


class OtherSeeds(SlotTable):
    """One replica's seeds differ in one bit."""

    def apply_plan(self, plan: StepPlan) -> None:
        super().apply_plan(plan)
        if len(plan.admissions.slots):
            self.columns["seed"][plan.admissions.slots] ^= np.uint64(1)


def test_one_stage_with_another_table_is_found(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TableShape] = []

    def second_is_wrong(shape: TableShape) -> SlotTable:
        made.append(shape)
        return OtherSeeds(shape) if len(made) == 2 else SlotTable(shape)

    assert any(column.name == "seed" for column in COLUMNS)
    monkeypatch.setattr(launch_stages_module, "SlotTable", second_is_wrong)
    matrix.run_cell(CELL)
    (missed,) = matrix.report.missed.values()
    assert "(divergence)" in missed[0]


def test_a_cell_that_did_not_do_what_its_name_says_fails(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    read = matrix_module.read_counters

    def without_hits(*arguments: object, **named: object) -> dict[str, object]:
        return {**read(*arguments, **named), "prefix_hits": 0}  # type: ignore[arg-type]

    monkeypatch.setattr(matrix_module, "read_counters", without_hits)
    matrix.run_cell(CELL)
    assert matrix.report.missed == {CELL.name: ["wanted prefix_hits > 0, found 0"]}
    assert not matrix.report.mismatches


def test_settings_that_cells_choose_are_refused() -> None:
    command = [sys.executable, "-m", "lockstep.cli.main", "verify", "smollm2", "-pp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "pipeline_parallel_size" in done.stderr


@pytest.mark.slow
def test_quick_verify_finds_nothing_and_says_so_in_json() -> None:
    command = [sys.executable, "-m", "lockstep.cli.main", "verify", "smollm2", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["missed"]
    assert report["mismatches"] == []
    assert report["cells"] >= 12
