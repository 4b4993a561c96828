"""`LLM`: the engine as a Python object for offline work. Names are vLLM's, so that scripts move over unchanged.

Knows prompts, text and how to wait; everything else is `launch`'s.
"""

from __future__ import annotations

import atexit
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Number
from types import TracebackType
from typing import Any

from lockstep.config import EngineConfig
from lockstep.core.outputs import FinishReason, TokenEvent, TokenLogprobs
from lockstep.core.params import SamplingParams
from lockstep.core.request import EngineRequest
from lockstep.errors import InvalidRequestError
from lockstep.launch import launch_engine, load_tokenizer, resolve_model
from lockstep.runtime.client import collect
from lockstep.runtime.requests import choice_params
from lockstep.text import TextStream, Tokenizer, bad_word_ids

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

PROMPT_TAIL_TOKENS = 4
"""The text goes on from so many tokens of the prompt: a character has at most four bytes."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """logprob: natural log. rank: place among the reported alternatives, from 1; None for a sampled token that is not among them."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice. logprobs: per token a mapping from token id to Logprob, the sampled token included; None if not asked for.
    finish_reason: "stop" or "length". stop_reason: the stop string or token id that ended it, None for the model's own end."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """prompt: None where token ids were given. num_cached_tokens: prompt tokens whose KV was in the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0


class LLM:
    """model: a name or path, see `EngineConfig`, whose other settings are keyword arguments here. Closed by `close`, `with`, or the end of the
    program.

    Raises CallerError before anything runs (unknown model, settings that do not fit), PeerError if a stage does not come up.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.config = EngineConfig(model=model, **settings)
        resolved = resolve_model(self.config)
        self._tokenizer = load_tokenizer(self.config, resolved)
        self._running = launch_engine(self.config, model=resolved)
        self._numbers = itertools.count()
        atexit.register(self.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, all at once; outputs are in the order of the prompts. sampling_params: one for all or one a prompt.
        use_tqdm: show progress on a terminal. Raises InvalidRequestError before any of them runs if one of them cannot."""
        several = _as_list(prompts)
        params = _params_list(sampling_params, len(several))
        priorities = [0] * len(several) if priority is None else list(priority)
        if len(priorities) != len(several):
            raise InvalidRequestError(f"{len(several)} prompts need as many priorities, got {len(priorities)}", param="priority")
        jobs = [self._job(*asked) for asked in zip(several, params, priorities, strict=True)]
        self._run(jobs, progress=bool(use_tqdm) and sys.stderr.isatty())
        return [job.output for job in jobs]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or many through the model's chat template."""
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        extra = dict(chat_template_kwargs or {})
        texts = [self._tokenizer.render_chat(c, add_generation_prompt=add_generation_prompt, **extra) for c in conversations]
        prompts = [{"prompt": text, "prompt_token_ids": self._tokenizer.encode(text, add_special_tokens=False)} for text in texts]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def fingerprint(self) -> str:
        """Engines with one fingerprint give the same tokens for the same request and seed."""
        return self._running.fingerprint

    def close(self) -> None:
        """Stop the engine and its stages. May be called twice."""
        atexit.unregister(self.close)
        self._running.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _job(self, prompt: Prompt, params: SamplingParams, priority: int) -> _Job:
        text, ids = self._encode(prompt)
        if params.bad_words:
            params = replace(params, bad_words_token_ids=(*params.bad_words_token_ids, *bad_word_ids(self._tokenizer, params.bad_words)))
        name = f"llm-{next(self._numbers)}"
        factory = self._running.factory
        requests = [factory.build(name, ids, choice_params(params, i), choice=i, priority=priority) for i in range(params.n)]
        return _Job(RequestOutput(name, text, ids, [CompletionOutput(i) for i in range(params.n)]), params, requests, self._tokenizer)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if isinstance(prompt.get("prompt"), str):
                return prompt["prompt"], self._tokenizer.encode(prompt["prompt"])
            raise InvalidRequestError(f"a prompt mapping needs 'prompt' (text) or 'prompt_token_ids', got keys {sorted(prompt)}", param="prompt")
        if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
            raise InvalidRequestError(f"a prompt must be text, token ids or a mapping, got {type(prompt).__name__}", param="prompt")
        return None, list(prompt)

    def _run(self, jobs: Sequence[_Job], *, progress: bool) -> None:
        by_id = {request.request_id: (job, choice) for job in jobs for choice, request in enumerate(job.requests)}
        engine, done = self._running.engine, 0
        for batch in collect(engine, [request for job in jobs for request in job.requests]):
            for event in batch:
                job, choice = by_id[event.request_id]
                if job.take(event, choice):
                    engine.abort(event.request_id)
                if event.finish_reason is not None:
                    done += 1
                    if progress:
                        print(f"\r{done}/{len(by_id)} done", end="" if done < len(by_id) else "\n", file=sys.stderr)


