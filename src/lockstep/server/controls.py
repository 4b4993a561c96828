"""POST /pause, /resume, /reset_prefix_cache; GET /is_paused, as vLLM has them in its development mode; and POST /update_weights. They change what
everybody gets, or when."""

from __future__ import annotations

from typing import Annotated

import msgspec

from lockstep.errors import InvalidRequestError
from lockstep.server.endpoint import ServerContext
from lockstep.server.exchange import Exchange
from lockstep.server.protocol import EngineControls

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class Controls:
    """The answers, over one engine."""

    def __init__(self, engine: EngineControls) -> None:
        self._engine = engine

    async def pause(self, context: ServerContext, exchange: Exchange, body: bytes) -> None:
        """Query: mode ("abort" if it is left out, as in vLLM), clear_cache (true)."""
        query = exchange.query()
        for name in query:
            if name not in ("mode", "clear_cache"):
                raise InvalidRequestError(f"{name!r} is not a parameter of /pause; there are mode and clear_cache", param=name)
        flag = query.get("clear_cache", "true").lower()
        if flag not in _FLAGS:
            raise InvalidRequestError(f"clear_cache must be true or false, got {flag!r:.60}", param="clear_cache")
        context.require_engine()
        await self._engine.pause(query.get("mode", "abort"), clear_cache=_FLAGS[flag])
        await _say(exchange, {"status": "paused"})

    async def resume(self, context: ServerContext, exchange: Exchange, body: bytes) -> None:
        context.require_engine()
        await self._engine.resume()
        await _say(exchange, {"status": "resumed"})

    async def is_paused(self, context: ServerContext, exchange: Exchange, body: bytes) -> None:
        await _say(exchange, {"is_paused": self._engine.is_paused})

    async def reset_prefix_cache(self, context: ServerContext, exchange: Exchange, body: bytes) -> None:
        context.require_engine()
        await self._engine.reset_prefix_cache()
        await _say(exchange, {"status": "reset"})

    async def update_weights(self, context: ServerContext, exchange: Exchange, body: bytes) -> None:
        """Body: {"model": a path or name}. It answers once an epoch with the new weights has begun."""
        try:
            asked = msgspec.json.decode(body, type=_Update)
        except msgspec.MsgspecError as error:
            raise InvalidRequestError(f'/update_weights wants {{"model": "a folder, a .gguf file or a Hugging Face name"}}: {error}') from None
        context.require_engine()
        await self._engine.update_weights(asked.model)
        await _say(exchange, {"status": "updated", "system_fingerprint": context.client.fingerprint})


class _Update(msgspec.Struct, forbid_unknown_fields=True):
    model: Annotated[str, msgspec.Meta(min_length=1)]


async def _say(exchange: Exchange, page: dict[str, object]) -> None:
    await exchange.answer(msgspec.json.encode(page))
