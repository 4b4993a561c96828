"""Who may call: the API key. Knows one header; does not know the paths' meaning beyond those that stay open."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.server.errors import UnauthorizedError
from lockstep.server.exchange import Exchange

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics"})


class RequireApiKey:
    """ASGI middleware: 401 for requests whose bearer token is not the key, compared in constant time; probes and metrics stay open."""

    __slots__ = ("_app", "_expected")

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(scope):
            await self._app(scope, receive, send)
            return
        error = UnauthorizedError("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")
        await Exchange(scope, receive, send).fail(error, retry_after_s=0)

    def _admits(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return hmac.compare_digest(key.strip(), self._expected) and scheme.lower() == b"bearer"
