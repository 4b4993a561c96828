"""`AsyncLLM`: the engine as an object for event loops, one stream of outputs a request. Names are vLLM's, so that services move over unchanged.

Knows event loops and which requests are open; what an answer is, and how one is begun, is `llm`'s.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import os
import threading
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, NoReturn

from lockstep.config import EngineConfig
from lockstep.core.params import SamplingParams
from lockstep.errors import InvalidRequestError
from lockstep.launch import launch_engine, load_tokenizer, resolve_model, sampling_defaults, update_weights
from lockstep.llm import (
    Answer,
    Message,
    Prompt,
    RequestOutput,
    engine_config,
    new_answer,
    refuse_adapter,
    refuse_chat_options,
    refuse_pooling,
    render_chat,
    template_variables,
)
from lockstep.runtime.client import check_structure, collect_async
from lockstep.runtime.loop import pause_mode
from lockstep.text import Tokenizer

INLINE_CHARACTERS_MAX = 8192
"""A longer text is encoded on another thread, so that it does not hold up the loop's other streams: so much takes about 2 ms."""


class AsyncLLM:
    """model, settings: as of `LLM`. The engine starts in the constructor, on no loop in particular: its methods may be called from any. Closed by
    `shutdown`, `async with`, or the end of the program.

    Raises CallerError before anything runs (unknown model, settings that do not fit, a setting of vLLM that is not here), TypeError for a setting
    that nobody knows, PeerError if a stage does not come up.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self._start(engine_config(model, settings))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> AsyncLLM:
        """An engine with all settings in one object."""
        made = cls.__new__(cls)
        made._start(engine_args)
        return made

    def _start(self, config: EngineConfig) -> None:
        self.config = config
        resolved = resolve_model(config)
        self._tokenizer = load_tokenizer(config, resolved)
        self._sampling_defaults = sampling_defaults(config, resolved)
        self._running = launch_engine(config, model=resolved)
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()
        atexit.register(self.shutdown)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """What there is of the answer, each time that more of it is: outputs hold all text and tokens so far, the last one is `finished`. Closing the
        generator early, or cancelling the task that reads it, aborts the request. An abort by `abort` ends it with finish_reason "abort".

        Raises InvalidRequestError before anything runs if the request never can, or if its id is that of an open one; the engine's error if it fails.
        """
        refuse_adapter(lora_request)
        answer = await self._answer(prompt, sampling_params, request_id, priority)
        async with aclosing(self._read(answer)) as steps:
            async for _ in steps:
                yield snapshot(answer.output)

    async def complete(self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, *, priority: int = 0) -> RequestOutput:
        """The whole answer at once; otherwise as `generate`, without the cost of an output a step."""
        answer = await self._answer(prompt, sampling_params, request_id, priority)
        async with aclosing(self._read(answer)) as steps:
            async for _ in steps:
                pass
        return answer.output

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate` for one conversation through the model's chat template; arguments as of `LLM.chat`."""
        refuse_chat_options(chat_template, chat_template_content_format, continue_final_message)
        prompt = self.chat_prompt(messages, add_generation_prompt=add_generation_prompt, tools=tools, chat_template_kwargs=chat_template_kwargs)
        return self.generate(prompt, sampling_params, request_id, lora_request=lora_request, priority=priority)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """What `chat` asks for: the text that the template makes of a conversation, and its ids."""
        variables = template_variables(tools, chat_template_kwargs)
        return render_chat(self._tokenizer, messages, add_generation_prompt=add_generation_prompt, variables=variables)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests now, all their choices; ids that are not open are ignored."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            for choice in range(self._open.get(name, 0)):
                self._running.engine.abort(f"{name}#{choice}")

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedError: Lockstep runs models that generate."""
        refuse_pooling("encode", "token ids of a text are (await get_tokenizer()).encode(text)")

    async def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """As `LLM.get_default_sampling_params`."""
        return SamplingParams(**self._sampling_defaults)

    async def reset_prefix_cache(self) -> bool:
        """No prefix that was computed before is hit any more. Always True."""
        await asyncio.wrap_future(self._running.engine.reset_prefix_cache())
        return True

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Returns when nothing is computed any more; requests that come wait. mode: "abort" ends what has begun, "wait" finishes it first, "keep"
        goes on with it afterwards. Raises InvalidRequestError for another."""
        await asyncio.wrap_future(self._running.engine.pause(pause_mode(mode)))
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Go on, with what was kept and with what has come."""
        await asyncio.wrap_future(self._running.engine.resume())

    async def is_paused(self) -> bool:
        return self._running.engine.state.paused

    async def update_weights(self, model: str | os.PathLike[str]) -> None:
        """As `LLM.update_weights`. Answers that have begun go on with the new weights after the tokens they have; whoever wants none of both pauses
        generation before, with mode "wait" or "abort"."""
        await update_weights(self._running, os.fspath(model))

    @property
    def fingerprint(self) -> str:
        """Engines with one fingerprint give the same tokens for the same request and seed."""
        return self._running.fingerprint

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and output."""
        return self._running.model.window

    @property
    def is_running(self) -> bool:
        return self._running.engine.state.phase in ("running", "recovering")

    @property
    def errored(self) -> bool:
        """It has stopped, and not because it was told to."""
        return self._running.engine.state.phase == "failed"

    @property
    def dead_error(self) -> BaseException | None:
        """Why it has stopped."""
        return self._running.engine.state.failure

    async def check_health(self) -> None:
        """Raises the failure if the engine has stopped; one that recovers is well."""
        failure = self._running.engine.state.failure
        if failure is not None:
            raise failure

    def shutdown(self) -> None:
        """End what is open, then the engine and its stages. May be called twice."""
        atexit.unregister(self.shutdown)
        self._running.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _answer(self, prompt: Prompt, params: SamplingParams, request_id: str, priority: int) -> Answer:
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(f"request_id must be a text that names the request, got {request_id!r:.80}", param="request_id")
        text = prompt if isinstance(prompt, str) else None
        if text is not None and len(text) > INLINE_CHARACTERS_MAX:
            prompt = {"prompt": text, "prompt_token_ids": await asyncio.to_thread(self._tokenizer.encode, text)}
        await check_structure(self._running.factory, params)
        return new_answer(self._running, self._tokenizer, request_id, prompt, params, priority)

    async def _read(self, answer: Answer) -> AsyncGenerator[None, None]:
        """Feeds the answer; once for each batch of events."""
        name = answer.output.request_id
        choices = {request.request_id: choice for choice, request in enumerate(answer.requests)}
        with self._lock:
            if name in self._open:
                raise InvalidRequestError(f"request {name!r} is open; wait for its end, or give this one another id", param="request_id")
            self._open[name] = len(choices)
        engine = self._running.engine
        try:
            async with aclosing(collect_async(engine, answer.requests)) as batches:
                async for batch in batches:
                    for event in batch:
                        if answer.take(event, choices[event.request_id]):
                            engine.abort(event.request_id)
                    yield
                    if answer.output.finished:
                        return
        finally:
            del self._open[name]


def snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that later tokens do not change."""
    choices = [
        dataclasses.replace(choice, token_ids=list(choice.token_ids), logprobs=None if choice.logprobs is None else list(choice.logprobs))
        for choice in output.outputs
    ]
    return dataclasses.replace(output, outputs=choices)


AsyncLLMEngine = AsyncLLM
"""Its former name in vLLM."""
