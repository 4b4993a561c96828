"""The parts that decoders are put together from: attention, gated feed-forward, norms, head; and where a program's weights come from.

Knows which ops make a part and what its weights are called in a program. Does not know in which order a family uses the parts, nor any
checkpoint's names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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
    arranged: how they become [rows, columns] where that is not enough. computed: float32 [rows, columns], derived from the spec.
    """

    parts: tuple[str, ...] = ()
    arranged: Arranged | None = None
    computed: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """shape: what each tensor must have. arrange: the concatenated tensors to an array with the weight's elements in their order (a view will do)."""

    shape: tuple[int, ...]
    arrange: Callable[[NDArray[np.float32]], NDArray[np.float32]]


Parts = Mapping[str, tuple[str, ...]]
"""Weight name in the program -> tensor names in the checkpoint; for a layer's weights both without the layer's prefix."""
Arrangements = Mapping[str, Arranged]
"""Weight name without the layer's prefix -> how its tensors become it."""

HIDDEN = "hidden"
"""The residual stream, float32 [T, hidden_size]: what travels between stages."""

_LAYER_WEIGHT = re.compile(r"layers\.(\d+)\.(.+)")


def named_sources(
    spec: ModelSpec, program: Program, model_parts: Parts, layer_parts: Parts, arrangements: Arrangements | None = None
) -> Mapping[str, WeightSource]:
    """One source for each weight of the program, by the program's name for it."""
    computed = {_frequencies_name(spec, rope): inverse_frequencies(rope)[None, :] for rope in spec.ropes}
    sources: dict[str, WeightSource] = {}
    for name in program.weights:
        layered = _LAYER_WEIGHT.fullmatch(name)
        if name in computed:
            sources[name] = WeightSource(computed=computed[name])
        elif layered:
            parts = _of_experts(spec, layer_parts[layered[2]])
            arranged = (arrangements or {}).get(layered[2])
            sources[name] = WeightSource(parts=tuple(f"model.layers.{layered[1]}.{part}" for part in parts), arranged=arranged)
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

    A layer with a window keeps its KV in blocks of the group of that window, which are let go of once no token sees them.
    """
    heads, kv_heads, head_dim = spec.head_count, spec.kv_head_count, spec.head_dim
    query_width, kv_width = heads * head_dim, kv_heads * head_dim
    seen, prefix = spec.layers[layer], f"layers.{layer}.attention"
    kv_layer = builder.kv_layer(kv_heads, head_dim, spec.kv_windows.index(seen.sliding_window))
    sizes = {"kv_layer": kv_layer, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    qkv = builder.buffer("qkv", "T", query_width + 2 * kv_width)
    queries = builder.buffer("queries", "T", query_width)
    attended = builder.buffer("attended", "T", query_width)
    linear(builder, x, qkv, f"{prefix}.qkv", (query_width + 2 * kv_width, spec.hidden_size), bias=spec.qkv_bias)
    if spec.head_norms:
        for gain, column, groups in ((f"{prefix}.query_norm", 0, heads), (f"{prefix}.key_norm", query_width, kv_heads)):
            weight = builder.weight(gain, 1, head_dim, "vector")
            builder.call("rms_norm", (qkv,), (qkv,), (weight,), eps=spec.norm_eps, offset=spec.norm_offset, column=column, groups=groups)
    builder.call("rope_write", (qkv,), (queries,), (frequencies(builder, spec, layer),), **sizes, magnitude=seen.rope.magnitude)
    limits = {"window": seen.sliding_window, "soft_cap": spec.attention_soft_cap}
    sinks = (builder.weight(f"{prefix}.sinks", 1, heads, "vector"),) if spec.sinks else ()
    builder.call("paged_attention", (queries,), (attended,), sinks, **sizes, **limits, scale=spec.attention_scale)
    linear(builder, attended, y, f"{prefix}.output", (spec.hidden_size, query_width), bias=spec.output_bias, accumulate=accumulate)


def feed_forward(builder: ProgramBuilder, spec: ModelSpec, layer: int, x: str, y: str, *, accumulate: bool) -> None:
    """The gated feed-forward layer from x, the normed residual stream, to y."""
    _gated(builder, spec, f"layers.{layer}.ffn", (x, y), spec.ffn_size, bias=spec.mlp_bias, accumulate=accumulate)


def _gated(
    builder: ProgramBuilder, spec: ModelSpec, prefix: str, buffers: tuple[str, str], width: int, *, bias: bool = False, accumulate: bool
) -> None:
    x, y = buffers
    suffix = "" if width == spec.ffn_size else f"_{width}"
    gate_up, activated = builder.buffer(f"gate_up{suffix}", "T", 2 * width), builder.buffer(f"activated{suffix}", "T", width)
    linear(builder, x, gate_up, f"{prefix}.gate_up", (2 * width, spec.hidden_size), bias=bias)
    builder.call("gated_activation", (gate_up,), (activated,), kind=spec.activation)
    linear(builder, activated, y, f"{prefix}.down", (spec.hidden_size, width), bias=bias, accumulate=accumulate)


def experts(builder: ProgramBuilder, spec: ModelSpec, layer: int, x: str, y: str) -> None:
    """The mixture of experts from x, the normed residual stream, added to y; with the shared expert, if there is one: a plain feed-forward layer, or
    behind a gate of its own, whose sigmoid is its weight: a route to one of one."""
    mixture, prefix = spec.experts, f"layers.{layer}.ffn"
    assert mixture is not None, spec
    routing = {
        "scoring": mixture.scoring,
        "renormalise": mixture.renormalise,
        "scale": mixture.scale,
        "groups": mixture.groups,
        "groups_kept": mixture.groups_kept,
        "group_best": mixture.group_best,
    }
    _mixture(builder, spec, f"{prefix}.experts", (x, y), (mixture.count, mixture.top_k, mixture.ffn_size), routing)
    if mixture.shared_gate:
        _mixture(builder, spec, f"{prefix}.shared", (x, y), (1, 1, mixture.shared_ffn_size), {"scoring": "sigmoid", "renormalise": False})
    elif mixture.shared_ffn_size:
        _gated(builder, spec, f"{prefix}.shared", (x, y), mixture.shared_ffn_size, accumulate=True)


def _mixture(
    builder: ProgramBuilder,
    spec: ModelSpec,
    prefix: str,
    buffers: tuple[str, str],
    sizes: tuple[int, int, int],
    routing: Mapping[str, str | bool | int | float],
) -> None:
    """sizes: how many experts, how many of them a token goes to, width of one."""
    assert spec.experts is not None, spec
    (x, y), (count, top_k, ffn_size), biased = buffers, sizes, spec.experts.biased
    logits = builder.buffer(f"expert_logits_{count}", "T", count)
    routes = builder.buffer(f"routing_{top_k}", "T", 2 * top_k)
    linear(builder, x, logits, f"{prefix}.router", (count, spec.hidden_size), bias=biased)
    choice = (builder.weight(f"{prefix}.choice_bias", 1, count, "vector"),) if spec.experts.choice_bias else ()
    builder.call("route", (logits,), (routes,), choice, expert_count=count, top_k=top_k, **routing)
    weights = [
        builder.weight(f"{prefix}.gate_up", count * 2 * ffn_size, spec.hidden_size, "matrix"),
        builder.weight(f"{prefix}.down", count * spec.hidden_size, ffn_size, "matrix"),
    ]
    if biased:
        weights.append(builder.weight(f"{prefix}.gate_up_bias", 1, count * 2 * ffn_size, "vector"))
        weights.append(builder.weight(f"{prefix}.down_bias", 1, count * spec.hidden_size, "vector"))
    builder.call("experts", (x, routes), (y,), tuple(weights), expert_count=count, top_k=top_k, kind=spec.activation, accumulate=True)


def linear(builder: ProgramBuilder, x: str, y: str, matrix: str, shape: tuple[int, int], *, bias: bool = False, accumulate: bool = False) -> None:
    """shape: (rows, columns) of the matrix, which are the widths of y and x. Its bias is named "<matrix>_bias"."""
    weights = [builder.weight(matrix, *shape, "matrix")]
    if bias:
        weights.append(builder.weight(f"{matrix}_bias", 1, shape[0], "vector"))
    builder.call("linear", (x,), (y,), tuple(weights), accumulate=accumulate)


def frequencies(builder: ProgramBuilder, spec: ModelSpec, layer: int) -> str:
    """The weight with the rotary frequencies of a layer."""
    rope = spec.layers[layer].rope
    return builder.weight(_frequencies_name(spec, rope), 1, rope.width // 2, "vector")


def _frequencies_name(spec: ModelSpec, rope: Rope) -> str:
    """By the rope's place in the whole model, so that every stage calls it the same."""
    index = spec.ropes.index(rope)
    return f"rope.{index}.inverse_frequencies" if index else "rope.inverse_frequencies"
