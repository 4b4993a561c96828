"""The ASGI application: which path is answered by what. Knows routes and their order; does not know what an answer holds or how it is served."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lockstep.server.access import RequireApiKey
from lockstep.server.admission import Admission
from lockstep.server.chat import answer_chat
from lockstep.server.completions import answer_completion
from lockstep.server.controls import Controls
from lockstep.server.endpoint import Answer, Endpoint, ServerContext
from lockstep.server.errors import plain_error_body
from lockstep.server.pages import answer_health, answer_model, answer_models, answer_ready, answer_root, answer_version
from lockstep.server.protocol import EngineClient, EngineControls
from lockstep.server.settings import ServerSettings
from lockstep.server.tokenization import answer_detokenize, answer_tokenize
from lockstep.text.tokenizer import Tokenizer

Scrape = Callable[[], tuple[str, bytes]]
"""Content type and body of /metrics."""


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    *,
    scrape: Scrape | None = None,
    controls: EngineControls | None = None,
    extra_routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """The HTTP application over `client`. scrape: answers /metrics, which is not there without it. controls: what `settings.dev_mode` opens.
    extra_routes: pages of others. `app.state.admission` is what `serve` drains and stops."""
    admission = Admission(settings.requests_max)
    context = ServerContext(client=client, tokenizer=tokenizer, settings=settings, admission=admission, created_s=int(time.time()))

    def route(path: str, answer: Answer, method: str) -> Route:
        return Route(path, Endpoint(context, answer), methods=[method])

    routes: list[BaseRoute] = [
        route("/v1/completions", answer_completion, "POST"),
        route("/v1/chat/completions", answer_chat, "POST"),
        route("/v1/models", answer_models, "GET"),
        route("/v1/models/{model:path}", answer_model, "GET"),
        route("/tokenize", answer_tokenize, "POST"),
        route("/detokenize", answer_detokenize, "POST"),
        route("/health", answer_health, "GET"),
        route("/ping", answer_health, "GET"),
        route("/ready", answer_ready, "GET"),
        route("/version", answer_version, "GET"),
        route("/", answer_root, "GET"),
        *([] if scrape is None else [_metrics_route(scrape)]),
        *([] if controls is None or not settings.dev_mode else _control_routes(Controls(controls), route)),
        *extra_routes,
    ]
    app = Starlette(routes=routes, middleware=_middleware(settings), exception_handlers={HTTPException: _answer_http_exception})
    app.router.redirect_slashes = False
    app.state.admission = admission
    return app


def _control_routes(controls: Controls, route: Callable[[str, Answer, str], Route]) -> list[Route]:
    return [
        route("/pause", controls.pause, "POST"),
        route("/resume", controls.resume, "POST"),
        route("/is_paused", controls.is_paused, "GET"),
        route("/reset_prefix_cache", controls.reset_prefix_cache, "POST"),
        route("/update_weights", controls.update_weights, "POST"),
    ]


def _metrics_route(scrape: Scrape) -> Route:
    async def answer(request: Request) -> Response:
        content_type, page = scrape()
        return Response(page, headers={"content-type": content_type})

    return Route("/metrics", answer, methods=["GET"])


def _middleware(settings: ServerSettings) -> list[Middleware]:
    middleware: list[Middleware] = []
    if settings.allowed_origins:
        # Outermost, so that browsers may read refusals too and need no key to ask what is allowed.
        middleware.append(Middleware(CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"], allow_headers=["*"]))
    if settings.api_key is not None:
        middleware.append(Middleware(RequireApiKey, api_key=settings.api_key))
    return middleware


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """The router's own refusals (no such path, wrong method) in the form of all others."""
    assert isinstance(error, HTTPException), type(error)
    message = {
        404: f"there is nothing at {request.url.path}; the API is under /v1",
        405: f"{request.url.path} does not take {request.method}; see the Allow header",
    }.get(error.status_code, error.detail)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    body = plain_error_body(error.status_code, message, code=code)
    return Response(body, status_code=error.status_code, headers=error.headers, media_type="application/json")
