"""The digest sees every bit of what a replica read and did. (Folding a decode step of 64 rows costs some 20 µs; benchmarks say how much exactly.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from core_loop import Admission, Answer, Row, make_plan, make_result, run_plan
from numpy.typing import NDArray

from lockstep.core.digest import Digest, mix64, mix64_array
from lockstep.core.layout import BatchLayout, PromptTargets, SamplingColumns
from lockstep.core.records import Side, StepPlan, StepResult
from lockstep.core.shaping import Shaping
from lockstep.core.table import SlotTable, TableShape

Arrays = Sequence[NDArray[Any]]


def folded(arrays: Arrays, epoch: int = 0) -> int:
    return Digest(epoch).fold(arrays)


def rich_records() -> tuple[StepPlan, StepResult, BatchLayout]:
    """A plan, a result and a layout in which every array of an ordinary step has something in it: a verified draft, a chunk, a tail, a full block."""
    table = SlotTable(TableShape(slot_count=4, length_max=24, block_size=4, drafts_max=2))
    side = Side(stop_ids=(3, 4), shaping=Shaping(presence_penalty=0.5), cache_salt=b"tenant")
    sampled = {"seed": 1 << 63, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "logprob_count": 2, "prompt_logprob_count": 1}
    first = Admission(slot=0, generation=1, tokens=[5, 6, 7, 8, 9], cap=20, side=side, columns=sampled)
    importing = Admission(slot=3, generation=3, tokens=[1, 2], cap=9, columns={"importing": 1})
    run_plan(table, make_plan(0, 0, admits=[first, importing], blocks=[(0, [3, 1])], rows=[Row(0, 1, 5, 0, True)]))
    result = make_result(0, [Answer(0, 1, [11], 0, [12, 13])])
    table.apply_result(result)
    second = Admission(slot=1, generation=2, tokens=[21, 22, 23, 24, 25, 26], cap=9, columns={"prompt_logprob_count": 0})
    plan = make_plan(1, 1, admits=[second], ready=[(3, 3, 1)], blocks=[(1, [2]), (0, [6])], rows=[Row(0, 1, 3, 5, True), Row(1, 2, 3, 0, False)])
    return plan, result, run_plan(table, plan)


PLAN, RESULT, LAYOUT = rich_records()
RECORDS: dict[str, Arrays] = {name: tuple(record.columns().values()) for name, record in (("plan", PLAN), ("result", RESULT), ("layout", LAYOUT))}


@pytest.mark.parametrize("name", RECORDS)
def test_any_flipped_bit_changes_the_digest(name: str) -> None:
    arrays = RECORDS[name]
    before = folded(arrays)
    flips = 0
    for i, array in enumerate(arrays):
        for byte in range(array.nbytes):
            for bit in range(8):
                damaged = array.copy()
                damaged.reshape(-1).view(np.uint8)[byte] ^= np.uint8(1 << bit)
                flips += 1
                assert folded([*arrays[:i], damaged, *arrays[i + 1 :]]) != before, (i, byte, bit)
    assert flips > 400


def test_every_field_of_a_layout_is_folded() -> None:
    """A field that `arrays` left out could differ between replicas unseen: each must be there, itself or by its hash."""
    listed = {id(array) for array in LAYOUT.columns().values()}
    for name in BatchLayout.__dataclass_fields__:
        value = getattr(LAYOUT, name)
        if name in ("step", "block_size"):
            assert value in LAYOUT.columns()["head"].tolist(), name
        elif name == "sides":
            assert [side.hash64() for side in value] == LAYOUT.side_hash.tolist()
        else:
            grouped = isinstance(value, (SamplingColumns, PromptTargets))
            columns = [getattr(value, column) for column in value.__dataclass_fields__] if grouped else [value]
            parts = value if isinstance(value, tuple) else columns
            for part in parts:
                arrays = (part,) if isinstance(part, np.ndarray) else (part.starts, part.values)
                assert all(id(array) in listed and array.size for array in arrays), name


def test_two_flipped_sign_bits_do_not_cancel() -> None:
    words = np.arange(40, dtype=np.uint32)
    before = folded([words])
    for i in range(40):
        for j in range(i):
            damaged = words.copy()
            damaged[[i, j]] ^= np.uint32(1 << 31)
            assert folded([damaged]) != before, (i, j)


def test_swapped_words_change_the_digest() -> None:
    words = np.arange(40, dtype=np.int32)
    for i in range(39):
        damaged = words.copy()
        damaged[[i, i + 1]] = damaged[[i + 1, i]]
        assert folded([damaged]) != folded([words])


def test_sizes_are_folded() -> None:
    a, b, c = (np.array([n], np.int32) for n in (1, 2, 3))
    joined = [np.concatenate([a, b]), c], [a, np.concatenate([b, c])], [a, b, c], [np.concatenate([a, b, c])]
    assert len({folded(arrays) for arrays in joined}) == 4
    empty = np.zeros(0, np.int32)
    assert folded([empty, a]) != folded([a, empty])
    assert folded([np.zeros(1, np.int32)]) != folded([np.zeros(2, np.int32)])
    assert folded([np.zeros(1, np.int32)]) != folded([np.zeros(1, np.int64)])


@pytest.mark.parametrize("content", [[], [0], [0, 0], [7, 0]])
def test_number_of_arrays_is_folded(content: list[int]) -> None:
    """An empty array has no words, and words of zero add nothing to a sum: neither may come or go unseen."""
    array, empty = np.array(content, np.int32), np.zeros(0, np.int32)
    lists: list[Arrays] = [[], [empty, array], [array, empty, empty], [empty, array, empty], [empty] * 4]
    lists += [[array], [array, empty]] if content else [[empty], [empty] * 2]
    distinct = {tuple(tuple(part.tolist()) for part in arrays) for arrays in lists}
    assert len({folded(arrays) for arrays in lists}) == len(distinct)


def test_digest_rolls_so_that_order_and_an_old_difference_stay_visible() -> None:
    a, b = (np.array([n], np.int32) for n in (1, 2))
    one, two, three = Digest(0), Digest(0), Digest(0)
    for digest, order in ((one, (a, b)), (two, (b, a)), (three, (a, a))):
        for array in order:
            digest.fold([array])
        for _ in range(50):
            digest.fold([b])
    assert len({one.value, two.value, three.value}) == 3


def test_digest_starts_from_the_epoch() -> None:
    assert len({Digest(epoch).value for epoch in range(100)}) == 100


def test_long_steps_have_weights_of_their_own() -> None:
    words = np.zeros(20_000, np.int32)
    before = folded([words])
    for position in (0, 4095, 4096, 8191, 8192, 19_999):
        damaged = words.copy()
        damaged[position] = 1
        assert folded([damaged]) != before
    grown = Digest(0)
    grown.fold([words])
    small = np.arange(10, dtype=np.int32)
    fresh = Digest(0)
    grown.value = fresh.value
    assert grown.fold([small]) == fresh.fold([small])


def test_array_mix_is_the_integer_mix() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 64, 200, dtype=np.uint64, endpoint=False)
    assert mix64_array(values).tolist() == [mix64(int(value)) for value in values]
    assert len(set(mix64_array(np.arange(1000, dtype=np.uint64)).tolist())) == 1000
