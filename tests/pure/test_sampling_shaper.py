"""Logit edits are a function of the prefix alone, against a dumb twin that counts anew at every position."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from lockstep.core.shaping import PLAIN, Shaping
from lockstep.ops.step import LogitEdits
from lockstep.sampling.shaper import ShapedRow, Shaper

VOCABULARY = 70


def row(shaping: Shaping, prompt: Sequence[int], output: Sequence[int], drafts: Sequence[int] = (), **changes: int) -> ShapedRow:
    prefix = np.array([*prompt, *output], np.int32) if shaping.reads_history else np.zeros(0, np.int32)
    place = {"slot": 0, "generation": 0} | changes
    known = len(prompt) + len(output)
    return ShapedRow(**place, shaping=shaping, prompt_length=len(prompt), known=known, prefix=prefix, drafts=drafts, stop_ids=(5, 6))


def applied(edits: LogitEdits | None, count: int) -> list[list[float]]:
    """What becomes of fixed logits at each of `count` positions, one entry after the other."""
    logits = np.linspace(-2, 3, VOCABULARY).astype(np.float32)
    found = []
    for s in range(count):
        changed = logits.copy()
        if edits is not None:
            if edits.mask_rows[s] >= 0:
                for token in range(VOCABULARY):
                    if not edits.masks[edits.mask_rows[s], token // 32] >> (token % 32) & 1:
                        changed[token] = -np.inf
            for i in range(edits.starts[s], edits.starts[s + 1]):
                value = changed[edits.ids[i]] + edits.biases[i]
                value = value / edits.penalties[i] if value > 0 else value * edits.penalties[i]
                changed[edits.ids[i]] = value - edits.subtracts[i]
        found.append(changed.tolist())
    return found


def twin(shaping: Shaping, prompt: Sequence[int], output: Sequence[int], stops: Sequence[int] = (5, 6)) -> list[float]:
    """The same logits at one position, token by token, from the parameters' meaning."""
    wanted = []
    ends = [word for word in shaping.bad_words if len(word) <= len(output) + 1 and list(word[:-1]) == list(output[len(output) + 1 - len(word) :])]
    never = {word[-1] for word in ends} | set(stops if len(output) < shaping.min_tokens else ())
    for token, logit in enumerate(np.linspace(-2, 3, VOCABULARY).astype(np.float32)):
        if (shaping.allowed_token_ids and token not in shaping.allowed_token_ids) or token in never:
            wanted.append(-float("inf"))
            continue
        value = np.float32(logit) + np.float32(dict(shaping.logit_bias).get(token, 0.0))
        if token in prompt or token in output:
            penalty = np.float32(shaping.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        count = list(output).count(token)
        subtract = np.float32(shaping.frequency_penalty) * np.float32(count) + np.float32(shaping.presence_penalty) * np.float32(count > 0)
        wanted.append(float(value - subtract))
    return wanted


SHAPINGS = {
    "repetition": Shaping(repetition_penalty=1.3),
    "repetition below one": Shaping(repetition_penalty=0.7),
    "presence": Shaping(presence_penalty=0.6),
    "frequency": Shaping(frequency_penalty=-0.4),
    "all penalties": Shaping(repetition_penalty=1.2, presence_penalty=-1.0, frequency_penalty=0.5),
    "bias": Shaping(logit_bias=((3, 50.0), (9, -100.0))),
    "min_tokens": Shaping(min_tokens=4),
    "allowed": Shaping(allowed_token_ids=(1, 5, 33, 69)),
    "bad words": Shaping(bad_words=((7,), (1, 2), (2, 1, 1))),
    "everything": Shaping(
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        min_tokens=3,
        logit_bias=((1, 2.0), (2, -3.0)),
        allowed_token_ids=(0, 1, 2, 3, 5, 7, 64),
        bad_words=((7,), (1, 2)),
    ),
}


@pytest.mark.parametrize("shaping", SHAPINGS.values(), ids=SHAPINGS)
def test_every_position_of_every_prefix_is_as_if_counted_anew(shaping: Shaping) -> None:
    """One slot through an answer with drafts that are taken, refused, and a preemption that brings it back."""
    rng, shaper = random.Random(1), Shaper(VOCABULARY)
    prompt, output = [1, 2, 3, 3], list[int]()
    for step in range(60):
        drafts = [rng.choice((1, 2, 7, 9)) for _ in range(rng.randrange(4))]
        edits = shaper.edits([row(shaping, prompt, output, drafts, generation=step // 20)])
        assert applied(edits, len(drafts) + 1) == [twin(shaping, prompt, [*output, *drafts[:j]]) for j in range(len(drafts) + 1)]
        output += [*drafts[: rng.randrange(len(drafts) + 1)], rng.choice((1, 2, 5, 8, 40))]


def test_slot_that_changed_hands_counts_its_new_owner_alone() -> None:
    shaping, shaper = SHAPINGS["all penalties"], Shaper(VOCABULARY)
    shaper.edits([row(shaping, [1, 2], [3, 4, 4])])
    for generation, output in ((1, [3, 4, 4, 9]), (1, [8]), (0, [3])):
        assert applied(shaper.edits([row(shaping, [1, 2], output, generation=generation)]), 1) == [twin(shaping, [1, 2], output)]
    other = row(shaping, [1], [3, 9], generation=0)
    assert applied(shaper.edits([other]), 1) == [twin(shaping, [1], [3, 9])]


def test_rows_do_not_see_one_another() -> None:
    shaper = Shaper(VOCABULARY)
    rows = [row(shaping, [1, 2, slot], [5, slot], slot=slot) for slot, shaping in enumerate([*SHAPINGS.values(), PLAIN])]
    together = applied(shaper.edits(rows), len(rows))
    assert together == [applied(Shaper(VOCABULARY).edits([alone]), 1)[0] for alone in rows]


def test_requests_that_change_nothing_have_no_edits() -> None:
    assert Shaper(VOCABULARY).edits([row(PLAIN, [1], [2], [3]), row(PLAIN, [1], [])]) is None
    assert Shaper(VOCABULARY).edits([row(Shaping(min_tokens=1), [1], [2])]) is None


def test_bad_words_give_way_where_nothing_else_is_allowed() -> None:
    """Else the logits would have no finite one left, which is an error of the whole step."""
    shaping = Shaping(allowed_token_ids=(1, 2), bad_words=((1, 1), (1, 2)), min_tokens=9)
    assert applied(Shaper(VOCABULARY).edits([row(shaping, [1], [1])]), 1) == [twin(Shaping(allowed_token_ids=(1, 2)), [1], [1])]


def test_bad_words_give_way_where_they_and_the_stops_are_all_there_is() -> None:
    words = tuple((1, token) for token in range(VOCABULARY) if token not in (5, 6))
    shaping = Shaping(bad_words=words, min_tokens=9)
    assert applied(Shaper(VOCABULARY).edits([row(shaping, [1], [1])]), 1) == [twin(Shaping(min_tokens=9), [1], [1])]


def test_equal_masks_are_kept_once() -> None:
    shaping = SHAPINGS["allowed"]
    edits = Shaper(VOCABULARY).edits([row(shaping, [1], [], [2, 3], slot=0), row(PLAIN, [1], [], slot=1), row(shaping, [1], [], slot=2)])
    assert edits is not None
    assert edits.mask_rows.tolist() == [0, 0, 0, -1, 0]
    assert len(edits.masks) == 1
