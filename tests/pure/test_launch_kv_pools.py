"""How memory becomes blocks: with one KV group by division, with several in proportion to what a request holds of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.launch.kv_pools import blocks_needed, choose_block_counts, longest_request, scaled_counts
from lockstep.models.split import split_layers
from lockstep.runtime.messages import StageHello
from rig import tiny_spec

CONFIG = EngineConfig(model="m", max_num_seqs=8, max_num_batched_tokens=64, block_size=16)


def hello(memory: int, *block_bytes: int, stage: int = 0) -> StageHello:
    return StageHello(stage=stage, pid=1, agreement={}, layers=(0, 1), kv_block_bytes=block_bytes, weight_bytes=1, kv_bytes_max=memory)


@pytest.mark.parametrize("memory", [64 * 100, 64 * 100 + 99, 64 * 4000])
def test_one_group_gets_what_fits_and_no_more_than_all_slots_could_fill(memory: int) -> None:
    assert choose_block_counts(CONFIG, (0,), 1024, [hello(memory, 100), hello(memory * 2, 100, stage=1)]) == (min(memory // 100, 8 * 64),)


def test_tightest_stage_decides_also_where_it_has_no_layers_of_a_group() -> None:
    needed = blocks_needed(CONFIG, (0, 32), 1024)
    assert needed == (64, 8)  # 31 positions before the step, 64 + 2 in it
    counts = choose_block_counts(CONFIG, (0, 32), 1024, [hello(20_000, 100, 0), hello(10_000, 50, 50, stage=1)])
    assert counts == (177, 23)
    assert 177 * 50 + 23 * 50 <= 10_000 < 178 * 50 + 23 * 50


def test_group_with_a_window_makes_room_for_more_requests_than_one_that_keeps_all() -> None:
    """Half of the layers slide: their blocks cost next to nothing, so about twice as many requests of full length fit into the same memory."""
    both = choose_block_counts(CONFIG, (0, 32), 1024, [hello(40_000, 100, 100)])
    alone = choose_block_counts(CONFIG, (0,), 1024, [hello(40_000, 200)])
    assert both[0] / alone[0] > 1.75
    assert sum(both) * 100 <= 40_000


def test_pools_grow_together_and_each_holds_one_request_at_the_least() -> None:
    assert scaled_counts((64, 8), 64) == (64, 8)
    assert scaled_counts((64, 8), 65) == (65, 9)
    assert scaled_counts((64, 8, 3), 128) == (128, 16, 6)


def test_memory_that_one_request_could_outgrow_is_refused_with_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"1024 tokens needs 64 blocks of 16, the KV pool has 62 \(stage 1: 3500 bytes, 100 a block\)"):
        choose_block_counts(CONFIG, (0, 32), 1024, [hello(20_000, 100, 100), hello(3_500, 50, 50, stage=1)])


def test_block_count_that_was_asked_for_is_of_the_group_that_needs_most() -> None:
    asked = EngineConfig(model="m", max_num_seqs=8, max_num_batched_tokens=64, block_size=16, num_gpu_blocks_override=128)
    assert choose_block_counts(asked, (0, 32), 1024, [hello(1, 100, 100)]) == (128, 16)


GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 4,
    "sliding_window": 32,
    "query_pre_attn_scalar": 16,
    "sliding_window_pattern": 2,
}


@pytest.mark.parametrize("stages", [1, 2])
def test_longest_request_is_the_last_whose_blocks_fit_every_stage(stages: int) -> None:
    spec = tiny_spec(**GEMMA, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=4096)
    splits = split_layers(spec, stages, "bfloat16")
    config = EngineConfig(model="m", max_num_batched_tokens=64, block_size=16, kv_cache_memory_bytes=200_000, pipeline_parallel_size=stages)
    longest = longest_request(config, spec, splits)
    block = 2 * 2 * 16 * 16 * 2 * 4 // stages // 2  # keys and values of two heads of 16, 16 positions, two bytes, the stage's layers of one group
    assert 16 < longest < 4096
    for length, fits in ((longest, True), (longest + 1, False)):
        assert (sum(blocks_needed(config, spec.kv_windows, length)) * block <= 200_000) == fits
    assert longest_request(replace(config, kv_cache_memory_bytes=1 << 40), spec, splits) == 4096


def test_longest_request_goes_by_the_blocks_that_were_asked_for() -> None:
    spec = tiny_spec()
    asked = EngineConfig(model="m", block_size=16, num_gpu_blocks_override=9)
    assert longest_request(asked, spec, [range(4)]) == 144
    with pytest.raises(ConfigError, match="not even 2 tokens fit the KV pool"):
        longest_request(EngineConfig(model="m", kv_cache_memory_bytes=8), spec, [range(4)])


@pytest.mark.parametrize("value", ["auto", -1])
def test_auto_window_is_understood_and_no_other_text(value: object) -> None:
    assert EngineConfig(model="m", max_model_len=value).max_model_len == -1  # type: ignore[arg-type]
    for bad in ("automatic", 0, 1, -2, True, 2.5):
        with pytest.raises(ConfigError, match=r"max_model_len must be an integer from 2 to 67108864, 'auto' or -1"):
            EngineConfig(model="m", max_model_len=bad)  # type: ignore[arg-type]
