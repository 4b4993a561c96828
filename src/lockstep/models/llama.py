"""The Llama family: Llama, Mistral, Mixtral, Qwen 2 and 3, with experts or without, and Phi-3. Each half of a layer is normed before and added to the
residual stream.

Knows that order and Hugging Face's tensor names; biases, head norms, windows and rotary forms are in the spec. Does not know how an op is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lockstep.models.blocks import HIDDEN, Parts, WeightSource, attention, begin, experts, feed_forward, finish, named_sources, pre_norm
from lockstep.models.spec import ModelSpec
from lockstep.ops.program import Program, ProgramBuilder

MODEL_PARTS: Parts = MappingProxyType(
    {
        "embedding": ("model.embed_tokens.weight",),
        "final_norm": ("model.norm.weight",),
        "head": ("lm_head.weight",),
    }
)
LAYER_PARTS: Parts = MappingProxyType(
    {
        "attention.norm": ("input_layernorm.weight",),
        "attention.qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "attention.qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "attention.query_norm": ("self_attn.q_norm.weight",),
        "attention.key_norm": ("self_attn.k_norm.weight",),
        "attention.output": ("self_attn.o_proj.weight",),
        "attention.output_bias": ("self_attn.o_proj.bias",),
        "ffn.norm": ("post_attention_layernorm.weight",),
        "ffn.gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "ffn.gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "ffn.down": ("mlp.down_proj.weight",),
        "ffn.down_bias": ("mlp.down_proj.bias",),
    }
)
_QWEN_EXPERTS: Parts = {
    "ffn.experts.router": ("mlp.gate.weight",),
    "ffn.experts.gate_up": ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
    "ffn.experts.down": ("mlp.experts.{expert}.down_proj.weight",),
    "ffn.shared.router": ("mlp.shared_expert_gate.weight",),
    "ffn.shared.gate_up": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "ffn.shared.down": ("mlp.shared_expert.down_proj.weight",),
}
QWEN_MOE_LAYER_PARTS: Parts = MappingProxyType({**LAYER_PARTS, **_QWEN_EXPERTS})
MIXTRAL_LAYER_PARTS: Parts = MappingProxyType(
    {
        **LAYER_PARTS,
        "ffn.experts.router": ("block_sparse_moe.gate.weight",),
        "ffn.experts.gate_up": ("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
        "ffn.experts.down": ("block_sparse_moe.experts.{expert}.w2.weight",),
    }
)
# Phi-3's checkpoints hold both fused, in our order.
PHI3_LAYER_PARTS: Parts = MappingProxyType(
    {**LAYER_PARTS, "attention.qkv": ("self_attn.qkv_proj.weight",), "ffn.gate_up": ("mlp.gate_up_proj.weight",)}
)


Attend = Callable[[ProgramBuilder, ModelSpec, int, str], None]
"""(builder, spec, layer, x): attention from x, the normed residual stream, added to HIDDEN."""


def _attend(builder: ProgramBuilder, spec: ModelSpec, layer: int, x: str) -> None:
    attention(builder, spec, layer, x, HIDDEN, accumulate=True)


def build_llama(spec: ModelSpec, layers: range, *, embeds: bool, samples: bool, attend: Attend = _attend) -> Program:
    """The ops of a stage that holds `layers` (global numbers), with the embedding if `embeds`, with final norm, head and sampling if `samples`.
    attend: of a family whose attention alone is another."""
    builder = begin(spec, embeds=embeds)
    for layer in layers:
        attend(builder, spec, layer, pre_norm(builder, spec, f"layers.{layer}.attention.norm"))
        normed = pre_norm(builder, spec, f"layers.{layer}.ffn.norm")
        if layer in spec.expert_layers:
            experts(builder, spec, layer, normed, HIDDEN)
        else:
            feed_forward(builder, spec, layer, normed, HIDDEN, accumulate=True)
    return finish(builder, spec, samples=samples)


def llama_weight_sources(spec: ModelSpec, program: Program) -> Mapping[str, WeightSource]:
    """One source for each weight of the program, by the program's name for it."""
    return named_sources(spec, program, MODEL_PARTS, LAYER_PARTS)


def phi3_weight_sources(spec: ModelSpec, program: Program) -> Mapping[str, WeightSource]:
    """One source for each weight of the program, by the program's name for it."""
    return named_sources(spec, program, MODEL_PARTS, PHI3_LAYER_PARTS)


def mixtral_weight_sources(spec: ModelSpec, program: Program) -> Mapping[str, WeightSource]:
    """One source for each weight of the program, by the program's name for it."""
    return named_sources(spec, program, MODEL_PARTS, MIXTRAL_LAYER_PARTS)


def qwen_moe_weight_sources(spec: ModelSpec, program: Program) -> Mapping[str, WeightSource]:
    """One source for each weight of the program, by the program's name for it."""
    return named_sources(spec, program, MODEL_PARTS, QWEN_MOE_LAYER_PARTS)
