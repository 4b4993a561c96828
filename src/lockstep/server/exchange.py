"""One HTTP request and its answer, over ASGI. Knows bytes, headers, server-sent events and that a client can leave; does not know what is asked."""

from __future__ import annotations

import logging
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from lockstep.errors import LockstepError
from lockstep.server.errors import BodyTooLargeError, ClientGoneError, error_body, status_of

_DONE = b"data: [DONE]\n\n"
_LOGGER = logging.getLogger("lockstep.server")


class Exchange:
    """Read the body once; answer once, with JSON or with a stream of events.

    started: the status line is out, so a failure can only be told inside the stream. finished: the answer is complete.
    """

    __slots__ = ("_receive", "_scope", "_send", "finished", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.started = False
        self.finished = False

    def path_parameter(self, name: str) -> str:
        """What the route's `{name}` matched."""
        return str(self._scope["path_params"][name])

    def query(self) -> dict[str, str]:
        """Of each parameter in the URL its last value."""
        return dict(parse_qsl(self._scope["query_string"].decode("latin-1"), keep_blank_values=True))

    async def read_body(self, bytes_max: int) -> bytes:
        """The whole body. Raises BodyTooLargeError past `bytes_max` bytes (without reading on), ClientGoneError."""
        for name, value in self._scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > bytes_max:
                raise _too_large(bytes_max, int(value))
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message.get("body", b"")
            if len(body) > bytes_max:
                raise _too_large(bytes_max, len(body))
            if not message.get("more_body", False):
                return bytes(body)

    async def client_gone(self) -> None:
        """Returns when the client has closed the connection (or the answer is complete). Call after `read_body`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, body: bytes, *, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Answer with a JSON body."""
        self.started = True
        length = (b"content-length", str(len(body)).encode())
        await self._send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json"), length, *headers]})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self.finished = True

    async def start_events(self) -> None:
        """Begin a stream of server-sent events."""
        self.started = True
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send_event(self, data: bytes) -> None:
        """One event, `data` being a line of JSON. Waits while the client reads too slowly: its events then stay where they are made."""
        await self._send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    async def end_events(self) -> None:
        """`[DONE]` and the end of the stream."""
        await self._send({"type": "http.response.body", "body": _DONE, "more_body": False})
        self.finished = True

    async def fail(self, error: Exception, *, retry_after_s: int) -> None:
        """Tell the client of `error`: as the answer, or as the last event of a stream already begun. A mistake of ours is logged too."""
        if not isinstance(error, LockstepError):
            _LOGGER.error("%s %s failed", self._scope["method"], self._scope["path"], exc_info=error)
        elif status_of(error) == 500:
            _LOGGER.error("%s %s failed: %s", self._scope["method"], self._scope["path"], error)
        if self.finished:
            return
        if self.started:
            await self.send_event(error_body(error))
            await self.end_events()
            return
        headers = ((b"retry-after", str(retry_after_s).encode()),) if status_of(error) in (429, 503) else ()
        await self.answer(error_body(error), status=status_of(error), headers=headers)


def _too_large(bytes_max: int, found: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the request body may have at most {bytes_max} bytes, this one has {found} or more; send less in one request")
