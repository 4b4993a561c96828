"""Without recovery, a stage that dies or stops ends the engine with an error that names it, as one that cannot start always does: every open request
is told, and no process is left."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import openai
import psutil
import pytest
from openai.types import Completion
from served_process import COMMAND, PATIENCE_S, assert_all_gone, served, stage_processes

from lockstep import LLM, SamplingParams
from lockstep.config import EngineConfig
from lockstep.errors import CallerError, CheckpointError, PeerError
from lockstep.launch import launch_engine, resolve_model
from lockstep.weights import find_model

STREAM_COUNT = 8
TOLD_WITHIN_S = 10.0
ENDED_WITHIN_S = 20.0


async def lose_under_load(url: str, victim: psutil.Process, number: signal.Signals) -> list[float]:
    """Open STREAM_COUNT streams, send the signal once all have begun; the seconds after which each stream was told of an error."""
    begun = asyncio.Barrier(STREAM_COUNT + 1)

    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S) as client:

        async def told_at(index: int) -> float:
            stream = await client.completions.create(
                model="smollm2", prompt=f"Story number {index}:", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
            )
            await anext(stream)
            await begun.wait()
            with pytest.raises(openai.APIError, match="stage"):
                await read_to_the_end(stream)
            return time.monotonic()

        async with asyncio.TaskGroup() as streams:
            tasks = [streams.create_task(told_at(index)) for index in range(STREAM_COUNT)]
            await begun.wait()
            victim.send_signal(number)
            start = time.monotonic()
        return [task.result() - start for task in tasks]


async def read_to_the_end(stream: openai.AsyncStream[Completion]) -> None:
    async for chunk in stream:
        assert not chunk.choices[0].finish_reason


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_stage_ends_open_requests_then_the_server(stage: int, number: signal.Signals) -> None:
    with served("-pp", "2", "--max-model-len", "2k", "--max-restarts", "0", "--recorder-steps", "0") as server:
        whole = [psutil.Process(server.process.pid), *server.stages]
        seconds = asyncio.run(lose_under_load(server.url, server.stages[stage], number))
        lost_at = time.monotonic()
        assert max(seconds) <= TOLD_WITHIN_S
        status, page = server.health()
        assert status == 503
        assert f"stage {stage}" in page["error"]["message"]
        assert server.process.wait(PATIENCE_S) == 1, server.said.text
        assert time.monotonic() - lost_at <= ENDED_WITHIN_S
        assert_all_gone(whole)


def test_llm_raises_peer_error_when_a_stage_dies_and_again_when_asked_again() -> None:
    with LLM("smollm2", pipeline_parallel_size=2, max_model_len=2048, max_restarts=0, recorder_steps=0) as llm:
        stages = stage_processes(os.getpid())
        assert len(stages) == 2
        assert llm.generate("Once", SamplingParams(max_tokens=1))[0].finished
        busy = stages[1].cpu_times().user + 0.1

        def kill_once_busy() -> None:
            while stages[1].cpu_times().user < busy:
                stages[0].cpu_times()
            stages[1].kill()

        killer = threading.Thread(target=kill_once_busy)
        killer.start()
        try:
            with pytest.raises(PeerError, match="stage 1"):
                llm.generate(["Once upon a time"] * 4, SamplingParams(max_tokens=1500, ignore_eos=True))
        finally:
            killer.join()
        with pytest.raises(PeerError, match="stage 1"):
            llm.generate("Once", SamplingParams(max_tokens=1))
    assert_all_gone(stages)


def test_file_that_is_cut_after_the_parent_has_opened_it_is_a_checkpoint_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(find_model("smollm2"), path)
    config = EngineConfig(model=str(path), pipeline_parallel_size=2)
    model = resolve_model(config)
    # The parent's map of the whole file stays valid: the name gets a shorter file, the old one lives on unseen.
    shorter = tmp_path / "shorter.gguf"
    shorter.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    shorter.replace(path)
    with pytest.raises(CheckpointError, match=r"stage \d: .*model\.gguf"):
        launch_engine(config, model=model)
    assert stage_processes(os.getpid()) == []


def test_instruction_set_that_no_stage_knows_is_refused_and_leaves_no_process() -> None:
    with pytest.raises(CallerError, match="sse9"):
        LLM("smollm2", pipeline_parallel_size=2, instruction_set="sse9")
    assert stage_processes(os.getpid()) == []


def test_server_whose_stages_cannot_start_exits_with_2_and_one_line() -> None:
    flags = ("serve", "smollm2", "--port", "0", "-pp", "2", "--instruction-set", "sse9")
    with subprocess.Popen([*COMMAND, *flags], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            _, said = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 2, said
    assert "sse9" in said
    assert "Traceback" not in said
    assert session_of(process.pid) == []


def session_of(session: int) -> list[int]:
    """Processes that still run in a session."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session:
                found.append(pid)
        except ProcessLookupError:
            continue
    return found
