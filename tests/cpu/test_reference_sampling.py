"""Op `sample` of the reference: the noise, the filters, the ties, the log probabilities; and over many positions, the distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.backends.reference.backend import ReferenceBackend
from lockstep.backends.reference.cases import run_case
from lockstep.backends.reference.sampling import choose_token, gumbel, log_probabilities, philox
from lockstep.backends.reference.table import OP_REFERENCES

PLAIN: dict[str, Any] = {"seed": 7, "position": 3, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def choose(logits: list[float] | np.ndarray, **changes: Any) -> int:
    return choose_token(torch.tensor(np.asarray(logits, np.float32)), **(PLAIN | changes))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    result = philox(tuple(np.array([word], np.uint64) for word in counter), key)
    assert tuple(int(word[0]) for word in result) == words


def test_noise_is_that_of_a_scalar_computation_word_by_word() -> None:
    def scalar(seed: int, position: int, token: int) -> float:
        x, key = [position, token, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
        for _ in range(10):
            p, q = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
            x = [(q >> 32) ^ x[1] ^ key[0], q & 0xFFFFFFFF, (p >> 32) ^ x[3] ^ key[1], p & 0xFFFFFFFF]
            key = [(key[0] + 0x9E3779B9) % (1 << 32), (key[1] + 0xBB67AE85) % (1 << 32)]
        return float(-np.log(-np.log(((x[0] >> 8) + 0.5) / (1 << 24))))

    for seed, position in ((0, 0), ((1 << 64) - 1, 4095), (0x123456789ABCDEF, 77)):
        expected = [scalar(seed, position, token) for token in range(50)]
        np.testing.assert_allclose(gumbel(seed, position, np.arange(50)), expected, rtol=1e-6)


def test_noise_is_finite_at_both_ends_of_the_uniform_range() -> None:
    """In float32 the largest (x >> 8) + 0.5 would round up to 2**24 and its noise to infinity, one draw in 2**24."""
    ids = np.arange(1 << 21)
    noise = np.concatenate([gumbel(1, position, ids) for position in range(8)])
    assert np.isfinite(noise).all()
    assert noise.max() < 17.4
    assert abs(noise.mean() - 0.5772) < 0.002
    assert abs(noise.var() - np.pi**2 / 6) < 0.005


def test_temperature_zero_takes_the_lowest_id_of_the_largest_logits() -> None:
    assert choose([1.0, 3.0, 2.0, 3.0], temperature=0.0) == 1
    logits = np.zeros(5000)
    logits[[4999, 1234, 3000]] = 1.0
    assert choose(logits, temperature=0.0) == 1234


def test_samples_follow_the_softmax_at_the_temperature() -> None:
    logits, temperature, draws = np.array([2.0, 1.0, 0.0, -1.0, 1.5]), 0.8, 4000
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    counts = np.bincount([choose(logits, temperature=temperature, seed=draw % 4, position=draw // 4) for draw in range(draws)], minlength=5)
    assert ((counts - draws * expected) ** 2 / (draws * expected)).sum() < 18.5, "chi square of 4 degrees, one in a thousand"


def test_seed_and_position_each_change_the_choice() -> None:
    logits = np.zeros(1000)
    assert len({choose(logits, position=position) for position in range(40)}) > 30
    assert len({choose(logits, seed=seed) for seed in range(40)}) > 30
    assert choose(logits, seed=1 << 32) != choose(logits, seed=0)


def filtered_by_hand(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters of the vocabulary in float64, one after the other, over a list that is sorted by hand."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    kept = [index for index in range(len(logits)) if weights[index] >= min_p * weights.max()]
    kept.sort(key=lambda index: (-scaled[index], index))
    kept = kept[:top_k] if top_k > 0 else kept
    total, reached, chosen = sum(weights[kept]), 0.0, set()
    for index in kept:
        chosen.add(index)
        reached += weights[index]
        if reached >= top_p * total:
            break
    return chosen


@given(
    seed=st.integers(0, 1 << 32),
    size=st.integers(1, 60),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 10, 100]),
    top_p=st.sampled_from([1.0, 0.93, 0.51, 0.07]),
    min_p=st.sampled_from([0.0, 0.021, 0.33, 1.0]),
)
def test_the_choice_is_the_noisy_best_of_what_the_filters_keep(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)
    kept = sorted(filtered_by_hand(logits, temperature, top_k, top_p, min_p))
    noisy = logits[kept].astype(np.float64) / temperature + gumbel(seed, 11, np.array(kept))
    token = choose(logits, seed=seed, position=11, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert token == kept[int(noisy.argmax())]


def test_of_equal_logits_at_the_edge_of_top_k_the_lower_ids_are_kept() -> None:
    logits = np.full(200, 1.0)
    assert {choose(logits, top_k=3, position=position) for position in range(100)} == {0, 1, 2}


def test_top_p_keeps_the_token_that_reaches_it_and_no_more() -> None:
    logits = np.log([0.5, 0.3, 0.2])
    assert {choose(logits, top_p=0.49, position=position) for position in range(60)} == {0}
    assert {choose(logits, top_p=0.51, position=position) for position in range(60)} == {0, 1}
    assert {choose(logits, top_p=0.81, position=position) for position in range(60)} == {0, 1, 2}
    assert {choose(logits, top_p=0.6, top_k=2, position=position) for position in range(60)} == {0}, "renormalised over the two: 0.625, 0.375"


@pytest.mark.parametrize("edited", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_logprobs_are_log_softmax_of_the_raw_logits(seed: int, edited: int) -> None:
    """Also where the second step's edits decide what is chosen."""
    case = OP_REFERENCES["sample"].generate(seed)
    step = case.steps[edited]
    assert (step.inputs.sampling.edits is not None) == bool(edited)
    outcome = run_case(ReferenceBackend(), case, "float32")[edited]
    samples, columns = outcome.samples, step.inputs.sampling
    assert samples is not None
    logits = step.activations["x"].astype(np.float64)[columns.index]
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert samples.top_ids.shape == samples.top_logprobs.shape == (32, 3)
    for index, count in enumerate(columns.logprob_counts.tolist()):
        assert np.isnan(samples.logprobs[index]) == (count < 0)
        if count >= 0:
            assert abs(samples.logprobs[index] - expected[index, samples.tokens[index]]) < 1e-5
        best = np.argsort(-expected[index], kind="stable")[: max(count, 0)]
        assert samples.top_ids[index].tolist() == [*best.tolist(), *[-1] * (3 - len(best))]
        np.testing.assert_allclose(samples.top_logprobs[index, : len(best)], expected[index, best], atol=1e-5)
        assert np.isnan(samples.top_logprobs[index, len(best) :]).all()


def test_a_row_that_asks_for_more_alternatives_than_there_are_gets_all() -> None:
    samples = log_probabilities(torch.tensor([[0.0, 1.0]]), [0], np.array([5], np.int32))
    assert samples.top_ids.tolist() == [[1, 0, -1, -1, -1]]
