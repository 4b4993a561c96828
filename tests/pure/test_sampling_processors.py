"""Logits processors are asked position by position, of what they answer nothing is believed, and only the row that they fail at fails."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from lockstep.core.shaping import PLAIN, Shaping
from lockstep.errors import InvalidRequestError, PluginError
from lockstep.ops.step import LogitEdits
from lockstep.sampling.logits_processor import LogitsEdit, LogitsProcessor, ModelFacts
from lockstep.sampling.processor_set import ProcessorSet
from lockstep.sampling.shaper import ShapedRow, Shaper
from logits_plugins import Drift, Faulty, Forced, NoRepeat

VOCABULARY, END = 70, 9
FACTS = ModelFacts(vocab_size=VOCABULARY, eos_token_ids=(END,))
LOADED: dict[str, LogitsProcessor] = {kind.__name__: kind(FACTS) for kind in (NoRepeat, Forced, Drift, Faulty)}
NEVER = -float("inf")


def processors() -> ProcessorSet:
    return ProcessorSet(LOADED, VOCABULARY)


def shaping(arguments: Mapping[str, Any], **others: Any) -> Shaping:
    return Shaping(processors=processors().arguments_of(arguments), **others)


def row(asked: Shaping, prompt: Sequence[int], output: Sequence[int], drafts: Sequence[int] = (), slot: int = 0) -> ShapedRow:
    prefix = np.array([*prompt, *output] if asked.reads_history else [], np.int32)
    known = len(prompt) + len(output)
    return ShapedRow(slot=slot, generation=0, shaping=asked, prompt_length=len(prompt), known=known, prefix=prefix, drafts=drafts, stop_ids=(END,))


def changed(edits: LogitEdits | None, count: int) -> list[list[float]]:
    """Logits of nought at each position, after the mask and the biases."""
    found = np.zeros((count, VOCABULARY), np.float32)
    if edits is None:
        return [line.tolist() for line in found]
    for s in range(count):
        if edits.mask_rows[s] >= 0:
            words = edits.masks[edits.mask_rows[s]]
            found[s, [token for token in range(VOCABULARY) if not words[token // 32] >> np.uint32(token % 32) & np.uint32(1)]] = NEVER
        for i in range(edits.starts[s], edits.starts[s + 1]):
            found[s, edits.ids[i]] += edits.biases[i]
    return [line.tolist() for line in found]


def twin(arguments: Mapping[str, Any], prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """What the processors mean, token by token."""
    found = []
    recent = [*prompt, *output][-arguments.get("no_repeat_last", 0) :] if "no_repeat_last" in arguments else []
    mixed = (31 * sum(prompt) + 7 * sum(output) + len(output)) % VOCABULARY
    for token in range(VOCABULARY):
        parity = (len(output) + (arguments.get("drift_half") == "odd")) % 2
        out = token in recent or ("drift_half" in arguments and token % 2 != parity)
        found.append(NEVER if out else float(arguments.get("drift", 0)) if token == mixed else 0.0)
    return found


@pytest.mark.parametrize(
    "arguments",
    [{"no_repeat_last": 3}, {"drift": 4}, {"drift": 2.5, "drift_half": "odd"}, {"drift": 7, "drift_half": "even", "no_repeat_last": 5}],
    ids=str,
)
def test_every_position_of_every_prefix_is_as_if_asked_alone(arguments: dict[str, Any]) -> None:
    """Drafts that may come are as good as tokens; behind one that may not come nobody is asked, and nothing is said."""
    rng, asked, shaper = random.Random(1), shaping(arguments), Shaper(VOCABULARY, processors=processors())
    prompt, output = [1, 2, 3, 3], list[int]()
    cut = 0
    for _ in range(60):
        drafts = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(4))]
        wanted = [twin(arguments, prompt, output)]
        for j, draft in enumerate(drafts):
            if wanted[-1][draft] == NEVER:
                cut += 1
                wanted += [[0.0] * VOCABULARY] * (len(drafts) - j)
                break
            wanted.append(twin(arguments, prompt, [*output, *drafts[: j + 1]]))
        assert changed(shaper.edits([row(asked, prompt, output, drafts)]), len(drafts) + 1) == wanted
        assert not shaper.failures
        output += [rng.randrange(VOCABULARY)]
    assert cut or "no_repeat_last" not in arguments


def test_edits_of_several_and_of_the_request_join() -> None:
    """What is allowed narrows, biases add up; bad words give way where nothing else is left."""
    asked = shaping({"drift": 4, "no_repeat_last": 2}, logit_bias=((5, 1.0), (6, 2.0)), allowed_token_ids=(4, 5, 6, 7), bad_words=((5,),))
    found = changed(Shaper(VOCABULARY, processors=processors()).edits([row(asked, [1], [7, 6])]), 1)[0]
    mixed = (31 + 7 * 13 + 2) % VOCABULARY
    assert mixed not in (4, 5, 6, 7)
    assert {token: value for token, value in enumerate(found) if value != NEVER} == {4: 0.0}
    asked = shaping({"forced_ids": [5]}, bad_words=((5,),))
    assert [i for i, value in enumerate(changed(Shaper(VOCABULARY, processors=processors()).edits([row(asked, [1], [])]), 1)[0]) if value == 0] == [5]


def test_min_tokens_gives_way_where_a_processor_leaves_nothing_but_the_end() -> None:
    shaper = Shaper(VOCABULARY, processors=processors())
    for arguments, left in (({"forced_ids": [5]}, [END]), ({"no_repeat_last": 1}, [i for i in range(VOCABULARY) if i not in (5, END)])):
        found = changed(shaper.edits([row(shaping(arguments, min_tokens=8), [1], [5])]), 1)[0]
        assert [token for token, value in enumerate(found) if value != NEVER] == left
        assert not shaper.failures


FAULTS = {
    "raises": r"RuntimeError: as it was told \(logits_plugins.py, line \d+\)",
    "exits": "SystemExit: 3",
    "unsendable": r"ValueError: \\ud800",
    "speechless": "SpeechlessError: it cannot say why",
    "writes": "read-only",
    "none of the kind": "must return a LogitsEdit with a mapping of biases, or None, got {'biases'",
    "above": f"forbidden must be token ids from 0 to {VOCABULARY - 1}, got {VOCABULARY}",
    "below": "allowed must be token ids from 0",
    "fractions": "allowed must be token ids, integers",
    "texts": "biases must be numbers",
    "nan": "biases must be finite",
    "infinite": "biases must be finite",
    "short mask": r"must have the shape \(70,\), got \(3,\)",
    "nested": "forbidden must be token ids, integers",
}


@pytest.mark.parametrize(("fault", "words"), FAULTS.items(), ids=FAULTS)
def test_what_a_processor_does_wrong_is_a_failure_of_its_row_alone(fault: str, words: str) -> None:
    shaper = Shaper(VOCABULARY, processors=processors())
    neighbours = [shaping({"drift": 4}), PLAIN, Shaping(logit_bias=((3, 2.0),))]
    rows = [row(asked, [1, 2], [4], slot=slot) for slot, asked in enumerate(neighbours)]
    alone = [changed(shaper.edits([one]), 1)[0] for one in rows]
    faulty = row(shaping({"fault": fault, "fault_after": 2}), [1], [2], [3, 4], slot=9)
    together = changed(shaper.edits([rows[0], faulty, *rows[1:]]), 6)
    assert [together[0], *together[4:]] == alone
    assert together[1:4] == [[0.0] * VOCABULARY] * 3
    assert list(shaper.failures) == [2]
    assert re.search(f"logits processor Faulty failed with .*{words}", shaper.failures[2])
    shaper.edits(rows)
    assert not shaper.failures


def test_a_position_at_which_nothing_is_left_fails_without_a_processors_words() -> None:
    shaper = Shaper(VOCABULARY, processors=processors())
    for asked in (
        shaping({"fault": "nothing"}),
        shaping({"forced_ids": [3]}, allowed_token_ids=(4,)),
        shaping({"forced_ids": [1], "no_repeat_last": 1}),
    ):
        shaper.edits([row(asked, [1], [])])
        assert shaper.failures == {0: ""}


def test_a_processor_that_is_not_loaded_where_it_is_asked_fails_its_row() -> None:
    shaper = Shaper(VOCABULARY)
    shaper.edits([row(shaping({"drift": 4}), [1], [])])
    assert "Drift is not loaded in the process that samples" in shaper.failures[0]


def test_arguments_are_a_copy_at_every_call() -> None:
    """Faulty changes the arguments that it gets; at the next position they are what they were."""
    shaper = Shaper(VOCABULARY, processors=processors())
    for _ in range(2):
        shaper.edits([row(shaping({"fault": "nothing at all"}), [1], [], [3, 4])])
        assert not shaper.failures


def test_arguments_go_to_those_that_take_them_in_the_order_of_loading() -> None:
    asked = processors().arguments_of({"drift_half": "odd", "no_repeat_last": 3, "drift": 1})
    assert asked == (("NoRepeat", '{"no_repeat_last":3}'), ("Drift", '{"drift":1,"drift_half":"odd"}'))
    assert processors().arguments_of(None) == processors().arguments_of({}) == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"unknown": 1, "drift": 1}, r"no logits processor takes 'unknown'; loaded are NoRepeat \(takes no_repeat_last\); Forced"),
        ({"no_repeat_last": "3"}, "NoRepeat refuses .*must be an integer from 1 to 1000, got '3'"),
    ],
)
def test_arguments_that_nobody_takes_or_that_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        processors().arguments_of(arguments)
    assert caught.value.param == "extra_args"


def test_without_processors_the_remedy_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="none is loaded; start the engine with --logits-processors"):
        ProcessorSet({}, VOCABULARY).arguments_of({"drift": 1})


def test_a_processor_that_fails_at_validating_is_not_the_callers_fault() -> None:
    with pytest.raises(PluginError, match=r"Faulty failed with KeyError: 'validate' \(logits_plugins.py"):
        processors().arguments_of({"fault": "validate"})


def test_side_records_differ_by_arguments() -> None:
    """So does the digest, which holds their hash."""
    different = [shaping({"drift": 1}), shaping({"drift": 2}), shaping({"no_repeat_last": 1}), shaping({"drift": 1, "no_repeat_last": 1}), PLAIN]
    # The same texts, cut in other places, and a grammar in the place of a processor.
    different += [Shaping(processors=(("a", "bc"),)), Shaping(processors=(("ab", "c"),)), Shaping(processors=(("a", "b"),), grammar="c")]
    assert len({asked.data() for asked in different}) == len(different)
    assert not any(asked.is_plain for asked in different if asked is not PLAIN)


def test_an_edit_of_sets_ranges_and_arrays_is_one_of_ids() -> None:
    class Kinds(LogitsProcessor):
        arguments, version = ("kind",), "1"

        def validate(self, arguments: Mapping[str, Any]) -> None:
            pass

        def edit(self, arguments: Mapping[str, Any], prompt_token_ids: Any, output_token_ids: Any) -> LogitsEdit:
            allowed: Any = {"set": {8, 2}, "range": range(2, 9, 6), "array": np.array([2, 8], np.uint64), "tuple": (8, 2)}
            return LogitsEdit(allowed=allowed[arguments["kind"]], biases={np.int64(8): np.float32(1.5)})

    asked = ProcessorSet({"Kinds": Kinds(FACTS)}, VOCABULARY)
    for kind in ("set", "range", "array", "tuple"):
        edit = asked.edit(asked.arguments_of({"kind": kind}), np.array([1], np.int32), np.zeros(0, np.int32))
        assert edit.mask is not None
        assert np.flatnonzero(np.unpackbits(edit.mask.view(np.uint8), bitorder="little")).tolist() == [2, 8]
        assert (edit.ids.tolist(), edit.biases.tolist()) == ([8], [1.5])
