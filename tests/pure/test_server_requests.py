"""What a request body may hold, without HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import tiny

from lockstep.core.params import SEED_LIMIT
from lockstep.errors import CapacityError, ConfigError, InvalidRequestError
from lockstep.server.admission import Admission
from lockstep.server.errors import ContextLengthError
from lockstep.server.fields import NEUTRAL
from lockstep.server.prompts import checked_ids, plain_messages
from lockstep.server.requests import ChatRequest, CompletionRequest, read_request
from lockstep.server.sampling import (
    TokenBudget,
    chat_budget,
    chat_logprobs,
    completion_budget,
    params_of_choice,
    priority_of,
    sampling_params,
    tokens_max,
)
from lockstep.server.settings import ServerSettings

TOKENIZER, _ = tiny("byte-level")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
JSON = (
    SCALARS
    | st.lists(SCALARS, max_size=3)
    | st.dictionaries(st.text(max_size=4), SCALARS, max_size=3)
    | st.lists(st.lists(SCALARS, max_size=2), max_size=2)
)
FIELDS = st.sampled_from(CompletionRequest.__struct_fields__ + tuple(NEUTRAL))


def completion(**fields: Any) -> CompletionRequest:
    return read_request(json.dumps({"prompt": "p", **fields}).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return read_request(json.dumps({"messages": [], **fields}).encode(), ChatRequest)


@settings(max_examples=100, deadline=None)
@given(
    st.binary() | st.dictionaries(st.sampled_from(CompletionRequest.__struct_fields__ + tuple(NEUTRAL)), JSON).map(lambda d: json.dumps(d).encode())
)
def test_any_bytes_are_a_request_or_an_invalid_request_error(body: bytes) -> None:
    # Anything else that is raised fails the test.
    with contextlib.suppress(InvalidRequestError):
        request = read_request(body, CompletionRequest)
        sampling_params(request, token_count_max=1, logprobs=None, tokenizer=TOKENIZER, defaults={})


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_unserved_field_passes_only_at_its_neutral_values(name: str) -> None:
    read: Callable[..., object] = chat if name in CompletionRequest.__struct_fields__ else completion
    read(**{name: None})
    for value in NEUTRAL[name]:
        read(**{name: value})
    with pytest.raises(InvalidRequestError, match="leave it out") as caught:
        read(**{name: {"odd": "value"}})
    assert caught.value.param == name


@pytest.mark.parametrize(("n", "best_of", "passes"), [(None, 1, True), (3, 3, True), (1, 2, False), (None, 2, False), (2, "x", False)])
def test_best_of_passes_only_when_it_is_n(n: int | None, best_of: object, passes: bool) -> None:
    if passes:
        completion(n=n, best_of=best_of)
        return
    with pytest.raises(InvalidRequestError) as caught:
        completion(n=n, best_of=best_of)
    assert caught.value.param == "best_of"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_wrong_type_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**fields)
    assert caught.value.param == param


def test_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_request(b"{}", CompletionRequest)
    assert caught.value.param == "prompt"


def test_null_means_left_out_for_every_field() -> None:
    every = dict.fromkeys(set(CompletionRequest.__struct_fields__) - {"prompt"})
    assert completion(**every) == completion()


def test_defaults_are_openais() -> None:
    params = sampling_params(completion(), token_count_max=16, logprobs=None, tokenizer=TOKENIZER, defaults={})
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (1, 1.0, 1.0, 0, 0.0, None)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.skip_special_tokens) == ((), (), False, True)


def test_model_s_own_defaults_are_for_requests_that_do_not_say() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 99}
    asked = {"token_count_max": 16, "logprobs": None, "tokenizer": TOKENIZER, "defaults": defaults}
    params = sampling_params(completion(), **asked)
    assert {name: getattr(params, name) for name in defaults} == defaults | {"max_tokens": 16}
    own = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert {name: getattr(sampling_params(completion(**own), **asked), name) for name in own} == own
    assert completion_budget(completion(), defaults).default == 99
    assert completion_budget(completion(), {}).default == 16
    assert chat_budget(chat(), defaults).default == 99
    assert chat_budget(chat(), {}).default is None


@settings(deadline=None)
@given(
    prompt=st.integers(1, 130),
    asked=st.none() | st.integers(-2, 130),
    default=st.none() | st.integers(1, 130),
    window=st.integers(1, 130),
)
def test_prompt_and_answer_fit_the_window_or_are_refused(prompt: int, asked: int | None, default: int | None, window: int) -> None:
    budget = TokenBudget(asked=asked, default=default)
    fits = prompt < window and (asked is None or 1 <= asked <= window - prompt)
    if not fits:
        with pytest.raises(InvalidRequestError):
            tokens_max(budget, prompt, window)
        return
    count = tokens_max(budget, prompt, window)
    assert 1 <= count <= window - prompt
    assert asked in (None, count)
    assert asked is not None or count == min(default or window, window - prompt)


def test_over_long_request_names_prompt_asked_and_window() -> None:
    with pytest.raises(ContextLengthError, match=r"100 tokens and max_tokens=29 .* window of 128.* at most 28") as caught:
        tokens_max(TokenBudget(asked=29), 100, 128)
    assert caught.value.param == "max_tokens"


def test_two_names_for_the_token_limit_must_agree() -> None:
    assert chat_budget(chat(max_tokens=5), {}).asked == 5
    assert chat_budget(chat(max_tokens=5, max_completion_tokens=5), {}).name == "max_completion_tokens"
    with pytest.raises(InvalidRequestError):
        chat_budget(chat(max_tokens=5, max_completion_tokens=6), {})


def test_top_logprobs_need_logprobs() -> None:
    assert chat_logprobs(chat(), 20) is None
    assert chat_logprobs(chat(logprobs=True), 20) == 0
    assert chat_logprobs(chat(logprobs=True, top_logprobs=4), 20) == 4
    for fields in ({"top_logprobs": 4}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}):
        with pytest.raises(InvalidRequestError) as caught:
            chat_logprobs(chat(**fields), 20)
        assert caught.value.param == "top_logprobs"


@given(seed=st.integers(0, SEED_LIMIT - 1), choice=st.integers(0, 127))
def test_choice_samples_with_seed_plus_its_number(seed: int, choice: int) -> None:
    params = sampling_params(completion(seed=seed), token_count_max=1, logprobs=None, tokenizer=TOKENIZER, defaults={})
    assert params_of_choice(params, choice).seed == (seed + choice) % SEED_LIMIT


def test_choices_of_an_unseeded_request_stay_unseeded() -> None:
    params = sampling_params(completion(), token_count_max=1, logprobs=None, tokenizer=TOKENIZER, defaults={})
    assert params_of_choice(params, 3).seed is None


@pytest.mark.parametrize("priority", [-(1 << 31) - 1, 1 << 31])
def test_priority_has_limits(priority: int) -> None:
    with pytest.raises(InvalidRequestError):
        priority_of(completion(priority=priority))


@pytest.mark.parametrize("ids", [[-1], [10], [True], [1.0], ["1"], [None], [[1]]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[object]) -> None:
    assert checked_ids([0, 9], 10, "prompt") == (0, 9)
    with pytest.raises(InvalidRequestError, match="from 0 to 9"):
        checked_ids([1, *ids], 10, "prompt")


def test_text_parts_are_joined_and_names_passed_on() -> None:
    message = {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "tool_calls": None}
    assert plain_messages([message]) == [{"role": "user", "content": "a\nb", "name": "ann"}]


def test_admission_counts_refuses_and_gives_back() -> None:
    admission = Admission(3)
    with admission.reserve(2):
        with pytest.raises(CapacityError), admission.reserve(2):
            pass
        with admission.reserve(1):
            assert admission.open_count == 3
    with pytest.raises(ZeroDivisionError), admission.reserve(3):
        _ = 1 // 0
    assert admission.open_count == 0
    with pytest.raises(InvalidRequestError), admission.reserve(4):
        pass
    admission.drain()
    with pytest.raises(CapacityError, match="shutting down"), admission.reserve(1):
        pass


@pytest.mark.parametrize(
    "wrong",
    [
        {"served_model_names": ()},
        {"served_model_names": ("",)},
        {"api_key": ""},
        {"api_key": "é"},
        {"max_logprobs": 21},
        {"body_bytes_max": 0},
        {"requests_max": 0},
        {"shutdown_timeout_s": float("nan")},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    ServerSettings(served_model_names=("m",))
    with pytest.raises(ConfigError):
        ServerSettings(**{"served_model_names": ("m",), **wrong})
