"""A new epoch starts from zero on every link: older messages are dropped, newer ones wait, the announcement interrupts; a stall names its link."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from core_loop import make_plan, make_request

from lockstep.core.layout import BatchLayout
from lockstep.errors import DivergenceError, HandshakeError, InternalError, LinkError, LogError, ProvenanceError
from lockstep.runtime.messages import ColumnsRequest, Heartbeat, StageFailure, StageHello, StageStart
from lockstep.runtime.stage import DRIVER, Stage
from lockstep.runtime.transport.frames import LinkReader, LinkWriter
from lockstep.runtime.transport.handshake import as_error, check_fit, check_same
from lockstep.runtime.transport.local import LocalCluster
from lockstep.runtime.transport.numbers import LinkNumbers, Verdict
from lockstep.runtime.transport.watch import Timeouts, Watch
from lockstep.sim.rig import Rig, RigConfig, oracle_executors

# Numbers


def test_numbers_count_from_zero_within_an_epoch_and_a_sender() -> None:
    numbers = LinkNumbers(2)
    assert [numbers.accept(0, 0, 0), numbers.accept(0, 0, 1), numbers.accept(1, 0, 0)] == [Verdict.TAKE] * 3
    numbers.begin(3)
    assert [numbers.accept(0, 3, 0), numbers.accept(1, 3, 0), numbers.accept(0, 3, 1)] == [Verdict.TAKE] * 3
    with pytest.raises(LinkError, match="link 0 -> 2, epoch 3: message 2 comes next, got message 3"):
        numbers.accept(0, 3, 3)


def test_older_epoch_is_dropped_and_newer_waits_whatever_its_number() -> None:
    numbers = LinkNumbers(0, epoch=5)
    assert {numbers.accept(1, 4, number) for number in (0, 7, 7, 3)} == {Verdict.DROP}
    assert {numbers.accept(1, 6, number) for number in (0, 7)} == {Verdict.WAIT}
    assert numbers.accept(1, 5, 0) is Verdict.TAKE


def test_source_with_a_life_of_its_own_counts_on_through_epochs_and_from_zero_when_renewed() -> None:
    numbers = LinkNumbers(DRIVER)
    numbers.renew(100, 0)
    assert numbers.accept(100, 0, 0) is Verdict.TAKE
    numbers.begin(1)
    assert numbers.accept(100, 0, 1) is Verdict.TAKE
    with pytest.raises(LinkError, match="message 2 comes next, got message 0"):
        numbers.accept(100, 0, 0)
    numbers.begin(2)
    numbers.renew(100, 2)
    assert [numbers.accept(100, 0, 2), numbers.accept(100, 2, 0)] == [Verdict.DROP, Verdict.TAKE]


def test_source_with_a_life_of_its_own_goes_on_behind_a_gap_and_one_of_an_epoch_does_not() -> None:
    """No later epoch renews its numbers: a gap is told once, not for ever."""
    numbers = LinkNumbers(DRIVER)
    numbers.renew(7, 0)
    for source in (7, 1):
        assert numbers.accept(source, 0, 0) is Verdict.TAKE
        with pytest.raises(LinkError, match="message 1 comes next, got message 2"):
            numbers.accept(source, 0, 2)
    with pytest.raises(LinkError, match="message 1 comes next, got message 3"):
        numbers.accept(1, 0, 3)
    assert numbers.accept(7, 0, 3) is Verdict.TAKE
    numbers.begin(1)
    assert numbers.accept(7, 0, 4) is Verdict.TAKE


# Links


def request(step: int, epoch: int = 0) -> ColumnsRequest:
    return ColumnsRequest(epoch=epoch, step=step)


def test_message_of_a_later_epoch_is_handed_out_when_that_begins() -> None:
    writer, reader = LinkWriter(1, 2), LinkReader(2)
    late = writer.pack(request(0))
    writer.begin(1)
    early = [writer.pack(request(step, 1)) for step in range(3)]
    writer.begin(2)
    earlier = writer.pack(request(9, 2))
    assert [reader.unpack(frames) for frames in [*early, earlier]] == [None] * 4
    assert reader.take_due() is None
    reader.begin(1)
    assert [reader.take_due() for _ in range(4)] == [*((1, request(step, 1)) for step in range(3)), None]
    assert reader.unpack(late) is None
    reader.begin(2)
    assert [reader.take_due(), reader.take_due()] == [(1, request(9, 2)), None]


def test_gap_among_messages_that_waited_is_found_when_they_are_handed_out() -> None:
    writer, reader = LinkWriter(1, 2, epoch=1), LinkReader(2)
    frames = [writer.pack(request(step, 1)) for step in range(3)]
    assert reader.unpack(frames[0]) is None
    assert reader.unpack(frames[2]) is None
    reader.begin(1)
    assert reader.take_due() == (1, request(0, 1))
    with pytest.raises(LinkError, match="message 1 comes next, got message 2"):
        reader.take_due()


def test_announcement_of_the_driver_begins_its_epoch_at_the_receiver() -> None:
    driver, peer, reader = LinkWriter(DRIVER, 2, epoch=4), LinkWriter(1, 2, epoch=4), LinkReader(2, epoch=1)
    start = StageStart(epoch=4, block_counts=(7,))
    assert reader.unpack(peer.pack(request(0, 4))) is None
    assert reader.unpack(driver.pack(start)) == (DRIVER, start)
    assert reader.epoch == 4
    assert reader.take_due() == (1, request(0, 4))
    assert reader.unpack(driver.pack(request(1, 4))) == (DRIVER, request(1, 4))


def test_announcement_by_anybody_else_or_of_an_epoch_that_is_over_begins_nothing() -> None:
    reader = LinkReader(2, epoch=3)
    assert reader.unpack(LinkWriter(1, 2, epoch=4).pack(StageStart(epoch=4, block_counts=()))) is None
    assert reader.unpack(LinkWriter(DRIVER, 2, epoch=2).pack(StageStart(epoch=2, block_counts=()))) is None
    assert reader.epoch == 3


def test_without_checks_damage_passes_and_numbers_still_count() -> None:
    writer, reader = LinkWriter(1, 2, checks=False), LinkReader(2, checks=False)
    header, body = writer.pack(request(1))
    assert bytes(header)[-8:-4] == (1).to_bytes(4, "little")
    assert bytes(header)[-4:] == bytes(4)
    damaged = bytes(body).replace(b"step\x01", b"step\x02")
    assert damaged != body
    assert reader.unpack([header, damaged]) == (1, request(2))
    with pytest.raises(LinkError, match="arrived damaged"):
        LinkReader(2).unpack([header, damaged])
    with pytest.raises(LinkError, match="message 1 comes next, got message 0"):
        reader.unpack([header, body])


# What stands still

TIMEOUTS = Timeouts(startup_s=60.0, heartbeat_s=5.0, step_s=30.0)


class Stages:
    """A watch whose stages all speak once a second unless told otherwise."""

    def __init__(self, count: int = 2) -> None:
        self.now = 0.0
        self.watch = Watch(count, TIMEOUTS, self.now)
        self.steps = dict.fromkeys(range(count), (0, "plan 0 from the driver"))
        self.silent: set[int] = set()
        self.unready: list[int] = []
        self.seen: Any = None

    def run(self, seconds: int) -> Any:
        """The first stall within these seconds, or None."""
        for _ in range(seconds):
            self.now += 1.0
            for index in sorted(set(self.steps) - self.silent):
                self.watch.hear(index, self.now)
                step, waits_for = self.steps[index]
                self.watch.note_heartbeat(Heartbeat(stage=index, step=step, waits_for=waits_for))
            self.seen = self.watch.look(self.now, self.unready)
            if self.seen is not None:
                return self.seen
        return None


def test_silent_stage_is_named_and_must_be_started_again() -> None:
    stages = Stages()
    assert stages.run(10) is None
    stages.silent = {1}
    stall = stages.run(10)
    assert stall.stages == (1,)
    assert "stage 1 has not answered for 6.0 s" in stall.text


def test_stage_that_is_started_again_and_never_speaks_is_silent_soon_and_at_its_first_start_not_before_the_start_is_late() -> None:
    stages = Stages()
    stages.silent, stages.unready = {0, 1}, [0, 1]
    assert stages.run(20) is None
    stages.watch.note_restart(1, stages.now)
    assert stages.run(15) is None
    assert stages.run(1).stages == (1,)


def test_time_in_which_nobody_watched_is_nobodys_silence() -> None:
    stages = Stages()
    assert stages.run(2) is None
    stages.watch.note_plan(stages.now)
    stages.now += 1000.0
    assert stages.watch.look(stages.now, []) is None
    assert stages.run(10) is None


def test_idle_engine_stands_still_for_ever() -> None:
    assert Stages().run(1000) is None


@pytest.mark.parametrize(
    ("steps", "words", "suspect"),
    [
        ({0: (4, "plan 4 from the driver"), 1: (3, "activations of step 3 from stage 0")}, "stage 1 at step 3 waits for activations of step 3", 0),
        ({0: (5, "plan 5 from the driver"), 1: (5, "activations of step 5 from stage 0")}, "stage 1 has begun it and gives no result", 1),
        ({0: (3, "plan 3 from the driver"), 1: (3, "plan 3 from the driver")}, "stage 0 at step 3 waits for plan 3 from the driver", None),
    ],
    ids=["first stage hangs", "last stage hangs", "plan lost"],
)
def test_step_without_result_names_the_link_and_only_the_stage_that_hangs_is_started_again(
    steps: dict[int, tuple[int, str]], words: str, suspect: int | None
) -> None:
    stages = Stages()
    for _ in range(4):
        stages.watch.note_plan(stages.now)
    stages.watch.note_results(3, stages.now)
    stages.steps = steps
    assert stages.run(30) is None
    stall = stages.run(1)
    assert stall.text == f"step 3 has no result after 31 s: {words}" + (" from stage 0" if "activations" in words else "")
    assert stall.stages == ()
    stages.watch.begin(stages.now)
    stages.unready = [0, 1]
    stall = stages.run(10)
    if suspect is None:
        assert stall is None
    else:
        assert stall.stages == (suspect,)
        assert "hung in a step" in stall.text


def test_suspect_that_is_ready_or_started_again_is_no_suspect_any_more() -> None:
    for clear in (lambda watch: watch.end_beginning(), lambda watch: watch.note_restart(1, 31.0)):
        stages = Stages()
        stages.watch.note_plan(stages.now)
        stages.steps = {0: (1, ""), 1: (1, "")}
        assert stages.run(31) is not None
        clear(stages.watch)
        stages.watch.begin(stages.now)
        stages.unready = [1]
        assert stages.run(40) is None


def test_stages_that_are_not_ready_in_time_must_be_started_again() -> None:
    stages = Stages(3)
    stages.unready = [0, 2]
    stages.silent = {0, 1, 2}
    assert stages.run(60) is None
    stall = stages.run(1)
    assert stall.stages == (0, 2)
    assert "not ready after 60 s" in stall.text


# Handshake and reports


def hello(stage: int, layers: tuple[int, int], **agreement: str) -> StageHello:
    names = {"dtype": "float32", "numerics": "n1", **agreement}
    return StageHello(stage=stage, pid=1, agreement=names, layers=layers, kv_block_bytes=(1,), weight_bytes=1, kv_bytes_max=1)


def test_stages_that_differ_or_do_not_follow_one_another_are_refused() -> None:
    check_fit([hello(0, (0, 3)), hello(1, (3, 6))])
    with pytest.raises(HandshakeError, match="dtype is 'float32' on stage 0 and 'bfloat16' on stage 1"):
        check_fit([hello(0, (0, 3)), hello(1, (3, 6), dtype="bfloat16")])
    with pytest.raises(HandshakeError, match="follow"):
        check_fit([hello(0, (0, 3)), hello(1, (4, 6))])


def test_stage_that_is_started_again_must_be_what_it_was() -> None:
    check_same(hello(1, (3, 6)), dataclasses.replace(hello(1, (3, 6)), pid=2, kv_bytes_max=9))
    with pytest.raises(HandshakeError, match="numerics"):
        check_same(hello(1, (3, 6)), hello(1, (3, 6), numerics="n2"))
    with pytest.raises(HandshakeError, match="layers"):
        check_same(hello(1, (3, 6)), hello(1, (2, 6)))


@pytest.mark.parametrize("kind", [DivergenceError, ProvenanceError, LogError, InternalError])
def test_failure_of_a_stage_keeps_kind_step_and_whom_it_concerns(kind: type[InternalError]) -> None:
    error = as_error(StageFailure(stage=1, epoch=2, code=kind.code, message="text", step=7, concerned=((3, 9),)))
    assert isinstance(error, kind)
    assert (str(error), error.step, error.concerned) == ("stage 1: text", 7, ((3, 9),))


def test_failure_of_a_link_is_a_link_error() -> None:
    assert type(as_error(StageFailure(stage=1, epoch=0, code=LinkError.code, message="gap"))) is LinkError


# Stages in this process


class FailsOnce:
    """An executor that fails in one step, in the way it is told."""

    def __init__(self, inner: Any, error: BaseException, step: int) -> None:
        self._inner, self._error, self._step = inner, error, step
        self.failed = 0

    def execute(self, layout: BatchLayout, tensors: Any) -> Any:
        if layout.step == self._step and not self.failed:
            self.failed += 1
            raise self._error
        return self._inner.execute(layout, tensors)


def failing_rig(error: BaseException, step: int) -> Rig:
    config = RigConfig(stage_count=2)
    executors: Sequence[Any] = oracle_executors(config)
    return Rig(config, executors=[executors[0], FailsOnce(executors[1], error, step)])


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ProvenanceError("tags", step=2, concerned=[(0, 0)]), ProvenanceError, "tags"),
        (ZeroDivisionError("by nought"), InternalError, "ZeroDivisionError: by nought"),
    ],
)
def test_error_in_a_stages_work_ends_the_epoch_and_poll_waits_until_the_next(error: Exception, kind: type[InternalError], words: str) -> None:
    rig = failing_rig(error, 2)
    cluster = rig.cluster
    rig.submit(make_request("a", [1, 2, 3], 20))
    with pytest.raises(kind, match=words):
        rig.run()
    assert not cluster.is_ready
    assert cluster.poll(0) == []
    assert set(cluster.columns_of(2)) == {0, 1}
    before = cluster.stages
    cluster.begin(1)
    assert cluster.is_ready
    assert [stage.epoch for stage in cluster.stages] == [1, 1]
    assert not set(map(id, cluster.stages)) & set(map(id, before))
    assert cluster.columns_of(2) == {}


def test_links_of_a_new_epoch_count_from_zero_and_take_its_plans_only() -> None:
    cluster = LocalCluster(Rig(RigConfig(stage_count=2)).make_stages)
    cluster.send(make_plan(0, 0))
    cluster.begin(6)
    with pytest.raises(LinkError, match="in epoch 6 and got StepPlan of epoch 0"):
        cluster.send(make_plan(0, 0))
    cluster.begin(7)
    cluster.send(dataclasses.replace(make_plan(0, 0), epoch=7))
    assert [(result.epoch, result.step) for result in cluster.poll(0)] == [(7, 0)]


def test_seconds_of_checks_add_up_over_epochs() -> None:
    ticks = itertools.count()
    rig = Rig(RigConfig(stage_count=1), make_stage=functools.partial(Stage, clock=lambda: float(next(ticks))))
    seconds = []
    for epoch in range(3):
        if epoch:
            rig.cluster.begin(epoch)
        rig.cluster.send(dataclasses.replace(make_plan(0, 0), epoch=epoch))
        assert len(rig.cluster.poll(0)) == 1
        seconds.append(rig.cluster.check_seconds()[0])
    assert seconds == [seconds[0], 2 * seconds[0], 3 * seconds[0]]
    assert seconds[0] > 0
