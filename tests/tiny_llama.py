"""A Llama of two layers with random weights and a byte tokenizer, as a Hugging Face folder that generates. Uses none of our code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, WINDOW = 32, 4, 2, 8, 48, 2, 256
VOCABULARY = 257
"""Every byte, and the end."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INNER,
    "max_position_embeddings": WINDOW,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": VOCABULARY - 1,
    "torch_dtype": "float32",
}


def tiny_tensors(seed: int) -> dict[str, np.ndarray]:
    """Hugging Face name -> float32 values."""
    generator = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
                "post_attention_layernorm": (HIDDEN,),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }.items()
        }
    return {name: (0.3 * generator.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def write_tiny_llama(folder: Path, *, seed: int = 0, shards: int = 2) -> Path:
    """shards: files of weights, with an index where there are several."""
    folder.mkdir(parents=True)
    tensors = tiny_tensors(seed)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": VOCABULARY - 1}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({**{letter: i for i, letter in enumerate(alphabet)}, "</s>": len(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for shard in sorted(set(weight_map.values())):
        save_file({name: values for name, values in tensors.items() if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
