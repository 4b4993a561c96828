"""What a config's model is: its checkpoint, spec, dtype, window, end tokens and split over stages. Reads headers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.models.families import build_program
from lockstep.models.spec import ModelSpec, spec_from_config
from lockstep.models.split import parse_split, split_layers
from lockstep.ops.backend import DType
from lockstep.ops.program import Program
from lockstep.text import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from lockstep.weights import Checkpoint, find_model, open_checkpoint


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
    checkpoint = checkpoint or open_checkpoint(find_model(config.model))
    spec = spec_from_config(checkpoint.config)
    window = config.max_model_len or spec.window
    if window > spec.window:
        raise ConfigError(f"max_model_len is {window}, the model was made for at most {spec.window} tokens; use {spec.window} or less")
    stages = config.pipeline_parallel_size
    splits = parse_split(config.layer_split, spec.layer_count) if config.layer_split else split_layers(spec, stages, config.storage_dtype)
    if len(splits) != stages:
        raise ConfigError(f"layer_split {config.layer_split!r} names {len(splits)} stages, pipeline_parallel_size is {stages}; make them equal")
    return ResolvedModel(
        checkpoint=checkpoint, spec=spec, dtype=config.storage_dtype, window=window, splits=splits, eos_ids=_end_tokens(spec, checkpoint)
    )


def _end_tokens(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The model's end tokens: generation_config's if it names any, with the config's own."""
    named = checkpoint.generation_config.get("eos_token_id")
    listed = [named] if isinstance(named, int) else [i for i in named if isinstance(i, int)] if isinstance(named, list) else []
    return tuple(dict.fromkeys([*listed, *spec.eos_token_ids]))


def load_tokenizer(config: EngineConfig, model: ResolvedModel) -> Tokenizer:
    """The model's own tokenizer, or the one that the config names."""
    source: Path | Mapping[str, Any] = model.checkpoint.tokenizer_source
    if config.tokenizer is not None:
        other = find_model(config.tokenizer)
        source = other if other.is_dir() else open_checkpoint(other).tokenizer_source
    return tokenizer_from_folder(source) if isinstance(source, Path) else tokenizer_from_gguf(source)
