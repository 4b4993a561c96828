"""Loosened samplers: which drafts are accepted, and what ends a request. The last stage decides for all, so each has the scope ALL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.core.acceptance import accept
from lockstep.core.layout import BatchLayout
from lockstep.core.ragged import Ragged
from lockstep.core.records import StepResult
from lockstep.core.schema import FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from lockstep.core.types import I32
from lockstep.sim.mutants.mutant import Mutant, of_accept
from lockstep.sim.mutants.setting import ANY, Setting


def _without_stops(layout: BatchLayout) -> BatchLayout:
    return replace(layout, stop_ids=Ragged.of([() for _ in layout.sample_row]))


def accept_length_first(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    """C3-01: the cap is looked at first, and where it is reached no stop is looked for."""
    result, full = accept(layout, sampled, **others), accept(_without_stops(layout), sampled, **others)
    to_cap = full.finishes == FINISH_LENGTH
    return _merged(result, full, to_cap)


def accept_last_token_stop(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    """C3-02: of an accepted run only the last token is tested for a stop."""
    full = accept(_without_stops(layout), sampled, **others)
    finishes = full.finishes.copy()
    for i in range(len(full)):
        if int(full.tokens.row(i)[-1]) in layout.stop_ids.row(i):
            finishes[i] = FINISH_STOP
    return replace(full, finishes=finishes, drafts=_of_open(full.drafts, finishes))


def _merged(result: StepResult, other: StepResult, chosen: Any) -> StepResult:
    """Rows `chosen` of the other."""
    finishes = np.where(chosen, other.finishes, result.finishes).astype(np.int32)
    tokens = Ragged.of([(other if chosen[i] else result).tokens.row(i) for i in range(len(result))])
    return replace(result, finishes=finishes, tokens=tokens, drafts=_of_open(result.drafts, finishes))


def _of_open(drafts: Ragged, finishes: I32) -> Ragged:
    return Ragged.of([() if finishes[i] != FINISH_NONE else drafts.row(i) for i in range(len(drafts))])


def accept_unverified(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    """Every draft is accepted, whatever was drawn in its place."""
    taken = sampled.copy()
    for i in range(len(layout.sample_row)):
        drafts = layout.draft_ids.row(i)
        first = int(layout.sample_starts[i])
        taken[first : first + len(drafts)] = drafts
    return accept(layout, taken, **others)


def accept_one_more(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    """The draw behind the first rejected draft is accepted too, though it was drawn after a wrong token."""
    result = accept(layout, sampled, **others)
    runs = []
    for i in range(len(result)):
        run = result.tokens.row(i).tolist()
        first, end = int(layout.sample_starts[i]) + len(run), int(layout.sample_starts[i + 1])
        room = int(layout.length_cap[i] - layout.known[layout.sample_row[i]])
        extra = sampled[first].item() if first < end and not result.finishes[i] and len(run) + 1 < room else None
        runs.append(run if extra is None else [*run, extra])
    return replace(result, tokens=Ragged.of(runs))


def accept_own_token_only(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    """One token a step, whatever more is right."""
    result = accept(layout, sampled, **others)
    one = Ragged.of([result.tokens.row(i)[:1] for i in range(len(result))])
    cut = one.lengths() < result.tokens.lengths()
    finishes = np.where(cut, FINISH_NONE, result.finishes).astype(np.int32)
    return replace(result, tokens=one, finishes=finishes, drafts=_of_open(result.drafts, np.where(cut, FINISH_LENGTH, finishes).astype(np.int32)))


def accept_by_batch(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    """C5-01: what is drawn depends on how many rows there are."""
    return accept(layout, sampled if layout.row_count == 1 else (sampled + np.int32(1)) % np.int32(300), **others)


def accept_by_row(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    """C5-02: what is drawn depends on the row that a request has."""
    row = np.repeat(np.arange(len(layout.sample_row), dtype=np.int32), np.diff(layout.sample_starts))
    return accept(layout, (sampled + row) % np.int32(300), **others)


def accept_with_late_drafts(layout: BatchLayout, sampled: I32, **others: Any) -> StepResult:
    """C1-07: drafts are handed on in one place for all, so a row gets those of the row before it."""
    result = accept(layout, sampled, **others)
    rows = [result.drafts.row(i) for i in range(len(result))]
    return replace(result, drafts=_of_open(Ragged.of(rows[-1:] + rows[:-1]), result.finishes))


_DRAFTS = Setting(drafts=True)
_GUESSES = "a draft is only a guess: it is verified, and a wrong one costs time"


def _mutant(kind: str, name: str, loosens: str, function: Any, setting: Setting = ANY, equivalent: str | None = None) -> Mutant:
    return Mutant(name=name, kind=kind, loosens=loosens, parts=of_accept(function), setting=setting, equivalent=equivalent)


MUTANTS: Sequence[Mutant] = (
    _mutant("C1-07", "drafts-of-another-row", "a row gets the next drafts of another", accept_with_late_drafts, _DRAFTS, _GUESSES),
    _mutant("C3-01", "length-before-stop", "the cap is tested before the stop", accept_length_first, _DRAFTS),
    _mutant("C3-02", "stop-at-last-only", "only the last token of a run is tested for a stop", accept_last_token_stop, _DRAFTS),
    _mutant("C3-12", "accepts-unverified", "every draft is accepted", accept_unverified, _DRAFTS),
    _mutant("C3-12", "accepts-one-more", "the draw behind a rejected draft is accepted", accept_one_more, _DRAFTS),
    _mutant(
        "C3-12",
        "accepts-one",
        "one token a step is accepted",
        accept_own_token_only,
        _DRAFTS,
        "what is accepted is right, and the rest comes again; drafts are of no use, no more",
    ),
    _mutant("C5-01", "draws-by-batch", "a draw depends on the number of rows", accept_by_batch),
    _mutant("C5-02", "draws-by-row", "a draw depends on the row", accept_by_row),
)
