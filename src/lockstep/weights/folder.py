"""A Hugging Face folder as a checkpoint: config.json and safetensors in one file or in shards. Knows files; does not know what a model computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import CheckpointError
from lockstep.weights.mapped_file import content_hash, map_file
from lockstep.weights.quantised import Pair, Scheme, scheme_of
from lockstep.weights.safetensors_file import SafetensorsFile, open_safetensors

INDEX_NAME = "model.safetensors.index.json"
# Beside the weights, the files that decide which tokens a request becomes.
IDENTITY_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
JSON_BYTES_MAX = 256 << 20


class FolderCheckpoint:
    """One folder. Opening it reads config files and safetensors headers; `read` touches the bytes of one tensor."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for missing or damaged files, UnsupportedError for folders quantised in a way that is not read."""
        self.path = path
        self._fingerprint: str | None = None
        if not (path / "config.json").is_file():
            loose = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"to use the GGUF file in it, name the file: {path / loose[0]}" if loose else "name the folder that holds the model's files"
            raise CheckpointError(f"{path}: expected a config.json in the folder, found none; {hint}")
        self.config: Mapping[str, Any] = read_json_object(path / "config.json")
        self._scheme = scheme_of(self.config)
        generation = path / "generation_config.json"
        self.generation_config: Mapping[str, Any] = read_json_object(generation) if generation.is_file() else {}
        self.tokenizer_source: Path = path
        self._files, self._file_of = _open_shards(path)
        self._pairs = {} if self._scheme is None else {name: self._pair(self._scheme, name) for name in self._scheme.quantised(self._file_of)}

    def names(self) -> tuple[str, ...]:
        stored = {part for pair in self._pairs.values() for part in (pair.codes, pair.scales)}
        return (*(name for name in self._file_of if name not in stored), *self._pairs)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._pairs and self._scheme is not None:
            return self._scheme.shape(self._pairs[name])
        return self._file(name).tensors[name].shape

    def read(self, name: str) -> NDArray[np.float32]:
        """float32 in the shape of `shape(name)`; may be a read-only view of the file."""
        if name in self._pairs and self._scheme is not None:
            scheme, pair = self._scheme, self._pairs[name]
            scheme.shape(pair)
            codes = self._file(pair.codes).read_bytes(pair.codes, scheme.codes_type)
            return scheme.widen(codes, self._file(pair.scales).read_bytes(pair.scales, scheme.scales_type))
        return self._file(name).read(name)

    def fingerprint(self) -> str:
        """64 hex digits: a hash of every byte of weights, configs and tokenizer files, by file name; the folder's own name does not count."""
        if self._fingerprint is None:
            parts = {file.path.name: file.data for file in self._files}
            for name in IDENTITY_FILES:
                if (self.path / name).is_file():
                    parts[name] = map_file(self.path / name)
            self._fingerprint = content_hash(parts)
        return self._fingerprint

    def _pair(self, scheme: Scheme, name: str) -> Pair:
        codes, scales = scheme.names_of(name)
        shapes = (self._file(part).tensors[part].shape for part in (codes, scales))
        return Pair(codes=codes, codes_shape=next(shapes), scales=scales, scales_shape=next(shapes))

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}; the folder is incomplete or of another model: copy or download it again")
        return self._file_of[name]


def _open_shards(path: Path) -> tuple[list[SafetensorsFile], dict[str, SafetensorsFile]]:
    """All safetensors files of the folder, and which of them holds each tensor."""
    if (path / INDEX_NAME).is_file():
        weight_map = read_weight_map(path / INDEX_NAME)
        files = {shard: open_safetensors(path / shard) for shard in sorted(set(weight_map.values()))}
        for name, shard in weight_map.items():
            if name not in files[shard].tensors:
                raise CheckpointError(f"{path / shard}: has no tensor {name!r}, though {INDEX_NAME} says so; copy or download the files again")
        return list(files.values()), {name: files[shard] for name, shard in weight_map.items()}
    whole = path / "model.safetensors"
    candidates = [whole] if whole.is_file() else sorted(path.glob("*.safetensors"))
    if len(candidates) != 1:
        raise CheckpointError(
            f"{path}: expected model.safetensors or {INDEX_NAME}, found {len(candidates)} other .safetensors files; download the folder again"
        )
    file = open_safetensors(candidates[0])
    return [file], dict.fromkeys(file.tensors, file)


def read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file beside the index that holds it. Raises CheckpointError for a damaged index, and for one that names files elsewhere."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected a weight_map of tensor names to files; copy or download the file again")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {shard!r:.200} is not the name of a .safetensors file in this folder")
    return weight_map


def read_json_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises CheckpointError."""
    raw = map_file(path)
    if len(raw) > JSON_BYTES_MAX:
        raise CheckpointError(f"{path}: has {len(raw)} bytes; at most {JSON_BYTES_MAX} were expected")
    try:
        value = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error}); copy or download the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object; copy or download the file again")
    return value
