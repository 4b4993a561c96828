"""A tiny model of each family: its config, our weights for it, and transformers' own model that holds the same. Knows no backend, and imports
torch only for the last.

Windows of 8 and 16 positions, soft caps and scales small enough to tell, contexts past every window's edge and every attention tile's.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.models.spec import ModelSpec, spec_from_config
from lockstep.ops.step import F32
from rig import tiny_config, tiny_weights

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 3.0}
TOKENS = 120


def long_rope(width: int) -> dict[str, Any]:
    """LongRoPE for `width` rotated values of a head."""
    half = np.arange(width // 2)
    return {"rope_type": "longrope", "short_factor": (1.0 + 0.125 * half).tolist(), "long_factor": (1.5 + 0.75 * half).tolist()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyModel:
    """name: of the family and what is special. model_class: transformers'. changes: to `rig.tiny_config`."""

    name: str
    model_class: str
    model_type: str
    changes: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        """In config.json's names, with the keys that this class has. Its own at every call: transformers writes into the nested mappings of a config
        it is given, and two families here share one."""
        config = tiny_config(architectures=[self.model_class], model_type=self.model_type, **deepcopy(self.changes))
        return {key: value for key, value in config.items() if value is not None or key in ("sliding_window", "q_lora_rank")}

    @property
    def spec(self) -> ModelSpec:
        return spec_from_config(self.config)

    def weights(self) -> dict[str, F32]:
        """float32 by Hugging Face's names. A head that is the embedding has larger weights than one of its own, so the final norm is smaller there,
        or no sampled token would differ from the best. Gemma's embeddings are scaled up, so what its layers add is too, or every token would
        repeat itself; 1 is added to its gains."""
        tensors, gemma = tiny_weights(self.spec, seed=3), bool(self.spec.norm_offset)
        for name in tensors:
            if name == "model.norm.weight" and self.spec.tie_embeddings:
                tensors[name] *= np.float32(0.1 if gemma else 0.25)
            elif gemma and name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                tensors[name] *= np.float32(4)
            if gemma and name.endswith("norm.weight"):
                tensors[name] -= np.float32(1)
        return tensors

    def transformers_model(self) -> Any:
        """transformers' model with exactly these weights, float32, attention written out."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config), attn_implementation="eager", dtype=torch.float32)
        assert type(model).__name__ == self.model_class
        tensors = {name: torch.from_numpy(values) for name, values in with_stacked_experts(self.weights()).items()}
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert not unexpected
        assert missing == (["lm_head.weight"] if self.spec.tie_embeddings else [])
        return model.eval()


_EXPERT = re.compile(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_STACKED = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "down_proj": "down_proj",
    "w2": "down_proj",
}


def with_stacked_experts(tensors: dict[str, F32]) -> dict[str, F32]:
    """As transformers' modules hold them: the matrices of all experts in one tensor; Mixtral's under the names of the others."""
    found: dict[str, F32] = {}
    stacks: dict[str, dict[int, list[F32]]] = {}
    for name, values in tensors.items():
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            found[name.replace("block_sparse_moe", "mlp")] = values
        else:
            stacks.setdefault(f"{expert[1]}.mlp.experts.{_STACKED[expert[3]]}", {}).setdefault(int(expert[2]), []).append(values)
    for name, by_expert in stacks.items():
        found[name] = np.stack([np.concatenate(by_expert[expert]) for expert in sorted(by_expert)])
    return found


GEMMA: dict[str, Any] = {"hidden_act": None, "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "attention_bias": None, "mlp_bias": None}
UNBIASED: dict[str, Any] = {"attention_bias": None, "mlp_bias": None}
QWEN_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 1.0}
DEEPSEEK: dict[str, Any] = {
    **UNBIASED,
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
}
QWEN_WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
MIXED_LAYERS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]

FAMILY_MODELS: tuple[FamilyModel, ...] = (
    FamilyModel(name="llama 3", model_class="LlamaForCausalLM", model_type="llama", changes={"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    FamilyModel(name="llama, linear rope", model_class="LlamaForCausalLM", model_type="llama", changes={"rope_scaling": LINEAR}),
    FamilyModel(name="mistral", model_class="MistralForCausalLM", model_type="mistral", changes={**UNBIASED, "sliding_window": 8}),
    FamilyModel(name="qwen2", model_class="Qwen2ForCausalLM", model_type="qwen2", changes={**UNBIASED, "tie_word_embeddings": True}),
    FamilyModel(name="qwen2, windows", model_class="Qwen2ForCausalLM", model_type="qwen2", changes={**UNBIASED, **QWEN_WINDOWS}),
    FamilyModel(
        name="mixtral",
        model_class="MixtralForCausalLM",
        model_type="mixtral",
        changes={**UNBIASED, "sliding_window": 8, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    FamilyModel(
        name="qwen2 moe, a shared expert",
        model_class="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        changes={**UNBIASED, **QWEN_EXPERTS, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 96},
    ),
    FamilyModel(
        name="qwen3 moe, some layers dense",
        model_class="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        changes={**UNBIASED, **QWEN_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 5},
    ),
    FamilyModel(name="qwen3", model_class="Qwen3ForCausalLM", model_type="qwen3", changes={"mlp_bias": None, "attention_bias": True}),
    FamilyModel(
        name="qwen3, windows",
        model_class="Qwen3ForCausalLM",
        model_type="qwen3",
        changes={**UNBIASED, **QWEN_WINDOWS, "sliding_window": 8, "layer_types": MIXED_LAYERS, "head_dim": 24},
    ),
    FamilyModel(
        name="gemma 2",
        model_class="Gemma2ForCausalLM",
        model_type="gemma2",
        changes={**GEMMA, "sliding_window": 8, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0, "head_dim": 32},
    ),
    FamilyModel(
        name="gemma 3",
        model_class="Gemma3ForCausalLM",
        model_type="gemma3_text",
        changes={**GEMMA, "sliding_window": 16, "layer_types": MIXED_LAYERS, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR},
    ),
    FamilyModel(
        name="gemma 3, pattern",
        model_class="Gemma3ForCausalLM",
        model_type="gemma3_text",
        changes={**GEMMA, "num_hidden_layers": 7, "sliding_window": 8, "sliding_window_pattern": 6, "rope_theta": 1e6},
    ),
    FamilyModel(
        name="gpt-oss",
        model_class="GptOssForCausalLM",
        model_type="gpt_oss",
        changes={
            **UNBIASED,
            "attention_bias": True,
            "intermediate_size": 96,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_scaling": {**YARN, "truncate": False},
        },
    ),
    FamilyModel(
        name="deepseek v2, groups",
        model_class="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        changes={
            **DEEPSEEK,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    FamilyModel(
        name="deepseek v3",
        model_class="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        changes={
            **DEEPSEEK,
            "q_lora_rank": 48,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    FamilyModel(
        name="phi 3",
        model_class="Phi3ForCausalLM",
        model_type="phi3",
        changes={**UNBIASED, "head_dim": None, "sliding_window": 16, "pad_token_id": 0},
    ),
    FamilyModel(
        name="phi 4, longrope",
        model_class="Phi3ForCausalLM",
        model_type="phi3",
        changes={
            **UNBIASED,
            "head_dim": None,
            "pad_token_id": 0,
            "partial_rotary_factor": 0.75,
            "rope_scaling": long_rope(12),
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
    ),
    FamilyModel(
        name="phi 3, longrope within its first window",
        model_class="Phi3ForCausalLM",
        model_type="phi3",
        changes={
            **UNBIASED,
            "head_dim": None,
            "pad_token_id": 0,
            "rope_scaling": long_rope(16) | {"attention_factor": 1.2},
            "original_max_position_embeddings": 512,
        },
    ),
)


def sequence(vocab_size: int, count: int = TOKENS) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(5).integers(0, vocab_size, count).tolist()
