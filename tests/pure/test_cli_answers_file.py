"""The file of answers: whole lines or none, going on where it stops, and never over something that it did not write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.answers_file import AnswersFile, Kept
from lockstep.cli.prompts_file import RawLine
from lockstep.errors import CapacityError, ConfigError

SETTINGS = "s"
LINES = [RawLine(index=i, number=i + 1, digest=f"d{i}", end=0, data=b"") for i in range(5)]


def record(index: int, **others: Any) -> dict[str, Any]:
    return {"index": index, "input": f"d{index}", "settings": SETTINGS, "error": None, "usage": {"completion_tokens": index}, **others}


def write(path: Path, *records: dict[str, Any], tail: bytes = b"") -> bytes:
    data = b"".join(json.dumps(one).encode() + b"\n" for one in records) + tail
    path.write_bytes(data)
    return data


def resumed(path: Path, count: int = 5, settings: str = SETTINGS) -> tuple[AnswersFile, list[Kept], list[int]]:
    """The file, what it kept, and the lines that are left."""
    answers, lines = AnswersFile(path, resume=True), iter(LINES[:count])
    try:
        kept = list(answers.resume(lines, settings))
    except BaseException:
        answers.close()
        raise
    return answers, kept, [line.index for line in lines]


def test_answers_are_lines_in_order_of_writing(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    answers = AnswersFile(path, resume=False)
    answers.append(record(0, text="ä\u2028\n"))
    assert json.loads(path.read_text("utf-8"))["text"] == "ä\u2028\n", "written at once"
    answers.append(record(1, id="half a pair: \ud800"))
    answers.close()
    assert [json.loads(line)["index"] for line in path.read_bytes().splitlines()] == [0, 1]


@pytest.mark.parametrize("tail", [b"", b"{", b'{"index": 2', b'{"index": 2, "input": "d2", "settings": "s", "error": null}'])
def test_torn_last_line_is_cut_off_and_written_again(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "out.jsonl"
    whole = write(path, record(0), record(1, error={"code": "x"}), tail=tail)
    answers, kept, left = resumed(path)
    assert [(one.line.index, one.failed, one.token_count) for one in kept] == [(0, False, 0), (1, True, 1)]
    assert left == [2, 3, 4]
    answers.append(record(2))
    answers.close()
    assert path.read_bytes() == whole[: len(whole) - len(tail)] + json.dumps(record(2)).encode() + b"\n"


def test_resume_without_a_file_begins_one(tmp_path: Path) -> None:
    answers, kept, left = resumed(tmp_path / "new.jsonl")
    answers.close()
    assert (kept, left) == ([], [0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("records", "tail", "count", "settings", "found"),
    [
        ((record(0), record(1, input="other")), b"", 5, SETTINGS, r"line 2 of the prompts file is not the one that line 2 .* were changed"),
        ((record(0), record(2)), b"", 5, SETTINGS, "line 2 has index 2, expected 1"),
        ((record(0), record(1)), b"", 1, SETTINGS, "more answers than the prompts file has lines, 1"),
        ((record(0),), b"", 5, "other", "another model, dtype, kind of CPU or flags"),
        ((record(0),), b'{"name": "x"}\n', 5, SETTINGS, "line 2 is not an answer that this command wrote"),
        ((), b"some text", 5, SETTINGS, "line 1 is not an answer"),
        ((), b'{"index": broken\n', 5, SETTINGS, "line 1 is not an answer"),
        ((), b'{"index": 0}\n', 5, SETTINGS, "were changed"),
    ],
)
def test_what_does_not_fit_is_refused_and_left_as_it_is(
    tmp_path: Path, records: tuple[dict[str, Any], ...], tail: bytes, count: int, settings: str, found: str
) -> None:
    path = tmp_path / "out.jsonl"
    before = write(path, *records, tail=tail)
    with pytest.raises(ConfigError, match=found):
        resumed(path, count, settings)
    assert path.read_bytes() == before


def test_file_that_holds_something_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    before = write(path, record(0))
    with pytest.raises(ConfigError, match="--resume goes on with it"):
        AnswersFile(path, resume=False)
    assert path.read_bytes() == before
    (tmp_path / "empty").touch()
    AnswersFile(tmp_path / "empty", resume=False).close()


def test_file_that_is_being_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = AnswersFile(path, resume=False)
    with pytest.raises(ConfigError, match="another process"):
        AnswersFile(path, resume=True)
    first.close()
    AnswersFile(path, resume=True).close()


def test_place_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "out.jsonl"):
        with pytest.raises(ConfigError, match="--output-file"):
            AnswersFile(path, resume=False)
    with pytest.raises(ConfigError, match="needs a file"):
        AnswersFile(Path(os.devnull), resume=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_said_with_what_to_do() -> None:
    answers = AnswersFile(Path("/dev/full"), resume=False)
    with pytest.raises(CapacityError, match=r"No space left.*--resume"):
        answers.append(record(0))
    answers.close()
