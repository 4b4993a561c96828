"""The native kernels answer every op as its reference body does, on the generated cases, in both dtypes, at one and at two threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from family_models import FAMILY_MODELS, sequence
from lockstep.backends.native import instruction_sets
from lockstep.backends.native.backend import NativeBackend
from lockstep.backends.reference.backend import ReferenceBackend
from lockstep.backends.reference.cases import difference, run_case
from lockstep.backends.reference.table import OP_REFERENCES
from lockstep.ops.backend import DType
from rig import build_stages, logits_of, tiny_spec, tiny_weights


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", OP_REFERENCES)
def test_native_op_is_within_the_tolerance_of_its_reference(kind: str, dtype: DType, threads: int) -> None:
    reference = OP_REFERENCES[kind]
    for seed in range(100, 108):
        case = reference.generate(seed)
        ours, expected = run_case(NativeBackend(), case, dtype, threads), run_case(ReferenceBackend(), case, dtype)
        for mine, theirs in zip(ours, expected, strict=True):
            assert mine.buffers or mine.samples is not None, "nothing to compare"
            for name in theirs.buffers:
                assert difference(mine.buffers[name], theirs.buffers[name]) <= reference.tolerance[dtype], (seed, name)
            if theirs.samples is not None and mine.samples is not None:
                assert np.array_equal(mine.samples.tokens, theirs.samples.tokens), seed
                assert np.array_equal(mine.samples.top_ids, theirs.samples.top_ids), seed
                assert difference(mine.samples.logprobs, theirs.samples.logprobs) <= reference.tolerance[dtype], seed
                assert difference(mine.samples.top_logprobs, theirs.samples.top_logprobs) <= reference.tolerance[dtype], seed


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_native_attention_on_int8_is_the_reference_s(instruction_set: str) -> None:
    """A value that lies half-way between two steps may go either way, by the last bit of its rotation: few do."""
    native, reference = NativeBackend(instruction_set=instruction_set), ReferenceBackend()
    for seed in range(100, 120):
        case = OP_REFERENCES["paged_attention"].generate(seed)
        ours, expected = run_case(native, case, "float32", 2, kv_dtype="int8"), run_case(reference, case, "float32", kv_dtype="int8")
        for mine, theirs in zip(ours, expected, strict=True):
            apart = np.abs(mine.buffers["y"] - theirs.buffers["y"])
            assert np.quantile(apart, 0.95) <= 1e-4, seed
            assert apart.max() <= 0.05, seed


@pytest.mark.parametrize("name", ["qwen3, windows", "deepseek v3"])
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_int8_gives_the_same_bits_in_any_chunks_stages_blocks_and_threads(name: str, instruction_set: str) -> None:
    model = next(model for model in FAMILY_MODELS if model.name == name)
    spec, weights, tokens = model.spec, model.weights(), sequence(300, 50)
    found = []
    for split, block_size, chunks in ((None, 16, [50]), (None, 5, [1] * 50), ([range(1), range(1, 4)], 32, [31, 1, 7, 11])):
        settings: dict[str, Any] = {"threads": 2 if split else 1, "block_size": block_size, "kv_dtype": "int8"}
        found.append(logits_of(build_stages(NativeBackend(instruction_set=instruction_set), spec, weights, split, **settings), tokens, chunks))
    plain = logits_of(build_stages(NativeBackend(instruction_set=instruction_set), spec, weights), tokens)
    assert all(np.array_equal(other, found[0]) for other in found)
    assert 1e-3 < np.abs(found[0] - plain).mean() < 0.6, "a little, though now and then another expert"


def test_int8_of_what_is_no_number_is_none() -> None:
    """It may not be read as a number that nobody wrote."""
    case = OP_REFERENCES["paged_attention"].generate(100)
    values = case.steps[0].activations["qkv"].copy()
    values[3, -1] = np.nan
    first = replace(case.steps[0], activations={"qkv": values})
    for backend in (NativeBackend(), ReferenceBackend()):
        (outcome,) = run_case(backend, replace(case, steps=(first,)), "float32", kv_dtype="int8")
        assert np.isnan(outcome.buffers["y"][4, -1])
        assert np.isfinite(outcome.buffers["y"][2]).all()


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, {"head_dim": 10, "intermediate_size": 53, "vocab_size": 211}],
    ids=["plain", "tied with biases", "odd widths"],
)
def test_native_logits_of_the_rig_are_the_reference_s(changes: dict[str, object]) -> None:
    spec = tiny_spec(**changes)
    tensors = tiny_weights(spec)
    tokens = np.random.default_rng(5).integers(0, spec.vocab_size, 45).tolist()
    native = build_stages(NativeBackend(), spec, tensors, [range(1), range(1, 3), range(3, 4)], threads=2)
    assert np.abs(logits_of(native, tokens, [7, 1, 20, 17]) - logits_of(build_stages(ReferenceBackend(), spec, tensors), tokens)).max() < 1e-4
