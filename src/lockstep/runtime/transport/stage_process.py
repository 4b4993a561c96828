"""The loop of a stage that has a process of its own: shakes hands, allocates, then turns messages into steps until its parent closes the pipe.

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

from lockstep.errors import LockstepError
from lockstep.runtime.messages import Heartbeat, StageFailure, StageHello, StageReady, StageStart
from lockstep.runtime.stage import DRIVER, Stage
from lockstep.runtime.transport.sockets import Inbox, Outbox

HEARTBEAT_S = 0.5
HEARTBEAT_SOURCE = 1_000_000
"""A stage's heartbeats come from a thread with a socket of its own, so they are a link of their own: source HEARTBEAT_SOURCE + stage."""


class StageParts(Protocol):
    """What `launch` builds for one stage."""

    def hello(self) -> StageHello: ...

    def build(self, start: StageStart) -> Stage:
        """Allocate KV and build the stage."""
        ...

    def ready(self) -> StageReady:
        """Said once the stage is built."""
        ...


def run_stage_process(*, folder: Path, index: int, count: int, load: Callable[[], StageParts], parent_pipe: int) -> int:
    """Returns the exit status: 0 when the parent closed the pipe, 1 after a failure, which the driver has been told.

    parent_pipe: a descriptor whose other end only the parent holds. It ends the process even in mid-step, by the heartbeat's thread.
    """
    context = zmq.Context()
    driver = Outbox(context, folder, index, DRIVER)
    pulse = _Pulse(context, folder, index, parent_pipe)
    try:
        inbox = Inbox(context, folder, index)
        parts = load()
        driver.send(parts.hello())
        start = _await_start(inbox, parent_pipe)
        if start is None:
            return 0
        stage = parts.build(start)
        driver.send(parts.ready())
        pulse.stage = stage
        outboxes = {DRIVER: driver, **{i: Outbox(context, folder, index, i) for i in range(count) if i != index}}
        _loop(stage, inbox, outboxes, parent_pipe)
        return 0
    except LockstepError as error:
        driver.send(StageFailure(stage=index, code=error.code, message=str(error), step=getattr(error, "step", -1)))
        return 1
    except Exception as error:
        driver.send(StageFailure(stage=index, code="internal_error", message=f"{type(error).__name__}: {error}"))
        raise
    finally:
        pulse.stop()
        context.destroy(linger=1000)


def _await_start(inbox: Inbox, parent_pipe: int) -> StageStart | None:
    poller = _poller(inbox, parent_pipe)
    while True:
        ready = dict(poller.poll())
        if parent_pipe in ready:
            return None
        if (received := inbox.receive()) is not None:
            assert isinstance(received[1], StageStart), received
            return received[1]


def _loop(stage: Stage, inbox: Inbox, outboxes: dict[int, Outbox], parent_pipe: int) -> None:
    """Take what has come, do one piece of work, send; wait only if neither is to be had."""
    poller = _poller(inbox, parent_pipe)
    while True:
        while (received := inbox.receive()) is not None:
            stage.offer(received[1])
        sends = stage.advance()
        if sends is None:
            if parent_pipe in dict(poller.poll()):
                return
            continue
        for send in sends:
            outboxes[send.destination].send(send.message)


def _poller(inbox: Inbox, parent_pipe: int) -> zmq.Poller:
    poller = zmq.Poller()
    poller.register(inbox.socket, zmq.POLLIN)
    poller.register(parent_pipe, zmq.POLLIN)
    return poller


class _Pulse:
    """Tells the driver that this process turns, whatever its main thread computes; and ends it when the parent has gone."""

    def __init__(self, context: zmq.Context[Any], folder: Path, index: int, parent_pipe: int) -> None:
        self.stage: Stage | None = None
        self._index = index
        self._parent_pipe = parent_pipe
        self._outbox = Outbox(context, folder, HEARTBEAT_SOURCE + index, DRIVER)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._parent_pipe, zmq.POLLIN)
        gone_since: float | None = None
        while not self._stopping.is_set():
            stage = self.stage
            self._outbox.send(Heartbeat(stage=self._index, step=stage.next_step if stage else -1, waits_for=stage.waits_for if stage else "start"))
            if poller.poll(0):
                now = time.monotonic()
                gone_since = now if gone_since is None else gone_since
                if now - gone_since > 2.0:
                    os._exit(1)
            self._stopping.wait(HEARTBEAT_S)
        self._outbox.close()
