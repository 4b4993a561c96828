"""GGUF's names for architectures, tensors and settings beside Hugging Face's. Data only; GGUF's side is llama.cpp's (gguf-py/gguf/constants.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """model_class, model_type: as in config.json. layer_tensors: the part of a name between "blk.N." and ".weight" or ".bias".
    interleaved: those of them whose rows are stored in the order of rotary pairs (2i, 2i + 1) instead of (i, i + head_dim / 2), head by head.
    norm_offset: what the file's norms have in them and Hugging Face's do not.
    expert_tensors: those that hold the matrices of all experts, [experts, rows, columns], with the name of one of them. vectors: those that the file
    has as vectors and Hugging Face as matrices of one row."""

    model_class: str
    model_type: str
    layer_tensors: Mapping[str, str]
    interleaved: frozenset[str] = frozenset()
    norm_offset: float = 0.0
    expert_tensors: Mapping[str, str] = field(default_factory=dict)
    vectors: frozenset[str] = frozenset()


MODEL_TENSORS: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

# Tensors of rotary frequency factors; they become `rope_scaling`.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
SETTING_TENSORS = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})

_DECODER_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_HEAD_NORMS: Mapping[str, str] = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_QWEN_EXPERTS: Mapping[str, str] = {
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_QWEN_SHARED: Mapping[str, str] = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

MIXTRAL = GgufArchitecture(
    model_class="MixtralForCausalLM",
    model_type="mixtral",
    layer_tensors={**_DECODER_LAYER, "ffn_gate_inp": "block_sparse_moe.gate"},
    interleaved=frozenset({"attn_q", "attn_k"}),
    expert_tensors={
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
    },
)
"""GGUF calls it a llama with experts."""

ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        model_class="LlamaForCausalLM", model_type="llama", layer_tensors=_DECODER_LAYER, interleaved=frozenset({"attn_q", "attn_k"})
    ),
    "qwen2": GgufArchitecture(model_class="Qwen2ForCausalLM", model_type="qwen2", layer_tensors=_DECODER_LAYER),
    "qwen3": GgufArchitecture(
        model_class="Qwen3ForCausalLM",
        model_type="qwen3",
        layer_tensors={**_DECODER_LAYER, **_HEAD_NORMS},
    ),
    "qwen2moe": GgufArchitecture(
        model_class="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        layer_tensors={**_DECODER_LAYER, "ffn_gate_inp": "mlp.gate", **_QWEN_SHARED},
        expert_tensors=_QWEN_EXPERTS,
        vectors=frozenset({"ffn_gate_inp_shexp"}),
    ),
    "qwen3moe": GgufArchitecture(
        model_class="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        layer_tensors={**_DECODER_LAYER, **_HEAD_NORMS, "ffn_gate_inp": "mlp.gate"},
        expert_tensors=_QWEN_EXPERTS,
    ),
    "gemma2": GgufArchitecture(
        model_class="Gemma2ForCausalLM", model_type="gemma2", layer_tensors={**_DECODER_LAYER, **_FOUR_NORMS}, norm_offset=1.0
    ),
    "gemma3": GgufArchitecture(
        model_class="Gemma3ForCausalLM", model_type="gemma3_text", layer_tensors={**_DECODER_LAYER, **_FOUR_NORMS, **_HEAD_NORMS}, norm_offset=1.0
    ),
    "phi3": GgufArchitecture(
        model_class="Phi3ForCausalLM",
        model_type="phi3",
        layer_tensors={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
}
