"""Bit for bit in float32: what a row gets on the reference backend does not depend on other rows, chunks, stages, blocks or threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from lockstep.backends.reference.backend import ReferenceBackend
from lockstep.backends.reference.invariant import elementwise, fold, padded_matrix, rows_times_matrix
from rig import Row, build_stages, logits_of, run_step, tiny_spec, tiny_weights

ODD = tiny_spec(head_dim=10, intermediate_size=53, vocab_size=211, hidden_size=36)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def bits(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().numpy().view(np.uint32)


@pytest.mark.parametrize(("columns", "rows"), [(576, 960), (1536, 577), (33, 7), (1, 1), (3, 129), (4097, 31), (67, 101), (15, 1000)])
def test_a_row_of_a_product_is_the_same_at_any_place_and_count(threads: int, columns: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(columns * rows)
    x = torch.randn((33, columns), generator=generator)
    matrix = padded_matrix(torch.randn((rows, columns), generator=generator))
    alone = torch.cat([rows_times_matrix(row[None], matrix, rows) for row in x])
    for start in (0, 1, 5, 15, 16):
        for count in range(1, 18):
            part = rows_times_matrix(x[start : start + count], matrix, rows)
            assert np.array_equal(bits(part), bits(alone[start : start + count])), (start, count)


@pytest.mark.parametrize(("columns", "rows"), [(577, 50001), (1536, 128)], ids=["shared by rows", "would be shared along the sum"])
def test_a_product_is_the_same_at_one_and_at_two_threads(columns: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, matrix = torch.randn((17, columns), generator=generator), padded_matrix(torch.randn((rows, columns), generator=generator))
    before, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(bits(rows_times_matrix(x, matrix, rows)))
    torch.set_num_threads(before)
    assert np.array_equal(*results)


@pytest.mark.parametrize("function", [torch.exp, torch.sin, torch.cos, torch.log, functional.silu], ids=lambda function: function.__name__)
def test_a_function_of_an_element_is_the_same_at_any_place_and_count(threads: int, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """silu is not used by the backend; it is one of those that torch alone computes otherwise at the end of an array."""
    x = torch.randn(40000, generator=torch.Generator().manual_seed(2)) * 4
    x = x.abs() + 1e-3 if function is torch.log else x
    whole = elementwise(function, x)
    places = [(start, count) for start in range(0, 300, 7) for count in (1, 3, 17, 33, 64)] + [(100, 37777), (39999, 1)]
    for start, count in places:
        assert np.array_equal(bits(elementwise(function, x[start : start + count])), bits(whole[start : start + count]))


def test_a_sum_is_the_same_however_far_it_is_padded(threads: int) -> None:
    x = torch.randn((5, 49153), generator=torch.Generator().manual_seed(3))
    whole = fold(x, -1)
    padded = fold(functional.pad(x, (0, 50000)), -1)
    assert np.array_equal(bits(whole), bits(padded))
    assert np.array_equal(bits(whole), bits(torch.cat([fold(row[None], -1) for row in x])))
    torch.testing.assert_close(whole, x.double().sum(-1).float(), atol=1e-3, rtol=0)
    minus_zero = torch.tensor([[-0.0]])
    assert np.array_equal(bits(fold(minus_zero, -1)), bits(fold(functional.pad(minus_zero, (0, 1)), -1)))


def test_logits_are_the_same_whole_chunked_and_token_by_token(threads: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 211, 40).tolist()
    tensors = tiny_weights(ODD)
    whole = logits_of(build_stages(ReferenceBackend(), ODD, tensors), tokens)
    for split in (None, [range(2), range(2, 3), range(3, 4)]):
        stages = build_stages(ReferenceBackend(), ODD, tensors, split, threads=threads, block_size=5)
        for chunks in ([17, 16, 7], [1, 9, 8, 22], [1] * 40):
            assert np.array_equal(logits_of(stages, tokens, chunks, blocks=range(20, 28)).view(np.uint32), whole.view(np.uint32))


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    draw = np.random.default_rng(1)
    tensors = tiny_weights(ODD)
    requests = [draw.integers(0, 211, length).tolist() for length in (1, 2, 13, 30, 5)]
    alone = [logits_of(build_stages(ReferenceBackend(), ODD, tensors), tokens) for tokens in requests]
    stages = build_stages(ReferenceBackend(), ODD, tensors, threads=2, block_size=3)
    blocks = draw.permutation(128)[:75].reshape(5, 15).tolist()
    computed = [0] * 5
    while any(done < len(tokens) for done, tokens in zip(computed, requests, strict=True)):
        live = [index for index in draw.permutation(5).tolist() if computed[index] < len(requests[index])]
        chunks = {index: requests[index][computed[index] :][: int(draw.integers(1, 8))] for index in live}
        logits, _ = run_step(stages, [Row(token_ids=chunks[index], start=computed[index], blocks=blocks[index]) for index in live])
        for index in live:
            mine, logits = logits[: len(chunks[index])], logits[len(chunks[index]) :]
            assert np.array_equal(mine.view(np.uint32), alone[index][computed[index] :][: len(mine)].view(np.uint32))
            computed[index] += len(mine)


def test_seeded_samples_and_logprobs_do_not_depend_on_batch_or_chunk() -> None:
    tokens = np.random.default_rng(2).integers(0, 211, 21).tolist()
    settings = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "seed": 1 << 63, "logprob_count": 3}
    stages = build_stages(ReferenceBackend(), ODD, tiny_weights(ODD))
    _, whole = run_step(stages, [Row(token_ids=tokens, start=0, blocks=range(6), sampling=settings)])
    for index, token in enumerate(tokens):
        other = Row(token_ids=tokens[:3], start=0, blocks=range(20, 21))
        _, single = run_step(stages, [other, Row(token_ids=[token], start=index, blocks=range(6), sampling=settings)])
        assert single.tokens[-1] == whole.tokens[index]
        assert single.logprobs[-1] == whole.logprobs[index]
        assert np.array_equal(single.top_ids[-1], whole.top_ids[index])
        assert np.array_equal(single.top_logprobs[-1], whole.top_logprobs[index])
