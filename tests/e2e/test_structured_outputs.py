"""200 structures at temperature 1 on the embedded model: every answer has its structure, and is the same however the engine is deployed."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from served_process import PATIENCE_S, served

from lockstep import LLM, SamplingParams
from structures import fits, structures

PROMPTS = ("Answer in the form that was asked for:", "An example of what is needed, in JSON: ", "def make():\n    return ")
MAX_TOKENS = 160
ALL = structures()
PARAMS = [
    SamplingParams(
        temperature=1.0,
        seed=i,
        max_tokens=MAX_TOKENS,
        structured_outputs={name: value for name, value in structure.items() if name != "matches"},
    )
    for i, structure in enumerate(ALL)
]


def answers(**settings: Any) -> tuple[list[tuple[str, list[int], str | None]], int]:
    """(text, tokens, why it ended) of each; how often somebody was preempted."""
    with LLM("smollm2", max_model_len=256, block_size=16, **settings) as llm:
        outputs = llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(ALL))], PARAMS)
        preemptions = llm._running.engine.driver.scheduler.stats.preemptions
    return [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs], preemptions


def test_every_answer_has_its_structure_and_is_the_same_in_three_stages_with_preemption() -> None:
    alone, preempted = answers(async_scheduling=False, max_num_seqs=32)
    assert preempted == 0
    unfit = [(structure, text) for structure, (text, _, finish) in zip(ALL, alone, strict=True) if finish == "stop" and not fits(structure, text)]
    assert not unfit, unfit[:5]
    cut = [structure for structure, (_, _, finish) in zip(ALL, alone, strict=True) if finish != "stop"]
    assert len(cut) <= 4, cut
    assert len({text for text, _, _ in alone}) > len(ALL) // 2, "the answers do not differ"
    spread, preempted = answers(
        pipeline_parallel_size=3, async_scheduling=True, max_num_seqs=24, max_num_batched_tokens=40, num_gpu_blocks_override=40
    )
    assert preempted > 0
    differing = [i for i, (one, other) in enumerate(zip(alone, spread, strict=True)) if one != other]
    assert not differing, [(ALL[i], alone[i], spread[i]) for i in differing[:3]]


BYSTANDERS = 4
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": {"type": "strin"}}}, "Invalid type"),
    ({"structured_outputs": {"json": "{not json"}}, "JSON schema"),
    ({"structured_outputs": {"json": {"type": "string", "minLength": 5, "maxLength": 3}}}, "Unsatisfiable"),
    ({"structured_outputs": {"regex": "(("}}, "regular expression"),
    ({"structured_outputs": {"grammar": "start: nowhere"}}, "unknown name"),
    ({"structured_outputs": {"choice": []}}, "at least one choice"),
    ({"structured_outputs": {}}, "one of json, regex"),
    ({"structured_outputs": {"json_object": True, "regex": "a"}}, "regex and json_object"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "no field 'structural_tag'"),
    ({"structured_outputs": {"regex": "a" * 300_000}}, "bytes"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "needs a schema"),
    ({"response_format": {"type": "xml"}}, "json_schema"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "same thing"),
    ({"structured_outputs": {"json": {"type": "integer", "multipleOf": 9999991}}}, "make it simpler"),
    ({"structured_outputs": {"json": {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, 30)]}}}, "make it simpler"),
]


def test_what_does_not_compile_or_explodes_is_refused_and_nobody_else_notices() -> None:
    prompt, schema = "Once upon a time", {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    with LLM("smollm2", max_model_len=512) as llm:
        alone = [
            llm.generate(prompt, SamplingParams(temperature=1.0, seed=i, max_tokens=150, ignore_eos=True))[0].outputs[0].text
            for i in range(BYSTANDERS)
        ]
    with served("-pp", "2", "--max-model-len", "512") as server, ThreadPoolExecutor(BYSTANDERS) as threads:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)

        def stream(seed: int) -> str:
            chunks = client.completions.create(
                model="smollm2", prompt=prompt, temperature=1.0, seed=seed, max_tokens=150, stream=True, extra_body={"ignore_eos": True}
            )
            return "".join(chunk.choices[0].text for chunk in chunks)

        bystanders = [threads.submit(stream, seed) for seed in range(BYSTANDERS)]
        for fields, words in UNFIT:
            with pytest.raises(openai.BadRequestError, match=words):
                client.completions.create(model="smollm2", prompt="x", max_tokens=20, extra_body=fields)
        assert [bystander.result(PATIENCE_S) for bystander in bystanders] == alone
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Is it?"}],
            max_tokens=60,
            temperature=0.0,
            response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}},
        )
        assert json.loads(answer.choices[0].message.content or "").keys() == {"ok"}
        assert httpx2.get(server.url + "/health", timeout=PATIENCE_S).status_code == 200


def test_a_structured_answer_goes_on_with_the_same_tokens_after_the_stage_that_samples_is_killed() -> None:
    """What the process had compiled and where it was in it is gone with it."""
    schema = {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, "minItems": 20}
    asked = {"prompt": "A list: ", "temperature": 1.0, "seed": 3, "max_tokens": 200}
    structure = {"json": schema, "disable_any_whitespace": True}
    with LLM("smollm2", max_model_len=512) as llm:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=200, structured_outputs=structure)
        alone = llm.generate(asked["prompt"], params)[0].outputs[0].text
    with served("-pp", "2", "--max-model-len", "512") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)
        text, killed = "", 0
        for chunk in client.completions.create(model="smollm2", stream=True, extra_body={"structured_outputs": structure}, **asked):  # type: ignore[call-overload]
            text += chunk.choices[0].text
            if len(text) > 60 * (killed + 1) and killed < 2:
                server.stages_now()[-1].send_signal(signal.SIGKILL)
                killed += 1
        assert httpx2.get(server.url + "/health", timeout=PATIENCE_S).status_code == 200
    assert killed == 2
    assert text == alone
