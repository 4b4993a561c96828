"""A GGUF file's metadata as the config.json that the same model would have. Knows keys and ranges; does not read tensors beyond rotary factors."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.weights.gguf_names import ARCHITECTURES, LONG_FACTORS, MIXTRAL, ROPE_FACTORS, SHORT_FACTORS, GgufArchitecture
from lockstep.weights.gguf_parts import GgufParts

EXTENT_MAX = 1 << 24
# Settings such as the rotary base or an epsilon: nothing that float32 cannot hold to its full precision.
NUMBER_MIN, NUMBER_MAX = 1e-30, 1e30
# GGUF does not name the settings of Llama 3's rotary scaling, only the factors that come of them; these three are the same in every release of it.
LLAMA3_ROPE: dict[str, float] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Metadata that changes what the model computes in ways that the families we have do not know.
UNKNOWN_SETTINGS = ("attention.clamp_kqv", "attention.max_alibi_bias", "logit_scale", "embedding_scale", "residual_scale")

_DENSE_LAYER = re.compile(r"blk\.[0-9]{1,6}\.ffn_gate\.weight")


def architecture_of(file: GgufParts) -> GgufArchitecture:
    """The entry of the names table for `general.architecture`. Raises UnsupportedError."""
    name = _Fields(file, "").text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedError(f"{file.path}: architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if name == "llama" and _Fields(file, "llama.").get("expert_count"):
        return MIXTRAL
    return ARCHITECTURES[name]


def config_of(file: GgufParts) -> dict[str, Any]:
    """config.json in Hugging Face names. Raises CheckpointError for missing or absurd settings, UnsupportedError for those we cannot honour."""
    architecture = architecture_of(file)
    fields = _Fields(file, f"{file.metadata['general.architecture']}.")
    for key in UNKNOWN_SETTINGS:
        if fields.get(key):
            raise UnsupportedError(f"{file.path}: has {fields.prefix}{key} = {fields.get(key)!r}, a setting that is not supported")
    if fields.get("expert_count") and not architecture.expert_tensors:
        raise UnsupportedError(f"{file.path}: a mixture of experts of type {architecture.model_type!r} is not supported")
    hidden_size = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    is_phi3, is_gemma = architecture.model_type == "phi3", architecture.norm_offset != 0.0
    rotated = fields.integer("rope.dimension_count", hidden_size // heads)
    head_dim = fields.integer("attention.key_length", hidden_size // heads if is_phi3 or is_gemma else rotated)
    if head_dim < 1:
        raise CheckpointError(f"{file.path}: {heads} heads in a hidden size of {hidden_size} leave heads of no values; download the file again")
    rotated = fields.integer("rope.dimension_count", head_dim)
    if (rotated != head_dim and not is_phi3) or fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{file.path}: heads of {head_dim} with other sizes for rotation or values are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or embedding.shape[1:] != (hidden_size,):
        raise CheckpointError(f"{file.path}: token_embd.weight is missing or not [vocabulary, {hidden_size}]; copy or download the file again")
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "hidden_size": hidden_size,
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": fields.integer("feed_forward_length"),
        "hidden_act": "gelu_pytorch_tanh" if is_gemma else "silu",
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, fields, rotated),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": fields.integer("context_length"),
    }
    if fields.get("attention.sliding_window"):
        config["sliding_window"] = fields.integer("attention.sliding_window")
    if architecture.model_type == "llama" and "sliding_window" in config:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    if architecture.expert_tensors:
        config |= _expert_settings(file, fields, config)
    if is_phi3:
        config |= _phi3_settings(fields, rotated, head_dim, is_long=bool(config["rope_scaling"]))
    if is_gemma:
        config |= _gemma_settings(file, fields, config)
    return config | _token_ids(file, bos_token_id="bos", eos_token_id="eos")


def _expert_settings(file: GgufParts, fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Under Mixtral's names or Qwen's. That Qwen 3's weights of experts add up to 1 and Qwen 2's do not is fixed by the architecture where the file
    does not say it. Source: llama.cpp, src/llama-model.cpp (LLM_ARCH_QWEN2MOE, LLM_ARCH_QWEN3MOE)."""
    count, top_k = fields.integer("expert_count"), fields.integer("expert_used_count")
    if config["model_type"] == "mixtral":
        return {"num_local_experts": count, "num_experts_per_tok": top_k}
    renormalise = file.metadata.get(f"{fields.prefix}expert_weights_norm")
    settings: dict[str, Any] = {
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "norm_topk_prob": config["model_type"] == "qwen3_moe" if renormalise is None else bool(renormalise),
        "mlp_only_layers": sorted(int(name.split(".")[1]) for name in file.tensors if _DENSE_LAYER.fullmatch(name)),
    }
    if config["model_type"] == "qwen2_moe":
        settings["shared_expert_intermediate_size"] = fields.integer("expert_shared_feed_forward_length")
    return settings


