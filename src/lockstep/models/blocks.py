"""The parts that decoders are put together from: attention, gated feed-forward, norms, head; and where a program's weights come from.

Knows which ops make a part and what its weights are called in a program. Does not know in which order a family uses the parts, nor any
checkpoint's names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.models.rope import Rope, inverse_frequencies
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


Parts = Mapping[str, tuple[str, ...]]
"""Weight name in the program -> tensor names in the checkpoint; for a layer's weights both without the layer's prefix."""

HIDDEN = "hidden"
"""The residual stream, float32 [T, hidden_size]: what travels between stages."""

_LAYER_WEIGHT = re.compile(r"layers\.(\d+)\.(.+)")


def named_sources(spec: ModelSpec, program: Program, model_parts: Parts, layer_parts: Parts) -> Mapping[str, WeightSource]:
    """One source for each weight of the program, by the program's name for it."""
    frequencies = {_frequencies_name(spec, rope): inverse_frequencies(rope)[None, :] for rope in spec.ropes}
    sources: dict[str, WeightSource] = {}
    for name in program.weights:
        layered = _LAYER_WEIGHT.fullmatch(name)
        if name in frequencies:
            sources[name] = WeightSource(computed=frequencies[name])
        elif layered:
            parts = _of_experts(spec, layer_parts[layered[2]])
            sources[name] = WeightSource(parts=tuple(f"model.layers.{layered[1]}.{part}" for part in parts))
        else:
            sources[name] = WeightSource(parts=model_parts[name])
    return sources


def _of_experts(spec: ModelSpec, parts: tuple[str, ...]) -> tuple[str, ...]:
    """Parts whose name has an {expert} are there once for each, one expert after the other."""
    if spec.experts is None or "{expert}" not in parts[0]:
        return parts
    return tuple(part.format(expert=expert) for expert in range(spec.experts.count) for part in parts)


def begin(spec: ModelSpec, *, embeds: bool) -> ProgramBuilder:
    """A builder whose HIDDEN holds the embedded tokens, or, without `embeds`, what the stage before sends."""
    builder = ProgramBuilder()
    hidden = builder.buffer(HIDDEN, "T", spec.hidden_size)
    if embeds:
        table = builder.weight("embedding", spec.vocab_size, spec.hidden_size, "embedding")
        builder.call("embed", outputs=(hidden,), weights=(table,), scale=spec.embedding_scale)
    else:
        builder.input(hidden)
    return builder


def finish(builder: ProgramBuilder, spec: ModelSpec, *, samples: bool) -> Program:
    """With `samples` final norm, head, soft cap and sampling, else HIDDEN goes out. Rows are selected first, so that norm and head run on the S
    sampled positions only."""
    if not samples:
        builder.output(HIDDEN)
        return builder.build()
    selected = builder.buffer("selected", "S", spec.hidden_size)
    normed = builder.buffer("selected_normed", "S", spec.hidden_size)
    logits = builder.buffer("logits", "S", spec.vocab_size)
    builder.call("select", (HIDDEN,), (selected,))
    norm(builder, spec, "final_norm", selected, normed)
    linear(builder, normed, logits, "embedding" if spec.tie_embeddings else "head", (spec.vocab_size, spec.hidden_size))
    if spec.logit_soft_cap:
        builder.call("soft_cap", (logits,), (logits,), cap=spec.logit_soft_cap)
    builder.call("sample", (logits,))
    return builder.build()


def norm(builder: ProgramBuilder, spec: ModelSpec, gain: str, x: str, y: str, *, accumulate: bool = False) -> None:
    """Rows of x, as wide as the residual stream, normed into y."""
    weight = builder.weight(gain, 1, spec.hidden_size, "vector")
    builder.call("rms_norm", (x,), (y,), (weight,), eps=spec.norm_eps, offset=spec.norm_offset, accumulate=accumulate)


def pre_norm(builder: ProgramBuilder, spec: ModelSpec, gain: str) -> str:
    """HIDDEN normed into a buffer of its own, whose name it returns."""
    normed = builder.buffer("normed", "T", spec.hidden_size)
    norm(builder, spec, gain, HIDDEN, normed)
    return normed


