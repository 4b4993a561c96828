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
    ("stop", "", "non-empty string"),
    ("stop", ["a", ""], "non-empty string"),
    ("stop", 5, "non-empty string"),
    ("stop_token_ids", "12", "list of token ids"),
    ("stop_token_ids", 12, "list of token ids"),
    ("stop_token_ids", [-1], "integer from 0"),
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
