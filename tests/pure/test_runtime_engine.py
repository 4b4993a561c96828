"""`Engine`: every submitted request gets exactly one last event, whatever happens to it, to the stages or to the engine."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from core_loop import make_request

from lockstep.core.outputs import FinishReason, TokenEvent
from lockstep.core.params import SamplingParams
from lockstep.core.records import Columns, StepPlan
from lockstep.core.request import EngineRequest
from lockstep.errors import CapacityError, DivergenceError, InternalError, InvalidRequestError, LinkError, StageLostError
from lockstep.runtime.client import AsyncClient, collect
from lockstep.runtime.driver import Driver
from lockstep.runtime.engine import Engine
from lockstep.runtime.loop import RestartPolicy
from lockstep.runtime.requests import RequestFactory, RequestLimits, SeedSource
from lockstep.runtime.transport.cluster import FromStages
from lockstep.runtime.transport.local import LocalCluster
from lockstep.sim.oracle import closed_form
from lockstep.sim.rig import LAYER_COUNT, VOCABULARY, Rig, RigConfig

TIMEOUT_S = 20


class FailingCluster:
    """Stages that compute up to `results_max` results and then are found lost by whoever polls."""

    def __init__(self, inner: LocalCluster, error: BaseException, results_max: int = 0) -> None:
        self._inner = inner
        self._error = error
        self._left = results_max
        self.closed = 0

    def send(self, plan: StepPlan) -> None:
        self._inner.send(plan)

    def begin(self, epoch: int) -> None:
        self._inner.begin(epoch)

    def use_weights(self, weights: str) -> None:
        self._inner.use_weights(weights)

    @property
    def is_ready(self) -> bool:
        return self._inner.is_ready

    def columns_of(self, step: int) -> Mapping[int, Columns]:
        return self._inner.columns_of(step)

    def check_seconds(self) -> Mapping[int, float]:
        return self._inner.check_seconds()

    def poll(self, timeout_s: float) -> list[FromStages]:
        results = self._inner.poll(timeout_s)
        if results and self._left <= 0:
            raise self._error
        self._left -= len(results)
        return results

    def wake(self) -> None:
        self._inner.wake()

    def describe(self) -> dict[str, object]:
        return self._inner.describe()

    def close(self) -> None:
        self.closed += 1
        self._inner.close()


class Witness:
    """A sink that keeps everything, checks that nothing follows a last event, and lets a test wait for the ends it expects."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, TokenEvent] = {}
        self.wrong: list[str] = []
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.first = threading.Event()

    def __call__(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.request_id in self.ends:
                self.wrong.append(f"{event} follows {self.ends[event.request_id]}")
            if event.index != len(self.tokens[event.request_id]):
                self.wrong.append(f"{event} after {len(self.tokens[event.request_id])} tokens")
            self.tokens[event.request_id].extend(event.token_ids)
            self.first.set()
            if event.finish_reason is not None:
                self.ends[event.request_id] = event
                self._ended.put(event.request_id)

    def wait(self, count: int) -> None:
        for _ in range(count):
            self._ended.get(timeout=TIMEOUT_S)

    def check(self, expected: int) -> None:
        assert self.wrong == []
        assert len(self.ends) == expected
        assert self._ended.empty()


def make_parts(**changes: Any) -> tuple[Driver, LocalCluster]:
    rig = Rig(RigConfig(**{"stage_count": 2, "block_count": 64, "length_max": 600, "slot_count": 4, **changes}))
    return rig.driver, rig.cluster


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(*make_parts(block_count=512))
    yield engine
    engine.close()


def long_requests(count: int) -> list[EngineRequest]:
    return [make_request(f"r{i}", [i, 1, 2], 500) for i in range(count)]


def test_events_are_the_tokens_in_order_and_end_once(engine: Engine) -> None:
    witness, requests = Witness(), [make_request(f"r{i}", [i, 1, 2], 3 + i) for i in range(9)]
    for request in requests:
        engine.submit(request, witness)
    witness.wait(9)
    engine.close()
    witness.check(9)
    for request in requests:
        assert witness.tokens[request.request_id] == closed_form(request, layer_count=LAYER_COUNT, vocabulary=VOCABULARY)
        assert witness.ends[request.request_id].finish_reason is FinishReason.LENGTH


def test_each_sink_gets_its_own_requests_only(engine: Engine) -> None:
    witnesses = [Witness() for _ in range(3)]
    for i, witness in enumerate(witnesses):
        engine.submit_all([make_request(f"{i}.{j}", [i, j], 4) for j in range(2)], witness)
    for i, witness in enumerate(witnesses):
        witness.wait(2)
        assert set(witness.ends) == {f"{i}.0", f"{i}.1"}


def test_abort_ends_a_request_once_and_others_go_on(engine: Engine) -> None:
    witness = Witness()
    engine.submit_all([*long_requests(2), make_request("short", [9], 5)], witness)
    witness.wait(1)
    for _ in range(2):
        engine.abort("r0")
        engine.abort("r1")
    witness.wait(2)
    engine.close()
    witness.check(3)
    assert {name: event.finish_reason for name, event in witness.ends.items()} == {
        "short": FinishReason.LENGTH,
        "r0": FinishReason.ABORT,
        "r1": FinishReason.ABORT,
    }
    assert engine.driver.scheduler.pools[0].audit() == []


def test_abort_of_an_unknown_or_ended_request_is_ignored(engine: Engine) -> None:
    witness = Witness()
    engine.abort("nobody")
    engine.submit(make_request("r", [1], 3), witness)
    witness.wait(1)
    engine.abort("r")
    engine.abort("nobody")
    engine.submit(make_request("again", [1], 3), witness)
    witness.wait(1)
    engine.close()
    witness.check(2)
    assert engine.state.phase == "closed"


def test_same_id_may_come_again_after_an_abort(engine: Engine) -> None:
    """C4-03: cancelled and sent again at once; the new request's tokens are the whole answer."""
    old, new = Witness(), Witness()
    request = make_request("x", [1, 2, 3], 30)
    engine.submit(request, old)
    engine.abort("x")
    engine.submit(request, new)
    new.wait(1)
    old.wait(1)
    assert old.ends["x"].finish_reason is FinishReason.ABORT
    assert new.tokens["x"] == closed_form(request, layer_count=LAYER_COUNT, vocabulary=VOCABULARY)


def test_close_aborts_what_is_open_and_is_not_alarmed_by_a_second_call(engine: Engine) -> None:
    witness = Witness()
    engine.submit_all(long_requests(7), witness)
    witness.first.wait(TIMEOUT_S)
    engine.close()
    engine.close()
    witness.wait(7)
    witness.check(7)
    assert {event.finish_reason for event in witness.ends.values()} <= {FinishReason.ABORT, FinishReason.LENGTH}
    assert FinishReason.ABORT in {event.finish_reason for event in witness.ends.values()}
    with pytest.raises(CapacityError, match="shutting down"):
        engine.submit(make_request("late", [1], 2), witness)


def test_queue_over_its_limit_is_refused_whole() -> None:
    engine = Engine(*make_parts(), queue_max=3)
    try:
        witness = Witness()
        with pytest.raises(CapacityError, match="at most 3"):
            engine.submit_all(long_requests(4), witness)
        engine.submit_all([make_request(f"s{i}", [i], 2) for i in range(3)], witness)
        witness.wait(3)
    finally:
        engine.close()
    witness.check(3)


@pytest.mark.parametrize("results_max", [0, 1, 5])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StageLostError("stage 1 has ended"), StageLostError),
        (LinkError("a gap"), LinkError),
        (DivergenceError("step 3", step=3), DivergenceError),
        (InvalidRequestError("not the caller's"), InternalError),
        (RuntimeError("a bug"), InternalError),
    ],
    ids=["stage lost", "link", "divergence", "a caller's error", "a bug"],
)
def test_failure_of_the_stages_ends_every_open_request_and_later_ones_at_once(error: Exception, told: type[Exception], results_max: int) -> None:
    """C7-01, C7-05: nobody waits for an engine that has stopped, and whoever asks later is told why."""
    driver, cluster = make_parts()
    failing, failures = FailingCluster(cluster, error, results_max), queue.SimpleQueue[Exception]()
    engine = Engine(driver, failing, restarts=RestartPolicy(most=0), on_failure=failures.put)
    witness = Witness()
    engine.submit_all(long_requests(7), witness)
    witness.wait(7)
    assert isinstance(failures.get(timeout=TIMEOUT_S), told)
    with pytest.raises(told):
        engine.submit(make_request("late", [1], 2), witness)
    engine.close()
    witness.check(7)
    for event in witness.ends.values():
        assert event.finish_reason is FinishReason.ERROR
        assert isinstance(event.error, told)
    assert engine.state.phase == "failed"
    assert isinstance(engine.state.failure, told)
    assert failing.closed == 1


