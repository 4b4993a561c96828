"""The flight recorder: the last steps of the log, always at hand, and a file of them when something fails (PROTOCOL.md 27).

It keeps references to records that exist anyway, and a snapshot of the driver's table once in `steps_kept` steps. It knows the log; not what failed,
nor who recovers how.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from lockstep import __version__
from lockstep.core.records import Columns, StepPlan, StepResult
from lockstep.core.snapshot import snapshot
from lockstep.core.table import TableShape
from lockstep.errors import HandshakeError, InternalError, LinkError, LockstepError, PeerError, StageLostError, StalledError
from lockstep.runtime.messages import StepColumns
from lockstep.runtime.recording import SUFFIX, Entry, Head, Recording, Start, write
from lockstep.runtime.rekey import Rekey
from lockstep.runtime.replay import Replica
from lockstep.runtime.retrace import Replayed, replay

BYTES_MAX = 256 << 20
"""Of all recordings in one folder."""

_SPEAK_OF_LINKS_ONLY = (LinkError, HandshakeError, StageLostError, StalledError)
"""Errors whose text holds no value of the log."""

_log = logging.getLogger("lockstep.recorder")


@dataclass(slots=True)
class _Span:
    """A start, and what came after it: plan, result, the driver's digest."""

    start: Start
    entries: list[tuple[StepPlan, StepResult, int]] = field(default_factory=list)


class Recorder:
    """rank_count: whose digests a result carries. fingerprint: of the engine's numerics. steps_kept: at least so many steps, at most twice as many,
    can be replayed. bytes_max: what recordings in one folder may take; the oldest go first, the newest never."""

    def __init__(self, *, rank_count: int, fingerprint: str = "", steps_kept: int = 256, bytes_max: int = BYTES_MAX) -> None:
        self._rank_count = rank_count
        self._fingerprint = fingerprint
        self._steps_kept = steps_kept
        self._bytes_max = bytes_max
        self._epoch = -1
        self._shape: TableShape | None = None
        self._spans: list[_Span] = []
        self._running: list[StepPlan] = []

    def begin(self, epoch: int, replica: Replica) -> None:
        """A new epoch, of which nothing has run; what was kept of the former is forgotten."""
        self._epoch = epoch
        self._shape = replica.table.shape
        self._spans = [_Span(_start(replica))]
        self._running = []

    def before(self, plan: StepPlan, replica: Replica) -> None:
        """The driver's replica is about to run the plan. After a failure it may run on without results."""
        if len(self._spans[-1].entries) >= self._steps_kept:
            self._spans = [self._spans[-1], _Span(_start(replica))]
        self._running.append(plan)

    def note(self, result: StepResult, digest: int) -> None:
        """That plan has run and left the driver's digest at `digest`; `result` answers it. To be called before digests are compared."""
        plan = self._running.pop(0)
        assert plan.step == result.step, (plan.step, result.step)
        self._spans[-1].entries.append((plan, result, digest))

    def dump(
        self,
        place: Path,
        *,
        incident: str,
        error: BaseException,
        unresolved: Sequence[StepPlan] = (),
        columns: Mapping[int, Columns] | None = None,
        with_tokens: bool = False,
    ) -> Path | None:
        """Write a recording to `place`: a file if its name ends in .lockstep, else a folder, in which it is named after the incident. unresolved:
        plans without a result, in order. columns: by rank (-1: the driver), what it folded in the failing step. with_tokens: keep the true token ids.
        Returns the file, or None if it cannot be written: that is logged, and does not hide the failure that is dumped."""
        try:
            recording = self._recording(incident, error, unresolved, columns or {}, with_tokens)
            path = place if place.suffix == SUFFIX else place / (re.sub(r"[^\w-]", "_", incident) + SUFFIX)
            write(path, recording)
            _make_room(path, self._bytes_max)
        except Exception:
            _log.exception("incident %s: no recording could be written to %s", incident, place)
            return None
        return path

    def _recording(
        self, incident: str, error: BaseException, unresolved: Sequence[StepPlan], columns: Mapping[int, Columns], with_tokens: bool
    ) -> Recording:
        if self._shape is None:
            raise InternalError("no epoch has begun, nothing is recorded")
        entries = [entry for span in self._spans for entry in span.entries]
        running = {plan.step: plan for plan in (*self._running, *unresolved)}
        error_step = error.step if isinstance(error, (InternalError, PeerError)) else -1
        head = Head(
            lockstep=__version__,
            epoch=self._epoch,
            incident=incident,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            error_kind=type(error).__name__,
            error_code=error.code if isinstance(error, LockstepError) else "",
            error_text=str(error),
            error_step=error_step,
            shape=self._shape,
            rank_count=self._rank_count,
            fingerprint=self._fingerprint,
            with_tokens=True,
            departs=-1,
        )
        true = Recording(
            head=head,
            start=self._spans[0].start,
            entries=tuple(
                Entry(plan=plan, result=dataclasses.replace(result, logprobs=None), digest=digest, replayed=None) for plan, result, digest in entries
            ),
            unresolved=tuple(running.values()),
            columns=tuple(
                StepColumns(stage=rank, epoch=self._epoch, step=_step_of(folded, error_step), columns=folded)
                for rank, folded in sorted(columns.items())
            ),
        )
        return _with_replays(true, None if with_tokens else Rekey(secrets.token_bytes(32)))


