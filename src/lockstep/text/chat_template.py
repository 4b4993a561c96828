"""Chat templates: Jinja programs that come with a model. Knows the variables that templates rely on (those of transformers' apply_chat_template) and
how an answer is continued; does not know tokens, nor how a template is kept within bounds (template_sandbox)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from lockstep.errors import InvalidRequestError
from lockstep.text.template_limits import TemplateLimitError, TemplateLimits, metered
from lockstep.text.template_sandbox import environment

DEFAULT = "default"
TOOLS = "tool_use"
OTHER_TEMPLATES_KEPT = 8
# What a template may raise when it is handed messages of a shape it was not written for.
_TEMPLATE_FAULTS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
# Where models look for a message's reasoning; what is sent under one name is found under the others that templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # the very text that transformers uses: a template may look at what it is given


class ChatTemplates:
    """The templates of one model by name ("default", and "tool_use" for requests with tools). default: the first one's source, or None.
    Each is compiled when it is first used; of others, that come with a request, the last few are kept."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], limits: TemplateLimits | None = None) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._limits = limits or TemplateLimits()
        self._compiled = functools.lru_cache(maxsize=len(self._sources) + OTHER_TEMPLATES_KEPT)(self._compile)
        self.default = self._sources.get(DEFAULT)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        chat_template: str | None = None,
        continue_final_message: bool | str = False,
    ) -> str:
        """The prompt's text. Keys of a message whose value is None are left out, as if not sent.

        chat_template: the name of one of the model's templates, or a template's source; None takes "tool_use" for requests with tools if the model
        has it, else "default". continue_final_message: the text ends inside the last message, to be gone on with; a string names the message's
        field that is continued, "content" if True. Raises InvalidRequestError with the template's own words.
        """
        name, source = self._chosen(chat_template, variables)
        sent = _plain_messages(messages)
        _check_lists(variables)
        if continue_final_message and variables.get("add_generation_prompt"):
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other: either the last message goes on or a new one begins; "
                "set add_generation_prompt to false",
                param="continue_final_message",
            )
        final = _mark_final(sent, source, "content" if continue_final_message is True else continue_final_message) if continue_final_message else None
        given = {"tools": None, "documents": None, **self._special_tokens, **{key: _plain(value) for key, value in variables.items()}}
        text = self._run(name, source, {**given, "messages": sent})
        return text if final is None else _cut_at_mark(text, final)

    def _chosen(self, chat_template: str | None, variables: Mapping[str, Any]) -> tuple[str | None, str]:
        """The template's name, None if it is not one of the model's, and its source."""
        if chat_template is not None and chat_template not in self._sources:
            return None, chat_template
        name = chat_template or (TOOLS if variables.get("tools") is not None and TOOLS in self._sources else DEFAULT)
        if name not in self._sources:
            others = f"; it has templates named {', '.join(sorted(self._sources))}: name one" if self._sources else ""
            raise InvalidRequestError(
                f"this model has no chat template{others or '; send a prompt to the completions endpoint, or name a template'}", param="messages"
            )
        return name, self._sources[name]

    def _run(self, name: str | None, source: str, variables: Mapping[str, Any]) -> str:
        try:
            with metered(self._limits):
                return self._compiled(source).render(**variables)
        except _TEMPLATE_FAULTS as error:
            whose = "the model's chat template" if name is not None else "the chat template"
            raise InvalidRequestError(f"{whose} refused the messages: {error}", param="messages") from error

    def _compile(self, source: str) -> jinja2.Template:
        if len(source) > self._limits.source_max:
            raise TemplateLimitError(f"it has {len(source)} characters, more than {self._limits.source_max}")
        return environment().from_string(source)


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidRequestError(f"messages must be a list of objects, got {messages!r:.200}", param="messages")
    if not messages:
        raise InvalidRequestError("messages must hold at least one message, got none", param="messages")
    return [_with_reasoning({key: _plain(value) for key, value in message.items() if value is not None}) for message in messages]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _check_lists(variables: Mapping[str, Any]) -> None:
    for name in ("tools", "documents"):
        value = variables.get(name)
        if value is not None and (not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value)):
            raise InvalidRequestError(f"{name} must be a list of objects, got {value!r:.200}", param=name)


def _plain(value: Any) -> Any:
    """A value as JSON would have it. A template sees nothing whose methods could do harm: any other object is a text that names its type."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    return f"<{type(value).__name__}>"


def _mark_final(messages: list[dict[str, Any]], source: str, field: str) -> str:
    """Puts the mark behind the text that is to go on, and returns that text."""
    last = messages[-1]
    value = last.get(field)
    if value is None:
        raise InvalidRequestError(f"continue_final_message is set, but the last message has no {field!r} to continue", param="continue_final_message")
    fields = [name for name in _REASONING if last.get(name) == value] if field in _REASONING else [field]
    if not any(name in source for name in fields):
        raise InvalidRequestError(
            f"continue_final_message names {field!r}, which the chat template does not read; it can continue only what it writes",
            param="continue_final_message",
        )
    if isinstance(value, list | tuple):
        part = next((part for part in reversed(value) if isinstance(part, dict) and isinstance(part.get("text"), str)), None)
        if part is None:
            raise InvalidRequestError("continue_final_message is set, but the last message has no text to continue", param="continue_final_message")
        text = str(part["text"])
        part["text"] = text + _MARK
        return text
    if not isinstance(value, str):
        raise InvalidRequestError(f"continue_final_message needs text to continue, got {value!r:.80}", param="continue_final_message")
    for name in fields:
        last[name] = value + _MARK
    return value


def _cut_at_mark(text: str, final: str) -> str:
    """Up to the mark. Where the template has trimmed the message, the spaces before it are not the message's either."""
    place = text.rfind(_MARK.strip())
    if place < 0 or final.strip() not in text:
        raise InvalidRequestError(
            "continue_final_message is set, but the chat template does not write the last message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()
