"""A server with two stages in two processes gives each of many clients, all at once, exactly what one stage gives offline.

And it forgets clients that die, and ends when told to.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from served_process import PATIENCE_S, Said, ServedProcess, assert_all_gone, served

from agreement import questions
from lockstep import LLM, SamplingParams

REQUEST_COUNT = 64
KILLED_STREAMS = 16
IDLE_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One completion request. seed: None is greedy."""

    prompt: str
    max_tokens: int
    seed: int | None
    logprobs: int | None

    def offline(self) -> SamplingParams:
        temperature, top_p = (0.0, 1.0) if self.seed is None else (0.9, 0.95)
        return SamplingParams(temperature=temperature, top_p=top_p, seed=self.seed, max_tokens=self.max_tokens, logprobs=self.logprobs)

    def online(self) -> dict[str, Any]:
        same = self.offline()
        fields = {"temperature": same.temperature, "top_p": same.top_p, "max_tokens": same.max_tokens}
        optional = {name: value for name, value in (("seed", self.seed), ("logprobs", self.logprobs)) if value is not None}
        return {"prompt": self.prompt, **fields, **optional}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """logprobs: of the sampled tokens, bit for bit, or empty."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


def workload() -> list[Asked]:
    """Prompts of a few to about 70 tokens, answers of 16 to 24; every third greedy, every fourth with log probabilities."""
    return [
        Asked(
            prompt=text[: 20 + 7 * (index % 40)],
            max_tokens=16 + index % 9,
            seed=None if index % 3 == 0 else 1000 + index,
            logprobs=2 if index % 4 == 0 else None,
        )
        for index, text in enumerate(questions(REQUEST_COUNT))
    ]


@pytest.fixture(scope="module")
def offline() -> list[Answered]:
    asked = workload()
    with LLM("smollm2", max_model_len=2048) as llm:
        outputs = llm.generate([a.prompt for a in asked], [a.offline() for a in asked])
    answers = []
    for output in outputs:
        choice = output.outputs[0]
        logprobs = [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs or [], strict=False)]
        answers.append(
            Answered(text=choice.text, token_ids=tuple(choice.token_ids), logprobs=tuple(logprobs), finish_reason=str(choice.finish_reason))
        )
    return answers


@pytest.fixture(scope="module")
def server(offline: list[Answered]) -> Iterator[ServedProcess]:
    with served("-pp", "2", "--max-model-len", "2k") as process:
        yield process


async def ask(client: openai.AsyncOpenAI, asked: Asked) -> Answered:
    stream = await client.completions.create(model="smollm2", stream=True, extra_body={"return_token_ids": True}, **asked.online())
    text, token_ids, logprobs, finish_reason = "", [], [], ""
    async for chunk in stream:
        choice = chunk.choices[0]
        text += choice.text
        token_ids += (choice.model_extra or {}).get("token_ids") or []
        logprobs += (choice.logprobs.token_logprobs or []) if choice.logprobs else []
        finish_reason = choice.finish_reason or finish_reason
    return Answered(text=text, token_ids=tuple(token_ids), logprobs=tuple(logprobs), finish_reason=finish_reason)


async def ask_all(url: str, asked: list[Asked]) -> list[Answered]:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=600) as client:
        return await asyncio.gather(*(ask(client, one) for one in asked))


def is_idle(status: int, page: dict[str, Any]) -> bool:
    return status == 200 and page["running"] == page["waiting"] == 0 and page["blocks_free"] == page["blocks_total"] > 0


def test_64_streams_at_once_over_two_stages_get_what_one_stage_gives_offline(server: ServedProcess, offline: list[Answered]) -> None:
    answers = asyncio.run(ask_all(server.url, workload()))
    assert len({answer.token_ids for answer in answers}) > REQUEST_COUNT * 3 // 4, "the workload tells too few answers apart"
    assert [len(answer.logprobs) for answer in answers[:2]] == [len(answers[0].token_ids), 0]
    assert answers == offline


def test_killed_client_leaves_no_request_and_no_block_behind(server: ServedProcess, offline: list[Answered]) -> None:
    child = Path(__file__).with_name("streaming_client.py")
    with subprocess.Popen([sys.executable, str(child), server.url, str(KILLED_STREAMS)], stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            Said(client.stdout).wait_for(re.compile("^(open)$"))
            status, page = server.health()
            assert (status, page["running"] + page["waiting"]) == (200, KILLED_STREAMS), page
            assert page["blocks_free"] < page["blocks_total"]
        finally:
            client.send_signal(signal.SIGKILL)
            client.wait(PATIENCE_S)
        seconds = server.seconds_until_health(is_idle)
    assert seconds <= IDLE_WITHIN_S
    assert asyncio.run(ask_all(server.url, workload()[:3])) == offline[:3]


def test_sigterm_ends_server_and_stages_with_status_0() -> None:
    with served("-pp", "2") as server:
        whole = [psutil.Process(server.process.pid), *server.stages]
        assert len(whole) == 3
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0, server.said.text
        assert_all_gone(whole)
