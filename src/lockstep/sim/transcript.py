"""Transcripts: scenario tests as text, in the manner of etcd-raft's data-driven tests.

    # what is shown, and why
    command name=value name=value
    a line of input, where the command takes some
    ----
    what the real parts said to it
    (a blank line ends the answer)

`parse` reads such a file, `play` runs it and compares, `Played.text` is the file as it would have to read. It knows the format and
that errors of Lockstep's own are answers too; what the commands are is `transcript_engine`'s and `transcript_tables`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lockstep.errors import InvalidRequestError, LockstepError

RULE = "----"
"""Stands between what is asked and what is answered."""

OUTPUT = "output"
"""`Played.caught_by` where no check raised: only the answer itself is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One line of a transcript, or of a command's input: a word and its arguments. line: where it stands, counted from 1."""

    word: str
    arguments: Mapping[str, str]
    line: int

    @staticmethod
    def parse(text: str, line: int) -> Command:
        word, *parts = text.split()
        arguments: dict[str, str] = {}
        for part in parts:
            name, separator, value = part.partition("=")
            if not separator or name in arguments:
                raise InvalidRequestError(f"line {line}: expected name=value, each name once, got {part!r}")
            arguments[name] = value
        return Command(word=word, arguments=arguments, line=line)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.arguments.get(name, default)
        if value is None:
            raise InvalidRequestError(f"line {self.line}: {self.word} needs {name}=")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        return int(self.text(name, None if default is None else str(default)))

    def flag(self, name: str, default: bool) -> bool:
        return {"on": True, "yes": True, "off": False, "no": False}[self.text(name, "on" if default else "off")]

    def numbers(self, name: str, default: str | None = None) -> list[int]:
        """`4,5`, `0..3` for 0 1 2 (half-open), `7*4` for 7 7 7 7, and lists of these; nothing or `-` for none."""
        values: list[int] = []
        for part in filter(lambda part: part not in ("", "-"), self.text(name, default).split(",")):
            if ".." in part:
                low, high = part.split("..")
                values.extend(range(int(low), int(high)))
            elif "*" in part:
                value, count = part.split("*")
                values.extend([int(value)] * int(count))
            else:
                values.append(int(part))
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """lead: comments and blank lines above it, as they stand. asked: the command line and its input, as they stand."""

    lead: str
    asked: str
    command: Command
    body: tuple[Command, ...]
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    cases: tuple[Case, ...]
    tail: str


class Commands(Protocol):
    """What carries commands out. Raises InvalidRequestError for one that it does not know."""

    def carry_out(self, command: Command, body: tuple[Command, ...]) -> str:
        """The answer, lines without a blank one among them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """text: the transcript as it came out. differs_at: the line of the first command with another answer than expected, or None.
    caught_by: the class of the first error that nobody expected, else OUTPUT; of meaning where something differs."""

    text: str
    differs_at: int | None
    caught_by: str


def parse(text: str) -> Transcript:
    """Raises InvalidRequestError for text that is not a transcript."""
    cases = []
    lead: list[str] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].strip() or lines[at].startswith("#"):
            lead.append(lines[at])
            at += 1
            continue
        first = at
        while at < len(lines) and lines[at] != RULE:
            at += 1
        if at == len(lines):
            raise InvalidRequestError(f"line {first + 1}: {lines[first]!r} has no {RULE} below it")
        asked = lines[first:at]
        answer_from = at + 1
        at = answer_from
        while at < len(lines) and lines[at].strip():
            at += 1
        command, *body = (Command.parse(line, first + i + 1) for i, line in enumerate(asked))
        cases.append(Case(lead=_joined(lead), asked=_joined(asked), command=command, body=tuple(body), expected="\n".join(lines[answer_from:at])))
        lead = []
    return Transcript(cases=tuple(cases), tail=_joined(lead))


def play(transcript: Transcript, commands: Commands, *, through_errors: bool = False) -> Played:
    """Carries out every command. An error that was not expected ends it, unless through_errors (for writing a transcript anew): what comes after
    a broken engine says nothing. Errors that are not Lockstep's own propagate, and so do mistakes in the transcript itself (InvalidRequestError)."""
    out: list[str] = []
    differs_at, caught_by = None, OUTPUT
    for case in transcript.cases:
        answer, error = _answer(case, commands)
        out.append(f"{case.lead}{case.asked}{RULE}\n{answer}\n")
        if answer != case.expected:
            differs_at = differs_at or case.command.line
            if error is not None and not case.expected.startswith(error):
                caught_by = error if caught_by == OUTPUT else caught_by
                if not through_errors:
                    break
    return Played(text="".join(out) + transcript.tail, differs_at=differs_at, caught_by=caught_by)


def _answer(case: Case, commands: Commands) -> tuple[str, str | None]:
    """What came back, and the class of the error if it was one."""
    try:
        return commands.carry_out(case.command, case.body), None
    except InvalidRequestError:
        raise
    except LockstepError as error:
        name = type(error).__name__
        return f"{name}: {error}", name


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
