"""What the tests of the server share: its settings, and what an error and a healthy server look like."""

from __future__ import annotations

from typing import Any

import httpx2
from scripted_engine import END, START

from lockstep.server.settings import ServerSettings

SETTINGS = ServerSettings(served_model_names=("lock-1", "alias"), requests_max=40, body_bytes_max=1 << 16, shutdown_timeout_s=5.0)
MESSAGES: Any = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
RENDERED = (START, *b"system:be", END, START, *b"user:a\nb", END, START)


def error_of(answer: httpx2.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def healthy(http: httpx2.Client) -> bool:
    answer = http.post("/v1/completions", json={"model": "lock-1", "prompt": "x", "max_tokens": 5})
    return answer.status_code == 200 and answer.json()["choices"][0]["text"] == "Hello"
