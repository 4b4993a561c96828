"""`SamplingParams` takes what vLLM's takes, and names the parameter that it refuses, with its range."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.core.params import SamplingParams
from lockstep.errors import InvalidRequestError

WRONG: list[tuple[str, Any, str]] = [
    ("n", 0, "integer from 1 to 128"),
    ("n", True, "integer from 1"),
    ("temperature", -0.1, "number from 0 to 100"),
    ("temperature", float("nan"), "number from 0"),
    ("temperature", "1", "number from 0"),
    ("top_p", 0.0, "above 0 and at most 1"),
    ("top_p", 1.01, "number from 0 to 1"),
    ("min_p", -1, "number from 0 to 1"),
    ("top_k", -2, "integer from -1"),
    ("top_k", 1.0, "integer from -1"),
    ("seed", 1 << 64, "integer from"),
    ("max_tokens", 0, "integer from 1"),
    ("logprobs", 21, "integer from 0 to 20"),
    ("ignore_eos", 1, "true or false"),
    ("stop", "", "list of non-empty strings"),
    ("stop", ["a", ""], "list of non-empty strings"),
    ("stop", 5, "list of non-empty strings"),
    ("min_tokens", -1, "integer from 0"),
    ("min_tokens", 17, "at most max_tokens, got 17 and 16"),
    ("repetition_penalty", 0, "number from 0.01 to 2"),
    ("repetition_penalty", 1e-39, "number from 0.01 to 2"),
    ("repetition_penalty", 2.1, "number from 0.01 to 2"),
    ("presence_penalty", 2.1, "number from -2 to 2"),
    ("frequency_penalty", -2.1, "number from -2 to 2"),
    ("logit_bias", {"x": 1}, "integer from 0"),
    ("logit_bias", {3: 101}, "number from -100 to 100"),
    ("logit_bias", {3: float("nan")}, "number from -100"),
    ("logit_bias", [3], "mapping of at most 1024"),
    ("logit_bias", dict.fromkeys(range(1025), 1), "mapping of at most 1024"),
    ("allowed_token_ids", [], "must not be empty"),
    ("allowed_token_ids", [-3], "integer from 0"),
    ("allowed_token_ids", "12", "list of token ids"),
    ("bad_words", "word", "list of non-empty strings"),
    ("bad_words", [""], "list of non-empty strings"),
    ("bad_words", ["word"] * 1025, "at most 1024 strings"),
    ("stop_token_ids", "12", "list of token ids"),
    ("stop_token_ids", 12, "list of token ids"),
    ("stop_token_ids", [-1], "integer from 0"),
    ("extra_args", [1], "mapping of names to values"),
    ("extra_args", {1: 2}, "mapping of names to values"),
    ("extra_args", {"": 2}, "mapping of names to values"),
    ("extra_args", {"a": {"b": 1}}, "numbers, texts, true, false or lists of these for values"),
    ("extra_args", {"a": [[1]]}, "numbers, texts, true"),
    ("extra_args", {"a": [None]}, "numbers, texts, true"),
    ("extra_args", {"a": float("nan")}, "numbers, texts, true"),
    ("extra_args", {"a": 1 << 63}, "numbers, texts, true"),
    ("extra_args", {"a": "x" * (16 << 10)}, "at most 16384 bytes as JSON, got 16393"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_refusal_names_the_parameter_what_is_right_and_what_came(name: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert str(caught.value).startswith(name)


def test_lists_become_what_cannot_change_and_one_stop_is_a_list_of_one() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[3, 4])
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (3, 4))
    assert SamplingParams(stop="end").stop == ("end",)


def test_what_shapes_logits_becomes_what_cannot_change() -> None:
    params = SamplingParams(logit_bias={"5": 1, 6: -2.5}, allowed_token_ids=[1, 2], bad_words=["a"], bad_words_token_ids=[[3], [4, 5]])  # type: ignore[dict-item,arg-type]
    assert params.logit_bias == {5: 1.0, 6: -2.5}
    assert (params.allowed_token_ids, params.bad_words, params.bad_words_token_ids) == ((1, 2), ("a",), ((3,), (4, 5)))


def test_extra_args_are_a_copy_and_none_is_left_out() -> None:
    given = {"a": [1, "two", 3.5, True], "b": None, "c": ("x",), "d": "\ud800"}
    params = SamplingParams(extra_args=given)
    given["a"].append(4)  # type: ignore[union-attr]
    assert params.extra_args == {"a": [1, "two", 3.5, True], "c": ["x"], "d": "\ud800"}
    assert SamplingParams(extra_args={"b": None}).extra_args is None


@pytest.mark.parametrize("words", [[[]], "ab", [[1], "c"], [["x"]]])
def test_bad_words_as_tokens_are_lists_of_ids(words: Any) -> None:
    with pytest.raises(InvalidRequestError, match="bad_words_token_ids must be"):
        SamplingParams(bad_words_token_ids=words)


def test_edges_of_every_range_are_taken() -> None:
    for edge in (
        {"seed": -(1 << 63)},
        {"seed": (1 << 64) - 1},
        {"top_k": -1},
        {"logprobs": 0},
        {"max_tokens": None},
        {"temperature": 0},
        {"top_p": 1},
    ):
        SamplingParams(**edge)
