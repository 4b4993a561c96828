"""From a request's fields to SamplingParams. Knows defaults, aliases and the window; does not know prompts' text or the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lockstep.core.params import SEED_LIMIT, SamplingParams
from lockstep.errors import InvalidRequestError
from lockstep.server.errors import ContextLengthError
from lockstep.server.requests import ChatRequest, CompletionRequest, GenerationRequest
from lockstep.text import Tokenizer, bad_word_ids

COMPLETION_TOKENS_DEFAULT = 16
PRIORITY_LIMIT = 1 << 31

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """How many tokens were asked for, and under which name. asked: None if the field was left out; then `default` at most, or (None) the window."""

    asked: int | None
    name: str = "max_tokens"
    default: int | None = None


Defaults = Mapping[str, float]
"""Names of `SamplingParams` to what a request has that does not say."""


def completion_budget(request: CompletionRequest, defaults: Defaults) -> TokenBudget:
    asked = 1 if prompt_only(request) else request.max_tokens
    return TokenBudget(asked=asked, default=int(defaults.get("max_tokens", COMPLETION_TOKENS_DEFAULT)))


def prompt_only(request: CompletionRequest) -> bool:
    """The prompt is asked back and nothing else. The engine computes one token, which nobody sees."""
    return bool(request.echo) and request.max_tokens == 0


def chat_budget(request: ChatRequest, defaults: Defaults) -> TokenBudget:
    """Raises InvalidRequestError if both names are used and disagree."""
    if request.max_completion_tokens is None:
        return TokenBudget(asked=request.max_tokens, default=int(defaults["max_tokens"]) if "max_tokens" in defaults else None)
    if request.max_tokens not in (None, request.max_completion_tokens):
        message = f"max_completion_tokens is {request.max_completion_tokens} and max_tokens {request.max_tokens}; send one of them"
        raise InvalidRequestError(message, param="max_completion_tokens")
    return TokenBudget(asked=request.max_completion_tokens, name="max_completion_tokens")


def tokens_max(budget: TokenBudget, prompt_token_count: int, window: int) -> int:
    """Most tokens to generate. Raises ContextLengthError naming both numbers: nothing is ever cut in silence."""
    if budget.asked is not None and budget.asked < 1:
        raise InvalidRequestError(f"{budget.name} must be at least 1, got {budget.asked}", param=budget.name)
    room = window - prompt_token_count
    if room < 1:
        message = (
            f"the prompt has {prompt_token_count} tokens, and the model's window of {window} must hold it and at least one more; shorten the prompt"
        )
        raise ContextLengthError(message, param="prompt")
    if budget.asked is not None and budget.asked > room:
        message = (
            f"the prompt's {prompt_token_count} tokens and {budget.name}={budget.asked} are {prompt_token_count + budget.asked} tokens, "
            f"more than the model's window of {window}; shorten the prompt or ask for at most {room}"
        )
        raise ContextLengthError(message, param=budget.name)
    if budget.asked is not None:
        return budget.asked
    return room if budget.default is None else min(budget.default, room)


def completion_logprobs(request: CompletionRequest, most: int) -> int | None:
    return _within(request.logprobs, "logprobs", most)


def chat_logprobs(request: ChatRequest, most: int) -> int | None:
    """Alternatives a token, None for no log probabilities. Raises InvalidRequestError for top_logprobs without logprobs."""
    top = _within(request.top_logprobs, "top_logprobs", most)
    if not request.logprobs:
        if top:
            raise InvalidRequestError(f"top_logprobs={top} needs logprobs=true", param="top_logprobs")
        return None
    return top or 0


def prompt_logprobs(request: GenerationRequest, most: int) -> int | None:
    """Alternatives a prompt token. An echo shows the prompt's log probabilities among the answer's. Raises InvalidRequestError in a stream, which has
    no place for them."""
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError("prompt_logprobs are not told in a stream; leave out one of the two", param="prompt_logprobs")
    asked = _within(request.prompt_logprobs, "prompt_logprobs", most)
    if not isinstance(request, CompletionRequest) or not request.echo or request.logprobs is None:
        return asked
    return max(request.logprobs, -1 if asked is None else asked)


def _within(count: int | None, name: str, most: int) -> int | None:
    if count is not None and not 0 <= count <= most:
        raise InvalidRequestError(f"{name} must be from 0 to {most} on this server, got {count}", param=name)
    return count


def sampling_params(
    request: GenerationRequest,
    *,
    token_count_max: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    tokenizer: Tokenizer,
    defaults: Defaults,
) -> SamplingParams:
    """The request's parameters; bad words become tokens here. Raises InvalidRequestError naming the field that is out of range."""
    vocab_size, bad_words = tokenizer.vocab_size, tuple(request.bad_words or ())
    for name, ids in (("stop_token_ids", request.stop_token_ids), ("allowed_token_ids", request.allowed_token_ids)):
        for token_id in ids or ():
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(f"{name} must be ids from 0 to {vocab_size - 1}, got {token_id}", param=name)
    params = SamplingParams(
        n=_given(request.n, 1),
        temperature=_given(request.temperature, defaults.get("temperature", 1.0)),
        top_p=_given(request.top_p, defaults.get("top_p", 1.0)),
        top_k=_given(request.top_k, int(defaults.get("top_k", 0))),
        min_p=_given(request.min_p, defaults.get("min_p", 0.0)),
        seed=request.seed,
        max_tokens=token_count_max,
        stop=() if request.stop is None else request.stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=_given(request.ignore_eos, False),
        min_tokens=_given(request.min_tokens, 0),
        repetition_penalty=_given(request.repetition_penalty, defaults.get("repetition_penalty", 1.0)),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        logit_bias=_biases(request.logit_bias, vocab_size),
        allowed_token_ids=request.allowed_token_ids,
        bad_words=bad_words,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=_structure(request),
        extra_args=request.vllm_xargs,
        include_stop_str_in_output=_given(request.include_stop_str_in_output, False),
        skip_special_tokens=_given(request.skip_special_tokens, True),
    )
    return replace(params, bad_words_token_ids=bad_word_ids(tokenizer, bad_words)) if bad_words else params


