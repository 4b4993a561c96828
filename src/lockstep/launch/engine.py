"""Puts scheduler, driver and stages together and starts the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import EngineConfig
from lockstep.core.scheduler import Scheduler
from lockstep.core.table import SlotTable
from lockstep.errors import LockstepError
from lockstep.launch.grammars import GrammarChecker
from lockstep.launch.kv_pools import choose_block_counts, scheduler_config
from lockstep.launch.model import ResolvedModel, find_checkpoint, resolve_model, stage_config
from lockstep.launch.processors import AGREEMENT, LoadedProcessors
from lockstep.launch.recordings import check_folder, make_recording_folder
from lockstep.launch.stages import PackedWeights, StageAssembly, fingerprint, make_backend, table_shape
from lockstep.launch.weights import named, open_alike
from lockstep.runtime.driver import Driver
from lockstep.runtime.engine import Engine
from lockstep.runtime.loop import RestartPolicy
from lockstep.runtime.messages import StageHello, StageStart
from lockstep.runtime.recorder import Recorder
from lockstep.runtime.requests import RequestFactory, RequestLimits, SeedSource
from lockstep.runtime.stage import Stage
from lockstep.runtime.transport.cluster import Cluster
from lockstep.runtime.transport.local import LocalCluster
from lockstep.runtime.transport.process import ProcessCluster
from lockstep.runtime.transport.watch import Timeouts
from lockstep.sampling.processor_set import ProcessorSet

RESTART_WINDOW_S = 600.0
"""`max_restarts` is of failures within the last ten minutes."""

STAGE_MODULE = "lockstep.launch"

_log = logging.getLogger("lockstep.launch")


@dataclass(slots=True, kw_only=True)
class RunningEngine:
    """A started engine and what its clients need to know of it. model: its checkpoint is the one that is computed with; the tokenizer stays that of
    the first. fingerprint: of what is computed with now; identify: of a model's checkpoint."""

    config: EngineConfig
    model: ResolvedModel
    engine: Engine
    cluster: Cluster
    factory: RequestFactory
    fingerprint: str
    identify: Callable[[ResolvedModel], str]
    checker: GrammarChecker
    recorder: Recorder | None = None

    def update_weights(self, name: str) -> Future[None]:
        """Compute with the weights of another checkpoint of the same model: a folder, .gguf file or Hugging Face name. The prefix cache is empty
        then, and the fingerprint another. All is read once here, and by every stage beside its work, in memory of its own. Raises CheckpointError or
        UnsupportedError, and changes nothing, for one that does not fit; the future fails with one if a stage cannot load it."""
        path = find_checkpoint(self.config, name)
        model = dataclasses.replace(self.model, checkpoint=open_alike(path, self.model))
        identity = self.identify(model)

        def then() -> None:
            self.model, self.fingerprint = model, identity
            if self.recorder is not None:
                self.recorder.fingerprint = identity

        return self.engine.update_weights(named(model.checkpoint), then)

    def close(self) -> None:
        self.engine.close()
        self.checker.close()


async def update_weights(running: RunningEngine, name: str) -> None:
    """`RunningEngine.update_weights` for an event loop, which goes on meanwhile."""
    await asyncio.wrap_future(await asyncio.to_thread(running.update_weights, name))


def launch_engine(
    config: EngineConfig,
    *,
    model: ResolvedModel | None = None,
    weights: PackedWeights | None = None,
    on_failure: Callable[[LockstepError], None] | None = None,
    stage_module: str = STAGE_MODULE,
    stage_environment: Mapping[str, str] | None = None,
) -> RunningEngine:
    """Start an engine. model, weights: to share an opened model and its packed weights between engines of one process. stage_module: what Python runs
    as a stage's process, stage_environment: its whole environment, None is this process's own. Tests that break a stage pass theirs.
    Raises CallerError before anything runs, PeerError if a stage does not come up."""
    model, folder = model or resolve_model(config), check_folder(config)
    loaded = LoadedProcessors(config, model)
    cluster: Cluster
    if config.in_processes:
        processes = _launch_processes(config, model, stage_module, stage_environment)
        cluster, block_counts, agreement = processes, processes.block_counts, processes.hellos[0].agreement
    else:
        weights = weights or PackedWeights(make_backend(config), model)
        cluster, block_counts = _launch_local(config, model, weights)
        agreement = {"numerics": weights.backend.numerics, AGREEMENT: loaded.identity}
    try:
        loaded.check(agreement)

        def identify(held: ResolvedModel) -> str:
            return fingerprint(held, config.kv_dtype, agreement["numerics"]) + loaded.suffix

        return _start(config, model, cluster, block_counts, folder, identify, loaded.processors, on_failure)
    except BaseException:
        cluster.close()
        raise


