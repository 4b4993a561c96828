"""The flight recorder: the last steps of the log, always at hand, and a file of them when something fails (PROTOCOL.md 27).

It keeps references to records that exist anyway, and a snapshot of the driver's table once in `steps_kept` steps. It knows the log; not what failed,
nor who recovers how.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import secrets
import time
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

HALF_WRITTEN_S = 600.0
"""A file of which nothing was written for so long is no recording in the making."""

_SPEAK_OF_LINKS_ONLY = (LinkError, HandshakeError, StageLostError, StalledError)
"""Errors whose text holds no value of the log."""

_log = logging.getLogger("lockstep.recorder")


@dataclass(slots=True)
class _Span:
    """A start, and what came after it: plan, result, the driver's digest."""

    start: Start
    entries: list[tuple[StepPlan, StepResult, int]] = field(default_factory=list)


class Recorder:
    """rank_count: whose digests a result carries. fingerprint: of the engine's weights and numerics, changed as they are. steps_kept: at least so
    many steps, at most twice as many, can be replayed. bytes_max: what recordings in one folder may take; the oldest go first, the newest never."""

    def __init__(self, *, rank_count: int, fingerprint: str = "", steps_kept: int = 256, bytes_max: int = BYTES_MAX) -> None:
        self._rank_count = rank_count
        self.fingerprint = fingerprint
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

    def take(
        self, *, incident: str, error: BaseException, unresolved: Sequence[StepPlan] = (), columns: Mapping[int, Columns] | None = None
    ) -> Recording:
        """What is kept, with true token ids and without what a replay gives: it only refers to records. unresolved: plans without a result, in order.
        columns: by rank (-1: the driver), what it folded in the failing step."""
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
            fingerprint=self.fingerprint,
            with_tokens=True,
            departs=-1,
        )
        return Recording(
            head=head,
            start=self._spans[0].start,
            entries=tuple(
                Entry(plan=plan, result=dataclasses.replace(result, logprobs=None, prompt_logprobs=None), digest=digest, replayed=None)
                for plan, result, digest in entries
            ),
            unresolved=tuple(running.values()),
            columns=tuple(
                StepColumns(stage=rank, epoch=self._epoch, step=_step_of(folded, error_step), columns=folded)
                for rank, folded in sorted((columns or {}).items())
            ),
        )

    def save(self, taken: Recording, path: Path, *, with_tokens: bool = False) -> Path | None:
        """Replay it and write it. with_tokens: keep the true token ids. May run in a thread of its own. Returns the file, or None if it cannot be
        written: that is logged, and does not hide the failure that is recorded."""
        try:
            write(path, _with_replays(taken, None if with_tokens else Rekey(secrets.token_bytes(32))))
            _make_room(path, self._bytes_max)
        except Exception:
            _log.exception("incident %s: no recording could be written to %s", taken.head.incident, path)
            return None
        return path


def file_name(incident: str) -> str:
    return re.sub(r"[^\w-]", "_", incident) + SUFFIX


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
    """Remove the oldest recordings beside `newest` until all of them fit, and what ended processes left half-written. Other engines may do the same
    here at the same time: a file that has gone is no error, and one that is being written is not touched."""
    others: list[tuple[int, int, Path]] = []
    for path in newest.parent.glob(f"*{SUFFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if path.suffix != SUFFIX and time.time() - found.st_mtime < HALF_WRITTEN_S:
                continue
            if path != newest:
                others.append((found.st_mtime_ns, found.st_size, path))
    total = newest.stat().st_size + sum(size for _, size, _ in others)
    for _, size, path in sorted(others):
        if total <= bytes_max:
            return
        total -= size
        path.unlink(missing_ok=True)
