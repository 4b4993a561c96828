"""A conversation without a terminal or a model: commands, messages of many lines, and how progress is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from lockstep.cli.conversation import PARAMETERS, Conversation
from lockstep.cli.line_reader import EndOfInput, StreamReader
from lockstep.cli.progress import LINE_EACH_S, Progress
from lockstep.core.params import SamplingParams
from lockstep.errors import ConfigError, InvalidRequestError


def conversation(system: str | None = None) -> Conversation:
    return Conversation(SamplingParams(temperature=0.5, max_tokens=None), system=system, about={"model": "m"})


def messages(text: str) -> list[str]:
    reader = StreamReader(io.TextIOWrapper(io.BytesIO(text.encode())))
    found = []
    while True:
        try:
            found.append(reader.message())
        except EndOfInput:
            return found


def test_question_comes_after_all_that_was_said_and_the_system_text_first() -> None:
    talk = conversation("Be brief.")
    talk.answered("a", "b")
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert talk.prompt("c") == [{"role": "system", "content": "Be brief."}, *said, {"role": "user", "content": "c"}]
    assert talk.messages == said
    talk.command("/system  Be long. ")
    assert talk.prompt("c")[0]["content"] == talk.command("/system").text == "Be long."
    talk.command("/reset")
    assert talk.prompt("c") == [{"role": "system", "content": "Be long."}, {"role": "user", "content": "c"}]
    talk.command("/system -")
    assert talk.prompt("c") == [{"role": "user", "content": "c"}]


def test_parameters_are_set_by_name_and_go_back() -> None:
    talk = conversation()
    for command in ("/set temperature 0.25", "/set top-k 4", '/set stop ["x", "y"]', "/set max_tokens 9", "/set ignore_eos true", "/seed 7"):
        assert talk.command(command).text == ""
    assert talk.params == SamplingParams(temperature=0.25, top_k=4, stop=["x", "y"], max_tokens=9, ignore_eos=True, seed=7)
    assert talk.command("/set temperature").text == "temperature 0.25"
    assert talk.command("/seed").text == "seed 7"
    talk.command("/set stop END")
    assert talk.params.stop == ("END",)
    for name in ("stop", "temperature", "top_k", "max_tokens", "ignore_eos"):
        talk.command(f"/set {name} -")
    talk.command("/seed -")
    assert talk.params == SamplingParams(temperature=0.5, max_tokens=None)
    assert [line.split()[0] for line in talk.command("/set").text.splitlines()] == list(PARAMETERS)


@pytest.mark.parametrize(
    ("command", "error", "found"),
    [
        ("/rest", ConfigError, "did you mean /reset"),
        ("/reset all", ConfigError, "takes no words"),
        ("/save", ConfigError, "name of a file"),
        ("/save /no/such/folder/x.json", ConfigError, "cannot write"),
        ("/set temprature 1", InvalidRequestError, "did you mean temperature"),
        ("/set n 2", InvalidRequestError, "'n' is not a sampling parameter"),
        ("/set temperature hot", InvalidRequestError, "temperature must be a number"),
        ("/set max_tokens 0", InvalidRequestError, "max_tokens must be"),
        ("/seed x", InvalidRequestError, "seed must be"),
    ],
)
def test_command_that_cannot_be_done_says_why_and_changes_nothing(command: str, error: type[Exception], found: str) -> None:
    talk = conversation()
    with pytest.raises(error, match=found):
        talk.command(command)
    assert talk.params == conversation().params
    assert talk.prompt("c") == conversation().prompt("c")


def test_every_command_is_in_the_help() -> None:
    talk = conversation()
    shown = talk.command("/help").text
    assert [name for name in talk.commands if name not in shown] == ["/quit"]
    assert talk.command("/exit").ended
    assert talk.command("/quit").ended


def test_saved_file_has_all_of_it_and_others_are_not_written_over(tmp_path: Path) -> None:
    talk = conversation("s")
    talk.command("/seed 3")
    path = tmp_path / "talk.json"
    for answer in ("b", "ä"):
        talk.answered("a", answer)
        assert str(path) in talk.command(f"/save {path}").text
    saved = json.loads(path.read_text("utf-8"))
    assert saved["model"] == "m"
    assert saved["sampling_params"]["seed"] == 3
    assert [message["content"] for message in saved["messages"]] == ["s", "a", "b", "a", "ä"]
    assert [file.name for file in tmp_path.iterdir()] == ["talk.json"]
    with pytest.raises(ConfigError, match="exists"):
        conversation().command(f"/save {path}")


def test_messages_of_many_lines() -> None:
    text = 'one\ntwo \\\nand three\n"""four\n\n  five\n"""\n"""six"""\n\nseven\\'
    assert messages(text) == ["one", "two \nand three", "four\n\n  five", "six", "", "seven"]
    assert messages('"""never\nended') == ["never\nended"]
    assert messages("") == []


def test_bytes_that_are_no_text_spoil_no_other_message() -> None:
    reader = StreamReader(io.TextIOWrapper(io.BytesIO(b"a\n\xff\nb\n"), encoding="utf-8"))
    assert [reader.message(), reader.message(), reader.message()] == ["a", "\udcff", "b"]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_a_line_now_and_then_elsewhere() -> None:
    now = [0.0]
    screen, pipe = Screen(), io.StringIO()
    shown = [Progress(stream, clock=lambda: now[0]) for stream in (screen, pipe)]
    for step in range(1, 25):
        now[0] = step * LINE_EACH_S / 10
        for progress in shown:
            progress.show(f"{step} answered", step / 40)
    for progress in shown:
        progress.end("24 answered")
    assert pipe.getvalue().splitlines() == ["10 answered, 25% of the file", "20 answered, 50% of the file", "24 answered"]
    drawn = screen.getvalue().split("\r")
    assert len(drawn) == 27
    assert drawn[20].startswith("[###############---------------]  50%  20 answered")
    assert drawn[-2].strip() == ""
    assert drawn[-1] == "24 answered\n"
    assert "\n" not in "".join(drawn[:-1])
