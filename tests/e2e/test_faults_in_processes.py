"""Real processes, the real model, one small change: the right check reports it, no wrong token reaches a client, the recording replays to that step,
and whoever is not concerned gets the very tokens of an undisturbed run."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import EngineConfig
from lockstep.core.outputs import FinishReason, TokenEvent
from lockstep.core.params import SamplingParams
from lockstep.errors import DivergenceError, InternalError, LockstepError, LogError, ProvenanceError
from lockstep.launch import RunningEngine, launch_engine, resolve_model
from lockstep.runtime.recording import read
from lockstep.runtime.retrace import retrace

REQUEST_COUNT = 8
STEP = 12
"""Every request is decoding by then, and none is near its end."""

NOTICED_WITHIN = 4
"""Steps after which a lost message is noticed by the next one's number; as many are in flight at once."""

CONFIG = EngineConfig(model="smollm2", pipeline_parallel_size=2, max_model_len=256, max_num_seqs=8, threads=1, enable_prefix_caching=False)
PROMPTS = [[1 + i, 200 + 3 * i, 17, 900 + i, 40, 41 + i] for i in range(REQUEST_COUNT)]
PARAMS = [SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=40, ignore_eos=True) for i in range(REQUEST_COUNT)]


@dataclass(slots=True)
class Answers:
    """What clients saw, by request."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[str, TokenEvent] = field(default_factory=dict)

    @property
    def errors(self) -> dict[str, LockstepError]:
        return {name: event.error for name, event in self.ends.items() if event.error is not None}


def ask(running: RunningEngine) -> Answers:
    """All requests at once, until each has ended."""
    events: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    requests = [running.factory.build(f"r{i}", prompt, params) for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))]
    running.engine.submit_all(requests, events.put)
    answers = Answers()
    while len(answers.ends) < REQUEST_COUNT:
        for event in events.get(timeout=120):
            assert event.request_id not in answers.ends
            assert event.index == len(answers.tokens[event.request_id])
            answers.tokens[event.request_id].extend(event.token_ids)
            if event.finish_reason is not None:
                answers.ends[event.request_id] = event
    return answers


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[int]]:
    running = launch_engine(CONFIG)
    try:
        answers = ask(running)
    finally:
        running.close()
    assert not answers.errors
    return answers.tokens


FAULTS: dict[str, tuple[dict[str, Any], type[InternalError] | None, str]] = {
    "a token id on stage 0": ({"kind": "token", "stage": 0}, LogError, "known tokens"),
    "a token id on stage 1": ({"kind": "token", "stage": 1}, LogError, "known tokens"),
    "an entry of a block table": ({"kind": "block table", "stage": 1}, DivergenceError, "block_tables0"),
    "a block's owner on stage 0": ({"kind": "block owner", "stage": 0}, ProvenanceError, "carries tag"),
    "a block's owner on stage 1": ({"kind": "block owner", "stage": 1}, ProvenanceError, "carries tag"),
    "a seed on the last stage": ({"kind": "seed", "stage": 1}, DivergenceError, "sampling.seed"),
    "a byte of an activation": ({"kind": "activation byte", "stage": 0}, None, "damaged"),
    "a result to stage 0": ({"kind": "lost result", "stage": 1, "to": "stage 0"}, None, "comes next"),
    "a result to the driver": ({"kind": "lost result", "stage": 1, "to": "driver"}, None, "comes next"),
}


REPLAYED = {
    "block_tables0": ("layout.block_tables0 of slot", "in the replay", "on stage 1"),
    "sampling.seed": ("layout.sampling.seed of slot", "in the replay", "on stage 1"),
}
"""What a replay finds by itself. The other faults are no part of the log, and the replay says that."""


@pytest.mark.parametrize(("fault", "error", "words"), FAULTS.values(), ids=FAULTS)
def test_fault_is_reported_and_only_what_it_concerns_ends(
    undisturbed: dict[str, list[int]], tmp_path: Path, fault: dict[str, Any], error: type[InternalError] | None, words: str
) -> None:
    environment = {**os.environ, "LOCKSTEP_TEST_FAULT": json.dumps(fault | {"step": STEP}), "PYTHONPATH": str(Path(__file__).parent)}
    config = dataclasses.replace(CONFIG, recorder_folder=str(tmp_path), step_timeout_s=10.0)
    running = launch_engine(config, stage_module="faulty_stage", stage_environment=environment)
    try:
        answers = ask(running)
        state = running.engine.state
        assert running.engine.driver.epoch == 1
    finally:
        running.close()
    assert state.restarts == 1
    assert len(answers.errors) == (0 if error is None else 1)
    for told in answers.errors.values():
        assert type(told) is error
        assert "incident" in str(told)
    for name, tokens in answers.tokens.items():
        assert tokens == (undisturbed[name][: len(tokens)] if name in answers.errors else undisturbed[name])
        assert answers.ends[name].finish_reason is (FinishReason.ERROR if name in answers.errors else FinishReason.LENGTH)
    (path,) = tmp_path.glob("*.lockstep")
    recording = read(path)
    assert words in recording.head.error_text
    assert recording.head.error_step in ((STEP,) if error is not None else range(STEP, STEP + NOTICED_WITHIN))
    finding = retrace(recording).finding
    assert finding is not None
    assert finding.step == recording.head.error_step, finding
    assert all(part in finding.lines[0] for part in REPLAYED.get(words, ("the replay goes on", "outside the log"))), finding
    assert len(finding.slots) == (words in REPLAYED), finding


def test_model_is_the_real_one() -> None:
    assert resolve_model(CONFIG).spec.layer_count == 30
