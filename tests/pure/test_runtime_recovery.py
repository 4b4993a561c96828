"""A failure ends an epoch and nobody's answer: streams go on by index with the same tokens; only what the failure concerns is ended."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_loop import make_request

from lockstep.core.layout import BatchLayout
from lockstep.core.outputs import FinishReason, TokenEvent
from lockstep.core.records import Columns, StepPlan, StepResult
from lockstep.core.request import EngineRequest
from lockstep.core.table import SlotTable, TableShape
from lockstep.errors import (
    DivergenceError,
    InternalError,
    LedgerError,
    LinkError,
    LockstepError,
    LogError,
    PeerError,
    PoisonError,
    ProvenanceError,
    StageLostError,
)
from lockstep.runtime.driver import Driver
from lockstep.runtime.loop import Dumper, EngineLoop, RestartPolicy
from lockstep.runtime.transport.local import LocalCluster
from lockstep.sim.oracle import closed_form
from lockstep.sim.rig import LAYER_COUNT, VOCABULARY, Rig, RigConfig

Fault = Callable[[LocalCluster, int], None]


class FaultyCluster(LocalCluster):
    """fault(cluster, polls so far): whatever it does to the stages, or raises, before each poll."""

    def __init__(self, inner: Rig, fault: Fault) -> None:
        super().__init__(inner.make_stages)
        self.driver = inner.driver
        self._fault = fault
        self._polls = 0

    def poll(self, timeout_s: float) -> list[Any]:
        if self.is_ready:
            self._polls += 1
            try:
                self._fault(self, self._polls)
            except (PeerError, InternalError):
                self._end_epoch()
                raise
        return super().poll(0.0)


def driver_of(cluster: LocalCluster) -> Driver:
    assert isinstance(cluster, FaultyCluster)
    return cluster.driver


class Records:
    """A dumper that keeps the errors."""

    def __init__(self) -> None:
        self.errors: list[LockstepError] = []
        self.then: Callable[[LockstepError], None] = lambda _: None

    def dump(self, *, incident: str, error: LockstepError, unresolved: Sequence[StepPlan], columns: Mapping[int, Columns]) -> Path | None:
        self.errors.append(error)
        self.then(error)
        return None

    def close(self) -> None: ...


class Run:
    """An engine loop on the oracle model, turned until nothing is open."""

    def __init__(
        self,
        fault: Fault,
        requests: Sequence[EngineRequest],
        *,
        policy: RestartPolicy | None = None,
        dumper: Dumper | None = None,
        turns: int = 10,
        note: Callable[[EngineLoop], None] = lambda _: None,
        **changes: Any,
    ) -> None:
        self.rig = Rig(RigConfig(**{"stage_count": 3, "block_count": 40, "length_max": 60, "slot_count": 4, **changes}))
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, TokenEvent] = {}
        clock = itertools.count()
        names = itertools.count()
        self.loop = EngineLoop(
            self.rig.driver,
            FaultyCluster(self.rig, fault),
            restarts=policy or RestartPolicy(most=100),
            clock=lambda: float(next(clock)),
            make_incident=lambda: f"i{next(names)}",
            dumper=dumper,
        )
        note(self.loop)
        for request in requests:
            self.loop.submit(request, self._take)
        for _ in range(3000):
            if len(self.ends) == len(requests):
                break
            self.loop.turn(0.0)
        for _ in range(turns):
            self.loop.turn(0.0)

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ends, event
            assert event.index == len(self.tokens[event.request_id])
            self.tokens[event.request_id].extend(event.token_ids)
            if event.finish_reason is not None:
                self.ends[event.request_id] = event

    def check_right(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            assert self.tokens[request.request_id] == closed_form(request, layer_count=LAYER_COUNT, vocabulary=VOCABULARY)
            assert self.ends[request.request_id].finish_reason is FinishReason.LENGTH
        assert self.rig.driver.audit() == []
        cluster = self.loop.cluster
        assert isinstance(cluster, LocalCluster)
        assert cluster.audit() == []


def some_requests(count: int = 6) -> list[EngineRequest]:
    return [make_request(f"r{i}", [i + 1, 2, 3, 4, 5 + i, 6][: 3 + i % 4], 12 + i) for i in range(count)]


def at(polls: Sequence[int], error: Callable[[], Exception]) -> Fault:
    def fault(_cluster: LocalCluster, count: int) -> None:
        if count in polls:
            raise error()

    return fault


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("error", [StageLostError("stage 1 has ended"), LinkError("a gap"), LogError("no slot is named")])
def test_streams_go_on_by_index_with_the_same_tokens(error: Exception, asynchronous: bool) -> None:
    """DESIGN.md "Recovery": none lost, none repeated; the sink checks each index."""
    requests = some_requests()
    run = Run(at([3, 9, 20, 31], lambda: error), requests, asynchronous=asynchronous)
    run.check_right(requests)
    assert run.loop.counts.restarts == 4
    assert run.rig.driver.epoch == 4


def test_failure_before_anything_ran_and_again_at_once_ends_nobody() -> None:
    requests = some_requests()
    Run(at([1, 2], lambda: StageLostError("stage 0 has ended")), requests).check_right(requests)


def test_one_restart_too_many_ends_the_engine_with_the_failure() -> None:
    with pytest.raises(StageLostError, match="stage 1"):
        Run(at([2, 4, 6], lambda: StageLostError("stage 1 has ended")), some_requests(), policy=RestartPolicy(most=2))


def test_restarts_long_ago_do_not_count() -> None:
    requests = some_requests()
    Run(at([2, 12, 22, 32], lambda: StageLostError("x")), requests, policy=RestartPolicy(most=1, window_s=5.0)).check_right(requests)


def test_engine_that_fails_again_and_again_without_a_token_ends_however_slowly_it_fails() -> None:
    """Each failure takes longer than the window, as a stage that dies late in its start does."""
    with pytest.raises(LinkError):
        Run(at(range(2000), lambda: LinkError("x")), some_requests(1), policy=RestartPolicy(most=5, window_s=0.5))


def test_backoff_above_the_usual_most_is_kept() -> None:
    assert [RestartPolicy(backoff_s=30.0).delay_s(n) for n in (2, 3, 9)] == [30.0, 30.0, 30.0]


@pytest.mark.parametrize(("in_a_row", "delay_s"), [(1, 0.0), (2, 0.1), (3, 0.2), (4, 0.4), (30, 5.0), (100_000, 5.0)])
def test_failures_without_a_token_between_wait_longer(in_a_row: int, delay_s: float) -> None:
    assert RestartPolicy().delay_s(in_a_row) == pytest.approx(delay_s)


def crash_on(name: str, requests: Sequence[EngineRequest], known: int) -> Fault:
    """The stages die whenever that request is computed with at least so many known tokens. It is found by its seed."""
    seed = next(request.seed for request in requests if request.request_id == name)

    def fault(cluster: LocalCluster, _count: int) -> None:
        for stage in cluster.stages:
            table: SlotTable = stage.table
            held = [s for s in table.held_slots() if table.columns["seed"][s] == np.uint64(seed) and table.columns["known"][s] >= known]
            if any(table.columns["pending"][s] >= 0 for s in held):
                raise StageLostError(f"stage {stage.index} has ended")

    return fault


@pytest.mark.parametrize("known", [1, 8])
def test_request_that_kills_its_stage_is_ended_and_no_innocent_is(known: int) -> None:
    """PROTOCOL.md 22."""
    requests = [make_request(f"r{i}", [i + 1, 2, 3], 12, seed=i) for i in range(7)]
    run = Run(crash_on("r2", requests, known), requests)
    innocent = [request for request in requests if request.request_id != "r2"]
    run.check_right(innocent)
    assert run.ends["r2"].finish_reason is FinishReason.ERROR
    assert isinstance(run.ends["r2"].error, PoisonError)
    assert run.loop.counts.restarts == 4
    assert run.tokens["r2"] == closed_form(requests[2], layer_count=LAYER_COUNT, vocabulary=VOCABULARY)[: len(run.tokens["r2"])]


def test_requests_that_kill_their_stages_are_no_reason_to_end_the_engine() -> None:
    """Each costs a few failures; once it is found they say nothing of the next one."""
    requests = [make_request(f"r{i}", [i + 1, 2, 3], 12, seed=i) for i in range(7)]
    poison = ["r1", "r3", "r4", "r6"]
    faults = [crash_on(name, requests, 1) for name in poison]

    def fault(cluster: LocalCluster, count: int) -> None:
        for one in faults:
            one(cluster, count)

    run = Run(fault, requests, policy=RestartPolicy(most=5, window_s=1e9), slot_count=1)
    run.check_right([request for request in requests if request.request_id not in poison])
    assert [type(run.ends[name].error) for name in poison] == [PoisonError] * 4
    assert run.loop.counts.restarts > 8


def test_strikes_are_forgotten_once_a_request_is_past_where_it_was() -> None:
    """Stages that die for reasons of their own, with tokens in between, end nobody however often."""
    requests = some_requests(3)
    run = Run(at(range(10, 200, 12), lambda: StageLostError("stage 2 has ended")), requests)
    run.check_right(requests)
    assert run.loop.counts.restarts >= 3


# A mistake of the driver's own


def test_what_no_part_raises_on_purpose_ends_the_epoch_and_not_the_engine() -> None:
    requests = some_requests()
    records = Records()

    def fault(cluster: LocalCluster, count: int) -> None:
        if count in (4, 11):
            driver = driver_of(cluster)
            driver.next_plan = lambda: once(driver)  # type: ignore[method-assign]

    def once(driver: Driver) -> StepPlan | None:
        del driver.next_plan  # type: ignore[method-assign]
        raise AssertionError("blocks do not add up")

    run = Run(fault, requests, dumper=records)
    run.check_right(requests)
    assert run.loop.counts.restarts == 2
    assert [type(error) for error in records.errors] == [InternalError] * 2
    assert "AssertionError: blocks do not add up" in str(records.errors[0])
    assert [type(error.__cause__) for error in records.errors] == [AssertionError] * 2


def test_failure_to_begin_an_epoch_is_the_next_failure() -> None:
    requests = some_requests()
    begun: list[int] = []

    def fault(cluster: LocalCluster, count: int) -> None:
        if count == 5:
            begin = cluster.begin

            def fails_once(epoch: int) -> None:
                begun.append(epoch)
                if len(begun) == 1:
                    raise LinkError("the link takes no message")
                begin(epoch)

            cluster.begin = fails_once  # type: ignore[method-assign]
            raise StageLostError("stage 1 has ended")

    run = Run(fault, requests)
    run.check_right(requests)
    assert begun == [1, 2]
    assert run.loop.counts.restarts == 2


def test_delivery_that_does_not_fit_ends_its_request_and_no_other() -> None:
    """The ledger sees it when the scheduler has taken the result: who else had tokens in it gets them, ends included."""
    requests = [make_request("wrong", [1, 2, 3], 30), make_request("ends", [4, 5], 6), make_request("goes on", [6, 7], 20)]

    def fault(cluster: LocalCluster, count: int) -> None:
        if count == 1:
            driver = driver_of(cluster)
            deliver = driver._deliver

            def changed(result: StepResult) -> list[TokenEvent]:
                events = deliver(result)
                if any(event.request_id == "ends" and event.finish_reason for event in events):
                    assert {event.request_id for event in events} == {"wrong", "ends", "goes on"}
                    return [dataclasses.replace(event, token_ids=(*event.token_ids, 5)) if event.request_id == "wrong" else event for event in events]
                return events

            driver._deliver = changed  # type: ignore[method-assign]

    run = Run(fault, requests, asynchronous=False, stage_count=1)
    run.check_right(requests[1:])
    assert isinstance(run.ends["wrong"].error, LedgerError)
    assert run.loop.counts.restarts == 1


@pytest.mark.parametrize("name", ["ends", "goes on"])
def test_mistake_between_booking_and_telling_ends_the_step_s_requests_once_each_and_nobody_else(name: str) -> None:
    """Ledger and scheduler have taken the result, or a part of it, when something raises; one of its requests even ended in it."""
    requests = [make_request("ends", [4, 5], 6), make_request("goes on", [6, 7], 20), make_request("late", [1, 2, 3], 9)]

    def fault(cluster: LocalCluster, count: int) -> None:
        if count == 1:
            scheduler = driver_of(cluster).scheduler
            accept = scheduler._accept

            def fails_once(request: Any, result: StepResult, row: int) -> Any:
                delivery = accept(request, result, row)
                if request.spec.request_id == name and result.finishes.any():
                    del scheduler._accept
                    raise AssertionError("blocks do not add up")
                return delivery

            scheduler._accept = fails_once  # type: ignore[method-assign]

    run = Run(fault, requests, asynchronous=False, stage_count=1, slot_count=2)
    run.check_right(requests[2:])
    assert [type(run.ends[request.request_id].error) for request in requests[:2]] == [InternalError] * 2
    assert run.loop.counts.restarts == 1
    for request in requests[:2]:
        whole = closed_form(request, layer_count=LAYER_COUNT, vocabulary=VOCABULARY)
        assert run.tokens[request.request_id] == whole[: len(run.tokens[request.request_id])]


def test_requests_that_cannot_be_taken_end_alone_also_while_the_engine_recovers() -> None:
    requests = some_requests(3)
    records = Records()
    broken = [make_request(f"broken {i}", [1, 2, 3], -2) for i in range(3)]
    ends: list[TokenEvent] = []

    def fault(cluster: LocalCluster, count: int) -> None:
        if count == 4:
            runs[0].submit(broken[0], ends.extend)
            raise StageLostError("stage 1 has ended")

    def submit_more(error: LockstepError) -> None:
        if isinstance(error, StageLostError):
            for request in broken[1:]:
                runs[0].submit(request, ends.extend)

    runs: list[EngineLoop] = []
    records.then = submit_more
    run = Run(fault, requests, note=runs.append, dumper=records)
    run.check_right(requests)
    assert [(event.request_id, type(event.error)) for event in ends] == [(request.request_id, InternalError) for request in broken]
    assert run.loop.counts.restarts == 1


@pytest.mark.parametrize("is_half_done", [False, True])
def test_abort_that_fails_while_the_engine_recovers_still_ends_its_request(is_half_done: bool) -> None:
    """Once: also where the scheduler has forgotten it by then."""
    requests = some_requests(4)
    records = Records()

    def abort_badly(error: LockstepError) -> None:
        if isinstance(error, StageLostError):
            scheduler = runs[0].driver.scheduler
            scheduler.abort, right = lambda name: fails(scheduler, name), scheduler.abort  # type: ignore[method-assign]
            runs[0].abort("r3")
            scheduler.abort = right  # type: ignore[method-assign]

    def fails(scheduler: Any, name: str) -> None:
        if is_half_done:
            request = scheduler._requests.pop(name)
            scheduler._waiting.remove(request)
        raise ValueError(f"{name} is not in the list")

    runs: list[EngineLoop] = []
    records.then = abort_badly
    run = Run(at([4], lambda: StageLostError("stage 1 has ended")), requests, note=runs.append, dumper=records)
    assert isinstance(run.ends["r3"].error, InternalError)
    assert [run.tokens[f"r{i}"] for i in range(3)] == [closed_form(r, layer_count=LAYER_COUNT, vocabulary=VOCABULARY) for r in requests[:3]]


def test_request_whose_end_was_lost_in_a_failure_gets_an_end() -> None:
    requests = [make_request("ends", [4, 5], 6), make_request("goes on", [6, 7], 20)]

    def fault(cluster: LocalCluster, count: int) -> None:
        if count == 1:
            driver = driver_of(cluster)
            receive = driver.receive

            def loses(message: Any, events: list[TokenEvent]) -> None:
                receive(message, events)
                if any(event.request_id == "ends" and event.finish_reason for event in events):
                    events[:] = [event for event in events if event.request_id != "ends"]
                    raise LogError("nobody is named", step=message.step)

            driver.receive = loses  # type: ignore[method-assign]

    run = Run(fault, requests, asynchronous=False, stage_count=1)
    run.check_right(requests[1:])
    assert isinstance(run.ends["ends"].error, InternalError)


def test_sink_that_raises_takes_nobody_else_s_tokens() -> None:
    requests = some_requests(3)

    def raises(_events: list[TokenEvent]) -> None:
        raise ValueError("a client's own mistake")

    def fault(cluster: LocalCluster, count: int) -> None:
        if count == 1:
            runs[0].submit(make_request("raises", [9, 8], 9), raises)

    runs: list[EngineLoop] = []
    run = Run(fault, requests, note=runs.append, asynchronous=False)
    run.check_right(requests)
    assert run.loop.counts.restarts == 0


def test_idle_engine_outlives_failures_that_are_far_apart() -> None:
    run = Run(at(range(1, 40), lambda: StageLostError("x")), [], policy=RestartPolicy(most=3, window_s=0.5), turns=40)
    assert run.loop.counts.restarts > 10


def test_what_stages_still_say_of_an_epoch_that_is_over_is_no_failure() -> None:
    """The second failure waits a while before the next epoch begins, and the old one's stages run on meanwhile."""
    requests = some_requests(2)
    said: list[int] = []

    def fault(cluster: LocalCluster, count: int) -> None:
        if count == 3:
            poll = cluster.poll

            def poll_on(timeout_s: float) -> list[Any]:
                if runs[0]._begin_at is not None:
                    said.append(1)
                    raise LogError("a table of an epoch that is over", concerned=[(0, 0)])
                return poll(timeout_s)

            cluster.poll = poll_on  # type: ignore[method-assign]
        if count in (3, 4):
            raise LinkError("a gap")

    runs: list[EngineLoop] = []
    run = Run(fault, requests, note=runs.append, policy=RestartPolicy(backoff_s=20.0))
    run.check_right(requests)
    assert said
    assert run.loop.counts.restarts == 2
    assert run.loop.counts.last_code == LinkError.code


