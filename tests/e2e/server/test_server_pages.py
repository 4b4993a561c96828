"""Pages, access and shutdown."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from scripted_engine import PATIENCE_S, WINDOW, Hold, ScriptedEngine, events_of, running_server, say
from server_answers import MESSAGES, RENDERED, SETTINGS, error_of

from lockstep.server.app import create_app
from lockstep.server.protocol import EngineStatus
from lockstep.server.settings import ServerSettings
from lockstep.text.tokenizer import Tokenizer


def test_models_version_health_and_root_pages(client: openai.OpenAI, http: httpx2.Client, engine: ScriptedEngine) -> None:
    assert [model.id for model in client.models.list()] == ["lock-1", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    assert http.get("/v1/models/no/such").status_code == 404
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == WINDOW
    assert http.get("/version").json()["system_fingerprint"] == "fp-scripted"
    assert http.get("/health").status_code == http.get("/ping").status_code == http.get("/ready").status_code == 200
    assert http.get("/").json()["models"] == ["lock-1", "alias"]


def test_health_shows_requests_and_blocks(http: httpx2.Client, engine: ScriptedEngine) -> None:
    engine.state = EngineStatus(alive=True, epoch=4, restarts=3, running=3, waiting=2, blocks_free=5, blocks_total=9)
    counts = {"epoch": 4, "restarts": 3, "running": 3, "waiting": 2, "blocks_free": 5, "blocks_total": 9}
    assert http.get("/health").json() == {"status": "ok", "reason": "", **counts}


def test_recovering_engine_is_healthy_but_not_ready_and_takes_requests(http: httpx2.Client, engine: ScriptedEngine) -> None:
    engine.state = EngineStatus(alive=True, recovering=True, reason="stage 1 was ended by SIGKILL", epoch=2, restarts=2)
    health, ready = http.get("/health"), http.get("/ready")
    assert health.status_code == 200
    assert (health.json()["status"], health.json()["restarts"]) == ("recovering", 2)
    assert "SIGKILL" in health.json()["reason"]
    assert ready.status_code == 503
    assert "SIGKILL" in error_of(ready)["message"]
    assert http.post("/v1/completions", json={"prompt": "p"}).status_code == 200
    engine.state = EngineStatus(alive=True, epoch=2, restarts=2)
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize("scraped", [True, False])
def test_metrics_page_is_what_the_scrape_gives_and_is_not_there_without_one(tokenizer: Tokenizer, scraped: bool) -> None:
    def scrape() -> tuple[str, bytes]:
        return "text/plain; version=1.0.0; charset=utf-8", b"lockstep:restarts_total 2\n"

    async def get() -> httpx2.Response:
        settings = ServerSettings(served_model_names=("m",), api_key="sesame")
        app = create_app(ScriptedEngine(say("Hello")), tokenizer, settings, scrape=scrape if scraped else None)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://m") as http:
            return await http.get("/metrics")

    answer = asyncio.run(get())
    assert answer.status_code == (200 if scraped else 404)
    if scraped:
        assert (answer.headers["content-type"], answer.content) == scrape()


def test_tokenize_and_detokenize_are_inverse(http: httpx2.Client, engine: ScriptedEngine) -> None:
    answer = http.post("/tokenize", json={"model": "lock-1", "prompt": "aé", "return_token_strs": True}).json()
    assert answer["tokens"] == list("aé".encode())
    assert (answer["count"], answer["max_model_len"], len(answer["token_strs"])) == (3, WINDOW, 3)
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "aé"}
    assert http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"] == list(RENDERED)
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_api_key_is_asked_for_except_by_probes(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(say("Hello"))
    settings = ServerSettings(served_model_names=("m",), api_key="sesame")
    with running_server(engine, tokenizer, settings) as server:
        with httpx2.Client(base_url=server.url) as http:
            assert http.get("/v1/models").status_code == 401
            assert error_of(http.get("/v1/models", headers={"Authorization": "Bearer sesam"}))["code"] == "invalid_api_key"
            assert http.get("/v1/models", headers={"Authorization": "Basic sesame"}).status_code == 401
            assert http.get("/health").status_code == 200
        with openai.OpenAI(base_url=server.url + "/v1", api_key="sesame") as client:
            assert client.completions.create(model="m", prompt="p").choices[0].text == "Hello"


def test_browsers_of_allowed_origins_may_read_answers(tokenizer: Tokenizer) -> None:
    settings = ServerSettings(served_model_names=("m",), api_key="k", allowed_origins=("https://a.example",))
    with running_server(ScriptedEngine(say("Hello")), tokenizer, settings) as server, httpx2.Client(base_url=server.url) as http:
        ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        assert http.options("/v1/completions", headers=ask).headers["access-control-allow-origin"] == "https://a.example"
        refused = http.get("/v1/models", headers={"Origin": "https://a.example"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")
        assert "access-control-allow-origin" not in http.get("/health", headers={"Origin": "https://b.example"}).headers


def test_shutdown_lets_answers_finish_then_ends_the_rest(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(lambda submission: [*events_of(b"a", finish=None), Hold()])
    settings = ServerSettings(served_model_names=("m",), shutdown_timeout_s=0.3)
    with running_server(engine, tokenizer, settings) as server, httpx2.Client(base_url=server.url, timeout=10) as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True}) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.stop()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "a"
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "overloaded"
        server.join()
        with pytest.raises(httpx2.ConnectError):
            http.get("/health")


def test_draining_server_finishes_what_runs_and_takes_no_more(tokenizer: Tokenizer) -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine(lambda submission: [*events_of(b"a", finish=None), gate, *events_of(b"ab")[1:]])
    body = b'{"prompt":"p"}'
    with running_server(engine, tokenizer, SETTINGS) as server, httpx2.Client(base_url=server.url, timeout=10) as http:
        address = (urlsplit(server.url).hostname or "", urlsplit(server.url).port or 80)
        with http.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True}) as answer, socket.create_connection(address) as late:
            lines = answer.iter_lines()
            next(lines)
            late.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:5])
            http.get("/health")  # by its answer the half request has been read
            server.stop()
            deadline = time.monotonic() + PATIENCE_S
            while takes_connections(address):
                assert time.monotonic() < deadline, "the server still takes connections"
            late.sendall(body[5:])
            assert late.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
            server.call(gate.set)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(events[-2])["choices"][0] == {"index": 0, "text": "b", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        assert events[-1] == "[DONE]"
        server.join()
    assert len(engine.submissions) == 1
    assert not engine.aborted


def takes_connections(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address).close()
    except ConnectionError:  # refused, or reset in the very moment of closing
        return False
    return True


def test_unix_socket_serves_and_is_removed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "lockstep.sock"
    engine = ScriptedEngine(say("Hello"))
    with running_server(engine, tokenizer, ServerSettings(served_model_names=("m",)), uds=str(path)) as server:
        assert server.url == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://localhost") as http:
            assert http.post("/v1/completions", json={"prompt": "p"}).json()["choices"][0]["text"] == "Hello"
    assert not path.exists()
