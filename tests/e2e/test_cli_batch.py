"""`lockstep generate --prompts-file`: processes that answer files, are interrupted or killed in the middle, and go on to the same bytes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served_process import COMMAND, PATIENCE_S, stage_processes

from lockstep import LLM, SamplingParams

WINDOW = 512
SHARED = ("--max-model-len", str(WINDOW), "--max-num-seqs", "2", "--max-tokens", "24", "--seed", "5")
COUNT = 24
BEFORE_THE_FAULT = 3


def lines() -> list[dict[str, Any]]:
    """Greedy ones, ones with a seed, ones without, a conversation, token ids, and three that cannot be answered."""
    made: list[dict[str, Any]] = [{"prompt": f"Item {i} of the list is", "id": f"line {i}", "max_tokens": 12 + i % 13} for i in range(COUNT)]
    for i, one in enumerate(made):
        one.update({"temperature": 0} if i % 3 == 0 else {"seed": i} if i % 3 == 1 else {})
    made[2] = {"messages": [{"role": "user", "content": "Name a colour."}], "temperature": 0}
    made[4] = {"prompt_token_ids": [1, 2, 3], "ignore_eos": True, "logprobs": 1, "max_tokens": 4}
    made[5] = {"prompt": "no such field", "temprature": 1, "id": "wrong"}
    made[9] = {"prompt": "", "id": "empty"}
    made[11] = {"prompt": "too long", "max_tokens": WINDOW}
    made[14] = {"prompt": "Several choices:", "n": 2, "temperature": 1.0, "seed": 3}
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "in.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines()))
    return path


def command(source: Path, target: Path, *more: str) -> list[str]:
    return [*COMMAND, "generate", "smollm2", *SHARED, "--prompts-file", str(source), "--output-file", str(target), *more]


def answer(source: Path, target: Path, *more: str, status: int) -> str:
    """What it said."""
    done = subprocess.run(command(source, target, *more), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    target = tmp_path_factory.mktemp("answers") / "out.jsonl"
    said = answer(source, target, status=1)
    assert f"{COUNT} answered, 3 with an error" in said.splitlines()[-1]
    return target.read_bytes()


def disturb(source: Path, target: Path, fault: Callable[[subprocess.Popen[str]], None], *more: str) -> tuple[int, str, int]:
    """Run until some answers are there, then do the fault. Exit status, what it said, and how many answers it left."""
    with subprocess.Popen(command(source, target, *more), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        began = time.monotonic()
        while not target.exists() or target.read_bytes().count(b"\n") < BEFORE_THE_FAULT:
            assert process.poll() is None, "it ended before the fault"
            assert time.monotonic() - began < PATIENCE_S
            time.sleep(0.005)
        fault(process)
        left = target.read_bytes().count(b"\n")
        _, said = process.communicate(timeout=PATIENCE_S)
    assert BEFORE_THE_FAULT <= left < COUNT, "the fault came too late to show anything"
    return process.returncode, said, target.read_bytes().count(b"\n")


def test_answers_are_in_order_and_those_that_llm_gives(undisturbed: bytes) -> None:
    records = [json.loads(line) for line in undisturbed.splitlines()]
    asked = lines()
    assert [record["index"] for record in records] == list(range(COUNT))
    assert [record["id"] for record in records] == [one.get("id", i) for i, one in enumerate(asked)]
    assert [i for i, record in enumerate(records) if record["error"]] == [5, 9, 11]
    assert [records[i]["error"]["param"] for i in (5, 9, 11)] == ["temprature", "prompt", "max_tokens"]
    with LLM("smollm2", max_model_len=WINDOW) as llm:
        for one, record in zip(asked, records, strict=True):
            if record["error"]:
                assert (record["text"], record["finish_reason"], record["usage"]) == (None, "error", None)
                continue
            names = {"temperature", "ignore_eos", "logprobs", "n"}
            params = SamplingParams(max_tokens=one.get("max_tokens", 24), seed=record["seed"], **{k: v for k, v in one.items() if k in names})
            wanted = (
                llm.chat(one["messages"], params)[0] if "messages" in one else llm.generate(one.get("prompt") or one["prompt_token_ids"], params)[0]
            )
            first, count = wanted.outputs[0], sum(len(choice.token_ids) for choice in wanted.outputs)
            assert (record["text"], record["token_ids"], record["finish_reason"]) == (first.text, first.token_ids, first.finish_reason)
            prompt = len(wanted.prompt_token_ids)
            assert record["usage"] == {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
            assert [c["text"] for c in record.get("choices", [])] == ([c.text for c in wanted.outputs] if params.n > 1 else [])
            logprobs = [entry[token].logprob for token, entry in zip(first.token_ids, first.logprobs or [], strict=False)]
            assert [entry["logprob"] for entry in record.get("logprobs", [])] == logprobs
    assert len(records[4]["logprobs"]) == 4


def test_two_stages_write_the_same_bytes(source: Path, undisturbed: bytes, tmp_path: Path) -> None:
    answer(source, tmp_path / "out.jsonl", "-pp", "2", "--max-num-batched-tokens", "16", status=1)
    assert (tmp_path / "out.jsonl").read_bytes() == undisturbed


def test_killed_run_goes_on_to_the_same_bytes(source: Path, undisturbed: bytes, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    status, _, left = disturb(source, target, lambda process: process.kill())
    assert status == -signal.SIGKILL
    assert undisturbed.startswith(target.read_bytes())
    with target.open("ab") as stream:  # as if it had been killed in the middle of a line
        stream.write(undisturbed[target.stat().st_size :][:37])
    said = answer(source, target, "--resume", status=1)
    assert f"{COUNT} answered, {left} of them before, 3 with an error" in said.splitlines()[-1]
    assert target.read_bytes() == undisturbed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_ends_in_order_and_goes_on_to_the_same_bytes(
    source: Path, undisturbed: bytes, tmp_path: Path, number: signal.Signals
) -> None:
    target = tmp_path / "out.jsonl"
    status, said, _ = disturb(source, target, lambda process: process.send_signal(number), "-pp", "2")
    assert status == 128 + number
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("interrupted: ")
    assert "--resume" in said
    assert target.read_bytes().endswith(b"\n")
    assert undisturbed.startswith(target.read_bytes())
    answer(source, target, "--resume", status=1)
    assert target.read_bytes() == undisturbed


def kill_last_stage(process: subprocess.Popen[str]) -> None:
    stage_processes(process.pid)[-1].kill()


def test_stage_that_dies_in_the_middle_changes_no_byte(source: Path, undisturbed: bytes, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    status, said, _ = disturb(source, target, kill_last_stage, "-pp", "2")
    assert (status, target.read_bytes()) == (1, undisturbed), said
    assert "stage" in said


def test_engine_that_stops_in_the_middle_ends_the_run_and_leaves_the_rest_to_a_resumed_one(source: Path, undisturbed: bytes, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    status, said, left = disturb(source, target, kill_last_stage, "-pp", "2", "--max-restarts", "0")
    assert status == 1
    assert left < COUNT, "the lines that were not answered got records"
    assert said.splitlines()[-1].startswith("lockstep: ")
    assert undisturbed.startswith(target.read_bytes())
    answer(source, target, "--resume", status=1)
    assert target.read_bytes() == undisturbed


def test_finished_file_is_resumed_without_a_change(source: Path, undisturbed: bytes, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(undisturbed)
    answer(source, target, "--resume", status=1)
    assert target.read_bytes() == undisturbed


def test_changed_prompts_or_flags_are_refused_and_the_answers_left(source: Path, undisturbed: bytes, tmp_path: Path) -> None:
    target, changed = tmp_path / "out.jsonl", tmp_path / "in.jsonl"
    part = b"".join(undisturbed.splitlines(keepends=True)[:4])
    target.write_bytes(part)
    changed.write_text(source.read_text().replace("Item 1 of", "Item 7 of"))
    assert "line 2 of the prompts file is not the one" in answer(changed, target, "--resume", status=2)
    assert "or flags of generation" in answer(source, target, "--resume", "--temperature", "0.5", status=2)
    assert "--resume goes on with it" in answer(source, target, status=2)
    assert target.read_bytes() == part


def test_lines_come_and_go_through_pipes() -> None:
    """Each is answered before the next one is sent: nothing waits for a window to fill."""
    arguments = [*COMMAND, "generate", "smollm2", *SHARED, "--prompts-file", "-"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for i in range(3):
            process.stdin.write(json.dumps({"prompt": "1, 2, 3,", "id": i, "temperature": 0}) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == i
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGINT, "it waits for a pipe that says nothing"
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1].startswith("interrupted: 3 answered")


def test_no_more_than_a_window_of_lines_is_taken_while_the_first_has_no_answer() -> None:
    """Lines of 4 KiB behind one with a long answer. The window is 4 lines, 16 are read ahead; pipes and buffers hold some 72 KiB."""
    padding = "x" * 4096
    first = {"prompt": "Once", "temperature": 0, "max_tokens": WINDOW - 8, "ignore_eos": True}
    others = [{"prompt": "1, 2, 3,", "temperature": 0, "max_tokens": 1, "id": padding} for _ in range(400)]
    taken = 0
    arguments = [*COMMAND, "generate", "smollm2", *SHARED, "--prompts-file", "-"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def write() -> None:
            nonlocal taken
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                for one in (first, *others):
                    os.write(process.stdin.fileno(), json.dumps(one).encode() + b"\n")
                    taken += 1

        writer = threading.Thread(target=write)
        writer.start()
        assert json.loads(process.stdout.readline())["index"] == 0
        taken_before_the_answer = taken
        process.kill()
        writer.join(PATIENCE_S)
    assert 4 <= taken_before_the_answer < 80


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--prompts-file", "/no/such/file"), "--prompts-file /no/such/file: No such file"),
        (("--prompts-file", os.devnull, "--output-file", "/no/such/folder/x"), "--output-file /no/such/folder/x: No such file"),
        (("--prompts-file", __file__, "--output-file", __file__), "is the --prompts-file"),
        (("--prompts-file", os.devnull, "--resume"), "--resume needs the --output-file"),
        (("--prompts-file", os.devnull, "--prompt", "x"), "--prompt does not go with --prompts-file"),
        (("--prompt", "x", "--output-file", "x"), "--output-file goes with --prompts-file"),
        (("--prompt", "x", "--resume"), "--resume goes with --prompts-file"),
    ],
)
def test_callers_mistake_is_status_2_and_says_what(arguments: tuple[str, ...], found: str) -> None:
    done = subprocess.run([*COMMAND, "generate", "smollm2", *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert found in done.stderr
    assert done.stderr.startswith("lockstep: ")


def test_empty_file_is_answered_by_none(tmp_path: Path) -> None:
    answer(Path(os.devnull), tmp_path / "out.jsonl", status=0)
    assert (tmp_path / "out.jsonl").read_bytes() == b""
