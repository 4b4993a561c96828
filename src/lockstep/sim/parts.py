"""The parts of which a rig or a transcript is made, so that a mutant can take the place of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.core.acceptance import accept
from lockstep.core.records import StepResult
from lockstep.runtime.stage import Stage
from lockstep.sim.rig import MakeStage, MakeTable, plain_table

Accept = Callable[..., StepResult]
"""`core.acceptance.accept`'s own signature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The real ones, unless a mutant says otherwise."""

    make_table: MakeTable = plain_table
    make_stage: MakeStage = Stage
    accept: Accept = accept
