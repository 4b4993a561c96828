"""One served engine a test file, with a fresh ledger a test, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import openai
import pytest
from scripted_engine import ScriptedEngine, byte_tokenizer, running_server, say
from server_answers import SETTINGS

from lockstep.server.protocol import EngineStatus
from lockstep.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine(say("Hello, world"))
    with running_server(engine, tokenizer, SETTINGS) as server:
        yield engine, server.url


@pytest.fixture
def engine(served: tuple[ScriptedEngine, str]) -> Iterator[ScriptedEngine]:
    """The module's engine with a fresh ledger; afterwards nothing of the test may be live."""
    engine, _ = served
    engine.script = say("Hello, world")
    engine.state = EngineStatus(alive=True)
    engine.submissions.clear()
    engine.aborted.clear()
    yield engine
    engine.wait_until(lambda: not engine.live)


@pytest.fixture
def url(served: tuple[ScriptedEngine, str]) -> str:
    return served[1]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=10) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=10) as http:
        yield http