class _Job:
    """One prompt with its choices while their tokens come in."""

    def __init__(self, output: RequestOutput, params: SamplingParams, requests: list[EngineRequest], tokenizer: Tokenizer) -> None:
        self.output = output
        self.requests = requests
        self._params = params
        self._tokenizer = tokenizer
        self._streams = [
            TextStream(
                tokenizer,
                stop=tuple(params.stop),
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
                prompt_tail=output.prompt_token_ids[-PROMPT_TAIL_TOKENS:],
            )
            for _ in requests
        ]

    def take(self, event: TokenEvent, choice: int) -> bool:
        """Add an event to the choice. True if a stop string ended it just now, so that the engine must be told (PROTOCOL.md 25)."""
        out, stream = self.output.outputs[choice], self._streams[choice]
        if out.finish_reason is not None:
            return False
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, event.cached_tokens)
        # The token that ends an answer counts, but is not text unless the caller wants to see what stopped it.
        silent = event.stop_token is not None and not self._params.include_stop_str_in_output
        delta = stream.push(event.token_ids[:-1] if silent else event.token_ids)
        out.text += delta.text
        kept = delta.token_count + (silent and delta.stopped is None)
        out.token_ids.extend(event.token_ids[:kept])
        self._add_logprobs(out, event.token_ids[:kept], event.logprobs[:kept])
        if delta.stopped is not None:
            self._end(out, "stop", delta.stopped)
            return event.finish_reason is None
        if event.finish_reason is not None:
            rest = stream.finish()
            out.text += rest.text
            listed = event.stop_token in self._params.stop_token_ids
            reason = rest.stopped or (event.stop_token if listed else None)
            self._end(out, "stop" if rest.stopped else str(event.finish_reason), reason)
        return False

    def _end(self, out: CompletionOutput, reason: str, stop_reason: str | int | None) -> None:
        out.finish_reason, out.stop_reason = reason, stop_reason
        self.output.finished = all(o.finish_reason is not None for o in self.output.outputs)

    def _add_logprobs(self, out: CompletionOutput, tokens: Sequence[int], entries: Sequence[TokenLogprobs]) -> None:
        if self._params.logprobs is None:
            return
        out.logprobs = [] if out.logprobs is None else out.logprobs
        out.cumulative_logprob = 0.0 if out.cumulative_logprob is None else out.cumulative_logprob
        for token, entry in zip(tokens, entries, strict=True):
            out.cumulative_logprob += entry.token_logprob
            found = {
                i: Logprob(p, rank, self._tokenizer.token_text(i))
                for rank, (i, p) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
            }
            found.setdefault(token, Logprob(entry.token_logprob, None, self._tokenizer.token_text(token)))
            out.logprobs.append(found)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and all(isinstance(item, Number) for item in listed) else listed


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(f"{count} prompts need one sampling_params or {count} of them, got {len(params)}", param="sampling_params")
    return list(params)


def output_json(output: RequestOutput) -> str:
    """One line of JSON for one prompt: texts, token ids, finish reasons."""
    choices = [{"index": o.index, "text": o.text, "token_ids": o.token_ids, "finish_reason": o.finish_reason} for o in output.outputs]
    return json.dumps({"request_id": output.request_id, "prompt": output.prompt, "prompt_token_ids": output.prompt_token_ids, "outputs": choices})


__all__ = ["LLM", "CompletionOutput", "FinishReason", "Logprob", "RequestOutput", "output_json"]
