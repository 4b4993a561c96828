"""prompt_logprobs and echo over HTTP, in vLLM's and OpenAI's shapes, with the real openai client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from scripted_engine import ScriptedEngine, Submission, events_of

from lockstep.core.logprobs import LogprobColumns
from lockstep.core.outputs import TokenEvent


def foretold(submission: Submission) -> list[TokenEvent]:
    """Answers "yes". Token i of the prompt has log probability -i and rank i, its alternatives are the next bytes."""
    count = submission.params.prompt_logprobs
    events = events_of(b"yes", logprobs=submission.params.logprobs)
    if count is None:
        return events
    rest = len(submission.prompt) - 1
    columns = LogprobColumns(
        logprobs=-np.arange(1, rest + 1, dtype=np.float32),
        ranks=np.arange(1, rest + 1, dtype=np.int32),
        top_ids=np.array([[token + k + 1 for k in range(count)] for token in submission.prompt[1:]], np.int32).reshape(rest, count),
        top_logprobs=np.zeros((rest, count), np.float32),
    )
    return [replace(events[0], prompt_logprobs=columns), *events[1:]]


@pytest.fixture(autouse=True)
def _foretelling(engine: ScriptedEngine) -> None:
    engine.script = foretold


def test_completion_carries_prompt_logprobs_as_vllm_does(client: openai.OpenAI) -> None:
    answer: Any = client.completions.create(model="lock-1", prompt="abc", max_tokens=3, extra_body={"prompt_logprobs": 1})
    assert answer.choices[0].text == "yes"
    assert answer.choices[0].logprobs is None
    assert answer.choices[0].prompt_logprobs == [
        None,
        {"99": {"logprob": 0.0, "rank": 1, "decoded_token": "c"}, "98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}},
        {"100": {"logprob": 0.0, "rank": 1, "decoded_token": "d"}, "99": {"logprob": -2.0, "rank": 2, "decoded_token": "c"}},
    ]


def test_chat_carries_prompt_logprobs_beside_its_choices(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer: Any = client.chat.completions.create(
        model="lock-1", messages=[{"role": "user", "content": "hi"}], max_tokens=3, extra_body={"prompt_logprobs": 0}
    )
    prompt = engine.submissions[0].prompt
    assert [list(entry) if entry else entry for entry in answer.prompt_logprobs] == [None, *([str(token)] for token in prompt[1:])]


def test_echo_puts_the_prompt_and_its_logprobs_before_the_answer(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="lock-1", prompt="abc", max_tokens=3, echo=True, logprobs=1).choices[0]
    assert choice.text == "abcyes"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list("abcyes")
    assert choice.logprobs.token_logprobs == [None, -1.0, -2.0, -0.25, -0.5, -0.75]
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[:2] == [None, {"c": 0.0, "b": -1.0}]


def test_echo_without_tokens_is_the_prompt_alone(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.completions.create(model="lock-1", prompt=[97, 98, 99], max_tokens=0, echo=True, logprobs=0)
    choice, usage = answer.choices[0], answer.usage
    assert choice.logprobs is not None
    assert (choice.text, choice.finish_reason, choice.logprobs.tokens) == ("abc", "length", ["a", "b", "c"])
    assert usage is not None
    assert usage.completion_tokens == 0
    assert engine.submissions[0].params.max_tokens == 1


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_streamed_echo_adds_up_to_the_whole(client: openai.OpenAI, logprobs: int | None) -> None:
    asked: dict[str, Any] = {"model": "lock-1", "prompt": ["abc", "d"], "max_tokens": 3, "echo": True, "logprobs": logprobs, "n": 2}
    whole = client.completions.create(**asked)
    texts, offsets = [""] * 4, [list[int]() for _ in range(4)]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += (choice.logprobs.text_offset or []) if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices] == ["abcyes", "abcyes", "dyes", "dyes"]
    assert offsets == [(choice.logprobs.text_offset or []) if choice.logprobs else [] for choice in whole.choices]
    assert bool(offsets[1]) == (logprobs is not None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_logprobs": 21}, "from 0 to 20"),
        ({"prompt_logprobs": -1}, "from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "not told in a stream"),
        ({"max_tokens": 0}, "at least 1"),
        ({"echo": "yes"}, "bool"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.completions.create(model="lock-1", prompt="abc", max_tokens=3, extra_body=fields)
    assert next(iter(fields)) in str(caught.value)
