"""A file of prompts, one JSON object a line: reading it line by line, and what one line asks for.

Knows the fields of a line and their types; ranges are `SamplingParams`' own. Does not know tokenizers, engines, or who answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from lockstep.core.params import SamplingParams
from lockstep.errors import InvalidRequestError
from lockstep.vllm_settings import nearest

LINE_BYTES_MAX = 32 << 20
"""A longer line gets an error instead of an answer; memory stays bounded whatever the file holds."""

PROMPTS = ("prompt", "messages", "prompt_token_ids")
OTHERS = ("id", "priority", "tools", "chat_template_kwargs")
PARAMETERS = tuple(field.name for field in dataclasses.fields(SamplingParams))


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLine:
    """index: which request of the file, from 0; lines of blanks are none. number: of the line, from 1. digest: of its bytes. end: how far into the
    file it reaches, in bytes. data: None if it is longer than LINE_BYTES_MAX."""

    index: int
    number: int
    digest: str
    end: int
    data: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRequest:
    """What one line asks for: `messages`, or else `prompt` (text, or {"prompt_token_ids": ids}). id: the line's own, or its index."""

    id: str | int
    prompt: str | Mapping[str, Any] | None
    messages: list[Any] | None
    params: SamplingParams
    priority: int
    tools: list[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None


def read_lines(stream: BinaryIO) -> Iterator[RawLine]:
    """The lines that are not blank. Never holds more than one of them."""
    index, number, end = 0, 0, 0
    while piece := stream.readline(LINE_BYTES_MAX):
        number += 1
        hasher = hashlib.blake2b(digest_size=8)
        data: bytes | None = piece
        end += len(piece)
        while not piece.endswith(b"\n") and len(piece) == LINE_BYTES_MAX:
            hasher.update(piece)
            piece, data = stream.readline(LINE_BYTES_MAX), None
            end += len(piece)
        if data is not None and not data.strip():
            continue
        hasher.update(piece.rstrip(b"\r\n"))
        yield RawLine(index=index, number=number, digest=hasher.hexdigest(), end=end, data=data)
        index += 1


def read_request(line: RawLine, defaults: SamplingParams, *, chat: bool) -> LineRequest:
    """What the line asks for. defaults: of parameters that it leaves out. chat: a text prompt is a user's message.
    Raises InvalidRequestError: no JSON object, a field that nobody knows or of another type, none or several of the three kinds of prompt."""
    fields = {name: value for name, value in _object(line).items() if value is not None}
    given = [name for name in PROMPTS if name in fields]
    if len(given) != 1:
        raise InvalidRequestError(f"a line needs one of {', '.join(PROMPTS)}, got {' and '.join(given) or 'none of them'}", param="prompt")
    known = (*PROMPTS, *OTHERS, *PARAMETERS)
    for name in fields:
        if name not in known:
            raise InvalidRequestError(f"{name!r} is not a field of a line{nearest(name, known)}", param=name)
    prompt, messages = _prompt(fields, chat=chat)
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        if name in fields and (messages is None or not isinstance(fields[name], kind)):
            raise InvalidRequestError(f"{name} goes with messages and is a JSON {'array' if kind is list else 'object'}", param=name)
    priority = fields.get("priority", 0)
    if type(priority) is not int or abs(priority) >= 1 << 31:
        raise InvalidRequestError(f"priority must be an integer of 32 bits, got {priority!r:.80}", param="priority")
    return LineRequest(
        id=line_id(fields, line.index),
        prompt=prompt,
        messages=messages,
        params=dataclasses.replace(defaults, **{name: fields[name] for name in PARAMETERS if name in fields}),
        priority=priority,
        tools=fields.get("tools"),
        chat_template_kwargs=fields.get("chat_template_kwargs"),
    )


def named(line: RawLine) -> str | int:
    """The id of a line whatever else is wrong with it: its own if one can be read, else its index."""
    try:
        return line_id(_object(line), line.index)
    except InvalidRequestError:
        return line.index


def line_id(fields: Mapping[str, Any], index: int) -> str | int:
    given = fields.get("id")
    if given is None:
        return index
    if isinstance(given, bool) or not isinstance(given, (str, int)):
        raise InvalidRequestError(f"id must be text or an integer, got {given!r:.80}", param="id")
    return given


def _object(line: RawLine) -> dict[str, Any]:
    if line.data is None:
        raise InvalidRequestError(f"line {line.number} is longer than {LINE_BYTES_MAX} bytes; split it")
    try:
        fields = json.loads(line.data.decode("utf-8-sig"), parse_constant=_no_number, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"line {line.number} must be a JSON object in UTF-8: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"line {line.number} must be a JSON object, got a JSON {type(fields).__name__}")
    return fields


def _prompt(fields: Mapping[str, Any], *, chat: bool) -> tuple[str | Mapping[str, Any] | None, list[Any] | None]:
    if "messages" in fields:
        messages = fields["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            raise InvalidRequestError(f"messages must be a JSON array of at least one object, got {messages!r:.80}", param="messages")
        return None, messages
    if "prompt_token_ids" in fields:
        ids = fields["prompt_token_ids"]
        if not isinstance(ids, list) or not all(type(item) is int for item in ids):
            raise InvalidRequestError(f"prompt_token_ids must be a JSON array of integers, got {ids!r:.80}", param="prompt_token_ids")
        return {"prompt_token_ids": ids}, None
    if not isinstance(fields["prompt"], str):
        raise InvalidRequestError(f"prompt must be text, got {fields['prompt']!r:.80}", param="prompt")
    return (None, [{"role": "user", "content": fields["prompt"]}]) if chat else (fields["prompt"], None)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return fields
