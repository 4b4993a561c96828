"""Signals that reach the server and its stages alike: a stop and continue is not a failure, a SIGTERM drains."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx2
from served_process import PATIENCE_S, assert_all_gone, served

HEARTBEAT_TIMEOUT_S = 2.0
STOPPED_S = 4.0


def ask(url: str, max_tokens: int) -> tuple[int, str]:
    body = {"model": "smollm2", "prompt": "The river", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx2.post(url + "/v1/completions", json=body, timeout=PATIENCE_S)
    return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text


def test_a_server_that_is_stopped_and_continued_as_a_whole_goes_on() -> None:
    with served("-pp", "2", "--heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S)) as server:
        status, before = ask(server.url, 8)
        assert status == 200
        everything = [server.process.pid, *(stage.pid for stage in server.stages)]
        for pid in everything:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)  # the fault itself: longer than the heartbeat's limit
        for pid in everything:
            os.kill(pid, signal.SIGCONT)
        assert ask(server.url, 8) == (200, before)
        status, page = server.health()
        assert (status, page["restarts"]) == (200, 0)
        assert [stage.pid for stage in server.stages_now()] == everything[1:]


def test_sigterm_to_server_and_stages_drains_open_requests_and_exits_with_0() -> None:
    with served("-pp", "2") as server:
        answers: list[tuple[int, str]] = []
        client = threading.Thread(target=lambda: answers.append(ask(server.url, 96)))
        client.start()
        server.seconds_until_health(lambda _, page: page["running"] > 0)
        for pid in (*(stage.pid for stage in server.stages), server.process.pid):
            os.kill(pid, signal.SIGTERM)
        client.join(PATIENCE_S)
        assert [status for status, _ in answers] == [200]
        assert server.process.wait(PATIENCE_S) == 0
        assert_all_gone(server.stages)
