"""Penalties, biases, bad words, allowed ids and min_tokens on the embedded model: what they are for, and the same tokens however it is deployed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lockstep import LLM, RequestOutput, SamplingParams
from lockstep.errors import InvalidRequestError

PROMPT = "The capital of France is"
PROMPTS = [PROMPT, "def add(a, b):\n    return", "Once upon a time there was a small dragon who", "1, 2, 3, 4,", "Roses are red,", "To be or not"]


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [(o.text, o.token_ids, o.logprobs, o.finish_reason, o.stop_reason) for output in outputs for o in output.outputs]


def shapings(llm: LLM) -> list[SamplingParams]:
    """One of each kind, greedy and sampled, long enough to be preempted."""
    ids = [llm.get_tokenizer().encode(text, add_special_tokens=False)[0] for text in (" the", " a", " dragon", ",")]
    plain: dict[str, Any] = {"max_tokens": 60, "logprobs": 2, "ignore_eos": True}
    return [
        SamplingParams(**plain, temperature=0.0, repetition_penalty=1.3),
        SamplingParams(**plain, temperature=0.9, seed=1, presence_penalty=0.8, frequency_penalty=0.6),
        SamplingParams(**plain, temperature=0.8, seed=2, top_p=0.9, repetition_penalty=0.9, logit_bias={ids[0]: -8.0, ids[3]: 3.0}),
        SamplingParams(**plain, temperature=0.0, bad_words=["dragon", " the", "city of"]),
        SamplingParams(**plain, temperature=1.1, seed=3, allowed_token_ids=list(range(200, 900)), frequency_penalty=1.5),
        SamplingParams(**plain, temperature=0.7, seed=4, min_tokens=20, stop_token_ids=ids, top_k=50),
    ]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", max_model_len=512, enable_prefix_caching=False) as llm:
        yield llm


def one(llm: LLM, prompt: str, **params: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**params))[0].outputs[0]


def test_answers_do_not_depend_on_stages_company_or_preemption(llm: LLM) -> None:
    params = shapings(llm)
    alone = [told(llm.generate(prompt, p))[0] for prompt, p in zip(PROMPTS, params, strict=True)]
    assert told(llm.generate(PROMPTS, params)) == alone
    with LLM("smollm2", max_model_len=512, pipeline_parallel_size=3, num_gpu_blocks_override=32, block_size=16, max_num_batched_tokens=8) as other:
        for _ in range(2):
            assert told(other.generate(PROMPTS * 3, params * 3)) == alone * 3
        stats = other._running.engine.driver.scheduler.stats
        assert stats.preemptions > 0
        assert stats.prefix_hits > 0


def test_repetition_penalty_breaks_a_loop(llm: LLM) -> None:
    looping = one(llm, "one one one one one", temperature=0.0, max_tokens=24).token_ids
    broken = one(llm, "one one one one one", temperature=0.0, max_tokens=24, repetition_penalty=1.8).token_ids
    assert len(set(broken)) > len(set(looping))


def test_frequency_penalty_of_a_token_grows_with_its_count_and_counts_no_prompt(llm: LLM) -> None:
    """A token favoured by 30 comes as often as the penalty lets it: each time costs it 2."""
    (token,) = llm.get_tokenizer().encode(" tree", add_special_tokens=False)
    favoured = one(llm, " tree" * 20, temperature=0.0, max_tokens=40, logit_bias={token: 30.0}).token_ids
    assert favoured == [token] * 40
    fading = one(llm, " tree" * 20, temperature=0.0, max_tokens=40, logit_bias={token: 30.0}, frequency_penalty=2.0).token_ids
    assert 8 < fading.count(token) < 30
    assert fading[:8] == [token] * 8


def test_presence_penalty_acts_once(llm: LLM) -> None:
    (token,) = llm.get_tokenizer().encode(" tree", add_special_tokens=False)
    assert one(llm, PROMPT, temperature=0.0, max_tokens=30, logit_bias={token: 60.0}, presence_penalty=2.0).token_ids == [token] * 30


def test_bias_forces_and_forbids(llm: LLM) -> None:
    first = one(llm, PROMPT, temperature=0.0, max_tokens=1).token_ids[0]
    assert one(llm, PROMPT, temperature=0.0, max_tokens=1, logit_bias={first: -100.0}).token_ids != [first]
    assert one(llm, PROMPT, temperature=0.0, max_tokens=3, logit_bias={77: 100.0}).token_ids == [77] * 3


def test_only_allowed_tokens_come(llm: LLM) -> None:
    allowed = [100, 2000, 30000, 49000]
    for temperature in (0.0, 2.0):
        answer = one(llm, PROMPT, temperature=temperature, seed=1, max_tokens=20, allowed_token_ids=allowed, ignore_eos=True)
        assert set(answer.token_ids) <= set(allowed)
        assert len(answer.token_ids) == 20


def test_bad_words_do_not_come(llm: LLM) -> None:
    plain = one(llm, PROMPT, temperature=0.0, max_tokens=30).text
    assert "Paris" in plain
    for words in (["Paris"], [" Paris"], ["Paris", "city", "the city"]):
        text = one(llm, PROMPT, temperature=0.0, max_tokens=30, bad_words=words).text
        assert not any(word.strip() in text for word in words)


def test_min_tokens_keeps_ends_away_until_then_and_not_longer(llm: LLM) -> None:
    tokens = one(llm, PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True).token_ids
    stops = [tokens[3]]
    assert len(one(llm, PROMPT, temperature=0.0, max_tokens=40, stop_token_ids=stops).token_ids) <= 4
    for least in (5, 12):
        answer = one(llm, PROMPT, temperature=0.0, max_tokens=40, stop_token_ids=stops, min_tokens=least, ignore_eos=True)
        assert len(answer.token_ids) > least
        assert stops[0] not in answer.token_ids[:least]


def test_min_tokens_holds_stop_strings_off(llm: LLM) -> None:
    whole = one(llm, PROMPT, temperature=0.0, max_tokens=20, ignore_eos=True)
    stop = whole.text[1:3]
    assert len(one(llm, PROMPT, temperature=0.0, max_tokens=20, stop=stop, ignore_eos=True).token_ids) < 3
    late = one(llm, PROMPT, temperature=0.0, max_tokens=20, stop=stop, ignore_eos=True, min_tokens=10)
    assert len(late.token_ids) >= 10
    assert whole.text.startswith(late.text)


def test_log_probabilities_are_of_the_model_and_not_of_what_was_shaped(llm: LLM) -> None:
    plain = one(llm, PROMPT, temperature=0.0, max_tokens=1, logprobs=5).logprobs[0]
    shaped = one(llm, PROMPT, temperature=0.0, max_tokens=1, logprobs=5, logit_bias={77: 100.0}, repetition_penalty=1.5).logprobs[0]
    assert {k: v.logprob for k, v in shaped.items() if k in plain} == {k: v.logprob for k, v in plain.items()}
    assert 77 in shaped


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"allowed_token_ids": [49152]}, "allowed_token_ids must be below the vocabulary's 49152"),
        ({"logit_bias": {60000: 1.0}}, "logit_bias must be below the vocabulary's"),
        ({"allowed_token_ids": [5], "bad_words_token_ids": [[5]]}, "no token is left of 1 once bad_words"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2}, "no token is left of 1 once min_tokens"),
        ({"stop_token_ids": list(range(49152)), "min_tokens": 1}, "no token is left of 49152 once min_tokens"),
    ],
)
def test_what_cannot_be_is_refused(llm: LLM, params: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(PROMPT, SamplingParams(**params))
