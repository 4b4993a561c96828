"""The Llama family: the program of a stage, and where each of its weights comes from.

Knows the order of operations of a Llama decoder layer and Hugging Face's tensor names. Does not know how an op is computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lockstep.models.rope import inverse_frequencies
from lockstep.models.spec import ModelSpec
from lockstep.ops.program import Program, ProgramBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Where a program weight comes from; exactly one of the two is set.

    parts: tensor names of the checkpoint (Hugging Face's), concatenated along their first axis and then seen as the weight's [rows, columns].
    computed: float32 [rows, columns], derived from the spec.
    """

    parts: tuple[str, ...] = ()
    computed: NDArray[np.float32] | None = None


_MODEL_PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "embedding": ("model.embed_tokens.weight",),
        "final_norm": ("model.norm.weight",),
        "head": ("lm_head.weight",),
    }
)
_LAYER_PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention.norm": ("input_layernorm.weight",),
        "attention.qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "attention.qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "attention.output": ("self_attn.o_proj.weight",),
        "attention.output_bias": ("self_attn.o_proj.bias",),
        "ffn.norm": ("post_attention_layernorm.weight",),
        "ffn.gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "ffn.gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "ffn.down": ("mlp.down_proj.weight",),
        "ffn.down_bias": ("mlp.down_proj.bias",),
    }
)
_LAYER_WEIGHT = re.compile(r"layers\.(\d+)\.(.+)")
_FREQUENCIES = "rope.inverse_frequencies"


def build_llama(spec: ModelSpec, layers: range, *, embeds: bool, samples: bool) -> Program:
    """The ops of a stage that holds `layers` (global numbers), with the embedding if `embeds`, with final norm, head and sampling if `samples`.

    Between stages travels the residual stream: buffer "hidden", float32 [T, hidden_size].
    """
    builder = ProgramBuilder()
    hidden = builder.buffer("hidden", "T", spec.hidden_size)
    if embeds:
        builder.call("embed", outputs=(hidden,), weights=(builder.weight("embedding", spec.vocab_size, spec.hidden_size, "embedding"),))
    else:
        builder.input(hidden)
    for layer in layers:
        _attention(builder, spec, layer)
        _ffn(builder, spec, layer)
    if samples:
        _head(builder, spec)
    else:
        builder.output(hidden)
    return builder.build()


def llama_weight_sources(spec: ModelSpec, program: Program) -> Mapping[str, WeightSource]:
    """One source for each weight of the program, by the program's name for it."""
    sources: dict[str, WeightSource] = {}
    for name in program.weights:
        layered = _LAYER_WEIGHT.fullmatch(name)
        if name == _FREQUENCIES:
            sources[name] = WeightSource(computed=inverse_frequencies(spec)[None, :])
        elif layered:
            sources[name] = WeightSource(parts=tuple(f"model.layers.{layered[1]}.{part}" for part in _LAYER_PARTS[layered[2]]))
        else:
            sources[name] = WeightSource(parts=_MODEL_PARTS[name])
    return sources


def _attention(builder: ProgramBuilder, spec: ModelSpec, layer: int) -> None:
    query_width, kv_width = spec.head_count * spec.head_dim, spec.kv_head_count * spec.head_dim
    heads = {
        "kv_layer": builder.kv_layer(spec.kv_head_count, spec.head_dim),
        "heads": spec.head_count,
        "kv_heads": spec.kv_head_count,
        "head_dim": spec.head_dim,
    }
    normed = _normed(builder, spec, f"layers.{layer}.attention.norm")
    qkv = builder.buffer("qkv", "T", query_width + 2 * kv_width)
    queries = builder.buffer("queries", "T", query_width)
    attended = builder.buffer("attended", "T", query_width)
    qkv_shape, output_shape = (query_width + 2 * kv_width, spec.hidden_size), (spec.hidden_size, query_width)
    _linear(builder, normed, qkv, f"layers.{layer}.attention.qkv", qkv_shape, bias=spec.attention_bias, accumulate=False)
    builder.call("rope_write", (qkv,), (queries,), (builder.weight(_FREQUENCIES, 1, spec.head_dim // 2, "vector"),), **heads)
    builder.call("paged_attention", (queries,), (attended,), (), **heads, scale=spec.head_dim**-0.5)
    _linear(builder, attended, "hidden", f"layers.{layer}.attention.output", output_shape, bias=spec.attention_bias, accumulate=True)


def _ffn(builder: ProgramBuilder, spec: ModelSpec, layer: int) -> None:
    normed = _normed(builder, spec, f"layers.{layer}.ffn.norm")
    gate_up = builder.buffer("gate_up", "T", 2 * spec.ffn_size)
    activated = builder.buffer("activated", "T", spec.ffn_size)
    _linear(builder, normed, gate_up, f"layers.{layer}.ffn.gate_up", (2 * spec.ffn_size, spec.hidden_size), bias=spec.mlp_bias, accumulate=False)
    builder.call("gated_activation", (gate_up,), (activated,), kind="silu")
    _linear(builder, activated, "hidden", f"layers.{layer}.ffn.down", (spec.hidden_size, spec.ffn_size), bias=spec.mlp_bias, accumulate=True)


def _head(builder: ProgramBuilder, spec: ModelSpec) -> None:
    """Rows are selected first, so that norm and head run on the S sampled positions only."""
    selected = builder.buffer("selected", "S", spec.hidden_size)
    normed = builder.buffer("selected_normed", "S", spec.hidden_size)
    logits = builder.buffer("logits", "S", spec.vocab_size)
    builder.call("select", ("hidden",), (selected,))
    builder.call("rms_norm", (selected,), (normed,), (builder.weight("final_norm", 1, spec.hidden_size, "vector"),), eps=spec.norm_eps)
    matrix = "embedding" if spec.tie_embeddings else "head"
    _linear(builder, normed, logits, matrix, (spec.vocab_size, spec.hidden_size), bias=False, accumulate=False)
    builder.call("sample", (logits,))


def _normed(builder: ProgramBuilder, spec: ModelSpec, gain: str) -> str:
    normed = builder.buffer("normed", "T", spec.hidden_size)
    builder.call("rms_norm", ("hidden",), (normed,), (builder.weight(gain, 1, spec.hidden_size, "vector"),), eps=spec.norm_eps)
    return normed


def _linear(builder: ProgramBuilder, x: str, y: str, matrix: str, shape: tuple[int, int], *, bias: bool, accumulate: bool) -> None:
    """shape: (rows, columns) of the matrix, which are the widths of y and x. Its bias is named "<matrix>_bias"."""
    weights = [builder.weight(matrix, *shape, "matrix")]
    if bias:
        weights.append(builder.weight(f"{matrix}_bias", 1, shape[0], "vector"))
    builder.call("linear", (x,), (y,), tuple(weights), accumulate=accumulate)
