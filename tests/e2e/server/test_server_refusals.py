"""What is refused, with which status, and that the next request is served."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest
from scripted_engine import WINDOW, Hold, ScriptedEngine, events_of, say
from server_answers import SETTINGS, error_of, healthy

FIELDS = (
    *("prompt", "n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs"),
    *("include_stop_str_in_output", "skip_special_tokens", "add_special_tokens", "priority", "stream_options", "return_token_ids", "model"),
    *("logit_bias", "presence_penalty", "best_of", "echo", "messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"),
    *("prompt_logprobs", "min_tokens", "repetition_penalty", "frequency_penalty", "allowed_token_ids", "bad_words"),
    *("add_generation_prompt", "tools", "response_format", "return_tokens_as_token_ids"),
)
ODD_VALUES = (
    *("-1", "0", "258", "1e9", "1000000000", "99999999999999999999999", "1e999", "-0.0", "0.5", '"x"', '""', "null", "true", "NaN", "-Infinity"),
    *("[]", "[[]]", '[[[["x"]]]]', '[""]', "[-1]", "[258]", "[1.5]", "[true]", "[null]", '{"a":{"b":[1]}}', "{}", '"\\ud800"', '[{"role":"user"}]'),
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_odd_values_give_400_or_a_right_answer_never_500(http: httpx2.Client, engine: ScriptedEngine, path: str) -> None:
    base = {
        "/v1/completions": {"prompt": '"p"'},
        "/v1/chat/completions": {"messages": '[{"role":"user","content":"p"}]'},
        "/tokenize": {"prompt": '"p"'},
        "/detokenize": {"tokens": "[1]"},
    }[path]
    for name in (*FIELDS, "tokens", "no_such_field"):
        for value in ODD_VALUES:
            body = "{" + ",".join(f'"{k}":{v}' for k, v in {**base, name: value}.items()) + "}"
            answer = http.post(path, content=body)
            allowed = (200, 400, 404) if name == "model" else (200, 400)
            assert answer.status_code in allowed, (body, answer.status_code, answer.text)
            if answer.status_code != 200:
                error_of(answer)
    assert healthy(http)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"258": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [258]),
        ("bad_words", [""]),
        ("best_of", 3),
        ("suffix", "x"),
        ("prompt_logprobs", 21),
        ("min_tokens", 17),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "xml"}),
        ("guided_json", {}),
        ("no_such_field", 1),
        ("max_tokens", 0),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop_token_ids", [258]),
        ("priority", 1 << 40),
        ("n", 129),
        ("temperature", -0.1),
        ("top_p", 0),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", ["ok", ""]),
        ("prompt", [[]]),
        ("prompt", [1, -1]),
        ("prompt", [258]),
        ("prompt", [True]),
        ("prompt", ["a", 1]),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_refused_field_is_named(http: httpx2.Client, engine: ScriptedEngine, field: str, value: Any) -> None:
    answer = http.post("/v1/completions", json={"prompt": "p", field: value})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == field
    assert not engine.submissions
    assert healthy(http)


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logit_bias": None, "best_of": 1, "echo": False, "suffix": None},  # noqa: F601
        {"tools": None, "response_format": {"type": "text"}, "unheard_of": None},
    ],
)
def test_field_that_changes_nothing_is_accepted(http: httpx2.Client, engine: ScriptedEngine, harmless: dict[str, Any]) -> None:
    assert http.post("/v1/completions", json={"prompt": "p", **harmless}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_shapes_logits_reaches_the_engine_with_bad_words_as_tokens(http: httpx2.Client, engine: ScriptedEngine, path: str) -> None:
    asked = {
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "logit_bias": {"7": -100, "9": 2.5},
        "allowed_token_ids": [97, 98, 99],
        "bad_words": ["ab"],
    }
    prompt = {"prompt": "p"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "p"}]}
    assert http.post(path, json={**prompt, "max_tokens": 3, **asked}).status_code == 200
    params = engine.submissions[0].params
    assert {name: getattr(params, name) for name in asked} == asked | {
        "logit_bias": {7: -100.0, 9: 2.5},
        "allowed_token_ids": (97, 98, 99),
        "bad_words": ("ab",),
    }
    assert len(params.bad_words_token_ids) == 2
    assert all(len(word) >= 2 for word in params.bad_words_token_ids)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
        [{"role": "tool", "content": "x"}],
        ["x"],
    ],
)
def test_malformed_messages_are_refused(http: httpx2.Client, engine: ScriptedEngine, messages: Any) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "messages"
    assert healthy(http)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt":"\xff"}', b'{"prompt": NaN}', b"[" * 50_000])
def test_malformed_json_is_400(http: httpx2.Client, engine: ScriptedEngine, body: bytes) -> None:
    answer = http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    error_of(answer)
    assert healthy(http)


@pytest.mark.parametrize(
    ("prompt_count", "max_tokens", "status"),
    [(60, 3, 200), (60, 4, 200), (60, 5, 400), (60, 10**9, 400), (63, 1, 200), (64, 1, 400), (64, None, 400), (65, 1, 400), (60, None, 200)],
)
def test_window_is_kept_to_the_token_and_both_numbers_are_named(
    http: httpx2.Client, engine: ScriptedEngine, prompt_count: int, max_tokens: int | None, status: int
) -> None:
    answer = http.post("/v1/completions", json={"prompt": "p" * prompt_count, "max_tokens": max_tokens})
    assert answer.status_code == status
    if status == 400:
        assert str(prompt_count) in error_of(answer)["message"]
        assert str(WINDOW) in error_of(answer)["message"]
        assert error_of(answer)["code"] == "context_length_exceeded"
    else:
        assert engine.submissions[0].params.max_tokens == (max_tokens or WINDOW - prompt_count)


def test_unknown_model_is_404_naming_the_served(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    with pytest.raises(openai.NotFoundError, match="lock-1, alias") as caught:
        client.completions.create(model="gpt-9", prompt="p")
    assert caught.value.code == "model_not_found"


def test_wrong_path_method_and_size_have_their_statuses(http: httpx2.Client, engine: ScriptedEngine) -> None:
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/v1/completions").status_code == 405
    assert http.delete("/v1/models").status_code == 405
    answer = http.post("/v1/completions", content=b" " * (SETTINGS.body_bytes_max + 1))
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "request_too_large"
    unannounced = http.post("/v1/completions", content=iter([b" " * 40_000] * 3))
    assert unannounced.status_code == 413
    assert healthy(http)


def test_full_server_refuses_with_retry_after_and_serves_again(http: httpx2.Client, engine: ScriptedEngine) -> None:
    assert http.post("/v1/completions", json={"prompt": "p", "n": 41}).status_code == 400
    engine.script = lambda submission: [*events_of(b"a", finish=None), Hold()]
    with http.stream("POST", "/v1/completions", json={"prompt": "p", "n": 40, "stream": True}):
        engine.wait_until(lambda: len(engine.live) == 40)
        refused = http.post("/v1/completions", json={"prompt": "p"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert error_of(refused)["code"] == "overloaded"
    engine.wait_until(lambda: not engine.live)
    engine.script = say("Hello, world")
    assert healthy(http)
