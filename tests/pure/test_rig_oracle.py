"""Whole runs of driver and stages on the oracle model: every output equals the closed form, every idle audit is clean."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from lockstep.core.outputs import FinishReason
from lockstep.core.records import Side
from lockstep.core.request import EngineRequest
from lockstep.sim.oracle import closed_form
from lockstep.sim.rig import LAYER_COUNT, VOCABULARY, Rig, RigConfig


def random_requests(rng: random.Random, count: int, length_max: int) -> list[EngineRequest]:
    shared = [rng.randrange(VOCABULARY) for _ in range(20)]
    requests = []
    for i in range(count):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 30))]
        if rng.random() < 0.4:
            prompt = shared[: rng.randrange(1, 20)] + prompt[: rng.randrange(1, 8)]
        prompt = prompt[: length_max - 2]
        requests.append(
            EngineRequest(
                request_id=f"r{i}",
                prompt=np.array(prompt, np.int32),
                length_cap=min(length_max, len(prompt) + rng.randrange(1, 20)),
                seed=rng.getrandbits(64),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_k=rng.choice([0, 5]),
                top_p=rng.choice([1.0, 0.5]),
                priority=rng.randrange(3),
                side=Side(stop_ids=tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 10, 40])))),
            )
        )
    return requests


def random_config(rng: random.Random) -> RigConfig:
    block_size = rng.choice([1, 2, 4, 8])
    stage_count = rng.randrange(1, 6)
    return RigConfig(
        stage_count=stage_count,
        asynchronous=rng.random() < 0.5,
        block_size=block_size,
        block_count=-(-48 // block_size) + rng.randrange(0, 30 // block_size + 1),
        slot_count=rng.randrange(1, 8),
        token_budget=rng.choice([1, 3, 8, 64]),
        length_max=48,
        microbatch_count=stage_count + rng.randrange(2),
        prefix_caching=rng.random() < 0.7,
        priorities=rng.random() < 0.3,
    )


SEEDS = int(os.environ.get("LOCKSTEP_SIM_SEEDS", "40"))
"""How many random runs; `make sim SEEDS=...` asks for more."""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_outputs_equal_the_closed_form_and_nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)
    config = random_config(rng)
    rig = Rig(config)
    requests = random_requests(rng, rng.randrange(1, 14), config.length_max)
    aborted = set()
    queue = list(requests)
    abort_share = rng.choice([0.0, 0.0, 0.002, 0.02])
    while queue or rig.driver.scheduler.has_work:
        if queue and rng.random() < 0.1:
            rig.submit(queue.pop(0))
        move = rng.random()
        if move < abort_share and rig.outputs:
            victim = rng.choice(sorted(rig.outputs))
            if rig.outputs[victim].finish is None:
                aborted.add(victim)
            rig.abort(victim)
        elif move < 0.3:
            rig.plan()
        elif move < 0.9:
            rig.cluster.run_stage(rng.randrange(config.stage_count))
        else:
            for result in list(rig.cluster._results):
                rig.cluster._results.popleft()
                for event in rig.driver.receive(result):
                    rig._note(event)
    rig.run()
    for request in requests:
        expected = closed_form(request, layer_count=LAYER_COUNT, vocabulary=VOCABULARY)
        output = rig.outputs[request.request_id]
        if request.request_id in aborted:
            assert output.finish is FinishReason.ABORT
            assert output.tokens == expected[: len(output.tokens)]
        else:
            assert output.tokens == expected
            stopped = expected[-1] in request.side.stop_ids
            assert output.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert rig.audit() == []
