"""How far our answers and logits are from those of transformers, question by question, both in float32 on the embedded model.

Used by `weights/test_transformers_gsm8k.py` and by `benchmarks/gsm8k_agreement.py`. Knows both engines and what is compared;
what is near enough is for its users to say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import pre_tokenizers

from lockstep import LLM, SamplingParams
from lockstep.backends.native import NativeBackend
from lockstep.models.spec import spec_from_config
from lockstep.ops.backend import KVDType
from lockstep.ops.step import F32
from lockstep.weights import find_model, open_checkpoint
from rig import Stages, build_stages, logits_of

ROOT = Path(__file__).parent.parent
DATA_VARIABLE = "LOCKSTEP_GSM8K"
"""A path to GSM8K's test.jsonl, for more than the first 100 questions."""

ANSWER_TOKENS = 64
TOKENS_MAX = 512
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One question. prompt_tokens, answer_tokens: counts.

    first_difference: the first answer token that greedy transformers would have chosen otherwise, None if the answers are identical.
    gap: how much better, in logits, transformers finds its own choice there than ours (0.0 if identical).
    logit_error: the largest difference of any logit at any position of prompt and answer. closest_call: the smallest gap between transformers' two
    best logits at any answer token: a logit error above half of it could have changed the answer."""

    question: int
    prompt_tokens: int
    answer_tokens: int
    first_difference: int | None
    gap: float
    logit_error: float
    closest_call: float


def questions(count: int) -> list[str]:
    """The first `count` questions of GSM8K's test set, from $LOCKSTEP_GSM8K, a `shared/data` folder beside the project, or the 100 kept here."""
    places = [Path(os.environ[DATA_VARIABLE])] if DATA_VARIABLE in os.environ else [ROOT.parent / "shared" / "data" / "gsm8k_test.jsonl"]
    path = next((place for place in places if place.is_file()), ROOT / "tests" / "data" / "gsm8k_first100.jsonl")
    found = [json.loads(line)["question"] for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    assert len(found) == count, f"{path} has {len(found)} questions, {count} are needed; set ${DATA_VARIABLE}"
    return found


class Transformers:
    """The embedded model and its tokenizer as transformers reads the same GGUF file."""

    def __init__(self, threads: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        torch.set_num_threads(threads)
        path = find_model("smollm2")
        where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **where)
        self.model = model.eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
        self._cut = tokenizers.Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        # transformers does not know the cut that the file names ("smollm": each digit by itself) and falls back on GPT-2's.
        self._cut.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )

    def chat_ids(self, question: str) -> list[int]:
        """The chat template's ids for one user message."""
        text = self._tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._cut.encode(text, add_special_tokens=False).ids
        return ids

    def logits(self, ids: Sequence[int]) -> F32:
        """float32 [len(ids), V], in one forward pass."""
        with torch.inference_mode():
            found: F32 = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()
        return found

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """What its own generation loop answers, token by token with its KV cache; the end token included."""
        prompt = torch.tensor([list(ids)])
        with torch.inference_mode():
            whole = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, pad_token_id=2)
        answer: list[int] = whole[0, len(ids) :].tolist()
        return answer


def greedy_answers(asked: Sequence[str], *, threads: int) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) of our engine for each question, all at once, float32; an end token is part of its answer."""
    with LLM("smollm2", dtype="float32", threads=threads, max_model_len=TOKENS_MAX * 2) as llm:
        outputs = llm.chat([[{"role": "user", "content": q}] for q in asked], SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS))
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


def our_program(*, threads: int, kv_dtype: KVDType | None = None) -> Stages:
    """The embedded model's program on the native backend in float32, for its logits."""
    checkpoint = open_checkpoint(find_model("smollm2"))
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    spec = spec_from_config(checkpoint.config)
    sizes = {"tokens_max": TOKENS_MAX, "block_size": BLOCK_SIZE, "block_count": TOKENS_MAX // BLOCK_SIZE}
    return build_stages(NativeBackend(), spec, tensors, threads=threads, kv_dtype=kv_dtype, **sizes)


def compare(stages: Stages, theirs: Transformers, answers: Sequence[tuple[list[int], list[int]]]) -> Iterator[Agreement]:
    """Our answers against transformers, which is given prompt and answer at once: up to the first difference that is what it would have generated.
    Asserts that our program alone, given the whole, chooses the very tokens that our engine sent."""
    for question, (prompt, answer) in enumerate(answers):
        ids = prompt + answer
        ours, reference = logits_of(stages, ids), theirs.logits(ids)
        chosen = slice(len(prompt) - 1, len(ids) - 1)
        assert ours[chosen].argmax(1).tolist() == answer, f"question {question}: the engine sent other tokens than its program chooses"
        differs = np.flatnonzero(reference[chosen].argmax(1) != np.array(answer))
        first = int(differs[0]) if len(differs) else None
        at = reference[chosen][first] if first is not None else None
        best = np.sort(np.partition(reference[chosen], -2, axis=1)[:, -2:], axis=1)
        yield Agreement(
            question=question,
            prompt_tokens=len(prompt),
            answer_tokens=len(answer),
            first_difference=first,
            gap=0.0 if at is None or first is None else float(at.max() - at[answer[first]]),
            logit_error=float(np.abs(ours - reference).max()),
            closest_call=float((best[:, 1] - best[:, 0]).min()),
        )
