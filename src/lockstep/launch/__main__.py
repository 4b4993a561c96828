"""The entry of a stage's process: `python -m lockstep.launch CONFIG FOLDER INDEX PIPE`. Started by `ProcessCluster`; not a command for people."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from lockstep.config import EngineConfig
from lockstep.launch.model import resolve_model
from lockstep.launch.stages import PackedWeights, StageAssembly, make_backend
from lockstep.runtime.transport.stage_process import run_stage_process


def main(arguments: list[str]) -> int:
    settings, folder, index, pipe = arguments
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # both may reach the whole process group; the parent drains, and decides when stages end
    config = EngineConfig(**json.loads(settings))

    def load() -> StageAssembly:
        model = resolve_model(config)
        return StageAssembly(config, model, PackedWeights(make_backend(config), model), int(index))

    return run_stage_process(folder=Path(folder), index=int(index), count=config.pipeline_parallel_size, load=load, parent_pipe=int(pipe))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