def _structure(request: GenerationRequest) -> dict[str, Any] | None:
    """What the answer must look like, by vLLM's structured_outputs or OpenAI's response_format."""
    form = request.response_format
    if form is None or form == {"type": "text"}:
        return request.structured_outputs
    if request.structured_outputs is not None:
        raise InvalidRequestError("response_format and structured_outputs say the same thing; send one of them", param="response_format")
    if form == {"type": "json_object"}:
        return {"json_object": True}
    schema = form.get("json_schema")
    if form.get("type") != "json_schema" or form.keys() != {"type", "json_schema"} or not isinstance(schema, dict):
        kinds = "text, json_object or json_schema (with the field json_schema)"
        raise InvalidRequestError(f"response_format must be of type {kinds}, got {form!r:.200}", param="response_format")
    for name in schema:
        if name not in ("name", "schema", "strict", "description"):
            raise InvalidRequestError(f"response_format: json_schema has no field {name!r:.60}", param="response_format")
    if not isinstance(schema.get("schema"), (dict, bool)):
        raise InvalidRequestError(f"response_format: json_schema needs a schema, got {schema.get('schema')!r:.200}", param="response_format")
    return {"json": schema["schema"]}


def _biases(biases: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    """OpenAI's keys are token ids as strings."""
    found: dict[int, float] = {}
    for key, bias in (biases or {}).items():
        if not key.isdecimal() or int(key) >= vocab_size:
            raise InvalidRequestError(f"logit_bias must have token ids from 0 to {vocab_size - 1} for keys, got {key!r:.60}", param="logit_bias")
        found[int(key)] = bias
    return found or None


def params_of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """Choice i of a seeded request samples with seed + i, modulo 2**64."""
    if choice == 0 or params.seed is None:
        return params
    return replace(params, seed=(params.seed + choice) % SEED_LIMIT)


def priority_of(request: GenerationRequest) -> int:
    priority = _given(request.priority, 0)
    if not -PRIORITY_LIMIT <= priority < PRIORITY_LIMIT:
        raise InvalidRequestError(f"priority must be from {-PRIORITY_LIMIT} to {PRIORITY_LIMIT - 1}, got {priority}", param="priority")
    return priority


def check_stream_options(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream=true; leave it out", param="stream_options")


def _given(value: Value | None, default: Value) -> Value:
    return default if value is None else value