def attention(builder: ProgramBuilder, spec: ModelSpec, layer: int, x: str, y: str, *, accumulate: bool) -> None:
    """From x, the normed residual stream, through queries, keys and values to the output projection in y.

    A layer with a window keeps all of its KV, in the group of full attention; the window only hides positions from its queries.
    """
    heads, kv_heads, head_dim = spec.head_count, spec.kv_head_count, spec.head_dim
    query_width, kv_width = heads * head_dim, kv_heads * head_dim
    sizes = {"kv_layer": builder.kv_layer(kv_heads, head_dim), "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    seen, prefix = spec.layers[layer], f"layers.{layer}.attention"
    qkv = builder.buffer("qkv", "T", query_width + 2 * kv_width)
    queries = builder.buffer("queries", "T", query_width)
    attended = builder.buffer("attended", "T", query_width)
    linear(builder, x, qkv, f"{prefix}.qkv", (query_width + 2 * kv_width, spec.hidden_size), bias=spec.qkv_bias)
    if spec.head_norms:
        for gain, column, groups in ((f"{prefix}.query_norm", 0, heads), (f"{prefix}.key_norm", query_width, kv_heads)):
            weight = builder.weight(gain, 1, head_dim, "vector")
            builder.call("rms_norm", (qkv,), (qkv,), (weight,), eps=spec.norm_eps, offset=spec.norm_offset, column=column, groups=groups)
    frequencies = builder.weight(_frequencies_name(spec, seen.rope), 1, seen.rope.width // 2, "vector")
    builder.call("rope_write", (qkv,), (queries,), (frequencies,), **sizes, magnitude=seen.rope.magnitude)
    limits = {"window": seen.sliding_window, "soft_cap": spec.attention_soft_cap}
    builder.call("paged_attention", (queries,), (attended,), (), **sizes, **limits, scale=spec.attention_scale)
    linear(builder, attended, y, f"{prefix}.output", (spec.hidden_size, query_width), bias=spec.output_bias, accumulate=accumulate)


def feed_forward(builder: ProgramBuilder, spec: ModelSpec, layer: int, x: str, y: str, *, accumulate: bool) -> None:
    """The gated feed-forward layer from x, the normed residual stream, to y."""
    gate_up = builder.buffer("gate_up", "T", 2 * spec.ffn_size)
    activated = builder.buffer("activated", "T", spec.ffn_size)
    linear(builder, x, gate_up, f"layers.{layer}.ffn.gate_up", (2 * spec.ffn_size, spec.hidden_size), bias=spec.mlp_bias)
    builder.call("gated_activation", (gate_up,), (activated,), kind=spec.activation)
    linear(builder, activated, y, f"layers.{layer}.ffn.down", (spec.hidden_size, spec.ffn_size), bias=spec.mlp_bias, accumulate=accumulate)


def experts(builder: ProgramBuilder, spec: ModelSpec, layer: int, x: str, y: str) -> None:
    """The mixture of experts from x, the normed residual stream, added to y; with the shared expert, if there is one, whose weight is the sigmoid of
    its gate: a route to one of one."""
    mixture, prefix = spec.experts, f"layers.{layer}.ffn"
    assert mixture is not None, spec
    _mixture(builder, spec, f"{prefix}.experts", (x, y), count=mixture.count, top_k=mixture.top_k, ffn_size=mixture.ffn_size)
    if mixture.shared_ffn_size:
        _mixture(builder, spec, f"{prefix}.shared", (x, y), count=1, top_k=1, ffn_size=mixture.shared_ffn_size)


def _mixture(builder: ProgramBuilder, spec: ModelSpec, prefix: str, buffers: tuple[str, str], *, count: int, top_k: int, ffn_size: int) -> None:
    x, y = buffers
    shared = prefix.endswith("shared")
    logits = builder.buffer(f"expert_logits_{count}", "T", count)
    routing = builder.buffer(f"routing_{top_k}", "T", 2 * top_k)
    linear(builder, x, logits, f"{prefix}.router", (count, spec.hidden_size))
    renormalise = not shared and spec.experts is not None and spec.experts.renormalise
    scoring = "sigmoid" if shared else "softmax"
    builder.call("route", (logits,), (routing,), expert_count=count, top_k=top_k, scoring=scoring, renormalise=renormalise)
    matrices = (
        builder.weight(f"{prefix}.gate_up", count * 2 * ffn_size, spec.hidden_size, "matrix"),
        builder.weight(f"{prefix}.down", count * spec.hidden_size, ffn_size, "matrix"),
    )
    builder.call("experts", (x, routing), (y,), matrices, expert_count=count, top_k=top_k, kind=spec.activation, accumulate=True)


def linear(builder: ProgramBuilder, x: str, y: str, matrix: str, shape: tuple[int, int], *, bias: bool = False, accumulate: bool = False) -> None:
    """shape: (rows, columns) of the matrix, which are the widths of y and x. Its bias is named "<matrix>_bias"."""
    weights = [builder.weight(matrix, *shape, "matrix")]
    if bias:
        weights.append(builder.weight(f"{matrix}_bias", 1, shape[0], "vector"))
    builder.call("linear", (x,), (y,), tuple(weights), accumulate=accumulate)


def _frequencies_name(spec: ModelSpec, rope: Rope) -> str:
    """By the rope's place in the whole model, so that every stage calls it the same."""
    index = spec.ropes.index(rope)
    return f"rope.{index}.inverse_frequencies" if index else "rope.inverse_frequencies"
