"""Listening and stopping: what `serve` does with addresses and signals."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from scripted_engine import ScriptedEngine, byte_tokenizer, say

from lockstep.errors import ConfigError
from lockstep.server.app import create_app
from lockstep.server.serving import serve
from lockstep.server.settings import ServerSettings


def serve_refuses(folder: Path, **options: Any) -> str:
    app = create_app(ScriptedEngine(say("Hello")), byte_tokenizer(folder), ServerSettings(served_model_names=("m",)))
    with pytest.raises(ConfigError) as caught:
        asyncio.run(serve(app, **options))
    return str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_the_server_and_lets_its_caller_go_on(tmp_path: Path, number: signal.Signals) -> None:
    child = Path(__file__).with_name("serving_child.py")
    with subprocess.Popen([sys.executable, str(child), str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            answer = httpx2.post(url + "/v1/completions", json={"prompt": "p"}, timeout=10)
            assert answer.json()["choices"][0]["text"] == "Hello"
        finally:
            process.send_signal(number)
        assert process.wait(20) == 0
        assert process.stdout.read().strip() == "returned []"


def test_taken_port_is_a_config_error_naming_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in serve_refuses(tmp_path, port=port)


def test_unknown_host_and_port_out_of_range_are_config_errors(tmp_path: Path) -> None:
    serve_refuses(tmp_path, host="no.such.host.invalid", port=0)
    serve_refuses(tmp_path, port=70_000)


def test_missing_tls_files_are_config_errors(tmp_path: Path) -> None:
    assert "both" in serve_refuses(tmp_path, port=0, ssl_certfile="a.pem")
    assert "a.pem" in serve_refuses(tmp_path, port=0, ssl_certfile="a.pem", ssl_keyfile="b.pem")


def test_socket_path_is_taken_over_only_from_the_dead(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    assert "not a socket" in serve_refuses(tmp_path, uds=str(file))
    assert file.read_text() == "precious"
    path = tmp_path / "live.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        assert "another server" in serve_refuses(tmp_path, uds=str(path))
    assert path.exists()
