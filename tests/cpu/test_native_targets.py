"""Positions with a target: nothing is chosen, the target's log probability and rank are told, and edits do not touch it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from native_programs import SETS, compiled, sampling
from test_native_logit_edits import no_edits
from test_native_sampler import sample, sampling_program

from lockstep.errors import InternalError

VOCABULARY = 77


@pytest.mark.parametrize("instruction_set", SETS)
def test_targets_are_told_with_their_log_probability_and_rank(instruction_set: str) -> None:
    draw = np.random.default_rng(0)
    logits = draw.standard_normal((24, VOCABULARY)).astype(np.float32) * 3
    targets = draw.integers(-1, VOCABULARY, 24).astype(np.int32)
    columns = sampling(range(24), temperatures=[0.9] * 24, seeds=range(24), logprob_counts=[2] * 24)
    edits = replace(no_edits(24), mask_rows=np.zeros(24, np.int32), masks=np.array([[1 << 5, 0, 0]], np.uint32))
    executable = compiled(sampling_program(VOCABULARY), {}, instruction_set=instruction_set)
    got = sample(executable, logits, replace(columns, targets=targets, edits=edits))
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    assert (targets >= 0).sum() > 15
    for s, target in enumerate(targets):
        token = 5 if target < 0 else target
        assert got.tokens[s] == token
        assert abs(got.logprobs[s] - exact[s, token]) < 2e-6
        assert got.ranks[s] == 1 + (logits[s] > logits[s, token]).sum()
        assert got.top_ids[s].tolist() == np.argsort(-logits[s], kind="stable")[:2].tolist()


@pytest.mark.parametrize("target", [-2, VOCABULARY, 1 << 30])
def test_a_target_outside_the_vocabulary_is_refused(target: int) -> None:
    executable = compiled(sampling_program(VOCABULARY), {}, instruction_set=SETS[0])
    with pytest.raises(InternalError, match=f"target {target}, expected -1 to {VOCABULARY - 1}"):
        sample(executable, np.zeros((1, VOCABULARY), np.float32), replace(sampling([0]), targets=np.array([target], np.int32)))
