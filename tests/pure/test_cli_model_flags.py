"""Flags that say which model, and how a hub is asked for it."""

from __future__ import annotations

import argparse

import pytest

from lockstep.cli.flags import add_model_flags, engine_config, expand_config_file, model_in_place
from lockstep.config import EngineConfig
from lockstep.errors import ConfigError


def parsed(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_model_flags(parser.add_argument_group("model"))
    parser.add_argument("--json", action="store_true")
    return engine_config(parser.parse_args(model_in_place(["serve", *arguments])[1:]))


def test_model_may_be_a_flag_as_of_vllm() -> None:
    for given in (["serve", "--model", "o/n", "--seed", "1"], ["serve", "--seed", "1", "--model=o/n"], ["serve", "o/n", "--seed", "1"]):
        assert model_in_place(given) == ["serve", "o/n", "--seed", "1"]
    assert parsed("--revision", "v1", "--model", "o/n:Q4_K_M").model == "o/n:Q4_K_M"
    with pytest.raises(ConfigError, match="--model needs"):
        model_in_place(["serve", "--model"])


def test_two_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("o/n", "--model", "o/m")
    assert "o/n" in capsys.readouterr().err


def test_a_model_flag_goes_before_a_file_of_settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("settings") / "settings.yaml"
    path.write_text("model: o/n\nrevision: v1\nhf_token: true\n")
    config = ["--config", str(path)]
    assert model_in_place(expand_config_file(["serve", *config])) == ["serve", "o/n", "--revision=v1", "--hf-token"]
    assert model_in_place(expand_config_file(["serve", *config, "--model", "o/m"])) == ["serve", "o/m", "--revision=v1", "--hf-token"]


def test_settings_of_a_hub_come_through_and_have_vllms_defaults() -> None:
    config = parsed("o/n", "--revision", "v1", "--tokenizer-revision", "v2", "--download-dir", "/d", "--hf-token", "hf_x", "--no-use-tqdm-on-load")
    assert (config.revision, config.tokenizer_revision, config.download_dir, config.hf_token) == ("v1", "v2", "/d", "hf_x")
    assert not config.use_tqdm_on_load
    assert parsed("o/n", "--hf-token").hf_token is True
    plain = parsed("o/n")
    assert (plain.revision, plain.tokenizer_revision, plain.download_dir, plain.hf_token, plain.use_tqdm_on_load) == (None, None, None, None, True)
    assert not parsed("o/n", "--json").use_tqdm_on_load


@pytest.mark.parametrize("name", ["revision", "tokenizer_revision", "download_dir", "hf_token", "tokenizer"])
def test_empty_settings_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(model="o/n", **{name: ""})


def test_a_token_is_neither_shown_nor_named_in_an_error() -> None:
    assert "hf_secret" not in repr(EngineConfig(model="o/n", hf_token="hf_secret"))
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="o/n", hf_token=["hf_secret"])  # type: ignore[arg-type]
    assert "hf_secret" not in str(caught.value)
