"""`lockstep chat` on a terminal of its own and on pipes: editing, history, commands, Ctrl-C, and answers that are the model's."""

from __future__ import annotations

import json
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_process import COMMAND, PATIENCE_S
from terminal_process import CTRL_A, CTRL_C, CTRL_D, ENTER, PASTE, PASTED, UP, on_terminal

from lockstep import LLM, SamplingParams

WINDOW = 2048
CHAT = (*COMMAND, "chat", "smollm2", "--max-model-len", str(WINDOW), "--temperature", "0", "--max-tokens", "20")
FIRST, SECOND = "Name a colour.", "And another one?"
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", max_model_len=WINDOW) as llm:
        yield llm


def answers(llm: LLM, *questions: str, system: str | None = None, params: SamplingParams = GREEDY) -> list[str]:
    """What a conversation of these questions gets."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        found.append(llm.chat(messages, params)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def piped(text: str | bytes, *flags: str, status: int = 0) -> tuple[str, str]:
    data = text.encode() if isinstance(text, str) else text
    done = subprocess.run([*CHAT, *flags], input=data, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == status, done.stderr
    assert b"Traceback" not in done.stderr
    return done.stdout.decode(), done.stderr.decode()


def test_lines_are_edited_and_remembered_and_answers_streamed(llm: LLM, tmp_path: Path) -> None:
    first, second = answers(llm, FIRST, SECOND)
    history = tmp_path / "state" / "history"
    with on_terminal([*CHAT, "--history-file", str(history)]) as terminal:
        terminal.wait_for("> ")
        terminal.press(FIRST[1:], CTRL_A, FIRST[0], ENTER)  # the first letter comes last, at the beginning of the line
        assert f"\n{first}\n> " in terminal.wait_for(f"{first}\n> ")
        terminal.press("/reset", ENTER)
        terminal.wait_for("> ")
        terminal.press(UP, UP, ENTER)  # the question again
        assert f"{FIRST}\n{first}\n" in terminal.wait_for(f"{first}\n> ")
        terminal.press(SECOND[:4], "\\", ENTER)
        terminal.wait_for("... ")
        terminal.interrupt("> ")  # a message that was begun is dropped
        terminal.press(SECOND, ENTER)
        terminal.wait_for(f"{second}\n> ")
        terminal.press(CTRL_D)
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.shown
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert history.read_text().splitlines()[:2] == [FIRST, "/reset"]
    with on_terminal([*CHAT, "--history-file", str(history)]) as terminal:
        terminal.wait_for("> ")
        terminal.press(UP)
        terminal.wait_for(SECOND)
        terminal.interrupt("> ")
        terminal.press("/exit", ENTER)
        assert terminal.wait() == 0


def test_ctrl_c_ends_the_answer_and_not_the_program(llm: LLM) -> None:
    with on_terminal([*CHAT, "--no-history"]) as terminal:
        terminal.wait_for("> ")
        terminal.press("/set max_tokens 1900", ENTER)
        terminal.wait_for("> ")
        terminal.press("/set ignore_eos true", ENTER)
        terminal.wait_for("> ")
        terminal.press(FIRST, ENTER)
        terminal.wait_for(answers(llm, FIRST)[0])
        terminal.press(CTRL_C)
        terminal.wait_for("\n> ")
        terminal.press("/reset", ENTER)
        terminal.wait_for("> ")
        terminal.press("/set max_tokens -", ENTER)
        terminal.wait_for("> ")
        terminal.press("/set ignore_eos -", ENTER)
        terminal.wait_for("> ")
        terminal.press(FIRST, ENTER)
        terminal.wait_for(f"{answers(llm, FIRST)[0]}\n> ")
        terminal.press("/exit", ENTER)
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.shown


def test_pasted_text_of_many_lines_is_one_message(llm: LLM) -> None:
    answer = answers(llm, "Name\na\ncolour.")[0]
    with on_terminal([*CHAT, "--no-history"], kind="xterm") as terminal:
        terminal.wait_for("> ")
        terminal.press(PASTE, "Name\na\ncolour.", PASTED, ENTER)
        terminal.wait_for(f"{answer}\n> ")
        terminal.press(CTRL_D)
        assert terminal.wait() == 0


def test_mistake_is_told_and_the_conversation_goes_on(llm: LLM) -> None:
    with on_terminal([*CHAT, "--no-history"]) as terminal:
        terminal.wait_for("> ")
        for typed, told in (("/rest", "did you mean /reset"), ("/set temperature hot", "temperature must be"), ("word " * 800 + "\\", "... ")):
            terminal.press(typed, ENTER)
            terminal.wait_for(told)
        terminal.press("word " * 800 + "\\", ENTER)
        terminal.wait_for("... ")
        terminal.press("word " * 800, ENTER)
        terminal.wait_for("shorten the prompt")
        terminal.press(FIRST, ENTER)
        terminal.wait_for(f"{answers(llm, FIRST)[0]}\n> ")
        terminal.press("/exit", ENTER)
        assert terminal.wait() == 0


def test_pipe_gets_the_answers_and_nothing_else(llm: LLM, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    talk = f'/system Be brief.\n{FIRST}\n\n"""\n{SECOND}\n"""\n/save {saved}\n'
    out, said = piped(talk, "-pp", "2")
    first, second = answers(llm, FIRST, SECOND, system="Be brief.")
    assert out == f"{first}\n{second}\n"
    assert said == f"saved to {saved}\n"
    messages = json.loads(saved.read_text())["messages"]
    assert [message["content"] for message in messages] == ["Be brief.", FIRST, first, SECOND, second]


def test_seed_and_parameters_change_the_next_answers(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=9)
    out, _ = piped(f"/set temperature 1.0\n/set max_tokens 9\n/seed 7\n{FIRST}\n/reset\n{FIRST}\n/exit\nnever read\n", "--system", "Be odd.")
    assert out == 2 * (answers(llm, FIRST, system="Be odd.", params=seeded)[0] + "\n")
    assert answers(llm, FIRST, system="Be odd.", params=seeded) != answers(llm, FIRST, system="Be odd.")


def test_slash_for_the_model_is_written_twice(llm: LLM) -> None:
    assert piped("//help me\n")[0] == answers(llm, "/help me")[0] + "\n"


def test_message_of_a_pipe_that_gets_no_answer_is_status_1_and_the_others_are_answered(llm: LLM) -> None:
    out, said = piped(b"\xff\n/nonsense\n" + FIRST.encode() + b"\n", status=1)
    assert out == answers(llm, FIRST)[0] + "\n"
    assert [line.split(":")[0] for line in said.splitlines()] == ["lockstep", "lockstep"]
    assert "Unicode" in said
    assert "/nonsense is not a command" in said


def test_model_cannot_steer_the_terminal() -> None:
    """What is shown has control characters as pictures; what a pipe gets has them as they are."""
    from lockstep.cli.chat import _CONTROLS

    assert "a\x1b[2Jb\x07\x9b\n\t".translate(_CONTROLS) == "a␛[2Jb␇\ufffd\n\t"
