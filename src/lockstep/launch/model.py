"""What a config's model is: its checkpoint, spec, dtype, window, end tokens and split over stages. Reads headers only."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.launch.kv_pools import longest_request
from lockstep.models.families import build_program
from lockstep.models.spec import ModelSpec, spec_from_config
from lockstep.models.split import parse_split, split_layers
from lockstep.ops.backend import DType
from lockstep.ops.program import Program
from lockstep.text import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from lockstep.weights import Checkpoint, HubOptions, find_model, open_checkpoint, parse_hub_name

_log = logging.getLogger("lockstep.launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """window: most tokens of one request, prompt and output. splits: layers of each stage. eos_ids: tokens that end an answer."""

    checkpoint: Checkpoint
    spec: ModelSpec
    dtype: DType
    window: int
    splits: tuple[range, ...]
    eos_ids: tuple[int, ...]

    def program(self, stage: int) -> Program:
        return build_program(self.spec, self.splits[stage], embeds=stage == 0, samples=stage == len(self.splits) - 1)


def resolve_model(config: EngineConfig, checkpoint: Checkpoint | None = None) -> ResolvedModel:
    """checkpoint: the model's, if it is open already. Raises CheckpointError, UnsupportedError or ConfigError before anything is loaded."""
    checkpoint = checkpoint or open_checkpoint(_find_model(config))
    spec = spec_from_config(checkpoint.config)
    stages = config.pipeline_parallel_size
    splits = parse_split(config.layer_split, spec.layer_count) if config.layer_split else split_layers(spec, stages, config.storage_dtype)
    if len(splits) != stages:
        raise ConfigError(f"layer_split {config.layer_split!r} names {len(splits)} stages, pipeline_parallel_size is {stages}; make them equal")
    return ResolvedModel(
        checkpoint=checkpoint,
        spec=spec,
        dtype=config.storage_dtype,
        window=_window(config, spec, splits),
        splits=splits,
        eos_ids=_end_tokens(spec, checkpoint),
    )


def _window(config: EngineConfig, spec: ModelSpec, splits: Sequence[range]) -> int:
    asked = config.max_model_len
    if asked == -1:
        longest = longest_request(config, spec, splits)
        _log.info("max_model_len auto: %d of the model's %d tokens", longest, spec.window)
        return longest
    window = spec.window if asked is None else int(asked)
    if window > spec.window:
        raise ConfigError(f"max_model_len is {window}, the model was made for at most {spec.window} tokens; use {spec.window} or less")
    return window


def _end_tokens(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The model's end tokens: generation_config's if it names any, with the config's own."""
    named = checkpoint.generation_config.get("eos_token_id")
    listed = named if isinstance(named, list) else [named]
    ends = [i for i in listed if type(i) is int and 0 <= i < spec.vocab_size]  # another is never drawn
    return tuple(dict.fromkeys([*ends, *spec.eos_token_ids]))


def load_tokenizer(config: EngineConfig, model: ResolvedModel) -> Tokenizer:
    """The model's own tokenizer, or the one that the config names."""
    source: Path | Mapping[str, Any] = model.checkpoint.tokenizer_source
    other = _find_tokenizer(config)
    if other is not None:
        source = other if other.is_dir() else open_checkpoint(other).tokenizer_source
    return tokenizer_from_folder(source) if isinstance(source, Path) else tokenizer_from_gguf(source)


def local_config(config: EngineConfig) -> EngineConfig:
    """The same with paths for model and tokenizer, and nothing of a hub: what is named as there is in the cache afterwards.
    Raises CheckpointError, ConfigError."""
    model, tokenizer = _find_model(config), _find_tokenizer(config)
    return _without_hub(config, model, tokenizer)


def stage_config(config: EngineConfig, model: ResolvedModel) -> EngineConfig:
    """What a stage's process is told: the model by its path, the window by its length. It asks no hub, and no token stands on its command line."""
    return replace(_without_hub(config, model.checkpoint.path, None), max_model_len=model.window)


def _without_hub(config: EngineConfig, model: Path, tokenizer: Path | None) -> EngineConfig:
    named = None if tokenizer is None else str(tokenizer)
    return replace(config, model=str(model), tokenizer=named, revision=None, tokenizer_revision=None, download_dir=None, hf_token=None)


def find_checkpoint(config: EngineConfig, name: str) -> Path:
    """Another one than the config's: no revision of that is of it. Raises CheckpointError."""
    return find_model(name, _hub_options(config, None))


def _find_model(config: EngineConfig) -> Path:
    return find_model(config.model, _hub_options(config, config.revision))


def _find_tokenizer(config: EngineConfig) -> Path | None:
    """None: the model's own. A tokenizer of the model's own repository is of the model's revision if it names none."""
    named = config.tokenizer or (config.model if config.tokenizer_revision is not None else None)
    if named is None:
        return None
    same = _repository(named) is not None and _repository(named) == _repository(config.model)
    revision = config.tokenizer_revision or (config.revision if same else None)
    return find_model(named, _hub_options(config, revision), tokenizer_only=True)


def _repository(name: str) -> str | None:
    parsed = parse_hub_name(name)
    return None if parsed is None else parsed.repository


def _hub_options(config: EngineConfig, revision: str | None) -> HubOptions:
    folder = None if config.download_dir is None else Path(config.download_dir)
    return HubOptions(revision=revision, cache_folder=folder, token=config.hf_token, progress=config.use_tqdm_on_load)
