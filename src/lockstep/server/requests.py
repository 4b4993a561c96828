"""Request bodies as typed structs, and how bytes become one. Knows names and JSON types; does not know ranges, tokenizers or the engine.

Names and defaults are OpenAI's, then vLLM's. `null` is the same as leaving a field out. Numbers are strict: 1.0 and true are not integers.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from lockstep.errors import InvalidRequestError
from lockstep.server.fields import refuse_unserved


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """include_usage: a last chunk with the usage. continuous_usage_stats: usage so far in every chunk. include_obfuscation: no effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat completions share."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions. prompt: a string, a list of strings, a list of token ids or a list of lists of them; logprobs: alternatives a token.
    echo: the answer begins with the prompt; with max_tokens 0 it is nothing else."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions. logprobs switches them on, top_logprobs counts the alternatives."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize, as vLLM has it: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


Request = TypeVar("Request", bound=msgspec.Struct)


def read_request(body: bytes, kind: type[Request]) -> Request:
    """`body` as a `kind`. Raises InvalidRequestError: malformed JSON, a wrong type (naming the field), a field that must not be ignored."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body must be a JSON object, got what does not parse: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"the body must be a JSON object, got {type(fields).__name__}")
    refuse_unserved(fields, kind.__struct_fields__)
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidRequestError(str(error), param=_field_of(str(error))) from None


def _field_of(message: str) -> str | None:
    """The field that a msgspec message names: "... - at `$.stop[0]`" gives "stop", "... missing required field `prompt`" gives "prompt"."""
    found = re.search(r"`\$\.([^`\[]+)[^`]*`$", message) or re.search(r"missing required field `([^`]+)`", message)
    return found.group(1) if found else None
