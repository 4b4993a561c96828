"""Pausing an engine that answers many at once: each mode does what it says, nothing is lost, and what goes on has the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx2
import pytest
from served_process import PATIENCE_S, served

from lockstep import LLM, AsyncLLM, RequestOutput, SamplingParams
from lockstep.errors import InvalidRequestError

COUNT, TOKENS = 6, 90
PROMPT = "Once upon a time in a land far away there lived"


def params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    with LLM("smollm2", max_model_len=256) as llm:
        return [llm.generate(PROMPT, params(seed))[0].outputs[0].token_ids for seed in range(COUNT)]


async def streams(llm: AsyncLLM, started: asyncio.Event) -> list[RequestOutput]:
    """All at once; `started` when each has some tokens."""
    have: set[int] = set()

    async def one(seed: int) -> RequestOutput:
        last: RequestOutput | None = None
        async for output in _outputs(llm, seed):
            last = output
            if len(output.outputs[0].token_ids) > 5:
                have.add(seed)
            if len(have) == COUNT:
                started.set()
        assert last is not None
        return last

    return list(await asyncio.gather(*(one(seed) for seed in range(COUNT))))


def _outputs(llm: AsyncLLM, seed: int) -> AsyncIterator[RequestOutput]:
    return llm.generate(PROMPT, params(seed), f"r{seed}")


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_does_what_its_mode_says_and_everything_goes_on_after_it(mode: str, stages: int, alone: list[list[int]]) -> None:
    async def run() -> None:
        async with AsyncLLM("smollm2", max_model_len=256, pipeline_parallel_size=stages) as llm:
            started = asyncio.Event()
            task = asyncio.create_task(streams(llm, started))
            await started.wait()
            await llm.pause_generation(mode=mode)
            assert await llm.is_paused()
            late = asyncio.create_task(llm.complete(PROMPT, params(0), "late"))
            stats = llm._running.engine.driver.scheduler.stats
            plans = stats.plans
            await asyncio.sleep(0.2)
            assert stats.plans == plans
            assert not late.done()
            assert task.done() == (mode != "keep")
            await llm.resume_generation()
            outputs = await task
            assert not await llm.is_paused()
            assert (await late).outputs[0].token_ids == alone[0]
            for seed, output in enumerate(outputs):
                choice = output.outputs[0]
                if mode == "abort":
                    assert choice.finish_reason == "abort"
                    assert choice.token_ids == alone[seed][: len(choice.token_ids)]
                else:
                    assert (choice.token_ids, choice.finish_reason) == (alone[seed], "length")

    asyncio.run(run())


def test_a_mode_that_there_is_not_is_refused_and_a_reset_forgets_prefixes() -> None:
    async def run() -> None:
        async with AsyncLLM("smollm2", max_model_len=256, block_size=4) as llm:
            with pytest.raises(InvalidRequestError, match="abort, wait, keep"):
                await llm.pause_generation(mode="stop")
            first = await llm.complete(PROMPT, params(1), "a")
            assert (await llm.complete(PROMPT, params(1), "b")).num_cached_tokens > 0
            assert await llm.reset_prefix_cache()
            again = await llm.complete(PROMPT, params(1), "c")
            assert again.num_cached_tokens == 0
            assert again.outputs[0].token_ids == first.outputs[0].token_ids

    asyncio.run(run())


def test_controls_are_served_to_those_who_asked_for_them() -> None:
    with served("-pp", "2", "--max-model-len", "256", "--server-dev-mode") as server, httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        assert http.get("/is_paused").json() == {"is_paused": False}
        assert http.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
        assert http.get("/is_paused").json() == {"is_paused": True}
        for query in ("mode=stop", "mode=keep&clear_cache=perhaps", "hurry=1"):
            assert http.post(f"/pause?{query}").status_code == 400
        assert http.post("/reset_prefix_cache").json() == {"status": "reset"}
        assert http.post("/resume").json() == {"status": "resumed"}
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    with served("--max-model-len", "256") as server:
        assert httpx2.post(f"{server.url}/pause", timeout=PATIENCE_S).status_code == 404


def test_who_asks_for_a_pause_may_leave_and_the_engine_goes_on(alone: list[list[int]]) -> None:
    """Before the engine has heard of it, and while it waits for what has begun."""

    async def run() -> None:
        async with AsyncLLM("smollm2", max_model_len=256) as llm:
            started = asyncio.Event()
            task = asyncio.create_task(streams(llm, started))
            await started.wait()
            for pause_s in (0.0, 0.05):
                asking = asyncio.create_task(llm.pause_generation(mode="wait"))
                await asyncio.sleep(pause_s)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            assert [output.outputs[0].token_ids for output in await task] == alone
            await llm.resume_generation()
            assert (await llm.complete(PROMPT, params(0), "after")).outputs[0].token_ids == alone[0]
            await llm.check_health()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
