"""`SimCluster`: the stages of one simulated engine as its loop sees them (`runtime.transport.cluster.Cluster`).

What `runtime.transport.process` does with processes and sockets, with hosts and wires; the watch is the real one, in virtual time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.core.records import Columns, StepPlan, StepResult
from lockstep.errors import InternalError, LockstepError, PeerError, StageLostError, StalledError
from lockstep.runtime.messages import Heartbeat, StageFailure, StageReady, StageStart
from lockstep.runtime.stage import DRIVER
from lockstep.runtime.transport.cluster import FromStages, ToStages
from lockstep.runtime.transport.handshake import as_error
from lockstep.runtime.transport.watch import Timeouts, Watch
from lockstep.sim.host import Network, StageHost, State
from lockstep.sim.timeline import Timeline
from lockstep.sim.wires import MakeEnd, Wire

TIMEOUTS = Timeouts(startup_s=2.0, heartbeat_s=0.6, step_s=1.5)
HEARTBEAT_S = 0.3


class SimCluster:
    """hosts are set once they exist. startup_s(stage, epoch): how long a start takes. stirred: `poll` has returned or raised something."""

    def __init__(
        self,
        engine: int,
        stage_count: int,
        *,
        timeline: Timeline,
        network: Network,
        make_end: MakeEnd,
        startup_s: Callable[[int, int], float],
        wake: Callable[[], None],
    ) -> None:
        self.hosts: Sequence[StageHost] = ()
        self.stirred = False
        self._engine = engine
        self._timeline = timeline
        self._network = network
        self._startup_s = startup_s
        self._wake = wake
        self._end = make_end(DRIVER, 0)
        self._inbox: deque[Wire] = deque()
        self._watch = Watch(stage_count, TIMEOUTS, timeline.now)
        self._heartbeat_at = 0.0
        self._ready = set(range(stage_count))
        self._ended: set[int] = set()
        self._distrusted: set[int] = set()
        self._is_over = False
        self._failure: LockstepError | None = None

    # What the network and the hosts bring

    def receive(self, wire: Wire) -> None:
        self._inbox.append(wire)
        self._wake()

    def note_end(self, index: int) -> None:
        """A stage's process has ended."""
        self._ended.add(index)
        self._wake()

    def _greet(self, index: int) -> None:
        """A stage that was started again has said hello."""
        self._watch.hear(index, self._timeline.now)
        self._send(index, StageStart(epoch=self._end.epoch, block_counts=()))

    # What the loop asks

    def begin(self, epoch: int) -> None:
        now = self._timeline.now
        self._note_heartbeats(now)
        self._watch.forgive_absence(now)
        again = sorted(self._distrusted.union(self._watch.silent(now), (host.index for host in self.hosts if host.state is State.ENDED)))
        self._distrusted.clear()
        self._ended.clear()
        self._inbox.clear()
        self._ready.clear()
        self._is_over, self._failure = False, None
        self._end.begin(epoch)
        for index in again:
            self._watch.note_restart(index, now)
            self.hosts[index].start(epoch, self._startup_s(index, epoch), self._greet)
        for host in self.hosts:
            if host.state in (State.RUNNING, State.WAITING, State.STOPPED):
                self._send(host.index, StageStart(epoch=epoch, block_counts=()))
        self._watch.begin(now)

    def use_weights(self, weights: str) -> None:
        raise AssertionError(f"the oracle has no other weights than its own, not {weights}")

    @property
    def is_over(self) -> bool:
        """The epoch has failed, and no other has begun."""
        return self._is_over

    @property
    def is_ready(self) -> bool:
        return not self._is_over and self._failure is None and len(self._ready) == len(self.hosts)

    def send(self, message: ToStages) -> None:
        if isinstance(message, StepPlan):
            self._watch.note_plan(self._timeline.now)
        for host in self.hosts:
            self._send(host.index, message)

    def _send(self, destination: int, message: ToStages | StageStart) -> None:
        self._network.carry(self._engine, self._end.pack(destination, message))

    def poll(self, timeout_s: float) -> list[FromStages]:
        if self._is_over:
            return []
        try:
            found = self._take()
        except LockstepError as error:
            self._is_over = self.stirred = True
            if isinstance(error, (PeerError, InternalError)):
                raise
            raise StageLostError(str(error)) from error
        self.stirred = self.stirred or bool(found)
        return found

    def _take(self) -> list[FromStages]:
        if self._failure is not None:
            raise self._failure
        found: list[FromStages] = []
        try:
            self._look(found)
        except LockstepError as error:
            if not found:
                raise
            self._failure = error
        return found

    def _look(self, found: list[FromStages]) -> None:
        now, was_ready = self._timeline.now, self.is_ready
        self._drain(found)
        self.stirred = self.stirred or self.is_ready != was_ready
        if self._ended:
            raise StageLostError("; ".join(f"stage {index} has ended" for index in sorted(self._ended)))
        self._watch.note_results(sum(isinstance(message, StepResult) for message in found), now)
        self._note_heartbeats(now)
        stall = self._watch.look(now, [host.index for host in self.hosts if host.index not in self._ready])
        if stall is not None:
            self._distrusted.update(stall.stages)
            raise StalledError(stall.text)

    def _drain(self, found: list[FromStages]) -> None:
        while (message := self._next_message()) is not None:
            if isinstance(message, FromStages):
                found.append(message)
            elif isinstance(message, StageReady):
                self._ready.add(message.stage)
                if self.is_ready:
                    self._watch.end_beginning()
            else:
                self._hear_failure(message)

    def _next_message(self) -> Any | None:
        message = self._end.take_due()
        while message is None and self._inbox:
            message = self._end.unpack(self._inbox.popleft())
        return message

    def _hear_failure(self, failure: StageFailure) -> None:
        if failure.epoch < self._end.epoch:
            return
        if failure.code == InternalError.code:
            self._distrusted.add(failure.stage)
        raise as_error(failure)

    def _note_heartbeats(self, now: float) -> None:
        for host in self.hosts:
            if host.answers:
                self._watch.hear(host.index, now)
        if now - self._heartbeat_at > HEARTBEAT_S:
            self._heartbeat_at = now
            for host in self.hosts:
                if host.answers and host.stage is not None:
                    self._watch.note_heartbeat(Heartbeat(stage=host.index, step=host.stage.next_step, waits_for=host.stage.waits_for))

    def columns_of(self, step: int) -> dict[int, Columns]:
        found = {host.index: host.stage.columns_of(step) for host in self.hosts if host.answers and host.stage is not None}
        return {index: columns for index, columns in found.items() if columns is not None}

    def check_seconds(self) -> dict[int, float]:
        return {}

    def wake(self) -> None:
        self._wake()

    def describe(self) -> dict[str, object]:
        return {"transport": "simulated"}

    def close(self) -> None:
        self._inbox.clear()

    def audit(self) -> list[str]:
        """The stages' part of the idle audit."""
        return [line for host in self.hosts if host.stage is not None for line in host.stage.audit()]
