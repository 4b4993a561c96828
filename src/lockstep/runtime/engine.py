"""`Engine`: the engine loop on a thread of its own. Commands from any thread in, events to sinks out.

Every submitted request gets exactly one last event, also when the engine fails. It knows no HTTP, no text and no model; where the stages run is
the cluster's business.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal

from lockstep.core.outputs import FinishReason
from lockstep.core.request import EngineRequest
from lockstep.errors import CapacityError, CheckpointError, InternalError, LockstepError
from lockstep.runtime.driver import Driver
from lockstep.runtime.loop import Dumper, EngineLoop, PauseMode, RestartPolicy, Sink, WeightsUpdate, as_stopped
from lockstep.runtime.transport.cluster import Cluster

IDLE_POLL_S = 0.5

Phase = Literal["running", "recovering", "failed", "closed"]

_log = logging.getLogger("lockstep.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What the engine says of itself. failure: why it stopped, if it did, in words for callers. reason: why it recovers, else empty. restarts: epochs
    begun after failures. divergences, provenance_failures: failures of these kinds. paused: it was told to pause, and does nothing. Counts are of the
    last finished turn."""

    phase: Phase
    failure: LockstepError | None = None
    reason: str = ""
    epoch: int = 0
    restarts: int = 0
    divergences: int = 0
    provenance_failures: int = 0
    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_total: int = 0
    paused: bool = False


@dataclass(frozen=True, slots=True)
class _Submit:
    request: EngineRequest
    sink: Sink


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Control:
    """act: on the engine's thread. until: what must hold, at the end of a turn, before `done` is told."""

    act: Callable[[EngineLoop], None]
    until: Callable[[EngineLoop], bool]
    done: Future[None]

    def has_ended(self, loop: EngineLoop) -> bool:
        """`until` may raise: then the control has failed, and whoever asked gets that."""
        try:
            if not self.until(loop):
                return False
            self.done.set_result(None)
        except LockstepError as error:
            self.done.set_exception(error)
        return True


