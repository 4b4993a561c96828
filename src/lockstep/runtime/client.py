"""Clients of an engine in this process: `AsyncClient` for an event loop, `collect` for a caller that waits, `collect_async` for one that awaits.

They turn engine events of one turn into one wake-up of the loop. They know requests in tokens; text is their callers'.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from lockstep.core.outputs import FinishReason, TokenEvent
from lockstep.core.params import SamplingParams
from lockstep.core.request import EngineRequest
from lockstep.errors import LockstepError
from lockstep.runtime.engine import Engine, EngineState
from lockstep.runtime.loop import pause_mode
from lockstep.runtime.requests import RequestFactory

_CHECKING = ThreadPoolExecutor(max_workers=32, thread_name_prefix="lockstep-structure")
"""Threads that wait for a grammar to be tried, apart from those that encode everybody's prompts."""


class AsyncClient:
    """Must be made and used on one event loop's thread."""

    def __init__(self, engine: Engine, factory: RequestFactory, fingerprint: Callable[[], str]) -> None:
        self._engine = engine
        self._factory = factory
        self._fingerprint = fingerprint
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, asyncio.Queue[TokenEvent]] = {}

    @property
    def max_model_len(self) -> int:
        return self._factory.limits.window

    @property
    def fingerprint(self) -> str:
        return self._fingerprint()

    @property
    def state(self) -> EngineState:
        return self._engine.state

    @property
    def is_paused(self) -> bool:
        return self._engine.state.paused

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Returns when nothing is computed any more. Raises InvalidRequestError for a mode that there is not."""
        await asyncio.wrap_future(self._engine.pause(pause_mode(mode)))
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        await asyncio.wrap_future(self._engine.resume())

    async def reset_prefix_cache(self) -> None:
        await asyncio.wrap_future(self._engine.reset_prefix_cache())

    async def check(self, params: SamplingParams) -> None:
        """That structured outputs compile, on another thread: it may take seconds, and `generate` finds the answer there."""
        await check_structure(self._factory, params)

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *, choice: int = 0, priority: int = 0
    ) -> AsyncIterator[TokenEvent]:
        """The events of choice `choice`, until the one with a finish reason. Closing the iterator early aborts the request."""
        request = self._factory.build(request_id, prompt_token_ids, params, choice=choice, priority=priority)
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._queues[request.request_id] = events
        ended = False
        try:
            self._engine.submit(request, self._sink)
            while not ended:
                event = await events.get()
                ended = event.finish_reason is not None
                yield event
        finally:
            del self._queues[request.request_id]
            if not ended:
                self._engine.abort(request.request_id)

    def abort(self, request_id: str, *, choice: int = 0) -> None:
        self._engine.abort(f"{request_id}#{choice}")

    def _sink(self, events: list[TokenEvent]) -> None:
        with contextlib.suppress(RuntimeError):  # a closed loop has nobody left who listens; that may not stop the engine
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            waiting = self._queues.get(event.request_id)
            if waiting is not None:
                waiting.put_nowait(event)


async def check_structure(factory: RequestFactory, params: SamplingParams) -> None:
    """That structured outputs compile. Raises InvalidRequestError."""
    if params.structured_outputs is not None:
        await asyncio.get_running_loop().run_in_executor(_CHECKING, factory.grammar_of, params)


def collect(engine: Engine, requests: Sequence[EngineRequest]) -> Iterator[list[TokenEvent]]:
    """Submit all requests and yield their events, a turn's worth at a time, until each has ended. Closing the iterator early aborts the rest.
    Raises the error of a request that ended with one."""
    batches: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    open_ids = {request.request_id for request in requests}
    try:
        engine.submit_all(requests, batches.put)
        while open_ids:
            batch = batches.get()
            for event in batch:
                if event.finish_reason is FinishReason.ERROR:
                    raise event.error or LockstepError(f"request {event.request_id!r} ended with an error")
                if event.finish_reason is not None:
                    open_ids.discard(event.request_id)
            yield batch
    finally:
        for request_id in open_ids:
            engine.abort(request_id)


async def collect_async(engine: Engine, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[TokenEvent], None]:
    """`collect` on the running event loop, whichever it is."""
    batches: asyncio.Queue[list[TokenEvent]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    open_ids = {request.request_id for request in requests}

    def sink(events: list[TokenEvent]) -> None:
        with contextlib.suppress(RuntimeError):  # a closed loop has nobody left who listens; that may not stop the engine
            loop.call_soon_threadsafe(batches.put_nowait, events)

    try:
        engine.submit_all(requests, sink)
        while open_ids:
            batch = await batches.get()
            for event in batch:
                if event.finish_reason is not None:
                    open_ids.discard(event.request_id)
                if event.finish_reason is FinishReason.ERROR:
                    raise event.error or LockstepError(f"request {event.request_id!r} ended with an error")
            yield batch
    finally:
        for request_id in open_ids:
            engine.abort(request_id)
