"""Configs become specs, or are refused with the key or the name that is at fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.models.rope import inverse_frequencies
from lockstep.models.spec import RopeScaling, spec_from_config
from rig import tiny_config, tiny_spec

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


def test_every_size_is_read_from_its_own_key() -> None:
    spec = tiny_spec(head_dim=20, eos_token_id=[2, 7], bos_token_id=None, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.layer_count) == ("llama", 300, 64, 4)
    assert (spec.head_count, spec.kv_head_count, spec.head_dim, spec.ffn_size, spec.window) == (4, 2, 20, 160, 512)
    assert (spec.norm_eps, spec.rope_theta, spec.rope_scaling) == (1e-5, 10000.0, None)
    assert (spec.attention_bias, spec.mlp_bias, spec.tie_embeddings) == (True, True, True)
    assert (spec.bos_token_ids, spec.eos_token_ids) == ((), (2, 7))


def test_absent_head_sizes_follow_from_the_others() -> None:
    spec = tiny_spec(head_dim=None, num_key_value_heads=None)
    assert (spec.head_dim, spec.kv_head_count) == (16, 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items()}},
        {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    ],
    ids=["rope_scaling", "rope_scaling with type", "rope_parameters"],
)
def test_both_forms_of_rotary_settings_say_the_same(changes: dict[str, Any]) -> None:
    spec = tiny_spec(**changes)
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling == RopeScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_window=128)


def test_unknown_architecture_is_refused_by_name_with_those_supported() -> None:
    with pytest.raises(UnsupportedError, match=r"architecture GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, MistralForCausalLM"):
        tiny_spec(architectures=["GPT2LMHeadModel"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, "sliding_window 128"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_a_setting_that_changes_numbers_and_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        tiny_spec(**changes)


def test_sliding_window_as_wide_as_the_model_is_full_attention() -> None:
    assert tiny_spec(architectures=["MistralForCausalLM"], sliding_window=512) == tiny_spec()


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings"]
)
@pytest.mark.parametrize("value", [None, 0, -1, 1 << 40, 1.5, "8", True])
def test_a_missing_or_absurd_size_is_named(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{key} must be an integer"):
        tiny_spec(**{key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 0.5}, "rope_theta"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide"),
        ({"hidden_size": 65, "head_dim": None}, "hidden_size must be a multiple"),
        ({"eos_token_id": [2, 300]}, "eos_token_id"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"architectures": None}, "architectures"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": "llama3"}, "rope_parameters must be a mapping"),
    ],
)
def test_numbers_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(tiny_config(**changes))


def test_frequencies_fall_from_one_and_scaling_keeps_the_short_waves() -> None:
    plain, scaled = inverse_frequencies(tiny_spec()), inverse_frequencies(tiny_spec(rope_scaling=LLAMA3))
    assert plain.dtype == scaled.dtype == np.float32
    assert plain.shape == (8,)
    np.testing.assert_allclose(plain, 10000.0 ** (-np.arange(8) / 8), rtol=1e-6)
    waves = 2 * np.pi / plain
    assert (scaled[waves < 128 / 4] == plain[waves < 128 / 4]).all()
    assert (scaled[waves > 128] == plain[waves > 128] / np.float32(8.0)).all()
    between = (waves >= 128 / 4) & (waves <= 128)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
