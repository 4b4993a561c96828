"""From what a caller sends as prompt or messages to token ids. Knows the forms and the vocabulary's size; does not know parameters or the engine.

Long texts are encoded on another thread, so that one large prompt does not hold up everybody's streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from lockstep.errors import InvalidRequestError
from lockstep.text.tokenizer import Tokenizer

INLINE_CHARACTERS_MAX = 8192  # about 2 ms of encoding
Encoded = TypeVar("Encoded")

_ROLES = ("system", "developer", "user", "assistant", "tool")
_PASSED_ON = ("name", "tool_call_id")
_RESERVED_VARIABLES = frozenset({"messages", "conversation", "chat_template", "add_generation_prompt", "tools", "documents", "tokenize", "self"})


async def completion_prompts(prompt: str | list[Any], tokenizer: Tokenizer, *, add_special_tokens: bool, prompts_max: int) -> list[tuple[int, ...]]:
    """Token ids of each prompt. `prompt`: a string, a list of strings, of ids or of lists of ids.

    Raises InvalidRequestError: another form, more than `prompts_max` prompts, ids out of range, a prompt without tokens.
    """
    if isinstance(prompt, str) or (prompt and all(type(item) is int for item in prompt)):
        items: list[Any] = [prompt]
    else:
        items = prompt
    if not 1 <= len(items) <= prompts_max:
        raise InvalidRequestError(f"prompt must hold from 1 to {prompts_max} prompts, got {len(items)}", param="prompt")
    character_count = sum(len(item) for item in items if isinstance(item, str))
    return await _beside(lambda: [_one_prompt(item, tokenizer, add_special_tokens) for item in items], character_count)


def _one_prompt(item: object, tokenizer: Tokenizer, add_special_tokens: bool) -> tuple[int, ...]:
    if isinstance(item, str):
        ids = tuple(tokenizer.encode(item, add_special_tokens=add_special_tokens))
    elif isinstance(item, list):
        ids = checked_ids(item, tokenizer.vocab_size, "prompt")
    else:
        raise InvalidRequestError(f"prompt must be text or token ids, or a list of one kind of them, got {item!r:.80}", param="prompt")
    if not ids:
        raise InvalidRequestError("the prompt has no tokens; send at least one", param="prompt")
    return ids


async def text_prompt(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Token ids of `text`, perhaps none."""
    return tuple(await _beside(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text)))


def checked_ids(ids: Sequence[object], vocab_size: int, name: str) -> tuple[int, ...]:
    """`ids` as token ids. Raises InvalidRequestError for what is not an integer in [0, vocab_size)."""
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"token ids must be integers from 0 to {vocab_size - 1}, got {token_id!r:.80}", param=name)
    return tuple(ids)  # type: ignore[arg-type]


async def chat_prompt(
    messages: list[Any], tokenizer: Tokenizer, *, variables: Mapping[str, Any] | None, add_generation_prompt: bool, add_special_tokens: bool
) -> tuple[int, ...]:
    """Token ids of the rendered chat template. Raises InvalidRequestError for messages that are malformed or that the template refuses."""
    plain = plain_messages(messages)
    given = dict(variables or {})
    for name in given:
        if name in _RESERVED_VARIABLES or not name.isidentifier():
            raise InvalidRequestError(f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")

    def encode() -> list[int]:
        text = tokenizer.render_chat(plain, add_generation_prompt=add_generation_prompt, **given)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    ids = tuple(await _beside(encode, sum(len(message["content"]) for message in plain)))
    if not ids:
        raise InvalidRequestError("the chat template made a prompt without tokens of these messages", param="messages")
    return ids


def plain_messages(messages: list[Any]) -> list[dict[str, str]]:
    """`messages` with text as content; several text parts are joined by a newline, as vLLM does. Raises InvalidRequestError."""
    if not messages:
        raise InvalidRequestError("messages must hold at least one message, got an empty list", param="messages")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} must be an object with role and content, got {message!r:.80}", param="messages")
    if message.get("role") not in _ROLES:
        raise InvalidRequestError(f"{where}.role must be one of {', '.join(_ROLES)}, got {message.get('role')!r:.80}", param="messages")
    plain = {"role": message["role"], "content": _text_of(message.get("content"), where)}
    for name, value in message.items():
        if name in plain or value is None or value == []:
            continue
        if name not in _PASSED_ON or not isinstance(value, str):
            raise InvalidRequestError(f"{where}.{name} is not supported, and ignoring it could change the answer; leave it out", param="messages")
        plain[name] = value
    return plain


def _text_of(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}.content must be a string or a list of text parts, got {content!r:.80}", param="messages")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequestError(f"{where}.content[{index}] must be a part of type text with its text, got {kind!r:.80}", param="messages")
        texts.append(part["text"])
    return "\n".join(texts)


async def _beside(encode: Callable[[], Encoded], character_count: int) -> Encoded:
    if character_count <= INLINE_CHARACTERS_MAX:
        return encode()
    return await asyncio.to_thread(encode)
