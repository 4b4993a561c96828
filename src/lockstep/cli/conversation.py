"""`Conversation`: what was said, with which parameters the next answer is sampled, and the commands that change either.

Knows commands in words; does not know terminals, engines or how an answer is made.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.params import SamplingParams
from lockstep.errors import ConfigError, InvalidRequestError
from lockstep.vllm_settings import nearest

PARAMETERS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "n")
"""Of a conversation there is one."""

HELP = """\
/system TEXT       what the model is told before the conversation; alone: show it; - takes it away
/seed N            sample the next answers with this seed; - draws one for each
/set NAME VALUE    a sampling parameter, VALUE as in JSON: /set temperature 0.2; alone: show them; - for VALUE: as at the start
/reset             forget what was said; the system text stays
/save FILE         write the conversation to a file, as JSON
/help              this
/exit              end; so does the end of input (Ctrl-D)
A line that ends with a backslash goes on in the next one, and \"\"\" begins and ends a text of many lines. //... says /... to the model.
Ctrl-C ends an answer; what there is of it stays."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a command has to say. ended: the conversation is over."""

    text: str = ""
    ended: bool = False


class Conversation:
    """params: of its answers. about: what a saved file says of the model."""

    def __init__(self, params: SamplingParams, *, system: str | None, about: Mapping[str, Any]) -> None:
        self.params = params
        self.messages: list[dict[str, str]] = []
        self._first = params
        self._system = system
        self._about = dict(about)
        self._saved: set[Path] = set()
        self._commands: dict[str, Callable[[str], Reply]] = {
            "/system": self._set_system,
            "/seed": self._seed,
            "/set": self._set,
            "/reset": self._reset,
            "/save": self._save,
            "/help": lambda _: Reply(HELP),
            "/exit": lambda _: Reply(ended=True),
            "/quit": lambda _: Reply(ended=True),
        }

    @property
    def commands(self) -> tuple[str, ...]:
        return tuple(self._commands)

    def prompt(self, text: str) -> list[dict[str, str]]:
        """The messages that ask for an answer to `text`."""
        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*head, *self.messages, {"role": "user", "content": text}]

    def answered(self, text: str, answer: str) -> None:
        """Keep a question with its answer."""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> Reply:
        """Raises ConfigError for a command that there is not or cannot be done, InvalidRequestError for a value out of range."""
        name, _, rest = line.strip().partition(" ")
        if name not in self._commands:
            raise ConfigError(f"{name} is not a command{nearest(name, self.commands)}; /help lists them, and //... says /... to the model")
        return self._commands[name](rest.strip())

    def _set_system(self, text: str) -> Reply:
        if not text:
            return Reply("there is no system text" if self._system is None else self._system)
        self._system = None if text == "-" else text
        return Reply()

    def _seed(self, text: str) -> Reply:
        if not text:
            return Reply("each answer draws its seed" if self.params.seed is None else f"seed {self.params.seed}")
        return self._set(f"seed {text}")

    def _set(self, text: str) -> Reply:
        if not text:
            return Reply("\n".join(f"{name} {json.dumps(getattr(self.params, name))}" for name in PARAMETERS))
        name, _, written = text.partition(" ")
        name, written = name.replace("-", "_"), written.strip()
        if name not in PARAMETERS:
            raise InvalidRequestError(f"{name!r} is not a sampling parameter{nearest(name, PARAMETERS)}; /set lists them", param=name)
        if not written:
            return Reply(f"{name} {json.dumps(getattr(self.params, name))}")
        none = None if name == "seed" else getattr(self._first, name)
        changed: dict[str, Any] = {name: none if written == "-" else _value(written)}
        self.params = dataclasses.replace(self.params, **changed)
        return Reply()

    def _reset(self, text: str) -> Reply:
        if text:
            raise ConfigError(f"/reset takes no words, got {text!r:.80}")
        self.messages = []
        return Reply()

    def _save(self, text: str) -> Reply:
        """Whole or not at all. A file that was not saved by this conversation is not written over."""
        if not text:
            raise ConfigError("/save needs the name of a file")
        path = Path(text).expanduser().absolute()
        if path.exists() and path not in self._saved:
            raise ConfigError(f"{path} exists; name another file")
        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        parameters = {name: getattr(self.params, name) for name in PARAMETERS}
        told = {**self._about, "sampling_params": parameters, "messages": [*head, *self.messages]}
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", errors="backslashreplace")
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        self._saved.add(path)
        return Reply(f"saved to {path}")


def _value(written: str) -> Any:
    """As JSON; what is no JSON is text."""
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written
