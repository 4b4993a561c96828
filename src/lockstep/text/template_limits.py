"""What a chat template may use: steps, and the length of what it makes. Knows values and methods of Python; does not know Jinja's syntax.

Steps and lengths are functions of the template and the messages, so whether a chat is refused does not depend on how busy the machine is. A clock is
only the last resort. Whatever grows faster than what it is given (a product, a width, a replacement) is checked before it is made.
"""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jinja2

ITEM_LENGTH = 16  # an item of a list counts as so many characters: its memory, and the time to walk over it
NUMBER_BITS_MAX = 4096
INDENT_MAX = 64
_NUMBER = re.compile("[0-9]+")
_NESTED_FIELD = re.compile(r"\{[^{}]*:[^{}]*\{")
# Filters that write a whole value out as text; the others make no more than they are given.
_WRITING_FILTERS = frozenset({
    "string", "join", "tojson", "pprint", "format", "replace", "xmlattr", "urlize", "e", "escape", "forceescape", "upper", "lower", "title",
    "capitalize", "trim", "center", "indent", "wordwrap", "striptags", "truncate", "wordcount", "urlencode",
})  # fmt: skip
# Filters whose numbers are lengths: of padding, of an indentation, of rows.
_SIZED_FILTERS = frozenset({"center", "indent", "batch", "slice"})


class TemplateLimitError(jinja2.TemplateError):
    """A template went over its limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """source_max: characters of a template. steps_max: turns of loops, calls, operators and outputs of one rendering. length_max: characters and
    items of all strings and lists that it makes. seconds_max: the last resort, for steps that are long themselves."""

    source_max: int = 1 << 20
    steps_max: int = 2_000_000
    length_max: int = 1 << 27
    seconds_max: float = 10.0


class Meter:
    """What one rendering may still use."""

    __slots__ = ("_deadline", "_limits", "_steps_left", "length_left")

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._steps_left = limits.steps_max
        self.length_left = limits.length_max
        self._deadline = time.monotonic() + limits.seconds_max

    def step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise TemplateLimitError(f"it takes more than {self._limits.steps_max} steps")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"it takes more than {self._limits.seconds_max} seconds")

    def make(self, length: int) -> None:
        self.length_left -= length
        if self.length_left < 0:
            raise TemplateLimitError(f"it makes more than {self._limits.length_max} characters")

    def make_of(self, value: Any) -> None:
        """As much as a value has when it is written out: a list may hold the same long string many times over."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, Mapping):
            self.make_of(value.items())
        elif isinstance(value, list | tuple | ItemsView | KeysView | ValuesView):
            self.make(ITEM_LENGTH)
            for item in value:
                self.make_of(item)
        elif isinstance(value, range):
            self.make(ITEM_LENGTH * len(value))
        else:  # numbers are held to NUMBER_BITS_MAX
            self.make(ITEM_LENGTH)


_METER: ContextVar[Meter] = ContextVar("meter of the template that runs")


def meter() -> Meter:
    """That of the rendering which runs in this thread."""
    return _METER.get()


@contextmanager
def metered(limits: TemplateLimits) -> Iterator[None]:
    """Templates are compiled and rendered in here."""
    token = _METER.set(Meter(limits))
    try:
        yield
    finally:
        _METER.reset(token)


def whole(value: Any) -> Any:
    """An iterable as a list, so that its length is known."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def check_operator(used: Meter, operator: str, left: Any, right: Any) -> None:
    """Before it is applied."""
    if operator in ("*", "**"):
        _check_product(used, operator, left, right)
    elif operator == "%" and isinstance(left, str):
        _check_format(used, left, right if isinstance(right, tuple) else (right,))
    elif operator == "+":
        for value in (left, right):
            if isinstance(value, str | list | tuple):
                used.make(len(value) if isinstance(value, str) else ITEM_LENGTH * len(value))


def check_filter(used: Meter, name: str, values: Sequence[Any]) -> None:
    """values: what is filtered, then the filter's arguments."""
    if name in _WRITING_FILTERS:
        for value in values:
            used.make_of(value)
    if name in _SIZED_FILTERS and values:
        lines = str(values[0]).count("\n") + 1 if name == "indent" else 1
        _check_sizes(used, values[1:], lines)
    if name == "replace" and len(values) > 2:
        _check_replacement(used, str(values[0]), str(values[1]), str(values[2]))
    elif name == "join" and len(values) > 1 and isinstance(values[0], list):
        used.make(len(values[0]) * len(str(values[1])))
    elif name == "format" and values:
        _check_format(used, str(values[0]), values[1:])


def check_method(used: Meter, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Methods of strings that make more than they are given."""
    owner, name = getattr(getattr(method, "__wrapped__", method), "__self__", None), getattr(method, "__name__", "")
    if not isinstance(owner, str):
        return
    values = (*args, *kwargs.values())
    if name in ("ljust", "rjust", "center", "zfill"):
        _check_sizes(used, values)
    elif name == "expandtabs":
        _check_sizes(used, values or (8,), owner.count("\t"))
    elif name == "replace" and len(values) > 1:
        _check_replacement(used, owner, str(values[0]), str(values[1]))
    elif name == "join" and args and isinstance(args[0], list):
        used.make_of(args[0])
        used.make(len(owner) * len(args[0]))
    elif name in ("format", "format_map"):
        _check_format(used, owner, values)
    elif name == "translate":
        raise TemplateLimitError("it uses str.translate, which is not allowed")


def _check_product(used: Meter, operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > NUMBER_BITS_MAX:
            raise TemplateLimitError(f"it computes with numbers of more than {NUMBER_BITS_MAX} bits")
        return
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            before = used.length_left
            used.make_of(value)
            used.make((before - used.length_left) * max(times - 1, 0))


def _check_format(used: Meter, template: str, values: Sequence[Any]) -> None:
    """Widths in a format are lengths; "%*d" and "{:{}}" take them from the values."""
    used.make_of(list(values))
    for number in _NUMBER.findall(template):
        used.make(int(number[:12]))
    if "*" in template or _NESTED_FIELD.search(template):
        _check_sizes(used, values)


def _check_sizes(used: Meter, values: Sequence[Any], times: int = 1) -> None:
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            used.make(abs(value) * times)


def _check_replacement(used: Meter, text: str, old: str, new: str) -> None:
    used.make(text.count(old) * len(new))
