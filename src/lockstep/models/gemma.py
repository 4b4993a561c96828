"""Gemma 2 and 3. Each half of a layer is normed before and after, and added to the residual stream then.

Knows that order and Hugging Face's tensor names; windows, soft caps, scales, the 1 that is added to gains and rotary bases are in the spec.
Does not know how an op is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lockstep.models.blocks import HIDDEN, Parts, WeightSource, attention, begin, feed_forward, finish, named_sources, norm, pre_norm
from lockstep.models.llama import LAYER_PARTS, MODEL_PARTS
from lockstep.models.spec import ModelSpec
from lockstep.ops.program import Program

GEMMA_LAYER_PARTS: Parts = MappingProxyType(
    {
        **LAYER_PARTS,
        "attention.post_norm": ("post_attention_layernorm.weight",),
        "ffn.norm": ("pre_feedforward_layernorm.weight",),
        "ffn.post_norm": ("post_feedforward_layernorm.weight",),
    }
)


def build_gemma(spec: ModelSpec, layers: range, *, embeds: bool, samples: bool) -> Program:
    """The ops of a stage that holds `layers` (global numbers), with the embedding if `embeds`, with final norm, head and sampling if `samples`."""
    builder = begin(spec, embeds=embeds)
    branch = builder.buffer("branch", "T", spec.hidden_size)
    for layer in layers:
        attention(builder, spec, layer, pre_norm(builder, spec, f"layers.{layer}.attention.norm"), branch, accumulate=False)
        norm(builder, spec, f"layers.{layer}.attention.post_norm", branch, HIDDEN, accumulate=True)
        feed_forward(builder, spec, layer, pre_norm(builder, spec, f"layers.{layer}.ffn.norm"), branch, accumulate=False)
        norm(builder, spec, f"layers.{layer}.ffn.post_norm", branch, HIDDEN, accumulate=True)
    return finish(builder, spec, samples=samples)


def gemma_weight_sources(spec: ModelSpec, program: Program) -> Mapping[str, WeightSource]:
    """One source for each weight of the program, by the program's name for it."""
    return named_sources(spec, program, MODEL_PARTS, GEMMA_LAYER_PARTS)