def _start(
    config: EngineConfig,
    model: ResolvedModel,
    cluster: Cluster,
    block_counts: tuple[int, ...],
    folder: Path | None,
    identify: Callable[[ResolvedModel], str],
    processors: ProcessorSet,
    on_failure: Callable[[LockstepError], None] | None,
) -> RunningEngine:
    identity = identify(model)
    shape, recordings = table_shape(config, model), make_recording_folder(config, folder, identity)
    driver = Driver(
        Scheduler(scheduler_config(config, model.spec.kv_windows, block_counts), prefix_secret=secrets.token_bytes(32)),
        lambda: SlotTable(shape),
        config.pipeline_parallel_size,
        recorder=None if recordings is None else recordings.recorder,
        checks=config.runtime_checks,
        clock=time.perf_counter,
    )
    restarts = RestartPolicy(most=config.max_restarts, window_s=RESTART_WINDOW_S, backoff_s=config.restart_backoff_s)
    pools = ", ".join(_described(*pool, config.block_size) for pool in zip(block_counts, model.spec.kv_windows, strict=True))
    _log.info("%s: KV pool of %s, %s", identity, pools, cluster.describe())
    checker = GrammarChecker(config, model)
    limits = RequestLimits(window=model.window, vocab_size=model.spec.vocab_size, eos_ids=model.eos_ids)
    return RunningEngine(
        config=config,
        model=model,
        engine=Engine(driver, cluster, queue_max=config.queue_max, restarts=restarts, dumper=recordings, on_failure=on_failure),
        cluster=cluster,
        factory=RequestFactory(limits, SeedSource(config.seed), checker, processors),
        checker=checker,
        fingerprint=identity,
        identify=identify,
        recorder=None if recordings is None else recordings.recorder,
    )


def _described(blocks: int, window: int, size: int) -> str:
    return f"{blocks} blocks of {size} tokens ({blocks * size} tokens{f', window {window}' if window else ''})"


def _launch_local(config: EngineConfig, model: ResolvedModel, weights: PackedWeights) -> tuple[LocalCluster, tuple[int, ...]]:
    assemblies = [StageAssembly(config, model, weights, index) for index in range(config.pipeline_parallel_size)]
    hellos = [assembly.hello() for assembly in assemblies]
    block_counts = choose_block_counts(config, model.spec.kv_windows, model.window, hellos)

    chosen = [""]

    def make_stages(epoch: int) -> Sequence[Stage]:
        return [assembly.build(StageStart(epoch=epoch, block_counts=block_counts, weights=chosen[0])) for assembly in assemblies]

    def use_weights(weights: str) -> None:
        chosen[0] = weights

    def describe() -> dict[str, object]:
        ready = [assembly.ready(0) for assembly in assemblies]
        return {
            "layers": [hello.layers for hello in hellos],
            "weight_bytes": [hello.weight_bytes for hello in hellos],
            "kv_bytes": [stage.kv_bytes for stage in ready],
            "threads": [stage.threads for stage in ready],
        }

    return LocalCluster(make_stages, describe, use_weights=use_weights, checks=config.runtime_checks), block_counts


def _launch_processes(config: EngineConfig, model: ResolvedModel, stage_module: str, stage_environment: Mapping[str, str] | None) -> ProcessCluster:
    settings = json.dumps(dataclasses.asdict(stage_config(config, model)))

    def command(folder: Path, epoch: int, index: int) -> Sequence[str]:
        """-P: what lies in the caller's current folder is not imported."""
        return [sys.executable, "-P", "-m", stage_module, settings, str(folder), str(epoch), str(index)]

    def choose(hellos: Sequence[StageHello]) -> tuple[int, ...]:
        return choose_block_counts(config, model.spec.kv_windows, model.window, hellos)

    return ProcessCluster(
        stage_count=config.pipeline_parallel_size,
        command=command,
        choose_blocks=choose,
        timeouts=Timeouts(startup_s=config.startup_timeout_s, heartbeat_s=config.heartbeat_timeout_s, step_s=config.step_timeout_s),
        environment=stage_environment,
        checks=config.runtime_checks,
    )
