"""The delivery ledger judges plans, results and events by its own account: whatever does not fit is named, with the slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from core_loop import Admission, Answer, Row, make_plan, make_request, make_result

from lockstep.core.outputs import FinishReason, TokenEvent
from lockstep.core.records import Side, StepPlan
from lockstep.core.schema import FINISH_FAILED, FINISH_LENGTH, FINISH_STOP
from lockstep.core.shaping import Shaping
from lockstep.errors import LedgerError
from lockstep.runtime.ledger import DeliveryLedger

STOP = 9
SIDE = Side(stop_ids=(STOP,), cache_salt=b"s")
ASKED: dict[str, float] = {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "logprob_count": 2, "seed": (1 << 63) + 1}


def admission(tokens: Sequence[int] = (1, 2, 3), *, slot: int = 0, generation: int = 5, **columns: float) -> Admission:
    terms = {"prompt_length": 3, "side_hash": SIDE.hash64(), "kv_salt": SIDE.kv_salt(), **ASKED}
    return Admission(slot=slot, generation=generation, tokens=tokens, cap=8, columns=terms | columns)


def opened() -> DeliveryLedger:
    ledger = DeliveryLedger()
    ledger.open(make_request("a", [1, 2, 3], 5, side=SIDE, **ASKED))
    return ledger


def plan(step: int, count: int = 1, **more: object) -> StepPlan:
    return make_plan(step, step, rows=[Row(0, 5, count, -1, True)], **more)  # type: ignore[arg-type]


def started() -> DeliveryLedger:
    """Request a holds slot 0 in generation 5; plan 0 samples it, with up to three tokens."""
    ledger = opened()
    ledger.note_plan(plan(0, 3, admits=[admission()]), ["a"])
    return ledger


def test_tokens_of_a_row_are_due_from_the_next_index_on() -> None:
    ledger = started()
    due = ledger.note_result(make_result(0, [Answer(0, 5, [4, 5])]))
    ledger.check_events(0, due, [TokenEvent(request_id="a", index=0, token_ids=(4, 5))])
    ledger.note_plan(plan(1), [])
    due = ledger.note_result(make_result(1, [Answer(0, 5, [STOP], FINISH_STOP)]))
    ledger.check_events(1, due, [TokenEvent(request_id="a", index=2, token_ids=(STOP,), finish_reason=FinishReason.STOP)])
    ledger.note_plan(make_plan(2, 2, releases=[(0, 5)]), [])
    assert ledger.audit() == []


WRONG_ANSWERS: dict[str, tuple[list[Answer], str]] = {
    "no row": ([], "no answer"),
    "a row of another slot": ([Answer(1, 5, [4])], "answers no row"),
    "a row of another generation": ([Answer(0, 4, [4])], "answers no row"),
    "two rows": ([Answer(0, 5, [4]), Answer(0, 5, [5])], "answers twice"),
    "no token": ([Answer(0, 5, [])], "0 tokens came"),
    "more tokens than were sampled": ([Answer(0, 5, [4, 4, 4, 4])], "4 tokens came for a row of at most 3"),
    "an end without a reason": ([Answer(0, 5, [4], FINISH_LENGTH)], "finish 2 came, 0 is right"),
    "a stop that goes on": ([Answer(0, 5, [STOP])], "finish 0 came, 1 is right"),
    "tokens behind a stop": ([Answer(0, 5, [STOP, 4], FINISH_STOP)], "stop at 0"),
    "a failure of a request without a grammar": ([Answer(0, 5, [4], FINISH_FAILED)], "no grammar or processor to say so"),
    "a stop that is called a length": ([Answer(0, 5, [STOP], FINISH_LENGTH)], "finish 2 came, 1 is right"),
}


@pytest.mark.parametrize(("answers", "what"), WRONG_ANSWERS.values(), ids=WRONG_ANSWERS)
def test_wrong_answer_is_named_with_its_slot(answers: list[Answer], what: str) -> None:
    with pytest.raises(LedgerError, match=what) as caught:
        started().note_result(make_result(0, answers))
    assert caught.value.step == 0
    assert len(caught.value.concerned) == 1


@pytest.mark.parametrize("finish", [0, FINISH_STOP])
def test_cap_must_end_a_request_as_length(finish: int) -> None:
    ledger = started()
    ledger.note_result(make_result(0, [Answer(0, 5, [4, 4])]))
    ledger.note_plan(plan(1, 3), [])
    with pytest.raises(LedgerError, match="after 5 of at most 8"):
        ledger.note_result(make_result(1, [Answer(0, 5, [4, 4, 4], finish)]))


def test_row_of_a_request_that_has_ended_needs_no_answer_and_may_have_none() -> None:
    ledger = started()
    ledger.note_plan(plan(1), [])
    ledger.note_plan(plan(2), [])
    ledger.note_result(make_result(0, [Answer(0, 5, [STOP], FINISH_STOP)]))
    assert ledger.note_result(make_result(1)) == {}
    with pytest.raises(LedgerError, match="after its end"):
        ledger.note_result(make_result(2, [Answer(0, 5, [4])]))


def test_answer_to_a_request_that_was_aborted_or_preempted_is_nobody_s() -> None:
    aborted, preempted = started(), started()
    aborted.close("a")
    preempted.note_plan(make_plan(1, 0, releases=[(0, 5)]), [])
    for ledger in (aborted, preempted):
        assert ledger.note_result(make_result(0, [Answer(0, 5, [4])])) == {}


@pytest.mark.parametrize(
    ("shaping", "tokens", "words"),
    [
        (Shaping(allowed_token_ids=(4, 5)), [4, 6], "not among the 2 that are allowed"),
        (Shaping(min_tokens=3), [4, STOP], "a stop came before 3 tokens"),
    ],
)
def test_token_that_shaping_forbids_is_named_though_all_replicas_agree(shaping: Shaping, tokens: list[int], words: str) -> None:
    side = dataclasses.replace(SIDE, shaping=shaping)
    ledger = DeliveryLedger()
    ledger.open(make_request("a", [1, 2, 3], 5, side=side, **ASKED))
    ledger.note_plan(plan(0, 3, admits=[admission(side_hash=side.hash64())]), ["a"])
    with pytest.raises(LedgerError, match=words):
        ledger.note_result(make_result(0, [Answer(0, 5, tokens, FINISH_STOP if STOP in tokens else 0)]))


def test_stop_is_right_from_min_tokens_on() -> None:
    side = dataclasses.replace(SIDE, shaping=Shaping(min_tokens=2))
    ledger = DeliveryLedger()
    ledger.open(make_request("a", [1, 2, 3], 5, side=side, **ASKED))
    ledger.note_plan(plan(0, 3, admits=[admission(side_hash=side.hash64())]), ["a"])
    assert ledger.note_result(make_result(0, [Answer(0, 5, [4, 5, STOP], FINISH_STOP)]))["a"].finish is FinishReason.STOP


def test_wrong_row_books_nothing_of_its_result() -> None:
    """The other request of the step, which even ended in it, is admitted again as it was."""
    ledger = opened()
    ledger.open(make_request("b", [1, 2, 3], 5, side=SIDE, **ASKED))
    both = [admission(), admission(slot=1, generation=6)]
    ledger.note_plan(make_plan(0, 0, admits=both, rows=[Row(0, 5, 3, 0, True), Row(1, 6, 3, 0, True)]), ["a", "b"])
    with pytest.raises(LedgerError, match="finish 2 came") as caught:
        ledger.note_result(make_result(0, [Answer(0, 5, [STOP], FINISH_STOP), Answer(1, 6, [4], FINISH_LENGTH)]))
    assert caught.value.concerned == ((1, 6),)
    ledger.close("b")
    ledger.begin_epoch()
    ledger.note_plan(plan(0, 3, admits=[admission()]), ["a"])
    assert ledger.note_result(make_result(0, [Answer(0, 5, [STOP], FINISH_STOP)]))["a"].finish is FinishReason.STOP


WRONG_ADMISSIONS: dict[str, tuple[Admission, str]] = {
    "another token": (admission([1, 2, 4]), "other tokens"),
    "a token less": (admission([1, 2]), "other tokens"),
    "a prompt length that is not its own": (admission(prompt_length=2), "prompt_length 2"),
    "another seed": (admission(seed=3), f"seed 3, it asked for {ASKED['seed']}"),
    "another cap": (admission(length_cap=9), "length_cap 9"),
    "another temperature": (admission(temperature=0.70001), "temperature"),
    "another top_k": (admission(top_k=1), "top_k 1"),
    "another top_p": (admission(top_p=1.0), "top_p 1"),
    "another min_p": (admission(min_p=0.0), "min_p 0"),
    "another number of logprobs": (admission(logprob_count=3), "logprob_count 3"),
    "another's stop ids": (admission(side_hash=Side(stop_ids=(STOP, 4), cache_salt=b"s").hash64()), "side_hash"),
    "another's salt": (admission(kv_salt=Side(cache_salt=b"t").kv_salt()), "kv_salt"),
}


@pytest.mark.parametrize(("wrong", "what"), WRONG_ADMISSIONS.values(), ids=WRONG_ADMISSIONS)
def test_admission_brings_what_was_asked_and_what_was_delivered(wrong: Admission, what: str) -> None:
    with pytest.raises(LedgerError, match=what):
        opened().note_plan(make_plan(0, 0, admits=[wrong]), ["a"])


def test_request_is_admitted_once_at_a_time_and_not_after_its_end() -> None:
    twice = started()
    with pytest.raises(LedgerError, match="twice"):
        twice.note_plan(make_plan(1, 0, admits=[admission(slot=1, generation=6)]), ["a"])
    ended = opened()
    ended.close("a")
    with pytest.raises(LedgerError, match="after its end"):
        ended.note_plan(make_plan(0, 0, admits=[admission()]), ["a"])


def test_readmission_knows_the_tokens_that_were_delivered_before() -> None:
    ledger = started()
    ledger.note_result(make_result(0, [Answer(0, 5, [4])]))
    ledger.note_plan(make_plan(1, 1, releases=[(0, 5)], admits=[admission([1, 2, 3, 4], generation=6)]), ["a"])
    ledger.begin_epoch()
    ledger.note_plan(make_plan(0, 0, admits=[admission([1, 2, 3, 4], slot=2, generation=7)], rows=[Row(2, 7, 4, 0, True)]), ["a"])
    assert ledger.note_result(make_result(0, [Answer(2, 7, [5])]))["a"].index == 1


@pytest.mark.parametrize(
    "records", [{"releases": [(0, 4)]}, {"releases": [(1, 5)]}, {"rows": [Row(0, 4, 1, 0, True)]}, {"rows": [Row(1, 5, 1, 0, True)]}]
)
def test_plan_that_speaks_of_another_owner_is_named(records: dict[str, list[object]]) -> None:
    with pytest.raises(LedgerError, match="the ledger has"):
        started().note_plan(make_plan(1, 0, **records), [])  # type: ignore[arg-type]


WRONG_EVENTS: dict[str, list[TokenEvent]] = {
    "none": [],
    "another index": [TokenEvent(request_id="a", index=1, token_ids=(4,))],
    "another token": [TokenEvent(request_id="a", index=0, token_ids=(5,))],
    "another request": [TokenEvent(request_id="b", index=0, token_ids=(4,))],
    "an end": [TokenEvent(request_id="a", index=0, token_ids=(4,), finish_reason=FinishReason.LENGTH)],
    "twice": [TokenEvent(request_id="a", index=0, token_ids=(4,))] * 2,
}


@pytest.mark.parametrize("events", WRONG_EVENTS.values(), ids=WRONG_EVENTS)
def test_what_clients_are_told_is_what_is_due(events: list[TokenEvent]) -> None:
    ledger = started()
    due = ledger.note_result(make_result(0, [Answer(0, 5, [4])]))
    with pytest.raises(LedgerError, match="not what the results brought") as caught:
        ledger.check_events(0, due, events)
    assert set(caught.value.request_ids) == {"a", *(event.request_id for event in events)}


@pytest.mark.parametrize("shaping", [Shaping(grammar="g"), Shaping(processors=(("module:Class", "{}"),))])
def test_a_request_that_is_left_without_a_next_token_ends_and_gets_none(shaping: Shaping) -> None:
    side = Side(shaping=shaping)
    ledger = DeliveryLedger()
    ledger.open(make_request("a", [1, 2, 3], 5, side=side, **ASKED))
    ledger.note_plan(plan(0, 3, admits=[dataclasses.replace(admission(side_hash=side.hash64(), kv_salt=side.kv_salt()), side=side)]), ["a"])
    due = ledger.note_result(make_result(0, [Answer(0, 5, [4], FINISH_FAILED)]))
    with pytest.raises(LedgerError):
        ledger.check_events(0, due, [TokenEvent(request_id="a", index=0, token_ids=(4,), finish_reason=FinishReason.ERROR)])
    ledger.check_events(0, due, [TokenEvent(request_id="a", index=0, finish_reason=FinishReason.ERROR)])
