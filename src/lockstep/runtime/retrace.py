"""Replays a recording in one process, and says at which step anything differs first: a replay from what was recorded, ranks from the driver, or one
recording from another. It knows no files and no words for terminals."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.core.digest import Digest
from lockstep.core.divergence import Owner, differences
from lockstep.core.layout import BatchLayout
from lockstep.core.records import Columns, StepPlan, StepResult, named
from lockstep.core.snapshot import restore
from lockstep.core.table import TableShape
from lockstep.errors import CallerError, LockstepError, LogError
from lockstep.runtime.recording import Entry, Recording, Start
from lockstep.runtime.rekey import holds_tokens
from lockstep.runtime.replay import Replica

REPLAY_ERRORS = (LockstepError, LookupError, ValueError, AssertionError)
"""What records can raise that no correct driver has written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay gave, by step. columns: of the steps that were asked for. error: what ended it before its end, in step error_step (else -1)."""

    digests: Mapping[int, int]
    layouts: Mapping[int, BatchLayout]
    columns: Mapping[int, Columns]
    error: Exception | None
    error_step: int


def replay(
    shape: TableShape,
    epoch: int,
    start: Start,
    answered: Sequence[tuple[StepPlan, StepResult]],
    unresolved: Sequence[StepPlan],
    *,
    columns_at: Collection[int] = (),
) -> Replayed:
    """Run plans and results from `start` on, then plans without a result for as long as their horizons allow. Raises LogError for a start that no
    table of this shape can have left."""
    replica = Replica(restore(shape, start.table), Digest(epoch))
    replica.digest.value = start.digest
    digests: dict[int, int] = {}
    layouts: dict[int, BatchLayout] = {}
    columns: dict[int, Columns] = {}
    step = start.table.next_step
    try:
        for result in start.results:
            replica.offer(result)
        for plan, answer in [*answered, *((plan, None) for plan in unresolved)]:
            step = plan.step
            if answer is None and not replica.can_run(plan):
                break
            layouts[step] = replica.run(plan)
            digests[step] = replica.digest.value
            if step in columns_at:
                columns[step] = replica.columns_of(step) or {}
            if answer is not None:
                replica.offer(answer)
    except REPLAY_ERRORS as error:
        return Replayed(digests=digests, layouts=layouts, columns=columns, error=error, error_step=step)
    return Replayed(digests=digests, layouts=layouts, columns=columns, error=None, error_step=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The first step at which something differs: a line each. slots: of the requests concerned, as far as they can be told."""

    step: int
    lines: tuple[str, ...]
    slots: tuple[Owner, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrace:
    """first: step at which the recording begins. reached: the last step that was replayed, or compared. layouts: of every step that was replayed.
    notes: what could not be looked at."""

    first: int
    reached: int
    finding: Finding | None
    layouts: Mapping[int, BatchLayout]
    notes: tuple[str, ...] = ()


def retrace(recording: Recording) -> Retrace:
    """Raises CallerError for a recording that cannot be begun."""
    head, start = recording.head, recording.start
    answered = [(entry.plan, entry.result) for entry in recording.entries]
    try:
        run = replay(head.shape, head.epoch, start, answered, recording.unresolved, columns_at={sent.step for sent in recording.columns})
    except (LogError, ValueError, LookupError, MemoryError) as error:
        raise CallerError(f"the recording cannot be begun: {error}. It is damaged, or was not written by lockstep {head.lockstep}") from None
    entries = {entry.plan.step: entry for entry in recording.entries}
    failing = {step for step in (run.error_step, recording.head.error_step) if step >= 0}
    finding = None
    for step in sorted({*entries, *run.digests, *(sent.step for sent in recording.columns), *failing}):
        lines = [*_of_replay(recording, entries.get(step), step, run), *_of_ranks(recording, entries.get(step))]
        found = list(_of_columns(recording, step, run.columns.get(step)))
        lines += [line for line, _ in found] or ([] if lines else _of_failure(recording, step, run))
        if lines:
            slots = sorted({owner for _, owners in found for owner in owners})
            finding = Finding(step=step, lines=tuple(lines), slots=tuple(slots))
            break
    reached = max(run.digests, default=start.table.next_step - 1)
    return Retrace(first=start.table.next_step, reached=reached, finding=finding, layouts=run.layouts)


def _of_failure(recording: Recording, step: int, run: Replayed) -> Iterator[str]:
    """In the step of the failure, when the log shows nothing: that the engine stopped and a replay does not is the difference."""
    if step == recording.head.error_step:
        kind = recording.head.error_kind
        if step in run.digests:
            yield f"the engine stopped here with {kind}, the replay goes on: what failed is outside the log: a link, a process, KV, one rank's table"
        else:
            yield f"the engine stopped here with {kind}; the log's results do not reach so far"


def _of_replay(recording: Recording, entry: Entry | None, step: int, run: Replayed) -> Iterator[str]:
    """This replay against what the recording says of it."""
    if step == run.error_step:
        yield f"the replay stops: {type(run.error).__name__}: {run.error}"
    if step == recording.head.departs:
        yield "the driver's digest was another than a replay gave when the file was written: the driver's own table was changed outside the log"
    found = run.digests.get(step)
    if entry is not None and entry.replayed is not None and found is not None and found != entry.replayed:
        yield f"the replay's digest is {found:#018x}, the recording has {entry.replayed:#018x}: another lockstep, or a changed file"


def _of_ranks(recording: Recording, entry: Entry | None) -> Iterator[str]:
    """Every rank's digest against the driver's, as they were when it ran."""
    if entry is None:
        return
    digests = entry.result.digests.tolist()
    if len(digests) != recording.head.rank_count:
        yield f"the result brought {len(digests)} digests, there are {recording.head.rank_count} ranks"
    if wrong := [rank_name(rank) for rank, digest in enumerate(digests) if digest != entry.digest]:
        yield f"digests differ from the driver's: {', '.join(wrong)}"


def _of_columns(recording: Recording, step: int, replayed: Columns | None) -> Iterator[tuple[str, tuple[Owner, ...]]]:
    """Every rank's columns of the step against the replay's, or the first rank's where the replay did not come so far."""
    sent = [columns for columns in recording.columns if columns.step == step and columns.columns]
    if replayed is None and sent:
        name, expected, sent = f"on {rank_name(sent[0].stage)}", dict(sent[0].columns), sent[1:]
    else:
        name, expected = "in the replay", replayed or {}
    for columns in sent:
        found = differences(expected, dict(columns.columns))
        if found is not None:
            yield found.describe(name, f"on {rank_name(columns.stage)}"), found.slots


def rank_name(rank: int) -> str:
    return "the driver" if rank < 0 else f"stage {rank}"


def compare(ours: Recording, theirs: Recording) -> Retrace:
    """The first step at which two recordings of one log differ: plan, result, digests, and columns of the same rank. Values made of tokens are
    compared only if both hold the true ones. Raises CallerError if they have no step in common."""
    plans = _plans(ours), _plans(theirs)
    steps = sorted(plans[0].keys() & plans[1].keys())
    if not steps:
        raise CallerError(f"the recordings have no step in common: {_range(plans[0])} and {_range(plans[1])}; compare two of one run")
    exact = ours.head.with_tokens and theirs.head.with_tokens
    notes = [] if exact else ["token ids and what is made of them, digests too, are not compared: not both recordings hold the true ids"]
    for name in ("epoch", "shape", "rank_count", "fingerprint", "lockstep"):
        a, b = getattr(ours.head, name), getattr(theirs.head, name)
        notes += [f"{name} is {a} in the first and {b} in the second"] if a != b else []
    layouts = retrace(ours).layouts
    for step in steps:
        found = list(_between(ours, theirs, step, exact))
        if found:
            slots = sorted({owner for _, owners in found for owner in owners})
            finding = Finding(step=step, lines=tuple(line for line, _ in found), slots=tuple(slots))
            return Retrace(first=steps[0], reached=step, finding=finding, layouts=layouts, notes=tuple(notes))
    return Retrace(first=steps[0], reached=steps[-1], finding=None, layouts=layouts, notes=tuple(notes))


def _plans(recording: Recording) -> dict[int, StepPlan]:
    return {plan.step: plan for plan in (*(entry.plan for entry in recording.entries), *recording.unresolved)}


def _range(plans: Mapping[int, StepPlan]) -> str:
    return f"steps {min(plans)} to {max(plans)}" if plans else "no step"


def _between(ours: Recording, theirs: Recording, step: int, exact: bool) -> Iterator[tuple[str, tuple[Owner, ...]]]:
    entries = [{entry.plan.step: entry for entry in recording.entries}.get(step) for recording in (ours, theirs)]
    pairs = [tuple(named("plan", _plans(recording)[step].columns()) for recording in (ours, theirs))]
    a, b = entries
    if a is not None and b is not None:
        pairs[0] = tuple(columns | named(f"result {step}", entry.result.columns()) for columns, entry in zip(pairs[0], (a, b), strict=True))
    sent = [{columns.stage: dict(columns.columns) for columns in recording.columns if columns.step == step} for recording in (ours, theirs)]
    names = ["", *(f" on {rank_name(rank)}" for rank in sorted(sent[0].keys() & sent[1].keys()))]
    pairs += [(sent[0][rank], sent[1][rank]) for rank in sorted(sent[0].keys() & sent[1].keys())]
    for name, (one, other) in zip(names, pairs, strict=True):
        found = differences(_shown(one, exact), _shown(other, exact))
        if found is not None:
            yield found.describe(f"in the first{name}", f"in the second{name}"), found.slots
    if exact and a is not None and b is not None:
        for rank, (one_digest, other_digest) in enumerate(zip(a.result.digests.tolist(), b.result.digests.tolist(), strict=False)):
            if one_digest != other_digest:
                yield f"the digest of {rank_name(rank)} is {one_digest:#018x} in the first and {other_digest:#018x} in the second", ()
        if a.digest != b.digest:
            yield f"the driver's digest is {a.digest:#018x} in the first and {b.digest:#018x} in the second", ()


def _shown(columns: Columns, exact: bool) -> Columns:
    return columns if exact else {name: array for name, array in columns.items() if not holds_tokens(name)}
