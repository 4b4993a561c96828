"""What a model is, read from its config: sizes, norms, rotary parameters, window, special tokens.

Knows the names of Hugging Face's config.json, in the older form (`rope_theta`, `rope_scaling`) and in that of transformers 5 (`rope_parameters`).
Does not know how the model is computed, which weights it has, or where the config came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lockstep.errors import CheckpointError, UnsupportedError

FAMILY_OF_ARCHITECTURE: Mapping[str, str] = MappingProxyType({"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama"})
"""Which family's program computes an architecture. A Mistral without its sliding window is a Llama in every operation."""

SIZE_MAX = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the rotary frequencies. original_window: the window that the model was first trained at, in tokens."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The sizes and constants of one decoder.

    family: which builder emits its program (a value of FAMILY_OF_ARCHITECTURE). window: the most tokens of one sequence (max_position_embeddings).
    ffn_size: width of the gated feed-forward layer. rope_scaling: None for plain rotary embeddings.
    tie_embeddings: the head is the embedding table.
    attention_bias: on queries, keys, values and the output projection. mlp_bias: on gate, up and down.
    bos_token_ids, eos_token_ids: empty where the config names none; the model's own end of an answer is any of eos_token_ids.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    window: int
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read a config in config.json's names.

    Raises UnsupportedError for an architecture, activation, rotary scaling or attention window that Lockstep does not compute,
    CheckpointError, naming the key, for a number that is missing or absurd.
    """
    family = _family(config)
    _refuse_what_is_not_computed(config)
    vocab_size = _integer(config, "vocab_size")
    hidden_size = _integer(config, "hidden_size")
    head_count = _integer(config, "num_attention_heads")
    kv_head_count = _integer(config, "num_key_value_heads", default=head_count)
    if head_count % kv_head_count:
        raise CheckpointError(f"num_key_value_heads must divide num_attention_heads, got {kv_head_count} and {head_count}; check the model's config")
    if config.get("head_dim") is None and hidden_size % head_count:
        raise CheckpointError(f"hidden_size must be a multiple of num_attention_heads where head_dim is absent, got {hidden_size} and {head_count}")
    head_dim = _integer(config, "head_dim", default=hidden_size // head_count)
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(f"head_dim must be even, since rotary embeddings turn pairs, got {head_dim}; check the model's config")
    theta, scaling = _rope(config)
    return ModelSpec(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layer_count=_integer(config, "num_hidden_layers"),
        head_count=head_count,
        kv_head_count=kv_head_count,
        head_dim=head_dim,
        ffn_size=_integer(config, "intermediate_size"),
        norm_eps=_number(config, "rms_norm_eps", default=1e-6, below=1.0),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        window=_integer(config, "max_position_embeddings"),
        attention_bias=_flag(config, "attention_bias"),
        mlp_bias=_flag(config, "mlp_bias"),
        bos_token_ids=_token_ids(config, "bos_token_id", vocab_size),
        eos_token_ids=_token_ids(config, "eos_token_id", vocab_size),
    )


def _family(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, (list, tuple)) or not names:
        raise CheckpointError(f"architectures must be a list with the model's class name, got {names!r}; check the model's config")
    for name in names:
        if isinstance(name, str) and name in FAMILY_OF_ARCHITECTURE:
            return FAMILY_OF_ARCHITECTURE[name]
    raise UnsupportedError(f"architecture {', '.join(map(str, names))} is not supported; supported are {', '.join(sorted(FAMILY_OF_ARCHITECTURE))}")


def _refuse_what_is_not_computed(config: Mapping[str, Any]) -> None:
    """Settings that change the numbers and that no program here computes; reading past them would answer from another model."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act {activation!r} is not supported; supported is 'silu'")
    window = None if config.get("sliding_window") is None else _integer(config, "sliding_window")
    if window is not None and window < _integer(config, "max_position_embeddings"):
        raise UnsupportedError(
            f"sliding_window {window} below max_position_embeddings {config['max_position_embeddings']} is not supported; "
            "use a model with full attention, or set max_position_embeddings to the sliding window"
        )
    if config.get("quantization_config") is not None:
        raise UnsupportedError("quantization_config is not supported; use a checkpoint in float32, float16 or bfloat16, or a GGUF file")


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base frequency and scaling, from whichever form the config has."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"rope_parameters must be a mapping, got {parameters!r}; check the model's config")
    place = parameters if "rope_theta" in parameters else config
    theta = _number(place, "rope_theta", default=10000.0, below=1e12)
    if theta < 1.0:
        raise CheckpointError(f"rope_theta must be at least 1, got {theta:g}; check the model's config")
    if _number(parameters if "partial_rotary_factor" in parameters else config, "partial_rotary_factor", default=1.0, below=2.0) != 1.0:
        raise UnsupportedError("partial_rotary_factor other than 1 is not supported; supported are models that rotate whole heads")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedError(f"rotary scaling {kind!r} is not supported; supported are 'default' and 'llama3'")
    scaling = RopeScaling(
        factor=_number(parameters, "factor", below=1e6),
        low_frequency_factor=_number(parameters, "low_freq_factor", below=1e6),
        high_frequency_factor=_number(parameters, "high_freq_factor", below=1e6),
        original_window=_integer(parameters, "original_max_position_embeddings", default=_integer(config, "max_position_embeddings")),
    )
    if scaling.high_frequency_factor <= scaling.low_frequency_factor:
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        raise CheckpointError(f"high_freq_factor must be above low_freq_factor, got {high:g} and {low:g}; check the model's config")
    return theta, scaling


def _integer(config: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= SIZE_MAX:
        raise CheckpointError(f"{key} must be an integer from 1 to {SIZE_MAX}, got {value!r}; check the model's config")
    return value


def _number(config: Mapping[str, Any], key: str, *, below: float, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 < value < below:
        raise CheckpointError(f"{key} must be a number above 0 and below {below:g}, got {value!r}; check the model's config")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{key} must be true or false, got {value!r}; check the model's config")
    return bool(value)


def _token_ids(config: Mapping[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    value = config.get(key)
    values = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
            raise CheckpointError(f"{key} must hold ids from 0 to {vocab_size - 1}, got {value!r}; check the model's config")
    return values
