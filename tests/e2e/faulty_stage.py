"""A stage's process that breaks itself once, on purpose: `python -m faulty_stage ...` in the place of `python -m lockstep.launch ...`.

The fault comes in LOCKSTEP_TEST_FAULT as JSON: {"kind": ..., "stage": ..., "step": ...}. It happens in epoch 0 alone.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

from lockstep.core.records import StepPlan, StepResult
from lockstep.launch.__main__ import main
from lockstep.launch.stages import StageAssembly
from lockstep.runtime.messages import Activations, StageStart
from lockstep.runtime.stage import DRIVER, Stage
from lockstep.runtime.transport.frames import LinkWriter, Part
from lockstep.runtime.transport.sockets import Outbox

FAULT: dict[str, Any] = json.loads(os.environ["LOCKSTEP_TEST_FAULT"])


def change_token(stage: Stage, slot: int) -> None:
    """The token that the slot's row reads next."""
    table = stage.table
    table.tokens[slot, table.columns["computed"][slot]] ^= 1


def change_block_table(stage: Stage, slot: int) -> None:
    """The slot's first block is another slot's."""
    blocks = stage.table.blocks[0]
    blocks[slot, 0] = blocks[(slot + 1) % 2, 0]


def change_owner(stage: Stage, slot: int) -> None:
    """The slot's first block holds the KV of another prefix: its tags are those of another slot's block."""
    mine, other = (stage.table.blocks[0, of, 0] for of in (slot, (slot + 1) % 2))
    for provenance in stage._provenance:
        provenance.tags[mine] = provenance.tags[other]
        provenance.block_tags[mine] = provenance.block_tags[other]


def change_seed(stage: Stage, slot: int) -> None:
    stage.table.columns["seed"][slot] += np.uint64(1)


STATE_FAULTS = {"token": change_token, "block table": change_block_table, "block owner": change_owner, "seed": change_seed}


class FaultyAssembly(StageAssembly):
    """Changes the stage's state for the first row of the step, right before that is resolved."""

    def build(self, start: StageStart) -> Stage:
        stage = super().build(start)
        change = STATE_FAULTS.get(FAULT["kind"])
        if start.epoch > 0 or stage.index != FAULT["stage"] or change is None:
            return stage
        apply_plan = stage.table.apply_plan

        def apply_and_break(plan: StepPlan) -> None:
            apply_plan(plan)
            if plan.step == FAULT["step"]:
                change(stage, int(plan.rows.slots[0]))

        stage.table.apply_plan = apply_and_break  # type: ignore[method-assign]
        return stage


class DamagingWriter(LinkWriter):
    """One byte of the step's activations changes after the checksum was taken."""

    def pack(self, message: Any) -> list[Part]:
        parts = super().pack(message)
        if isinstance(message, Activations) and message.epoch == 0 and message.step == FAULT["step"]:
            damaged = bytearray(parts[-1])
            damaged[len(damaged) // 2] ^= 1
            parts[-1] = memoryview(damaged)
        return parts


class LosingOutbox(Outbox):
    """The result of the step is numbered and never sent to `to`."""

    def __init__(self, context: Any, folder: Any, source: int, receiver: int, **others: Any) -> None:
        super().__init__(context, folder, source, receiver, **others)
        self._loses = receiver == {"driver": DRIVER, "stage 0": 0}.get(FAULT.get("to", ""), -2)

    def send(self, message: Any) -> None:
        if self._loses and isinstance(message, StepResult) and message.epoch == 0 and message.step == FAULT["step"]:
            self._writer.pack(message)
        else:
            super().send(message)


if __name__ == "__main__":
    import lockstep.runtime.transport.sockets as sockets_module
    import lockstep.runtime.transport.stage_process as stage_process_module

    if FAULT["kind"] == "activation byte":
        sockets_module.LinkWriter = DamagingWriter  # type: ignore[misc]
    if FAULT["kind"] == "lost result":
        stage_process_module.Outbox = LosingOutbox  # type: ignore[misc]
    sys.exit(main(sys.argv[1:], assembly=FaultyAssembly))
