"""The engine loop, without a thread: gathers what has come, writes plans, hands out events; and goes on in a new epoch when something fails.

A failure ends the epoch, not the engine: what it concerns is ended with an incident's name, everybody else is admitted again and their streams go on.
Too many failures end the engine. It knows the driver and a cluster; the engine's thread and the simulator turn it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

from lockstep.core.outputs import FinishReason, TokenEvent
from lockstep.core.records import Columns, StepPlan
from lockstep.core.request import EngineRequest
from lockstep.errors import DivergenceError, InternalError, InvalidRequestError, LinkError, LockstepError, PeerError, PoisonError, ProvenanceError
from lockstep.runtime.driver import Driver
from lockstep.runtime.messages import WeightsReport, WeightsRequest
from lockstep.runtime.transport.cluster import Cluster

Sink = Callable[[list[TokenEvent]], None]
"""Takes the events of one turn, in order, on the loop's thread. It must return at once and never raise."""

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests that have begun: they end, they are finished first, or they stay where they are and go on afterwards."""

_log = logging.getLogger("lockstep.engine")


def pause_mode(name: str) -> PauseMode:
    """Raises InvalidRequestError."""
    for mode in get_args(PauseMode):
        if mode == name:
            return mode  # type: ignore[no-any-return]
    raise InvalidRequestError(f"mode must be one of {', '.join(get_args(PauseMode))}, got {name!r:.60}", param="mode")


class Dumper(Protocol):
    """Writes what the recorder has when something fails."""

    def dump(self, *, incident: str, error: LockstepError, unresolved: Sequence[StepPlan], columns: Mapping[int, Columns]) -> Path | None:
        """Returns at once: where it will be written, by another thread, or None if it cannot be. It never raises."""
        ...

    def close(self) -> None:
        """Returns when all is written."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """most: failures within window_s, and failures without a token in between, after which the engine goes on; one more ends it. The first failure
    after a delivered token is answered at once; further ones wait backoff_s, doubled each time, at most backoff_max_s."""

    most: int = 10
    window_s: float = 600.0
    backoff_s: float = 0.1
    backoff_max_s: float = 5.0

    def delay_s(self, failures_in_a_row: int) -> float:
        most_s = max(self.backoff_s, self.backoff_max_s)
        return 0.0 if failures_in_a_row <= 1 else min(most_s, self.backoff_s * 2.0 ** min(failures_in_a_row - 2, 60))


@dataclass(slots=True)
class FailureCounts:
    """For metrics and tests. restarts: epochs begun after a failure. last: what failed last, with values that are for the log alone;
    last_code: its kind."""

    restarts: int = 0
    divergences: int = 0
    provenance_failures: int = 0
    ended_requests: int = 0
    last: str = ""
    last_code: str = ""
    last_incident: str = ""


@dataclass(slots=True)
class WeightsUpdate:
    """epoch: in which stages were asked; ready: those that have said so. then: called as the epoch with the new weights begins. error: why not."""

    weights: str
    then: Callable[[], None]
    epoch: int = -1
    ready: set[int] = field(default_factory=set)
    is_done: bool = False
    error: str = ""


class EngineLoop:
    """make_incident: names for failures. Every submitted request gets exactly one last event."""

    def __init__(
        self,
        driver: Driver,
        cluster: Cluster,
        *,
        restarts: RestartPolicy,
        clock: Callable[[], float],
        make_incident: Callable[[], str],
        dumper: Dumper | None = None,
    ) -> None:
        self.driver = driver
        self.cluster = cluster
        self.counts = FailureCounts()
        self._restarts = restarts
        self._clock = clock
        self._make_incident = make_incident
        self._dumper = dumper
        self._sinks: dict[str, tuple[Sink, int]] = {}
        self._failed_at: deque[float] = deque()
        self._in_a_row = 0
        self._begin_at: float | None = None
        self._pause: PauseMode | None = None
        self._update: WeightsUpdate | None = None

    @property
    def recovering(self) -> bool:
        """A failure has ended an epoch and the next is not ready. Any thread may ask."""
        return self._begin_at is not None or not self.cluster.is_ready

    # Requests

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        if request.request_id in self._sinks:
            sink([_refusal(request)])
            return
        self._sinks[request.request_id] = (sink, 0)
        try:
            events = self.driver.submit(request)
        except Exception as error:
            self._refuse(request.request_id, error)
            return
        with self._failures(request.request_id):
            self._dispatch(events)

    def _refuse(self, request_id: str, cause: Exception) -> None:
        """A request that nobody should have built. No plan has it, so the epoch goes on."""
        _log.error("request %r cannot be taken", request_id, exc_info=cause)
        incident = self._make_incident()
        self.driver.abort(request_id)
        error = _unforeseen(cause, (request_id,))
        self._record(error, incident, {})
        self._end([request_id], FinishReason.ERROR, _with_incident(error, incident))

    def abort(self, request_id: str) -> None:
        """Answered at once, before a request of the same name can follow it in."""
        with self._failures(request_id):
            event = self.driver.abort(request_id)
            self._dispatch([] if event is None else [event])

    def end_all(self, reason: FinishReason, error: LockstepError | None, also: Sequence[tuple[EngineRequest, Sink]] = ()) -> None:
        """The last event of every open request, and of those that were never taken."""
        for request, sink in also:
            if request.request_id in self._sinks:
                sink([_refusal(request)])
            else:
                self._sinks[request.request_id] = (sink, 0)
        self._end(list(self._sinks), reason, error)

    # Pauses

    def pause(self, mode: PauseMode) -> None:
        """Go on with nothing new: requests that come wait. See `PauseMode`; `is_paused` turns true in a later turn."""
        self._pause = mode
        self.driver.scheduler.admitting = False
        if mode == "abort":
            for name in list(self._sinks):
                self.abort(name)

    def resume(self) -> None:
        self._pause = None
        self.driver.scheduler.admitting = True

    @property
    def is_paused(self) -> bool:
        """A pause was asked for, and nothing is computed any more."""
        if self._pause is None or self.recovering or self.driver.waits:
            return False
        return self._pause == "keep" or not self.driver.scheduler.has_begun_work

    # Other weights

    def update_weights(self, weights: str, then: Callable[[], None]) -> WeightsUpdate:
        """Have every stage load them beside its work. Once all have, a new epoch begins with them, in which every request goes on with all that it
        knows; `then` is called as it begins. If one cannot, nothing changes. Another update that was not over is given up."""
        if self._update is not None:
            self._update.error = "another update came before it was over"
        self._update = WeightsUpdate(weights=weights, then=then)
        return self._update

    def _ask_for_weights(self, update: WeightsUpdate) -> None:
        """Once an epoch: a stage that was started again has forgotten what it was asked."""
        if update.epoch != self.driver.epoch:
            update.epoch, update.ready = self.driver.epoch, set()
            self.cluster.send(WeightsRequest(epoch=update.epoch, weights=update.weights))

    def _note_weights(self, report: WeightsReport) -> None:
        update = self._update
        if update is None or (report.epoch, report.weights) != (update.epoch, update.weights):
            return
        if report.error:
            update.error, self._update = f"stage {report.stage}: {report.error}", None
            return
        update.ready.add(report.stage)
        if len(update.ready) == self.driver.rank_count:
            self._update, update.is_done = None, True
            update.then()
            self.cluster.use_weights(update.weights)
            self.driver.restart(self.driver.epoch + 1, frozenset(), strikes=False)
            self._begin_at = self._clock()

    # Turns

    def turn(self, timeout_s: float) -> None:
        """One turn; waits at most timeout_s for something to come. Raises what ends the engine."""
        now = self._clock()
        with self._failures():
            self.driver.tick(now)
            if self._begin_at is not None and now >= self._begin_at:
                self._begin_at = None
                self.cluster.begin(self.driver.epoch)
            if not self.recovering:
                if self._update is not None:
                    self._ask_for_weights(self._update)
                for request in self.driver.take_grammars():
                    self.cluster.send(request)
                while self._pause != "keep" and (plan := self.driver.next_plan()) is not None:
                    self.cluster.send(plan)
            self._take(timeout_s if self._begin_at is None else min(timeout_s, self._begin_at - now))

    @contextmanager
    def _failures(self, *request_ids: str) -> Iterator[None]:
        """What is raised within ends the epoch, and not the engine. request_ids: whom it concerns, if it does not say."""
        is_own = bool(request_ids)
        try:
            yield
            return
        except (PeerError, InternalError) as error:
            failure = error
        except Exception as error:
            _log.exception("the engine's own work failed")
            failure, is_own = _unforeseen(error, ()), True
        if isinstance(failure, InternalError):
            failure.request_ids = failure.request_ids or request_ids
        if self._begin_at is None:
            self._recover(failure)
        elif is_own and isinstance(failure, InternalError):  # the epoch is over already; of what its stages still say `begin` takes care
            incident = self._make_incident()
            self._record(failure, incident, {})
            self._end([*failure.request_ids, *self._lost()], FinishReason.ERROR, _with_incident(failure, incident))

    def _take(self, timeout_s: float) -> None:
        """What came before a failure in the same turn is delivered; what still comes of an epoch that is over is not."""
        events: list[TokenEvent] = []
        failure: Exception | None = None
        try:
            for message in self.cluster.poll(max(0.0, timeout_s)):
                if isinstance(message, WeightsReport):
                    self._note_weights(message)
                elif message.epoch == self.driver.epoch:
                    self.driver.receive(message, events)
        except Exception as error:
            failure = error
        self._in_a_row = 0 if events else self._in_a_row
        try:
            self._dispatch(events)
        except InternalError as skipped:
            if not isinstance(failure, InternalError):
                raise skipped from failure
            failure.request_ids = (*failure.request_ids, *skipped.request_ids)
        if failure is not None:
            raise failure

    def _recover(self, error: PeerError | InternalError) -> None:
        """A failure that names no step is of the oldest one without a result."""
        self._begin_at, incident = math.inf, self._make_incident()
        self._count(error, incident)
        if error.step < 0 and self.driver.waits:
            error.step = self.driver.unresolved[0].step
        columns = self.cluster.columns_of(error.step) if isinstance(error, InternalError) and error.step >= 0 else {}
        concerned: frozenset[str] = frozenset()
        try:
            if isinstance(error, InternalError):
                error, concerned = self.driver.explain(error, columns)
        finally:
            self._record(error, incident, columns)
        poison = self.driver.restart(self.driver.epoch + 1, concerned, strikes=not concerned and not isinstance(error, LinkError))
        if self._is_one_too_many(cause_is_gone=bool(poison)):
            raise error
        self.counts.restarts += 1
        self._begin_at = self._clock() + self._restarts.delay_s(self._in_a_row)
        if isinstance(error, InternalError):
            self._end(sorted(concerned), FinishReason.ERROR, _with_incident(error, incident))
        self._end(sorted(poison), FinishReason.ERROR, _poisoned(error, incident))
        self._end(self._lost(), FinishReason.ERROR, _lost_in(error, incident))

    def _lost(self) -> list[str]:
        """Who waits for events and is unknown to the scheduler: a mistake was made in the middle of its end. Nothing would ever come for it."""
        return [name for name in self._sinks if self.driver.scheduler.find(name) is None]

    def _record(self, error: LockstepError, incident: str, columns: Mapping[int, Columns]) -> None:
        self.counts.last, path = str(error), None
        if self._dumper is not None:
            path = self._dumper.dump(incident=incident, error=error, unresolved=self.driver.unresolved, columns=columns)
        _log.error("incident %s in epoch %d: %s%s", incident, self.driver.epoch, error, f"; recorded in {path}" if path else "")

    def _is_one_too_many(self, *, cause_is_gone: bool) -> bool:
        """cause_is_gone: the request that was behind the failures has been found and ended, so they say nothing of the next one."""
        now = self._clock()
        if cause_is_gone:
            self._failed_at.clear()
            self._in_a_row = 0
            return False
        self._in_a_row += bool(self._sinks)  # without requests there is no token to wait for
        self._failed_at.append(now)
        while now - self._failed_at[0] > self._restarts.window_s:
            self._failed_at.popleft()
        return max(len(self._failed_at), self._in_a_row) > self._restarts.most

    def _count(self, error: LockstepError, incident: str) -> None:
        self.counts.divergences += isinstance(error, DivergenceError)
        self.counts.provenance_failures += isinstance(error, ProvenanceError)
        self.counts.last_code, self.counts.last_incident = error.code, incident

    # Events

    def _end(self, request_ids: Sequence[str], reason: FinishReason, error: LockstepError | None) -> None:
        ending = [name for name in dict.fromkeys(request_ids) if name in self._sinks]
        self.counts.ended_requests += len(ending) if error is not None else 0
        self._dispatch([TokenEvent(request_id=name, index=self._sinks[name][1], finish_reason=reason, error=error) for name in ending])

    def _dispatch(self, events: list[TokenEvent]) -> None:
        """Hand each sink its events of this turn at once. Raises InternalError for those whose index is not the next one, when all others are
        told."""
        by_sink: dict[Sink, list[TokenEvent]] = {}
        wrong: dict[str, str] = {}
        for event in events:
            name = event.request_id
            sink, delivered = self._sinks.get(name, (None, -1))
            if sink is None or event.index != delivered or name in wrong:
                wrong.setdefault(name, f"request {name!r}: token {delivered} comes next, the driver delivers {event.index}")
                continue
            if event.finish_reason is None:
                self._sinks[name] = (sink, delivered + len(event.token_ids))
            else:
                del self._sinks[name]
            by_sink.setdefault(sink, []).append(event)
        for sink, batch in by_sink.items():
            try:
                sink(batch)
            except Exception:
                _log.exception("a sink raised; what it was given is lost to its own client alone")
        if wrong:
            raise InternalError("; ".join(wrong.values()), request_ids=sorted(wrong))


def _unforeseen(cause: Exception, request_ids: Sequence[str]) -> InternalError:
    """What no part raises on purpose, as a failure like others."""
    error = InternalError(f"the engine's own work failed: {type(cause).__name__}: {cause}", request_ids=request_ids)
    error.__cause__ = cause
    return error


def _refusal(request: EngineRequest) -> TokenEvent:
    """Of a request whose name another open one has: the first goes on, the second ends."""
    error = InternalError(f"request {request.request_id!r} is submitted twice; a name is free again after its last event")
    return TokenEvent(request_id=request.request_id, index=0, finish_reason=FinishReason.ERROR, error=error)


def _with_incident(error: InternalError, incident: str) -> InternalError:
    """The error as its request's client sees it. Values stay in the log and in the recording: they may be another client's."""
    return type(error)(
        f"incident {incident}: the engine's state of this request was found to be wrong at step {error.step} ({error.code}); the request is ended "
        "rather than answered from it. Send it again; the server's log names what was found under the incident",
        step=error.step,
    )


def _lost_in(error: LockstepError, incident: str) -> InternalError:
    return InternalError(f"incident {incident}: the engine lost this request's end when it failed ({error.code}); send it again", step=error.step)


def _poisoned(error: LockstepError, incident: str) -> LockstepError:
    return PoisonError(
        f"incident {incident}: the engine failed again and again while this request was computed, last with {error.code}; it is ended so that "
        "others go on. Do not send it again before the cause is found; the server's log names it under the incident"
    )


def as_stopped(error: LockstepError, incident: str) -> LockstepError:
    """What callers are told when the engine has stopped. Of a mistake of ours no value: it may be another client's."""
    if isinstance(error, InternalError):
        return type(error)(
            f"incident {incident}: the engine has stopped, it failed at step {error.step} ({error.code}). The server's log names what was found "
            "under the incident; start it again",
            step=error.step,
        )
    return error
