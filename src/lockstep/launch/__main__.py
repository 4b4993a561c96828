"""The entry of a stage's process: `python -m lockstep.launch CONFIG FOLDER EPOCH INDEX PIPE`. Started by `ProcessCluster`, not by people."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from lockstep.config import EngineConfig
from lockstep.launch.model import ResolvedModel, resolve_model
from lockstep.launch.stages import PackedWeights, StageAssembly, make_backend
from lockstep.runtime.transport.stage_process import StageParts, run_stage_process

MakeParts = Callable[[EngineConfig, ResolvedModel, PackedWeights, int], StageParts]


def main(arguments: list[str], *, assembly: MakeParts = StageAssembly) -> int:
    """assembly: what builds the stage. Tests that break a stage on purpose run a module of their own, which calls this with another one."""
    settings, folder, epoch, index, pipe = arguments
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # both may reach the whole process group; the parent drains, and decides when stages end
    config = EngineConfig(**json.loads(settings))

    def load() -> StageParts:
        model = resolve_model(config)
        return assembly(config, model, PackedWeights(make_backend(config), model), int(index))

    return run_stage_process(
        folder=Path(folder),
        epoch=int(epoch),
        index=int(index),
        count=config.pipeline_parallel_size,
        load=load,
        parent_pipe=int(pipe),
        checks=config.runtime_checks,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
