"""The loop of a stage that has a process of its own: shakes hands, then turns messages into steps, an epoch after the other, until its parent closes
the pipe.

Knows sockets and the `Stage`; what a stage computes, and from what, comes in through `StageParts`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import zmq

from lockstep.errors import InternalError, LinkError, LockstepError
from lockstep.runtime.messages import ColumnsRequest, Heartbeat, StageFailure, StageHello, StageReady, StageStart, StepColumns
from lockstep.runtime.stage import DRIVER, Stage
from lockstep.runtime.transport.sockets import PROCESS_SOURCE, Inbox, Outbox

HEARTBEAT_S = 0.5
LINGER_MS = 1000
PARENT_GONE_S = 2.0
PREPARING_MS = 5


class StageParts(Protocol):
    """What `launch` builds for one stage."""

    def hello(self) -> StageHello: ...

    def build(self, start: StageStart) -> Stage:
        """The stage as it begins an epoch. The first call allocates KV; the memory stays for the others."""
        ...

    def ready(self, epoch: int) -> StageReady:
        """Said once the stage is built."""
        ...


def run_stage_process(
    *, folder: Path, epoch: int, index: int, count: int, load: Callable[[], StageParts], parent_pipe: int, checks: bool = True
) -> int:
    """Returns the exit status: 0 when the parent closed the pipe, 1 if the stage cannot load, which the driver has been told.

    epoch: in which the process is started. parent_pipe: a descriptor whose other end only the parent holds. It ends the process even in mid-step, by
    the heartbeat's thread.
    """
    context = zmq.Context()
    inbox = Inbox(context, folder, index, epoch=epoch, checks=checks)
    pulse = Pulse(Outbox(context, folder, PROCESS_SOURCE + index, DRIVER, epoch=epoch, checks=checks), index, parent_pipe)
    try:
        parts = load()
        pulse.say(parts.hello())

        def connect(begun: int) -> dict[int, Outbox]:
            ends = (DRIVER, *(other for other in range(count) if other != index))
            return {end: Outbox(context, folder, index, end, epoch=begun, checks=checks) for end in ends}

        _Epochs(parts, inbox, connect, pulse, parent_pipe).run()
        return 0
    except LockstepError as error:
        pulse.say(_failure(index, epoch, error))
        return 1
    except Exception as error:
        pulse.say(_failure(index, inbox.links.epoch, InternalError(f"{type(error).__name__}: {error}")))
        raise
    finally:
        pulse.stop()
        context.destroy(linger=LINGER_MS)


def _failure(index: int, epoch: int, error: LockstepError) -> StageFailure:
    concerned = error.concerned if isinstance(error, InternalError) else ()
    return StageFailure(stage=index, epoch=epoch, code=error.code, message=str(error), step=error.step, concerned=concerned)


class _Epochs:
    """One stage after the other over the same parts. connect(epoch) -> links to the driver and to the other stages."""

    def __init__(self, parts: StageParts, inbox: Inbox, connect: Callable[[int], dict[int, Outbox]], pulse: Pulse, parent_pipe: int) -> None:
        self._parts = parts
        self._inbox = inbox
        self._connect = connect
        self._pulse = pulse
        self._parent_pipe = parent_pipe
        self._outboxes: dict[int, Outbox] = {}
        self._stage: Stage | None = None
        self._former_seconds = 0.0
        self._poller = zmq.Poller()
        self._poller.register(inbox.socket, zmq.POLLIN)
        self._poller.register(parent_pipe, zmq.POLLIN)

    def run(self) -> None:
        """Until the parent closes the pipe."""
        start = self._await_start(None)
        while start is not None:
            start = self._run_epoch(start)

    def _check_seconds(self) -> float:
        """What run-time checks have taken in this process. Asked by the pulse's thread."""
        return self._former_seconds + self._inbox.links.check_seconds + self._epoch_seconds()

    def _epoch_seconds(self) -> float:
        stage = self._stage
        return sum(outbox.check_seconds for outbox in self._outboxes.values()) + (stage.check_seconds if stage is not None else 0.0)

    def _run_epoch(self, start: StageStart) -> StageStart | None:
        """The announcement of the next epoch, whatever happens in this one; None if the parent closed the pipe."""
        self._former_seconds += self._epoch_seconds()
        for outbox in self._outboxes.values():
            outbox.close()
        self._stage, self._outboxes = None, self._connect(start.epoch)
        stage = None
        try:
            self._stage = stage = self._parts.build(start)
            self._pulse.follow(stage, self._check_seconds)
            self._outboxes[DRIVER].send(self._parts.ready(start.epoch))
            return self._turn(stage)
        except LockstepError as error:
            if stage is not None and error.step < 0:
                error.step = stage.next_step
            self._outboxes[DRIVER].send(_failure(self._pulse.index, start.epoch, error))
            return self._await_start(stage)

    def _turn(self, stage: Stage) -> StageStart | None:
        """Take what has come, do one piece of work, send; wait only if neither is to be had."""
        while True:
            while (received := self._inbox.receive()) is not None:
                message = received[1]
                if isinstance(message, StageStart):
                    return message
                if isinstance(message, ColumnsRequest):
                    self._answer(stage, message)
                else:
                    stage.offer(message)
            sends = stage.advance()
            if sends is None and not self._wait(PREPARING_MS if stage.is_preparing else None):
                return None
            for send in sends or ():
                self._outboxes[send.destination].send(send.message)

    def _await_start(self, stage: Stage | None) -> StageStart | None:
        """Before the first epoch, and after a failure of `stage`: then links that are out of order stay so until the next one."""
        while True:
            try:
                received = self._inbox.receive()
            except LinkError:
                if not self._outboxes:
                    raise
                continue
            if received is None:
                if not self._wait():
                    return None
            elif isinstance(received[1], StageStart):
                return received[1]
            elif isinstance(received[1], ColumnsRequest) and stage is not None:
                self._answer(stage, received[1])

    def _wait(self, timeout_ms: int | None = None) -> bool:
        """Until something has come, or that long; False if the parent closed the pipe."""
        return self._parent_pipe not in dict(self._poller.poll(timeout_ms))

    def _answer(self, stage: Stage, request: ColumnsRequest) -> None:
        columns = stage.columns_of(request.step) or {}
        self._outboxes[DRIVER].send(StepColumns(stage=stage.index, epoch=request.epoch, step=request.step, columns=columns))


