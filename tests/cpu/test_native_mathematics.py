"""exp, log, tanh, Philox and Gumbel noise: accurate, the same in every lane, and Philox exactly the published generator."""

from __future__ import annotations

import numpy as np
import pytest
from native_programs import SETS

from lockstep.backends.native import _kernels, philox4x32
from lockstep.ops.step import F32


def elementwise(instruction_set: str, function: str, x: F32) -> F32:
    out = np.empty_like(x)
    _kernels.elementwise(instruction_set, function, x, out)
    return out


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert tuple(philox4x32(counter, key)) == words


@pytest.mark.parametrize("instruction_set", SETS)
def test_exp_is_within_two_units_in_the_last_place(instruction_set: str) -> None:
    x = np.concatenate([np.linspace(-86.5, 88.72, 200_003), np.linspace(-1, 1, 50_001)]).astype(np.float32)
    np.testing.assert_allclose(elementwise(instruction_set, "exp", x), np.exp(x.astype(np.float64)), rtol=2.4e-7, atol=0)


@pytest.mark.parametrize("instruction_set", SETS)
def test_exp_at_the_edges(instruction_set: str) -> None:
    x = np.array([0.0, -0.0, -np.inf, np.inf, np.nan, -87.0, -1000.0, 89.0, 1000.0], dtype=np.float32)
    got = elementwise(instruction_set, "exp", x)
    assert np.array_equal(got, np.array([1, 1, 0, np.inf, np.nan, 0, 0, np.inf, np.inf], dtype=np.float32), equal_nan=True)


@pytest.mark.parametrize("instruction_set", SETS)
def test_log_is_within_two_units_in_the_last_place(instruction_set: str) -> None:
    x = np.concatenate([np.geomspace(1.2e-38, 3e38, 200_003), np.linspace(0.5, 2, 50_001), 1 - np.arange(1, 1000) * 2.0**-24]).astype(np.float32)
    wanted = np.log(x.astype(np.float64))
    np.testing.assert_allclose(elementwise(instruction_set, "log", x), wanted, rtol=2.4e-7, atol=0)


@pytest.mark.parametrize("instruction_set", SETS)
def test_tanh_is_within_two_units_in_the_last_place_and_odd(instruction_set: str) -> None:
    x = np.concatenate([np.geomspace(1e-30, 1, 100_001), np.linspace(0.6, 0.65, 50_001), np.linspace(0.6, 20, 100_003)]).astype(np.float32)
    got = elementwise(instruction_set, "tanh", x)
    np.testing.assert_allclose(got, np.tanh(x.astype(np.float64)), rtol=2.4e-7, atol=0)
    assert np.array_equal(elementwise(instruction_set, "tanh", -x), -got)


@pytest.mark.parametrize("instruction_set", SETS)
def test_tanh_at_the_edges(instruction_set: str) -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e38, -1e38], dtype=np.float32)
    got = elementwise(instruction_set, "tanh", x)
    assert np.array_equal(got, np.array([0, 0, 1, -1, np.nan, 1, -1], dtype=np.float32), equal_nan=True)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("function", ["exp", "log", "tanh"])
def test_value_does_not_depend_on_its_lane_or_the_tail(instruction_set: str, function: str) -> None:
    x = np.random.default_rng(1).uniform(0.01, 50, 37).astype(np.float32)
    whole = elementwise(instruction_set, function, x)
    alone = np.concatenate([elementwise(instruction_set, function, x[i : i + 1]) for i in range(len(x))])
    assert np.array_equal(whole, alone)


@pytest.mark.parametrize("instruction_set", SETS)
def test_gumbel_noise_is_that_of_the_philox_word_of_seed_position_and_id(instruction_set: str) -> None:
    ids = np.array([0, 1, 2, 49_151, 5, 77, 2**31, 2**32 - 1, 300] * 5, dtype=np.uint32)
    for seed, position in [(0, 0), (12345, 7), (0xA4093822299F31D0, 1 << 20), (2**64 - 1, 2**31 - 1)]:
        out = np.empty(len(ids), dtype=np.float32)
        _kernels.gumbel(instruction_set, ids, seed, position, out)
        words = np.array([philox4x32([position, int(i), 0, 0], [seed & 0xFFFFFFFF, seed >> 32])[0] for i in ids], dtype=np.uint64)
        u = ((words >> np.uint64(8)).astype(np.float64) + 0.5) * 2.0**-24
        np.testing.assert_allclose(out, -np.log(-np.log(u)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("instruction_set", SETS)
def test_log_of_the_uniform_is_that_of_its_exact_value_up_to_both_ends(instruction_set: str) -> None:
    edges = [np.arange(2000), 2**23 + np.arange(-2000, 2000), 11863283 + np.arange(-2000, 2000), 2**24 - 1 - np.arange(2000)]
    w = np.concatenate([*edges, np.random.default_rng(2).integers(0, 2**24, 100_000)]).astype(np.uint32)
    out = np.empty(len(w), dtype=np.float32)
    _kernels.log_of_unit(instruction_set, w, out)
    above = w >= 2**23
    exact = np.log((w + 0.5) * 2.0**-24)
    exact[above] = np.log1p(-(2.0**24 - w[above] - 0.5) * 2.0**-24)
    np.testing.assert_allclose(out, exact, rtol=2.4e-7, atol=0)
    assert np.all(out < 0)


@pytest.mark.parametrize("instruction_set", SETS)
def test_gumbel_noise_is_finite_and_has_the_distribution_it_claims(instruction_set: str) -> None:
    ids = np.arange(400_000, dtype=np.uint32)
    out = np.empty(len(ids), dtype=np.float32)
    _kernels.gumbel(instruction_set, ids, 99, 3, out)
    assert np.all(np.isfinite(out))
    assert -2.9 < out.min() < -2.2
    assert 10 < out.max() < 17.34
    # Mean and variance of the standard Gumbel distribution, five standard errors.
    assert abs(out.mean() - 0.5772157) < 5 * 1.2825 / np.sqrt(len(ids))
    assert abs(out.var() - np.pi**2 / 6) < 5 * 3.0 / np.sqrt(len(ids))
