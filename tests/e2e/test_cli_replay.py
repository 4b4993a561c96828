"""`lockstep replay` on recordings of a whole engine whose last stage has gone wrong: words, JSON, exit status, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.cli.main import main
from lockstep.core.digest import Digest, mix64
from lockstep.core.ragged import Ragged
from lockstep.core.records import Admissions, NewBlocks, Rows, Side, StepPlan, StepResult
from lockstep.core.schema import ADMITTED, column_array
from lockstep.core.table import SlotTable, TableShape
from lockstep.errors import DivergenceError, StalledError
from lockstep.runtime.recorder import Recorder, file_name
from lockstep.runtime.replay import Replica

SHAPE = TableShape(slot_count=2, length_max=32, block_size=4)
PROMPT = (4711, 4712, 4713)
FAILING = 5


def plan_at(step: int) -> StepPlan:
    """One request, admitted at step 0, a token a step."""
    rows = {"slots": np.array([1], np.int32), "generations": np.array([7]), "samples": np.array([1], np.int32)}
    length = len(PROMPT) if step == 0 else 1
    row = Rows(**rows, counts=np.array([length], np.int32), starts=np.array([0 if step == 0 else len(PROMPT) + step - 1], np.int32))
    if step > 0:
        return StepPlan(epoch=0, step=step, horizon=step, rows=row)
    side = Side(stop_ids=(9,))
    known = {"generation": 7, "known": len(PROMPT), "prompt_length": len(PROMPT), "length_cap": 20, "seed": 5, "top_p": 1.0}
    values = {**dict.fromkeys(ADMITTED, 0), **known, "side_hash": side.hash64(), "kv_salt": side.kv_salt()}
    admissions = Admissions(
        slots=np.array([1], np.int32),
        values={name: column_array(name, [value]) for name, value in values.items()},
        tokens=Ragged.of([PROMPT]),
        marks=np.ones(len(PROMPT), np.uint8),
        sides=(side,),
        transfers=(None,),
    )
    blocks = NewBlocks(slots=np.array([1], np.int32), groups=np.array([0], np.int32), blocks=Ragged.of([[3, 1, 0, 2]]))
    return StepPlan(epoch=0, step=0, horizon=0, admissions=admissions, new_blocks=blocks, rows=row)


def recorded(folder: Path, *, steps: int = FAILING + 1, wrong: bool = True, incident: str = "7f3a", with_tokens: bool = False) -> Path:
    """Driver and two ranks run the request; before step FAILING rank 1 gets another seed."""
    replicas = [Replica(SlotTable(SHAPE), Digest(0)) for _ in range(3)]
    driver, *ranks = replicas
    recorder = Recorder(rank_count=2)
    recorder.begin(0, driver)
    for step in range(steps):
        plan = plan_at(step)
        if wrong and step == FAILING:
            ranks[1].table.columns["seed"][1] += np.uint64(1)
        for rank in ranks:
            rank.run(plan)
        digests = np.array([rank.digest.value for rank in ranks], np.uint64)
        answer = {"slots": plan.rows.slots, "generations": plan.rows.generations, "finishes": np.zeros(1, np.int32)}
        result = StepResult(epoch=0, step=step, **answer, tokens=Ragged.of([[mix64(step) % 50_000]]), drafts=Ragged.of([[]]), digests=digests)
        recorder.before(plan, driver)
        driver.run(plan)
        recorder.note(result, driver.digest.value)
        for replica in replicas:
            replica.offer(result)
    error = DivergenceError("replicas of the log disagree", step=steps - 1) if wrong else StalledError("no result")
    columns = {rank: replica.columns_of(steps - 1) or {} for rank, replica in enumerate(ranks)}
    taken = recorder.take(incident=incident, error=error, unresolved=[plan_at(steps)], columns=columns)
    path = recorder.save(taken, folder / file_name(incident), with_tokens=with_tokens)
    assert path is not None
    return path


def test_replay_says_what_was_recorded_and_where_replicas_parted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded(tmp_path))]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("incident 7f3a at 20")
    assert lines[0].endswith("keyed hashes in place of token ids")
    assert lines[1] == f"DivergenceError in step {FAILING}: replicas of the log disagree"
    assert lines[2] == "steps 0 to 6 looked at; 6 have a result, 1 plans were out"
    at = lines.index(f"first difference: step {FAILING}")
    assert lines[at + 1] == "  digests differ from the driver's: stage 1"
    assert lines[at + 2] == "  layout.sampling.seed of slot 1 generation 7 at position 8 is 5 in the replay and 6 on stage 1"
    assert lines[at + 3] == "  concerned: slot 1 generation 7"


def test_replay_shows_the_steps_around(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path, with_tokens=True)
    for rows, steps in ((0, [5]), (1, [4, 5, 6]), (2, [3, 4, 5, 6])):
        main(["replay", str(path), "--rows", str(rows)])
        text = capsys.readouterr().out
        assert [int(line.split()[-1]) for line in text.splitlines() if line.startswith("---")] == steps
    main(["replay", str(path), "--rows", "9"])
    lines = capsys.readouterr().out.splitlines()
    assert "  admit slot 1 generation 7: known 3, computed 0" in lines
    assert "  computes slot 1 generation 7: positions 0..3 tokens 4711 4712 4713, samples" in lines
    assert f"  result slot 1 generation 7: tokens {mix64(0) % 50_000}, finish no, drafts none" in lines
    assert lines[-1] == "  no result"


def test_replay_of_a_run_that_agrees_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded(tmp_path, wrong=False))]) == 0
    assert "nothing differs: the replay gives every recorded digest" in capsys.readouterr().out


def test_json_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded(tmp_path)), "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    assert (said["incident"], said["epoch"], said["with_tokens"]) == ("7f3a", 0, False)
    assert said["error"] == {"kind": "DivergenceError", "code": "divergence", "step": FAILING, "message": "replicas of the log disagree"}
    assert said["steps"] == {"first": 0, "reached": FAILING + 1}
    assert (said["first_difference"]["step"], said["first_difference"]["slots"]) == (FAILING, [[1, 7]])
    assert "layout.sampling.seed" in said["first_difference"]["lines"][1]
    assert list(said["rows"]) == ["3", "4", "5", "6"]


def test_replay_against_another_recording_names_where_they_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, same = (recorded(tmp_path, wrong=False, incident=name, with_tokens=True) for name in "ab")
    bad = recorded(tmp_path, incident="c", with_tokens=True)
    assert main(["replay", str(good), "--against", str(same)]) == 0
    assert "the recordings agree in every step that both hold" in capsys.readouterr().out
    assert main(["replay", str(good), "--against", str(bad)]) == 3
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(f"first difference: step {FAILING}")
    assert lines[at + 1].startswith("  layout.sampling.seed of slot 1 generation 7 at position 8 is 5 in the first on stage 1")
    hashed = recorded(tmp_path, wrong=False, incident="d")
    assert main(["replay", str(good), "--against", str(hashed)]) == 0
    assert "note: token ids and what is made of them, digests too, are not compared" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"GGUF", b"lockstep recording 1\nnothing"])
def test_bad_file_is_the_callers_mistake(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.lockstep"
    path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_another_process_replays_the_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.cli.main", "replay", str(recorded(tmp_path))], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert f"first difference: step {FAILING}" in done.stdout
