"""How many KV blocks each pool gets, one a KV group: from what stages have room for, or from what was asked. Knows bytes and lengths; allocates
nothing."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import psutil

from lockstep.config import EngineConfig
from lockstep.core.blocks import held_blocks_most
from lockstep.core.scheduler import SchedulerConfig
from lockstep.core.types import ceil_div
from lockstep.errors import ConfigError
from lockstep.models.families import build_program
from lockstep.models.spec import ModelSpec
from lockstep.models.split import kv_bytes_per_block, weight_bytes
from lockstep.runtime.messages import StageHello

FREE_MEMORY_SHARE = 0.25
"""Part of the free memory that the KV pools of all stages on a machine take if nothing else is said."""


def scheduler_config(config: EngineConfig, windows: tuple[int, ...], block_counts: tuple[int, ...]) -> SchedulerConfig:
    """windows, block_counts: a KV group each."""
    return SchedulerConfig(
        slot_count=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        microbatch_count=config.microbatch_count,
        asynchronous=config.async_scheduling,
        block_size=config.block_size,
        block_counts=block_counts,
        windows=windows,
        prefix_caching=config.enable_prefix_caching,
        priorities=config.scheduling_policy == "priority",
    )


def blocks_needed(config: EngineConfig, windows: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Blocks of each group that one request of `length` tokens holds at most."""
    step_positions = scheduler_config(config, windows, tuple(1 for _ in windows)).step_positions
    return tuple(held_blocks_most(length, window, step_positions, config.block_size) for window in windows)


def longest_request(config: EngineConfig, spec: ModelSpec, splits: Sequence[range]) -> int:
    """The most tokens, at most the model's own window, of which every stage holds one request. Before anything is loaded: where memory is not said,
    weights are taken off what is free, and a tenth is left for whatever else comes. Raises ConfigError if not even two fit."""
    windows, dtype = spec.kv_windows, config.storage_dtype
    programs = [build_program(spec, own, embeds=not stage, samples=stage == len(splits) - 1) for stage, own in enumerate(splits)]
    sizes = [kv_bytes_per_block(program, config.kv_dtype, config.block_size, len(windows)) for program in programs]
    free = psutil.virtual_memory().available - sum(weight_bytes(program, dtype) for program in programs)
    memory = config.kv_cache_memory_bytes or int(0.9 * FREE_MEMORY_SHARE * max(0, free) / len(splits))

    def fits(length: int) -> bool:
        needed = blocks_needed(config, windows, length)
        if config.num_gpu_blocks_override is not None:
            return max(needed) <= config.num_gpu_blocks_override
        return all(sum(count * size for count, size in zip(needed, own, strict=True)) <= memory for own in sizes)

    longest = bisect.bisect_right(range(2, spec.window + 1), False, key=lambda length: not fits(length)) + 1
    if longest < 2:
        raise ConfigError(f"max_model_len auto: not even 2 tokens fit the KV pool ({memory} bytes a stage); raise kv_cache_memory_bytes")
    return longest


def scaled_counts(needed: Sequence[int], count: int) -> tuple[int, ...]:
    """Pools that as many requests fill together: `count` blocks of the group that a request needs most of, and of the others in proportion."""
    return tuple(ceil_div(count * own, max(needed)) for own in needed)


def choose_block_counts(config: EngineConfig, windows: tuple[int, ...], length: int, hellos: Sequence[StageHello]) -> tuple[int, ...]:
    """Blocks of each group's pool, set by the tightest stage and by what all slots could ever fill. length: the most tokens of a request. Raises
    ConfigError if one request could outgrow a pool."""
    needed = blocks_needed(config, windows, length)
    fitting, tightest = min((_fitting(needed, hello), hello.stage) for hello in hellos)
    count = config.num_gpu_blocks_override or min(fitting, config.max_num_seqs * max(needed))
    if count < max(needed):
        told = next(hello for hello in hellos if hello.stage == tightest)
        raise ConfigError(
            f"one request of max_model_len {length} tokens needs {max(needed)} blocks of {config.block_size}, the KV pool has {count} "
            f"(stage {tightest}: {told.kv_bytes_max} bytes, {sum(told.kv_block_bytes)} a block); raise kv_cache_memory_bytes or "
            f"num_gpu_blocks_override, or lower max_model_len to {count * config.block_size}"
        )
    return scaled_counts(needed, count)


def _fitting(needed: Sequence[int], hello: StageHello) -> int:
    """The most blocks of the group that a request needs most of, so that all pools together are within the stage's memory."""
    low, high = 0, hello.kv_bytes_max // max(1, min(size for size in hello.kv_block_bytes if size)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        total = sum(count * size for count, size in zip(scaled_counts(needed, middle), hello.kv_block_bytes, strict=True))
        low, high = (middle, high) if total <= hello.kv_bytes_max else (low, middle)
    return low
