"""What the engine tells a client about its request. Knows tokens; does not know text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from lockstep.errors import LockstepError


class FinishReason(StrEnum):
    """Why a request ended. `stop` and `length` are the sampler's decisions; `abort` and `error` are the driver's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities (natural log, of the unfiltered distribution at temperature 1) at one sampled position.

    token_logprob, rank: of the sampled token; rank 1 is the likeliest of the vocabulary. top_ids, top_logprobs: the best alternatives, best first, as
    many as were asked for.
    """

    token_logprob: float
    rank: int = 0
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class LogprobSequence(Protocol):
    """Log probabilities of tokens, in their order; `core.logprobs.LogprobColumns`. So that who reads them needs no arrays."""

    def __len__(self) -> int: ...

    def entry(self, index: int, count: int) -> TokenLogprobs:
        """Of token `index`, with `count` alternatives or as many as there are."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """New tokens of one request, or its end, or both.

    index: position of token_ids[0] in the request's output, counted from 0; a stream neither repeats nor skips an index.
    logprobs: one entry a token where the request asked for them, else empty.
    prompt_logprobs: with the first token of a request that asked for them, of prompt tokens 1, 2, ... (the first has none).
    finish_reason: None while the request goes on. Exactly one event of a request has one, and it is the last.
    stop_token: the token id that ended the request, where one did (it is part of token_ids).
    error: set if and only if finish_reason is ERROR.
    cached_tokens: prompt tokens whose KV came from the prefix cache at the request's first admission.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: LogprobSequence | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: LockstepError | None = None
    cached_tokens: int = 0
