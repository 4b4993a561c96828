"""Edits of logits in the native sampler: those of their definition on every instruction set; refused where an id or a mask is out of range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from native_programs import SETS, compiled, plain_step, sampling
from test_native_sampler import sample, sampling_program

from lockstep.errors import InternalError
from lockstep.ops.step import F32, LogitEdits, SamplingInputs

VOCABULARY = 77


def no_edits(count: int) -> LogitEdits:
    empty = np.zeros(0, np.float32)
    return LogitEdits(
        mask_rows=np.full(count, -1, np.int32),
        masks=np.zeros((0, 3), np.uint32),
        starts=np.zeros(count + 1, np.int32),
        ids=np.zeros(0, np.int32),
        biases=empty,
        penalties=empty,
        subtracts=empty,
    )


def random_edits(draw: np.random.Generator, count: int) -> LogitEdits:
    masks = draw.integers(1, 1 << 32, (4, 3), dtype=np.uint64).astype(np.uint32)
    counts = draw.integers(0, 60, count)
    entries = int(counts.sum())
    return LogitEdits(
        mask_rows=draw.integers(-1, 4, count).astype(np.int32),
        masks=masks,
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        ids=draw.integers(0, VOCABULARY, entries).astype(np.int32),
        biases=draw.choice(np.array([0.0, 1.5, -2.0], np.float32), entries),
        penalties=draw.choice(np.array([1.0, 1.37, 0.6], np.float32), entries),
        subtracts=draw.choice(np.array([0.0, 0.9, -0.4], np.float32), entries),
    )


def by_hand(logits: F32, edits: LogitEdits) -> F32:
    """float32 operation by float32 operation."""
    changed = logits.copy()
    for s in range(len(logits)):
        for token in range(VOCABULARY):
            if edits.mask_rows[s] >= 0 and not edits.masks[edits.mask_rows[s], token // 32] >> np.uint32(token % 32) & np.uint32(1):
                changed[s, token] = -np.inf
        for i in range(edits.starts[s], edits.starts[s + 1]):
            value = np.float32(changed[s, edits.ids[i]] + edits.biases[i])
            value = np.float32(value / edits.penalties[i]) if value > 0 else np.float32(value * edits.penalties[i])
            changed[s, edits.ids[i]] = np.float32(value - edits.subtracts[i])
    return changed


def plain_columns(count: int, temperature: float = 0.0, edits: LogitEdits | None = None) -> SamplingInputs:
    return replace(sampling(range(count), temperatures=[temperature] * count), edits=edits)


def columns_of(draw: np.random.Generator, count: int) -> SamplingInputs:
    return sampling(
        range(count),
        seeds=draw.integers(0, 1 << 63, count).tolist(),
        temperatures=draw.choice([0.0, 0.7, 1.3], count).tolist(),
        top_ks=draw.choice([0, 5], count).tolist(),
        top_ps=draw.choice([1.0, 0.8], count).tolist(),
        logprob_counts=[2] * count,
    )


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("seed", range(6))
def test_edited_logits_are_sampled_like_logits_that_came_so_and_reported_as_they_came(instruction_set: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = 24
    logits = draw.standard_normal((count, VOCABULARY)).astype(np.float32) * 3
    columns, edits = columns_of(draw, count), random_edits(draw, count)
    executable = compiled(sampling_program(VOCABULARY), {}, instruction_set=instruction_set, threads=2)
    edited = sample(executable, logits, replace(columns, edits=edits))
    wanted = sample(executable, by_hand(logits, edits), columns)
    assert edited.tokens.tolist() == wanted.tokens.tolist()
    plain = sample(executable, logits, columns)
    assert edited.tokens.tolist() != plain.tokens.tolist()
    assert np.array_equal(edited.top_ids, plain.top_ids)
    assert np.array_equal(edited.top_logprobs, plain.top_logprobs)
    assert np.array_equal(sample(executable, logits, replace(columns, edits=no_edits(count))).tokens, plain.tokens)


@pytest.mark.parametrize("instruction_set", SETS)
def test_one_allowed_id_is_chosen_whatever_its_logit(instruction_set: str) -> None:
    count = 60
    tokens = [(7 * i) % VOCABULARY for i in range(count)]
    logits = np.zeros((count, VOCABULARY), np.float32)
    logits[:, 5] = 80.0
    masks = np.zeros((count, 3), np.uint32)
    for row, token in enumerate(tokens):
        masks[row, token // 32] = np.uint32(1) << np.uint32(token % 32)
    edits = replace(no_edits(count), mask_rows=np.arange(count, dtype=np.int32), masks=masks)
    executable = compiled(sampling_program(VOCABULARY), {}, instruction_set=instruction_set)
    for temperature in (0.0, 1.0):
        assert sample(executable, logits, plain_columns(count, temperature, edits)).tokens.tolist() == tokens


def _one_entry(**changes: Any) -> LogitEdits:
    value = np.ones(1, np.float32)
    entry = {"starts": np.array([0, 1], np.int32), "ids": np.array([3], np.int32), "biases": value, "penalties": value, "subtracts": value}
    return replace(no_edits(1), **{**entry, **changes})


WRONG = {
    "an id past the vocabulary": (_one_entry(ids=np.array([VOCABULARY], np.int32)), f"is of id {VOCABULARY}"),
    "an id below 0": (_one_entry(ids=np.array([-1], np.int32)), "is of id -1"),
    "a penalty of 0": (_one_entry(penalties=np.zeros(1, np.float32)), "has penalty 0"),
    "starts that end early": (_one_entry(starts=np.array([0, 0], np.int32)), "must run from 0 to their 1"),
    "starts that begin late": (_one_entry(starts=np.array([1, 1], np.int32)), "must run from 0"),
    "starts for more samples": (_one_entry(starts=np.array([0, 1, 1], np.int32)), "starts of logit edits must have 2"),
    "fewer biases": (_one_entry(biases=np.zeros(0, np.float32)), "biases must have 1"),
    "a mask that is not there": (_one_entry(mask_rows=np.array([0], np.int32)), "has mask 0, there are 0"),
    "a mask below -1": (_one_entry(mask_rows=np.array([-2], np.int32)), "has mask -2"),
    "masks of another width": (_one_entry(masks=np.ones((1, 2), np.uint32)), "masks are 2 words wide"),
    "nothing left": (replace(no_edits(1), mask_rows=np.zeros(1, np.int32), masks=np.zeros((1, 3), np.uint32)), "as their largest"),
}


@pytest.mark.parametrize(("edits", "words"), WRONG.values(), ids=WRONG)
def test_edits_out_of_range_are_refused_and_the_next_step_runs(edits: LogitEdits, words: str) -> None:
    executable = compiled(sampling_program(VOCABULARY), {})
    logits = np.zeros((1, VOCABULARY), np.float32)
    with pytest.raises(InternalError, match=words):
        executable.run(plain_step(1, plain_columns(1, edits=edits)), {"x": logits}, {})
    assert sample(executable, logits, plain_columns(1)).tokens.tolist() == [0]
