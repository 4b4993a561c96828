"""What a caller may ask of one request. Knows ranges; does not know vocabularies, windows or tokenizers.

Names and defaults are vLLM's `SamplingParams`, so that scripts move over unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import InvalidRequestError

SEED_LIMIT = 1 << 64
LOGPROBS_MAX = 20
CHOICES_MAX = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    n: independent choices for the prompt; choice i of a seeded request samples with seed + i.
    temperature: 0 is greedy (the lowest id wins a tie); otherwise logits are divided by it.
    top_p, min_p: in (0, 1] and [0, 1]; top_k: 0 or -1 keeps all. They filter in the order min_p, top_k, top_p after the temperature.
    seed: 0 <= seed < 2**64 (negative values are taken modulo 2**64, as numpy's int64 seeds are); None draws one from the operating system at
    admission.
    max_tokens: most tokens to generate; None means up to the model's window.
    stop: strings that end the answer; they are not part of the text unless include_stop_str_in_output.
    stop_token_ids: token ids that end the answer; ignore_eos: the model's own end tokens do not.
    logprobs: None, or how many of the best alternatives (0..20) to report beside each sampled token's log probability.
    skip_special_tokens: leave special tokens out of the text.

    Raises InvalidRequestError naming the parameter.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, CHOICES_MAX)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0 and at most 1, got 0; for greedy decoding use temperature=0", param="top_p")
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, (1 << 31) - 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), SEED_LIMIT - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, (1 << 31) - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, LOGPROBS_MAX)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{name} must be true or false, got {value!r}", param=name)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else None
    if strings is None or not all(isinstance(s, str) and s for s in strings):
        raise InvalidRequestError(f"stop must be a non-empty string or a list of them, got {value!r}", param="stop")
    return strings  # type: ignore[return-value]


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidRequestError(f"stop_token_ids must be a list of token ids, got {value!r}", param="stop_token_ids")
    for item in value:
        _integer("stop_token_ids", item, 0, (1 << 31) - 1)
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}, got {value!r}", param=name)


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}", param=name)
