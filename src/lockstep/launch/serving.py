"""Serves an engine over HTTP: the server's client protocol over `AsyncClient`, and the process's life from listening to exit status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from lockstep.config import EngineConfig
from lockstep.errors import LockstepError
from lockstep.launch.engine import RunningEngine, launch_engine, update_weights
from lockstep.launch.generation import sampling_defaults
from lockstep.launch.metrics import engine_counts
from lockstep.launch.model import load_tokenizer, resolve_model
from lockstep.runtime.client import AsyncClient
from lockstep.server.app import create_app
from lockstep.server.protocol import EngineStatus
from lockstep.server.serving import check_address, serve
from lockstep.server.settings import ServerSettings
from lockstep.telemetry.metrics import metrics_text

FAILED_S = 5.0
"""After an engine failure the server answers 503 for this long, so that probes and clients learn why, and then exits."""

_log = logging.getLogger("lockstep.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    access_log: bool = False


class ServedClient(AsyncClient):
    """`AsyncClient` with the status that the server asks for, and what `launch` alone can do."""

    def __init__(self, running: RunningEngine) -> None:
        super().__init__(running.engine, running.factory, lambda: running.fingerprint)
        self._running = running

    async def update_weights(self, model: str) -> None:
        await update_weights(self._running, model)

    def status(self) -> EngineStatus:
        state = self.state
        alive = state.phase in ("running", "recovering")
        return EngineStatus(
            alive=alive,
            recovering=state.phase == "recovering",
            reason=state.reason if alive else str(state.failure or "the engine is closed"),
            epoch=state.epoch,
            restarts=state.restarts,
            running=state.running,
            waiting=state.waiting,
            blocks_free=state.blocks_free,
            blocks_total=state.blocks_total,
        )


async def run_server(config: EngineConfig, settings: ServerSettings, address: Address, *, on_listening: Callable[[str], None]) -> int:
    """Start engine and server; returns the exit status: 0 after a stop that was asked for, 1 if the engine failed."""
    loop = asyncio.get_running_loop()
    stop, failed = asyncio.Event(), asyncio.Event()

    def on_failure(error: LockstepError) -> None:
        loop.call_soon_threadsafe(failed.set)

    check_address(host=address.host, port=address.port, uds=address.uds, ssl_certfile=address.ssl_certfile, ssl_keyfile=address.ssl_keyfile)
    model = resolve_model(config)
    tokenizer = load_tokenizer(config, model)
    settings = replace(settings, sampling_defaults=sampling_defaults(config, model))
    running = await asyncio.to_thread(launch_engine, config, model=model, on_failure=on_failure)
    watch = asyncio.create_task(_stop_after_failure(failed, stop))
    try:
        client = ServedClient(running)

        def scrape() -> tuple[str, bytes]:
            return metrics_text(engine_counts(running), model_name=settings.served_model_names[0])

        app = create_app(client, tokenizer, settings, scrape=scrape, controls=client)
        await serve(
            app,
            host=address.host,
            port=address.port,
            uds=address.uds,
            ssl_certfile=address.ssl_certfile,
            ssl_keyfile=address.ssl_keyfile,
            access_log=address.access_log,
            shutdown_timeout_s=settings.shutdown_timeout_s,
            stop=stop,
            on_listening=on_listening,
        )
    finally:
        watch.cancel()
        await asyncio.to_thread(running.close)
    return 1 if failed.is_set() else 0


async def _stop_after_failure(failed: asyncio.Event, stop: asyncio.Event) -> None:
    await failed.wait()
    _log.error("the engine has failed; this server answers 503 for %g s and then exits", FAILED_S)
    await asyncio.sleep(FAILED_S)
    stop.set()
