"""Records written by hand, and a scheduler that runs against one replica. Knows the log; has no stages, links, model or clock.

Beside `tests/pure/test_core_*`, which use it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.core.acceptance import accept
from lockstep.core.arrivals import Delivery
from lockstep.core.layout import BatchLayout
from lockstep.core.ragged import Ragged
from lockstep.core.records import Admissions, NewBlocks, Ready, Rows, Side, Slots, StepPlan, StepResult
from lockstep.core.request import EngineRequest
from lockstep.core.scheduler import Scheduler, SchedulerConfig
from lockstep.core.schema import ADMITTED, MARK_TOKEN, column_array
from lockstep.core.table import SlotTable, TableShape

TOKEN = 7
"""What every draw of a `Loop` is, if nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """One admission of a plan. columns: any admitted column of the schema that shall differ from a greedy request's."""

    slot: int
    generation: int
    tokens: Sequence[int]
    cap: int
    computed: int = 0
    side: Side = field(default_factory=Side)
    columns: dict[str, Any] = field(default_factory=dict)
    mark: int = MARK_TOKEN

    def values(self) -> dict[str, Any]:
        greedy = {"seed": 0, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logprob_count": -1, "importing": 0}
        greedy |= {"prompt_logprob_count": -1, "prompt_logprob_start": 1}
        own = {
            "generation": self.generation,
            "known": len(self.tokens),
            "computed": self.computed,
            "prompt_length": len(self.tokens),
            "length_cap": self.cap,
            "side_hash": self.side.hash64(),
            "kv_salt": self.side.kv_salt(),
        }
        return {**greedy, **own, **self.columns}


@dataclass(frozen=True, slots=True)
class Row:
    slot: int
    generation: int
    count: int
    start: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """One row of a result."""

    slot: int
    generation: int
    tokens: Sequence[int]
    finish: int = 0
    drafts: Sequence[int] = ()


def make_plan(
    step: int,
    horizon: int,
    *,
    releases: Sequence[tuple[int, int]] = (),
    admits: Sequence[Admission] = (),
    ready: Sequence[tuple[int, int, int]] = (),
    blocks: Sequence[tuple[int, Sequence[int]]] = (),
    rows: Sequence[Row] = (),
) -> StepPlan:
    """releases: (slot, generation). ready: (slot, generation, computed). blocks: (slot, block numbers)."""
    values = [admission.values() for admission in admits]
    tokens = Ragged.of([admission.tokens for admission in admits])
    admissions = Admissions(
        slots=_int32(admission.slot for admission in admits),
        values={name: column_array(name, [value[name] for value in values]) for name in ADMITTED} if admits else {},
        tokens=tokens,
        marks=np.repeat(np.array([admission.mark for admission in admits], np.uint8), tokens.lengths()),
        sides=tuple(admission.side for admission in admits),
        transfers=(None,) * len(admits),
    )
    return StepPlan(
        epoch=0,
        step=step,
        horizon=horizon,
        releases=Slots(slots=_int32(r[0] for r in releases), generations=_int64(r[1] for r in releases)),
        admissions=admissions,
        ready=Ready(slots=_int32(r[0] for r in ready), generations=_int64(r[1] for r in ready), computed=_int32(r[2] for r in ready)),
        new_blocks=NewBlocks(slots=_int32(b[0] for b in blocks), groups=_int32(0 for _ in blocks), blocks=Ragged.of([b[1] for b in blocks])),
        rows=Rows(
            slots=_int32(r.slot for r in rows),
            generations=_int64(r.generation for r in rows),
            counts=_int32(r.count for r in rows),
            starts=_int32(r.start for r in rows),
            samples=_int32(r.samples for r in rows),
        ),
    )


def make_result(step: int, answers: Sequence[Answer] = ()) -> StepResult:
    return StepResult(
        epoch=0,
        step=step,
        slots=_int32(a.slot for a in answers),
        generations=_int64(a.generation for a in answers),
        tokens=Ragged.of([a.tokens for a in answers]),
        finishes=_int32(a.finish for a in answers),
        drafts=Ragged.of([a.drafts for a in answers]),
    )


def run_plan(table: SlotTable, plan: StepPlan) -> BatchLayout:
    """The order of work of one plan whose results are applied."""
    table.apply_plan(plan)
    layout = table.resolve(plan)
    table.note(layout)
    return layout


def make_request(name: str, prompt: Sequence[int], new: int, **changes: Any) -> EngineRequest:
    """A greedy request for `new` tokens after the prompt."""
    return EngineRequest(request_id=name, prompt=np.array(prompt, np.int32), length_cap=len(prompt) + new, **{"seed": 0, **changes})


def make_scheduler(**changes: Any) -> Scheduler:
    """Small: 4 slots, 16 tokens a step, one microbatch, asynchronous, 32 blocks of 4."""
    settings: dict[str, Any] = {
        "slot_count": 4,
        "token_budget": 16,
        "microbatch_count": 1,
        "asynchronous": True,
        "block_size": 4,
        "block_counts": (32,),
    }
    return Scheduler(SchedulerConfig(**{**settings, **changes}), prefix_secret=b"secret")


Draw = Callable[[int, int], int]
"""(generation, position) -> token."""

Propose = Callable[[int, int], Sequence[int]]
"""(generation, known tokens after this result) -> next drafts."""


def always_token(_generation: int, _position: int) -> int:
    return TOKEN


class Loop:
    """A scheduler and one replica. `plan` writes the next plan; `answer` resolves the oldest that is out and gives its result to the scheduler."""

    def __init__(self, scheduler: Scheduler, *, length_max: int = 64, draw: Draw = always_token, propose: Propose | None = None) -> None:
        c = scheduler.config
        self.scheduler = scheduler
        self.table = SlotTable(
            TableShape(slot_count=c.slot_count, length_max=length_max, block_size=c.block_size, drafts_max=c.drafts_max, windows=c.windows),
            poison=True,
        )
        self.plans: deque[StepPlan] = deque()
        self.layouts: list[BatchLayout] = []
        self.tokens: dict[str, list[int]] = {}
        self._results: dict[int, StepResult] = {}
        self._draw = draw
        self._propose = propose

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
        return plan

    def expect_plan(self) -> StepPlan:
        plan = self.plan()
        assert plan is not None, "a plan was expected"
        return plan

    def answer(self) -> list[Delivery]:
        layout = self._replay(self.plans.popleft())
        draws = [self._draw(int(layout.generation[row]), int(position)) for row, position in self._sampled(layout)]
        drafts = [] if self._propose is None else [self._propose(int(layout.generation[r]), int(layout.known[r])) for r in layout.sample_row]
        result = accept(layout, np.array(draws, np.int32), epoch=0, digests=np.zeros(1, np.uint64), drafts=drafts)
        self._results[result.step] = result
        deliveries = self.scheduler.receive(result)
        for delivery in deliveries:
            told = self.tokens.setdefault(delivery.request.spec.request_id, [])
            assert delivery.index == len(told), (delivery.index, told)
            told.extend(delivery.tokens)
        return deliveries

    def _replay(self, plan: StepPlan) -> BatchLayout:
        while self.table.applied < plan.horizon:
            self.table.apply_result(self._results.pop(self.table.applied))
        self.layouts.append(run_plan(self.table, plan))
        return self.layouts[-1]

    @staticmethod
    def _sampled(layout: BatchLayout) -> Iterable[tuple[int, int]]:
        counts = np.diff(layout.sample_starts)
        return zip(np.repeat(layout.sample_row, counts).tolist(), layout.sampling.position.tolist(), strict=True)

    def run(self, turns_max: int = 2000) -> None:
        """Until idle. A loop that does not get there is stuck: AssertionError."""
        for _ in range(turns_max):
            while self.plan() is not None:
                pass
            if self.plans:
                self.answer()
            elif not self.scheduler.has_work:
                return
        raise AssertionError(f"stuck after {turns_max} turns with {self.scheduler.request_ids}")


def _int32(values: Iterable[Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([int(value) for value in values], np.int32)


def _int64(values: Iterable[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([int(value) for value in values], np.int64)
