"""Tensors whose shapes are not what the config says are refused by name before anything runs, also where the number of values is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_model import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCABULARY, folder_tensors, write_folder

from lockstep.config import EngineConfig
from lockstep.errors import CheckpointError
from lockstep.launch import resolve_model
from lockstep.launch.stages import PackedWeights, make_backend

DOWN = "model.layers.1.mlp.down_proj.weight"
GAIN = "model.layers.0.input_layernorm.weight"
CONFIG: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INNER,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def pack_everything(folder: Path) -> None:
    config = EngineConfig(model=str(folder), dtype="float32")
    model = resolve_model(config)
    PackedWeights(make_backend(config), model).of(model.program(0))


def test_a_right_folder_is_packed(tmp_path: Path) -> None:
    pack_everything(write_folder(tmp_path / "right", folder_tensors(0), config=CONFIG))


@pytest.mark.parametrize(
    ("name", "shape"),
    [(DOWN, (INNER, HIDDEN)), (DOWN, (HIDDEN, INNER + 1)), (DOWN, (HIDDEN * INNER,)), (GAIN, (1, HIDDEN)), (GAIN, (HIDDEN - 1,))],
)
def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    tensors = folder_tensors(0)
    assert tensors[name].shape != shape
    tensors[name] = np.ones(shape, np.float32)
    folder = write_folder(tmp_path / "wrong", tensors, config=CONFIG)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        pack_everything(folder)
