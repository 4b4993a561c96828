"""Answers and stream chunks as typed structs, in OpenAI's shape with vLLM's extensions. Knows field names; does not know how values come about.

Fields with UNSET are left out of the JSON; None is null.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The legacy columns, one entry a token. text_offset: characters of the answer before the token. top_logprobs: holds the token itself too.
    An echoed prompt's first token has null for both."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None] | None]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's. rank: place in the whole vocabulary, from 1."""

    logprob: float | None
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token of the prompt, the first has none: from token ids, as text, to what is told of them."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A whole choice, or what one chunk adds to it. stop_reason: the stop string or requested stop token that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class AlternativeLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float | None
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[AlternativeLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """role: in a choice's first chunk only."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer or one chunk of it; `object` says which."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "lockstep"
    parent: None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelCard]
    object: str = "list"