def test_second_request_of_one_name_is_refused_and_the_first_goes_on(engine: Engine) -> None:
    first, second = Witness(), Witness()
    request = make_request("x", [1, 2], 20)
    engine.submit_all([request, make_request("y", [2], 4)], first)
    engine.submit_all([request, make_request("z", [3], 4)], second)
    first.wait(2)
    second.wait(2)
    engine.close()
    first.check(2)
    second.check(2)
    assert isinstance(second.ends["x"].error, InternalError)
    assert second.ends["z"].finish_reason is FinishReason.LENGTH
    assert first.tokens["x"] == closed_form(request, layer_count=LAYER_COUNT, vocabulary=VOCABULARY)


def test_request_that_the_engine_cannot_take_ends_alone() -> None:
    """A request that nobody should have built is a mistake of ours: those who came in with it, before and behind it, get their answers."""
    engine = Engine(*make_parts())
    witness = Witness()
    requests = [make_request("before", [1], 20), make_request("broken", [1, 2, 3], -2), make_request("behind", [2], 20)]
    engine.submit_all(requests, witness)
    witness.wait(3)
    assert engine.state.phase == "running"
    engine.close()
    witness.check(3)
    assert isinstance(witness.ends["broken"].error, InternalError)
    for request in (requests[0], requests[2]):
        assert witness.tokens[request.request_id] == closed_form(request, layer_count=LAYER_COUNT, vocabulary=VOCABULARY)


