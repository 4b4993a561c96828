"""Messages survive the wire value for value, and nothing that is not a message gets in."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from core_loop import Admission, Answer, Row, make_plan, make_result
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.logprobs import LogprobColumns
from lockstep.core.ragged import Ragged
from lockstep.core.records import Exports, PromptLogprobs, Side, Slots, StepPlan, StepResult, Transfer
from lockstep.core.shaping import Shaping
from lockstep.errors import LinkError
from lockstep.runtime.messages import (
    Activations,
    ColumnsRequest,
    GrammarReport,
    GrammarRequest,
    Heartbeat,
    ImportReport,
    KVPart,
    KVPull,
    StageFailure,
    StageHello,
    StageReady,
    StageStart,
    StepColumns,
    WeightsReport,
    WeightsRequest,
)
from lockstep.runtime.transport.codec import DTYPES, KIND_OF, MESSAGES, Codec, array_from_parts, array_parts

CODEC = Codec()
INTS, SMALL = st.integers(-(1 << 31), (1 << 31) - 1), st.integers(0, 100)
WORDS = st.integers(0, (1 << 64) - 1)
DIGESTS = st.lists(WORDS, max_size=4).map(lambda values: np.array(values, np.uint64))
EXTRAS = st.dictionaries(st.text(max_size=4), st.binary(max_size=5), max_size=2)
FLOATS = st.floats(width=32)
NUMBERS = st.floats(allow_nan=False)
IDS = st.lists(SMALL, max_size=3).map(tuple)
SHAPINGS = st.builds(
    Shaping,
    repetition_penalty=NUMBERS,
    presence_penalty=NUMBERS,
    frequency_penalty=NUMBERS,
    min_tokens=SMALL,
    logit_bias=st.lists(st.tuples(SMALL, NUMBERS), max_size=2).map(tuple),
    allowed_token_ids=IDS,
    bad_words=st.lists(IDS, max_size=2).map(tuple),
    processors=st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=2).map(tuple),
)


def same(one: Any, other: Any) -> bool:
    """Equal in type, dtype, shape and bits, all the way down."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    admits = [
        Admission(
            slot=slot,
            generation=draw(st.integers(0, 1 << 62)),
            tokens=draw(st.lists(SMALL, max_size=5)),
            cap=draw(SMALL),
            side=Side(
                stop_ids=tuple(draw(st.lists(SMALL, max_size=3))),
                cache_salt=draw(st.binary(max_size=5)),
                shaping=draw(SHAPINGS),
                extras=draw(EXTRAS),
            ),
            columns={"seed": draw(WORDS), "temperature": draw(FLOATS)},
        )
        for slot in range(draw(st.integers(0, 3)))
    ]
    plan = make_plan(
        draw(SMALL),
        draw(SMALL),
        releases=draw(st.lists(st.tuples(SMALL, SMALL), max_size=3)),
        admits=admits,
        ready=draw(st.lists(st.tuples(SMALL, SMALL, SMALL), max_size=2)),
        blocks=draw(st.lists(st.tuples(SMALL, st.lists(SMALL, max_size=4)), max_size=3)),
        rows=[Row(*row) for row in draw(st.lists(st.tuples(SMALL, SMALL, SMALL, INTS, st.booleans()), max_size=4))],
    )
    transfers = tuple(Transfer(instance=draw(st.text(max_size=4)), epoch=0, step=1, number=draw(SMALL)) for _ in range(draw(st.integers(0, 2))))
    count = len(transfers)
    exports = Exports(
        transfers=transfers,
        slots=Slots(slots=np.arange(count, dtype=np.int32), generations=np.arange(count, dtype=np.int64)),
        computed=np.arange(count, dtype=np.int32),
        blocks=(Ragged.of([[1, 2]] * count),),
    )
    return dataclasses.replace(plan, exports=exports, unexports=transfers)


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    rows = draw(st.lists(st.tuples(SMALL, SMALL, st.lists(INTS, max_size=4), st.integers(0, 2), st.lists(SMALL, max_size=3)), max_size=4))
    result = make_result(draw(SMALL), [Answer(*row) for row in rows])
    count, width = len(result.tokens.values), draw(st.integers(0, 3))
    logprobs = LogprobColumns(
        logprobs=np.array(draw(st.lists(FLOATS, min_size=count, max_size=count)), np.float32),
        ranks=np.arange(count, dtype=np.int32),
        top_ids=np.full((count, width), -1, np.int32),
        top_logprobs=np.full((count, width), np.nan, np.float32),
    )
    of_prompts = PromptLogprobs(
        slots=np.arange(count, dtype=np.int32), generations=np.arange(count), positions=np.arange(count, dtype=np.int32), columns=logprobs
    )
    return dataclasses.replace(
        result,
        logprobs=draw(st.sampled_from([None, logprobs])),
        prompt_logprobs=draw(st.sampled_from([None, of_prompts])),
        digests=draw(DIGESTS),
        reasons=draw(st.sampled_from([(), tuple("why" for _ in rows)])),
    )


