"""Sampling defaults of a model: what its generation_config.json recommends, as vLLM takes them. Knows that file's names; not who asks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep.config import EngineConfig
from lockstep.core.params import SamplingParams
from lockstep.errors import CheckpointError, ConfigError, InvalidRequestError
from lockstep.launch.model import ResolvedModel
from lockstep.weights.folder import read_json_object

Defaults = Mapping[str, Any]
"""Names of `SamplingParams` to what a request has that does not say."""

NONE: Mapping[str, Any] = MappingProxyType({})

_NAMES = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")} | {"max_new_tokens": "max_tokens"}


def sampling_defaults(config: EngineConfig, model: ResolvedModel) -> Defaults:
    """`generation_config`: "auto" takes the model's own, "vllm" none, else it is a folder with a generation_config.json. Raises ConfigError for a
    file that is not there or recommends what no request could ask for."""
    source, found = "vllm", NONE
    if config.generation_config == "auto":
        source, found = str(model.checkpoint.path), model.checkpoint.generation_config
    elif config.generation_config != "vllm":
        path = Path(config.generation_config).expanduser() / "generation_config.json"
        source, found = str(path), _read(path)
    own = config.override_generation_config or {}
    if unknown := sorted(own.keys() - _NAMES):
        raise ConfigError(f"override_generation_config has {unknown}, it can have {sorted(_NAMES)}")
    _check(source, _named(found), "serve with --generation-config vllm")
    _check("override_generation_config", _named(own), "give another value")
    return MappingProxyType(_named({**found, **own}))


def _named(found: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: found[theirs] for theirs, ours in _NAMES.items() if found.get(theirs) is not None}


def _check(source: str, named: Mapping[str, Any], remedy: str) -> None:
    try:
        SamplingParams(**named)
    except InvalidRequestError as error:
        raise ConfigError(f"{source}: the sampling defaults cannot be: {error}; {remedy}") from None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_json_object(path)
    except CheckpointError as error:
        raise ConfigError(f"generation_config: {error}; name a folder that holds generation_config.json, auto, or vllm") from None
