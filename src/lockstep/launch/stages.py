"""Builds one stage: backend, program, packed weights, then KV and executor once the pool's size is agreed."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import psutil

from lockstep.config import EngineConfig
from lockstep.core.provenance import Provenance
from lockstep.core.scheduler import PROMPT_LOGPROBS_A_STEP
from lockstep.core.table import SlotTable, TableShape
from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.launch.grammars import vocabulary_of
from lockstep.launch.kv_pools import FREE_MEMORY_SHARE
from lockstep.launch.model import ResolvedModel
from lockstep.launch.processors import AGREEMENT, LoadedProcessors
from lockstep.launch.weights import WeightsShelf, open_named
from lockstep.models.families import WeightSource, weight_sources
from lockstep.models.split import kv_bytes_per_block
from lockstep.ops.backend import Backend, Executable, Limits, PackedWeight
from lockstep.ops.program import Program, Weight
from lockstep.runtime.executor import ProgramExecutor
from lockstep.runtime.messages import StageHello, StageReady, StageStart
from lockstep.runtime.stage import Stage
from lockstep.runtime.transport.codec import VERSION
from lockstep.sampling.grammar_shelf import GrammarShelf
from lockstep.weights import Checkpoint

ENGINE_NUMERICS = 1
"""Raised whenever the engine itself, not a kernel, gives other tokens than before for the same request."""


def make_backend(config: EngineConfig) -> Backend:
    if config.backend == "native":
        from lockstep.backends.native import NativeBackend

        return NativeBackend(instruction_set=config.instruction_set)
    try:
        from lockstep.backends.reference.backend import ReferenceBackend
    except ImportError:
        raise UnsupportedError("the reference backend needs torch, which is not installed; run: pip install 'lockstep-llm[torch]'") from None
    return ReferenceBackend()


class PackedWeights:
    """Weights in a backend's layout, each packed once. Only what a program names is read from the checkpoint."""

    def __init__(self, backend: Backend, model: ResolvedModel) -> None:
        self.backend = backend
        self._model = model
        self._packed: dict[tuple[str, bool], PackedWeight] = {}

    def of(self, program: Program) -> Mapping[str, PackedWeight]:
        """The weights of one stage's program."""
        sources = weight_sources(self._model.spec, program)
        return {name: self._pack(weight, sources[name]) for name, weight in program.weights.items()}

    def _pack(self, weight: Weight, source: WeightSource) -> PackedWeight:
        """A table that is only looked up has another layout than one that is also multiplied with, so they are two entries."""
        key = (weight.name, "matrix" in weight.roles)
        if key not in self._packed:
            values = source.computed if source.computed is not None else _joined(self._model.checkpoint, source, weight)
            self._packed[key] = self.backend.pack(weight, values.reshape(weight.rows, weight.columns), self._model.dtype)
        return self._packed[key]


def _joined(checkpoint: Checkpoint, source: WeightSource, weight: Weight) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The parts of a weight, one after the other, arranged. Raises CheckpointError if their shapes are not what the model's config says."""
    names, arranged = source.parts, source.arranged
    shapes = [checkpoint.shape(name) for name in names]
    if arranged is not None:
        right = all(shape == arranged.shape for shape in shapes)
    elif weight.roles == ("vector",):
        right = all(len(shape) == 1 for shape in shapes) and sum(shape[0] for shape in shapes) == weight.columns
    else:
        right = all(len(s) == 2 and s[1] == weight.columns for s in shapes) and sum(s[0] for s in shapes) == weight.rows
    if not right:
        wanted = f"{weight.columns} values" if weight.roles == ("vector",) else f"{weight.rows} rows of {weight.columns}"
        wanted = f"{arranged.shape} each" if arranged is not None else f"together {wanted}"
        raise CheckpointError(
            f"{checkpoint.path}: {', '.join(names)} have shapes {shapes}, expected {wanted}; the file is damaged or of another model"
        )
    parts = [checkpoint.read(name) for name in names]
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return joined if arranged is None else arranged.arrange(joined)


def table_shape(config: EngineConfig, model: ResolvedModel) -> TableShape:
    return TableShape(slot_count=config.max_num_seqs, length_max=model.window, block_size=config.block_size, windows=model.spec.kv_windows)


def fingerprint(model: ResolvedModel, kv_dtype: str, numerics: str) -> str:
    """Names weights, dtype, that of KV where it is another, kernel numerics and engine numerics: servers with one fingerprint give the same tokens
    for the same request and seed. It reads all bytes of the checkpoint, so the launching process alone makes it."""
    kv = "" if kv_dtype == model.dtype else f"-kv_{kv_dtype}"
    return f"ls{ENGINE_NUMERICS}-{model.checkpoint.fingerprint()[:12]}-{model.dtype}{kv}-{numerics}"


