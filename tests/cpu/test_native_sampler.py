"""The sampler against a dumb numpy twin that sorts the whole vocabulary, over many random parameters and at ties."""

from __future__ import annotations

import numpy as np
import pytest
from native_programs import SETS, compiled, plain_step, sampling

from lockstep.backends.native import philox4x32
from lockstep.backends.native.executable import NativeExecutable
from lockstep.errors import InternalError
from lockstep.ops.program import Program, ProgramBuilder
from lockstep.ops.step import F32, SampleOutputs, SamplingInputs


def sampling_program(vocabulary: int) -> Program:
    build = ProgramBuilder()
    build.input(build.buffer("x", "T", vocabulary))
    build.buffer("logits", "S", vocabulary)
    build.call("select", ("x",), ("logits",))
    build.call("sample", ("logits",))
    return build.build()


def sample(executable: NativeExecutable, logits: F32, columns: SamplingInputs) -> SampleOutputs:
    result = executable.run(plain_step(len(logits), columns), {"x": logits}, {})
    assert result is not None
    return result


def gumbel(seed: int, position: int, token: int) -> float:
    word = philox4x32([position, token, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])[0]
    return float(-np.log(-np.log(((word >> 8) + 0.5) * 2.0**-24)))


def kept_ids(logits: F32, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """min_p, then top_k, then top_p, each by its definition."""
    scaled = logits * (np.float32(1) / np.float32(temperature))
    weights = np.exp(scaled.astype(np.float64) - scaled.max())
    order = [i for i in sorted(range(len(logits)), key=lambda i: (-scaled[i], i)) if weights[i] >= np.float32(min_p)]
    if top_k > 0:
        order = order[:top_k]
    if top_p >= 1:
        return order
    share = np.cumsum(weights[order]) / weights[order].sum()
    return order[: int(np.argmax(share >= np.float32(top_p))) + 1 if np.any(share >= np.float32(top_p)) else len(order)]


def twin(logits: F32, seed: int, position: int, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = logits * (np.float32(1) / np.float32(temperature))
    return max(kept_ids(logits, temperature, top_k, top_p, min_p), key=lambda i: (scaled[i] + gumbel(seed, position, i), -i))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("vocabulary", [7, 300, 1000])
def test_sampler_agrees_with_its_definition(instruction_set: str, vocabulary: int) -> None:
    random = np.random.default_rng(vocabulary)
    executable = compiled(sampling_program(vocabulary), {}, instruction_set=instruction_set, threads=2)
    for _ in range(6):
        count = 32
        logits = (random.standard_normal((count, vocabulary)) * random.choice([0.3, 2, 8])).astype(np.float32)
        columns = sampling(
            range(count),
            seeds=random.integers(0, 2**64, count, dtype=np.uint64).tolist(),
            positions=random.integers(1, 2**31, count).tolist(),
            temperatures=random.choice([0.0, 0.2, 0.7, 1.0, 1.5], count).tolist(),
            top_ks=random.choice([0, 1, 2, 5, 40, 299, 5000], count).tolist(),
            top_ps=random.choice([1.0, 0.999, 0.9, 0.5, 0.01], count).tolist(),
            min_ps=random.choice([0.0, 0.0, 0.05, 0.5, 1.0], count).tolist(),
        )
        got = sample(executable, logits, columns).tokens
        wanted = [
            twin(
                logits[s],
                int(columns.seeds[s]),
                int(columns.positions[s]),
                float(columns.temperatures[s]),
                int(columns.top_ks[s]),
                float(columns.top_ps[s]),
                float(columns.min_ps[s]),
            )
            for s in range(count)
        ]
        assert got.tolist() == wanted


@pytest.mark.parametrize("instruction_set", SETS)
def test_filters_keep_exactly_the_ids_of_their_definition(instruction_set: str) -> None:
    vocabulary, draws = 300, 64
    logits = np.random.default_rng(1).standard_normal(vocabulary).astype(np.float32) * 3
    executable = compiled(sampling_program(vocabulary), {}, instruction_set=instruction_set)
    for temperature, top_k, top_p, min_p in [(1.0, 3, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (2.0, 0, 1.0, 0.4), (3.0, 10, 0.7, 0.01)]:
        kept = kept_ids(logits, temperature, top_k, top_p, min_p)
        seen: set[int] = set()
        for start in range(0, 6400, draws):
            columns = sampling(
                [0] * draws,
                seeds=[9] * draws,
                positions=list(range(start + 1, start + draws + 1)),
                temperatures=[temperature] * draws,
                top_ks=[top_k] * draws,
                top_ps=[top_p] * draws,
                min_ps=[min_p] * draws,
            )
            seen |= set(sample(executable, logits[None], columns).tokens.tolist())
        assert seen == set(kept), (temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("instruction_set", SETS)
def test_ties_go_to_the_lower_id(instruction_set: str) -> None:
    vocabulary = 300
    executable = compiled(sampling_program(vocabulary), {}, instruction_set=instruction_set)
    logits = np.zeros((1, vocabulary), dtype=np.float32)
    logits[0, 5:] = -0.0
    logits[0, [40, 41, 250]] = 3.0
    assert sample(executable, logits, sampling([0])).tokens[0] == 40
    for top_k in (1, 2, 3, 4, 100):
        columns = sampling([0] * 64, temperatures=[50.0] * 64, top_ks=[top_k] * 64, positions=range(1, 65), logprob_counts=[5] * 64)
        got = sample(executable, logits, columns)
        allowed = [40, 41, 250, *range(40), *range(42, 250)][:top_k]
        assert set(got.tokens.tolist()) <= set(allowed)
        assert got.top_ids[0].tolist() == [40, 41, 250, 0, 1]


@pytest.mark.parametrize("instruction_set", SETS)
def test_noise_that_rounding_swallows_leaves_the_lower_id(instruction_set: str) -> None:
    logits = np.zeros((1, 300), dtype=np.float32)
    logits[0, [40, 41, 250]] = 3e8  # the next float is 32 away, the noise at most 17
    executable = compiled(sampling_program(300), {}, instruction_set=instruction_set)
    for top_k in (0, 2, 3, 200):
        columns = sampling([0] * 64, temperatures=[1.0] * 64, top_ks=[top_k] * 64, positions=range(1, 65))
        assert set(sample(executable, logits, columns).tokens.tolist()) == {40}


@pytest.mark.parametrize("instruction_set", SETS)
def test_choice_follows_the_softmax(instruction_set: str) -> None:
    vocabulary, draws = 20, 64
    logits = np.random.default_rng(3).standard_normal(vocabulary).astype(np.float32)
    executable = compiled(sampling_program(vocabulary), {}, instruction_set=instruction_set)
    counts = np.zeros(vocabulary)
    for start in range(0, 25_600, draws):
        columns = sampling([0] * draws, seeds=[77] * draws, positions=range(start + 1, start + draws + 1), temperatures=[1.0] * draws)
        counts += np.bincount(sample(executable, logits[None], columns).tokens, minlength=vocabulary)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    chi_squared = float(np.sum((counts - counts.sum() * p) ** 2 / (counts.sum() * p)))
    assert chi_squared < 50  # 19 degrees of freedom: exceeded once in 10,000 fixed seeds


@pytest.mark.parametrize("instruction_set", SETS)
def test_logprobs_are_log_softmax_of_the_raw_logits(instruction_set: str) -> None:
    vocabulary = 49_152
    logits = (np.random.default_rng(4).standard_normal((3, vocabulary)) * 4).astype(np.float32)
    executable = compiled(sampling_program(vocabulary), {}, instruction_set=instruction_set, threads=2, tokens_max=4)
    got = sample(executable, logits, sampling([2, 0, 1], temperatures=[0.0, 0.7, 0.0], logprob_counts=[20, 3, -1]))
    exact = logits.astype(np.float64)
    exact = exact - exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    for s, row in enumerate([2, 0]):
        count = [20, 3][s]
        assert abs(got.logprobs[s] - exact[row, got.tokens[s]]) < 2e-6
        order = np.argsort(-logits[row], kind="stable")[:count]
        assert got.top_ids[s, :count].tolist() == order.tolist()
        np.testing.assert_allclose(got.top_logprobs[s, :count], exact[row, order], rtol=0, atol=2e-6)
    assert np.all(got.top_ids[1, 3:] == -1)
    assert np.all(np.isnan(got.top_logprobs[1, 3:]))
    assert np.isnan(got.logprobs[2])


@pytest.mark.parametrize("instruction_set", SETS)
def test_token_does_not_depend_on_the_other_samples_or_the_threads(instruction_set: str) -> None:
    vocabulary, count = 1000, 24
    random = np.random.default_rng(5)
    logits = random.standard_normal((count, vocabulary)).astype(np.float32)
    temperatures, top_ks, top_ps = random.choice([0.5, 1.0], count), random.choice([0, 7, 400], count), random.choice([1.0, 0.8], count)

    def run(executable: NativeExecutable, rows: list[int]) -> list[tuple[int, float]]:
        columns = sampling(
            rows,
            seeds=[s * 2**33 + 1 for s in rows],
            positions=[s + 1 for s in rows],
            temperatures=[float(temperatures[s]) for s in rows],
            top_ks=[int(top_ks[s]) for s in rows],
            top_ps=[float(top_ps[s]) for s in rows],
            logprob_counts=[2] * len(rows),
        )
        got = sample(executable, logits, columns)
        return list(zip(got.tokens.tolist(), got.logprobs.tolist(), strict=True))

    one, three = (compiled(sampling_program(vocabulary), {}, instruction_set=instruction_set, threads=threads) for threads in (1, 3))
    alone = [run(one, [s])[0] for s in range(count)]
    order = random.permutation(count).tolist()
    assert run(one, order) == [alone[s] for s in order]
    assert run(three, order) == [alone[s] for s in order]


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_give_no_token_and_name_the_position(instruction_set: str, temperature: float) -> None:
    vocabulary = 100
    executable = compiled(sampling_program(vocabulary), {}, instruction_set=instruction_set, threads=2)
    good = np.random.default_rng(6).standard_normal((2, vocabulary)).astype(np.float32)
    columns = sampling([0, 1], positions=[4, 1234], temperatures=[temperature] * 2)
    before = sample(executable, good, columns).tokens.tolist()
    for value in (np.nan, np.inf):
        bad = good.copy()
        bad[1, 98] = value
        with pytest.raises(InternalError, match="1234"):
            sample(executable, bad, columns)
    with pytest.raises(InternalError, match="1234"):
        sample(executable, np.stack([good[0], np.full(vocabulary, -np.inf, dtype=np.float32)]), columns)
    masked = good.copy()
    masked[1, :50] = -np.inf
    assert sample(executable, masked, columns).tokens[1] >= 50
    assert sample(executable, good, columns).tokens.tolist() == before


def test_temperature_so_small_that_logits_overflow_is_greedy() -> None:
    logits = np.array([[1.0, 30.0, 29.0, -5.0]], dtype=np.float32)
    executable = compiled(sampling_program(4), {})
    assert sample(executable, logits, sampling([0], temperatures=[1e-38])).tokens[0] == 1
