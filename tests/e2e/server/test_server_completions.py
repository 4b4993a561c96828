"""POST /v1/completions through a real uvicorn and the real openai client."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest
from scripted_engine import END, START, ScriptedEngine, Submission, events_of, say

from lockstep.core.outputs import FinishReason, TokenEvent


def test_completion_carries_text_usage_and_fingerprint(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.completions.create(model="lock-1", prompt="abc", max_tokens=5)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.system_fingerprint == "fp-scripted"
    assert answer.model == "lock-1"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)
    assert engine.submissions[0].prompt == tuple(b"abc")
    assert not engine.aborted


def test_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    chunks = list(client.completions.create(model="alias", prompt="abc", max_tokens=7, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hello, "
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 6 + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_is_in_every_chunk_when_asked_for(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(model="lock-1", prompt="abc", max_tokens=3, stream=True, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", [b"ab"]), (["ab", "c"], [b"ab", b"c"]), ([97, 98], [b"ab"]), ([[97], [98, 99]], [b"a", b"bc"])],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_prompt_comes_in_four_forms(client: openai.OpenAI, engine: ScriptedEngine, prompt: Any, expected: list[bytes]) -> None:
    answer = client.completions.create(model="lock-1", prompt=prompt, max_tokens=2)
    assert sorted(s.prompt for s in engine.submissions) == sorted(tuple(p) for p in expected)
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(p) for p in expected)


def echo_seed(submission: Submission) -> list[TokenEvent]:
    """Says its prompt and its own seed, so that every choice shows what it was given."""
    return events_of(bytes(submission.prompt) + b"/%d" % (submission.params.seed or 0), size=2)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_choices_are_complete_distinct_and_seeded_one_apart(client: openai.OpenAI, engine: ScriptedEngine, n: int, stream: bool) -> None:
    engine.script = echo_seed
    answer: Any = client.completions.create(model="lock-1", prompt=["p", "q"], n=n, seed=7, max_tokens=20, stream=stream)
    texts = [""] * (2 * n)
    reasons = [0] * (2 * n)
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += choice.finish_reason is not None
    assert texts == [f"{prompt}/{7 + i}" for prompt in "pq" for i in range(n)]
    assert reasons == [1] * (2 * n)
    assert {(s.request_id[-2:], s.choice) for s in engine.submissions} == {(f"-{p}", i) for p in range(2) for i in range(n)}


def test_seed_of_a_choice_wraps_at_two_to_the_64(http: httpx2.Client, engine: ScriptedEngine) -> None:
    engine.script = echo_seed
    answer = http.post("/v1/completions", json={"prompt": "p", "n": 2, "seed": 2**64 - 1}).json()
    assert [choice["text"] for choice in answer["choices"]] == [f"p/{2**64 - 1}", "p/0"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("include", [False, True], ids=["without stop", "with stop"])
def test_stop_string_ends_text_count_and_engine_request(
    client: openai.OpenAI, engine: ScriptedEngine, include: bool, size: int, stream: bool
) -> None:
    engine.script = lambda submission: events_of(b"one STOP two", size=size, finish=FinishReason.LENGTH)
    answer: Any = client.completions.create(
        model="lock-1",
        prompt="p",
        stop=["never", "STOP"],
        max_tokens=12,
        stream=stream,
        extra_body={"include_stop_str_in_output": include, "return_token_ids": True},
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    parts = list(answer) if stream else [answer]
    choices = [choice for part in parts for choice in part.choices]
    assert "".join(choice.text for choice in choices) == ("one STOP" if include else "one ")
    assert [i for choice in choices for i in choice.token_ids] == list(b"one STOP")
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", "STOP")
    assert parts[-1].usage.completion_tokens == 8
    last_event_reached = -(-8 // size) * size >= 12
    assert len(engine.aborted) == (0 if last_event_reached else 1)


def test_no_part_of_a_stop_string_is_ever_streamed(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda submission: events_of(b"ab STab STOP!")
    seen = [chunk.choices[0].text for chunk in client.completions.create(model="lock-1", prompt="p", stop="STOP", max_tokens=13, stream=True)]
    assert "".join(seen) == "ab STab "
    so_far = ""
    for text in seen:
        so_far += text
        assert "ab STab ".startswith(so_far)


def test_end_token_counts_but_is_not_text(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda submission: events_of([*b"Hi", END], finish=FinishReason.STOP, stop_token=END)
    answer = client.completions.create(model="lock-1", prompt="p", max_tokens=9)
    assert answer.choices[0].text == "Hi"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason is None  # type: ignore[attr-defined]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_requested_stop_token_is_named(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda submission: events_of(b"Hi!", finish=FinishReason.STOP, stop_token=ord("!"))
    answer = client.completions.create(model="lock-1", prompt="p", max_tokens=9, extra_body={"stop_token_ids": [33]})
    assert answer.choices[0].text == "Hi"
    assert answer.choices[0].stop_reason == 33  # type: ignore[attr-defined]
    shown = client.completions.create(model="lock-1", prompt="p", extra_body={"stop_token_ids": [33], "include_stop_str_in_output": True})
    assert shown.choices[0].text == "Hi!"


@pytest.mark.parametrize("text", ["π", "한국어", "🦊 and 🐻‍❄️"])
def test_characters_split_over_tokens_arrive_whole(client: openai.OpenAI, engine: ScriptedEngine, text: str) -> None:
    engine.script = say(text)
    chunks = [c.choices[0].text for c in client.completions.create(model="lock-1", prompt="p", max_tokens=60, stream=True)]
    assert "".join(chunks) == text
    assert all("�" not in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("raw", "text"), [(b"one ST", "one ST"), (b"one \xf0\x9f", "one �")], ids=["part of a stop", "part of a character"])
def test_held_back_end_is_delivered_when_the_answer_ends(client: openai.OpenAI, engine: ScriptedEngine, raw: bytes, text: str, stream: bool) -> None:
    engine.script = say(raw)
    answer: Any = client.completions.create(model="lock-1", prompt="p", stop="STOP", max_tokens=20, stream=stream)
    choices = [choice for part in (answer if stream else [answer]) for choice in part.choices]
    assert "".join(choice.text for choice in choices) == text
    assert choices[-1].finish_reason == "length"


def test_character_begun_in_the_prompt_is_ended_in_the_answer(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = say(b"\x80!")
    assert client.completions.create(model="lock-1", prompt=[97, 0xCF], max_tokens=2).choices[0].text == "π!"


def test_text_offset_leaves_out_tokens_that_are_no_text(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda submission: events_of([97, START, 98, 99], logprobs=0)
    for skip, offsets in ((True, [0, 1, 1, 2]), (False, [0, 1, 13, 14])):
        answer = client.completions.create(model="lock-1", prompt="p", max_tokens=4, logprobs=0, extra_body={"skip_special_tokens": skip})
        assert answer.choices[0].text == ("abc" if skip else "a<|im_start|>bc")
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.text_offset == offsets


def test_completion_logprobs_have_the_legacy_columns(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = say("aπb")
    answer = client.completions.create(model="lock-1", prompt="p", max_tokens=4, logprobs=2)
    columns = answer.choices[0].logprobs
    assert columns is not None
    assert columns.tokens == ["a", "bytes:\\xcf", "bytes:\\x80", "b"]
    assert columns.token_logprobs == [-0.25, -0.5, -0.75, -1.0]
    assert columns.text_offset == [0, 1, 1, 2]
    assert columns.top_logprobs is not None
    assert columns.top_logprobs[0] == {"a": -0.25, "b": -1.25}
    parts = [c.choices[0].logprobs for c in client.completions.create(model="lock-1", prompt="p", max_tokens=4, logprobs=2, stream=True)]
    assert [t for part in parts if part for t in part.tokens or []] == columns.tokens
    assert [o for part in parts if part for o in part.text_offset or []] == columns.text_offset


def test_tokens_are_named_by_id_when_asked_for(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.completions.create(model="lock-1", prompt="p", max_tokens=1, logprobs=1, extra_body={"return_tokens_as_token_ids": True})
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["token_id:72"]


def test_token_ids_of_prompt_and_answer_come_when_asked_for(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer: Any = client.completions.create(model="lock-1", prompt="ab", max_tokens=3, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == list(b"Hel")
    assert answer.choices[0].prompt_token_ids == list(b"ab")
    chunks: list[Any] = list(client.completions.create(model="lock-1", prompt="ab", max_tokens=3, stream=True, extra_body={"return_token_ids": True}))
    assert [c.choices[0].token_ids for c in chunks] == [[b] for b in b"Hel"]
    assert [getattr(c.choices[0], "prompt_token_ids", None) for c in chunks] == [list(b"ab"), None, None]


def test_cached_tokens_are_reported_once_a_prompt(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    # Sibling choices share their prompt's blocks; what the first choice found in the cache is what the request found there.
    engine.script = lambda submission: events_of(b"xy", cached_tokens=len(submission.prompt) - 1 + submission.choice)
    answer = client.completions.create(model="lock-1", prompt=["abc", "de"], n=2, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)


def test_sampling_fields_reach_the_engine(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    extra = {"top_k": 5, "min_p": 0.25, "ignore_eos": True, "stop_token_ids": [3], "priority": -4, "skip_special_tokens": False}
    client.completions.create(
        model="lock-1", prompt="p", temperature=0.5, top_p=0.75, seed=11, max_tokens=3, stop="zz", logprobs=3, user="u", extra_body=extra
    )
    params = engine.submissions[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.75, 5, 0.25, 11)
    assert (params.max_tokens, params.stop, params.stop_token_ids, params.logprobs) == (3, ("zz",), (3,), 3)
    assert (params.ignore_eos, params.skip_special_tokens, engine.submissions[0].priority) == (True, False, -4)
