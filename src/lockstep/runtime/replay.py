"""`Replica`: the one way to run the log over a table. Driver and every stage hold one, and differ in nothing here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from lockstep.core.digest import Digest
from lockstep.core.layout import BatchLayout
from lockstep.core.records import Columns, StepPlan, StepResult, named
from lockstep.core.table import SlotTable
from lockstep.errors import LogError

FOLDED_KEPT = 64
"""Steps whose folded columns a replica keeps. More than plans are ever in flight, so that replicas that disagree about a step can be compared."""


def no_clock() -> float:
    return 0.0


class Replica:
    """Buffers results until a plan's horizon covers them. `run` applies exactly the results below the horizon, however many have come.
    checks: False folds nothing, so that every digest stays equal; to measure what the digest costs. clock: seconds, to time it."""

    def __init__(self, table: SlotTable, digest: Digest, *, checks: bool = True, clock: Callable[[], float] = no_clock) -> None:
        self.table = table
        self.digest = digest
        self.check_seconds = 0.0
        self._checks = checks
        self._clock = clock
        self._folded: deque[tuple[int, Columns]] = deque(maxlen=FOLDED_KEPT)
        self._results: dict[int, StepResult] = {}

    def offer(self, result: StepResult) -> None:
        """Keep a result until its turn. Each comes once, and in order."""
        if result.step < self.table.applied or result.step in self._results:
            raise LogError(f"result of step {result.step} came twice")
        if result.step != self.table.applied + len(self._results):
            raise LogError(f"result of step {self.table.applied + len(self._results)} comes next, got step {result.step}")
        self._results[result.step] = result

    def can_run(self, plan: StepPlan) -> bool:
        """All results below the plan's horizon are here. They come in order, so the last one tells."""
        return plan.horizon <= self.table.applied or plan.horizon - 1 in self._results

    def run(self, plan: StepPlan) -> BatchLayout:
        """PROTOCOL.md 1: results below the horizon, the plan, resolve, note; and fold all of it into the digest."""
        applied = []
        while self.table.applied < plan.horizon:
            result = self._results.pop(self.table.applied)
            self.table.apply_result(result)
            applied.append(result)
        self.table.apply_plan(plan)
        layout = self.table.resolve(plan)
        self.table.note(layout)
        if self._checks:
            began = self._clock()
            self._fold(plan, applied, layout)
            self.check_seconds += self._clock() - began
        return layout

    def _fold(self, plan: StepPlan, applied: Sequence[StepResult], layout: BatchLayout) -> None:
        columns = named("plan", plan.columns())
        for result in applied:
            columns |= named(f"result {result.step}", result.columns())
        columns |= named("layout", layout.columns())
        self.digest.fold(list(columns.values()))
        self._folded.append((plan.step, columns))

    def columns_of(self, step: int) -> Columns | None:
        """What the digest folded for this step, if it is one of the last FOLDED_KEPT."""
        return next((columns for at, columns in self._folded if at == step), None)

    @property
    def buffered(self) -> tuple[StepResult, ...]:
        """Results that no plan has needed yet, in order."""
        return tuple(self._results.values())

    @property
    def buffered_count(self) -> int:
        return len(self._results)
