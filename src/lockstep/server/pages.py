"""GET pages: models, health, version. Knows the engine's status; does not know requests."""

from __future__ import annotations

from importlib import metadata

import msgspec

from lockstep.errors import CapacityError, PeerError
from lockstep.server.endpoint import ServerContext
from lockstep.server.exchange import Exchange
from lockstep.server.responses import ModelCard, ModelList


async def answer_models(context: ServerContext, exchange: Exchange, body: bytes) -> None:
    """GET /v1/models."""
    names = context.settings.served_model_names
    await exchange.answer(msgspec.json.encode(ModelList(data=[_card(context, name) for name in names])))


async def answer_model(context: ServerContext, exchange: Exchange, body: bytes) -> None:
    """GET /v1/models/{model}; a name may hold slashes."""
    name = exchange.path_parameter("model")
    context.require_model(name)
    await exchange.answer(msgspec.json.encode(_card(context, name)))


async def answer_health(context: ServerContext, exchange: Exchange, body: bytes) -> None:
    """GET /health and /ping: 200 while the engine runs or recovers, with its requests and KV blocks; 503 with the reason once it has failed."""
    context.require_engine()
    status = context.client.status()
    page = {
        "status": "recovering" if status.recovering else "ok",
        "reason": status.reason,
        "epoch": status.epoch,
        "restarts": status.restarts,
        "running": status.running,
        "waiting": status.waiting,
        "blocks_free": status.blocks_free,
        "blocks_total": status.blocks_total,
    }
    await exchange.answer(msgspec.json.encode(page))


async def answer_ready(context: ServerContext, exchange: Exchange, body: bytes) -> None:
    """GET /ready: 200 if a request would be computed at once; 503 with the reason while the engine recovers or the server is shutting down."""
    context.require_engine()
    if context.admission.draining:
        raise CapacityError("the server is shutting down")
    status = context.client.status()
    if status.recovering:
        raise PeerError(f"the engine recovers, requests wait meanwhile: {status.reason or 'it gives no reason'}")
    await exchange.answer(msgspec.json.encode({"status": "ok", "requests_running": status.running, "requests_waiting": status.waiting}))


async def answer_version(context: ServerContext, exchange: Exchange, body: bytes) -> None:
    """GET /version."""
    await exchange.answer(msgspec.json.encode({"version": lockstep_version(), "system_fingerprint": context.client.fingerprint}))


async def answer_root(context: ServerContext, exchange: Exchange, body: bytes) -> None:
    """GET /: what runs here."""
    page = {"name": "lockstep", "version": lockstep_version(), "models": context.settings.served_model_names, "api": "/v1"}
    await exchange.answer(msgspec.json.encode(page))


def lockstep_version() -> str:
    """The installed version, or "unknown" when run from a source tree."""
    try:
        return metadata.version("lockstep-llm")
    except metadata.PackageNotFoundError:
        return "unknown"


def _card(context: ServerContext, name: str) -> ModelCard:
    return ModelCard(id=name, created=context.created_s, root=context.settings.served_model_names[0], max_model_len=context.client.max_model_len)
