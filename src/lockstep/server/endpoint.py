"""Runs one endpoint for one request until it is answered, the client leaves or the server stops. Knows tasks; does not know what endpoints do.

A client that leaves is noticed while the engine is silent too: beside the work a second task waits for the connection's end, and whichever is first
decides. Cancelling the work closes its iterators, and that aborts its engine requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from lockstep.errors import CapacityError, PeerError
from lockstep.server.admission import Admission
from lockstep.server.errors import BodyTooLargeError, ClientGoneError, ModelNotFoundError
from lockstep.server.exchange import Exchange
from lockstep.server.protocol import EngineClient
from lockstep.server.settings import ServerSettings
from lockstep.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """What every endpoint may use. created_s: when the server was made, in seconds since 1970."""

    client: EngineClient
    tokenizer: Tokenizer
    settings: ServerSettings
    admission: Admission
    created_s: int

    def require_engine(self) -> None:
        """Raises PeerError with the engine's own reason while it cannot answer."""
        status = self.client.status()
        if not status.alive:
            raise PeerError(f"the engine cannot answer: {status.reason or 'it gives no reason'}")

    def require_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError unless `name` is served here; None is the model that is served."""
        if name is not None and name not in self.settings.served_model_names:
            served = ", ".join(self.settings.served_model_names)
            raise ModelNotFoundError(f"model {name!r} is not served here; served: {served}", param="model")


Answer = Callable[[ServerContext, Exchange, bytes], Awaitable[None]]


class Endpoint:
    """An ASGI application for one path: `answer(context, exchange, body)`, with errors, disconnects and shutdown taken care of."""

    __slots__ = ("_answer", "_context")

    def __init__(self, context: ServerContext, answer: Answer) -> None:
        self._context = context
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        settings = self._context.settings
        try:
            body = await exchange.read_body(settings.body_bytes_max)
        except ClientGoneError:
            return
        except BodyTooLargeError as error:
            await exchange.fail(error, retry_after_s=settings.retry_after_s)
            return
        failure = await self._work(exchange, body)
        if failure is not None:
            await exchange.fail(failure, retry_after_s=settings.retry_after_s)

    async def _work(self, exchange: Exchange, body: bytes) -> Exception | None:
        """Answers; returns what the client has still to be told: why the work failed, or that the server stops."""
        work = asyncio.ensure_future(self._answer(self._context, exchange, body))
        watch = asyncio.create_task(exchange.client_gone())
        try:
            await asyncio.wait((work, watch, self._context.admission.stopped()), return_when=asyncio.FIRST_COMPLETED)
            decided = work.done()
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        if not decided:
            return None if not watch.cancelled() else CapacityError("the server stopped before the answer was complete; send the request again")
        failure = work.exception()
        if failure is None or isinstance(failure, Exception):
            return failure
        raise failure
