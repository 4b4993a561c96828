"""GGUF files as checkpoints, held against the gguf package and against transformers' own conversion."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from tiny_model import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCABULARY, gguf_tensors, write_gguf

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.weights import find_model, open_checkpoint
from lockstep.weights.gguf_file import open_gguf

Type = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def embedded() -> Path:
    try:
        return find_model("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("matrix_type", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_every_number_format_that_it_writes_is_widened_bit_for_bit_as_the_gguf_package_does(
    tmp_path: Path, matrix_type: gguf.GGMLQuantizationType
) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(1), matrix_type=matrix_type)
    checkpoint = open_checkpoint(path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for theirs, ours in (("token_embd.weight", "model.embed_tokens.weight"), ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight")):
        expected = dequantize(stored[theirs].data, stored[theirs].tensor_type)
        values = checkpoint.read(ours)
        assert values.dtype == np.float32
        assert values.shape == expected.shape == checkpoint.shape(ours)
        assert np.array_equal(values.view(np.uint32), np.ascontiguousarray(expected, np.float32).view(np.uint32))


def test_every_tensor_of_the_embedded_model_equals_the_gguf_package_up_to_the_order_of_rows(embedded: Path) -> None:
    checkpoint = open_checkpoint(embedded)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(embedded).tensors}
    assert len(checkpoint.names()) == len(stored) == 272
    for name, tensor in zip(checkpoint.names(), open_gguf(embedded).tensors, strict=True):
        theirs, ours = stored[tensor], checkpoint.read(name)
        expected = dequantize(theirs.data, theirs.tensor_type)
        if tensor.endswith(("attn_q.weight", "attn_k.weight")):
            expected = expected.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
        assert np.array_equal(ours, expected), name


def model_of(tmp_path: Path, architecture: str) -> Path:
    """A tiny model with everything that the architecture can have."""
    tensors, generator = gguf_tensors(2), np.random.default_rng(3)
    for layer in range(LAYERS):
        if architecture == "qwen2":
            for part, rows in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
                tensors[f"blk.{layer}.attn_{part}.bias"] = generator.standard_normal(rows).astype(np.float32)
        if architecture == "qwen3":
            for part in ("q", "k"):
                tensors[f"blk.{layer}.attn_{part}_norm.weight"] = generator.standard_normal(HEAD_DIM).astype(np.float32)
    tensors["output.weight"] = generator.standard_normal((VOCABULARY, HIDDEN)).astype(np.float32)
    lengths = {f"{architecture}.attention.key_length": HEAD_DIM, f"{architecture}.attention.value_length": HEAD_DIM}
    return write_gguf(tmp_path / "m.gguf", tensors, architecture=architecture, extra=lengths)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_config_names_and_shapes_are_those_of_the_transformers_model(tmp_path: Path, architecture: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(model_of(tmp_path, architecture))
    config = AutoConfig.for_model(**checkpoint.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert [type(model).__name__] == checkpoint.config["architectures"]
    assert {name: checkpoint.shape(name) for name in checkpoint.names()} == {name: tuple(value.shape) for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("default")  # transformers' and accelerate's own
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_values_and_settings_equal_those_of_transformers_gguf_reader(tmp_path: Path, architecture: str) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate installed")
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    checkpoint = open_checkpoint(model_of(tmp_path, architecture))
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), local_files_only=True
    )
    expected = {name: value.numpy() for name, value in model.state_dict().items()}
    assert set(checkpoint.names()) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(checkpoint.read(name), values), name
    theirs = model.config.to_dict()
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "tie_word_embeddings"):
        assert checkpoint.config[key] == theirs[key], key
    assert checkpoint.config["rope_theta"] == theirs["rope_parameters"]["rope_theta"]
    assert np.float32(checkpoint.config["rms_norm_eps"]) == np.float32(theirs["rms_norm_eps"])


def test_config_of_the_embedded_model_is_the_published_one(embedded: Path) -> None:
    config = open_checkpoint(embedded).config
    published = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "intermediate_size": 1536, "rms_norm_eps": 1e-05, "rope_theta": 100000, "rope_scaling": None, "vocab_size": 49152,
        "tie_word_embeddings": True, "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    }  # fmt: skip
    assert {key: config[key] for key in published} == published


def test_ends_of_sequence_turn_and_message_are_all_in_the_generation_config(tmp_path: Path) -> None:
    ids = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", gguf_tensors(1), extra=ids))
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 5]}
    assert checkpoint.config["eos_token_id"] == 2


def test_metadata_values_are_decoded_as_the_gguf_package_decodes_them(embedded: Path) -> None:
    metadata = open_gguf(embedded).metadata
    theirs = {key: field.contents() for key, field in gguf.GGUFReader(embedded).fields.items() if not key.startswith("GGUF.")}
    assert list(metadata) == list(theirs)
    for key, value in theirs.items():
        ours = metadata[key]
        assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == value, key


def test_rotary_factors_of_llama_3_become_its_settings_and_others_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, head_dim=HEAD_DIM, max_position_embeddings=131072, rope_parameters=settings), "cpu"
    )
    plain = 500000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    tensors = gguf_tensors(1)
    tensors["rope_freqs.weight"] = (plain / scaled.numpy()).astype(np.float32)
    assert tensors["rope_freqs.weight"].min() == pytest.approx(1)
    base = {"llama.rope.freq_base": 500000.0}
    path = rewrite_rope_base(tmp_path / "m.gguf", tensors, base)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["rope_scaling"] == pytest.approx({key: value for key, value in settings.items() if key != "rope_theta"})
    assert "rope_freqs.weight" not in checkpoint.names()
    tensors["rope_freqs.weight"][1] *= 1.5
    with pytest.raises(UnsupportedError, match="rotary factors"):
        open_checkpoint(rewrite_rope_base(tmp_path / "n.gguf", tensors, base))


def rewrite_rope_base(path: Path, tensors: dict[str, np.ndarray], base: dict[str, float]) -> Path:
    """The tiny model with another rotary base: the writer refuses to set a key twice, so the four bytes are replaced in the file."""
    write_gguf(path, tensors)
    key = b"llama.rope.freq_base"
    raw = path.read_bytes()
    place = raw.index(key) + len(key) + 4
    path.write_bytes(raw[:place] + np.float32(base[key.decode()]).tobytes() + raw[place + 4 :])
    return path


@pytest.mark.parametrize(
    ("extra", "architecture", "match"),
    [
        ({}, "mamba", "architecture 'mamba'"),
        ({"qwen2.expert_count": 8}, "qwen2", "mixture of experts"),
        ({"llama.attention.key_length": 32}, "llama", "rotation"),
        ({"llama.rope.scaling.type": "longrope"}, "llama", "longrope"),
        ({"llama.expert_count": [0, 8]}, "llama", "expert_count is a list"),
        ({"llama.attention.sliding_window": [0, 8]}, "llama", "sliding_window is a list"),
        ({"llama.rope.scaling.type": ["yarn"]}, "llama", "rope.scaling.type is a list"),
    ],
)
def test_a_model_that_we_would_compute_wrongly_is_refused(tmp_path: Path, extra: dict[str, object], architecture: str, match: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(1), architecture=architecture, extra=extra)
    with pytest.raises(UnsupportedError, match=match):
        open_checkpoint(path)


def test_a_tensor_that_we_would_not_use_is_refused(tmp_path: Path) -> None:
    tensors = gguf_tensors(1) | {"blk.0.attn_sub_norm.weight": np.ones(HIDDEN, np.float32)}
    with pytest.raises(UnsupportedError, match="attn_sub_norm"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))


def test_an_unsupported_number_format_is_named_with_those_that_are_supported(tmp_path: Path) -> None:
    tensors = gguf_tensors(1)
    supported = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K"
    with pytest.raises(UnsupportedError, match=f"type MXFP4, which is not supported; supported are {supported}"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, matrix_type=Type.MXFP4))


def test_a_missing_tensor_is_named_when_it_is_read(tmp_path: Path) -> None:
    tensors = gguf_tensors(1)
    del tensors["blk.1.ffn_up.weight"]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert checkpoint.read("model.layers.0.mlp.up_proj.weight").shape == (INNER, HIDDEN)
    for ask in (checkpoint.read, checkpoint.shape):
        with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            ask("model.layers.1.mlp.up_proj.weight")


def test_fingerprint_depends_on_content_and_not_on_the_path(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "a.gguf", gguf_tensors(1))
    raw = first.read_bytes()
    (tmp_path / "b.gguf").write_bytes(raw)
    fingerprint = open_checkpoint(first).fingerprint()
    assert open_checkpoint(tmp_path / "b.gguf").fingerprint() == fingerprint
    changed = raw[:-1] + bytes([raw[-1] ^ 1])
    (tmp_path / "c.gguf").write_bytes(changed)
    assert open_checkpoint(tmp_path / "c.gguf").fingerprint() != fingerprint
