"""The native kernels answer every op as its reference body does, on the generated cases, in both dtypes, at one and at two threads."""

from __future__ import annotations

import numpy as np
import pytest

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
