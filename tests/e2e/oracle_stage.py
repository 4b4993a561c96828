"""A stage's process on the oracle model, which starts in a moment, for tests of what happens to processes.

python oracle_stage.py JSON FOLDER EPOCH INDEX PIPE

JSON: {"fault": what stage 1 does once, in step 3, if the process is started in an epoch within "from" .. "until"}. Faults: "hang" stands still in
compute, "error" raises what nobody foresees, and the process takes a while to end, "provenance" raises a ProvenanceError, "load" cannot load, "other"
loads another model; "heartbeat lost", "heartbeat damaged": the first one after that step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core.layout import BatchLayout
from lockstep.core.provenance import Provenance
from lockstep.core.table import SlotTable, TableShape
from lockstep.errors import CheckpointError, ProvenanceError
from lockstep.runtime.messages import Heartbeat, StageHello, StageReady, StageStart
from lockstep.runtime.stage import Stage
from lockstep.runtime.transport.frames import LinkWriter
from lockstep.runtime.transport.stage_process import run_stage_process
from lockstep.sim.rig import RigConfig, oracle_executors

FAULTY_STAGE, FAULTY_STEP = 1, 3
SLOW_END_S = 2.0
CONFIG = RigConfig(stage_count=3, block_count=64, length_max=128, slot_count=4)


class FaultyExecutor:
    """Has its fault once."""

    def __init__(self, inner: Any, fault: str) -> None:
        self._inner = inner
        self._fault = fault

    def execute(self, layout: BatchLayout, tensors: Mapping[str, Any]) -> Any:
        if layout.step == FAULTY_STEP:
            fault, self._fault = self._fault, ""
            if fault == "hang":
                time.sleep(3600)
            if fault == "error":
                raise ZeroDivisionError("by nought")
            if fault == "provenance":
                raise ProvenanceError("wrong tags", step=layout.step, concerned=[(int(layout.slot[0]), int(layout.generation[0]))])
        return self._inner.execute(layout, tensors)


class OracleParts:
    """Satisfies `StageParts`. model: what it says in the handshake."""

    def __init__(self, index: int, fault: str) -> None:
        self._index = index
        self._fault = fault
        self._executor = FaultyExecutor(oracle_executors(CONFIG)[index], fault)

    def hello(self) -> StageHello:
        return StageHello(
            stage=self._index,
            pid=0,
            agreement={"model": "another" if self._fault == "other" else "oracle"},
            layers=(self._index, self._index + 1),
            kv_block_bytes=(1,),
            weight_bytes=0,
            kv_bytes_max=CONFIG.block_count,
        )

    def build(self, start: StageStart) -> Stage:
        shape = TableShape(slot_count=CONFIG.slot_count, length_max=CONFIG.length_max, block_size=CONFIG.block_size, drafts_max=0)
        return Stage(
            index=self._index,
            count=CONFIG.stage_count,
            epoch=start.epoch,
            table=SlotTable(shape, poison=True),
            provenance=[Provenance(count, CONFIG.block_size) for count in start.block_counts],
            executor=self._executor,
        )

    def ready(self, epoch: int) -> StageReady:
        return StageReady(stage=self._index, epoch=epoch, kv_bytes=0, threads=1)


def break_heartbeat(fault: str) -> None:
    pack = LinkWriter.pack
    broken: list[Heartbeat] = []

    def pack_once_broken(self: LinkWriter, message: Any) -> list[Any]:
        parts = pack(self, message)
        if not isinstance(message, Heartbeat) or message.step < FAULTY_STEP or broken:
            return parts
        broken.append(message)
        if fault == "heartbeat lost":
            return pack(self, message)
        return [parts[0], bytes([parts[1][0] ^ 1]) + bytes(parts[1][1:]), *parts[2:]]

    LinkWriter.pack = pack_once_broken  # type: ignore[method-assign]


def main(settings: str, folder: str, epoch: str, index: str, pipe: str) -> int:
    told = json.loads(settings)
    fault = told["fault"] if int(index) == FAULTY_STAGE and told["from"] <= int(epoch) < told["until"] else ""

    if fault.startswith("heartbeat"):
        break_heartbeat(fault)

    def load() -> OracleParts:
        if fault == "load":
            raise CheckpointError("the file is damaged")
        return OracleParts(int(index), fault)

    try:
        return run_stage_process(folder=Path(folder), epoch=int(epoch), index=int(index), count=CONFIG.stage_count, load=load, parent_pipe=int(pipe))
    except ZeroDivisionError:
        time.sleep(SLOW_END_S)
        raise


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
