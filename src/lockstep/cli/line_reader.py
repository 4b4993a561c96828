"""Where a conversation's lines come from: a terminal, with editing and history, or anything else, without a word. Both give whole messages.

Knows terminals and how a message is spread over lines; does not know what is said.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

BLOCK = '"""'
HISTORY_LINES_MAX = 1000


class EndOfInput(Exception):
    """There are no more messages."""


class StreamReader:
    """Reads messages from a pipe or a file."""

    def __init__(self, stream: TextIOWrapper) -> None:
        stream.reconfigure(errors="surrogateescape")  # bytes that are no text: the request that holds them is refused, not the ones behind it
        self._stream = stream

    def message(self) -> str:
        """Raises EndOfInput."""
        return read_message(lambda _: self._line())

    def close(self) -> None:
        """Nothing is held."""

    def _line(self) -> str:
        line = self._stream.readline()
        if not line:
            raise EndOfInput
        return line.removesuffix("\n")


class TerminalReader:
    """Reads messages from the terminal. history: a file that earlier lines come from and these go to, for this user's eyes alone; None keeps none.
    words: what the tab key completes at the beginning of a line."""

    def __init__(self, *, history: Path | None, words: Sequence[str]) -> None:
        self._history = history
        self._readline: Any = None
        with contextlib.suppress(ImportError):  # a Python that was built without it: no editing, no history
            import readline

            self._readline = readline
            readline.set_completer_delims(" \t\n")
            readline.set_completer(lambda text, state: _completion(words, text, state))
            readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
            readline.set_history_length(HISTORY_LINES_MAX)
            if history is not None:
                with contextlib.suppress(OSError):  # none yet, or not ours: a conversation needs no past
                    readline.read_history_file(history)

    def message(self) -> str:
        """Raises EndOfInput at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        return read_message(self._line)

    def close(self) -> None:
        """Keep the history."""
        if self._readline is None or self._history is None:
            return
        try:
            self._history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            self._readline.write_history_file(self._history)
            self._history.chmod(0o600)
        except OSError as error:
            print(f"the history is not kept: {self._history}: {error.strerror}", file=sys.stderr)

    def _line(self, prompt: str) -> str:
        try:
            return input(prompt)
        except EOFError:
            raise EndOfInput from None


def read_message(line: Callable[[str], str]) -> str:
    """One message out of lines: a backslash at the end of a line goes on in the next one, and a line that begins with three quotation marks begins a
    block that goes on to the next three. line: gives the next line, shown a prompt; its EndOfInput ends a message that has begun, too."""
    first = line("> ")
    if first.lstrip().startswith(BLOCK):
        return _block(first.lstrip()[len(BLOCK) :], line)
    lines = [first]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(line("... "))
        except EndOfInput:
            break
    return "\n".join(lines)


def _block(begun: str, line: Callable[[str], str]) -> str:
    lines = [begun]
    while BLOCK not in lines[-1]:
        try:
            lines.append(line("... "))
        except EndOfInput:
            break
    lines[-1] = lines[-1].split(BLOCK, 1)[0]
    return "\n".join(lines).strip("\n")


def _completion(words: Sequence[str], text: str, state: int) -> str | None:
    found = [word for word in words if text and word.startswith(text)]
    return f"{found[state]} " if state < len(found) else None
