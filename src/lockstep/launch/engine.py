"""Puts scheduler, driver and stages together and starts the engine."""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import EngineConfig
from lockstep.core.scheduler import Scheduler, SchedulerConfig
from lockstep.core.table import SlotTable
from lockstep.errors import LockstepError
from lockstep.launch.model import ResolvedModel, resolve_model
from lockstep.launch.stages import PackedWeights, StageAssembly, choose_block_count, fingerprint, make_backend, table_shape
from lockstep.runtime.driver import Driver
from lockstep.runtime.engine import Engine
from lockstep.runtime.messages import StageHello, StageStart
from lockstep.runtime.requests import RequestFactory, RequestLimits, SeedSource
from lockstep.runtime.transport.cluster import Cluster
from lockstep.runtime.transport.local import LocalCluster
from lockstep.runtime.transport.process import ProcessCluster, Timeouts

_log = logging.getLogger("lockstep.launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """A started engine and what its clients need to know of it."""

    config: EngineConfig
    model: ResolvedModel
    engine: Engine
    cluster: Cluster
    factory: RequestFactory
    fingerprint: str

    def close(self) -> None:
        self.engine.close()


def launch_engine(
    config: EngineConfig,
    *,
    model: ResolvedModel | None = None,
    weights: PackedWeights | None = None,
    on_failure: Callable[[LockstepError], None] | None = None,
) -> RunningEngine:
    """Start an engine. model, weights: to share an opened model and its packed weights between engines of one process.
    Raises CallerError before anything runs, PeerError if a stage does not come up."""
    model = model or resolve_model(config)
    cluster: Cluster
    if config.in_processes:
        processes = _launch_processes(config, model)
        cluster, block_counts, numerics = processes, processes.block_counts, processes.hellos[0].agreement["numerics"]
    else:
        weights = weights or PackedWeights(make_backend(config), model)
        cluster, block_counts = _launch_local(config, model, weights)
        numerics = weights.backend.numerics
    try:
        return _start(config, model, cluster, block_counts, fingerprint(model, numerics), on_failure)
    except BaseException:
        cluster.close()
        raise


def _start(
    config: EngineConfig,
    model: ResolvedModel,
    cluster: Cluster,
    block_counts: tuple[int, ...],
    identity: str,
    on_failure: Callable[[LockstepError], None] | None,
) -> RunningEngine:
    driver = Driver(
        Scheduler(scheduler_config(config, block_counts), prefix_secret=secrets.token_bytes(32)),
        SlotTable(table_shape(config, model)),
        config.pipeline_parallel_size,
    )
    blocks, size = block_counts[0], config.block_size
    _log.info("%s: KV pool of %d blocks of %d tokens (%d tokens), %s", identity, blocks, size, blocks * size, cluster.describe())
    limits = RequestLimits(window=model.window, vocab_size=model.spec.vocab_size, eos_ids=model.eos_ids)
    return RunningEngine(
        config=config,
        model=model,
        engine=Engine(driver, cluster, queue_max=config.queue_max, on_failure=on_failure),
        cluster=cluster,
        factory=RequestFactory(limits, SeedSource(config.seed)),
        fingerprint=identity,
    )


def scheduler_config(config: EngineConfig, block_counts: tuple[int, ...]) -> SchedulerConfig:
    return SchedulerConfig(
        slot_count=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        microbatch_count=config.microbatch_count,
        asynchronous=config.async_scheduling,
        block_size=config.block_size,
        block_counts=block_counts,
        prefix_caching=config.enable_prefix_caching,
        priorities=config.scheduling_policy == "priority",
    )


def _launch_local(config: EngineConfig, model: ResolvedModel, weights: PackedWeights) -> tuple[LocalCluster, tuple[int, ...]]:
    assemblies = [StageAssembly(config, model, weights, index) for index in range(config.pipeline_parallel_size)]
    hellos = [assembly.hello() for assembly in assemblies]
    block_counts = choose_block_count(config, model, hellos)
    stages = [assembly.build(StageStart(epoch=0, block_counts=block_counts)) for assembly in assemblies]
    description: dict[str, object] = {
        "layers": [hello.layers for hello in hellos],
        "weight_bytes": [hello.weight_bytes for hello in hellos],
        "kv_bytes": [assembly.ready().kv_bytes for assembly in assemblies],
        "threads": [assembly.ready().threads for assembly in assemblies],
    }
    return LocalCluster(stages, description), block_counts


def _launch_processes(config: EngineConfig, model: ResolvedModel) -> ProcessCluster:
    settings = json.dumps(dataclasses.asdict(config))

    def command(folder: Path, index: int) -> Sequence[str]:
        """-P: what lies in the caller's current folder is not imported."""
        return [sys.executable, "-P", "-m", "lockstep.launch", settings, str(folder), str(index)]

    def choose(hellos: Sequence[StageHello]) -> tuple[int, ...]:
        return choose_block_count(config, model, hellos)

    timeouts = Timeouts(startup_s=config.startup_timeout_s, heartbeat_s=config.heartbeat_timeout_s, step_s=config.step_timeout_s)
    return ProcessCluster(stage_count=config.pipeline_parallel_size, command=command, choose_blocks=choose, timeouts=timeouts)