def skips_an_index(name: str, then: Callable[[], None] = lambda: None) -> Fault:
    """In the first step that tells three requests something, one of them is told it under the next index; then whatever follows."""
    done: list[bool] = []

    def fault(cluster: LocalCluster, count: int) -> None:
        if count == 6:
            driver = driver_of(cluster)
            receive = driver.receive

            def skips(message: Any, events: list[TokenEvent]) -> None:
                receive(message, events)
                if len(events) == 3 and not done:
                    done.append(True)
                    events[:] = [dataclasses.replace(event, index=event.index + (event.request_id == name)) for event in events]
                    then()

            driver.receive = skips  # type: ignore[method-assign]

    return fault


def test_first_of_two_failures_in_a_turn_is_the_one_that_is_told() -> None:
    requests = some_requests(3)

    def fails() -> None:
        raise LedgerError("r0 was told something else", request_ids=["r0"])

    run = Run(skips_an_index("r1", fails), requests, asynchronous=False, stage_count=1)
    run.check_right([requests[2]])
    assert [type(run.ends[name].error) for name in ("r0", "r1")] == [LedgerError] * 2
    assert run.loop.counts.restarts == 1


def test_event_that_skips_an_index_ends_its_request_and_no_other() -> None:
    requests = some_requests(3)
    run = Run(skips_an_index("r1"), requests, asynchronous=False, stage_count=1)
    run.check_right([requests[0], requests[2]])
    assert isinstance(run.ends["r1"].error, InternalError)
    assert run.loop.counts.restarts == 1


