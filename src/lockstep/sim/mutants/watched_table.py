"""`WatchedTable`: a table that knows which step it is at, so that mutants of it can say where they did otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.core.records import StepPlan, StepResult
from lockstep.core.table import SlotTable, TableShape
from lockstep.sim.mutants.mutant import UNSEEN


class WatchedTable(SlotTable):
    witness = UNSEEN

    def __init__(self, shape: TableShape, *, poison: bool = False) -> None:
        super().__init__(shape, poison=poison)
        self._at = (0, 0)

    def apply_result(self, result: StepResult) -> None:
        self._at = (result.epoch, self.next_step)
        super().apply_result(result)

    def apply_plan(self, plan: StepPlan) -> None:
        self._at = (plan.epoch, plan.step)
        super().apply_plan(plan)

    def did(self, otherwise: Any) -> None:
        """otherwise: one answer, or many of which one is enough."""
        if np.any(otherwise):
            self.witness.note(*self._at)
