"""What may happen to a stage's process, and what `ProcessCluster` makes of it: whom it starts again, who lives on, and that the log goes on right."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from oracle_stage import CONFIG, FAULTY_STAGE
from served_process import assert_all_gone, is_alive

from lockstep.core.outputs import FinishReason
from lockstep.core.records import StepResult
from lockstep.core.request import STRIKES_MAX, EngineRequest
from lockstep.errors import HandshakeError, InternalError, LinkError, LockstepError, PeerError, ProvenanceError, StageLostError
from lockstep.runtime.engine import Engine
from lockstep.runtime.loop import EngineLoop, RestartPolicy
from lockstep.runtime.transport.process import ProcessCluster
from lockstep.runtime.transport.stage_process import HEARTBEAT_S
from lockstep.runtime.transport.watch import Timeouts
from lockstep.sim.oracle import closed_form
from lockstep.sim.rig import LAYER_COUNT, VOCABULARY, Rig

STAGES = CONFIG.stage_count
PATIENCE_S = 60.0


@contextmanager
def cluster_of(fault: str = "", *, first: int = 0, until: int = 1, step_s: float = 30.0) -> Iterator[ProcessCluster]:
    """Three stages; stage 1 has the fault if it is started in an epoch from `first` to before `until`."""
    settings = json.dumps({"fault": fault, "from": first, "until": until})

    def command(folder: Path, epoch: int, index: int) -> Sequence[str]:
        return [sys.executable, str(Path(__file__).parent / "oracle_stage.py"), settings, str(folder), str(epoch), str(index)]

    timeouts = Timeouts(startup_s=60.0, heartbeat_s=2.0, step_s=step_s)
    cluster = ProcessCluster(stage_count=STAGES, command=command, choose_blocks=lambda _: (CONFIG.block_count,), timeouts=timeouts)
    seen = processes(cluster)
    try:
        yield cluster
        seen += processes(cluster)
    finally:
        cluster.close()
    assert_all_gone(seen)


def processes(cluster: ProcessCluster) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids(cluster) if is_alive(pid)]


def pids(cluster: ProcessCluster) -> list[int]:
    found = cluster.describe()["pids"]
    assert isinstance(found, list)
    return found


def requests() -> list[EngineRequest]:
    return [EngineRequest(request_id=f"r{i}", prompt=np.array([i + 1, 2, 3], np.int32), length_cap=30, seed=i) for i in range(4)]


class Work:
    """Four requests on a cluster; the loop that serves them is turned by hand."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self.cluster = cluster
        self.loop = EngineLoop(Rig(CONFIG).driver, cluster, restarts=RestartPolicy(), clock=time.monotonic, make_incident=lambda: "incident")
        self.tokens: dict[str, list[int]] = {request.request_id: [] for request in requests()}
        self.ends: dict[str, Any] = {}
        self.failures: list[str] = []
        for request in requests():
            self.loop.submit(request, self._take)

    def _take(self, events: Sequence[Any]) -> None:
        for event in events:
            self.tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                self.ends[event.request_id] = event

    def turn(self) -> None:
        self.loop.turn(0.1)
        if self.loop.counts.last not in self.failures[-1:] and self.loop.counts.last:
            self.failures.append(self.loop.counts.last)

    def run_until_tokens(self, count: int) -> None:
        while sum(map(len, self.tokens.values())) < count:
            self.turn()

    def run(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.ends) < len(self.tokens):
            assert time.monotonic() < deadline, (self.failures, self.tokens)
            self.turn()

    def check(self, ended_with_error: int = 0) -> None:
        """Who did not end with an error has exactly the tokens of the closed form."""
        right = {r.request_id: closed_form(r, layer_count=LAYER_COUNT, vocabulary=VOCABULARY) for r in requests()}
        failed = [name for name, event in self.ends.items() if event.finish_reason is FinishReason.ERROR]
        assert len(failed) == ended_with_error
        for name, tokens in self.tokens.items():
            assert tokens == (right[name][: len(tokens)] if name in failed else right[name])


