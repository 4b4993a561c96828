"""Two backends, one meaning: the native kernels and the torch reference give the same model's logits and the same greedy tokens, in both dtypes."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.backends.native import NativeBackend
from lockstep.backends.reference.backend import ReferenceBackend
from lockstep.ops.backend import Backend, DType
from rig import Row, Stages, build_stages, greedy_continuation, logits_of, run_step, tiny_spec, tiny_weights

SPEC = tiny_spec()
WEIGHTS = tiny_weights(SPEC)
TOLERANCE: dict[DType, float] = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest difference of two logits, which lie within some ±10. Sums run in another order in the two; in bfloat16 that moves a rounding at times."""


def stages(backend: Backend, dtype: DType) -> Stages:
    return build_stages(backend, SPEC, WEIGHTS, [range(2), range(2, 4)], dtype=dtype)


def prompt(seed: int, length: int = 40) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, SPEC.vocab_size, length)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_close_whole_and_in_chunks(dtype: DType) -> None:
    native, reference = stages(NativeBackend(), dtype), stages(ReferenceBackend(), dtype)
    for seed in range(3):
        tokens = prompt(seed)
        ours, theirs = logits_of(native, tokens, [7, 1, 20, 12]), logits_of(reference, tokens)
        assert np.abs(theirs).max() > 1.0
        assert np.abs(ours - theirs).max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backends_are_told_apart_by_a_changed_token(dtype: DType) -> None:
    """The tolerance is not so wide that it would pass another prompt's logits."""
    tokens = prompt(0)
    changed = [*tokens[:-5], (tokens[-5] + 1) % SPEC.vocab_size, *tokens[-4:]]
    ours, theirs = logits_of(stages(NativeBackend(), dtype), tokens), logits_of(stages(ReferenceBackend(), dtype), changed)
    assert np.abs(ours[-1] - theirs[-1]).max() > 5 * TOLERANCE[dtype]


def test_greedy_tokens_are_equal() -> None:
    native, reference = stages(NativeBackend(), "float32"), stages(ReferenceBackend(), "float32")
    for seed in range(4):
        assert greedy_continuation(native, prompt(seed, 12), 24) == greedy_continuation(reference, prompt(seed, 12), 24)


def test_greedy_tokens_in_bfloat16_are_equal_wherever_two_are_not_nearly_tied() -> None:
    """Along the reference's own continuation. A tie within the roundings' reach may go either way; most positions have none."""
    native, reference = stages(NativeBackend(), "bfloat16"), stages(ReferenceBackend(), "bfloat16")
    clear_count = total = 0
    for seed in range(4):
        tokens = [*prompt(seed, 12), *greedy_continuation(reference, prompt(seed, 12), 24)]
        ours, theirs = logits_of(native, tokens)[11:], logits_of(reference, tokens)[11:]
        best, second = np.sort(theirs, axis=1)[:, :-3:-1].T
        clear = best - second > 2 * TOLERANCE["bfloat16"]
        assert np.array_equal(ours.argmax(axis=1)[clear], theirs.argmax(axis=1)[clear])
        clear_count, total = clear_count + int(clear.sum()), total + len(clear)
    assert clear_count > 0.6 * total


def test_seeded_samples_are_equal() -> None:
    """Draws are keyed by seed and position, not by a backend's generator."""
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 12345}
    rows = [Row(token_ids=prompt(4, 30), start=0, blocks=range(8), sampling=sampling)]
    (_, ours), (_, theirs) = run_step(stages(NativeBackend(), "float32"), rows), run_step(stages(ReferenceBackend(), "float32"), rows)
    assert np.array_equal(ours.tokens, theirs.tokens)
    greedy = [Row(token_ids=prompt(4, 30), start=0, blocks=range(8))]
    assert not np.array_equal(ours.tokens, run_step(stages(NativeBackend(), "float32"), greedy)[1].tokens)
