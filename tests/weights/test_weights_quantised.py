"""Quantised folders: every code of a scheme is what torch and transformers make of it, whole models answer as their widened weights do, and what does
not fit together is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from family_models import FAMILY_MODELS, FamilyModel
from lockstep.backends.native import NativeBackend
from lockstep.errors import CheckpointError
from lockstep.weights import open_checkpoint
from lockstep.weights.checkpoint import Checkpoint
from rig import build_stages, logits_of

MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}}


def write(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def random_blocks(outer: tuple[int, ...], rows: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of every kind, with scales from 2 ** -9 to 2 ** -4."""
    draw = np.random.default_rng(rows)
    codes = draw.integers(0, 256, (*outer, rows, groups, 16), np.uint8)
    return torch.from_numpy(codes), torch.from_numpy(draw.integers(118, 124, (*outer, rows, groups), np.uint8))


def test_mxfp4_is_widened_as_transformers_does_and_lies_as_the_unquantised_tensor(tmp_path: Path) -> None:
    blocks, scales = random_blocks((3,), 8, 4)
    scales[0, 0] = torch.tensor([0, 1, 126, 254])
    checkpoint = open_checkpoint(write(tmp_path, {"w_blocks": blocks, "w_scales": scales, "plain": torch.ones(3)}, MXFP4))
    assert set(checkpoint.names()) == {"w", "plain"}
    assert checkpoint.shape("w") == (3, 128, 8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy()
    assert np.array_equal(checkpoint.read("w"), theirs)
    assert np.array_equal(checkpoint.read("plain"), np.ones(3))


def test_mxfp4_has_a_scale_that_is_no_number(tmp_path: Path) -> None:
    blocks, scales = random_blocks((), 2, 1)
    scales[1, 0] = 255
    values = open_checkpoint(write(tmp_path, {"w_blocks": blocks, "w_scales": scales}, MXFP4)).read("w")
    assert np.isfinite(values[:, 0]).all()
    assert np.isnan(values[:, 1]).all()


def test_every_e4m3_code_is_what_torch_makes_of_it(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).reshape(16, 16)
    values = open_checkpoint(write(tmp_path, {"w": codes, "w_scale_inv": torch.ones(1, 1)}, FP8)).read("w")
    assert np.array_equal(values, codes.float().numpy(), equal_nan=True)


def test_fp8_has_a_scale_a_block_and_the_last_blocks_may_be_cut(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    codes = torch.randn((70, 40), generator=draw).to(torch.float8_e4m3fn)
    scales = torch.rand((3, 3), generator=draw) + 0.5
    values = open_checkpoint(write(tmp_path, {"w": codes, "w_scale_inv": scales, "norm": torch.ones(2)}, FP8)).read("w")
    for row in range(70):
        for column in range(40):
            assert values[row, column] == (codes[row, column].float() * scales[row // 32, column // 16]).item()


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"w_blocks": torch.zeros((2, 1, 16), dtype=torch.uint8)}, MXFP4, "no tensor 'w_scales'"),
        ({"w_blocks": torch.zeros((2, 1, 16), dtype=torch.uint8), "w_scales": torch.zeros((2, 2), dtype=torch.uint8)}, MXFP4, "do not fit together"),
        ({"w_blocks": torch.zeros((2, 1, 8), dtype=torch.uint8), "w_scales": torch.zeros((2, 1), dtype=torch.uint8)}, MXFP4, "do not fit together"),
        ({"w_blocks": torch.zeros((2, 1, 16)), "w_scales": torch.zeros((2, 1), dtype=torch.uint8)}, MXFP4, "has type F32, expected U8"),
        ({"w_scale_inv": torch.ones(1, 1)}, FP8, "no tensor 'w'"),
        ({"w": torch.zeros((64, 16), dtype=torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 1)}, FP8, "do not fit together"),
        ({"w": torch.zeros(8, dtype=torch.float8_e4m3fn), "w_scale_inv": torch.ones(1)}, FP8, "do not fit together"),
        ({"w": torch.zeros((32, 16)), "w_scale_inv": torch.ones(1, 1)}, FP8, "has type F32, expected F8_E4M3"),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(tmp_path, tensors, config)).read("w")


def named(name: str) -> FamilyModel:
    return next(model for model in FAMILY_MODELS if model.name == name)


def same_logits(model: FamilyModel, checkpoint: Checkpoint, widened: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]) -> None:
    """A model that was read from a quantised folder and one of the widened weights."""
    assert set(checkpoint.names()) == set(widened)
    tokens = list(range(5, 40))
    one, other = (
        logits_of(build_stages(NativeBackend(), model.spec, tensors), tokens)
        for tensors in ({name: checkpoint.read(name) for name in checkpoint.names()}, widened)
    )
    assert np.array_equal(one, other)
    plain = logits_of(build_stages(NativeBackend(), model.spec, model.weights()), tokens)
    assert not np.array_equal(one, plain), "quantising must have changed something"


def test_gpt_oss_with_mxfp4_experts_is_the_model_of_their_values(tmp_path: Path) -> None:
    model = named("gpt-oss")
    stored, widened = {name: torch.from_numpy(values) for name, values in model.weights().items()}, model.weights()
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        blocks, scales = random_blocks((experts,), rows, columns // 32)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        widened[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy()
    same_logits(model, open_checkpoint(write(tmp_path, stored, {**model.config, **MXFP4})), widened)


def test_deepseek_in_fp8_is_the_model_of_its_values(tmp_path: Path) -> None:
    model = named("deepseek v3")
    stored, widened = {name: torch.from_numpy(values) for name, values in model.weights().items()}, model.weights()
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        codes = (stored[name] * 16).to(torch.float8_e4m3fn)
        rows, columns = codes.shape
        scales = torch.full((-(-rows // 32), -(-columns // 16)), 1 / 16)
        stored |= {name: codes, f"{name}_scale_inv": scales}
        widened[name] = (codes.float() / 16).numpy()
    model = replace(model, changes={**model.changes, **FP8})
    assert model.spec == named("deepseek v3").spec
    same_logits(model, open_checkpoint(write(tmp_path, stored, model.config)), widened)
