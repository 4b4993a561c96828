"""Stages as processes: starts them, shakes hands, watches them, and leaves none behind.

A stage is lost when its process ends, stalled when its heartbeat stops (a stopped process, a dead machine) or when a step has no result for too long.
Each of these ends the engine with an error that names the stage; nothing waits for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from lockstep.core.records import StepPlan, StepResult
from lockstep.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    HandshakeError,
    InternalError,
    LinkError,
    LockstepError,
    ProvenanceError,
    StageLostError,
    StalledError,
    UnsupportedError,
)
from lockstep.runtime.messages import Heartbeat, StageFailure, StageHello, StageReady, StageStart
from lockstep.runtime.stage import DRIVER
from lockstep.runtime.transport.sockets import Inbox, Outbox
from lockstep.runtime.transport.stage_process import HEARTBEAT_SOURCE

WATCH_S = 0.25
CLOSE_S = 2.0
LAST_WORDS_MS = 200
ABSENCE_S = 1.0
"""The watch runs several times a second; a longer gap means that this process itself was not running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    startup_s: float
    heartbeat_s: float
    step_s: float


class _StageHandle:
    """One stage's process as its parent sees it. Closing `pipe` tells it to end."""

    def __init__(self, index: int, command: Sequence[str]) -> None:
        read, self._pipe = os.pipe()
        os.set_inheritable(read, True)
        self.index = index
        self.process = subprocess.Popen([*command, str(read)], stdin=subprocess.DEVNULL, pass_fds=(read,))
        os.close(read)
        self.pid_descriptor = os.pidfd_open(self.process.pid)
        self.heard: float | None = None
        self.last = Heartbeat(stage=index, step=-1, waits_for="start")

    def end_softly(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def end(self, deadline: float) -> None:
        """Wait until `deadline`, then kill, which also ends a stopped process; reap it."""
        self.end_softly()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self.pid_descriptor)

    def describe_end(self) -> str:
        code = self.process.poll()
        if code is None:
            return "is alive"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


