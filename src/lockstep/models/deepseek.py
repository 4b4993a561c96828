"""DeepSeek V2 and V3: latent attention, the first layers dense, then experts beside shared ones.

Attention runs on what the cache keeps (arXiv 2405.04434, section 2.1.2): the matrix that would make keys of it turns the queries instead, that of the
values turns what attention returns. Knows Hugging Face's tensor names; does not know how an op is computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lockstep.models.blocks import (
    HIDDEN,
    Arranged,
    Parts,
    WeightSource,
    frequencies,
    linear,
    named_sources,
)
from lockstep.models.llama import LAYER_PARTS, MODEL_PARTS, build_llama
from lockstep.models.spec import ModelSpec
from lockstep.ops.program import Program, ProgramBuilder

LATENT_NORM_EPS = 1e-6
"""Of the norms inside attention, whatever the config says of the others."""

DEEPSEEK_LAYER_PARTS: Parts = {
    **LAYER_PARTS,
    "attention.query_down": ("self_attn.q_a_proj.weight",),
    "attention.query_norm": ("self_attn.q_a_layernorm.weight",),
    "attention.query": ("self_attn.q_proj.weight",),
    "attention.query_up": ("self_attn.q_b_proj.weight",),
    "attention.latent": ("self_attn.kv_a_proj_with_mqa.weight",),
    "attention.latent_norm": ("self_attn.kv_a_layernorm.weight",),
    "attention.key_up": ("self_attn.kv_b_proj.weight",),
    "attention.value_up": ("self_attn.kv_b_proj.weight",),
    "ffn.experts.router": ("mlp.gate.weight",),
    "ffn.experts.choice_bias": ("mlp.gate.e_score_correction_bias",),
    "ffn.experts.gate_up": ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
    "ffn.experts.down": ("mlp.experts.{expert}.down_proj.weight",),
    "ffn.shared.gate_up": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "ffn.shared.down": ("mlp.shared_experts.down_proj.weight",),
}


def build_deepseek(spec: ModelSpec, layers: range, *, embeds: bool, samples: bool) -> Program:
    """As `build_llama`, with attention on the latent."""
    return build_llama(spec, layers, embeds=embeds, samples=samples, attend=_latent_attention)


def _latent_attention(builder: ProgramBuilder, spec: ModelSpec, layer: int, x: str) -> None:
    """From x, the normed residual stream, added to HIDDEN. A head's query is [rotated, plain], then [rotated, latent]; a key [rotated, latent]."""
    latent = spec.latent
    assert latent is not None, spec
    heads, width, rank = spec.head_count, spec.head_dim, latent.kv_rank
    prefix, query_width = f"layers.{layer}.attention", latent.rope_width + latent.plain_width
    plain_queries, keys = builder.buffer("plain_queries", "T", heads * query_width), builder.buffer("keys", "T", width)
    if latent.query_rank:
        narrow = builder.buffer("narrow_queries", "T", latent.query_rank)
        linear(builder, x, narrow, f"{prefix}.query_down", (latent.query_rank, spec.hidden_size))
        gain = builder.weight(f"{prefix}.query_norm", 1, latent.query_rank, "vector")
        builder.call("rms_norm", (narrow,), (narrow,), (gain,), eps=LATENT_NORM_EPS)
        linear(builder, narrow, plain_queries, f"{prefix}.query_up", (heads * query_width, latent.query_rank))
    else:
        linear(builder, x, plain_queries, f"{prefix}.query", (heads * query_width, spec.hidden_size))
    linear(builder, x, keys, f"{prefix}.latent", (width, spec.hidden_size))
    gain = builder.weight(f"{prefix}.latent_norm", 1, rank, "vector")
    builder.call("rms_norm", (keys,), (keys,), (gain,), eps=LATENT_NORM_EPS, column=latent.rope_width, groups=1)

    turned, queries = builder.buffer("turned_queries", "T", heads * width), builder.buffer("queries", "T", heads * width)
    attended, values = builder.buffer("attended", "T", heads * rank), builder.buffer("values", "T", heads * latent.value_width)
    key_up = builder.weight(f"{prefix}.key_up", heads * rank, latent.plain_width, "matrix")
    value_up = builder.weight(f"{prefix}.value_up", heads * latent.value_width, rank, "matrix")
    sizes = {"kv_layer": builder.kv_layer(1, width, latent=rank), "heads": heads, "kv_heads": 1, "head_dim": width}
    magnitude = spec.layers[layer].rope.magnitude
    builder.call("head_linear", (plain_queries,), (turned,), (key_up,), heads=heads, passed=latent.rope_width)
    builder.call("latent_write", (turned, keys), (queries,), (frequencies(builder, spec, layer),), **sizes, magnitude=magnitude)
    builder.call("paged_attention", (queries,), (attended,), (), **sizes, scale=spec.attention_scale)
    builder.call("head_linear", (attended,), (values,), (value_up,), heads=heads)
    linear(builder, values, HIDDEN, f"{prefix}.output", (spec.hidden_size, heads * latent.value_width), accumulate=True)


def deepseek_weight_sources(spec: ModelSpec, program: Program) -> Mapping[str, WeightSource]:
    """One source for each weight of the program, by the program's name for it. Rotary rows come first, as half-split pairs."""
    latent, heads = spec.latent, spec.head_count
    assert latent is not None, spec
    pairs = np.arange(latent.rope_width)
    pairs = np.concatenate([pairs[::2], pairs[1::2]]) if latent.interleaved else pairs
    query_rows = np.concatenate([latent.plain_width + pairs, np.arange(latent.plain_width)])
    key_rows = np.concatenate([latent.kv_rank + pairs, np.arange(latent.kv_rank)])
    both = latent.plain_width + latent.value_width

    def queries(tensor: NDArray[np.float32]) -> NDArray[np.float32]:
        return tensor.reshape(heads, len(query_rows), -1)[:, query_rows]

    def key_up(tensor: NDArray[np.float32]) -> NDArray[np.float32]:
        return tensor.reshape(heads, both, -1)[:, : latent.plain_width].swapaxes(1, 2)

    def value_up(tensor: NDArray[np.float32]) -> NDArray[np.float32]:
        return tensor.reshape(heads, both, -1)[:, latent.plain_width :]

    arrangements = {
        "attention.query": Arranged(shape=(heads * len(query_rows), spec.hidden_size), arrange=queries),
        "attention.query_up": Arranged(shape=(heads * len(query_rows), latent.query_rank), arrange=queries),
        "attention.latent": Arranged(shape=(len(key_rows), spec.hidden_size), arrange=lambda tensor: tensor[key_rows]),
        "attention.key_up": Arranged(shape=(heads * both, latent.kv_rank), arrange=key_up),
        "attention.value_up": Arranged(shape=(heads * both, latent.kv_rank), arrange=value_up),
    }
    return named_sources(spec, program, MODEL_PARTS, DEEPSEEK_LAYER_PARTS, arrangements)
