"""`LLM`: the engine as a Python object for offline work. Names are vLLM's, so that scripts move over unchanged.

Knows prompts, text and how to wait; everything else is `launch`'s. `async_llm` is the same for event loops, and shares what an answer is.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Number
from types import TracebackType
from typing import Any, NoReturn

from lockstep.config import EngineConfig
from lockstep.core.outputs import FinishReason, LogprobSequence, TokenEvent, TokenLogprobs
from lockstep.core.params import SamplingParams
from lockstep.core.request import EngineRequest
from lockstep.errors import InvalidRequestError, UnsupportedError
from lockstep.launch import RunningEngine, launch_engine, load_tokenizer, resolve_model, sampling_defaults
from lockstep.runtime.client import collect
from lockstep.runtime.requests import choice_params
from lockstep.text import TextStream, Tokenizer, bad_word_ids
from lockstep.vllm_settings import own_settings

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

Message = Mapping[str, Any]
"""{"role": ..., "content": text or a list of text parts}, and whatever else the model's template knows."""

PROMPT_TAIL_TOKENS = 4
"""The text goes on from so many tokens of the prompt: a character has at most four bytes."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """logprob: natural log. rank: place in the whole vocabulary, from 1."""

    logprob: float
    rank: int
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
    """prompt: None where token ids were given. num_cached_tokens: prompt tokens whose KV was in the prefix cache. prompt_logprobs: per token of the
    prompt as `CompletionOutput.logprobs` has them, None for the first; None as a whole if not asked for."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class LLM:
    """model: a name or path, see `EngineConfig`, whose other settings are keyword arguments here. Closed by `close`, `with`, or the end of the
    program.

    Raises CallerError before anything runs (unknown model, settings that do not fit, a setting of vLLM that is not here), TypeError for a setting
    that nobody knows, PeerError if a stage does not come up.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.config = engine_config(model, settings)
        resolved = resolve_model(self.config)
        self._tokenizer = load_tokenizer(self.config, resolved)
        self._sampling_defaults = sampling_defaults(self.config, resolved)
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
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, all at once; outputs are in the order of the prompts. sampling_params: one for all or one a prompt.
        use_tqdm: show progress on a terminal. lora_request: None. Raises InvalidRequestError before any of them runs if one of them cannot."""
        refuse_adapter(lora_request)
        several = _as_list(prompts)
        params = _params_list(self.get_default_sampling_params() if sampling_params is None else sampling_params, len(several))
        priorities = [0] * len(several) if priority is None else list(priority)
        if len(priorities) != len(several):
            raise InvalidRequestError(f"{len(several)} prompts need as many priorities, got {len(priorities)}", param="priority")
        answers = [self._answer(*asked) for asked in zip(several, params, priorities, strict=True)]
        self._run(answers, progress=bool(use_tqdm) and sys.stderr.isatty())
        return [answer.output for answer in answers]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many through the model's chat template. tools: what the template may tell the model of, in OpenAI's form.
        chat_template_kwargs: other names for the template. The names that are left are vLLM's, and take the values at which they ask for nothing.
        Raises InvalidRequestError before any of them runs if one of them cannot, or the template refuses it; UnsupportedError."""
        refuse_chat_options(chat_template, chat_template_content_format, continue_final_message)
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        extra = template_variables(tools, chat_template_kwargs)
        prompts = [render_chat(self._tokenizer, one, add_generation_prompt=add_generation_prompt, variables=extra) for one in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedError, as the next three do: Lockstep runs models that generate."""
        refuse_pooling("encode", "token ids of a text are get_tokenizer().encode(text)")

    def embed(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse_pooling("embed", "use an engine for embedding models")

    def classify(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse_pooling("classify", "ask for a label with generate or chat, and logprobs for its probability")

    def score(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse_pooling("score", "use an engine for cross-encoders")

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """With what the model's generation_config.json recommends, see `EngineConfig`; what requests without sampling_params get."""
        return SamplingParams(**self._sampling_defaults)

    def reset_prefix_cache(self) -> bool:
        """No prefix that was computed before is hit any more. Always True."""
        self._running.engine.reset_prefix_cache().result()
        return True

    def update_weights(self, model: str | os.PathLike[str]) -> None:
        """Compute with the weights of another checkpoint of the same model from now on: a folder, .gguf file or Hugging Face name, with tensors of
        the same names and shapes. The prefix cache is empty then, and the fingerprint another. For a while both are in memory. Raises CheckpointError
        or UnsupportedError, and changes nothing, for one that does not fit."""
        self._running.update_weights(os.fspath(model)).result()

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

    def _answer(self, prompt: Prompt, params: SamplingParams, priority: int) -> Answer:
        return new_answer(self._running, self._tokenizer, f"llm-{next(self._numbers)}", prompt, params, priority)

    def _run(self, answers: Sequence[Answer], *, progress: bool) -> None:
        by_id = {request.request_id: (answer, choice) for answer in answers for choice, request in enumerate(answer.requests)}
        engine, done = self._running.engine, 0
        for batch in collect(engine, [request for answer in answers for request in answer.requests]):
            for event in batch:
                answer, choice = by_id[event.request_id]
                if answer.take(event, choice):
                    engine.abort(event.request_id)
                if event.finish_reason is not None:
                    done += 1
                    if progress:
                        print(f"\r{done}/{len(by_id)} done", end="" if done < len(by_id) else "\n", file=sys.stderr)


def engine_config(model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """The config of an engine for `model`. settings: fields of EngineConfig, and those of vLLM's settings that ask for what Lockstep does anyway.
    Raises TypeError for a name that nobody knows, UnsupportedError for what is not here, ConfigError for what does not fit."""
    return EngineConfig(model=model, **own_settings(settings, tuple(EngineConfig.__dataclass_fields__)))


def new_answer(running: RunningEngine, tokenizer: Tokenizer, request_id: str, prompt: Prompt, params: SamplingParams, priority: int) -> Answer:
    """An answer with nothing in it yet and the engine's requests for it, one a choice. Raises InvalidRequestError if it can never run."""
    text, ids = _encode(tokenizer, prompt)
    if params.bad_words:
        params = replace(params, bad_words_token_ids=(*params.bad_words_token_ids, *bad_word_ids(tokenizer, params.bad_words)))
    requests = [running.factory.build(request_id, ids, choice_params(params, i), choice=i, priority=priority) for i in range(params.n)]
    return Answer(RequestOutput(request_id, text, ids, [CompletionOutput(i) for i in range(params.n)]), params, requests, tokenizer)


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = True, variables: Mapping[str, Any]
) -> dict[str, Any]:
    """The prompt that the model's template makes of a conversation. Text parts of a message are joined by a newline, as the server does.
    Raises InvalidRequestError for another kind of part, or if the template refuses."""
    text = tokenizer.render_chat([_with_text(message) for message in messages], add_generation_prompt=add_generation_prompt, **variables)
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def template_variables(tools: Sequence[Mapping[str, Any]] | None, others: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**({"tools": list(tools)} if tools else {}), **(others or {})}


def refuse_adapter(lora_request: object) -> None:
    if lora_request is not None:
        raise UnsupportedError("lora_request: adapters are not there yet; merge the adapter into the weights and load those")


def refuse_chat_options(chat_template: str | None, content_format: str, continue_final_message: bool) -> None:
    """Raises UnsupportedError for what vLLM's chat takes and Lockstep's does not."""
    if chat_template is not None:
        raise UnsupportedError("chat_template: the template is the tokenizer's; name another tokenizer folder with tokenizer=")
    if content_format not in ("auto", "string"):
        raise UnsupportedError(f"chat_template_content_format: content is given to templates as text, got {content_format!r}; leave it out")
    if continue_final_message:
        raise UnsupportedError("continue_final_message is not there yet; render the prompt yourself and call generate")


def refuse_pooling(name: str, instead: str) -> NoReturn:
    raise UnsupportedError(f"{name}: Lockstep runs models that generate text, not pooling models; {instead}")


def _with_text(message: Message) -> Message:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return message
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidRequestError(f"content[{index}] of a message must be a part of type text, got {content[index]!r:.80}", param="messages")
    return {**message, "content": "\n".join(text for text in texts if text is not None)}


def _encode(tokenizer: Tokenizer, prompt: Prompt) -> tuple[str | None, list[int]]:
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), _encode(tokenizer, prompt["prompt_token_ids"])[1]
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], tokenizer.encode(prompt["prompt"])
        raise InvalidRequestError(f"a prompt mapping needs 'prompt' (text) or 'prompt_token_ids', got keys {sorted(prompt)}", param="prompt")
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
        raise InvalidRequestError(f"a prompt must be text, token ids or a mapping, got {type(prompt).__name__}", param="prompt")
    return None, list(prompt)


class Answer:
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
        if event.prompt_logprobs is not None:
            self._add_prompt_logprobs(event.prompt_logprobs)
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
            out.logprobs.append(_logprobs(self._tokenizer, token, entry))

    def _add_prompt_logprobs(self, columns: LogprobSequence) -> None:
        most = self._params.prompt_logprobs or 0
        told = [_logprobs(self._tokenizer, token, columns.entry(i, most)) for i, token in enumerate(self.output.prompt_token_ids[1:])]
        self.output.prompt_logprobs = [None, *told]


def _logprobs(tokenizer: Tokenizer, token: int, entry: TokenLogprobs) -> dict[int, Logprob]:
    """The alternatives by rank, and the token itself behind them if it is none of them."""
    best = zip(entry.top_ids, entry.top_logprobs, strict=True)
    found = {i: Logprob(p, rank, tokenizer.token_text(i)) for rank, (i, p) in enumerate(best, 1) if i >= 0}
    found.setdefault(token, Logprob(entry.token_logprob, entry.rank, tokenizer.token_text(token)))
    return found


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and all(isinstance(item, Number) for item in listed) else listed


def _params_list(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(f"{count} prompts need one sampling_params or {count} of them, got {len(params)}", param="sampling_params")
    return list(params)


def output_json(output: RequestOutput) -> str:
    """One line of JSON for one prompt: texts, token ids, finish reasons."""
    choices = [{"index": o.index, "text": o.text, "token_ids": o.token_ids, "finish_reason": o.finish_reason} for o in output.outputs]
    return json.dumps({"request_id": output.request_id, "prompt": output.prompt, "prompt_token_ids": output.prompt_token_ids, "outputs": choices})


__all__ = ["LLM", "CompletionOutput", "FinishReason", "Logprob", "RequestOutput", "output_json"]
