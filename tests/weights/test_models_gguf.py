"""A GGUF file of each dense family says what the Hugging Face folder of the same model says: the same spec, the same tensors, bit for bit.

The files are written here with the gguf package, by llama.cpp's names and conventions, from the tiny models of `family_models`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from family_models import FAMILY_MODELS, FamilyModel
from lockstep.errors import CheckpointError
from lockstep.models.families import build_program, weight_sources
from lockstep.models.spec import spec_from_config
from lockstep.ops.step import F32
from lockstep.weights import open_checkpoint

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
PLAIN = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
GEMMA_LAYER = {
    **LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def named(name: str) -> FamilyModel:
    return next(model for model in FAMILY_MODELS if model.name == name)


def changed(model: FamilyModel, **changes: Any) -> FamilyModel:
    return replace(model, changes={**model.changes, **changes})


# GGUF has no place for a query scale of one's own, nor for biases that no published model of a family has.
MODELS = [
    named("mistral"),
    named("qwen2"),
    named("mixtral"),
    named("qwen2 moe, a shared expert"),
    named("qwen3 moe, some layers dense"),
    changed(named("qwen3"), attention_bias=False),
    changed(named("gemma 2"), query_pre_attn_scalar=32),
    changed(named("gemma 3"), query_pre_attn_scalar=16),
    changed(named("gemma 3, pattern"), query_pre_attn_scalar=16, rope_scaling={"rope_type": "linear", "factor": 8.0}),
    named("phi 3"),
    named("phi 4, longrope"),
    named("phi 3, longrope within its first window"),
]


def stored_name(model: FamilyModel, name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not name.startswith("model.layers."):
        return f"{PLAIN[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{(GEMMA_LAYER if model.spec.norm_offset else LAYER)[part]}.{kind}"


def stored_values(model: FamilyModel, name: str, values: F32) -> F32:
    """Gemma's norms with the 1, and llama's query and key rows in the order of rotary pairs."""
    if model.spec.norm_offset and name.endswith("norm.weight"):
        return values + np.float32(1)
    if ARCHITECTURES[model.model_type] == "llama" and ("q_proj" in name or "k_proj" in name):
        return np.ascontiguousarray(values.reshape(-1, 2, model.spec.head_dim // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape))
    return values


def write_metadata(writer: gguf.GGUFWriter, model: FamilyModel, architecture: str) -> None:
    spec, config = model.spec, model.config
    writer.add_context_length(spec.window)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.layer_count)
    writer.add_feed_forward_length(spec.ffn_size)
    if spec.experts is not None:
        writer.add_expert_count(spec.experts.count)
        writer.add_expert_used_count(spec.experts.top_k)
        writer.add_expert_feed_forward_length(spec.experts.ffn_size)
        if spec.experts.shared_ffn_size:
            writer.add_expert_shared_feed_forward_length(spec.experts.shared_ffn_size)
    writer.add_head_count(spec.head_count)
    writer.add_head_count_kv(spec.kv_head_count)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(config["rope_theta"])
    if architecture == "phi3":
        writer.add_rope_dimension_count(spec.ropes[0].width)
    else:
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if "layer_types" in config:
        writer.add_array(f"{architecture}.attention.sliding_window_pattern", [kind == "sliding_attention" for kind in config["layer_types"]])
    if spec.attention_soft_cap:
        writer.add_attn_logit_softcapping(spec.attention_soft_cap)
    if spec.logit_soft_cap:
        writer.add_final_logit_softcapping(spec.logit_soft_cap)
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if "long_factor" in scaling:
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        if "attention_factor" in scaling:
            writer.add_rope_scaling_attn_factors(scaling["attention_factor"])
        for key in ("long", "short"):
            writer.add_tensor(f"rope_factors_{key}.weight", np.array(scaling[f"{key}_factor"], np.float32))
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _stacked(tensors: dict[str, F32]) -> dict[str, F32]:
    """The matrices of all experts in one tensor of each kind, under a name without the expert; a gate of one row as a vector."""
    found: dict[str, F32] = {}
    stacks: dict[str, list[F32]] = {}
    for name, values in tensors.items():
        expert = re.fullmatch(r"(.*experts)\.\d+\.(.*)", name)
        if expert is None:
            found[name] = values[0] if name.endswith("shared_expert_gate.weight") else values
        else:
            stacks.setdefault(f"{expert[1]}.{expert[2]}", []).append(values)  # a model's weights come expert by expert, in order
    return found | {name: np.stack(matrices) for name, matrices in stacks.items()}


def write(path: Path, model: FamilyModel, tensors: dict[str, F32] | None = None) -> Path:
    architecture = ARCHITECTURES[model.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, model, architecture)
    for name, values in _stacked(model.weights() if tensors is None else tensors).items():
        writer.add_tensor(stored_name(model, name), stored_values(model, name, values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_file_is_the_model_that_the_folder_is(model: FamilyModel, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "model.gguf", model))
    assert spec_from_config(checkpoint.config) == model.spec
    expected = model.weights()
    assert set(checkpoint.names()) == set(expected)
    for name, values in expected.items():
        found = checkpoint.read(name)
        if model.spec.norm_offset and name.endswith("norm.weight"):
            # The file holds the gain with the 1, rounded once; what is read back must give that very gain when the 1 is added again.
            assert np.array_equal(found + np.float32(1), values + np.float32(1)), name
        else:
            assert np.array_equal(found, values), name
    program = build_program(model.spec, range(model.spec.layer_count), embeds=True, samples=True)
    parts = [part for source in weight_sources(model.spec, program).values() for part in source.parts]
    assert set(parts) == set(expected)


@pytest.mark.parametrize(("name", "layers"), [("gemma 2", 46), ("gemma 3, pattern", 62)])
def test_the_27b_models_scale_queries_by_hidden_size_over_heads(name: str, layers: int, tmp_path: Path) -> None:
    for count, expected in ((layers, 64 // 4), (layers - 1, 32)):
        model = changed(named(name), num_hidden_layers=count, head_dim=32)
        embedding = {"model.embed_tokens.weight": np.zeros((300, 64), np.float32)}
        config = open_checkpoint(write(tmp_path / f"{count}.gguf", model, embedding)).config
        assert config["query_pre_attn_scalar"] == expected


def test_one_of_the_two_tensors_of_longrope_is_not_enough(tmp_path: Path) -> None:
    model = named("phi 4, longrope")
    raw = write(tmp_path / "model.gguf", model).read_bytes()
    (tmp_path / "damaged.gguf").write_bytes(raw.replace(b"rope_factors_short.weight", b"blk.0.attn_norm.weight_xy"))
    with pytest.raises(CheckpointError, match="both were expected"):
        open_checkpoint(tmp_path / "damaged.gguf")


def test_longrope_without_its_first_window_is_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "model.gguf", named("phi 4, longrope")).read_bytes()
    (tmp_path / "damaged.gguf").write_bytes(raw.replace(b"original_context_length", b"original_context_lengtX"))
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.original_context_length is missing"):
        open_checkpoint(tmp_path / "damaged.gguf")
