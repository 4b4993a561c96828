"""What `LLM` cannot do it refuses before anything runs, with both sides of the mismatch in the message; the next request is served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from lockstep.errors import CheckpointError, ConfigError, InvalidRequestError
from lockstep.weights import find_model

WINDOW = 64
PROMPT = "The capital of France is"
ONE = SamplingParams(temperature=0.0, max_tokens=1)
VOCABULARY = 49152


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", max_model_len=WINDOW) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt", "params", "found"),
    [
        pytest.param("", ONE, "no tokens", id="empty text"),
        pytest.param({"prompt_token_ids": []}, ONE, "no tokens", id="no ids"),
        pytest.param([5, VOCABULARY], ONE, rf"0 to {VOCABULARY - 1}.*{VOCABULARY} at index 1", id="id past the vocabulary"),
        pytest.param([5, -1], ONE, "-1 at index 1", id="negative id"),
        pytest.param([5, 1 << 70], ONE, "integers", id="huge id"),
        pytest.param({"prompt_token_ids": ["a"]}, ONE, "integers", id="text for an id"),
        pytest.param({"prompt_token_ids": [1.5]}, ONE, "integers", id="fraction for an id"),
        pytest.param([7] * WINDOW, ONE, rf"{WINDOW} tokens.*window is {WINDOW}", id="prompt fills the window"),
        pytest.param([7] * 1000, ONE, rf"1000 tokens.*window is {WINDOW}", id="prompt over the window"),
        pytest.param([7] * 60, SamplingParams(max_tokens=5), rf"60 tokens.*max_tokens is 5.*{WINDOW}", id="output over the window"),
        pytest.param({"text": "x"}, ONE, "'prompt'", id="mapping without a prompt"),
        pytest.param({"prompt": 5}, ONE, "'prompt'", id="mapping with a number"),
        pytest.param([], ONE, "no tokens", id="empty list of ids in a list"),
        pytest.param(PROMPT, SamplingParams(stop_token_ids=[VOCABULARY]), f"below the vocabulary's {VOCABULARY}", id="stop id past the vocabulary"),
        pytest.param("lone \ud800 surrogate", ONE, "surrogate", id="no Unicode"),
    ],
)
def test_bad_prompt_is_refused_alone_and_among_others_and_the_next_is_served(llm: LLM, prompt: Any, params: SamplingParams, found: str) -> None:
    with pytest.raises(InvalidRequestError, match=found):
        llm.generate([PROMPT, prompt], params)
    assert len(llm.generate(PROMPT, ONE)[0].outputs[0].token_ids) == 1


def test_prompt_of_no_known_kind_is_refused(llm: LLM) -> None:
    for prompt in (5, None, [1.5, 2.5], b"bytes", [None]):
        with pytest.raises(InvalidRequestError, match="prompt"):
            llm.generate(prompt, ONE)  # type: ignore[arg-type]
    assert llm.generate([], ONE) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.1),
        ("top_p", float("nan")),
        ("top_p", 0.0),
        ("min_p", 1.1),
        ("top_k", -2),
        ("top_k", True),
        ("n", 0),
        ("max_tokens", 0),
        ("seed", 1 << 64),
        ("seed", 0.5),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("logprobs", 21),
        ("ignore_eos", 1),
    ],
)
def test_parameter_out_of_range_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_lists_of_other_lengths_are_refused_with_both(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"2 prompts.*got 3"):
        llm.generate([PROMPT, PROMPT], [ONE, ONE, ONE])
    with pytest.raises(InvalidRequestError, match=r"2 prompts.*got 1"):
        llm.generate([PROMPT, PROMPT], ONE, priority=[1])


def test_chat_without_messages_or_with_bad_ones_is_refused(llm: LLM) -> None:
    for messages in ([{"content": "no role"}], [{"role": "user"}]):
        with pytest.raises(InvalidRequestError):
            llm.chat(messages, ONE)
    assert llm.chat([{"role": "user", "content": "Hi"}], ONE)[0].finished


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"pipeline_parallel_size": 31}, "31.*30|30.*31"),
        ({"pipeline_parallel_size": 2, "layer_split": "10,10,10"}, "3 stages.*2"),
        ({"pipeline_parallel_size": 2, "layer_split": "10,10"}, "30"),
        ({"max_model_len": 8193}, "8193.*8192"),
        ({"max_model_len": 512, "num_gpu_blocks_override": 31}, "512 tokens needs 32 blocks.*has 31"),
        ({"max_model_len": 512, "kv_cache_memory_bytes": 1 << 20}, "512 tokens needs 32 blocks"),
        ({"max_model_len": 512, "num_gpu_blocks_override": 31, "pipeline_parallel_size": 2}, "512 tokens needs 32 blocks.*has 31"),
        ({"dtype": "int4"}, "dtype.*int4"),
        ({"threads": 0}, "threads"),
        ({"max_num_seqs": float("nan")}, "max_num_seqs"),
        ({"instruction_set": "sse9"}, "sse9"),
        ({"backend": "abacus"}, "backend.*abacus"),
        ({"microbatches": 1, "pipeline_parallel_size": 2}, "microbatches"),
    ],
)
def test_settings_that_do_not_fit_are_config_errors(settings: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        LLM("smollm2", **settings)


def test_unknown_setting_is_a_type_error_by_its_name_as_of_any_python_call() -> None:
    with pytest.raises(TypeError, match="max_modle_len"):
        LLM("smollm2", max_modle_len=512)


def test_unknown_model_says_what_was_looked_for(tmp_path: Path) -> None:
    for name in ("no-such-model", str(tmp_path / "missing.gguf"), str(tmp_path)):
        with pytest.raises(CheckpointError, match=r"expected|config\.json"):
            LLM(name)
    with pytest.raises(ConfigError, match="model"):
        LLM("")


@pytest.mark.parametrize("kept", [0, 10, 100_000, 50_000_000])
def test_truncated_file_is_a_checkpoint_error_naming_it(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "cut.gguf"
    with find_model("smollm2").open("rb") as source:
        path.write_bytes(source.read(kept))
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        LLM(str(path))
