"""Log probabilities of prompts on the embedded model: transformers' numbers; the same bits whatever the deployment; complete, and told once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep import LLM, RequestOutput, SamplingParams
from lockstep.weights import find_model, open_checkpoint

WINDOW = 512
TEXT = "The quick brown fox jumps over the lazy dog. In Xanadu did Kubla Khan a stately pleasure-dome decree: 3.14159, and so on. "
PROMPTS = [TEXT, "def add(a, b):\n    return a + b\n\n" + TEXT, TEXT * 5, "Oslo"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=250, ignore_eos=True, prompt_logprobs=3),
    SamplingParams(temperature=1.0, seed=1, max_tokens=250, ignore_eos=True, prompt_logprobs=0, logprobs=2, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, prompt_logprobs=20),
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", max_model_len=WINDOW, dtype="float32") as llm:
        yield llm


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [(o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def test_log_probabilities_are_transformers(llm: LLM) -> None:
    checkpoint = open_checkpoint(find_model("smollm2"))
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    model.load_state_dict({name: torch.tensor(checkpoint.read(name)) for name in checkpoint.names()}, strict=False)
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=4)):
        ids = output.prompt_token_ids
        with torch.inference_mode():
            theirs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).numpy()
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(ids)
        for position, entry in enumerate(output.prompt_logprobs[1:], 1):
            assert entry is not None
            before = theirs[position - 1]
            assert abs(entry[ids[position]].logprob - before[ids[position]]) < 1e-3
            better = int((before > before[ids[position]]).sum())
            assert abs(entry[ids[position]].rank - 1 - better) <= max(2, better // 100)
            best = sorted(entry.values(), key=lambda one: one.rank)[:4]
            np.testing.assert_allclose([one.logprob for one in best], np.sort(before)[::-1][:4], atol=1e-3)


def test_the_same_bits_in_chunks_over_stages_with_preemption_and_a_warm_cache() -> None:
    plain = {"max_model_len": WINDOW, "max_num_seqs": 4}
    with LLM("smollm2", async_scheduling=False, **plain) as llm:
        alone = [told(llm.generate(prompt, params))[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    with LLM(
        "smollm2", pipeline_parallel_size=2, async_scheduling=True, max_num_batched_tokens=23, block_size=16, num_gpu_blocks_override=33, **plain
    ) as llm:
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=1))
        outputs = llm.generate(PROMPTS, PARAMS)
        assert llm._running.engine.driver.scheduler.stats.preemptions > 0
    assert told(outputs) == alone


def test_a_request_that_wants_them_hits_no_prefix_and_leaves_one(llm: LLM) -> None:
    prompt = "Something that nobody has asked before: " + TEXT
    wanting = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    first, second = (llm.generate(prompt, wanting)[0] for _ in range(2))
    third = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1))[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert third.num_cached_tokens > 0
    assert first.prompt_logprobs == second.prompt_logprobs
    assert third.prompt_logprobs is None


def test_choices_share_one_account_of_their_prompt(llm: LLM) -> None:
    output = llm.generate(TEXT, SamplingParams(n=3, seed=5, max_tokens=4, prompt_logprobs=2))[0]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1
