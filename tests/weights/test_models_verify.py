"""Each family, as a folder that anyone could have, through `verify`: the plain answers are the answers at one, two and three stages, with
chunked prefill, preemption, prefix hits, greedy and sampled; every counter is met, and every changed prompt token is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from family_folder import write_folder
from family_models import FAMILY_MODELS, FamilyModel
from lockstep.config import EngineConfig
from lockstep.verify.cells import Cell
from lockstep.verify.matrix import Matrix

BASE = {"budget": "8", "at_once": "all", "order": "shuffled", "aborts": "neighbours", "threads": "1"}
CELLS = [
    Cell(settings={**BASE, "stages": "1", "async": "on", "cache": "warm", "preemption": "none"}),
    Cell(settings={**BASE, "stages": "2", "async": "off", "cache": "warm", "preemption": "none", "threads": "2"}),
    Cell(settings={**BASE, "stages": "3", "async": "on", "cache": "cold", "preemption": "forced"}),
]
REACH = {"sliding_window": 48, "num_hidden_layers": 6}
"""Where every layer slides, the first token of a prompt must still reach its last through window after window."""


def cases() -> list[object]:
    """One model of each kind of attention always, the rest in `make test-slow`."""
    quick = {"mistral", "gpt-oss", "deepseek v2, groups", "qwen3, windows", "gemma 2", "gemma 3", "phi 4, longrope"}
    assert quick <= {model.name for model in FAMILY_MODELS}
    return [pytest.param(model, id=model.name, marks=() if model.name in quick else pytest.mark.slow) for model in FAMILY_MODELS]


@pytest.mark.parametrize("model", cases())
def test_answers_do_not_depend_on_how_the_model_is_deployed(model: FamilyModel, tmp_path: Path) -> None:
    if all(0 < layer.sliding_window < REACH["sliding_window"] for layer in model.spec.layers):
        model = replace(model, changes={**model.changes, **REACH})
    matrix = Matrix(EngineConfig(model=str(write_folder(tmp_path / "model", model)), dtype="float32"), quick=True)
    matrix.prepare()
    assert not matrix.report.failed, matrix.report
    for cell in CELLS:
        matrix.run_cell(cell)
    assert not matrix.report.failed, matrix.report
    assert matrix.report.cells == len(CELLS)
    assert matrix.report.tokens > 200 * len(CELLS)
