"""Logits processors on the embedded model: they do what they are for, with the same tokens however it is deployed, and a failure is one request's."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from served_process import PATIENCE_S, served

import logits_plugins
from lockstep import LLM, AsyncLLM, SamplingParams
from lockstep.cli.main import main
from lockstep.errors import ConfigError, HandshakeError, InvalidRequestError, LockstepError, PluginError
from logits_plugins import Drift, Faulty, Forced, NoRepeat

PLUGINS = [NoRepeat, Forced, Drift, Faulty]
FLAGS = [part for plugin in PLUGINS for part in ("--logits-processors", f"logits_plugins:{plugin.__name__}")]
PROMPTS = ["The capital of France is", "one one one one one", "def add(a, b):\n    return", "1, 2, 3, 4,", "Roses are red,", "To be or not"]
SAMPLED: dict[str, Any] = {"max_tokens": 60, "logprobs": 2, "ignore_eos": True, "temperature": 0.9}
PARAMS = [
    SamplingParams(**SAMPLED | {"temperature": 0.0}, extra_args={"no_repeat_last": 6}),
    SamplingParams(**SAMPLED, seed=1, extra_args={"no_repeat_last": 40}, repetition_penalty=1.1),
    SamplingParams(**SAMPLED, seed=2, extra_args={"drift": 6, "drift_half": "odd"}, top_p=0.9),
    SamplingParams(**SAMPLED, seed=3, extra_args={"drift": 9.5, "no_repeat_last": 3}, structured_outputs={"regex": "([a-z ]{1,9}[0-9,]){40}"}),
    SamplingParams(**SAMPLED, seed=4, extra_args={"forced_ids": list(range(100, 160))}),
    SamplingParams(**SAMPLED, seed=5),
]


@pytest.fixture(autouse=True)
def _stages_find_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(logits_plugins.__file__).parent))


def told(outputs: list[Any]) -> list[Any]:
    return [(o.text, o.token_ids, o.logprobs, o.finish_reason, o.stop_reason) for output in outputs for o in output.outputs]


def repeats(prompt: list[int], output: list[int], last: int) -> list[int]:
    known = [*prompt, *output]
    return [i for i in range(len(prompt), len(known)) if known[i] in known[max(0, i - last) : i]]


def test_answers_are_as_asked_and_the_same_in_three_stages_with_preemption_and_a_warm_cache() -> None:
    with LLM("smollm2", max_model_len=256, async_scheduling=False, logits_processors=PLUGINS) as llm:
        outputs = [llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        alone, fingerprint = told(outputs), llm.fingerprint
        for i, last in ((0, 6), (1, 40)):
            assert repeats(outputs[i].prompt_token_ids, outputs[i].outputs[0].token_ids, last) == []
        assert [token % 2 for token in outputs[2].outputs[0].token_ids] == [1, 0] * 30
        assert outputs[4].outputs[0].token_ids == list(range(100, 160))
        plain = llm.generate(PROMPTS, [SamplingParams(**SAMPLED, seed=i) for i in range(6)])
        assert repeats(plain[1].prompt_token_ids, plain[1].outputs[0].token_ids, 40), "it would not have repeated itself anyway"
        assert told(plain)[5] == alone[5]
        assert not any(one == other for one, other in zip(told(plain)[1:5], alone[1:5], strict=True))
    spread: dict[str, Any] = {"pipeline_parallel_size": 3, "num_gpu_blocks_override": 32, "block_size": 16, "max_num_batched_tokens": 8}
    names = [f"logits_plugins:{plugin.__name__}" for plugin in PLUGINS]
    with LLM("smollm2", max_model_len=256, logits_processors=names, **spread) as other:
        assert other.fingerprint == fingerprint
        for _ in range(2):
            assert told(other.generate(PROMPTS * 3, PARAMS * 3)) == alone * 3
        stats = other._running.engine.driver.scheduler.stats
        assert stats.preemptions > 0
        assert stats.prefix_hits > 0
    with LLM("smollm2", max_model_len=256) as without:
        assert without.fingerprint != fingerprint
        assert fingerprint.startswith(without.fingerprint)


def test_a_forced_answer_ends() -> None:
    with LLM("smollm2", max_model_len=256, logits_processors=[Forced]) as llm:
        ids = llm.get_tokenizer().encode("No more than this.", add_special_tokens=False)
        choice = llm.generate("Say:", SamplingParams(max_tokens=50, temperature=1.0, min_tokens=40, extra_args={"forced_ids": ids}))[0].outputs[0]
        assert (choice.text, choice.finish_reason, len(choice.token_ids)) == ("No more than this.", "stop", len(ids) + 1)


FAULTS = {
    "raises": (PluginError, "after 5 tokens: logits processor logits_plugins:Faulty failed with RuntimeError: as it was told"),
    "exits": (PluginError, "SystemExit: 3"),
    "unsendable": (PluginError, "ValueError: \\ud800"),
    "none of the kind": (PluginError, "must return a LogitsEdit"),
    "above": (PluginError, "forbidden must be token ids from 0 to 49151, got 49152"),
    "nan": (PluginError, "biases must be finite"),
    "writes": (PluginError, "read-only"),
    "nothing": (InvalidRequestError, "after 5 tokens no next one is left of what logits_plugins:Faulty allow"),
}


def test_what_fails_ends_its_own_request_and_nobody_else_notices() -> None:
    with LLM("smollm2", max_model_len=256, logits_processors=PLUGINS) as llm:
        alone = [told(llm.generate(prompt, params))[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]

    async def run() -> None:
        async with AsyncLLM("smollm2", max_model_len=256, pipeline_parallel_size=2, logits_processors=PLUGINS) as llm:

            async def failing(fault: str) -> tuple[BaseException, int]:
                tokens = 0
                try:
                    asked = SamplingParams(max_tokens=40, temperature=0.0, extra_args={"fault": fault, "fault_after": 5})
                    async for output in llm.generate("Tell me", asked, fault):
                        tokens = len(output.outputs[0].token_ids)
                except Exception as error:
                    return error, tokens
                raise AssertionError(f"{fault} did no harm")

            well = [llm.complete(prompt, params, f"well-{i}") for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))]
            *failures, outputs = await asyncio.gather(*(failing(fault) for fault in FAULTS), asyncio.gather(*well))
            for (kind, words), (error, tokens) in zip(FAULTS.values(), failures, strict=True):
                assert type(error) is kind, error
                assert words in str(error)
                assert tokens == 5
            assert told(outputs) == alone
            state = llm._running.engine.state
            assert (state.epoch, state.restarts) == (0, 0)

    asyncio.run(run())


UNFIT: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
    ({"no_such": 1}, openai.BadRequestError, "vllm_xargs: no logits processor takes 'no_such'; loaded are logits_plugins:NoRepeat"),
    ({"no_repeat_last": 0}, openai.BadRequestError, "vllm_xargs: logits_plugins:NoRepeat refuses"),
    ({"no_repeat_last": {"a": 1}}, openai.BadRequestError, "vllm_xargs must have numbers, texts"),
    ({"forced_ids": [1] * 20_000}, openai.BadRequestError, "vllm_xargs must have at most 16384 bytes"),
    ({"fault": "nothing"}, openai.BadRequestError, "no next one is left"),
    ({"fault": "validate unsendable"}, openai.BadRequestError, r"refuses .*: .ud800"),
    ({"fault": "validate"}, openai.InternalServerError, "logits_plugins:Faulty failed with KeyError"),
    ({"fault": "raises"}, openai.InternalServerError, "after 0 tokens: logits processor logits_plugins:Faulty failed with RuntimeError"),
]


def test_over_http_requests_ask_by_vllm_xargs_also_across_a_killed_stage() -> None:
    with LLM("smollm2", max_model_len=256, logits_processors=PLUGINS) as llm:
        asked = {"temperature": 1.0, "seed": 7, "max_tokens": 150}
        drift = {"drift": 5, "no_repeat_last": 20}
        alone = llm.generate("Once upon a time", SamplingParams(**asked, ignore_eos=True, extra_args=drift))[0].outputs[0].text
        fingerprint = llm.fingerprint
    with served("-pp", "2", "--max-model-len", "256", *FLAGS) as server, ThreadPoolExecutor(1) as threads:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)

        def stream(kills: int) -> str:
            text, killed = "", 0
            extra = {"vllm_xargs": drift, "ignore_eos": True}
            for chunk in client.completions.create(model="smollm2", prompt="Once upon a time", stream=True, extra_body=extra, **asked):  # type: ignore[call-overload]
                text += chunk.choices[0].text
                assert chunk.system_fingerprint == fingerprint
                if killed < kills and len(text) > 60 * (killed + 1):
                    server.stages_now()[-1].send_signal(signal.SIGKILL)
                    killed += 1
            assert killed == kills
            return text

        bystander = threads.submit(stream, 0)
        for arguments, kind, words in UNFIT:
            for streamed in (False, True):
                asked_wrong = {"prompt": "x", "max_tokens": 20, "stream": streamed, "extra_body": {"vllm_xargs": arguments}}
                with pytest.raises(kind, match=words) as caught:
                    client.completions.create(model="smollm2", **asked_wrong)  # type: ignore[call-overload]
                assert kind is not openai.BadRequestError or caught.value.param == "vllm_xargs"
        fails_late = {"vllm_xargs": {"fault": "raises", "fault_after": 6}}
        begun = client.completions.create(model="smollm2", prompt="x", stream=True, max_tokens=20, extra_body=fails_late)
        with pytest.raises(openai.APIError, match="after 6 tokens: logits processor logits_plugins:Faulty failed"):
            list(begun)
        assert bystander.result(PATIENCE_S) == alone
        assert stream(2) == alone
        chat = client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Hi"}], max_tokens=4, extra_body={"vllm_xargs": {"forced_ids": [100, 200]}}
        )
        assert chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 3
        assert httpx2.get(server.url + "/health", timeout=PATIENCE_S).status_code == 200


def test_the_command_line_loads_and_asks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ask = ["generate", "smollm2", "--prompt", "x", "--temperature", "0", "--max-tokens", "8", "--max-model-len", "64"]
    with LLM("smollm2", max_model_len=64) as llm:
        forced = llm.get_tokenizer().encode("as told", add_special_tokens=False)
    arguments = f'{{"forced_ids": {forced}}}'
    assert main([*ask, *FLAGS, "--extra-args", arguments]) == 0
    assert capsys.readouterr().out == "as told\n"
    assert main([*ask, "--extra-args", arguments]) != 0
    assert "extra_args: no logits processor takes 'forced_ids'; none is loaded" in capsys.readouterr().err
    lines, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text(f'{{"prompt": "x", "extra_args": {arguments}}}\n{{"prompt": "x", "extra_args": {{"fault": "raises"}}}}\n')
    assert (
        main(
            ["generate", "smollm2", "--max-model-len", "64", "--max-tokens", "8", "--prompts-file", str(lines), "--output-file", str(answers), *FLAGS]
        )
        == 1
    )
    out = answers.read_text()
    assert '"as told"' in out
    assert '"plugin_error"' in out


def test_a_stage_that_does_not_find_the_plugin_or_finds_another_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process finds it in its own path, as a script does that lies beside it; a stage looks in PYTHONPATH and among what is installed."""
    text = "from logits_plugins import NoRepeat\nclass Mine(NoRepeat):\n    arguments = ('mine',)\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "mine" / "beside_the_script.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "mine")
    two: dict[str, Any] = {"max_model_len": 64, "pipeline_parallel_size": 2, "logits_processors": ["beside_the_script:Mine"]}
    with pytest.raises(ConfigError, match=r"stage \d: logits_processors: beside_the_script cannot be imported: .*PYTHONPATH"):
        LLM("smollm2", **two)
    (tmp_path / "theirs" / "beside_the_script.py").write_text(text + "# another version\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "theirs"), prepend=":")
    with pytest.raises(HandshakeError, match="found other logits processors than this process"):
        LLM("smollm2", **two)


def test_a_plugin_that_was_changed_under_a_running_engine_is_noticed_when_its_stage_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from logits_plugins import NoRepeat\nclass Mine(NoRepeat):\n    arguments = ('mine',)\n    def edit(self, *_):\n        return None\n"
    file = tmp_path / "changing_in_between.py"
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    async def run(changed: str) -> int:
        settings: dict[str, Any] = {"pipeline_parallel_size": 2, "logits_processors": ["changing_in_between:Mine"], "max_restarts": 1}
        async with AsyncLLM("smollm2", max_model_len=256, **settings) as llm:
            pids: Any = llm._running.cluster.describe()["pids"]
            killed = tokens = 0
            async for output in llm.generate("x", SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True), "r"):
                if not killed:
                    file.write_text(changed)
                    os.kill(pids[-1], signal.SIGKILL)
                    killed = pids[-1]
                tokens = len(output.outputs[0].token_ids)
            return tokens

    assert asyncio.run(run(text)) == 100
    with pytest.raises(LockstepError, match=r"do not fit together: logits_processors is 'changing_in_between:Mine 1 .*' on stage 1 and"):
        asyncio.run(run(text + "# another\n"))


def test_the_example_of_the_documentation_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "PLUGINS.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "no_repeat.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ask = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    with LLM("smollm2", max_model_len=256, pipeline_parallel_size=2, logits_processors=["no_repeat:NoRepeat"]) as llm:
        plain = llm.generate("one one one", SamplingParams(**ask))[0]
        asked = llm.generate("one one one", SamplingParams(**ask, extra_args={"no_repeat_last": 8}))[0]
    assert repeats(plain.prompt_token_ids, plain.outputs[0].token_ids, 8)
    assert repeats(asked.prompt_token_ids, asked.outputs[0].token_ids, 8) == []
