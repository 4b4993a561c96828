"""On GSM8K questions our engine answers, in float32, as transformers does with the same file, and finds the same logits at every position.

An answer may differ only where transformers' own two best choices are closer than GAP_MAX. 8 questions always, the first 64 as a slow test.
"""

from __future__ import annotations

import pytest

from agreement import ANSWER_TOKENS, Agreement, Transformers, compare, greedy_answers, our_program, questions
from lockstep.errors import CheckpointError
from lockstep.weights import find_model
from rig import Stages

GAP_MAX = 1e-4
LOGIT_ERROR_MAX = 5e-4
THREADS = 2


@pytest.fixture(scope="module")
def theirs() -> Transformers:
    try:
        find_model("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    return Transformers(THREADS)


@pytest.fixture(scope="module")
def stages(theirs: Transformers) -> Stages:
    return our_program(threads=THREADS)


@pytest.fixture(scope="module")
def few(theirs: Transformers) -> list[tuple[list[int], list[int]]]:
    return greedy_answers(questions(8), threads=THREADS)


def assert_agree(found: Agreement) -> None:
    assert found.logit_error <= LOGIT_ERROR_MAX, found
    assert found.first_difference is None or found.gap < GAP_MAX, found


def assert_same_prompts(theirs: Transformers, asked: list[str], answers: list[tuple[list[int], list[int]]]) -> None:
    for question, (prompt, answer) in zip(asked, answers, strict=True):
        assert prompt == theirs.chat_ids(question)
        assert 1 <= len(answer) <= ANSWER_TOKENS


def test_prompts_answers_and_all_logits_of_eight_questions_are_those_of_transformers(
    theirs: Transformers, stages: Stages, few: list[tuple[list[int], list[int]]]
) -> None:
    assert_same_prompts(theirs, questions(8), few)
    for found in compare(stages, theirs, few):
        assert_agree(found)


def test_own_generation_of_transformers_gives_the_same_answer(theirs: Transformers, few: list[tuple[list[int], list[int]]]) -> None:
    prompt, answer = few[0]
    assert theirs.greedy(prompt, ANSWER_TOKENS) == answer


@pytest.mark.slow
def test_prompts_answers_and_all_logits_of_64_questions_are_those_of_transformers(theirs: Transformers, stages: Stages) -> None:
    asked = questions(64)
    answers = greedy_answers(asked, threads=THREADS)
    assert_same_prompts(theirs, asked, answers)
    for found in compare(stages, theirs, answers):
        assert_agree(found)
