"""Mixtures of experts as config.json tells of them, which each maker does in names of its own. Does not know how a mixture is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.models.config_fields import LAYERS_MAX, flag, integer, number

ExpertNames = Literal["", "mixtral", "qwen", "qwen-shared", "gpt_oss", "deepseek_v2", "deepseek_v3"]

EXPERTS_MAX = 1 << 12
_COUNT_KEYS: Mapping[str, str] = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "deepseek_v2": "n_routed_experts",
                                  "deepseek_v3": "n_routed_experts"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts. count: of them; top_k: that a token goes to; ffn_size: width of one. renormalise: weights of those chosen add up to 1;
    scale: what weights are multiplied by. scoring, groups, groups_kept, group_best: as in the op `route`. choice_bias: experts are chosen by score
    plus a bias. biased: router and experts have biases. shared_ffn_size: width of an expert that every token goes to beside them, 0 for none;
    shared_gate: it is weighed by a gate of its own."""

    count: int
    top_k: int
    ffn_size: int
    renormalise: bool
    shared_ffn_size: int = 0
    shared_gate: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 1
    choice_bias: bool = False
    biased: bool = False


def read_experts(config: Mapping[str, Any], names: ExpertNames, hidden_size: int) -> Experts | None:
    """None for a dense model. Raises CheckpointError for numbers that do not fit, UnsupportedError for a routing that is not computed."""
    if not names:
        return None
    count = integer(config, _COUNT_KEYS.get(names, "num_experts"), most=EXPERTS_MAX)
    top_k = integer(config, "num_experts_per_tok")
    if top_k > count:
        raise CheckpointError(f"num_experts_per_tok must be at most the number of experts, got {top_k} of {count}; check the model's config")
    if names.startswith("deepseek"):
        experts = _deepseek(config, count, top_k, third=names == "deepseek_v3")
    else:
        fused = names in ("mixtral", "gpt_oss")
        experts = Experts(
            count=count,
            top_k=top_k,
            ffn_size=integer(config, "intermediate_size" if fused else "moe_intermediate_size"),
            renormalise=fused or flag(config, "norm_topk_prob"),
            shared_ffn_size=integer(config, "shared_expert_intermediate_size") if names == "qwen-shared" else 0,
            shared_gate=names == "qwen-shared",
            biased=names == "gpt_oss",
        )
    if names == "gpt_oss":
        _expect_published_activation(config)
    if experts.ffn_size % 32 or hidden_size % 64:
        raise UnsupportedError(
            f"experts of width {experts.ffn_size} on a hidden size of {hidden_size} are not supported; supported are multiples of 32 and of 64"
        )
    return experts


def expert_layers(config: Mapping[str, Any], names: ExpertNames) -> frozenset[int]:
    """All layers; by Qwen's names every so-manieth but for those that are listed; by DeepSeek's all but the first few."""
    layers = range(integer(config, "num_hidden_layers", most=LAYERS_MAX))
    if names.startswith("deepseek"):
        return frozenset(layers[integer(config, "first_k_dense_replace", default=0, least=0) :])
    if not names.startswith("qwen"):
        return frozenset(layers if names else ())
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, (list, tuple)) or not all(type(layer) is int for layer in dense):
        raise CheckpointError(f"mlp_only_layers must be a list of layers, got {dense!r:.200}; check the model's config")
    every = integer(config, "decoder_sparse_step", default=1)
    return frozenset(layer for layer in layers if layer not in dense and (layer + 1) % every == 0)


def _deepseek(config: Mapping[str, Any], count: int, top_k: int, *, third: bool) -> Experts:
    """Second and third generation: softmax and the best group by its best expert, or sigmoid with a bias and the best groups by their best two."""
    scoring, method = ("sigmoid", "noaux_tc") if third else ("softmax", config.get("topk_method") or "greedy")
    told = {"scoring_func": (scoring,), "topk_method": ("noaux_tc",) if third else ("greedy", "group_limited_greedy"), "moe_layer_freq": (1,)}
    for key, supported in told.items():
        if config.get(key, supported[0]) not in supported:
            raise UnsupportedError(f"{key} {config[key]!r} is not supported for this architecture; supported is {' or '.join(map(repr, supported))}")
    if not third and flag(config, "norm_topk_prob"):
        raise UnsupportedError("norm_topk_prob is not supported for this architecture, whose published models do without it")
    grouped = method != "greedy"
    groups = integer(config, "n_group", default=1) if grouped else 1
    kept = integer(config, "topk_group", default=1) if grouped else 1
    if count % groups or kept > groups or kept * (count // groups) < top_k or (third and count // groups < 2):
        raise CheckpointError(
            f"n_group {groups} and topk_group {kept} do not fit {count} experts of which a token takes {top_k}; check the model's config"
        )
    width = integer(config, "moe_intermediate_size")
    return Experts(
        count=count,
        top_k=top_k,
        ffn_size=width,
        renormalise=third and flag(config, "norm_topk_prob"),
        shared_ffn_size=width * integer(config, "n_shared_experts", most=64),
        scoring="sigmoid" if third else "softmax",
        scale=number(config, "routed_scaling_factor", below=1e6),
        groups=groups,
        groups_kept=kept,
        group_best=2 if third else 1,
        choice_bias=third,
    )


def _expect_published_activation(config: Mapping[str, Any]) -> None:
    """The clamped SwiGLU's two constants are the op's own."""
    for key, published in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if config.get(key, published) != published:
            raise UnsupportedError(f"{key} {config[key]!r} is not supported; supported is {published}")
