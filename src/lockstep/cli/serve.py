"""`lockstep serve MODEL`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Coroutine
from typing import Any

from lockstep.cli.flags import add_engine_flags, count, engine_config
from lockstep.errors import ConfigError
from lockstep.launch import local_config
from lockstep.launch.serving import Address, run_server
from lockstep.server.settings import ServerSettings

API_KEY_VARIABLE = "LOCKSTEP_API_KEY"
"""The one environment variable: the API key, for those who do not want it in a process list. --api-key goes before it."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP (OpenAI's API)", description=__doc__)
    add_engine_flags(parser)
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="(default: %(default)s, this machine only; 0.0.0.0 is every interface)")
    http.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    http.add_argument("--uds", help="listen at this Unix socket instead of host and port")
    http.add_argument("--served-model-name", action="extend", nargs="+", help="names that requests may use; answers carry the first (default: MODEL)")
    http.add_argument("--api-key", help=f"ask clients for this key (default: ${API_KEY_VARIABLE}, or none)")
    http.add_argument("--max-logprobs", type=int, default=20, help="most alternatives a token that a request may ask for (default: %(default)s)")
    http.add_argument("--allowed-origins", default="[]", help="origins that browsers may call from, as JSON: '[\"*\"]' (default: none)")
    http.add_argument("--return-tokens-as-token-ids", action="store_true", help="name tokens in logprobs as token_id:17")
    http.add_argument("--max-concurrent-requests", type=count, default=4096, help="more are answered 503 with Retry-After (default: %(default)s)")
    http.add_argument("--ssl-keyfile", help="TLS key; goes with --ssl-certfile")
    http.add_argument("--ssl-certfile", help="TLS certificate; goes with --ssl-keyfile")
    http.add_argument("--shutdown-timeout", type=float, default=10.0, help="seconds that open answers may go on after SIGTERM (default: %(default)s)")
    http.add_argument(
        "--server-dev-mode",
        action="store_true",
        help="also serve /pause, /resume, /is_paused, /reset_prefix_cache, /update_weights, to whoever may ask",
    )
    http.add_argument("--access-log", action=argparse.BooleanOptionalAction, default=False, help="a line a request")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    logging.getLogger("lockstep").setLevel(logging.INFO)
    config = engine_config(arguments)
    settings = ServerSettings(
        served_model_names=tuple(arguments.served_model_name or [config.model]),
        api_key=arguments.api_key or os.environ.get(API_KEY_VARIABLE),
        max_logprobs=arguments.max_logprobs,
        allowed_origins=_origins(arguments.allowed_origins),
        return_tokens_as_token_ids=arguments.return_tokens_as_token_ids,
        requests_max=arguments.max_concurrent_requests,
        shutdown_timeout_s=arguments.shutdown_timeout,
        dev_mode=arguments.server_dev_mode,
    )
    address = Address(
        host=arguments.host,
        port=arguments.port,
        uds=arguments.uds,
        ssl_certfile=arguments.ssl_certfile,
        ssl_keyfile=arguments.ssl_keyfile,
        access_log=arguments.access_log,
    )

    def on_listening(url: str) -> None:
        print(f"lockstep serves {settings.served_model_names[0]} at {url}", file=sys.stderr)
        if url.startswith("http"):
            messages = [{"role": "user", "content": "What is the capital of France?"}]
            body = json.dumps({"model": settings.served_model_names[0], "messages": messages, "temperature": 0})
            key = ' -H "Authorization: Bearer $KEY"' if settings.api_key else ""
            print(f"try: curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'", file=sys.stderr, flush=True)

    local = local_config(config)  # what has to be downloaded comes before the loop, which would hold an interrupt back
    return _run_loop(run_server(local, settings, address, on_listening=on_listening))


def _run_loop(coroutine: Coroutine[Any, Any, int]) -> int:
    """On uvloop where it exists (not on Windows)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return int(uvloop.run(coroutine))


def _origins(text: str) -> tuple[str, ...]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"--allowed-origins must be a JSON list of strings such as '[\"*\"]', got {text!r}")
    return tuple(value)
