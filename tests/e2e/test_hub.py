"""Commands and `LLM` with a model by Hugging Face name, from a hub on loopback, each start a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served_process import COMMAND, PATIENCE_S, Said

from fake_hub import FakeHub, fake_hub
from tiny_llama import write_tiny_llama

NAME = "tiny/llama"
TOKEN = "hf_member"
QUICK = ("--prompt", "Once upon", "--max-tokens", "12", "--sampling-seed", "5", "--ignore-eos", "--dtype", "float32", "--json")
TWO = ("--pipeline-parallel-size", "2", "--threads", "1")
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        hub.accounts.add(TOKEN)
        yield hub


@pytest.fixture
def folder(tmp_path: Path, hub: FakeHub) -> Path:
    folder = write_tiny_llama(tmp_path / "folder")
    hub.repository(NAME, gated=True, tokens={TOKEN}).commit_folder(folder)
    return folder


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    mine = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**{name: value for name, value in os.environ.items() if not name.startswith("HF_")}, **mine}


def run(environment: dict[str, str], *arguments: str, status: int = 0) -> tuple[str, str]:
    """(standard output, standard error)."""
    done = subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def tokens(out: str) -> list[int]:
    found: list[int] = json.loads(out)["outputs"][0]["token_ids"]
    assert len(found) == 12
    return found


def test_two_stages_by_name_give_the_tokens_of_the_folder_and_so_does_an_offline_start(
    hub: FakeHub, folder: Path, environment: dict[str, str]
) -> None:
    expected = tokens(run(environment, "generate", str(folder), *QUICK)[0])
    assert hub.requests == []
    assert tokens(run(environment, "generate", NAME, *TWO, *QUICK)[0]) == expected
    downloads = [name for name in hub.bodies() if name in SHARDS]
    assert sorted(downloads) == SHARDS  # once: a stage's process asks nobody
    hub.requests.clear()
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    assert tokens(run(offline, "generate", "--model", NAME, *TWO, *QUICK)[0]) == expected
    assert hub.requests == []


def test_a_server_goes_by_the_models_name_and_logs_its_commit(hub: FakeHub, folder: Path, environment: dict[str, str]) -> None:
    command = [*COMMAND, "serve", NAME, "--port", "0", "--dtype", "float32"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = Said(process.stderr)
        try:
            said.wait_for(re.compile(rf"lockstep serves {NAME} at (http://\S+)"))
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
            said.join()
    assert f"{NAME}: commit {hub.repositories[NAME].refs['main']} of revision main" in said.text


def test_the_tokenizer_may_have_a_name_of_its_own(hub: FakeHub, folder: Path, environment: dict[str, str]) -> None:
    expected = tokens(run(environment, "generate", str(folder), *QUICK)[0])
    hub.repository("tiny/words").commit({name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")})
    (folder / "tokenizer.json").unlink()
    hub.repository("tiny/bare").commit_folder(folder, branch="v1")
    bare = ("generate", "tiny/bare", "--revision", "v1")
    _, said = run(environment, *bare, *QUICK, status=2)
    assert "tokenizer.json" in said
    assert tokens(run(environment, *bare, "--tokenizer", "tiny/words", *QUICK)[0]) == expected


def test_a_wrong_token_ends_the_command_with_status_2_and_is_not_shown(hub: FakeHub, folder: Path, environment: dict[str, str]) -> None:
    _, said = run(environment, "generate", NAME, "--hf-token", "hf_wrong", *QUICK, status=2)
    assert said.startswith(f"lockstep: model {NAME!r}: {hub.url} refused the token (401)")
    assert "hf_wrong" not in said
    del environment["HF_TOKEN"]
    _, said = run(environment, "serve", NAME, "--port", "0", status=2)
    assert f"is gated (401), and no token was sent; ask for access at {hub.url}/{NAME}" in said


def test_a_token_given_as_a_flag_is_used_and_stands_on_no_command_line_of_a_stage(hub: FakeHub, folder: Path, environment: dict[str, str]) -> None:
    del environment["HF_TOKEN"]
    code = f"""
import json, psutil
from lockstep import LLM
with LLM({NAME!r}, hf_token={TOKEN!r}, pipeline_parallel_size=2, threads=1, dtype="float32", use_tqdm_on_load=False) as llm:
    assert {TOKEN!r} not in repr(llm.config)
    stages = [child.cmdline() for child in psutil.Process().children() if "lockstep.launch" in child.cmdline()]
print(json.dumps(stages))
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    lines: list[list[Any]] = json.loads(done.stdout)
    assert len(lines) == 2
    assert not [part for line in lines for part in line if TOKEN in part]


def test_an_interrupted_download_is_completed_by_the_next_start(hub: FakeHub, folder: Path, environment: dict[str, str]) -> None:
    """Files that came whole are not fetched again, and a connection that breaks is tried again."""
    expected = tokens(run(environment, "generate", str(folder), *QUICK)[0])
    hub.statuses[f"/storage/{hashlib.sha256((folder / SHARDS[1]).read_bytes()).hexdigest()}"] = 500
    _, said = run(environment, "download", NAME, status=2)
    assert "try again later" in said
    hub.statuses.clear()
    hub.cut[SHARDS[1]] = [2000]
    hub.requests.clear()
    path = run(environment, "download", NAME)[0].strip()
    assert hub.bodies().count(SHARDS[1]) == 2
    assert {*hub.bodies()} <= {*SHARDS}
    assert tokens(run(environment, "generate", path, *QUICK)[0]) == expected


def test_progress_is_plain_lines_off_a_terminal_and_silent_with_json(hub: FakeHub, folder: Path, environment: dict[str, str], tmp_path: Path) -> None:
    out, said = run(environment, "download", NAME, "--download-dir", str(tmp_path / "one"))
    assert Path(out.strip()).is_relative_to(tmp_path / "one")
    assert f"{NAME} at " in said
    assert "\r" not in said
    out, said = run(environment, "download", NAME, "--download-dir", str(tmp_path / "two"), "--json")
    assert Path(json.loads(out)["model"]).is_relative_to(tmp_path / "two")
    assert said == ""
