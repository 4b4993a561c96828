"""A tiny model of `family_models` as a folder that anyone could have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from family_models import FamilyModel
from lockstep.ops.step import F32
from lockstep.verify.texts import TEXT


def write_folder(path: Path, model: FamilyModel, weights: Mapping[str, F32] | None = None) -> Path:
    """config.json, safetensors and a byte-level tokenizer of fewer ids than the vocabulary. weights: other ones than the model's."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(model.config))
    save_file(dict(model.weights() if weights is None else weights), path / "model.safetensors")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return path
