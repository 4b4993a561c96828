"""What a model is, read from its config: sizes, norms, what each layer's attention sees, special tokens.

Knows the names of Hugging Face's config.json and the settings in which architectures differ. Does not know how the model is computed, which
weights it has, or where the config came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.models.config_fields import LAYERS_MAX, flag, integer, number, token_ids
from lockstep.models.experts_config import ExpertNames, Experts, expert_layers, read_experts
from lockstep.models.rope import Rope, YarnScaling
from lockstep.models.rope_config import FULL, SLIDING, read_ropes

Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
LATENT_WIDTH_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What one layer's attention sees. sliding_window: the last so many positions, a token's own included; 0: all before it. rope: how queries and
    keys are rotated."""

    sliding_window: int
    rope: Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1): what is kept of a position is one vector, `kv_rank` wide, that all
    heads share, and behind it a rotated key of `rope_width`. plain_width: of a head's query and key that is not rotated. value_width: of a head's
    values. query_rank: queries go through a narrow normed vector of this width; 0: they come from the residual stream. interleaved: the checkpoint's
    rotary pairs are neighbours (2 i, 2 i + 1)."""

    kv_rank: int
    rope_width: int
    plain_width: int
    value_width: int
    query_rank: int
    interleaved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The sizes and constants of one decoder.

    family: which builder emits its program (a value of Architecture.family). window: the most tokens of one sequence (max_position_embeddings).
    layers: one entry a layer. ffn_size: width of the gated feed-forward layer, in layers without experts. experts: of the layers in expert_layers.
    tie_embeddings: the head is the embedding table.
    qkv_bias: on queries, keys and values. output_bias: on attention's output projection. mlp_bias: on gate, up and down.
    head_norms: queries and keys are normed, head by head, before they are rotated. norm_offset: what is added to every norm's gain.
    sinks: each head has a learnt score that takes part in the softmax and has no value. latent: set for multi-head latent attention; kv_head_count is
    1 then and head_dim what one position keeps. attention_scale: of query times key. attention_soft_cap, logit_soft_cap: 0 for none. embedding_scale:
    of embedded tokens. bos_token_ids, eos_token_ids: empty where the config names none; the model's own end of an answer is any of eos_token_ids.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerAttention, ...]
    head_count: int
    kv_head_count: int
    head_dim: int
    ffn_size: int
    experts: Experts | None
    expert_layers: frozenset[int]
    activation: Activation
    norm_eps: float
    norm_offset: float
    sinks: bool
    latent: Latent | None
    attention_scale: float
    attention_soft_cap: float
    logit_soft_cap: float
    embedding_scale: float
    tie_embeddings: bool
    head_norms: bool
    window: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def kv_windows(self) -> tuple[int, ...]:
        """The windows of the whole model's KV groups, in the order of their numbers: 0, all, first if any layer sees all, then by width."""
        return tuple(sorted({layer.sliding_window for layer in self.layers}))

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ropes of the whole model, by first use."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How the configs and weights of one class of transformers differ from Llama's.

    windows: which layers slide if the config has no `layer_types`: none; all that have a `sliding_window` (always); those from
    `max_window_layers` on where `use_sliding_window` says so (flagged); all but every so-manieth by `sliding_window_pattern` (alternating).
    flags: the config's flags of biases that the class knows. qkv_bias: queries, keys and values have a bias whatever the config says.
    gemma: norms with gain + 1, scaled embeddings, soft caps, a query scale of its own. local_rope: sliding layers have a rotary base of their own.
    partial_rope: a part of a head may be rotated. experts: by whose names the config tells of a mixture. sinks, latent: see ModelSpec.
    defaults: what the class assumes where a config.json leaves a key out.
    """

    family: str
    windows: Literal["none", "always", "flagged", "alternating"] = "none"
    flags: frozenset[str] = frozenset()
    qkv_bias: bool = False
    head_norms: bool = False
    gemma: bool = False
    local_rope: bool = False
    partial_rope: bool = False
    experts: ExpertNames = ""
    sinks: bool = False
    latent: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA_DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEEPSEEK_DEFAULTS: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(family="llama", flags=frozenset({"attention_bias", "mlp_bias"})),
        "MistralForCausalLM": Architecture(family="llama", windows="always", defaults={"sliding_window": 4096}),
        "Qwen2ForCausalLM": Architecture(
            family="llama", windows="flagged", qkv_bias=True, defaults={"sliding_window": 4096, "max_window_layers": 28}
        ),
        "Qwen3ForCausalLM": Architecture(
            family="llama",
            windows="flagged",
            flags=frozenset({"attention_bias"}),
            head_norms=True,
            defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        ),
        "MixtralForCausalLM": Architecture(family="mixtral", windows="always", experts="mixtral", defaults={"rms_norm_eps": 1e-5}),
        "Qwen2MoeForCausalLM": Architecture(
            family="qwen_moe",
            windows="flagged",
            qkv_bias=True,
            experts="qwen-shared",
            defaults={"sliding_window": 4096, "max_window_layers": 28, "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False},
        ),
        "Qwen3MoeForCausalLM": Architecture(
            family="qwen_moe",
            windows="flagged",
            flags=frozenset({"attention_bias"}),
            head_norms=True,
            experts="qwen",
            defaults={"sliding_window": 4096, "max_window_layers": 28, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False},
        ),
        "Phi3ForCausalLM": Architecture(family="phi3", windows="always", partial_rope=True, defaults={"rms_norm_eps": 1e-5}),
        "Gemma2ForCausalLM": Architecture(
            family="gemma",
            windows="alternating",
            flags=frozenset({"attention_bias"}),
            gemma=True,
            defaults={**_GEMMA_DEFAULTS, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ),
        "Gemma3ForCausalLM": Architecture(
            family="gemma",
            windows="alternating",
            flags=frozenset({"attention_bias"}),
            head_norms=True,
            gemma=True,
            local_rope=True,
            defaults={**_GEMMA_DEFAULTS, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        ),
        "GptOssForCausalLM": Architecture(
            family="gpt_oss",
            windows="alternating",
            flags=frozenset({"attention_bias"}),
            experts="gpt_oss",
            sinks=True,
            defaults={
                "attention_bias": True,
                "head_dim": 64,
                "sliding_window": 128,
                "sliding_window_pattern": 2,
                "rms_norm_eps": 1e-5,
                "num_experts_per_tok": 4,
                "rope_theta": 150000.0,
                "rope_scaling": _GPT_OSS_ROPE,
            },
        ),
        "DeepseekV2ForCausalLM": Architecture(
            family="deepseek",
            experts="deepseek_v2",
            latent=True,
            defaults={**_DEEPSEEK_DEFAULTS, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
        ),
        "DeepseekV3ForCausalLM": Architecture(
            family="deepseek",
            experts="deepseek_v3",
            latent=True,
            defaults={
                **_DEEPSEEK_DEFAULTS,
                "n_shared_experts": 1,
                "n_group": 8,
                "topk_group": 4,
                "num_experts_per_tok": 8,
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.5,
                "first_k_dense_replace": 3,
                "rope_interleave": True,
            },
        ),
    }
)
"""Every architecture that is computed, by its class in transformers. The rest is refused by name."""

_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"})


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read a config in config.json's names.

    Raises UnsupportedError for an architecture, activation, rotary scaling or layer type that Lockstep does not compute,
    CheckpointError, naming the key, for a number that is missing or absurd.
    """
    architecture = _architecture(config)
    config = {**architecture.defaults, **config}
    _refuse_what_is_not_computed(config, architecture)
    vocab_size, hidden_size = integer(config, "vocab_size"), integer(config, "hidden_size")
    latent = _latent(config) if architecture.latent else None
    head_count, kv_head_count, head_dim = _heads(config, hidden_size) if latent is None else _latent_heads(config, latent)
    layers = _layers(config, architecture, head_dim if latent is None else latent.rope_width)
    biased = {name: name in architecture.flags and flag(config, name) for name in ("attention_bias", "mlp_bias")}
    gemma = architecture.gemma
    experts = read_experts(config, architecture.experts, hidden_size)
    return ModelSpec(
        family=architecture.family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=layers,
        head_count=head_count,
        kv_head_count=kv_head_count,
        head_dim=head_dim,
        ffn_size=integer(config, "intermediate_size"),
        experts=experts,
        expert_layers=expert_layers(config, architecture.experts),
        activation="clamped_silu" if architecture.experts == "gpt_oss" else _activation(config, "hidden_activation" if gemma else "hidden_act"),
        norm_eps=number(config, "rms_norm_eps", default=1e-6, below=1.0),
        norm_offset=1.0 if gemma else 0.0,
        sinks=architecture.sinks,
        latent=latent,
        attention_scale=_attention_scale(config, architecture, head_dim, latent, layers[0].rope),
        attention_soft_cap=_soft_cap(config, "attn_logit_softcapping") if gemma else 0.0,
        logit_soft_cap=_soft_cap(config, "final_logit_softcapping") if gemma else 0.0,
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        tie_embeddings=flag(config, "tie_word_embeddings"),
        head_norms=architecture.head_norms,
        window=integer(config, "max_position_embeddings"),
        qkv_bias=biased["attention_bias"] or architecture.qkv_bias,
        output_bias=biased["attention_bias"],
        mlp_bias=biased["mlp_bias"],
        bos_token_ids=token_ids(config, "bos_token_id", vocab_size),
        eos_token_ids=token_ids(config, "eos_token_id", vocab_size),
    )


