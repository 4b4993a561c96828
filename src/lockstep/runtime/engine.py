"""`Engine`: the driver loop on a thread of its own. Commands from any thread in, events to sinks out.

Each turn gathers commands, writes plans, and takes results. Every submitted request gets exactly one last event, also when the engine fails.
It knows no HTTP, no text and no model; where the stages run is the cluster's business.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.core.outputs import FinishReason, TokenEvent
from lockstep.core.request import EngineRequest
from lockstep.errors import CapacityError, InternalError, LockstepError, PeerError
from lockstep.runtime.driver import Driver
from lockstep.runtime.transport.cluster import Cluster

Sink = Callable[[list[TokenEvent]], None]
"""Takes the events of one turn, in order, on the engine's thread. It must return at once and never raise."""

IDLE_POLL_S = 0.5

_log = logging.getLogger("lockstep.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What the engine says of itself. failure: why it stopped, if it did. Counts are of the last finished turn."""

    phase: Literal["running", "failed", "closed"]
    failure: LockstepError | None = None
    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_total: int = 0


@dataclass(frozen=True, slots=True)
class _Submit:
    request: EngineRequest
    sink: Sink


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class Engine:
    """queue_max: most requests that may wait for a slot; further ones are refused with CapacityError."""

    def __init__(
        self, driver: Driver, cluster: Cluster, *, queue_max: int = 100_000, on_failure: Callable[[LockstepError], None] | None = None
    ) -> None:
        self._driver = driver
        self._cluster = cluster
        self._queue_max = queue_max
        self._on_failure = on_failure
        self._commands: deque[_Submit | _Abort] = deque()
        self._lock = threading.Lock()
        self._sinks: dict[str, tuple[Sink, int]] = {}
        self._closing = False
        self._state = self._read_state()
        self._thread = threading.Thread(target=self._run, name="lockstep-engine", daemon=True)
        self._thread.start()

    # Any thread

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def driver(self) -> Driver:
        """For counters and audits while the engine is idle or closed; the engine's thread owns it."""
        return self._driver

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue a request. Raises the engine's failure if it has stopped, CapacityError if too many wait."""
        self.submit_all([request], sink)

    def submit_all(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        """Queue requests that the driver takes in one turn: all of them or, with an error as for `submit`, none."""
        with self._lock:
            if self._state.failure is not None:
                raise _as_unavailable(self._state.failure)
            if self._closing:
                raise CapacityError("the engine is shutting down; send the request to another one")
            if self._state.waiting + len(self._commands) + len(requests) > self._queue_max:
                raise CapacityError(f"at most {self._queue_max} requests may wait; retry later")
            self._commands.extend(_Submit(request, sink) for request in requests)
        self._cluster.wake()

    def abort(self, request_id: str) -> None:
        """End a request; its sink gets a last event with reason ABORT, unless it has ended already."""
        with self._lock:
            self._commands.append(_Abort(request_id))
        self._cluster.wake()

    def close(self) -> None:
        """Abort what is open, stop the stages, end the thread. May be called twice."""
        with self._lock:
            self._closing = True
        self._cluster.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # The engine's thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._end_all(FinishReason.ABORT, None)
            self._finish_state("closed", None)
        except LockstepError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("the engine loop failed")
            self._fail(InternalError(f"the engine loop failed: {type(error).__name__}: {error}"))
        finally:
            self._cluster.close()

    def _turn(self) -> None:
        self._take_commands()
        while (plan := self._driver.next_plan()) is not None:
            self._cluster.send(plan)
        timeout_s = 0.0 if self._commands else IDLE_POLL_S
        events = [event for result in self._cluster.poll(timeout_s) for event in self._driver.receive(result)]
        self._state = self._read_state()
        self._dispatch(events)

    def _take_commands(self) -> None:
        """One by one, so that a command that fails leaves those behind it in the queue, where `_end_all` finds them. An abort is answered at once,
        before a request of the same name can follow it in."""
        with self._lock:
            count = len(self._commands)
        for _ in range(count):
            command = self._commands.popleft()
            if isinstance(command, _Abort):
                event = self._driver.abort(command.request_id)
                self._dispatch([] if event is None else [event])
            elif command.request.request_id in self._sinks:
                command.sink([_refusal(command.request)])
            else:
                self._sinks[command.request.request_id] = (command.sink, 0)
                self._driver.submit(command.request)

    def _dispatch(self, events: list[TokenEvent]) -> None:
        """Hand each sink its events of this turn at once; check that no index is skipped or repeated."""
        by_sink: dict[Sink, list[TokenEvent]] = {}
        for event in events:
            sink, delivered = self._sinks[event.request_id]
            if event.index != delivered:
                raise InternalError(f"request {event.request_id!r}: token {delivered} comes next, the driver delivers {event.index}")
            if event.finish_reason is None:
                self._sinks[event.request_id] = (sink, delivered + len(event.token_ids))
            else:
                del self._sinks[event.request_id]
            by_sink.setdefault(sink, []).append(event)
        for sink, batch in by_sink.items():
            sink(batch)

    def _read_state(self) -> EngineState:
        scheduler = self._driver.scheduler
        pool = scheduler.pools[0]
        return EngineState(
            phase="running",
            running=scheduler.running_count,
            waiting=scheduler.waiting_count,
            blocks_free=pool.free_count,
            blocks_total=pool.block_count,
        )

    def _fail(self, error: LockstepError) -> None:
        _log.error("the engine stops: %s", error)
        self._finish_state("failed", error)
        self._end_all(FinishReason.ERROR, _as_unavailable(error))
        if self._on_failure is not None:
            self._on_failure(error)

    def _finish_state(self, phase: Literal["failed", "closed"], failure: LockstepError | None) -> None:
        pool = self._driver.scheduler.pools[0]
        with self._lock:
            self._state = EngineState(phase=phase, failure=failure, blocks_free=pool.free_count, blocks_total=pool.block_count)

    def _end_all(self, reason: FinishReason, error: LockstepError | None) -> None:
        """The last event of every open request, those still in the command queue included."""
        with self._lock:
            queued = [command for command in self._commands if isinstance(command, _Submit)]
            self._commands.clear()
        for command in queued:
            if command.request.request_id in self._sinks:
                command.sink([_refusal(command.request)])
            else:
                self._sinks[command.request.request_id] = (command.sink, 0)
        self._dispatch(
            [TokenEvent(request_id=request_id, index=index, finish_reason=reason, error=error) for request_id, (_, index) in self._sinks.items()]
        )


def _refusal(request: EngineRequest) -> TokenEvent:
    """Of a request whose name another open one has: the first goes on, the second ends."""
    error = InternalError(f"request {request.request_id!r} is submitted twice; a name is free again after its last event")
    return TokenEvent(request_id=request.request_id, index=0, finish_reason=FinishReason.ERROR, error=error)


def _as_unavailable(error: LockstepError) -> LockstepError:
    """What a caller is told when the engine has stopped: an error of their request's kind is not theirs, so caller faults become peer faults."""
    return error if isinstance(error, (PeerError, InternalError)) else PeerError(f"the engine has stopped: {error}")
