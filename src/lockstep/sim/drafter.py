"""Drafters of a simulated run, from perfect to adversarial. They know every request's right answer, and are wrong where their kind says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.sim.rig import VOCABULARY
from lockstep.sim.timeline import chance, pick


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request's drafter knows: where its answer begins, and the answer."""

    kind: str
    prompt_length: int
    tokens: Sequence[int]


def propose(answers: Mapping[int, Answer], most: int, seed: int, position: int) -> Sequence[int]:
    """Drafts from `position` on, `most` or fewer, for the request with this seed; none for a seed that nobody has."""
    answer = answers.get(seed)
    if answer is None or answer.kind == "none":
        return ()
    count = most if chance(seed, position, 1) < 0.7 else pick(most + 1, seed, position, 2)
    first = position - answer.prompt_length
    return [_token(answer, seed, first + i) for i in range(count)]


def _token(answer: Answer, seed: int, index: int) -> int:
    if not 0 <= index < len(answer.tokens):
        return pick(VOCABULARY, seed, index, 3)
    right = answer.tokens[index]
    return right if _is_right(answer.kind, seed, index) else (right + 1 + pick(VOCABULARY - 1, seed, index, 4)) % VOCABULARY


def _is_right(kind: str, seed: int, index: int) -> bool:
    match kind:
        case "perfect":
            return True
        case "good":
            return chance(seed, index, 5) < 0.8
        case "random":
            return chance(seed, index, 5) < 0.3
        case "right-then-wrong":
            return index % 3 != 2
        case _:
            return False
