"""`AsyncLLM` on the embedded model: streams, aborts, ids, ends; and that every way in gives the same answer to the same request."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from served_process import COMMAND, PATIENCE_S, served

from lockstep import LLM, AsyncLLM, RequestOutput, SamplingParams
from lockstep.config import EngineConfig
from lockstep.errors import InvalidRequestError, LockstepError, UnsupportedError

WINDOW = 512
PROMPT = "The capital of France is"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour and say why."}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=24)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=WINDOW - 32, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("smollm2", max_model_len=WINDOW)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", max_model_len=WINDOW) as llm:
        yield llm


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


def told(output: RequestOutput) -> list[Any]:
    return [(o.text, o.token_ids, o.logprobs, o.cumulative_logprob, o.finish_reason, o.stop_reason) for o in output.outputs]


async def idle(engine: AsyncLLM) -> None:
    while engine._running.engine.state.running + engine._running.engine.state.waiting:
        await asyncio.sleep(0.01)


def test_stream_grows_to_what_llm_gives_and_earlier_outputs_stay_as_they_were(engine: AsyncLLM, llm: LLM) -> None:
    async def read() -> list[RequestOutput]:
        return [output async for output in engine.generate(PROMPT, params, "grow")]

    for params in (GREEDY, SEEDED, SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)):
        outputs = run(read)
        assert told(outputs[-1]) == told(llm.generate(PROMPT, params)[0])
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert len(outputs) > 3
        for before, after in itertools.pairwise(outputs):
            ids = [output.outputs[0].token_ids for output in (before, after)]
            assert len(ids[0]) < len(ids[1]) or after.finished
            assert ids[1][: len(ids[0])] == ids[0]
            assert after.outputs[0].text.startswith(before.outputs[0].text)
        assert {output.request_id for output in outputs} == {"grow"}


def test_requests_at_once_get_what_each_gets_alone(engine: AsyncLLM, llm: LLM) -> None:
    prompts = [PROMPT, "1, 2, 3, 4,", {"prompt": "Once upon a time"}, [1, 2, 3]]

    async def read() -> list[RequestOutput]:
        return await asyncio.gather(*(engine.complete(prompt, SEEDED, f"r{i}") for i, prompt in enumerate(prompts)))

    assert [told(output) for output in run(read)] == [told(output) for output in llm.generate(prompts, SEEDED)]


def test_choices_and_stop_strings_are_those_of_llm(engine: AsyncLLM, llm: LLM) -> None:
    stop = llm.generate(PROMPT, GREEDY)[0].outputs[0].text[6:9]
    for params in (SamplingParams(n=3, seed=1, max_tokens=10), SamplingParams(temperature=0.0, max_tokens=12, stop=[stop])):
        assert told(run(lambda params=params: engine.complete(PROMPT, params, "c"))) == told(llm.generate(PROMPT, params)[0])


def test_long_text_is_encoded_as_a_short_one_is(engine: AsyncLLM) -> None:
    text = "word " * 2000
    with pytest.raises(InvalidRequestError, match=r"2001 tokens|2000 tokens"):
        run(lambda: engine.complete(text, GREEDY, "long"))


def test_abort_ends_the_stream_and_leaves_the_others(engine: AsyncLLM, llm: LLM) -> None:
    async def read() -> tuple[RequestOutput, RequestOutput]:
        other = asyncio.create_task(engine.complete(PROMPT, GREEDY, "other"))
        last = None
        async for last in engine.generate(PROMPT, ENDLESS, "ended"):
            if len(last.outputs[0].token_ids) == 3:
                await engine.abort(["ended", "never seen"])
        assert last is not None
        await idle(engine)
        return last, await other

    last, other = run(read)
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert 3 <= len(last.outputs[0].token_ids) < 200
    assert told(other) == told(llm.generate(PROMPT, GREEDY)[0])


def test_leaving_or_cancelling_a_stream_ends_its_request_and_frees_its_id(engine: AsyncLLM) -> None:
    async def leave() -> None:
        stream = engine.generate(PROMPT, ENDLESS, "left")
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(engine.complete(PROMPT, ENDLESS, "left"))
        while not engine._running.engine.state.running:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await idle(engine)
        assert (await engine.complete(PROMPT, GREEDY, "left")).finished

    run(leave)


def test_id_of_an_open_request_is_refused_and_the_open_one_goes_on(engine: AsyncLLM, llm: LLM) -> None:
    async def twice() -> RequestOutput:
        stream = engine.generate(PROMPT, GREEDY, "same")
        output = await anext(stream)
        with pytest.raises(InvalidRequestError, match="'same' is open"):
            await engine.complete(PROMPT, GREEDY, "same")
        return [output, *[later async for later in stream]][-1]

    assert told(run(twice)) == told(llm.generate(PROMPT, GREEDY)[0])
    for wrong in ("", 5):
        with pytest.raises(InvalidRequestError, match="request_id"):
            run(lambda wrong=wrong: engine.complete(PROMPT, GREEDY, wrong))


def test_bad_request_is_refused_and_the_next_is_served(engine: AsyncLLM) -> None:
    for prompt, params in (("", GREEDY), ([49152], GREEDY), (PROMPT, SamplingParams(max_tokens=WINDOW))):
        with pytest.raises(InvalidRequestError):
            run(lambda prompt=prompt, params=params: engine.complete(prompt, params, "bad"))
    assert run(lambda: engine.complete(PROMPT, GREEDY, "bad")).finished


def test_what_is_not_there_is_refused_by_its_name(engine: AsyncLLM, llm: LLM) -> None:
    for name in ("encode", "embed", "classify", "score"):
        with pytest.raises(UnsupportedError, match=f"{name}: Lockstep runs models that generate"):
            getattr(llm, name)(PROMPT)
    with pytest.raises(UnsupportedError, match="encode"):
        engine.encode(PROMPT)
    for options in ({"chat_template": "x"}, {"chat_template_content_format": "openai"}, {"continue_final_message": True}, {"lora_request": object()}):
        with pytest.raises(UnsupportedError, match=next(iter(options))):
            llm.chat(MESSAGES, GREEDY, **options)
        with pytest.raises(UnsupportedError, match=next(iter(options))):
            run(lambda options=options: anext(engine.chat(MESSAGES, GREEDY, "no", **options)))
    with pytest.raises(UnsupportedError, match="lora_request"):
        llm.generate(PROMPT, GREEDY, lora_request=object())
    for kind in (LLM, AsyncLLM):
        with pytest.raises(UnsupportedError, match=r"tensor_parallel_size=2.*pipeline"):
            kind("smollm2", tensor_parallel_size=2)


def test_text_parts_are_one_text_and_others_are_refused(llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Name"}, {"type": "text", "text": "a colour."}]}]
    assert llm.chat(parts, GREEDY)[0].prompt == llm.chat([{"role": "user", "content": "Name\na colour."}], GREEDY)[0].prompt
    with pytest.raises(InvalidRequestError, match=r"content\[0\].*text"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], GREEDY)


def test_engine_from_one_object_is_well_until_it_is_shut_down() -> None:
    async def work() -> None:
        async with AsyncLLM.from_engine_args(EngineConfig(model="smollm2", max_model_len=64)) as engine:
            await engine.check_health()
            assert (engine.is_running, engine.errored, engine.dead_error) == (True, False, None)
            assert (await engine.get_tokenizer()).encode("a")
            assert engine.fingerprint
        engine.shutdown()
        assert (engine.is_running, engine.errored) == (False, False)
        with pytest.raises(LockstepError, match=r"shutting down|closed"):
            await engine.complete(PROMPT, GREEDY, "late")

    run(work)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_every_way_in_gives_the_same_answer_to_the_same_request(engine: AsyncLLM, llm: LLM, tmp_path: Path, params: SamplingParams) -> None:
    """LLM.chat, AsyncLLM.chat, AsyncLLM.generate, `generate --prompts-file`, `chat` and the server."""
    expected = llm.chat(MESSAGES, params)[0].outputs[0]
    wanted = (expected.text, expected.token_ids, expected.finish_reason)

    async def streamed(kind: str) -> RequestOutput:
        rendered = engine.chat_prompt(MESSAGES)
        stream = engine.chat(MESSAGES, params, kind) if kind == "chat" else engine.generate(rendered, params, kind)
        return [output async for output in stream][-1]

    for kind in ("chat", "generate"):
        found = run(lambda kind=kind: streamed(kind)).outputs[0]
        assert (found.text, found.token_ids, found.finish_reason) == wanted

    fields = {"temperature": params.temperature, "top_p": params.top_p, "seed": params.seed, "max_tokens": params.max_tokens}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"messages": MESSAGES, **fields}) + "\n")
    flags = ("--max-model-len", str(WINDOW))
    command = [*COMMAND, "generate", "smollm2", *flags, "--prompts-file", str(source), "--output-file", str(target), "-pp", "2"]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    record = json.loads(target.read_text())
    assert (record["text"], record["token_ids"], record["finish_reason"]) == wanted

    spelled = [part for name, value in fields.items() if value is not None for part in (f"--{name.replace('_', '-')}", str(value))]
    spelled = ["--sampling-seed" if part == "--seed" else part for part in spelled]
    asked = "\n".join([f"/system {MESSAGES[0]['content']}", MESSAGES[1]["content"]])
    talk = subprocess.run(
        [*COMMAND, "chat", "smollm2", *flags, *spelled], input=asked, check=True, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (talk.stdout, talk.stderr) == (expected.text + "\n", "")

    with served(*flags) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        body = {name: value for name, value in fields.items() if value is not None}
        answer = client.chat.completions.create(model="smollm2", messages=MESSAGES, extra_body={"return_token_ids": True}, **body)  # type: ignore[call-overload]
        choice = answer.choices[0]
        assert (choice.message.content, choice.model_extra["token_ids"], choice.finish_reason) == wanted
