"""The parts of which a rig, a transcript or a simulated engine is made, so that a mutant can take the place of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.core.acceptance import accept
from lockstep.core.provenance import Provenance
from lockstep.core.records import StepResult
from lockstep.core.scheduler import Scheduler
from lockstep.runtime.driver import Driver
from lockstep.runtime.stage import Stage
from lockstep.runtime.transport.numbers import LinkNumbers
from lockstep.sampling.shaper import Shaper
from lockstep.sim.rig import MakeStage, MakeTable, plain_table
from lockstep.sim.wires import End, NumberedEnd

Accept = Callable[..., StepResult]
"""`core.acceptance.accept`'s own signature."""

MakeScheduler = Callable[..., Scheduler]
"""`Scheduler`'s own signature."""

MakeDriver = Callable[..., Driver]
"""`Driver`'s own signature."""

MakeProvenance = Callable[..., Provenance]
"""`Provenance`'s own signature, and the stage that it is for."""

MakeNumbers = Callable[[int, int], LinkNumbers]
"""(destination, epoch) -> numbers of the links that lead there; -1 is the driver."""

MakeNumberedEnd = Callable[[int, LinkNumbers], End]
"""`NumberedEnd`'s own signature."""


def plain_provenance(block_count: int, block_size: int, group: int = 0, window: int = 0, *, stage: int) -> Provenance:
    assert stage >= 0, stage
    return Provenance(block_count, block_size, group, window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The real ones, unless a mutant says otherwise."""

    make_table: MakeTable = plain_table
    make_stage: MakeStage = Stage
    accept: Accept = accept
    make_scheduler: MakeScheduler = Scheduler
    make_driver: MakeDriver = Driver
    make_provenance: MakeProvenance = plain_provenance
    make_numbers: MakeNumbers = LinkNumbers
    make_end: MakeNumberedEnd = NumberedEnd
    make_shaper: Callable[[int], Shaper] = Shaper