def outline(checkpoint: Checkpoint) -> str:
    """A hash of the checkpoint's config and of its tensors' names and shapes: what stages compare, each without reading another's layers."""
    parts = [repr(sorted((key, repr(value)) for key, value in checkpoint.config.items()))]
    parts += [f"{name} {checkpoint.shape(name)}" for name in sorted(checkpoint.names())]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


class StageAssembly:
    """Stage `index` over all its epochs: weights are packed now, KV is allocated when `build` is first told the pool's size, and both stay,
    until an epoch begins with other weights."""

    def __init__(self, config: EngineConfig, model: ResolvedModel, weights: PackedWeights, index: int) -> None:
        self._config = config
        self._model = model
        self._backend = weights.backend
        self._index = index
        self._program = model.program(index)
        self._weights = weights.of(self._program)
        self._executable: Executable | None = None
        self._held = ""
        self._shelf = WeightsShelf(self._load)
        self._loaded = LoadedProcessors(config, model)
        self._grammars = GrammarShelf(lambda: vocabulary_of(config, model), max(64, config.max_num_seqs)) if self._program.samples else None

    def hello(self) -> StageHello:
        layers = self._model.splits[self._index]
        return StageHello(
            stage=self._index,
            pid=os.getpid(),
            agreement={
                "engine": str(ENGINE_NUMERICS),
                "numerics": self._backend.numerics,
                "dtype": self._model.dtype,
                "kv_dtype": self._config.kv_dtype,
                "checkpoint": outline(self._model.checkpoint),
                "split": ",".join(str(len(layers)) for layers in self._model.splits),
                "block_size": str(self._config.block_size),
                "window": str(self._model.window),
                "slots": str(self._config.max_num_seqs),
                "wire": str(VERSION),
                AGREEMENT: self._loaded.identity,
            },
            layers=(layers.start, layers.stop),
            kv_block_bytes=kv_bytes_per_block(self._program, self._config.kv_dtype, self._config.block_size, len(self._model.spec.kv_windows)),
            weight_bytes=sum(weight.nbytes for weight in self._weights.values()),
            kv_bytes_max=self._config.kv_cache_memory_bytes
            or int(psutil.virtual_memory().available * FREE_MEMORY_SHARE / self._config.pipeline_parallel_size),
        )

    def build(self, start: StageStart) -> Stage:
        """The stage as it begins an epoch: table and tags are new, what the KV memory holds is void by that."""
        config = self._config
        if start.weights != self._held:
            self._weights, self._executable = self._shelf.of(start.weights), None
            self._held = start.weights
        self._shelf.forget()
        if self._executable is None:
            self._executable = self._compile(start.block_counts)
        layers = self._model.splits[self._index]
        return Stage(
            index=self._index,
            count=config.pipeline_parallel_size,
            epoch=start.epoch,
            table=SlotTable(table_shape(config, self._model)),
            provenance=[
                Provenance(count, config.block_size, group, window)
                for group, (count, window) in enumerate(zip(start.block_counts, self._model.spec.kv_windows, strict=True))
            ],
            executor=ProgramExecutor(self._program, self._executable, self._grammars, self._loaded.processors),
            grammars=self._grammars,
            weights=self._shelf,
            layers=layers,
            checks=config.runtime_checks,
            clock=time.perf_counter,
        )

    def _load(self, weights: str) -> Mapping[str, PackedWeight]:
        """In memory of its own, so that the former ones go as a whole."""
        checkpoint = open_named(weights, self._model) if weights else self._model.checkpoint
        return PackedWeights(make_backend(self._config), replace(self._model, checkpoint=checkpoint)).of(self._program)

    def _compile(self, block_counts: tuple[int, ...]) -> Executable:
        config = self._config
        limits = Limits(
            tokens_max=config.max_num_batched_tokens,
            rows_max=min(config.max_num_seqs, config.max_num_batched_tokens),
            samples_max=min(config.max_num_seqs, config.max_num_batched_tokens) + PROMPT_LOGPROBS_A_STEP,
            block_size=config.block_size,
            block_counts=block_counts,
            kv_dtype=config.kv_dtype,
        )
        return self._backend.compile(self._program, self._weights, self._model.dtype, limits, stage_threads(config))

    def ready(self, epoch: int) -> StageReady:
        kv_bytes = 0 if self._executable is None else self._executable.kv_bytes
        return StageReady(stage=self._index, epoch=epoch, kv_bytes=kv_bytes, threads=stage_threads(self._config))


def stage_threads(config: EngineConfig) -> int:
    """Threads of one stage: as asked, else its share of the cores this process may use."""
    if config.threads is not None:
        return config.threads
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // config.pipeline_parallel_size) if config.in_processes else cores