class Pulse:
    """What the process says of itself, whatever the epoch: that it turns, while its main thread computes; and it ends it when the parent has gone."""

    def __init__(self, outbox: Outbox, index: int, parent_pipe: int) -> None:
        self.index = index
        self._outbox = outbox
        self._parent_pipe = parent_pipe
        self._stage: Stage | None = None
        self._check_seconds: Callable[[], float] = float
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-pulse", daemon=True)
        self._thread.start()

    def follow(self, stage: Stage, check_seconds: Callable[[], float]) -> None:
        """Heartbeats tell of this stage from now on, and what checks have taken in this process."""
        with self._lock:
            self._stage, self._check_seconds = stage, check_seconds

    def say(self, message: Any) -> None:
        """May be called from any thread."""
        with self._lock:
            self._outbox.send(message)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._parent_pipe, zmq.POLLIN)
        gone_since: float | None = None
        while not self._stopping.is_set():
            self.say(self._heartbeat())
            if poller.poll(0):
                now = time.monotonic()
                gone_since = now if gone_since is None else gone_since
                if now - gone_since > PARENT_GONE_S:
                    os._exit(1)
            self._stopping.wait(HEARTBEAT_S)

    def _heartbeat(self) -> Heartbeat:
        stage = self._stage
        if stage is None:
            return Heartbeat(stage=self.index, step=-1, waits_for="start")
        return Heartbeat(stage=self.index, step=stage.next_step, waits_for=stage.waits_for, check_seconds=self._check_seconds())