class ProcessCluster:
    """command(folder, index) -> the command line of stage index; the number of a pipe descriptor is added to it.
    choose_blocks(hellos) -> blocks a KV group, or a CallerError if the pool cannot hold one request."""

    def __init__(
        self,
        *,
        stage_count: int,
        command: Callable[[Path, int], Sequence[str]],
        choose_blocks: Callable[[Sequence[StageHello]], tuple[int, ...]],
        timeouts: Timeouts,
    ) -> None:
        self._timeouts = timeouts
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-"))
        self._context = zmq.Context()
        self._inbox = Inbox(self._context, self._folder, DRIVER)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handles: list[_StageHandle] = []
        self._outboxes: list[Outbox] = []
        self._closed = False
        self._wake_lock = threading.Lock()
        self._results: list[StepResult] = []
        self._sent, self._returned = 0, 0
        self._progress = self._watched = time.monotonic()
        try:
            for index in range(stage_count):
                self._handles.append(_StageHandle(index, command(self._folder, index)))
                self._outboxes.append(Outbox(self._context, self._folder, DRIVER, index))
            self._poller = self._make_poller()
            self.hellos = self._shake_hands()
            self.block_counts = choose_blocks(self.hellos)
            self._start_stages()
        except BaseException:
            self.close()
            raise

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._inbox.socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        for handle in self._handles:
            poller.register(handle.pid_descriptor, zmq.POLLIN)
        return poller

    # Starting

    def _shake_hands(self) -> list[StageHello]:
        hellos = self._collect(StageHello)
        first = hellos[0]
        for hello in hellos[1:]:
            for name in sorted(set(first.agreement) | set(hello.agreement)):
                ours, theirs = first.agreement.get(name), hello.agreement.get(name)
                if ours != theirs:
                    raise HandshakeError(
                        f"stages 0 and {hello.stage} do not fit together: {name} is {ours!r} on stage 0 and {theirs!r} on stage {hello.stage}"
                    )
        bounds = [hello.layers for hello in hellos]
        if any(a[1] != b[0] for a, b in itertools.pairwise(bounds)):
            raise HandshakeError(f"the stages' layers do not follow one another: {bounds}")
        return hellos

    def _start_stages(self) -> None:
        for outbox in self._outboxes:
            outbox.send(StageStart(epoch=0, block_counts=self.block_counts))
        self._ready = self._collect(StageReady)

    def _collect(self, kind: type[Any]) -> list[Any]:
        """One message of this kind from every stage, in their order."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeouts.startup_s
        while len(found) < len(self._handles):
            for message in self._take(min(WATCH_S, max(0.0, deadline - time.monotonic()))):
                assert isinstance(message, kind), message
                found[message.stage] = message
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(self._handles))) - set(found))
                raise StalledError(
                    f"stages {missing} are not ready after {self._timeouts.startup_s:g} s; raise startup_timeout_s if they load slowly"
                )
        return [found[index] for index in range(len(self._handles))]

    # Running

    def send(self, plan: StepPlan) -> None:
        if self._sent == self._returned:
            self._progress = time.monotonic()
        self._sent += 1
        for outbox in self._outboxes:
            outbox.send(plan)

    def poll(self, timeout_s: float) -> list[StepResult]:
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = deadline - time.monotonic()
            results = self._take(min(WATCH_S, max(0.0, remaining)))
            self._watch_steps(len(results))
            if results or remaining <= 0 or self._drain_wakes():
                return results

    def _take(self, timeout_s: float) -> list[Any]:
        """Messages other than heartbeats. Raises what a stage reported, or that one is lost or silent."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        messages = self._drain()
        if any(handle.pid_descriptor in ready for handle in self._handles):
            # What a stage said last may still be on its way; it explains more than that the process has ended.
            self._inbox.socket.poll(LAST_WORDS_MS)
            messages += self._drain()
        self._watch_stages(ready)
        return messages

    def _drain(self) -> list[Any]:
        messages = []
        while (received := self._inbox.receive()) is not None:
            source, message = received
            handle = self._handles[source - HEARTBEAT_SOURCE if source >= HEARTBEAT_SOURCE else source]
            handle.heard = time.monotonic()
            if isinstance(message, Heartbeat):
                handle.last = message
            elif isinstance(message, StageFailure):
                raise _failure(message)
            else:
                messages.append(message)
        return messages

    def _watch_stages(self, ready: dict[Any, int]) -> None:
        now = time.monotonic()
        self._forgive_own_absence(now)
        for handle in self._handles:
            if handle.pid_descriptor in ready:
                handle.process.poll()
                raise StageLostError(f"stage {handle.index} (process {handle.process.pid}) {handle.describe_end()}; restart the server")
            silent_s = 0.0 if handle.heard is None else now - handle.heard
            if silent_s > self._timeouts.heartbeat_s:
                raise StalledError(
                    f"stage {handle.index} (process {handle.process.pid}) has not answered for {silent_s:.1f} s, last at step {handle.last.step}; "
                    "it is stopped or its machine is overloaded"
                )

    def _forgive_own_absence(self, now: float) -> None:
        """Time in which this process did not watch (stopped and continued together with its stages, say) is nobody's silence."""
        absent_s = now - self._watched - ABSENCE_S
        self._watched = now
        if absent_s > 0:
            self._progress += absent_s
            for handle in self._handles:
                if handle.heard is not None:
                    handle.heard = min(now, handle.heard + absent_s)

    def _watch_steps(self, results: int) -> None:
        now = time.monotonic()
        if results:
            self._returned += results
            self._progress = now
        if self._sent > self._returned and now - self._progress > self._timeouts.step_s:
            waits = "; ".join(f"stage {h.index} at step {h.last.step} waits for {h.last.waits_for}" for h in self._handles)
            raise StalledError(f"step {self._returned} has no result after {now - self._progress:.0f} s: {waits}")

    def wake(self) -> None:
        with self._wake_lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"w")

    def _drain_wakes(self) -> bool:
        try:
            return bool(os.read(self._wake_read, 4096))
        except BlockingIOError:
            return False

    def describe(self) -> dict[str, object]:
        return {
            "transport": "ipc",
            "pids": [handle.process.pid for handle in self._handles],
            "layers": [hello.layers for hello in self.hellos],
            "weight_bytes": [hello.weight_bytes for hello in self.hellos],
            "kv_bytes": [ready.kv_bytes for ready in self._ready],
            "threads": [ready.threads for ready in self._ready],
        }

    def close(self) -> None:
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
        for handle in self._handles:
            handle.end_softly()
        deadline = time.monotonic() + CLOSE_S
        for handle in self._handles:
            handle.end(deadline)
        for outbox in self._outboxes:
            outbox.close()
        self._inbox.close()
        self._context.destroy(linger=0)
        os.close(self._wake_read)
        os.close(self._wake_write)
        shutil.rmtree(self._folder, ignore_errors=True)


def _failure(message: StageFailure) -> LockstepError:
    """The stage's error as the driver raises it."""
    text = f"stage {message.stage}: {message.message}"
    if message.code == DivergenceError.code:
        return DivergenceError(text, step=message.step)
    if message.code == ProvenanceError.code:
        return ProvenanceError(text, step=message.step)
    for kind in (LinkError, CheckpointError, ConfigError, UnsupportedError):
        if message.code == kind.code:
            return kind(text)
    return InternalError(text)
