"""vLLM's settings that Lockstep does not have, as keyword arguments and as flags: what asks for nothing passes, the rest is refused."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from lockstep.cli.main import main, make_parser
from lockstep.config import EngineConfig
from lockstep.errors import ConfigError, UnsupportedError
from lockstep.llm import engine_config
from lockstep.vllm_settings import FOREIGN, SHORT

SERVE = ("serve", "smollm2")
SERVE_ALONE = ("max_logprobs", "served_model_name")
"""Settings of the server, which an engine alone does not have."""


def parsed(*flags: str) -> argparse.Namespace:
    return make_parser().parse_args([*SERVE, *flags])


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def spelled(name: str, value: object) -> list[str]:
    """The setting as flags."""
    if isinstance(value, bool):
        return [flag_of(name) if value else f"--no-{name.replace('_', '-')}"]
    return [flag_of(name), str(value)]


def own_flags(command: str) -> set[str]:
    action = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name for name in action.choices[command]._option_string_actions if name.startswith("--")}


def test_no_setting_is_both_ours_and_foreign() -> None:
    """One that has become ours leaves the table, or keyword arguments would be refused that flags take."""
    ours = set(EngineConfig.__dataclass_fields__)
    assert [name for name in FOREIGN if name in ours] == []
    for command in ("serve", "generate", "chat", "verify"):
        assert [name for name in FOREIGN if flag_of(name) in own_flags(command) and name not in SERVE_ALONE] == []


def test_every_setting_says_what_it_is_about_and_is_written_as_a_keyword() -> None:
    for name, setting in FOREIGN.items():
        assert name.isidentifier()
        assert name == name.lower()
        assert len(setting.reason) > 20, name
    assert set(SHORT.values()) <= set(FOREIGN)


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_setting_is_refused_or_taken_alike_as_a_flag_and_as_a_keyword(name: str) -> None:
    setting = FOREIGN[name]
    for value in setting.neutral:
        assert engine_config("smollm2", {name: value}) == EngineConfig(model="smollm2")
        assert parsed(*spelled(name, value)) == parsed()
        assert parsed(f"{flag_of(name)}={str(value).lower()}") == parsed()
    wrong: Any = next((v for v in (True, False) if v not in setting.neutral), None) if setting.switch else "x1"
    if name in SERVE_ALONE or wrong is None:
        return
    with pytest.raises(UnsupportedError, match=name):
        engine_config("smollm2", {name: wrong})
    for flags in (spelled(name, wrong), [f"{flag_of(name)}={wrong}".lower()]):
        with pytest.raises(UnsupportedError) as caught:
            parsed(*flags)
        assert flags[0].split("=")[0] in str(caught.value)
        assert setting.reason in str(caught.value)


@pytest.mark.parametrize("value", [None, {}, [], "none", "None"])
def test_nothing_asks_for_nothing(value: Any) -> None:
    assert engine_config("smollm2", {"quantization": value, "hf_overrides": value, "speculative_config": value}) == EngineConfig(model="smollm2")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["-tp", "2"], "-tp (--tensor-parallel-size)"),
        (["-dp=2"], "-dp (--data-parallel-size)"),
        (["-q", "awq"], "-q (--quantization)"),
        (["-O3"], "-O (--compilation-config)"),
        (["-O", "3"], "-O (--compilation-config)"),
        (["--compilation-config.mode", "3"], "--compilation-config.mode"),
        (['--compilation-config={"mode": 3}'], "--compilation-config"),
        (["--tensor_parallel_size", "2"], "--tensor_parallel_size"),
        (["--trust-remote-code"], "--trust-remote-code"),
        (["--trust-remote-code", "true"], "--trust-remote-code"),
        (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill"),
        (["--enable-chunked-prefill", "False"], "--enable-chunked-prefill"),
        (["--enable-lora=maybe"], "--enable-lora"),
        (["--swap-space", "4"], "--swap-space"),
        (["--gpu-memory-utilization", "0.9"], "--gpu-memory-utilization"),
        (["--load-format", "dummy"], "--load-format"),
        (["--quantization"], "--quantization"),
    ],
)
def test_flag_in_any_spelling_ends_with_status_2_and_one_line(given: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([*SERVE, *given], ["serve", *given, "smollm2"]):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"lockstep: {named}: ")
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    "given",
    [
        ["-tp", "1"],
        ["-tp=1"],
        ["-dp", "1", "-O0"],
        ["--enforce-eager"],
        ["--no-enforce-eager", "--disable-log-requests"],
        ["--enable-chunked-prefill", "True"],
        ["--no-enable-lora", "--quantization", "none"],
        ["--swap-space", "0.0", "--cpu-offload-gb=0"],
        ["--load-format", "auto", "--device", "cpu", "--runner", "generate"],
    ],
)
def test_flag_that_asks_for_what_happens_anyway_changes_nothing_wherever_it_stands(given: list[str]) -> None:
    assert parsed(*given) == parsed()
    assert parsed(*given, "--seed", "3") == parsed("--seed", "3", *given) == parsed("--seed", "3")
    assert make_parser().parse_args(["serve", *given, "smollm2"]) == parsed()


def test_unknown_flag_names_the_nearest() -> None:
    for given, meant in (
        ("--max-modle-len", "--max-model-len"),
        ("--tensor-paralel-size", "--tensor-parallel-size"),
        ("--max_num_seqs", "--max-num-seqs"),
    ):
        with pytest.raises(ConfigError, match=f"{given} is not a flag of lockstep serve; did you mean {meant}"):
            parsed(given, "8")
    with pytest.raises(ConfigError, match=r"--zzz is not a flag of lockstep serve$"):
        parsed("--zzz")
    with pytest.raises(ConfigError, match=r"--sedes is not a flag of lockstep sim; did you mean --seeds"):
        make_parser().parse_args(["sim", "--sedes", "8"])


def test_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'max_modle_len'; did you mean max_model_len\?"):
        engine_config("smollm2", {"max_modle_len": 8})
    with pytest.raises(TypeError, match=r"'tensor_paralel_size'; did you mean tensor_parallel_size\?"):
        engine_config("smollm2", {"tensor_paralel_size": 8})


def test_text_that_only_looks_like_a_flag_is_a_prompt() -> None:
    for text in ("-1 is a number", "--what is this?", "- a list", "-tp is a flag", "-x=1 and more"):
        assert make_parser().parse_args(["generate", "smollm2", f"--prompt={text}"]).prompt == [text]
        assert make_parser().parse_args(["generate", "smollm2", "--prompt", text]).prompt == [text]
    assert make_parser().parse_args(["generate", "--prompt", "a", "--", "smollm2"]).model == "smollm2"
    assert make_parser().parse_args(["generate", "smollm2", "--max-tok", "4"]).max_tokens == 4