def _start(replica: Replica) -> Start:
    return Start(table=snapshot(replica.table), digest=replica.digest.value, results=replica.buffered)


def _step_of(columns: Columns, otherwise: int) -> int:
    """The step that folded columns are of, by their plan's head (epoch, step, horizon, ...)."""
    return int(columns["plan.head"][1]) if "plan.head" in columns else otherwise


def _with_replays(true: Recording, rekey: Rekey | None) -> Recording:
    """The recording with what a replay of it must give; with hashes for its tokens if a key is given."""
    before = _run(true)
    departs = next((e.plan.step for e in true.entries if before.digests.get(e.plan.step) != e.digest), -1)
    head = dataclasses.replace(true.head, departs=departs)
    if rekey is None:
        return dataclasses.replace(true, head=head, entries=_replayed(true.entries, before))
    text = head.error_text if head.error_kind in [kind.__name__ for kind in _SPEAK_OF_LINKS_ONLY] else rekey.text(head.error_text)
    hashed = Recording(
        head=dataclasses.replace(head, with_tokens=False, error_text=text),
        start=Start(
            table=rekey.table(true.start.table),
            digest=rekey.word(true.start.digest),
            results=tuple(rekey.result(result) for result in true.start.results),
        ),
        entries=tuple(
            dataclasses.replace(e, plan=rekey.plan(e.plan), result=rekey.result(e.result), digest=rekey.word(e.digest)) for e in true.entries
        ),
        unresolved=tuple(rekey.plan(plan) for plan in true.unresolved),
        columns=true.columns,
    )
    after = _run(hashed)
    columns = tuple(
        dataclasses.replace(c, columns=rekey.columns(dict(c.columns), before.columns.get(c.step, {}), after.columns.get(c.step, {})))
        for c in true.columns
    )
    return dataclasses.replace(hashed, entries=_replayed(hashed.entries, after), columns=columns)


def _run(recording: Recording) -> Replayed:
    return replay(
        recording.head.shape,
        recording.head.epoch,
        recording.start,
        [(entry.plan, entry.result) for entry in recording.entries],
        recording.unresolved,
        columns_at={columns.step for columns in recording.columns},
    )


def _replayed(entries: Sequence[Entry], run: Replayed) -> tuple[Entry, ...]:
    return tuple(dataclasses.replace(entry, replayed=run.digests.get(entry.plan.step)) for entry in entries)


def _make_room(newest: Path, bytes_max: int) -> None:
    """Remove the oldest recordings beside `newest` until all of them fit, what an ended process left half-written included."""
    others = sorted((p.stat().st_mtime_ns, p) for p in newest.parent.glob(f"*{SUFFIX}*") if p != newest)
    total = newest.stat().st_size + sum(path.stat().st_size for _, path in others)
    for _, path in others:
        if total <= bytes_max:
            return
        total -= path.stat().st_size
        path.unlink(missing_ok=True)
