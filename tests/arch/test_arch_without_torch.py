"""A CPU server never loads torch, and does not need the backends that do. Each claim is checked in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "lockstep.backends.reference", "lockstep.backends.triton")
TIMEOUT_S = 120

SERVING_MODULES = (
    "lockstep.cli.main",
    "lockstep.cli.serve",
    "lockstep.launch.serving",
    "lockstep.launch.__main__",
    "lockstep.runtime.transport.stage_process",
    "lockstep.backends.native",
    "lockstep.llm",
)

GENERATE = """
import threading
import lockstep.cli.main, lockstep.launch.serving
from lockstep.config import EngineConfig
from lockstep.core.params import SamplingParams
from lockstep.launch import launch_engine, load_tokenizer
from lockstep.runtime.client import collect
config = EngineConfig(model="smollm2", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32, threads=1)
running = launch_engine(config)
try:
    prompt = load_tokenizer(config, running.model).encode("The capital of France is")
    request = running.factory.build("r", prompt, SamplingParams(max_tokens=3, temperature=0.0))
    tokens = [t for batch in collect(running.engine, [request]) for event in batch for t in event.token_ids]
finally:
    running.close()
"""

REFUSE = """
import sys
class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton") or name in ("lockstep.backends.reference", "lockstep.backends.triton"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)
sys.meta_path.insert(0, Refusal())
"""

REPORT = "\nimport json, sys\nprint(json.dumps([sorted(sys.modules), globals().get('tokens')]))\n"


def run_alone(code: str) -> tuple[list[str], list[int] | None]:
    """Run code in a fresh interpreter; (names of loaded modules, what it left in `tokens`)."""
    done = subprocess.run([sys.executable, "-c", code + REPORT], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    loaded, tokens = json.loads(done.stdout.splitlines()[-1])
    return loaded, tokens


def heavy(loaded: list[str]) -> list[str]:
    return [name for name in loaded if any(name == place or name.startswith(f"{place}.") for place in HEAVY)]


def test_everything_that_serves_imports_no_torch() -> None:
    loaded, _ = run_alone("".join(f"import {name}\n" for name in SERVING_MODULES))
    assert heavy(loaded) == []
    assert "lockstep.backends.native._kernels" in loaded


def test_engine_on_the_native_backend_answers_without_torch_and_without_the_backends_that_need_it() -> None:
    loaded, tokens = run_alone(GENERATE)
    assert heavy(loaded) == []
    assert tokens is not None
    assert len(tokens) == 3
    loaded, same = run_alone(REFUSE + GENERATE)
    assert heavy(loaded) == []
    assert same == tokens


def test_refused_reference_backend_says_what_to_install() -> None:
    ask = """
from lockstep.config import EngineConfig
from lockstep.errors import UnsupportedError
from lockstep.launch.stages import make_backend
try:
    make_backend(EngineConfig(model="smollm2", backend="reference"))
except UnsupportedError as error:
    assert "pip install" in str(error), error
    tokens = [1]
"""
    _, refused = run_alone(REFUSE + ask)
    assert refused == [1]


@pytest.mark.parametrize("absent", ["numpy", "zmq", "msgspec", "lockstep.core", "lockstep.llm", "asyncio"])
def test_importing_the_package_alone_loads_nothing_of_weight(absent: str) -> None:
    loaded, _ = run_alone("import lockstep\n")
    assert "lockstep" in loaded
    assert absent not in loaded
