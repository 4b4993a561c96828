"""Serves an application with uvicorn until told to stop. Knows sockets, signals and the order of a shutdown; does not know routes.

A stop (SIGTERM, SIGINT or the caller's event) goes: no new connections and no new work; open answers go on for up to `shutdown_timeout_s`; what is
then still open is ended with an error; `serve` returns. A second signal skips the wait. Signals are not raised again: the caller has more to close.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from lockstep.errors import ConfigError
from lockstep.server.admission import Admission

_CLOSING_S = 2.0  # for the last bytes of answers that were ended
_BACKLOG = 2048


async def serve(
    app: Starlette,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    uds: str | None = None,
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
    access_log: bool = False,
    shutdown_timeout_s: float = 10.0,
    stop: asyncio.Event | None = None,
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve `app` (of `create_app`) until a signal comes or `stop` is set. Signals are only watched from the main thread.

    port: 0 takes a free one. uds: a path to listen at instead of host and port. on_listening: called once with the URL (or "unix:PATH") when
    connections are taken. Raises ConfigError if the address cannot be had or the TLS files cannot be read.
    """
    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise ConfigError("ssl_certfile and ssl_keyfile go together; give both or neither")
    listener = _unix_listener(uds) if uds is not None else _tcp_listener(host, port)
    try:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=access_log,
            server_header=False,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            timeout_graceful_shutdown=int(shutdown_timeout_s + _CLOSING_S) + 1,
        )
        try:
            config.load()
        except OSError as error:
            raise ConfigError(f"cannot read the TLS files {ssl_certfile} and {ssl_keyfile}: {error}") from None
        address = _address(listener, tls=ssl_certfile is not None, uds=uds, host=host)
        server = _Server(config, app.state.admission, shutdown_timeout_s=shutdown_timeout_s, address=address, on_listening=on_listening)
        await _serve_until(server, listener, stop)
    finally:
        listener.close()
        if uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(uds)


def check_address(*, host: str, port: int, uds: str | None, ssl_certfile: str | None, ssl_keyfile: str | None) -> None:
    """Raises the ConfigError that `serve` would raise for this address, before anything expensive is started. Does not keep the address."""
    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise ConfigError("ssl_certfile and ssl_keyfile go together; give both or neither")
    for name in (ssl_certfile, ssl_keyfile):
        if name is not None and not os.access(name, os.R_OK):
            raise ConfigError(f"cannot read the TLS file {name}; check the path and its permissions")
    if uds is None:
        _tcp_listener(host, port).close()


async def _serve_until(server: _Server, listener: socket.socket, stop: asyncio.Event | None) -> None:
    watch = asyncio.create_task(_relay(stop, server)) if stop is not None else None
    try:
        await server.serve(sockets=[listener])
    finally:
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


async def _relay(stop: asyncio.Event, server: _Server) -> None:
    await stop.wait()
    server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn's server, with our order of shutdown and without its raising of caught signals."""

    def __init__(
        self, config: uvicorn.Config, admission: Admission, *, shutdown_timeout_s: float, address: str, on_listening: Callable[[str], None] | None
    ) -> None:
        super().__init__(config)
        self._admission = admission
        self._shutdown_timeout_s = shutdown_timeout_s
        self._listening_at = address
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self._on_listening is not None:
            self._on_listening(self._listening_at)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._admission.drain()
        if self.force_exit:
            self._admission.stop()
        timer = asyncio.get_running_loop().call_later(self._shutdown_timeout_s, self._admission.stop)
        try:
            await super().shutdown(sockets=sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, former in before.items():
                signal.signal(number, former)


def _tcp_listener(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be from 0 to 65535, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on host {host!r}, port {port}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another host or port") from None
    return listener


def _unix_listener(path: str) -> socket.socket:
    """Binds `path`, taking the place of a socket that nobody listens at. The socket is the owner's alone (mode 0600)."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ConfigError(f"{path} exists and is not a socket; choose another path")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise ConfigError(f"another server listens at {path}; choose another path")
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {path}: {error.strerror or error}") from None
    except ConfigError:
        listener.close()
        raise
    return listener


def _address(listener: socket.socket, *, tls: bool, uds: str | None, host: str) -> str:
    if uds is not None:
        return f"unix:{uds}"
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{listener.getsockname()[1]}"
