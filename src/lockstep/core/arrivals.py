"""What a result brings to the scheduler: is it what the requests wait for? Judged as a whole, before any of it is booked.

Knows requests and results; changes neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lockstep.core.logprobs import LogprobColumns
from lockstep.core.outputs import FinishReason
from lockstep.core.records import StepResult
from lockstep.core.request import LiveRequest
from lockstep.core.schema import FINISH_FAILED, FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from lockstep.core.types import NO_STEP
from lockstep.errors import LogError

FINISHES = {FINISH_NONE: None, FINISH_STOP: FinishReason.STOP, FINISH_LENGTH: FinishReason.LENGTH, FINISH_FAILED: FinishReason.ERROR}
"""Finish codes to what clients are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Tokens that a result brought for a request: the first has index `index` in its output. row: the result's row, rank of its logprobs.
    prompt_logprobs: with the first token, where they were asked for. A request that failed gets no token."""

    request: LiveRequest
    index: int
    row: int
    tokens: tuple[int, ...]
    finish: FinishReason | None
    prompt_logprobs: LogprobColumns | None


def check_awaited(request: LiveRequest, result: StepResult, row: int) -> None:
    """The request's oldest outstanding row is of this step, and brings as many tokens as it may. Raises LogError."""
    step, most = request.outstanding[0] if request.outstanding else (NO_STEP, 0)
    count = len(result.tokens.row(row))
    if step != result.step or not 0 < count <= most:
        raise LogError(
            f"request {request.spec.request_id!r} waits for step {step} with at most {most} tokens; step {result.step} brought {count}",
            step=result.step,
            concerned=[(int(result.slots[row]), request.generation)],
        )


def told_of_prompts(result: StepResult, request_of: Callable[[int], LiveRequest | None]) -> list[tuple[LiveRequest, LogprobColumns]]:
    """Log probabilities of prompts, by request. They go on exactly where those that have come end, else LogError; who has left its slot gets none.
    request_of: who holds a slot under a generation."""
    told = result.prompt_logprobs
    if told is None:
        return []
    found = []
    for generation in dict.fromkeys(told.generations.tolist()):
        rows = np.flatnonzero(told.generations == generation)
        request = request_of(generation)
        if request is None:
            continue
        first, end = request.prompt_logprob_start, request.prompt_length
        right = request.lacks_prompt_logprobs and first + len(rows) <= end
        if not right or (told.positions[rows] != np.arange(first, first + len(rows))).any():
            raise LogError(
                f"request {request.spec.request_id!r} lacks log probabilities of its prompt from position {first} on, below {end}; step "
                f"{result.step} brought those of {told.positions[rows]}",
                step=result.step,
                concerned=[(int(told.slots[rows[0]]), generation)],
            )
        found.append((request, told.columns.rows(rows.tolist(), request.spec.prompt_logprob_count)))
    return found
