"""`LLM` on the embedded model: every form of prompt, every way to end, the same tokens however it is deployed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM, RequestOutput, SamplingParams
from lockstep.errors import InvalidRequestError, LockstepError
from lockstep.weights import find_model

WINDOW = 512
PROMPT = "The capital of France is"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=12)
MESSAGES = [{"role": "user", "content": "Name a colour."}]
MIXED = [
    SamplingParams(temperature=0.0, max_tokens=10, logprobs=3),
    SamplingParams(temperature=0.8, top_k=40, seed=1, max_tokens=14, logprobs=0),
    SamplingParams(temperature=1.2, top_p=0.9, seed=2, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, min_p=0.05, seed=3, max_tokens=16, logprobs=5),
]
PROMPTS = [PROMPT, "def add(a, b):\n    return", "Once upon a time there was a small dragon who", "1, 2, 3, 4,"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", max_model_len=WINDOW, scheduling_policy="priority") as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def told(outputs: list[RequestOutput]) -> list[Any]:
    """All of an answer that must not depend on how it was computed."""
    return [(o.text, o.token_ids, o.logprobs, o.cumulative_logprob, o.finish_reason, o.stop_reason) for output in outputs for o in output.outputs]


def test_text_ids_and_mappings_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPT)
    forms: list[Any] = [PROMPT, ids, {"prompt": PROMPT}, {"prompt_token_ids": ids}, {"prompt": "shown only", "prompt_token_ids": ids}]
    single = [llm.generate(form, GREEDY)[0] for form in forms]
    together = llm.generate(forms, GREEDY)
    assert [o.prompt_token_ids for o in single] == [o.prompt_token_ids for o in together] == [ids] * 5
    assert [o.prompt for o in together] == [PROMPT, None, PROMPT, None, "shown only"]
    assert all(told([output]) == told(single[:1]) for output in single + together)
    assert single[0].outputs[0].text.startswith(" Paris")
    assert single[0].finished


def test_answers_do_not_depend_on_company_or_order(llm: LLM) -> None:
    together = told(llm.generate(PROMPTS, MIXED))
    assert together == [told(llm.generate(prompt, params))[0] for prompt, params in zip(PROMPTS, MIXED, strict=True)]
    assert together == told(llm.generate(PROMPTS[::-1], MIXED[::-1]))[::-1]
    assert len({tuple(entry[1]) for entry in together}) == len(PROMPTS)


def test_choices_of_a_seeded_request_are_distinct_and_each_is_that_of_its_own_seed(llm: LLM) -> None:
    both = tokens(llm.generate(PROMPT, SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=12)))
    alone = [tokens(llm.generate(PROMPT, SamplingParams(temperature=1.0, seed=seed, max_tokens=12)))[0] for seed in (7, 8)]
    assert both == alone
    assert both[0] != both[1]
    assert tokens(llm.generate(PROMPT, SEEDED)) == [alone[0]]


def test_requests_without_a_seed_get_one_of_their_own(llm: LLM) -> None:
    drawn = tokens(llm.generate([PROMPT] * 3, SamplingParams(temperature=1.0, max_tokens=16)))
    assert len({tuple(answer) for answer in drawn}) == 3


def test_stop_string_ends_text_and_count(llm: LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    stop = whole.text[4:7]
    before = whole.text[: whole.text.index(stop)]
    for included in (False, True):
        params = SamplingParams(temperature=0.0, max_tokens=12, stop=[stop, "never said"], include_stop_str_in_output=included, logprobs=0)
        cut = llm.generate(PROMPT, params)[0].outputs[0]
        assert cut.text == before + (stop if included else "")
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        assert len(cut.token_ids) < len(whole.token_ids)
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert len(cut.logprobs or []) == len(cut.token_ids)
        tokenizer = llm.get_tokenizer()
        assert stop in tokenizer.decode(cut.token_ids)
        assert stop not in tokenizer.decode(cut.token_ids[:-1])


def test_stop_token_ends_the_answer_and_is_not_text_unless_asked_for(llm: LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    stop_id = whole.token_ids[3]
    first = whole.token_ids.index(stop_id)
    decode = llm.get_tokenizer().decode
    for included in (False, True):
        params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[stop_id], include_stop_str_in_output=included)
        cut = llm.generate(PROMPT, params)[0].outputs[0]
        assert cut.token_ids == whole.token_ids[: first + 1]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop_id)
        assert cut.text == decode(cut.token_ids if included else cut.token_ids[:-1])


def test_own_end_token_ends_the_answer_without_a_reason_and_can_be_ignored(llm: LLM) -> None:
    params = {"temperature": 0.0, "max_tokens": 40}
    ended = llm.chat(MESSAGES, SamplingParams(**params))[0].outputs[0]
    end = llm.get_tokenizer().encode("<|im_end|>")
    assert (ended.finish_reason, ended.stop_reason, ended.token_ids[-1:]) == ("stop", None, end)
    assert "<|im_end|>" not in ended.text
    further = llm.chat(MESSAGES, SamplingParams(ignore_eos=True, **params))[0].outputs[0]
    assert (further.finish_reason, len(further.token_ids)) == ("length", 40)
    assert further.token_ids[: len(ended.token_ids)] == ended.token_ids
    seen = llm.chat(MESSAGES, SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True, **params))[0].outputs[0]
    assert seen.text == ended.text + "<|im_end|>"


def test_chat_is_the_template_and_takes_many_conversations(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    other = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say yes."}]
    outputs = llm.chat([MESSAGES, other], GREEDY)
    texts = [tokenizer.render_chat(conversation) for conversation in (MESSAGES, other)]
    assert [output.prompt for output in outputs] == texts
    assert told(outputs) == told(llm.generate([tokenizer.encode(text, add_special_tokens=False) for text in texts], GREEDY))
    assert told(llm.chat(MESSAGES, GREEDY)) == told(outputs[:1])


def test_logprobs_hold_the_sampled_token_and_the_best_in_order(llm: LLM) -> None:
    choice = llm.generate(PROMPT, SamplingParams(temperature=1.5, seed=3, max_tokens=12, logprobs=4))[0].outputs[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids)
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        ranked = sorted(entry.values(), key=lambda e: e.rank)[:4]
        assert [e.rank for e in ranked] == [1, 2, 3, 4]
        assert [e.logprob for e in ranked] == sorted((e.logprob for e in ranked), reverse=True)
        assert entry[token].logprob <= ranked[0].logprob <= 0.0
        assert entry[token].decoded_token == llm.get_tokenizer().token_text(token)
    assert choice.cumulative_logprob == pytest.approx(sum(e[t].logprob for t, e in zip(choice.token_ids, choice.logprobs, strict=True)))
    assert any(entry[token].rank > 4 for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)), "no token outside the best four"


def test_second_request_with_the_prompt_hits_the_prefix_cache_and_gets_the_same(llm: LLM) -> None:
    prompt = "A long and winding story about prefix caches. " * 8
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=8, logprobs=1)
    cold, warm = llm.generate(prompt, params)[0], llm.generate(prompt, params)[0]
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (len(warm.prompt_token_ids) - 1) // 16 * 16 > 0
    assert told([cold]) == told([warm])


def test_priorities_change_no_answer(llm: LLM) -> None:
    assert told(llm.generate(PROMPTS, MIXED, priority=[3, -1, 2, 0])) == told(llm.generate(PROMPTS, MIXED))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_stages_chunks_and_a_tight_pool_change_no_bit(dtype: str) -> None:
    """One stage with room for all at once, against two stages fed in chunks of 8 tokens from a pool that holds a part of the requests."""
    prompts, params = PROMPTS * 3, [p for _ in range(3) for p in MIXED]
    with LLM("smollm2", dtype=dtype, max_model_len=64, threads=2) as llm:
        expected = told(llm.generate(prompts, params))
        fingerprint = llm.fingerprint
    settings: dict[str, Any] = {"distributed_executor_backend": "local", "max_num_batched_tokens": 8, "num_gpu_blocks_override": 8, "block_size": 8}
    with LLM("smollm2", dtype=dtype, max_model_len=64, pipeline_parallel_size=2, threads=2, **settings) as llm:
        assert told(llm.generate(prompts, params)) == expected
        assert llm.fingerprint == fingerprint


def test_engine_seed_makes_unseeded_requests_repeatable() -> None:
    drawn = []
    for seed in (5, 5, 6):
        with LLM("smollm2", max_model_len=64, seed=seed) as llm:
            drawn.append(tokens(llm.generate([PROMPT] * 2, SamplingParams(max_tokens=8))))
    assert drawn[0] == drawn[1] != drawn[2]


def test_closing_twice_is_harmless_and_a_closed_engine_says_so() -> None:
    llm = LLM(str(find_model("smollm2")), max_model_len=64)
    llm.close()
    llm.close()
    with pytest.raises(LockstepError, match=r"shutting down|closed"):
        llm.generate(PROMPT, GREEDY)


def test_path_and_name_are_the_same_model(llm: LLM) -> None:
    with LLM(str(Path(find_model("smollm2"))), max_model_len=64) as other:
        assert other.fingerprint == llm.fingerprint
        assert told(other.generate(PROMPT, GREEDY)) == told(llm.generate(PROMPT, GREEDY))


def test_automatic_window_is_what_the_kv_memory_of_the_tightest_stage_holds() -> None:
    """30 layers of 2 * 3 heads of 64 in bfloat16 are 23,040 bytes a position; 10 MB a stage of 15 layers hold 868 of them, in blocks of 16."""
    with LLM("smollm2", max_model_len="auto", kv_cache_memory_bytes=10_000_000, pipeline_parallel_size=2) as llm:
        assert llm._running.model.window == 864
        (output,) = llm.generate([{"prompt_token_ids": [5] * 860}], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 4
        with pytest.raises(InvalidRequestError, match="864"):
            llm.generate([{"prompt_token_ids": [5] * 864}])