def test_recovery_is_known_before_anything_is_asked_about_the_failure() -> None:
    seen: list[bool] = []

    def fault(cluster: LocalCluster, count: int) -> None:
        if count == 3:
            columns_of = cluster.columns_of

            def asks(step: int) -> dict[int, Any]:
                seen.append(runs[0].recovering)
                return columns_of(step)

            def fails(_message: Any, _events: list[TokenEvent]) -> None:
                raise LogError("no slot is named", step=1)

            cluster.columns_of = asks  # type: ignore[method-assign]
            receive, driver_of(cluster).receive = driver_of(cluster).receive, fails  # type: ignore[method-assign]
            after.append(receive)
        elif after:
            driver_of(cluster).receive = after.pop()  # type: ignore[method-assign]

    runs: list[EngineLoop] = []
    after: list[Any] = []
    requests = some_requests(2)
    Run(fault, requests, note=runs.append).check_right(requests)
    assert seen == [True], "the cluster itself is well, so it does not tell"


# What concerns one request ends that one


def change(name: str, slot: int, value: int, stage: int) -> Fault:
    def fault(cluster: LocalCluster, count: int) -> None:
        table = cluster.stages[stage].table
        if count == 8:
            array = {"tokens": table.tokens, "blocks": table.blocks[0]}.get(name)
            if array is None:
                table.columns[name][slot] = value
            else:
                array[slot, 0] = value

    return fault


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("column", "value"), [("seed", 77), ("length_cap", 59), ("blocks", 39), ("top_k", 3), ("known", 2), ("prompt_length", 9)])
def test_changed_column_of_one_stage_ends_that_request_and_no_other(column: str, value: int, stage: int) -> None:
    requests = some_requests()
    run = Run(change(column, 1, value, stage), requests, prefix_caching=False)
    ended = [name for name, event in run.ends.items() if event.finish_reason is FinishReason.ERROR]
    assert len(ended) == 1, run.ends
    error = run.ends[ended[0]].error
    assert isinstance(error, InternalError)
    assert "incident i0" in str(error)
    assert "slot" in run.loop.counts.last
    assert "slot" not in str(error), "values are for the server's log; they may be another client's"
    whole = closed_form(next(r for r in requests if r.request_id == ended[0]), layer_count=LAYER_COUNT, vocabulary=VOCABULARY)
    assert run.tokens[ended[0]] == whole[: len(run.tokens[ended[0]])]
    run.check_right([request for request in requests if request.request_id not in ended])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_divergence_names_step_slot_column_and_both_values(stage: int) -> None:
    run = Run(change("seed", 1, 77, stage), some_requests())
    (error,) = [event.error for event in run.ends.values() if event.error is not None]
    assert isinstance(error, DivergenceError)
    assert "layout.sampling.seed" in run.loop.counts.last
    assert "77" in run.loop.counts.last
    assert run.loop.counts.divergences == 1


