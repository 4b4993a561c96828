"""`FlagParser`: argparse that knows which flags it does not have. A flag of vLLM that asks for what Lockstep does anyway is dropped, another one is
refused with what to do instead, and one that nobody knows is refused with the nearest that there is.

Knows how flags are written; what they mean is `vllm_settings`'.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from lockstep.errors import ConfigError, UnsupportedError
from lockstep.vllm_settings import FOREIGN, GLUED, SHORT, nearest

_WORDS = {"true": True, "false": False}


class FlagParser(argparse.ArgumentParser):
    """Raises UnsupportedError or ConfigError where argparse would end the process over a flag; the commands' parsers are of this class too."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(None if args is None else self._own(list(args)), namespace)

    def _own(self, arguments: Sequence[str]) -> list[str]:
        """`arguments` without vLLM's flags that ask for what Lockstep does anyway."""
        own: list[str] = []
        rest = list(arguments)
        while rest:
            argument = rest.pop(0)
            if argument == "--" or self._is_command(argument):  # what follows is a command's, or no flags at all
                return [*own, argument, *rest]
            flag = argument.split("=", 1)[0]
            if not _looks_like_flag(argument) or self._has(flag) or (" " in argument and _keyword(flag)[0] not in FOREIGN):
                own.append(argument)
            else:
                rest = self._without(argument, rest)
        return own

    def _is_command(self, argument: str) -> bool:
        return any(isinstance(action, argparse._SubParsersAction) and argument in action.choices for action in self._actions)

    def _has(self, flag: str) -> bool:
        """The flag, or one that begins like it (argparse takes these), or a short one with its value behind it."""
        names = self._option_string_actions
        return flag in names or (flag.startswith("--") and any(name.startswith(flag) for name in names)) or (flag[:2] in names and flag[1] != "-")

    def _without(self, argument: str, rest: list[str]) -> list[str]:
        """What is left of `rest` once a flag that is not one of this parser's is read off, with its value."""
        flag, equals, value = argument.partition("=")
        if flag[:2] in GLUED and not equals:
            flag, equals, value = flag[:2], flag[2:], flag[2:]
        name, negated = _keyword(flag)
        if name not in FOREIGN:
            raise ConfigError(f"{flag} is not a flag of {self.prog}{nearest(flag, self._flags())}")
        setting = FOREIGN[name]
        given: object = value if equals else None
        if not equals and rest and (rest[0].lower() in _WORDS if setting.switch else not _looks_like_flag(rest[0])):
            given, rest = rest[0], rest[1:]
        if setting.switch:
            given = _WORDS.get(str(given).lower(), True) != negated
        if given is None or not setting.asks_for_nothing(given):
            called = f"{flag} (--{name.replace('_', '-')})" if flag in SHORT else flag
            raise UnsupportedError(f"{called}: {setting.reason}")
        return rest

    def _flags(self) -> list[str]:
        return [*(name for name in self._option_string_actions if name.startswith("--")), *(f"--{name.replace('_', '-')}" for name in FOREIGN)]


def _looks_like_flag(argument: str) -> bool:
    """As argparse sees it: a dash that does not begin a number or a text with spaces."""
    if len(argument) < 2 or argument[0] != "-" or " " in argument.split("=", 1)[0]:
        return False
    return not argument[1:2].isdigit() and argument[1] != "."


def _keyword(flag: str) -> tuple[str, bool]:
    """The keyword that a flag spells, and whether it is switched off by it. vLLM takes underscores for dashes, and parts of a setting after a dot."""
    flag = flag.split(".", 1)[0]
    if flag in SHORT:
        return SHORT[flag], False
    name = flag.lstrip("-").replace("-", "_")
    return (name.removeprefix("no_"), True) if name.startswith("no_") and name not in FOREIGN else (name, False)