TEXTS = st.text(max_size=8)
ARRAYS = st.dictionaries(TEXTS, st.sampled_from(sorted(DTYPES)).map(lambda dtype: np.arange(6).astype(dtype).reshape(2, 3)), max_size=3)
TRANSFERS = st.builds(
    Transfer,
    instance=TEXTS,
    epoch=SMALL,
    step=SMALL,
    number=SMALL,
    address=TEXTS,
    layers=st.lists(st.tuples(SMALL, SMALL), max_size=2).map(tuple),
)
MESSAGE_STRATEGIES: dict[type[Any], st.SearchStrategy[Any]] = {
    StepPlan: plans(),
    StepResult: results(),
    Activations: st.builds(Activations, epoch=SMALL, step=SMALL, digests=DIGESTS, tensors=st.just({})),
    StageHello: st.builds(
        StageHello,
        stage=SMALL,
        pid=SMALL,
        agreement=st.dictionaries(TEXTS, TEXTS, max_size=3),
        layers=st.tuples(SMALL, SMALL),
        kv_block_bytes=st.lists(SMALL, max_size=3).map(tuple),
        weight_bytes=st.integers(0, 1 << 50),
        kv_bytes_max=st.integers(0, 1 << 50),
    ),
    StageStart: st.builds(StageStart, epoch=SMALL, block_counts=st.lists(SMALL, max_size=3).map(tuple), weights=TEXTS),
    StageReady: st.builds(StageReady, stage=SMALL, epoch=SMALL, kv_bytes=SMALL, threads=SMALL),
    Heartbeat: st.builds(Heartbeat, stage=SMALL, step=SMALL, waits_for=TEXTS, check_seconds=st.floats(0, 1e6)),
    StageFailure: st.builds(
        StageFailure,
        stage=SMALL,
        epoch=SMALL,
        code=TEXTS,
        message=TEXTS,
        step=st.integers(-1, 100),
        concerned=st.lists(st.tuples(SMALL, SMALL), max_size=3).map(tuple),
    ),
    ColumnsRequest: st.builds(ColumnsRequest, epoch=SMALL, step=SMALL),
    StepColumns: st.builds(StepColumns, stage=SMALL, epoch=SMALL, step=SMALL, columns=ARRAYS),
    KVPull: st.builds(KVPull, transfer=TRANSFERS, layers=st.tuples(SMALL, SMALL), reader=SMALL),
    KVPart: st.builds(KVPart, transfer=TRANSFERS, layers=st.tuples(SMALL, SMALL), tags=DIGESTS, values=ARRAYS),
    ImportReport: st.builds(ImportReport, stage=SMALL, epoch=SMALL, slot=SMALL, generation=SMALL, computed=SMALL),
    GrammarRequest: st.builds(GrammarRequest, epoch=SMALL, key=TEXTS, source=TEXTS),
    GrammarReport: st.builds(GrammarReport, epoch=SMALL, key=TEXTS, error=TEXTS),
    WeightsRequest: st.builds(WeightsRequest, epoch=SMALL, weights=TEXTS),
    WeightsReport: st.builds(WeightsReport, epoch=SMALL, stage=SMALL, weights=TEXTS, error=TEXTS),
}