class Engine:
    """queue_max: most requests that may wait for a slot; further ones are refused with CapacityError. dumper: the recorder, if there is one."""

    def __init__(
        self,
        driver: Driver,
        cluster: Cluster,
        *,
        queue_max: int = 100_000,
        restarts: RestartPolicy = RestartPolicy(),
        dumper: Dumper | None = None,
        on_failure: Callable[[LockstepError], None] | None = None,
    ) -> None:
        self._driver = driver
        self._cluster = cluster
        self._loop = EngineLoop(driver, cluster, restarts=restarts, clock=time.monotonic, make_incident=_incident, dumper=dumper)
        self._dumper = dumper
        self._queue_max = queue_max
        self._on_failure = on_failure
        self._commands: deque[_Submit | _Abort | _Control] = deque()
        self._awaited: list[_Control] = []
        self._lock = threading.Lock()
        self._closing = False
        self._state = self._read_state("running")
        self._thread = threading.Thread(target=self._run, name="lockstep-engine", daemon=True)
        self._thread.start()

    # Any thread

    @property
    def state(self) -> EngineState:
        """Of the last finished turn; but that it recovers is known at once, whatever the turn still does."""
        state = self._state
        return replace(state, phase="recovering", reason=self._reason()) if state.phase == "running" and self._loop.recovering else state

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
            self._expect_open()
            if self._state.waiting + len(self._commands) + len(requests) > self._queue_max:
                raise CapacityError(f"at most {self._queue_max} requests may wait; retry later")
            self._commands.extend(_Submit(request, sink) for request in requests)
        self._cluster.wake()

    def abort(self, request_id: str) -> None:
        """End a request; its sink gets a last event with reason ABORT, unless it has ended already."""
        with self._lock:
            self._commands.append(_Abort(request_id))
        self._cluster.wake()

    def pause(self, mode: PauseMode) -> Future[None]:
        """Compute nothing any more until `resume`; done when that is so. Requests that come meanwhile wait."""
        return self._control(lambda loop: loop.pause(mode), lambda loop: loop.is_paused)

    def resume(self) -> Future[None]:
        """Go on. A pause that was not over yet is over too."""
        return self._control(lambda loop: loop.resume(), lambda loop: True)

    def reset_prefix_cache(self) -> Future[None]:
        """No prefix that was computed before is hit any more."""
        return self._control(lambda loop: loop.driver.scheduler.reset_prefix_cache(), lambda loop: True)

    def update_weights(self, weights: str, then: Callable[[], None]) -> Future[None]:
        """Compute with the weights of another checkpoint of the same model from some step on; done when an epoch with them has begun. Requests stay,
        and go on with all that they know; no prefix from before is hit. then: called on the engine's thread as it begins. Fails with a
        CheckpointError, and changes nothing, if a stage cannot load them."""
        begun: list[WeightsUpdate] = []

        def is_over(loop: EngineLoop) -> bool:
            if begun[0].error:
                raise CheckpointError(begun[0].error)
            return begun[0].is_done and not loop.recovering

        return self._control(lambda loop: begun.append(loop.update_weights(weights, then)), is_over)

    def _control(self, act: Callable[[EngineLoop], None], until: Callable[[EngineLoop], bool]) -> Future[None]:
        """Raises the engine's failure if it has stopped, CapacityError if it is closing."""
        control = _Control(act, until, Future())
        with self._lock:
            self._expect_open()
            self._commands.append(control)
        self._cluster.wake()
        return control.done

    def _expect_open(self) -> None:
        if self._state.failure is not None:
            raise self._state.failure
        if self._closing:
            raise CapacityError("the engine is shutting down; send the request to another one")

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
            self._finish("closed", FinishReason.ABORT, None)
        except LockstepError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("the engine loop failed")
            self._fail(InternalError(f"the engine loop failed: {type(error).__name__}: {error}"))
        finally:
            self._cluster.close()
            if self._dumper is not None:
                self._dumper.close()

    def _turn(self) -> None:
        """Commands one by one, so that a command that fails leaves those behind it in the queue, where `_finish` finds them."""
        with self._lock:
            count = len(self._commands)
        for _ in range(count):
            command = self._commands.popleft()
            if isinstance(command, _Control):
                if command.done.set_running_or_notify_cancel():  # whoever asked may have left; from here on nobody can cancel it
                    command.act(self._loop)
                    self._awaited.append(command)
            elif isinstance(command, _Abort):
                self._loop.abort(command.request_id)
            else:
                self._loop.submit(command.request, command.sink)
        self._loop.turn(0.0 if self._commands else IDLE_POLL_S)
        self._state = self._read_state("recovering" if self._loop.recovering else "running")
        self._awaited = [control for control in self._awaited if not control.has_ended(self._loop)]

    def _read_state(self, phase: Phase, failure: LockstepError | None = None) -> EngineState:
        scheduler, counts = self._driver.scheduler, self._loop.counts
        pool = min(scheduler.pools, key=lambda pool: pool.free_count / pool.block_count)
        return EngineState(
            phase=phase,
            failure=failure,
            reason=self._reason() if phase == "recovering" else "",
            epoch=scheduler.epoch,
            restarts=counts.restarts,
            divergences=counts.divergences,
            provenance_failures=counts.provenance_failures,
            running=scheduler.running_count,
            waiting=scheduler.waiting_count,
            blocks_free=pool.free_count,
            blocks_total=pool.block_count,
            paused=self._loop.is_paused,
        )

    def _reason(self) -> str:
        return f"incident {self._loop.counts.last_incident}: {self._loop.counts.last_code}"

    def _fail(self, error: LockstepError) -> None:
        _log.error("the engine stops: %s", error)
        self._finish("failed", FinishReason.ERROR, as_stopped(error, self._loop.counts.last_incident or "none"))
        if self._on_failure is not None:
            self._on_failure(error)

    def _finish(self, phase: Phase, reason: FinishReason, failure: LockstepError | None) -> None:
        """No request is taken any more; each open one, those still in the command queue included, gets its last event."""
        with self._lock:
            self._state = self._read_state(phase, failure)
            queued = [(command.request, command.sink) for command in self._commands if isinstance(command, _Submit)]
            controls = [command for command in self._commands if isinstance(command, _Control) and command.done.set_running_or_notify_cancel()]
            self._commands.clear()
        for control in (*self._awaited, *controls):
            control.done.set_exception(failure or CapacityError("the engine is shutting down"))
        self._loop.end_all(reason, failure, queued)


def _incident() -> str:
    return secrets.token_hex(6)
