"""From what a caller asks to what the driver takes: checked against the model and the pool, seed drawn, cap clipped, stop ids merged."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.core.digest import mix64
from lockstep.core.params import SEED_LIMIT, SamplingParams, StructuredOutputsParams
from lockstep.core.records import Side
from lockstep.core.request import EngineRequest
from lockstep.core.shaping import Shaping
from lockstep.errors import InvalidRequestError
from lockstep.sampling.grammar import grammar_source
from lockstep.sampling.processor_set import ProcessorSet

TEMPERATURE_LEAST = 1e-5
"""Below it a request is greedy, as in vLLM: dividing by less would leave the range of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What every request is held to. window: most tokens of prompt and output. eos_ids: the model's own end tokens."""

    window: int
    vocab_size: int
    eos_ids: tuple[int, ...]


class SeedSource:
    """Seeds for requests that bring none: from the operating system, or a fixed sequence if the engine was given a seed. Thread-safe."""

    def __init__(self, engine_seed: int | None) -> None:
        self._engine_seed = engine_seed
        self._count = 0
        self._lock = threading.Lock()

    def __call__(self) -> int:
        if self._engine_seed is None:
            return secrets.randbits(64)
        with self._lock:
            self._count += 1
            return mix64(mix64(self._engine_seed) + self._count)


class RequestFactory:
    """Builds requests for one engine. check_grammar: says in words why a grammar does not compile, or nothing; it may take seconds. processors: those
    that are loaded."""

    def __init__(
        self,
        limits: RequestLimits,
        draw_seed: Callable[[], int],
        check_grammar: Callable[[str], str] | None = None,
        processors: ProcessorSet | None = None,
    ) -> None:
        self.limits = limits
        self._draw_seed = draw_seed
        self._check_grammar = check_grammar
        self._processors = processors or ProcessorSet({}, limits.vocab_size)

    def grammar_of(self, params: SamplingParams) -> str:
        """The source of what the answer must look like, empty for anything. May take seconds the first time: not for an event loop's thread.
        Raises InvalidRequestError if it does not compile within the limits."""
        asked = params.structured_outputs
        if asked is None:
            return ""
        assert isinstance(asked, StructuredOutputsParams), asked
        source = grammar_source(asked)
        why_not = self._check_grammar(source) if self._check_grammar is not None else ""
        if why_not:
            raise InvalidRequestError(f"structured_outputs is no {asked.kind} that can be compiled: {why_not}", param="structured_outputs")
        return source

    def build(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        priority: int = 0,
    ) -> EngineRequest:
        """Choice `choice` of a request; choices of one request share a prompt, and later ones follow the first into its blocks.
        Raises InvalidRequestError naming the parameter: empty prompt, ids outside the vocabulary, prompt or output over the window (both numbers
        named), arguments that no processor takes. Raises PluginError if a processor fails at them."""
        prompt = self._checked_prompt(prompt_token_ids)
        window = self.limits.window
        if len(prompt) >= window:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens and the model's window is {window}, output included; "
                f"shorten the prompt to at most {window - 1} tokens",
                param="prompt",
            )
        most = window - len(prompt)
        max_tokens = most if params.max_tokens is None else params.max_tokens
        if max_tokens > most:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, together over the model's window of {window}; "
                f"ask for at most {most} tokens",
                param="max_tokens",
            )
        self._check_ids(params)
        asked = self._processors.arguments_of(params.extra_args)
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.limits.eos_ids))
        shaping = _shaping(params, stop_ids, self.limits.vocab_size)
        return EngineRequest(
            request_id=f"{request_id}#{choice}",
            prompt=prompt,
            length_cap=len(prompt) + max_tokens,
            seed=(self._draw_seed() if params.seed is None else params.seed) % SEED_LIMIT,
            temperature=params.temperature if params.temperature >= TEMPERATURE_LEAST else 0.0,
            top_k=max(0, params.top_k),
            top_p=params.top_p,
            min_p=params.min_p,
            logprob_count=-1 if params.logprobs is None else params.logprobs,
            prompt_logprob_count=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            priority=priority,
            sibling_of=f"{request_id}#0" if choice else None,
            side=Side(stop_ids=tuple(sorted(stop_ids)), shaping=replace(shaping, grammar=self.grammar_of(params), processors=asked)),
        )

    def _check_ids(self, params: SamplingParams) -> None:
        named: dict[str, Sequence[int]] = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": tuple(params.logit_bias or ()),
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words": tuple(token for word in params.bad_words_token_ids for token in word),
        }
        for name, ids in named.items():
            if ids and max(ids) >= self.limits.vocab_size:
                raise InvalidRequestError(f"{name} must be below the vocabulary's {self.limits.vocab_size}, got {max(ids)}", param=name)
        if params.bad_words and not params.bad_words_token_ids:
            raise InvalidRequestError(
                "bad_words are text, and nobody has looked up their tokens; give bad_words_token_ids instead", param="bad_words"
            )

    def _checked_prompt(self, ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        if len(ids) == 0:
            raise InvalidRequestError("the prompt has no tokens; it must have at least one", param="prompt")
        try:
            wide = np.array(ids)
        except (TypeError, ValueError, OverflowError):
            wide = np.array(None)
        if wide.dtype.kind not in "iu":
            raise InvalidRequestError("prompt token ids must be integers", param="prompt")
        bad = np.flatnonzero((wide < 0) | (wide >= self.limits.vocab_size))
        if wide.ndim != 1 or len(bad):
            found = f"got {int(wide[bad[0]])} at index {int(bad[0])}" if wide.ndim == 1 else f"got an array of shape {wide.shape}"
            raise InvalidRequestError(f"prompt token ids must be from 0 to {self.limits.vocab_size - 1}, {found}", param="prompt")
        return wide.astype(np.int32)


def _shaping(params: SamplingParams, stop_ids: Collection[int], vocab_size: int) -> Shaping:
    """Without what guides it. Raises InvalidRequestError where it would leave nothing to choose from."""
    shaping = Shaping(
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        min_tokens=params.min_tokens,
        logit_bias=tuple(sorted((params.logit_bias or {}).items())),
        allowed_token_ids=tuple(sorted(set(params.allowed_token_ids or ()))),
        bad_words=tuple(dict.fromkeys(params.bad_words_token_ids)),
    )
    never = {word[0] for word in shaping.bad_words if len(word) == 1}
    allowed = shaping.allowed_token_ids or range(vocab_size)
    for name, taken in (("bad_words", never), ("min_tokens", never.union(stop_ids if shaping.min_tokens else ()))):
        if len(taken) >= len(allowed) and taken.issuperset(allowed):
            which = "allowed_token_ids" if shaping.allowed_token_ids else name
            raise InvalidRequestError(f"no token is left of {len(allowed)} once {name} has taken its own away; ask for less", param=which)
    return shaping


def choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of choice `choice`: seed + choice where a seed is given. The first one's prompt is everybody's, so only it tells of it."""
    if choice == 0:
        return params
    return replace(params, seed=None if params.seed is None else (params.seed + choice) % SEED_LIMIT, n=1, prompt_logprobs=None)