# Clients in the same process


def test_collect_yields_until_all_have_ended(engine: Engine) -> None:
    requests = [make_request(f"r{i}", [i], 4) for i in range(3)]
    tokens: dict[str, list[int]] = defaultdict(list)
    for batch in collect(engine, requests):
        for event in batch:
            tokens[event.request_id].extend(event.token_ids)
    assert {name: len(ids) for name, ids in tokens.items()} == {"r0": 4, "r1": 4, "r2": 4}


def test_collect_raises_the_error_of_a_failed_engine() -> None:
    driver, cluster = make_parts()
    engine = Engine(driver, FailingCluster(cluster, StageLostError("stage 1 has ended")), restarts=RestartPolicy(most=2))
    with pytest.raises(StageLostError):
        list(collect(engine, long_requests(2)))
    engine.close()


def _client(engine: Engine) -> AsyncClient:
    return AsyncClient(engine, RequestFactory(RequestLimits(window=600, vocab_size=VOCABULARY, eos_ids=()), SeedSource(1)), lambda: "fingerprint")


def test_async_client_streams_and_leaving_early_aborts(engine: Engine) -> None:
    """C7-03: a client that goes away leaves nothing running. The request after it proves that the engine has heard."""

    async def talk() -> list[int]:
        client = _client(engine)
        counts = []
        for name, most in (("a", 5), ("b", 500), ("c", 3)):
            count = 0
            stream = client.generate(name, [1, 2], SamplingParams(max_tokens=most, temperature=0.0))
            async for event in stream:
                count += len(event.token_ids)
                if name == "b":
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            counts.append(count)
        return counts

    assert asyncio.run(talk()) == [5, 1, 3]
    assert engine.driver.scheduler.stats.aborts == 1
    assert engine.driver.scheduler.request_ids == ()


def test_engine_outlives_a_client_whose_event_loop_is_closed(engine: Engine) -> None:
    """Somebody's loop ends with a request open: its events go nowhere, and the requests of others end as they would have."""

    async def leave() -> None:
        client = _client(engine)
        engine.submit(make_request("orphan#0", [1], 400), client._sink)

    witness = Witness()
    asyncio.run(leave())
    engine.submit(make_request("r", [1], 5), witness)
    witness.wait(1)
    engine.close()
    assert witness.ends["r"].finish_reason is FinishReason.LENGTH
    assert engine.state.phase == "closed"


def test_async_client_refuses_a_bad_request_before_the_engine_sees_it(engine: Engine) -> None:
    async def talk() -> None:
        client = _client(engine)
        for prompt, most, name in (([], 5, "prompt"), ([VOCABULARY], 5, "prompt"), ([1], 600, "max_tokens")):
            with pytest.raises(InvalidRequestError) as caught:
                await anext(client.generate("r", prompt, SamplingParams(max_tokens=most)))
            assert caught.value.param == name

    asyncio.run(talk())
    assert engine.driver.scheduler.stats.plans == 0
