"""SmolLM2-135M through our program on the reference backend gives the logits that transformers' Llama gives with the same weights.

That the reader's weights are the file's is `test_weights_gguf`'s claim.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep.backends.reference.backend import ReferenceBackend
from lockstep.errors import CheckpointError
from lockstep.models.spec import spec_from_config
from lockstep.models.split import split_layers
from lockstep.ops.step import F32
from lockstep.weights import find_model, open_checkpoint
from rig import build_stages, greedy_continuation, logits_of

LOGIT_ERROR_MAX = 5e-4
PROMPTS = ([1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365], [504, 3575, 282, 4649, 314])
"""Ids as this model's tokenizer makes them: the start of a system turn, and a plain English beginning."""


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return find_model("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tensors(path: Path) -> dict[str, F32]:
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


@pytest.fixture(scope="module")
def model(path: Path, tensors: dict[str, F32]) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**open_checkpoint(path).config))
    missing, unexpected = model.load_state_dict({name: torch.tensor(values) for name, values in tensors.items()}, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model.eval()


@pytest.mark.parametrize("stage_count", [1, 3])
def test_logits_and_greedy_tokens_are_transformers(path: Path, tensors: dict[str, F32], model: LlamaForCausalLM, stage_count: int) -> None:
    spec = spec_from_config(open_checkpoint(path).config)
    stages = build_stages(ReferenceBackend(), spec, tensors, split_layers(spec, stage_count, "float32"), threads=2, tokens_max=32)
    for prompt in PROMPTS:
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0].numpy()
            generated = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                max_new_tokens=5,
                do_sample=False,
                pad_token_id=0,
            )
        whole, chunked = logits_of(stages, prompt), logits_of(stages, prompt, [3, 1, len(prompt) - 4])
        assert np.abs(whole - theirs).max() < LOGIT_ERROR_MAX
        assert np.array_equal(whole.view(np.uint32), chunked.view(np.uint32))
        assert greedy_continuation(stages, prompt, 5) == generated[0, len(prompt) :].tolist()
