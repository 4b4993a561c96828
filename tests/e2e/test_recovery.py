"""A stage that dies or stops is started again, and nobody who reads a stream can tell: the same tokens, none lost, none repeated."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx2
import openai
import psutil
import pytest
from served_process import PATIENCE_S, ServedProcess, assert_all_gone, served

STREAM_COUNT = 6
TOKENS = 40
STAGES = 2


@dataclass(slots=True)
class Streams:
    """What came of each stream, and faults that are due once so many tokens have come altogether. They are done one after the other, by `hand`."""

    due: list[tuple[int, Callable[[], None]]]
    hand: ThreadPoolExecutor
    tokens: list[list[str]] = field(default_factory=lambda: [[] for _ in range(STREAM_COUNT)])
    count: int = 0
    done: list[Future[None]] = field(default_factory=list)

    async def read(self, client: openai.AsyncOpenAI, index: int) -> None:
        """Even streams are greedy, odd ones are sampled."""
        stream = await client.completions.create(
            model="smollm2",
            prompt=f"Story number {index}: once upon a time",
            max_tokens=TOKENS,
            temperature=0.0 if index % 2 == 0 else 0.9,
            seed=index,
            stream=True,
            logprobs=0,
            extra_body={"ignore_eos": True},
        )
        finish = None
        async for chunk in stream:
            assert finish is None
            finish = chunk.choices[0].finish_reason
            logprobs = chunk.choices[0].logprobs
            self._take(index, list(logprobs.tokens or []) if logprobs is not None else [])
        assert finish == "length"

    def _take(self, index: int, tokens: list[str]) -> None:
        self.tokens[index] += tokens
        self.count += len(tokens)
        while self.due and self.count >= self.due[0][0]:
            self.done.append(self.hand.submit(self.due.pop(0)[1]))


def run_streams(server: ServedProcess, *due: tuple[int, Callable[[], None]]) -> list[list[str]]:
    async def run(streams: Streams) -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S) as client:
            await asyncio.gather(*(streams.read(client, index) for index in range(STREAM_COUNT)))

    with ThreadPoolExecutor(1) as hand:
        streams = Streams(due=list(due), hand=hand)
        asyncio.run(run(streams))
    for fault in streams.done:
        fault.result()
    assert not streams.due
    return streams.tokens


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    folder = tmp_path_factory.mktemp("recordings")
    flags = ("--max-model-len", "1k", "--heartbeat-timeout-s", "2", "--max-restarts", "100", "--return-tokens-as-token-ids")
    with served("-pp", str(STAGES), "--recorder-folder", str(folder), *flags) as server:
        yield server
        restarts, last = server.health()[1]["restarts"], server.stages_now()
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0
        assert len(list(folder.glob("*.lockstep"))) == restarts
        assert_all_gone(last)


@pytest.fixture(scope="module")
def expected(server: ServedProcess) -> list[list[str]]:
    """The tokens of an undisturbed run."""
    tokens = run_streams(server)
    assert server.health()[1]["restarts"] == 0
    assert [len(stream) for stream in tokens] == [TOKENS] * STREAM_COUNT
    assert len({tuple(stream) for stream in tokens}) == STREAM_COUNT
    return tokens


@pytest.fixture
def harmed(server: ServedProcess) -> Iterator[list[psutil.Process]]:
    """Afterwards none of them is left, and the server serves."""
    processes: list[psutil.Process] = []
    yield processes
    assert_all_gone(processes)
    server.seconds_until(lambda: server.page("/ready")[0] == 200)
    assert len(server.stages_now()) == STAGES


def stage_of(server: ServedProcess, index: int) -> psutil.Process:
    """The stage's process; waits for the one that takes a lost one's place."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = [process for process in server.stages_now() if process.cmdline()[-2] == str(index)]
        return bool(found)

    server.seconds_until(is_there)
    return found[0]


def strike(server: ServedProcess, index: int, number: signal.Signals, harmed: list[psutil.Process]) -> None:
    """Send the signal; return once /ready has told of it."""
    process = stage_of(server, index)
    harmed.append(process)
    restarts = server.health()[1]["restarts"]
    process.send_signal(number)
    reasons: list[str] = []

    def is_told() -> bool:
        health = server.health()[1]
        status, page = server.page("/ready")
        if status == 503:
            reasons.append(page["error"]["message"])
        return status == 503 or (health["restarts"] > restarts and health["status"] == "ok")

    server.seconds_until(is_told)
    assert reasons, "the engine recovered and /ready never said so"
    assert ("stage_lost" if number is signal.SIGKILL else "stalled") in reasons[0]
    assert server.health()[0] == 200


@pytest.mark.parametrize("stage", range(STAGES))
def test_stage_killed_twice_at_random_moments_changes_no_token(
    server: ServedProcess, expected: list[list[str]], harmed: list[psutil.Process], stage: int
) -> None:
    moments = sorted(random.Random(stage).sample(range(1, STREAM_COUNT * TOKENS - STREAM_COUNT), 2))
    faults = [(moment, lambda: strike(server, stage, signal.SIGKILL, harmed)) for moment in moments]
    assert run_streams(server, *faults) == expected
    assert len(harmed) == 2


def test_stage_killed_again_while_it_loads_changes_no_token(server: ServedProcess, expected: list[list[str]], harmed: list[psutil.Process]) -> None:
    def kill_and_again() -> None:
        strike(server, 1, signal.SIGKILL, harmed)
        again = harmed[0]
        while again in harmed:
            again = stage_of(server, 1)
        harmed.append(again)
        again.kill()

    before = server.health()[1]["restarts"]
    assert run_streams(server, (30, kill_and_again)) == expected
    assert server.health()[1]["restarts"] == before + 2


def test_all_stages_killed_at_once_change_no_token(server: ServedProcess, expected: list[list[str]], harmed: list[psutil.Process]) -> None:
    def kill_all() -> None:
        harmed.extend(server.stages_now())
        for process in harmed:
            process.kill()

    assert run_streams(server, (60, kill_all)) == expected
    assert len(harmed) == STAGES
    scraped = httpx2.get(server.url + "/metrics", timeout=PATIENCE_S).text
    assert f'lockstep:restarts_total{{model_name="smollm2"}} {float(server.health()[1]["restarts"])}' in scraped


@pytest.mark.parametrize("stage", range(STAGES))
def test_stage_that_stops_is_started_again_and_changes_no_token(
    server: ServedProcess, expected: list[list[str]], harmed: list[psutil.Process], stage: int
) -> None:
    assert run_streams(server, (50, lambda: strike(server, stage, signal.SIGSTOP, harmed))) == expected


def test_request_that_comes_during_recovery_waits_and_is_answered(
    server: ServedProcess, expected: list[list[str]], harmed: list[psutil.Process]
) -> None:
    strike(server, 1, signal.SIGKILL, harmed)
    assert run_streams(server) == expected