def _architecture(config: Mapping[str, Any]) -> Architecture:
    names = config.get("architectures")
    if not isinstance(names, (list, tuple)) or not names:
        raise CheckpointError(f"architectures must be a list with the model's class name, got {names!r}; check the model's config")
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise UnsupportedError(f"architecture {', '.join(map(str, names))} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}")


def _refuse_what_is_not_computed(config: Mapping[str, Any], architecture: Architecture) -> None:
    """Settings that change the numbers and that no program here computes; reading past them would answer from another model."""
    window = config.get("sliding_window")
    if architecture.windows == "none" and window is not None and integer(config, "sliding_window") < integer(config, "max_position_embeddings"):
        raise UnsupportedError(
            f"sliding_window {window} is not supported for this architecture, whose layers see everything before them; "
            "remove it from the config, or name MistralForCausalLM there if the model was trained with it"
        )
    if config.get("use_bidirectional_attention"):
        raise UnsupportedError("use_bidirectional_attention is not supported; supported are models whose tokens see what came before them")


def _activation(config: Mapping[str, Any], key: str) -> Activation:
    name = config.get(key, "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"{key} {name!r} is not supported; supported are {', '.join(map(repr, _ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _heads(config: Mapping[str, Any], hidden_size: int) -> tuple[int, int, int]:
    """Query heads, KV heads, width of a head."""
    head_count = integer(config, "num_attention_heads")
    kv_head_count = integer(config, "num_key_value_heads", default=head_count)
    if head_count % kv_head_count:
        raise CheckpointError(f"num_key_value_heads must divide num_attention_heads, got {kv_head_count} and {head_count}; check the model's config")
    if config.get("head_dim") is None and hidden_size % head_count:
        raise CheckpointError(f"hidden_size must be a multiple of num_attention_heads where head_dim is absent, got {hidden_size} and {head_count}")
    head_dim = integer(config, "head_dim", default=hidden_size // head_count)
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(f"head_dim must be even, since rotary embeddings turn pairs, got {head_dim}; check the model's config")
    return head_count, kv_head_count, head_dim


def _latent(config: Mapping[str, Any]) -> Latent:
    latent = Latent(
        kv_rank=integer(config, "kv_lora_rank"),
        rope_width=integer(config, "qk_rope_head_dim"),
        plain_width=integer(config, "qk_nope_head_dim"),
        value_width=integer(config, "v_head_dim"),
        query_rank=0 if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
        interleaved="rope_interleave" not in config or flag(config, "rope_interleave"),
    )
    if latent.rope_width % 2:
        raise CheckpointError(f"qk_rope_head_dim must be even, since rotary embeddings turn pairs, got {latent.rope_width}; check the model's config")
    if latent.kv_rank % 64 or latent.value_width % 64:
        raise UnsupportedError(f"kv_lora_rank {latent.kv_rank} and v_head_dim {latent.value_width} are not supported; supported are multiples of 64")
    if flag(config, "attention_bias") or flag(config, "mlp_bias"):
        raise UnsupportedError("attention_bias and mlp_bias are not supported for this architecture, whose published models have none")
    return latent


def _latent_heads(config: Mapping[str, Any], latent: Latent) -> tuple[int, int, int]:
    """Query heads, KV heads, width of a head, as the cache sees them."""
    width = latent.rope_width + latent.kv_rank
    if width > LATENT_WIDTH_MAX:
        raise UnsupportedError(f"qk_rope_head_dim + kv_lora_rank of {width} is not supported; supported is at most {LATENT_WIDTH_MAX}")
    return integer(config, "num_attention_heads"), 1, width


def _attention_scale(config: Mapping[str, Any], architecture: Architecture, head_dim: int, latent: Latent | None, rope: Rope) -> float:
    if architecture.gemma:
        return float(number(config, "query_pre_attn_scalar", below=1e6) ** -0.5)
    if latent is None:
        return float(head_dim**-0.5)
    stretch = rope.scaling.score_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    return float((latent.plain_width + latent.rope_width) ** -0.5 * stretch)


def _soft_cap(config: Mapping[str, Any], key: str) -> float:
    return 0.0 if config.get(key) is None else number(config, key, below=1e6)


def _layers(config: Mapping[str, Any], architecture: Architecture, head_dim: int) -> tuple[LayerAttention, ...]:
    ropes = read_ropes(config, head_dim, partial=architecture.partial_rope, local=architecture.local_rope)
    kinds = _layer_kinds(config, architecture)
    window = integer(config, "sliding_window") if SLIDING in kinds else 0
    # A window that is as wide as the model hides nothing.
    window = 0 if window >= integer(config, "max_position_embeddings") else window
    return tuple(LayerAttention(sliding_window=window if kind == SLIDING else 0, rope=ropes[kind]) for kind in kinds)


def _layer_kinds(config: Mapping[str, Any], architecture: Architecture) -> tuple[str, ...]:
    """FULL or SLIDING a layer."""
    count, rule = integer(config, "num_hidden_layers", most=LAYERS_MAX), architecture.windows
    if rule == "none" or (rule != "alternating" and config.get("sliding_window") is None):
        return (FULL,) * count
    if rule == "always":
        return (SLIDING,) * count
    if rule == "flagged" and not flag(config, "use_sliding_window"):
        return (FULL,) * count
    listed = config.get("layer_types")
    if listed is not None:
        if not isinstance(listed, (list, tuple)) or len(listed) != count:
            raise CheckpointError(f"layer_types must be a list of {count}, one a layer, got {listed!r}; check the model's config")
        unknown = [kind for kind in listed if kind not in (FULL, SLIDING)]
        if unknown:
            raise UnsupportedError(f"layer type {unknown[0]!r} is not supported; supported are {FULL!r} and {SLIDING!r}")
        return tuple(listed)
    if rule == "flagged":
        first = integer(config, "max_window_layers", least=0)
        return tuple(SLIDING if index >= first else FULL for index in range(count))
    pattern = integer(config, "sliding_window_pattern")
    return tuple(FULL if (index + 1) % pattern == 0 else SLIDING for index in range(count))
