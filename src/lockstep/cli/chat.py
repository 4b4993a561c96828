"""`lockstep chat MODEL`: talk to a model in the terminal. /help lists what can be said to the program.

Standard output gets the answers. Where it is no terminal, or standard input is none, there are no prompts: each message of the input is answered in
turn, and the exit status is 1 if one got no answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import cast

from lockstep.async_llm import AsyncLLM
from lockstep.cli.conversation import Conversation
from lockstep.cli.flags import add_engine_flags, engine_config
from lockstep.cli.line_reader import EndOfInput, StreamReader, TerminalReader
from lockstep.cli.sampling_flags import add_sampling_flags, sampling_params
from lockstep.errors import LockstepError

HISTORY_FILE = Path("~/.local/state/lockstep/chat_history")

_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Control characters as pictures of themselves: a model must not be able to steer a terminal that shows what it says."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("chat", help="talk to a model in the terminal", description=__doc__)
    add_engine_flags(parser)
    talk = parser.add_argument_group("conversation")
    talk.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    talk.add_argument("--history-file", type=Path, default=HISTORY_FILE, help="lines typed earlier (default: %(default)s)")
    talk.add_argument("--no-history", dest="history_file", action="store_const", const=None, help="keep no lines")
    add_sampling_flags(parser, max_tokens=None)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    sampling_params(arguments)  # what is out of range is refused before anything is loaded
    config = engine_config(arguments)
    talking = sys.stdin.isatty() and sys.stdout.isatty()
    llm = AsyncLLM.from_engine_args(config)
    with contextlib.ExitStack() as closing:
        closing.callback(llm.shutdown)
        params = sampling_params(arguments, llm.get_default_sampling_params())
        conversation = Conversation(params, system=arguments.system, about={"model": config.model, "fingerprint": llm.fingerprint})
        history = None if arguments.history_file is None else arguments.history_file.expanduser()
        reader = TerminalReader(history=history, words=conversation.commands) if talking else StreamReader(cast(TextIOWrapper, sys.stdin))
        closing.callback(reader.close)
        if talking:
            print(f"{config.model}. /help lists commands, Ctrl-D ends.")
        runner = closing.enter_context(asyncio.Runner())
        return Chat(llm, conversation, reader, runner, talking=talking).run()


class Chat:
    """Reads, answers, until the end. talking: to a person at a terminal."""

    def __init__(
        self, llm: AsyncLLM, conversation: Conversation, reader: TerminalReader | StreamReader, runner: asyncio.Runner, *, talking: bool
    ) -> None:
        self._llm = llm
        self._conversation = conversation
        self._reader = reader
        self._runner = runner
        self._talking = talking
        self._is_shown = sys.stdout.isatty()
        self._failed = False
        self._answer_count = 0

    def run(self) -> int:
        """The exit status. Raises the engine's error if it stops."""
        while True:
            try:
                text = self._reader.message()
            except EndOfInput:
                if self._talking:
                    print()
                return 1 if self._failed else 0
            except KeyboardInterrupt:
                if not self._talking:
                    raise
                print("\n(Ctrl-D or /exit ends)")
                continue
            try:
                if self._take(text):
                    return 1 if self._failed else 0
            except LockstepError as error:
                if not self._llm.is_running:
                    raise
                self._failed = self._failed or not self._talking
                print(f"lockstep: {error}", file=sys.stderr, flush=True)

    def _take(self, text: str) -> bool:
        """Do what a message says; True if that is to end."""
        stripped = text.strip()
        if not stripped:
            return False
        if stripped.startswith("/") and not stripped.startswith("//"):
            reply = self._conversation.command(stripped)
            if reply.text:
                print(reply.text, file=sys.stdout if self._talking else sys.stderr, flush=True)
            return reply.ended
        self._answer(text if not stripped.startswith("//") else stripped[1:])
        return False

    def _answer(self, text: str) -> None:
        """Ask the model; what there is of an answer when Ctrl-C ends it stays in the conversation."""
        said: list[str] = []
        try:
            self._runner.run(self._stream(text, said))
        except KeyboardInterrupt:
            if not self._talking:
                raise
            self._write("" if said else "\n")  # the terminal itself shows ^C
        finally:
            if said:
                self._conversation.answered(text, "".join(said))
                self._write("\n")

    async def _stream(self, text: str, said: list[str]) -> None:
        """said: takes the answer's text as it comes."""
        self._answer_count += 1
        length = 0
        answers = self._llm.chat(self._conversation.prompt(text), self._conversation.params, f"chat-{self._answer_count}")
        async with contextlib.aclosing(answers):
            async for output in answers:
                new = output.outputs[0].text[length:]
                if new or not said:
                    said.append(new)
                    length += len(new)
                    self._write(new)

    def _write(self, text: str) -> None:
        sys.stdout.write(text.translate(_CONTROLS) if self._is_shown else text)
        sys.stdout.flush()