def test_kv_of_another_owner_ends_that_request_and_no_other() -> None:
    requests = some_requests()

    def fault(cluster: LocalCluster, count: int) -> None:
        if count == 8:
            stage = cluster.stages[1]
            block = stage.table.blocks[0, 1, 0]
            stage._provenance[0].tags[block] += np.uint64(1)
            stage._provenance[0].block_tags[block] += np.uint64(1)

    run = Run(fault, requests)
    ended = {name: event.error for name, event in run.ends.items() if event.error is not None}
    assert [type(error) for error in ended.values()] == [ProvenanceError]
    assert run.loop.counts.provenance_failures == 1
    run.check_right([request for request in requests if request.request_id not in ended])


def test_wrong_rule_that_all_replicas_share_is_seen_by_the_ledger() -> None:
    """Digests agree; the ledger's own account does not."""

    class EndsEarly(SlotTable):
        def resolve(self, plan: StepPlan) -> BatchLayout:
            layout = super().resolve(plan)
            layout.length_cap[:] -= 1
            return layout

    def make_table(shape: TableShape, _replica: int) -> SlotTable:
        return EndsEarly(shape)

    rig = Rig(RigConfig(), make_table=make_table)
    rig.submit(make_request("r", [1, 2, 3], 6))
    with pytest.raises(InternalError, match="finish 2 came, 0 is right"):
        rig.run()


def test_driver_whose_own_table_is_wrong_does_not_stop_the_engine() -> None:
    """While it explains another replica's divergence it meets its own: that is no second failure."""
    requests = some_requests()

    def fault(cluster: LocalCluster, count: int) -> None:
        if count == 8:
            cluster.stages[0].table.columns["seed"][1] = 77
            assert isinstance(cluster, FaultyCluster)
            cluster.driver.table.columns["known"][1] = 2

    run = Run(fault, requests)
    ended = {name for name, event in run.ends.items() if event.error is not None}
    assert len(ended) == 1
    assert run.loop.counts.restarts == 1
    run.check_right([request for request in requests if request.request_id not in ended])
