"""Configs become specs, or are refused with the key or the name that is at fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.models.rope import LinearScaling, Llama3Scaling, LongScaling, Rope, inverse_frequencies
from lockstep.models.spec import ARCHITECTURES, Latent, ModelSpec, spec_from_config
from rig import tiny_config, tiny_spec

QWEN_WINDOWS: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
GEMMA3: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "hidden_act": None, "sliding_window": 64, "rope_theta": 1e6}
PHI3: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"]}
LONG: dict[str, Any] = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


def test_every_size_is_read_from_its_own_key() -> None:
    spec = tiny_spec(head_dim=20, eos_token_id=[2, 7], bos_token_id=None, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.layer_count) == ("llama", 300, 64, 4)
    assert (spec.head_count, spec.kv_head_count, spec.head_dim, spec.ffn_size, spec.window) == (4, 2, 20, 160, 512)
    assert (spec.norm_eps, spec.ropes) == (1e-5, (Rope(theta=10000.0, width=20),))
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.tie_embeddings) == (True, True, True, True)
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
    scaling = Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_window=128)
    assert spec.ropes == (Rope(theta=5e5, width=16, scaling=scaling),)


def test_unknown_architecture_is_refused_by_name_with_those_supported() -> None:
    with pytest.raises(UnsupportedError, match=r"architecture GPT2LMHeadModel is not supported; supported are (.*)") as caught:
        tiny_spec(architectures=["GPT2LMHeadModel"])
    assert all(name in str(caught.value) for name in ARCHITECTURES)


GPT_OSS: dict[str, Any] = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "sliding_window": 8}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "head_dim": None,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rotary scaling 'dynamic'"),
        ({**DEEPSEEK, "scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ({**DEEPSEEK, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ({**DEEPSEEK, "norm_topk_prob": True}, "norm_topk_prob"),
        ({**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({**DEEPSEEK, "attention_bias": True}, "attention_bias"),
        ({**DEEPSEEK, "kv_lora_rank": 96}, "multiples of 64"),
        ({**DEEPSEEK, "kv_lora_rank": 1024}, "at most 1024"),
        ({**GPT_OSS, "swiglu_limit": 10.0}, "swiglu_limit 10.0"),
        ({**GPT_OSS, "intermediate_size": 80}, "width 80"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5, "architectures": ["Qwen2ForCausalLM"]}, "partial_rotary_factor"),
        ({"sliding_window": 128}, "sliding_window 128"),
        ({**QWEN_WINDOWS, "layer_types": ["full_attention", "chunked_attention"] * 2}, "layer type 'chunked_attention'"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA3, "hidden_activation": "relu"}, "hidden_activation 'relu'"),
    ],
)
def test_a_setting_that_changes_numbers_and_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        tiny_spec(**changes)


def windows(spec: ModelSpec) -> list[int]:
    return [layer.sliding_window for layer in spec.layers]


def test_sliding_window_as_wide_as_the_model_is_full_attention() -> None:
    assert tiny_spec(architectures=["MistralForCausalLM"], sliding_window=512) == tiny_spec()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, [128, 128, 128, 128]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, [0, 0, 0, 0]),
        (QWEN_WINDOWS, [0, 0, 0, 64]),
        (QWEN_WINDOWS | {"max_window_layers": 0}, [64, 64, 64, 64]),
        (QWEN_WINDOWS | {"use_sliding_window": False}, [0, 0, 0, 0]),
        (QWEN_WINDOWS | {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"] * 2}, [64, 0, 64, 0]),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 32}, [32, 0, 32, 0]),
        (GEMMA3 | {"num_hidden_layers": 7}, [64, 64, 64, 64, 64, 0, 64]),
        (GEMMA3 | {"sliding_window_pattern": 3}, [64, 64, 0, 64]),
        (PHI3 | {"sliding_window": 100}, [100, 100, 100, 100]),
        (PHI3, [0, 0, 0, 0]),
    ],
)
def test_layers_slide_where_their_architecture_says_so(changes: dict[str, Any], expected: list[int]) -> None:
    assert windows(tiny_spec(**changes)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_theta": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ],
    ids=["older form", "rope_parameters"],
)
def test_gemma_3_has_a_rope_for_each_kind_of_layer(changes: dict[str, Any]) -> None:
    spec = tiny_spec(**{**GEMMA3, "sliding_window_pattern": 2, **changes})
    near, far = Rope(theta=2e4, width=16), Rope(theta=1e6, width=16, scaling=LinearScaling(factor=8.0))
    assert [layer.rope for layer in spec.layers] == [near, far, near, far]
    assert spec.ropes == (near, far)


def test_gemma_s_constants_are_those_of_its_class_where_the_config_leaves_them_out() -> None:
    second = tiny_spec(architectures=["Gemma2ForCausalLM"], tie_word_embeddings=None)
    assert (second.attention_soft_cap, second.logit_soft_cap, second.attention_scale, second.embedding_scale) == (50.0, 30.0, 1 / 16, 8.0)
    assert (second.norm_offset, second.activation, second.head_norms) == (1.0, "gelu_tanh", False)
    third = tiny_spec(**GEMMA3, query_pre_attn_scalar=4)
    assert (third.attention_soft_cap, third.logit_soft_cap, third.attention_scale, third.head_norms) == (0.0, 0.0, 0.5, True)
    left_out = tiny_config(**GEMMA3)
    del left_out["tie_word_embeddings"]
    assert spec_from_config(left_out).tie_embeddings


EXPERTS = {
    "num_local_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}


@pytest.mark.parametrize(
    ("name", "changes", "layers", "renormalise", "shared"),
    [
        ("MixtralForCausalLM", {}, {0, 1, 2, 3}, True, 0),
        ("Qwen2MoeForCausalLM", {}, {0, 1, 2, 3}, False, 96),
        ("Qwen2MoeForCausalLM", {"decoder_sparse_step": 2}, {1, 3}, False, 96),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": True, "mlp_only_layers": [0, 3]}, {1, 2}, True, 0),
        ("LlamaForCausalLM", {}, set(), False, 0),
    ],
)
def test_which_layers_have_experts_and_how_they_are_weighed(
    name: str, changes: dict[str, object], layers: set[int], renormalise: bool, shared: int
) -> None:
    spec = tiny_spec(architectures=[name], **{**EXPERTS, **changes})
    assert spec.expert_layers == layers
    assert (spec.experts is not None) == bool(layers)
    if spec.experts is not None:
        assert (spec.experts.count, spec.experts.top_k, spec.experts.renormalise, spec.experts.shared_ffn_size) == (8, 2, renormalise, shared)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"num_experts": None}, CheckpointError, "num_experts"),
        ({"num_experts_per_tok": 9}, CheckpointError, "9 of 8"),
        ({"num_experts": 1 << 20}, CheckpointError, "num_experts"),
        ({"mlp_only_layers": "all"}, CheckpointError, "mlp_only_layers"),
        ({"moe_intermediate_size": 40}, UnsupportedError, "multiples of 32"),
    ],
)
def test_experts_that_make_no_sense_are_refused_by_name(changes: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tiny_spec(architectures=["Qwen3MoeForCausalLM"], **{**EXPERTS, **changes})


def test_biases_are_those_that_the_architecture_has() -> None:
    on = {"attention_bias": True, "mlp_bias": True, **EXPERTS}
    found = {
        name: tiny_spec(architectures=[name], sliding_window=8 if "Gemma" in name or "Oss" in name else None, **on)
        for name in ARCHITECTURES
        if "Deepseek" not in name
    }
    assert {name: (spec.qkv_bias, spec.output_bias, spec.mlp_bias) for name, spec in found.items()} == {
        "LlamaForCausalLM": (True, True, True),
        "MistralForCausalLM": (False, False, False),
        "Qwen2ForCausalLM": (True, False, False),
        "Qwen3ForCausalLM": (True, True, False),
        "MixtralForCausalLM": (False, False, False),
        "Qwen2MoeForCausalLM": (True, False, False),
        "Qwen3MoeForCausalLM": (True, True, False),
        "Phi3ForCausalLM": (False, False, False),
        "Gemma2ForCausalLM": (True, True, False),
        "Gemma3ForCausalLM": (True, True, False),
        "GptOssForCausalLM": (True, True, False),
    }
    assert tiny_spec(architectures=["Qwen2ForCausalLM"]).qkv_bias


def test_latent_attention_keeps_one_narrow_key_a_position() -> None:
    spec = tiny_spec(**DEEPSEEK, kv_lora_rank=128, qk_rope_head_dim=16, qk_nope_head_dim=48, q_lora_rank=None)
    assert spec.latent == Latent(kv_rank=128, rope_width=16, plain_width=48, value_width=128, query_rank=0, interleaved=True)
    assert (spec.kv_head_count, spec.head_dim, spec.attention_scale) == (1, 144, 64**-0.5)
    assert spec.expert_layers == {0, 1, 2, 3}
    third = tiny_spec(**{**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "topk_group": 2, "rope_interleave": False})
    assert third.expert_layers == {3}
    assert third.latent is not None
    assert not third.latent.interleaved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3, "topk_method": "group_limited_greedy"}, "n_group 3"),
        ({"n_group": 4, "topk_group": 5, "topk_method": "group_limited_greedy"}, "topk_group 5"),
        ({"n_group": 8, "topk_group": 1, "topk_method": "group_limited_greedy"}, "takes 2"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 2.0}}, "beta_fast"),
    ],
)
def test_numbers_of_deepseek_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        tiny_spec(**DEEPSEEK, **changes)


def test_longrope_takes_the_long_factors_where_the_window_is_wider_than_the_original_one() -> None:
    wide = tiny_spec(**PHI3, rope_scaling=LONG, original_max_position_embeddings=64)
    (rope,) = wide.ropes
    assert isinstance(rope.scaling, LongScaling)
    assert rope.scaling.factors == tuple(LONG["long_factor"])
    assert rope.magnitude == pytest.approx((1 + np.log(8) / np.log(64)) ** 0.5)
    (narrow,) = tiny_spec(**PHI3, rope_scaling=LONG, original_max_position_embeddings=512).ropes
    assert narrow.scaling == LongScaling(factors=tuple(LONG["short_factor"]), magnitude=1.0)
    (told,) = tiny_spec(**PHI3, rope_scaling=LONG | {"attention_factor": 1.5}, original_max_position_embeddings=64).ropes
    assert told.magnitude == 1.5


def test_a_part_of_a_head_is_rotated_where_the_config_says_so() -> None:
    (rope,) = tiny_spec(**PHI3, partial_rotary_factor=0.75).ropes
    assert rope.width == 12
    assert inverse_frequencies(rope).shape == (6,)


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
        ({"rope_scaling": "llama3"}, "rope_scaling must be a mapping"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a number above 0"),
        ({**QWEN_WINDOWS, "sliding_window": 0}, "sliding_window must be an integer"),
        ({**QWEN_WINDOWS, "max_window_layers": -1}, "max_window_layers must be an integer from 0"),
        ({**QWEN_WINDOWS, "layer_types": ["full_attention"] * 3}, "layer_types must be a list of 4"),
        ({**GEMMA3, "sliding_window": None}, "sliding_window must be an integer"),
        ({**GEMMA3, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({**GEMMA3, "attn_logit_softcapping": -50.0}, "attn_logit_softcapping"),
        ({**PHI3, "partial_rotary_factor": 0.2}, "partial_rotary_factor must leave an even part of a head to rotate, got 0.2 of 16"),
        ({**PHI3, "rope_scaling": LONG | {"long_factor": [1.0] * 7}}, "long_factor must be a list of 8 numbers, got 7 values"),
        ({**PHI3, "rope_scaling": LONG | {"short_factor": [0.0] * 8}}, "short_factor must be a number above 0"),
        ({**PHI3, "rope_scaling": {"type": "su"}}, "short_factor must be a list of 8 numbers, got None"),
        ({**PHI3, "rope_scaling": LONG, "original_max_position_embeddings": 1}, "original_max_position_embeddings must be at least 2"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers must be an integer from 1 to 65536"),
    ],
)
def test_numbers_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(tiny_config(**changes))


def test_frequencies_fall_from_one_and_scaling_keeps_the_short_waves() -> None:
    plain, scaled = (inverse_frequencies(spec.ropes[0]) for spec in (tiny_spec(), tiny_spec(rope_scaling=LLAMA3)))
    assert plain.dtype == scaled.dtype == np.float32
    assert plain.shape == (8,)
    np.testing.assert_allclose(plain, 10000.0 ** (-np.arange(8) / 8), rtol=1e-6)
    waves = 2 * np.pi / plain
    assert (scaled[waves < 128 / 4] == plain[waves < 128 / 4]).all()
    assert (scaled[waves > 128] == plain[waves > 128] / np.float32(8.0)).all()
    between = (waves >= 128 / 4) & (waves <= 128)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
