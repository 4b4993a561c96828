"""Other weights for an engine that runs: it answers as one that was started with them, requests go on, and what does not fit changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import numpy as np
import pytest
from served_process import served

from family_folder import write_folder
from family_models import FAMILY_MODELS
from lockstep import LLM, AsyncLLM, SamplingParams
from lockstep.errors import CheckpointError, LockstepError
from lockstep.launch.weights import open_named

MODEL = next(model for model in FAMILY_MODELS if model.name == "qwen3, windows")
PROMPTS = [{"prompt_token_ids": [7 + i, *range(20, 60), 3 * i]} for i in range(5)]
PARAMS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=24, ignore_eos=True, logprobs=1) for i in range(5)]


@dataclass(frozen=True)
class Folders:
    """Two checkpoints of one model, and what an engine that was started with each answers: tokens and log probabilities, and its fingerprint."""

    first: Path
    second: Path
    answers: dict[Path, list[tuple[list[int], object]]]
    fingerprints: dict[Path, str]


def told(llm: LLM) -> list[tuple[list[int], object]]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    place, draw = tmp_path_factory.mktemp("weights"), np.random.default_rng(11)
    changed = {name: (values * (1 + 0.3 * draw.standard_normal(values.shape))).astype(np.float32) for name, values in MODEL.weights().items()}
    first, second = write_folder(place / "first", MODEL), write_folder(place / "second", MODEL, changed)
    answers, fingerprints = {}, {}
    for path in (first, second):
        with LLM(str(path)) as llm:
            answers[path], fingerprints[path] = told(llm), llm.fingerprint
    assert all(a != b for a, b in zip(answers[first], answers[second], strict=True))
    return Folders(first=first, second=second, answers=answers, fingerprints=fingerprints)


@pytest.mark.parametrize("stages", [1, 3])
def test_engine_answers_as_one_that_was_started_with_the_weights_it_was_given(stages: int, folders: Folders) -> None:
    with LLM(str(folders.first), pipeline_parallel_size=stages) as llm:
        for path in (folders.second, folders.first):
            llm.update_weights(path)
            assert llm.fingerprint == folders.fingerprints[path]
            assert told(llm) == folders.answers[path]
        (again,) = llm.generate(PROMPTS[:1], PARAMS[0])
        assert again.num_cached_tokens > 0
        llm.update_weights(folders.first)
        (after,) = llm.generate(PROMPTS[:1], PARAMS[0])
        assert after.num_cached_tokens == 0, "nothing that was computed before may be hit"


def test_answers_that_have_begun_go_on_with_the_new_weights_after_the_tokens_they_have(folders: Folders) -> None:
    long = [replace(params, max_tokens=200, logprobs=None) for params in PARAMS]

    async def run() -> list[list[int]]:
        async with AsyncLLM(str(folders.first), pipeline_parallel_size=2) as llm:
            have: set[int] = set()
            begun = asyncio.Event()

            async def one(index: int) -> list[int]:
                tokens: list[int] = []
                async for output in llm.generate(PROMPTS[index], long[index], f"r{index}"):
                    tokens = output.outputs[0].token_ids
                    have.add(index)
                    if len(have) == len(PROMPTS):
                        begun.set()
                return tokens

            tasks = [asyncio.create_task(one(index)) for index in range(len(PROMPTS))]
            await begun.wait()
            await llm.update_weights(folders.second)
            return list(await asyncio.gather(*tasks))

    answers = asyncio.run(run())
    with LLM(str(folders.first)) as first, LLM(str(folders.second)) as second:
        for prompt, params, tokens in zip(PROMPTS, long, answers, strict=True):
            old = first.generate(prompt, params)[0].outputs[0].token_ids
            kept = next((i for i, (a, b) in enumerate(zip(tokens, old, strict=True)) if a != b), len(old))
            assert 0 < kept < len(tokens) == 200
            # From some token that both weights would have chosen on, at the latest from the first that the old ones would not have.
            follows = [_follows(second, prompt["prompt_token_ids"], params, tokens, at) for at in range(max(1, kept - 3), kept + 1)]
            assert any(follows), (kept, tokens)


def _follows(llm: LLM, prompt: list[int], params: SamplingParams, tokens: list[int], at: int) -> bool:
    """The rest of the tokens is what the engine gives after the first `at`: choices go by seed and position."""
    given = {"prompt_token_ids": [*prompt, *tokens[:at]]}
    return llm.generate(given, replace(params, max_tokens=200 - at))[0].outputs[0].token_ids == tokens[at:]


def damaged(folders: Folders, place: Path, kind: str) -> Path:
    path = place / kind
    if kind == "missing":
        return path
    shutil.copytree(folders.second, path)
    if kind == "cut short":
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    else:
        config = json.loads((path / "config.json").read_text())
        config["rope_theta"] = 123456.0
        (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("kind", "words"), [("missing", "not found"), ("cut short", "cut short or damaged"), ("of another model", "layers differ")])
def test_checkpoint_that_does_not_fit_changes_nothing(kind: str, words: str, folders: Folders, tmp_path: Path) -> None:
    with LLM(str(folders.first), pipeline_parallel_size=2) as llm:
        with pytest.raises(CheckpointError, match=words):
            llm.update_weights(damaged(folders, tmp_path, kind))
        assert llm.fingerprint == folders.fingerprints[folders.first]
        assert told(llm) == folders.answers[folders.first]


def test_checkpoint_that_a_stage_cannot_load_changes_nothing_and_nobody_restarts(folders: Folders, tmp_path: Path) -> None:
    """What the launching process has checked is gone before the stages come to it."""
    gone = tmp_path / "gone"
    shutil.copytree(folders.second, gone)
    with LLM(str(folders.first), pipeline_parallel_size=2) as llm:
        running = llm._running
        opened = running.identify

        def vanish(model: object) -> str:
            identity = opened(model)  # type: ignore[arg-type]
            shutil.rmtree(gone)
            return identity

        running.identify = vanish
        with pytest.raises(CheckpointError, match=r"stage \d: .*gone"):
            llm.update_weights(gone)
        assert running.engine.state.restarts == 0
        assert told(llm) == folders.answers[folders.first]
        running.identify = opened
        llm.update_weights(folders.second)
        assert told(llm) == folders.answers[folders.second]


def test_file_that_was_written_anew_under_the_same_name_is_other_weights(folders: Folders, tmp_path: Path) -> None:
    """As a training loop does it. A stage that is started again may not pick up what was written since."""
    place = tmp_path / "policy"
    shutil.copytree(folders.second, place)
    with LLM(str(folders.first), pipeline_parallel_size=2, max_restarts=1) as llm:
        llm.update_weights(place)
        assert told(llm) == folders.answers[folders.second]
        (place / "model.safetensors").unlink()
        shutil.copy(folders.first / "model.safetensors", place)
        llm.update_weights(place)
        assert told(llm) == folders.answers[folders.first]
        running = llm._running
        kept = running.engine._loop.cluster._weights  # type: ignore[attr-defined]
        (place / "model.safetensors").unlink()
        shutil.copy(folders.second / "model.safetensors", place)
        assert str(place) in kept
        with pytest.raises(CheckpointError, match="has other content"):
            open_named(kept, running.model)
        pids = running.cluster.describe()["pids"]
        assert isinstance(pids, list)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(LockstepError, match="has other content"):
            told(llm)


def test_stage_that_dies_comes_back_with_the_weights_of_the_others(folders: Folders) -> None:
    with LLM(str(folders.first), pipeline_parallel_size=2) as llm:
        llm.update_weights(folders.second)
        pids = llm._running.cluster.describe()["pids"]
        assert isinstance(pids, list)
        os.kill(pids[1], signal.SIGKILL)
        assert told(llm) == folders.answers[folders.second]
        assert llm._running.engine.state.restarts == 1
        assert llm._running.cluster.describe()["pids"] != pids


def test_weights_over_http_with_what_is_wrong_with_them(folders: Folders) -> None:
    with served("--pipeline-parallel-size", "2", "--server-dev-mode", model=str(folders.first)) as server, httpx2.Client(base_url=server.url) as http:
        for body, words in (({"model": "/nowhere"}, "not found"), ({"model": ""}, "wants"), ({"path": "x"}, "wants")):
            refused = http.post("/update_weights", json=body)
            assert refused.status_code == 400
            assert words in refused.json()["error"]["message"]
        updated = http.post("/update_weights", json={"model": str(folders.second)}, timeout=60)
        assert updated.json() == {"status": "updated", "system_fingerprint": folders.fingerprints[folders.second]}
        told = http.post("/v1/completions", json={"model": str(folders.first), "prompt": PROMPTS[0]["prompt_token_ids"], "max_tokens": 3}).json()
        assert told["system_fingerprint"] == folders.fingerprints[folders.second]
