"""GGUF's names for architectures, tensors and settings beside Hugging Face's. Data only; GGUF's side is llama.cpp's (gguf-py/gguf/constants.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """model_class, model_type: as in config.json. layer_tensors: the part of a name between "blk.N." and ".weight" or ".bias".
    interleaved: those of them whose rows are stored in the order of rotary pairs (2i, 2i + 1) instead of (i, i + head_dim / 2), head by head."""

    model_class: str
    model_type: str
    layer_tensors: Mapping[str, str]
    interleaved: frozenset[str] = frozenset()


MODEL_TENSORS: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

# A tensor of rotary frequency factors; it becomes `rope_scaling`.
ROPE_FACTORS = "rope_freqs.weight"

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

ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        model_class="LlamaForCausalLM", model_type="llama", layer_tensors=_DECODER_LAYER, interleaved=frozenset({"attn_q", "attn_k"})
    ),
    "qwen2": GgufArchitecture(model_class="Qwen2ForCausalLM", model_type="qwen2", layer_tensors=_DECODER_LAYER),
    "qwen3": GgufArchitecture(
        model_class="Qwen3ForCausalLM",
        model_type="qwen3",
        layer_tensors={**_DECODER_LAYER, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    ),
}
