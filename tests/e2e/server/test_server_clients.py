"""Clients that leave or do not read."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import httpx2
import pytest
from scripted_engine import Hold, ScriptedEngine, events_of, say
from server_answers import healthy

from lockstep.core.outputs import TokenEvent


@pytest.mark.parametrize("silent", [False, True], ids=["after a token", "before any token"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_that_leaves_is_aborted_with_all_its_choices(
    url: str, engine: ScriptedEngine, http: httpx2.Client, stream: bool, silent: bool
) -> None:
    engine.script = lambda submission: [Hold()] if silent else [*events_of(b"a", finish=None), Hold()]
    address = urlsplit(url)
    assert address.hostname is not None
    body = json.dumps({"prompt": ["p", "q"], "n": 4, "stream": stream}).encode()
    with socket.create_connection((address.hostname, address.port or 80), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        engine.wait_until(lambda: len(engine.live) == 8)
        if stream and not silent:
            assert connection.recv(1)
    engine.wait_until(lambda: not engine.live)
    assert len(set(engine.aborted)) == 8
    engine.script = say("Hello, world")
    assert healthy(http)


def test_hundreds_of_dropped_streams_leave_nothing(url: str, engine: ScriptedEngine, http: httpx2.Client) -> None:
    engine.script = lambda submission: [*events_of(b"a", finish=None), Hold()]
    for _ in range(200):
        with http.stream("POST", "/v1/completions", json={"prompt": "p", "n": 2, "stream": True}) as answer:
            next(answer.iter_lines())
    engine.wait_until(lambda: not engine.live)
    assert len(set(engine.aborted)) == 400
    engine.script = say("Hello, world")
    assert healthy(http)


def test_slow_reader_stops_its_own_engine_stream_only(url: str, engine: ScriptedEngine, http: httpx2.Client) -> None:
    count = 400_000
    endless = [TokenEvent(request_id="", index=i, token_ids=(97,)) for i in range(count)]
    engine.script = lambda submission: endless if submission.prompt == (ord("s"),) else say("Hello, world")(submission)
    engine.yielded_count = 0
    address = urlsplit(url)
    assert address.hostname is not None
    body = b'{"prompt":"s","stream":true,"max_tokens":63}'
    with socket.create_connection((address.hostname, address.port or 80), timeout=10) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        engine.wait_until(lambda: engine.yielded_count > 1000)
        assert all(healthy(http) for _ in range(50))
    engine.wait_until(lambda: not engine.live)
    assert engine.yielded_count < count, "the whole answer was taken although nobody read it"