def _phi3_settings(fields: _Fields, rotated: int, head_dim: int, *, is_long: bool) -> dict[str, Any]:
    """The rotated part of a head as config.json says it, and the window that the model was first trained at."""
    share = rotated / head_dim
    settings: dict[str, Any] = {"partial_rotary_factor": share if int(head_dim * share) == rotated else math.nextafter(share, 2.0)}
    if is_long:
        settings["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
    return settings


def _gemma_settings(file: GgufParts, fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    """What GGUF does not name is fixed by the architecture: every second layer of Gemma 2 sees everything, every sixth of Gemma 3, whose other
    layers have a rotary base of 10000; queries are scaled by the width of a head, but in the 27B models by hidden_size / heads, which are known by
    their number of layers. Source: llama.cpp, src/llama-model.cpp (LLM_ARCH_GEMMA2, LLM_ARCH_GEMMA3)."""
    is_third = config["model_type"] == "gemma3_text"
    is_27b = config["num_hidden_layers"] == (62 if is_third else 46)
    pattern = file.metadata.get(f"{fields.prefix}attention.sliding_window_pattern")  # one number, or a flag a layer
    settings: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"],
        "sliding_window": fields.integer("attention.sliding_window"),
    }
    if isinstance(pattern, np.ndarray):
        settings["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern.tolist()]
    else:
        settings["sliding_window_pattern"] = fields.integer("attention.sliding_window_pattern", 6 if is_third else 2)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        settings[key] = fields.number(key) if fields.get(key) else None
    if is_third:
        settings["rope_local_base_freq"] = fields.number("rope.freq_base_swa", 10000.0)
    return settings


def generation_config_of(file: GgufParts) -> dict[str, Any]:
    """generation_config.json: the beginning, padding and all ending tokens, where the file names them."""
    config: dict[str, Any] = _token_ids(file, bos_token_id="bos", pad_token_id="padding")
    ends = _token_ids(file, eos="eos", eot="eot", eom="eom")
    return config | ({"eos_token_id": list(dict.fromkeys(ends.values()))} if ends else {})


def _token_ids(file: GgufParts, **keys: str) -> dict[str, int]:
    """The ids among tokenizer.ggml.*_token_id that the file has; keys: our name -> the file's."""
    found: dict[str, int] = {}
    for name, key in keys.items():
        value = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            if type(value) is not int or not 0 <= value < EXTENT_MAX:
                raise CheckpointError(f"{file.path}: tokenizer.ggml.{key}_token_id is {value!r}; a token id was expected; download the file again")
            found[name] = value
    return found


def _rope_scaling(file: GgufParts, fields: _Fields, head_dim: int) -> dict[str, Any] | None:
    """`rope_scaling` of config.json, or None. Raises UnsupportedError for scaling that cannot be said in its terms."""
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, fields, head_dim)
    if LONG_FACTORS in file.tensors or SHORT_FACTORS in file.tensors:
        return _long_scaling(file, fields)
    kind = fields.get("rope.scaling.type") or "none"
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        original = fields.integer("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": fields.number("rope.scaling.factor"), "original_max_position_embeddings": original}
    raise UnsupportedError(f"{file.path}: {fields.prefix}rope.scaling.type {kind!r} is not supported; none, linear and yarn are")


def _llama3_scaling(file: GgufParts, fields: _Fields, head_dim: int) -> dict[str, Any]:
    """The settings whose factors the file holds: the largest factor is `factor`; the rest must follow from Llama 3's rule, or it is another rule."""
    tensor = file.tensors[ROPE_FACTORS]
    unlike = UnsupportedError(f"{file.path}: the rotary factors in {ROPE_FACTORS} are not those of Llama 3's rule, the only one supported")
    if tensor.shape != (len(range(0, head_dim, 2)),):
        raise unlike
    stored = _factors(file, ROPE_FACTORS)
    factor = float(stored.max())
    if not np.isfinite(factor) or factor < 1:
        raise unlike
    wavelengths = 2 * np.pi * fields.number("rope.freq_base", 10000.0) ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    smooth = np.clip((LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    if not np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4, atol=0):
        raise unlike
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


def _long_scaling(file: GgufParts, fields: _Fields) -> dict[str, Any]:
    """LongRoPE's factors from the two tensors that hold them, and the magnitude where the file has one."""
    if LONG_FACTORS not in file.tensors or SHORT_FACTORS not in file.tensors:
        raise CheckpointError(f"{file.path}: has one of {LONG_FACTORS} and {SHORT_FACTORS}, both were expected; copy or download the file again")
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    for key, name in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
        scaling[key] = [float(str(value)) for value in _factors(file, name)]
    if fields.get("rope.scaling.attn_factor"):
        scaling["attention_factor"] = fields.number("rope.scaling.attn_factor")
    return scaling


def _factors(file: GgufParts, name: str) -> NDArray[np.float32]:
    tensor = file.tensors[name]
    return tensor.number_format.widen(tensor.stored())


class _Fields:
    """Typed look-ups of one architecture's keys, with ranges."""

    def __init__(self, file: GgufParts, prefix: str) -> None:
        self._file = file
        self.prefix = prefix

    def get(self, key: str) -> Any:
        """A bool, int, float or str, or None if the file has no such key. Raises UnsupportedError for a list."""
        value = self._file.metadata.get(self.prefix + key)
        if isinstance(value, (np.ndarray, list)):
            raise UnsupportedError(f"{self._file.path}: {self.prefix}{key} is a list, one value a layer perhaps, which is not supported")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            self._fail(key, value, "a string")
        return str(value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= EXTENT_MAX:
            self._fail(key, value, f"an integer from 1 to {EXTENT_MAX}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """The shortest decimal that gives the stored float32, which is what config.json has."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not float or not NUMBER_MIN <= value <= NUMBER_MAX:
            self._fail(key, value, f"a number from {NUMBER_MIN} to {NUMBER_MAX}")
        return float(str(np.float32(value)))

    def _fail(self, key: str, value: object, expected: str) -> None:
        found = "is missing" if value is None else f"is {value!r:.200}"
        raise CheckpointError(f"{self._file.path}: {self.prefix}{key} {found}; {expected} was expected; copy or download the file again")
