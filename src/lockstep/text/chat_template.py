"""Chat templates: Jinja programs that come with a model, run in a sandbox. Knows the names and filters that templates rely on
(those of transformers' apply_chat_template); does not know tokens."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from lockstep.errors import InvalidRequestError

DEFAULT = "default"
TOOLS = "tool_use"
# What a template may raise when it is handed messages of a shape it was not written for.
_TEMPLATE_FAULTS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplates:
    """The templates of one model by name ("default", and "tool_use" for requests with tools). default: the first one's source, or None.
    Each is compiled when it is first used."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}
        self.default = self._sources.get(DEFAULT)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Raises InvalidRequestError with the template's own words. Keys of a message whose value is None are left out, as if not sent."""
        name = TOOLS if variables.get("tools") and TOOLS in self._sources else DEFAULT
        if name not in self._sources:
            raise InvalidRequestError(
                "this model has no chat template; send a prompt to the completions endpoint, or name a template", param="messages"
            )
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequestError(f"messages must be a list of objects, got {messages!r:.200}", param="messages")
        sent = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            if name not in self._compiled:
                self._compiled[name] = _environment().from_string(self._sources[name])
            return self._compiled[name].render(**{"tools": None, "documents": None, **self._special_tokens, **variables, "messages": sent})
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequestError(f"the model's chat template refused the messages: {error}", param="messages") from error


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's part for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja reads the attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes HTML, which models have not seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.datetime.now().strftime(date_format)
