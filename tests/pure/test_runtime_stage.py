"""What stages send and take, and what they refuse: the driver and every stage run one log, and say so when they do not (S2, PROTOCOL.md 6, 7, 10)."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from core_loop import Row, make_plan, make_request, make_result

from lockstep.core.digest import Digest
from lockstep.core.records import StepPlan, StepResult
from lockstep.core.table import SlotTable, TableShape
from lockstep.errors import DivergenceError, LinkError, LogError, ProvenanceError
from lockstep.runtime.messages import Activations
from lockstep.runtime.replay import Replica
from lockstep.runtime.stage import DRIVER, results_expected
from lockstep.sim.oracle import closed_form
from lockstep.sim.rig import LAYER_COUNT, VOCABULARY, Rig, RigConfig


@pytest.mark.parametrize(("stages", "is_last", "count"), [(1, True, 0), (2, True, 0), (2, False, 1), (4, False, 1), (4, True, 0)])
def test_last_stage_takes_no_results_and_each_earlier_one_takes_one_a_step(stages: int, is_last: bool, count: int) -> None:
    assert results_expected(stages, is_last) == count


@pytest.mark.parametrize("stage_count", [1, 2, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_step_empty_or_not_has_one_result_and_one_activation_a_link(stage_count: int, asynchronous: bool) -> None:
    """S2: non-final chunks, rows that resolved to nothing and plans of releases alone flow like any other step."""
    rig = Rig(RigConfig(stage_count=stage_count, asynchronous=asynchronous, token_budget=4))
    rig.submit(make_request("a", list(range(15)), 3))
    sent: Counter[tuple[int, int, str]] = Counter()
    steps = 0
    for _ in range(400):
        if (plan := rig.driver.next_plan()) is not None:
            steps += 1
            rig.cluster.send(plan)
        for stage in reversed(rig.cluster.stages):
            for send in stage.advance() or ():
                sent[stage.index, send.destination, type(send.message).__name__] += 1
                if send.destination != DRIVER:
                    rig.cluster.stages[send.destination].offer(send.message)
                elif isinstance(send.message, StepResult):
                    rig.driver.receive(send.message, [])
    last = stage_count - 1
    expected = {(i, i + 1, "Activations"): steps for i in range(last)} | {(last, to, "StepResult"): steps for to in (DRIVER, *range(last))}
    assert dict(sent) == expected
    assert steps > 5
    assert rig.audit() == []


def test_last_stage_refuses_a_result_that_it_alone_sends() -> None:
    for stage_count in (1, 3):
        rig = Rig(RigConfig(stage_count=stage_count))
        with pytest.raises(LinkError, match="sends results and got one"):
            rig.cluster.stages[-1].offer(make_result(0))


MESSAGES = [make_plan(0, 0), make_result(0), Activations(epoch=0, step=0, digests=np.zeros(1, np.uint64), tensors={})]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_of_another_epoch_is_refused(message: StepPlan | StepResult | Activations) -> None:
    stage = Rig(RigConfig(stage_count=3)).cluster.stages[1]
    with pytest.raises(LinkError, match="epoch 0 and got"):
        stage.offer(dataclasses.replace(message, epoch=1))


def test_result_that_comes_twice_is_refused() -> None:
    stage = Rig(RigConfig(stage_count=2)).cluster.stages[0]
    stage.offer(make_result(0))
    with pytest.raises(LogError, match="came twice"):
        stage.offer(make_result(0))


def _rig_in_decode() -> Rig:
    rig = Rig(RigConfig(stage_count=2, block_count=64))
    for name in ("a", "b"):
        rig.submit(make_request(name, [1, 2, 3], 20))
    for _ in range(5):
        rig.plan()
        rig.receive()
    return rig


@pytest.mark.parametrize("column", ["seed", "known", "length_cap", "prompt_length", "temperature", "side_hash"])
@pytest.mark.parametrize("stage", [0, 1])
def test_replica_that_differs_in_one_value_is_caught_before_a_token_is_delivered(stage: int, column: str) -> None:
    """PROTOCOL.md 8, 10: what compute may read is in the digest, so a difference anywhere stops the step."""
    rig = _rig_in_decode()
    while rig.driver.waits:
        rig.receive()
    before = {name: list(output.tokens) for name, output in rig.outputs.items()}
    rig.cluster.stages[stage].table.columns[column][0] += 1
    with pytest.raises((DivergenceError, LogError)):
        rig.run()
    assert {name: list(output.tokens) for name, output in rig.outputs.items()} == before


def test_stage_that_is_told_another_digest_computes_nothing() -> None:
    """The digest travels with the activations, so a difference stops the step at the next stage, before its KV is written."""
    rig = Rig(RigConfig(stage_count=2))
    rig.submit(make_request("a", [1, 2, 3], 5))
    plan = rig.driver.next_plan()
    assert plan is not None
    first, last = rig.cluster.stages
    first.offer(plan)
    last.offer(plan)
    (send,) = first.advance() or ()
    assert isinstance(send.message, Activations)
    last.offer(dataclasses.replace(send.message, digests=send.message.digests ^ np.uint64(1)))
    with pytest.raises(DivergenceError, match="is not computed"):
        last.advance()
    assert not last._provenance[0].tags.any()


def test_driver_refuses_a_result_that_lacks_a_rank_or_carries_another_digest() -> None:
    for change in (lambda d: d[:1], lambda d: d ^ np.array([0, 1], np.uint64), lambda d: np.append(d, d[:1])):
        rig = Rig(RigConfig(stage_count=2))
        rig.submit(make_request("a", [1, 2, 3], 5))
        rig.plan()
        result = rig.cluster.poll(0)[0]
        with pytest.raises(DivergenceError) as caught:
            rig.driver.receive(dataclasses.replace(result, digests=change(result.digests)), [])
        assert caught.value.step == 0


def test_overwritten_kv_stops_the_step_on_the_stage_that_holds_it() -> None:
    rig = _rig_in_decode()
    while rig.driver.waits:
        rig.receive()
    stage = rig.cluster.stages[1]
    block = int(stage.table.blocks[0, 0, 0])
    stage._provenance[0].block_tags[block] ^= np.uint64(1)
    stage._provenance[0].tags[block] ^= np.uint64(1)
    with pytest.raises(ProvenanceError) as caught:
        rig.run()
    assert caught.value.concerned[0][0] == 0


def test_waiting_stage_says_what_for() -> None:
    rig = Rig(RigConfig(stage_count=2))
    first, last = rig.cluster.stages
    assert first.waits_for == "plan 0 from the driver"
    rig.submit(make_request("a", [1, 2, 3], 5))
    rig.plan()
    assert last.advance() is None
    assert last.waits_for == "activations of step 0 from stage 0"
    rig.plan()
    first.advance()
    assert first.advance() is None
    assert first.waits_for == "result of step 0 from stage 1"


def test_results_beyond_the_horizon_wait_for_their_plan() -> None:
    """However early results come, a replica applies exactly those below the plan's horizon; so early and late replicas agree."""
    shape = TableShape(slot_count=1, length_max=8, block_size=4)
    early, late = (Replica(SlotTable(shape), Digest(0)) for _ in range(2))
    plans = [make_plan(0, 0), make_plan(1, 0), make_plan(2, 1), make_plan(3, 3)]
    results = [make_result(step) for step in range(3)]
    for result in results:
        early.offer(result)
    for plan in plans:
        for result in results[late.table.applied + late.buffered_count : plan.horizon]:
            assert not late.can_run(plan)
            late.offer(result)
        assert early.can_run(plan)
        assert late.can_run(plan)
        early.run(plan)
        late.run(plan)
        assert early.table.applied == late.table.applied == plan.horizon
        assert early.digest.value == late.digest.value
    assert early.buffered_count == late.buffered_count == 0


def test_slow_first_stage_and_early_results_change_nothing() -> None:
    request = make_request("a", list(range(9)), 12)
    rig = Rig(RigConfig(stage_count=3, token_budget=4))
    rig.submit(request)
    for turn in range(300):
        rig.plan()
        for index in (2, 1, 2, 1) if turn % 3 else (0,):
            rig.cluster.run_stage(index)
        rig.receive()
    rig.run()
    assert rig.outputs["a"].tokens == closed_form(request, layer_count=LAYER_COUNT, vocabulary=VOCABULARY)
    assert rig.audit() == []


def test_row_for_a_slot_of_another_generation_stops_the_stage() -> None:
    rig = Rig(RigConfig(stage_count=1))
    rig.cluster.stages[0].offer(make_plan(0, 0, rows=[Row(0, 7, 1, 0, True)]))
    with pytest.raises(LogError, match="in generations"):
        rig.cluster.stages[0].advance()
