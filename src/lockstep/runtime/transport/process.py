"""Stages as processes: starts them, shakes hands, watches them, starts them again in another epoch, and leaves none behind.

A stage is lost when its process ends, stalled when its heartbeat stops (a stopped process, a dead machine) or when a step has no result for too long.
Each of these ends the epoch with an error that names the stage; nothing waits for ever. `begin` then starts again what is lost or does not answer;
processes that live on keep their weights and their KV memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from lockstep.core.records import Columns, StepPlan, StepResult
from lockstep.errors import InternalError, LinkError, LockstepError, PeerError, StageLostError, StalledError
from lockstep.runtime.messages import ColumnsRequest, Heartbeat, StageFailure, StageHello, StageReady, StageStart, StepColumns
from lockstep.runtime.stage import DRIVER
from lockstep.runtime.transport.cluster import FromStages, ToStages
from lockstep.runtime.transport.handshake import as_error, check_fit, check_same
from lockstep.runtime.transport.sockets import PROCESS_SOURCE, Inbox, Outbox
from lockstep.runtime.transport.stage_handle import StageHandle
from lockstep.runtime.transport.watch import Timeouts, Watch

WATCH_S = 0.25
CLOSE_S = 2.0
LAST_WORDS_MS = 200
COLUMNS_S, COLUMNS_WATCH_S = 1.0, 0.02

Command = Callable[[Path, int, int], Sequence[str]]
"""(folder, epoch, index) -> the command line of stage index; the number of a pipe descriptor is added to it."""


class ProcessCluster:
    """choose_blocks(hellos) -> blocks a KV group, or a CallerError if the pool cannot hold one request. environment: of the stages; None is this
    process's own. checks: False takes no checksums."""

    def __init__(
        self,
        *,
        stage_count: int,
        command: Command,
        choose_blocks: Callable[[Sequence[StageHello]], tuple[int, ...]],
        timeouts: Timeouts,
        environment: Mapping[str, str] | None = None,
        checks: bool = True,
    ) -> None:
        self._command = command
        self._choose_blocks = choose_blocks
        self._environment = environment
        self._checks = checks
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-"))
        self._context = zmq.Context()
        self._inbox = Inbox(self._context, self._folder, DRIVER, checks=checks)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._closed = False
        self._epoch = 0
        self._is_over = False
        self._handles: list[StageHandle] = []
        self._outboxes: list[Outbox] = []
        self._distrusted: set[int] = set()
        self._failure: LockstepError | None = None
        self._columns: dict[int, Columns] = {}
        self._former_seconds = dict.fromkeys(range(DRIVER, stage_count), 0.0)
        self._watch = Watch(stage_count, timeouts, time.monotonic())
        self.hellos: tuple[StageHello, ...] = ()
        self.block_counts: tuple[int, ...] = ()
        self._weights = ""
        try:
            for index in range(stage_count):
                self._handles.append(self._start(index))
            self._open_links()
            while not self.is_ready:
                self._take(WATCH_S)
        except BaseException:
            self.close()
            raise

    # Epochs

    @property
    def is_ready(self) -> bool:
        return not self._is_over and self._failure is None and not self._unready()

    def _unready(self) -> list[int]:
        return [handle.index for handle in self._handles if handle.ready is None]

    def begin(self, epoch: int) -> None:
        assert epoch > self._epoch, (epoch, self._epoch)
        self._drain_quietly()
        again = self._to_start_again()
        self._epoch, self._is_over, self._failure = epoch, False, None
        self._inbox.links.begin(epoch)
        for outbox in self._outboxes:
            self._former_seconds[DRIVER] += outbox.check_seconds
            outbox.close()
        for index in again:
            self._handles[index].kill()
            self._former_seconds[index] += self._watch.last(index).check_seconds
        for index in again:
            self._start_again(index)
        self._open_links()
        for handle in self._handles:
            handle.ready = None
            if handle.hello is not None and not handle.has_ended:
                self._send_start(handle.index)
        self._watch.begin(time.monotonic())

    def use_weights(self, weights: str) -> None:
        self._weights = weights

    def _to_start_again(self) -> list[int]:
        """Stages that have ended, or that are not asked again."""
        again = self._distrusted.union(handle.index for handle in self._handles if handle.has_ended)
        self._distrusted.clear()
        return sorted(again)

    def _start(self, index: int) -> StageHandle:
        self._inbox.links.renew(PROCESS_SOURCE + index, self._epoch)
        return StageHandle(index, self._command(self._folder, self._epoch, index), self._environment)

    def _start_again(self, index: int) -> None:
        try:
            self._handles[index] = self._start(index)
            self._watch.note_restart(index, time.monotonic())
        except OSError as error:
            self._failure = StageLostError(f"stage {index} cannot be started again: {error}")

    def _open_links(self) -> None:
        """Links to the stages, and what `poll` waits on, for the processes as they are now."""
        count = len(self._handles)
        self._outboxes = [Outbox(self._context, self._folder, DRIVER, i, epoch=self._epoch, checks=self._checks) for i in range(count)]
        self._poller = zmq.Poller()
        for readable in (self._inbox.socket, self._wake_read, *(h.pid_descriptor for h in self._handles if h.pid_descriptor >= 0)):
            self._poller.register(readable, zmq.POLLIN)

    def _send_start(self, index: int) -> None:
        self._outboxes[index].send(StageStart(epoch=self._epoch, block_counts=self.block_counts, weights=self._weights))

    def _greet(self, hello: StageHello) -> None:
        """The first handshake waits for all stages, and agrees on the pool; a stage that is started again must be what it was."""
        self._handles[hello.stage].hello = hello
        if self.block_counts:
            try:
                check_same(self.hellos[hello.stage], hello)
            except PeerError:
                self._distrusted.add(hello.stage)
                raise
            self._send_start(hello.stage)
            return
        hellos = [handle.hello for handle in self._handles if handle.hello is not None]
        if len(hellos) == len(self._handles):
            check_fit(hellos)
            self.hellos, self.block_counts = tuple(hellos), self._choose_blocks(hellos)
            for index in range(len(hellos)):
                self._send_start(index)

    # Running

    def send(self, message: ToStages) -> None:
        if isinstance(message, StepPlan):
            self._watch.note_plan(time.monotonic())
        for outbox in self._outboxes:
            outbox.send(message)

    def poll(self, timeout_s: float) -> list[FromStages]:
        if self._is_over:
            waiting = select.poll()
            waiting.register(self._wake_read, select.POLLIN)
            waiting.poll(timeout_s * 1000)
            self._drain_wakes()
            return []
        try:
            return self._poll(timeout_s)
        except LockstepError as error:
            self._is_over = True
            if isinstance(error, (PeerError, InternalError)):
                raise
            raise StageLostError(str(error)) from error

    def _poll(self, timeout_s: float) -> list[FromStages]:
        deadline = time.monotonic() + timeout_s
        was_ready = self.is_ready
        while True:
            remaining_s = deadline - time.monotonic()
            found = self._take(min(WATCH_S, max(0.0, remaining_s)))
            if found or remaining_s <= 0 or self._drain_wakes() or self.is_ready != was_ready:
                return found

    def _take(self, timeout_s: float) -> list[FromStages]:
        """What the driver is to get. Raises what a stage reported, or that one is lost or stalled: after what came before that, in the next call."""
        if self._failure is not None:
            raise self._failure
        found: list[FromStages] = []
        try:
            self._look(timeout_s, found)
        except LockstepError as error:
            if not found:
                raise
            self._failure = error
        return found

    def _look(self, timeout_s: float, found: list[FromStages]) -> None:
        readable = dict(self._poller.poll(int(timeout_s * 1000)))
        self._drain(found)
        ended = [handle for handle in self._handles if handle.pid_descriptor in readable]
        if any(handle.process.poll() == 1 for handle in ended):
            # What a stage said before it gave up may still be on its way; it explains more than that the process has ended.
            self._inbox.socket.poll(LAST_WORDS_MS)
            self._drain(found)
        if ended:
            raise StageLostError("; ".join(f"stage {h.index} (process {h.process.pid}) {h.describe_end()}" for h in ended))
        now = time.monotonic()
        self._watch.note_results(sum(isinstance(message, StepResult) for message in found), now)
        stall = self._watch.look(now, self._unready())
        if stall is not None:
            self._distrusted.update(stall.stages)
            raise StalledError(stall.text)

    def _drain(self, found: list[FromStages]) -> None:
        while (received := self._inbox.receive()) is not None:
            source, message = received
            self._watch.hear(source - PROCESS_SOURCE if source >= PROCESS_SOURCE else source, time.monotonic())
            if isinstance(message, FromStages):
                found.append(message)
            else:
                self._note(message)

    def _drain_quietly(self) -> None:
        """When the epoch is over: what is still said of it adds nothing to the failure that ended it, but shows who is alive."""
        while True:
            with contextlib.suppress(LockstepError):
                self._drain([])
                return

    def _note(self, message: Any) -> None:
        """Everything that the driver does not take itself."""
        if isinstance(message, Heartbeat):
            self._watch.note_heartbeat(message)
        elif isinstance(message, StageHello):
            self._greet(message)
        elif isinstance(message, StageReady):
            self._handles[message.stage].ready = message
            if not self._unready():
                self._watch.end_beginning()
        elif isinstance(message, StepColumns):
            self._columns[message.stage] = dict(message.columns)
        elif isinstance(message, StageFailure):
            self._hear_failure(message)
        else:
            raise LinkError(f"the driver takes no {type(message).__name__}")

    def _hear_failure(self, failure: StageFailure) -> None:
        """A process that could not load, or that failed in a way that nobody foresaw, is not asked again."""
        loading = self._handles[failure.stage].hello is None
        if failure.epoch < self._epoch and not loading:
            return
        if loading or failure.code == InternalError.code:
            self._distrusted.add(failure.stage)
        raise as_error(failure)

    def columns_of(self, step: int) -> dict[int, Columns]:
        """A stage that computes answers when it has done; one that reports another failure meanwhile has nothing to add to the first."""
        self._columns.clear()
        deadline = time.monotonic() + COLUMNS_S
        asked = [handle for handle in self._handles if handle.ready is not None and handle.index not in self._distrusted and not handle.has_ended]
        for handle in asked:
            self._outboxes[handle.index].send(ColumnsRequest(epoch=self._epoch, step=step))
        while (left_s := deadline - time.monotonic()) > 0:
            if all(handle.index in self._columns or handle.has_ended for handle in asked):
                break
            self._inbox.socket.poll(int(min(left_s, COLUMNS_WATCH_S) * 1000))
            self._drain_quietly()
        return {index: columns for index, columns in sorted(self._columns.items()) if columns}

    def check_seconds(self) -> dict[int, float]:
        links = self._inbox.links.check_seconds + sum(outbox.check_seconds for outbox in self._outboxes)
        now = {DRIVER: links} | {handle.index: self._watch.last(handle.index).check_seconds for handle in self._handles}
        return {rank: before + now.get(rank, 0.0) for rank, before in self._former_seconds.items()}

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
        ready = [handle.ready for handle in self._handles]
        return {
            "transport": "ipc",
            "pids": [handle.process.pid for handle in self._handles],
            "layers": [hello.layers for hello in self.hellos],
            "weight_bytes": [hello.weight_bytes for hello in self.hellos],
            "kv_bytes": [message.kv_bytes if message else 0 for message in ready],
            "threads": [message.threads if message else 0 for message in ready],
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
