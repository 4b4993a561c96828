"""Small random llama-like models written as GGUF and as a Hugging Face folder. Knows how such files are laid out; does not use our readers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY, LAYERS = 64, 4, 2, 16, 96, 40, 2


def layer_shapes(hidden: int = HIDDEN) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name -> Hugging Face name and shape, of one layer."""
    return {
        "attn_norm.weight": ("input_layernorm.weight", (hidden,)),
        "attn_q.weight": ("self_attn.q_proj.weight", (HEADS * HEAD_DIM, hidden)),
        "attn_k.weight": ("self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, hidden)),
        "attn_v.weight": ("self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, hidden)),
        "attn_output.weight": ("self_attn.o_proj.weight", (hidden, HEADS * HEAD_DIM)),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (hidden,)),
        "ffn_gate.weight": ("mlp.gate_proj.weight", (INNER, hidden)),
        "ffn_up.weight": ("mlp.up_proj.weight", (INNER, hidden)),
        "ffn_down.weight": ("mlp.down_proj.weight", (hidden, INNER)),
    }


def gguf_tensors(seed: int, hidden: int = HIDDEN) -> dict[str, NDArray[np.float32]]:
    """GGUF name -> float32 values."""
    generator = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, hidden), "output_norm.weight": (hidden,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, (_, shape) in layer_shapes(hidden).items()}
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    tensors: dict[str, NDArray[np.float32]],
    *,
    architecture: str = "llama",
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, object] | None = None,
    raw: Mapping[str, tuple[gguf.GGMLQuantizationType, NDArray[np.uint8]]] | None = None,
    tensors_a_part: int = 0,
    first_part_is_bare: bool = False,
) -> Path:
    """A GGUF file of `tensors`; those with two axes are stored as `matrix_type`. extra: more metadata (str, int, float or list), architecture keys
    by their full name. raw: tensors that are stored as these bytes, uint8 [rows, bytes a row], instead of their values.

    tensors_a_part, first_part_is_bare: with either, the file is split as llama.cpp splits them. Returns the path of the file, or of the first part.
    """
    hidden = tensors["output_norm.weight"].shape[0]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_part, small_first_shard=first_part_is_bare)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(VOCABULARY)])
    writer.add_token_merges(["t 1", "t 2"])
    for key, value in (extra or {}).items():
        adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        adders[type(value)](key, value)
    for name, values in tensors.items():
        if name in (raw or {}):
            writer.add_tensor(name, raw[name][1], raw_dtype=raw[name][0])
        elif values.ndim == 2:
            writer.add_tensor(name, quantize(values, matrix_type), raw_dtype=matrix_type)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.format_shard_names(path)[0]


def folder_tensors(seed: int) -> dict[str, NDArray[np.float32]]:
    """Hugging Face name -> float32 values."""
    plain = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    names = {**plain, **{f"blk.{i}.{name}": f"model.layers.{i}.{to}" for i in range(LAYERS) for name, (to, _) in layer_shapes().items()}}
    return {names[name]: values for name, values in gguf_tensors(seed).items()}


def write_folder(path: Path, tensors: dict[str, NDArray[np.float32]], *, shards: int = 1, config: dict[str, object] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, **(config or {})}))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(tensors)}
    for shard in sorted(set(weight_map.values())):
        save_file({name: values for name, values in tensors.items() if weight_map[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path
