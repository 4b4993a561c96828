"""Sampling defaults come from the model's generation_config.json, from another folder's, or from nobody; what is given by hand goes first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.launch import resolve_model, sampling_defaults
from tiny_llama import write_tiny_llama

RECOMMENDED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 77, "do_sample": True, "eos_token_id": 3}
TAKEN = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 77}


def defaults(folder: Path, **settings: Any) -> dict[str, Any]:
    config = EngineConfig(model=str(folder), **settings)
    return dict(sampling_defaults(config, resolve_model(config)))


def recommend(folder: Path, what: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(what if isinstance(what, str) else json.dumps(what))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recommend(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), RECOMMENDED)


def test_model_s_own_are_taken_and_what_is_no_parameter_is_not(model: Path) -> None:
    assert defaults(model) == TAKEN


def test_nobody_s_and_another_folder_s(model: Path, tmp_path: Path) -> None:
    assert defaults(model, generation_config="vllm") == {}
    assert defaults(model, generation_config=str(recommend(tmp_path, {"min_p": 0.2}))) == {"min_p": 0.2}


def test_what_is_given_by_hand_goes_first(model: Path) -> None:
    own = {"temperature": 0.1, "max_new_tokens": 5}
    assert defaults(model, override_generation_config=own) == TAKEN | {"temperature": 0.1, "max_tokens": 5}
    assert defaults(model, override_generation_config=own, generation_config="vllm") == {"temperature": 0.1, "max_tokens": 5}


def test_end_tokens_that_the_vocabulary_has_not_are_none(tmp_path: Path) -> None:
    folder = recommend(write_tiny_llama(tmp_path / "tiny"), {"eos_token_id": [7, 999, -1, True, "x"]})
    assert resolve_model(EngineConfig(model=str(folder))).eos_ids == (7, 256)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"override_generation_config": {"temprature": 1}}, r"has \['temprature'\], it can have"),
        ({"override_generation_config": {"temperature": -1}}, "override_generation_config: .* temperature must be a number from 0"),
        ({"generation_config": "/no/such/folder"}, "generation_config: /no/such/folder"),
        ({"generation_config": None}, "generation_config must be auto, vllm or a folder, got None"),
        ({"override_generation_config": "x"}, "override_generation_config must be a mapping"),
    ],
)
def test_wrong_settings_are_refused(model: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        defaults(model, **settings)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"top_p": 3}, "top_p must be a number from 0 to 1, got 3; serve with --generation-config vllm"),
        ("[1]", "is not a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_wrong_files_are_refused(model: Path, tmp_path: Path, what: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        defaults(model, generation_config=str(recommend(tmp_path, what)))