def test_every_message_kind_is_tried_here() -> None:
    assert set(MESSAGE_STRATEGIES) == set(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_message_comes_back_as_it_was(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(MESSAGE_STRATEGIES[kind])
    number, body = CODEC.encode(message)
    assert number == KIND_OF[kind]
    assert same(CODEC.decode(number, body), message)


@given(dtype=st.sampled_from(sorted(DTYPES)), shape=st.lists(st.integers(0, 4), max_size=3), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_array_of_any_dtype_and_shape_survives(dtype: str, shape: list[int], seed: int) -> None:
    size = int(np.prod(shape, dtype=int))
    array = np.frombuffer(random.Random(seed).randbytes(size * np.dtype(dtype).itemsize), dtype).reshape(shape)
    assert same(array_from_parts(*array_parts(array)), array)
    assert same(array_from_parts(*array_parts(array.T)), array.T.copy())


def test_decoded_arrays_are_read_only() -> None:
    plan = CODEC.decode(*CODEC.encode(make_plan(0, 0, rows=[Row(0, 1, 1, 0, True)])))
    with pytest.raises(ValueError, match="read-only"):
        plan.rows.slots[0] = 5
    assert not array_from_parts("<i4", (1,), bytearray(4)).flags.writeable


@pytest.mark.parametrize("dtype", ["float64", "float16", "int16", "object", ">i4", "bool"])
def test_arrays_of_other_dtypes_are_not_sent_and_not_received(dtype: str) -> None:
    with pytest.raises(TypeError, match="not sent"):
        array_parts(np.zeros(2, dtype))
    with pytest.raises(ValueError, match="known are"):
        array_from_parts(np.dtype(dtype).str, (2,), bytes(16))


@pytest.mark.parametrize("kind", [-1, len(MESSAGES), 999])
def test_unknown_kind_is_a_link_error(kind: int) -> None:
    with pytest.raises(LinkError, match="kind"):
        CODEC.decode(kind, b"")


@pytest.mark.parametrize("kind", range(len(MESSAGES)))
def test_body_of_another_kind_is_a_link_error(kind: int) -> None:
    body = msgspec.msgpack.encode({"nothing": "of this"})
    with pytest.raises(LinkError, match="does not decode"):
        CODEC.decode(kind, body)
    with pytest.raises(LinkError, match="does not decode"):
        CODEC.decode(kind, b"\xc1")


def _with_rows(**columns: Any) -> bytes:
    """A plan whose rows have these (dtype, shape, bytes) in place of their own."""
    plain = msgspec.msgpack.decode(CODEC.encode(make_plan(0, 0, rows=[Row(0, 1, 1, 0, True)]))[1])
    plain["rows"].update(columns)
    return msgspec.msgpack.encode(plain)


@pytest.mark.parametrize(
    "slots",
    [
        ("<f8", (1,), bytes(8)),
        ("|O", (1,), bytes(8)),
        ("<i8", (1,), bytes(8)),
        ("<f4", (1,), bytes(4)),
        ("<i4", (2,), bytes(4)),
        ("<i4", (1,), bytes(3)),
        ("<i4", (1 << 63,), bytes(4)),
        ("<i4", ("x",), bytes(4)),
        ("<i4", 1, bytes(4)),
        ("<i4", (1,), 7),
        ("<i4", (1,)),
        None,
        [1, 2, 3, 4],
    ],
    ids=str,
)
def test_array_that_is_not_the_declared_one_is_a_link_error(slots: Any) -> None:
    assert len(CODEC.decode(0, _with_rows()).rows) == 1
    with pytest.raises(LinkError, match="does not decode"):
        CODEC.decode(0, _with_rows(slots=slots))


@given(seed=st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_damaged_body_decodes_to_a_message_or_to_a_link_error_and_to_nothing_else(seed: int) -> None:
    """The checksum catches damage; what has a good checksum and bad content comes from another version or worse, and may not end the process."""
    rng = random.Random(seed)
    admit = Admission(slot=0, generation=1, tokens=[1, 2, 3], cap=9, side=Side(stop_ids=(4,)))
    message = rng.choice([make_plan(1, 1, admits=[admit], rows=[Row(0, 1, 3, 0, True)]), make_result(0, [Answer(0, 1, [5], 0, [6])])])
    kind, body = CODEC.encode(message)
    damaged = bytearray(body)
    for _ in range(rng.randrange(1, 4)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    if rng.random() < 0.3:
        del damaged[rng.randrange(len(damaged)) :]
    try:
        decoded = CODEC.decode(kind, bytes(damaged))
    except LinkError:
        return
    assert type(decoded) is type(message)
