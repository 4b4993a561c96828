"""POST /v1/chat/completions through a real uvicorn and the real openai client."""

from __future__ import annotations

import asyncio

import openai
from scripted_engine import WINDOW, ScriptedEngine, say
from server_answers import MESSAGES, RENDERED


def test_chat_renders_the_template_and_answers(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.chat.completions.create(model="lock-1", messages=MESSAGES, max_completion_tokens=5)
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.system_fingerprint == "fp-scripted"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(RENDERED)
    assert engine.submissions[0].prompt == RENDERED


def test_chat_stream_begins_with_the_role_and_adds_up(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    chunks = list(client.chat.completions.create(model="lock-1", messages=MESSAGES, max_tokens=5, n=2, stream=True))
    texts = ["", ""]
    roles: list[list[str | None]] = [[], []]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index].append(choice.delta.role)
    assert texts == ["Hello", "Hello"]
    assert roles == [["assistant", None, None, None, None]] * 2


def test_chat_without_max_tokens_may_fill_the_window(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.chat.completions.create(model="lock-1", messages=MESSAGES)
    assert engine.submissions[0].params.max_tokens == WINDOW - len(RENDERED)


def test_chat_logprobs_carry_bytes(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = say("é")
    answer = client.chat.completions.create(model="lock-1", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert bytes(b for entry in content for b in entry.bytes or []).decode() == "é"
    assert [entry.logprob for entry in content] == [-0.25, -0.5]
    assert [len(entry.top_logprobs) for entry in content] == [2, 2]


def test_template_variables_and_generation_prompt_are_the_callers(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    extra = {"add_generation_prompt": False, "chat_template_kwargs": {"suffix": "?"}}
    client.chat.completions.create(model="lock-1", messages=MESSAGES, max_tokens=1, extra_body=extra)
    assert engine.submissions[0].prompt == (*RENDERED[:-1], ord("?"))


def test_openai_async_client_streams_many_at_once(url: str, engine: ScriptedEngine) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="lock-1", messages=[{"role": "user", "content": "x"}], max_tokens=12, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
            return await asyncio.gather(*(one(client) for _ in range(16)))

    assert asyncio.run(main()) == ["Hello, world"] * 16
