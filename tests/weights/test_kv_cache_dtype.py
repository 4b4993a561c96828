"""What int8 KV costs on the real model: logits against those on float32 KV, over questions of GSM8K, and that an engine with it keeps the promise."""

from __future__ import annotations

from typing import Any

import numpy as np

from agreement import our_program, questions
from lockstep import LLM, SamplingParams
from rig import logits_of

PARAMS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=70, ignore_eos=True, logprobs=1) for i in range(8)]
INT8: dict[str, Any] = {"model": "smollm2", "kv_cache_dtype": "int8", "max_model_len": 512}


def test_int8_kv_moves_logits_a_little_and_seldom_the_best_one() -> None:
    """Logits of the model spread over some 40 units; the bounds are about twice what was seen (docs/decisions/0017)."""
    text = "\n".join(questions(6))
    with LLM("smollm2", max_model_len=64) as llm:
        tokens = llm.get_tokenizer().encode(text)[:400]
    plain, scaled = (logits_of(our_program(threads=2, kv_dtype=kind), tokens) for kind in ("float32", "int8"))
    apart, agree = float(np.abs(plain - scaled).mean()), float((plain.argmax(1) == scaled.argmax(1)).mean())
    print(f"int8 KV over {len(tokens)} tokens: mean difference of logits {apart:.4f}, the same best token at {agree:.1%}")
    assert 0 < apart < 0.2
    assert agree > 0.95


def test_answers_on_int8_kv_do_not_depend_on_how_the_engine_runs() -> None:
    asked = [question[:60] for question in (*questions(6), questions(1)[0], questions(1)[0])]
    with LLM(**INT8) as alone:
        expected = [alone.generate(question, params)[0].outputs[0] for question, params in zip(asked, PARAMS, strict=True)]
        identity = alone.fingerprint
    with LLM(
        **INT8, pipeline_parallel_size=3, async_scheduling=True, max_num_batched_tokens=24, num_gpu_blocks_override=32, block_size=16
    ) as crowded:
        found = [output.outputs[0] for output in crowded.generate(asked, PARAMS)]
        assert crowded.fingerprint == identity
        assert "-kv_int8-" in identity
        assert crowded._running.engine.driver.scheduler.stats.preemptions > 0
    assert [(one.token_ids, one.logprobs) for one in found] == [(one.token_ids, one.logprobs) for one in expected]
