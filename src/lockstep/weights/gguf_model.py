"""GGUF files as a checkpoint: Hugging Face names, shapes and row order. Knows the names table; does not know what a model computes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.weights.gguf_config import architecture_of, config_of, generation_config_of
from lockstep.weights.gguf_file import GgufTensor
from lockstep.weights.gguf_names import MODEL_TENSORS, SETTING_TENSORS, GgufArchitecture
from lockstep.weights.gguf_parts import open_parts
from lockstep.weights.mapped_file import content_hash

_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")


class GgufCheckpoint:
    """One .gguf file, or the parts of a split one. Opening reads the headers; `read` touches the bytes of one tensor.

    path: the file, or the first part. config, generation_config: as a Hugging Face folder of the same model would have them. tokenizer_source: the
    metadata of that file.
    """

    def __init__(self, path: Path) -> None:
        """path: the file, or the first part. Raises CheckpointError for damaged files and for parts that are missing or do not fit together,
        UnsupportedError for an architecture, number format or tensor that we lack."""
        self.path = path
        self._fingerprint: str | None = None
        self._file = open_parts(path)
        self.config: Mapping[str, Any] = config_of(self._file)
        self.generation_config: Mapping[str, Any] = generation_config_of(self._file)
        self.tokenizer_source: Mapping[str, Any] = self._file.metadata
        self._architecture = architecture_of(self._file)
        self._tensors: dict[str, _Part] = {}
        for tensor in self._file.tensors.values():
            if tensor.name not in SETTING_TENSORS:
                self._tensors |= self._parts(tensor)

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str) -> NDArray[np.float32]:
        """float32 in the shape of `shape(name)`; may be a read-only view of the file."""
        part = self._tensor(name)
        tensor, raw = part.tensor, part.tensor.stored()
        if part.expert is not None:
            return tensor.number_format.widen(raw.reshape(tensor.shape[0], -1)[part.expert]).reshape(part.shape)
        layer_name = _LAYER_NAME.fullmatch(tensor.name)
        if layer_name is not None and layer_name[2] in self._architecture.interleaved:
            raw = raw.reshape(tensor.shape[0], -1)[self._half_split_order(tensor)].reshape(-1)
        values = tensor.number_format.widen(raw).reshape(part.shape)
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            return values - np.float32(self._architecture.norm_offset)
        return values

    def fingerprint(self) -> str:
        """64 hex digits: a hash of every byte of the file, or of all parts and their order (0.1 s for 100 MB); names do not count."""
        if self._fingerprint is None:
            self._fingerprint = content_hash(self._file.contents())
        return self._fingerprint

    def _tensor(self, name: str) -> _Part:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}; the file is incomplete or of another model: copy or download it again")
        return self._tensors[name]

    def _half_split_order(self, tensor: GgufTensor) -> NDArray[np.intp]:
        """Stored row of each row in Hugging Face order. Rows 2i and 2i + 1 of a head are a rotary pair as stored, i and i + head_dim / 2 there."""
        head_dim: int = self.config["head_dim"]
        rows = tensor.shape[0]
        if rows % head_dim or head_dim % 2:
            raise CheckpointError(f"{self.path}: tensor {tensor.name!r} has {rows} rows, not whole heads of {head_dim} rows in pairs")
        return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)

    def _parts(self, tensor: GgufTensor) -> dict[str, _Part]:
        """By Hugging Face's names: one, or one an expert."""
        name = _hugging_face_name(self.path, self._architecture, tensor.name, self.config["num_hidden_layers"])
        if "{expert}" not in name:
            is_row = tensor.name.split(".")[2:3] and tensor.name.split(".")[2] in self._architecture.vectors
            return {name: _Part(tensor=tensor, shape=(1, *tensor.shape) if is_row else tensor.shape)}
        count = self.config.get("num_experts", self.config.get("num_local_experts"))
        if len(tensor.shape) != 3 or tensor.shape[0] != count:
            raise CheckpointError(f"{self.path}: tensor {tensor.name!r} has shape {tensor.shape}, expected the matrices of {count} experts")
        return {name.format(expert=expert): _Part(tensor=tensor, shape=tensor.shape[1:], expert=expert) for expert in range(tensor.shape[0])}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A tensor as Hugging Face has it, or the matrix of one expert out of a tensor of all."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    expert: int | None = None


def _hugging_face_name(path: Path, architecture: GgufArchitecture, stored: str, layer_count: int) -> str:
    """Raises UnsupportedError for a tensor that the model would need and that we would not use: ignoring it would give wrong tokens."""
    if stored in MODEL_TENSORS:
        return MODEL_TENSORS[stored]
    parts = _LAYER_NAME.fullmatch(stored)
    names = {**architecture.layer_tensors, **architecture.expert_tensors}
    if parts is None or parts[2] not in names:
        raise UnsupportedError(f"{path}: tensor {stored!r} is not known for models of type {architecture.model_type!r}")
    if int(parts[1]) >= layer_count:
        raise CheckpointError(f"{path}: tensor {stored!r} is beyond the {layer_count} layers that the file declares; copy or download it again")
    return f"model.layers.{parts[1]}.{names[parts[2]]}.{parts[3]}"
