"""Our programs on the reference backend give transformers' logits, whole, in chunks, token by token, over one stage and over three."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lockstep.backends.reference.backend import ReferenceBackend
from lockstep.models.rope import inverse_frequencies
from lockstep.models.spec import spec_from_config
from lockstep.ops.step import F32
from rig import Stages, build_stages, greedy_continuation, logits_of, tiny_config, tiny_spec, tiny_weights

LOGIT_ERROR_MAX = 1e-4
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one KV head": {"num_key_value_heads": 1},
    "a KV head each": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 scaling": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "odd widths": {"head_dim": 10, "intermediate_size": 53, "vocab_size": 211, "hidden_size": 36},
    "wide heads": {"head_dim": 48},
}
TOKENS = 45


def transformers_model(config: dict[str, Any], tensors: dict[str, F32]) -> LlamaForCausalLM | MistralForCausalLM:
    """transformers' own model of the config, holding exactly these tensors."""
    mistral = config["architectures"] == ["MistralForCausalLM"]
    model = MistralForCausalLM(MistralConfig(**config)) if mistral else LlamaForCausalLM(LlamaConfig(**config))
    missing, unexpected = model.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()}, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config["tie_word_embeddings"] else [])
    return model.eval()


def transformers_logits(model: Any, token_ids: list[int]) -> F32:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float().numpy()


def sequence(vocab_size: int, count: int = TOKENS) -> list[int]:
    return np.random.default_rng(5).integers(0, vocab_size, count).tolist()


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_are_transformers_whole_chunked_and_token_by_token_at_one_and_three_stages(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    spec = spec_from_config(config)
    tensors = tiny_weights(spec, seed=3)
    if spec.tie_embeddings:  # a head of embeddings, four times as large as one of its own: its logits would reach 60, where float32 ends at 4e-6
        tensors["model.norm.weight"] *= np.float32(0.25)
    tokens = sequence(spec.vocab_size)
    theirs = transformers_logits(transformers_model(config, tensors), tokens)
    assert np.abs(theirs).max() > 1, "weights too small to tell anything"
    for split in (None, [range(1), range(1, 3), range(3, 4)]):
        stages = build_stages(ReferenceBackend(), spec, tensors, split)
        for chunks in (None, [7, 1, 20, 1, 16], [1] * TOKENS):
            assert np.abs(logits_of(stages, tokens, chunks) - theirs).max() < LOGIT_ERROR_MAX


def test_mistral_without_its_window_is_computed_by_the_llama_program() -> None:
    config = tiny_config(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None)
    del config["attention_bias"], config["mlp_bias"]
    spec = spec_from_config(config)
    tensors = tiny_weights(spec)
    tokens = sequence(spec.vocab_size)
    stages = build_stages(ReferenceBackend(), spec, tensors)
    assert np.abs(logits_of(stages, tokens) - transformers_logits(transformers_model(config, tensors), tokens)).max() < LOGIT_ERROR_MAX


def test_bfloat16_logits_are_near_those_of_float32() -> None:
    """Weights and rounded activations have 8 bits: far from equal, and far from wrong."""
    spec = tiny_spec()
    tensors = tiny_weights(spec)
    tokens = sequence(spec.vocab_size)
    exact, rounded = (logits_of(build_stages(ReferenceBackend(), spec, tensors, dtype=dtype), tokens) for dtype in ("float32", "bfloat16"))
    difference = np.abs(exact - rounded).max()
    assert 1e-3 < difference < 0.5


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0])
@pytest.mark.parametrize("scaling", [None, LLAMA3, LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}], ids=["plain", "8", "32"])
@pytest.mark.parametrize("head_dim", [10, 16, 64, 128])
def test_frequencies_are_transformers_bit_for_bit(theta: float, scaling: dict[str, Any] | None, head_dim: int) -> None:
    config = tiny_config(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling, max_position_embeddings=1 << 17)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config)).inv_freq.numpy()
    assert np.array_equal(inverse_frequencies(spec_from_config(config).ropes[0]), theirs)


@pytest.fixture(scope="module")
def toy() -> Stages:
    spec = tiny_spec()
    return build_stages(ReferenceBackend(), spec, tiny_weights(spec))


def test_changing_any_prompt_token_changes_the_rig_s_continuation(toy: Stages) -> None:
    prompt = sequence(toy.spec.vocab_size, 24)
    plain = greedy_continuation(toy, prompt, 12)
    assert len(set(plain)) > 6, "a model that repeats itself hides faults"
    for index in range(len(prompt)):
        other = list(prompt)
        other[index] = (other[index] + 1) % toy.spec.vocab_size
        assert greedy_continuation(toy, other, 12) != plain, f"token {index} of the prompt has no effect"


def test_greedy_continuation_is_transformers_generate(toy: Stages) -> None:
    prompt = sequence(toy.spec.vocab_size, 17)
    model = transformers_model(tiny_config(), tiny_weights(toy.spec))
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, 17), dtype=torch.long),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert greedy_continuation(toy, prompt, 12) == output[0, 17:].tolist()