def changed(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [index for index, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_only_the_stage_that_is_lost_or_stopped_is_started_again(number: signal.Signals) -> None:
    with cluster_of() as cluster:
        before, work = pids(cluster), Work(cluster)
        work.run_until_tokens(5)
        os.kill(before[2], number)
        work.run()
        work.check()
        assert changed(before, pids(cluster)) == [2]
        assert work.loop.counts.restarts == 1
        assert [("stage 2" in failure) for failure in work.failures] == [True]


def test_stage_that_hangs_in_compute_is_named_and_started_again_and_the_others_live_on() -> None:
    with cluster_of("hang", step_s=1.0) as cluster:
        before, work = pids(cluster), Work(cluster)
        work.run()
        work.check()
        assert changed(before, pids(cluster)) == [FAULTY_STAGE]
        assert "stage 2 at step 3 waits for activations of step 3 from stage 1" in work.failures[0]
        assert "stage 1 has hung in a step" in work.failures[1]
        assert work.loop.counts.restarts == 2


def test_error_of_the_engines_own_kind_ends_whom_it_concerns_and_no_process() -> None:
    with cluster_of("provenance") as cluster:
        before, work = pids(cluster), Work(cluster)
        work.run()
        work.check(ended_with_error=1)
        assert [type(event.error) for event in work.ends.values() if event.error is not None] == [ProvenanceError]
        assert (work.loop.counts.provenance_failures, work.loop.counts.restarts) == (1, 1)
        assert changed(before, pids(cluster)) == []


def test_error_that_nobody_foresaw_is_reported_and_its_process_started_again() -> None:
    with cluster_of("error") as cluster:
        before, work = pids(cluster), Work(cluster)
        work.run()
        work.check()
        assert changed(before, pids(cluster)) == [FAULTY_STAGE]
        assert "stage 1: ZeroDivisionError: by nought" in work.failures[0]
        assert work.loop.counts.restarts == 1


def test_another_stage_that_dies_in_the_beginning_begins_yet_another_epoch_and_the_first_goes_on_loading() -> None:
    with cluster_of() as cluster:
        before = pids(cluster)
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(StageLostError, match=r"stage 0 .* SIGKILL"):
            poll_until(cluster, lambda: False)
        assert cluster.poll(0) == []
        cluster.begin(1)
        loading = pids(cluster)
        assert not cluster.is_ready
        os.kill(before[2], signal.SIGKILL)
        with pytest.raises(StageLostError, match=r"stage 2 .* SIGKILL"):
            poll_until(cluster, lambda: False)
        cluster.begin(2)
        poll_until(cluster, lambda: cluster.is_ready)
        assert changed(before, loading) == [0]
        assert changed(loading, pids(cluster)) == [2]
        assert cluster.columns_of(0) == {}


def poll_until(cluster: ProcessCluster, condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        cluster.poll(0.05)


@pytest.mark.parametrize(
    ("fault", "kind", "words"), [("load", StageLostError, "the file is damaged"), ("other", HandshakeError, "model is 'oracle'")]
)
def test_stage_that_comes_back_wrong_is_refused_and_tried_again(fault: str, kind: type[PeerError], words: str) -> None:
    with cluster_of(fault, first=1, until=2) as cluster:
        os.kill(pids(cluster)[FAULTY_STAGE], signal.SIGKILL)
        with pytest.raises(StageLostError):
            poll_until(cluster, lambda: False)
        cluster.begin(1)
        with pytest.raises(kind, match=words):
            poll_until(cluster, lambda: False)
        wrong = pids(cluster)
        cluster.begin(2)
        poll_until(cluster, lambda: cluster.is_ready)
        assert changed(wrong, pids(cluster)) == [FAULTY_STAGE]


def test_stages_tell_what_they_folded_after_a_failure_and_forget_it_in_the_next_epoch() -> None:
    with cluster_of() as cluster:
        work = Work(cluster)
        work.run_until_tokens(8)
        columns = cluster.columns_of(1)
        assert sorted(columns) == list(range(STAGES))
        for stage in range(1, STAGES):
            assert list(columns[stage]) == list(columns[0])
            assert all(np.array_equal(columns[stage][name], columns[0][name]) for name in columns[0])
        assert cluster.columns_of(10_000) == {}


@pytest.mark.parametrize(("fault", "restarts"), [("heartbeat lost", 1), ("heartbeat damaged", 2)])
def test_heartbeat_that_does_not_arrive_whole_is_a_failure_of_its_link_and_not_one_for_ever(fault: str, restarts: int) -> None:
    """A damaged one cannot say its number, so it is missed once more by the next."""
    with cluster_of(fault) as cluster:
        before, work = pids(cluster), Work(cluster)
        work.run()
        deadline = time.monotonic() + PATIENCE_S
        while work.loop.counts.restarts < restarts:
            assert time.monotonic() < deadline
            work.turn()
        until = time.monotonic() + 4 * HEARTBEAT_S
        while time.monotonic() < until:
            work.turn()
        work.check()
        assert work.loop.counts.restarts == restarts
        assert work.loop.counts.last_code == LinkError.code
        assert changed(before, pids(cluster)) == []


def test_results_that_came_before_a_failure_are_handed_out_before_it() -> None:
    with cluster_of() as cluster:
        driver = Rig(CONFIG).driver
        for request in requests():
            driver.submit(request)
        plan = driver.next_plan()
        assert plan is not None
        cluster.send(plan)
        (result,) = cluster.poll(PATIENCE_S)
        assert isinstance(result, StepResult)
        drain = cluster._drain

        def drain_once_more(found: list[Any]) -> None:
            cluster._drain = drain  # type: ignore[method-assign]
            found.append(result)
            drain(found)

        cluster._drain = drain_once_more  # type: ignore[method-assign]
        killed = psutil.Process(pids(cluster)[0])
        killed.kill()
        killed.wait(PATIENCE_S)
        assert cluster.poll(PATIENCE_S) == [result]
        assert not cluster.is_ready, "no plan is sent into what is over"
        with pytest.raises(StageLostError, match="stage 0"):
            cluster.poll(PATIENCE_S)


def test_engine_ends_after_more_failures_than_it_may_recover_from() -> None:
    with cluster_of("error", until=100) as cluster:
        told: list[LockstepError] = []
        most = STRIKES_MAX - 2  # from STRIKES_MAX failures on, a request that was alone in them all is poison, and they are forgotten with it
        engine = Engine(Rig(CONFIG).driver, cluster, restarts=RestartPolicy(most=most, backoff_s=0.01), on_failure=told.append)
        ended: list[Any] = []
        try:
            engine.submit_all(requests(), ended.extend)
            poll_engine_until_it_ends(engine)
        finally:
            engine.close()
        assert engine.state.restarts == most
        assert isinstance(engine.state.failure, InternalError)
        assert len(told) == 1
        assert {event.request_id for event in ended if event.finish_reason is FinishReason.ERROR} == {r.request_id for r in requests()}


def poll_engine_until_it_ends(engine: Engine) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while engine.state.phase in ("running", "recovering"):
        assert time.monotonic() < deadline, engine.state
        time.sleep(0.01)
