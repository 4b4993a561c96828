"""The split over stages: explicit, automatic, and what it weighs."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.models.families import build_program
from lockstep.models.spec import ModelSpec
from lockstep.models.split import kv_bytes_per_block, layer_weight_bytes, parse_split, split_layers, weight_bytes
from lockstep.ops.backend import DType
from rig import tiny_spec


def held_bytes(spec: ModelSpec, split: tuple[range, ...], dtype: DType) -> list[int]:
    """Weight bytes of each stage, from its own program."""
    last = len(split) - 1
    return [weight_bytes(build_program(spec, layers, embeds=index == 0, samples=index == last), dtype) for index, layers in enumerate(split)]


def every_split(layer_count: int, stage_count: int) -> list[tuple[range, ...]]:
    cuts = combinations(range(1, layer_count), stage_count - 1)
    return [tuple(range(start, stop) for start, stop in pairwise((0, *inner, layer_count))) for inner in cuts]


@given(
    layer_count=st.integers(1, 9),
    stage_count=st.integers(1, 4),
    vocab_size=st.integers(8, 3000),
    tied=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_no_split_has_a_smaller_largest_stage(layer_count: int, stage_count: int, vocab_size: int, tied: bool, dtype: DType) -> None:
    if stage_count > layer_count:
        return
    spec = tiny_spec(num_hidden_layers=layer_count, vocab_size=vocab_size, tie_word_embeddings=tied)
    split = split_layers(spec, stage_count, dtype)
    best = min(max(held_bytes(spec, other, dtype)) for other in every_split(layer_count, stage_count))
    assert max(held_bytes(spec, split, dtype)) == best
    assert split in every_split(layer_count, stage_count)


def test_embedding_and_head_take_the_place_of_layers() -> None:
    spec = tiny_spec(num_hidden_layers=12, vocab_size=6500)
    assert [len(layers) for layers in split_layers(spec, 3, "bfloat16")] == [1, 10, 1]
    small = tiny_spec(num_hidden_layers=12, vocab_size=8)
    assert [len(layers) for layers in split_layers(small, 3, "bfloat16")] == [4, 4, 4]


def test_a_tie_goes_to_the_earlier_stage() -> None:
    spec = tiny_spec(num_hidden_layers=7, vocab_size=6500)
    assert [len(layers) for layers in split_layers(spec, 4, "bfloat16")] == [1, 3, 2, 1]


def test_weight_bytes_are_those_of_matrices_in_the_dtype_and_vectors_in_float32() -> None:
    spec = tiny_spec(attention_bias=True)
    matrices = 64 * (64 + 2 * 32) + 64 * 64 + 2 * 160 * 64 + 64 * 160
    vectors = 2 * 64 + (64 + 2 * 32) + 64
    assert layer_weight_bytes(spec, "float32") == 4 * matrices + 4 * vectors
    assert layer_weight_bytes(spec, "bfloat16") == 2 * matrices + 4 * vectors


def test_tied_table_counts_once_on_a_stage_that_does_both() -> None:
    tied, untied = (build_program(tiny_spec(tie_word_embeddings=tie), range(4), embeds=True, samples=True) for tie in (True, False))
    assert weight_bytes(untied, "bfloat16") - weight_bytes(tied, "bfloat16") == 2 * 300 * 64


def test_kv_bytes_per_block_count_keys_and_values_of_the_stage_s_layers() -> None:
    program = build_program(tiny_spec(), range(1, 4), embeds=False, samples=False)
    assert kv_bytes_per_block(program, "bfloat16", 16, 1) == (3 * 2 * 2 * 16 * 16 * 2,)
    assert kv_bytes_per_block(program, "int8", 16, 1) == (3 * 2 * 2 * 16 * (16 + 4),)
    assert kv_bytes_per_block(program, "float32", 16, 2) == (3 * 2 * 2 * 16 * 16 * 4, 0)


def test_explicit_split_is_taken_as_written() -> None:
    assert parse_split("10, 12,8", 30) == (range(10), range(10, 22), range(22, 30))


def test_explicit_split_of_another_sum_names_both_sums() -> None:
    with pytest.raises(ConfigError, match="adds up to 29 layers, the model has 30"):
        parse_split("10,12,7", 30)


@pytest.mark.parametrize("text", ["", "10,,20", "10,-1,21", "0,30", "10;20", "3.0,27"])
def test_malformed_split_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="positive integers separated by commas"):
        parse_split(text, 30)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 pipeline stages need at least 5 layers, the model has 4"):
        split_layers(tiny_spec(), 5, "float32")
    with pytest.raises(ConfigError, match="5 pipeline stages need at least 5 layers, the model has 4"):
        parse_split("1,1,1,1,1", 4)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        split_layers(tiny_spec(), 0, "float32")


@pytest.mark.parametrize("stage_count", [1, 2, 3, 4])
def test_layers_with_experts_weigh_more_and_are_spread_by_it(stage_count: int) -> None:
    """The largest stage is as small as any contiguous split could make it."""
    mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0, 1, 2, 3, 4]}
    spec = tiny_spec(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=9, **mixture)
    assert layer_weight_bytes(spec, "float32", 8) > 2 * layer_weight_bytes(spec, "float32", 0)
    best = min(max(held_bytes(spec, split, "float32")) for split in every_split(9, stage_count))
    assert max(held_bytes(spec, split_layers(spec, stage_count, "float32"), "float32")) == best
