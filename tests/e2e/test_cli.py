"""The commands, each as a process: what they print, and their exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from served_process import COMMAND, PATIENCE_S, served

from lockstep import LLM, SamplingParams, __version__
from lockstep.cli.flags import expand_config_file
from lockstep.cli.main import main
from lockstep.vllm_settings import FOREIGN

PROMPT = "The capital of France is"
QUICK = ("--prompt", PROMPT, "--temperature", "0", "--max-tokens", "8")


def run(*arguments: str, given: str = "", status: int = 0) -> tuple[str, str]:
    """(standard output, standard error)."""
    done = subprocess.run([*COMMAND, *arguments], input=given, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM("smollm2", max_model_len=1024) as llm:
        return llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].text


def test_generate_prints_the_text_that_llm_gives(expected: str) -> None:
    assert run("generate", "smollm2", *QUICK)[0] == expected + "\n"
    assert expected.startswith(" Paris")


def test_generate_reads_standard_input_and_accepts_short_lengths(expected: str) -> None:
    out, _ = run("generate", "smollm2", "--temperature", "0", "--max-tokens", "8", "--max-model-len", "1k", given=PROMPT)
    assert out == expected + "\n"


def test_generate_over_two_stages_with_json_gives_the_same(expected: str) -> None:
    out, _ = run("generate", "smollm2", "-pp", "2", "--json", "--prompt", "1, 2, 3,", *QUICK)
    other, answer = (json.loads(line) for line in out.splitlines())
    assert (other["prompt"], answer["prompt"]) == ("1, 2, 3,", PROMPT)
    assert answer["outputs"][0]["text"] == expected
    assert answer["outputs"][0]["finish_reason"] == "length"
    assert len(answer["outputs"][0]["token_ids"]) == 8
    assert answer["prompt_token_ids"]


def test_config_file_stands_for_flags_that_override_it(tmp_path: Path, expected: str) -> None:
    path = tmp_path / "lockstep.yaml"
    path.write_text(
        "model: smollm2\nmax_model_len: 1k\nmax-tokens: 3\ntemperature: 0\nenable-prefix-caching: false\nprompt: [The capital of France is]\n"
    )
    out, _ = run("generate", "--config", str(path), "--max-tokens", "8", "--json")
    assert json.loads(out)["outputs"][0]["text"] == expected


def test_settings_of_a_file_come_after_the_command_and_give_way_to_flags(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("model: a\nseed: 1\nserved_model_name: [b, c]\nasync-scheduling: false\naccess_log: true\nlayer_split: null\n")
    config = ["--config", str(path)]
    settings = ["--seed=1", "--served-model-name=b", "--served-model-name=c", "--no-async-scheduling", "--access-log"]
    assert expand_config_file(["serve", *config]) == ["serve", "a", *settings]
    assert expand_config_file(["serve", "m", *config, "--seed", "2"]) == ["serve", "m", *settings[1:], "--seed", "2"]
    assert expand_config_file(["serve", *config, "--served-model-name=d"]) == ["serve", "a", "--seed=1", *settings[3:], "--served-model-name=d"]
    assert expand_config_file(["serve", "m", "--seed", "2"]) == ["serve", "m", "--seed", "2"]


def test_setting_of_a_file_that_is_not_here_is_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("model: smollm2\nquantization: awq\n")
    assert main(["serve", "--config", str(path)]) == 2
    assert FOREIGN["quantization"].reason in capsys.readouterr().err
    path.write_text("model: smollm2\ntensor_parallel_size: 1\nenable_lora: false\nquantization: null\nprot: 70000\n")
    assert main(["serve", "--config", str(path)]) == 2
    assert "--prot is not a flag of lockstep serve; did you mean --port?" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [1\n", "no_such_flag: 1\n", "1: 2\n", "model: smollm2\ndtype: int3\n"])
def test_bad_config_file_is_status_2(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    _, said = run("generate", "--config", str(path), "--prompt", "x", status=2)
    assert said.strip()


def test_tensor_parallel_flag_ends_the_process_with_status_2() -> None:
    _, said = run("serve", "smollm2", "-tp", "2", status=2)
    assert said == f"lockstep: -tp (--tensor-parallel-size): {FOREIGN['tensor_parallel_size'].reason}\n"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("generate", "no-such-model", "--prompt", "x"), "no-such-model"),
        (("generate", "smollm2", "--prompt", ""), "empty"),
        (("generate", "smollm2", "--prompt", "x", "--temperature", "nan"), "temperature"),
        (("generate", "smollm2", "--prompt", "x", "--max-model-len", "9k"), "9000"),
        (("generate", "smollm2", "--prompt", "x", "--max-model-len", "many"), "8k or 1M"),
        (("generate", "smollm2", "--prompt", "x", "--max-tokens", "inf"), "inf"),
        (("generate", "smollm2", "--config"), "--config needs a file"),
        (("generate", "smollm2", "--config", "/no/such/file.yaml"), "/no/such/file.yaml"),
        (("serve", "smollm2", "--port", "70000"), "70000"),
        (("serve", "smollm2", "--ssl-keyfile", "k.pem"), "ssl_certfile"),
        (("serve", "smollm2", "--allowed-origins", "x"), "JSON list"),
        (("serve", "smollm2", "--no-such-flag"), "--no-such-flag"),
        ((), "COMMAND"),
    ],
)
def test_callers_mistake_is_status_2_and_says_what(arguments: tuple[str, ...], found: str) -> None:
    assert found in run(*arguments, status=2)[1]


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("serve", ("--host", "--port", "--uds", "--served-model-name", "--api-key", "--max-logprobs", "--shutdown-timeout", "--ssl-certfile")),
        ("generate", ("--prompt", "--chat", "--max-tokens", "--temperature", "--top-p", "--top-k", "--min-p", "--n", "--stop", "--json")),
        ("generate", ("--prompts-file", "--output-file", "--resume")),
        ("chat", ("--system", "--history-file", "--no-history", "--max-tokens", "--temperature", "--top-p", "--top-k", "--min-p", "--stop")),
        ("verify", ("--quick", "--json")),
    ],
)
def test_help_of_each_command_names_its_flags(command: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    shared = ("MODEL", "--pipeline-parallel-size", "-pp", "--max-model-len", "--dtype", "--max-num-seqs", "--max-num-batched-tokens", "--block-size")
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert [flag for flag in (*shared, *flags, "--enable-prefix-caching", "--async-scheduling", "--seed") if flag not in shown] == []


def test_help_and_version_need_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, found in (("--help", "generate"), ("--version", __version__)):
        with pytest.raises(SystemExit) as ended:
            main([flag])
        assert ended.value.code == 0
        assert found in capsys.readouterr().out


def test_served_command_names_the_model_and_an_address_and_a_line_to_try() -> None:
    with served("--served-model-name", "small", "other", "--max-model-len", "1k") as server:
        assert os.waitpid(server.process.pid, os.WNOHANG) == (0, 0)
        assert f"lockstep serves small at {server.url}" in server.said.text
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE_S) == 0
        server.said.join()
        assert f"curl {server.url}/v1/chat/completions" in server.said.text
