"""What may come next in a grammar: behind an output, behind drafts, and after the output is another one. Over a vocabulary of bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

from lockstep.core.params import StructuredOutputsParams
from lockstep.core.shaping import Shaping
from lockstep.errors import InvalidRequestError
from lockstep.ops.step import U32
from lockstep.sampling.grammar import SOURCE_BYTES_MAX, Grammars, GrammarState, Vocabulary, grammar_source
from lockstep.sampling.grammar_shelf import GrammarShelf
from lockstep.sampling.shaper import ShapedRow, Shaper

END = 256
VOCABULARY = Vocabulary(
    tokens=[*(bytes([i]) for i in range(256)), b"<end>"], special_ids=[END], end_ids=[END], encode=lambda text: list(text.encode())
)
SIZE = len(VOCABULARY.tokens)


def state_of(**asked: object) -> GrammarState:
    return GrammarState(Grammars(VOCABULARY).compile(grammar_source(StructuredOutputsParams.of(asked))), SIZE)  # type: ignore[arg-type]


def ids(mask: U32 | None) -> set[int]:
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def of(text: str) -> set[int]:
    return set(text.encode())


def test_masks_are_what_the_regex_allows_and_the_end_only_where_it_may_end() -> None:
    state = state_of(regex="a(bc|bd)?")
    assert ids(state.masks([], [])[0]) == of("a")
    assert ids(state.masks(list(b"a"), [])[0]) == of("b") | {END}
    assert ids(state.masks(list(b"ab"), [])[0]) == of("cd")
    assert ids(state.masks(list(b"abc"), [])[0]) == {END}
    assert ids(state.masks([*b"abc", END, END], [])[0]) == {END}


def test_another_output_makes_it_begin_anew() -> None:
    state = state_of(regex="(a|xy)b")
    assert ids(state.masks(list(b"a"), [])[0]) == of("b")
    assert ids(state.masks(list(b"x"), [])[0]) == of("y")
    assert ids(state.masks([], [])[0]) == of("ax")
    assert ids(state.masks(list(b"xy"), [])[0]) == of("b")


@pytest.mark.parametrize("drafts", [b"", b"b", b"bc", b"bx", b"xb", b"bcx"])
def test_masks_behind_drafts_are_those_of_the_output_with_them(drafts: bytes) -> None:
    """And looking ahead changes nothing: the next step sees what it would have seen."""
    state = state_of(regex="abc(d|e)")
    masks = state.masks(list(b"a"), list(drafts))
    assert len(masks) == len(drafts) + 1
    reached = True
    for i in range(len(drafts) + 1):
        reached = reached and (i == 0 or drafts[i - 1] in ids(masks[i - 1]))
        if reached:
            alone = state_of(regex="abc(d|e)").masks([*b"a", *drafts[:i]], [])[0]
            assert ids(masks[i]) == ids(alone)
    assert ids(state.masks(list(b"a"), [])[0]) == of("b")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"regex": "(("}, "unclosed"),
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 3}}, "Unsatisfiable"),
        ({"grammar": "start: nowhere"}, "nowhere"),
    ],
)
def test_what_does_not_compile_says_why(asked: dict[str, object], words: str) -> None:
    source = grammar_source(StructuredOutputsParams.of(asked))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        Grammars(VOCABULARY).compile(source)


@pytest.mark.parametrize("asked", [{"json": "{"}, {"regex": "a" * (SOURCE_BYTES_MAX + 1)}, {"json": "[1]"}])
def test_what_is_no_source_is_refused_by_name(asked: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        Grammars(VOCABULARY).compile(grammar_source(StructuredOutputsParams.of(asked)))  # type: ignore[arg-type]
    assert caught.value.param == "structured_outputs"


def test_without_an_end_token_nothing_compiles() -> None:
    endless = Vocabulary(tokens=VOCABULARY.tokens, special_ids=[END], end_ids=[], encode=VOCABULARY.encode)
    with pytest.raises(ValueError, match="no end token"):
        Grammars(endless).compile(grammar_source(StructuredOutputsParams(regex="a")))


# In the shaper


def row(shaping: Shaping, output: bytes, drafts: Sequence[int] = (), *, generation: int = 1) -> ShapedRow:
    prefix = np.array([1, 2, *output], np.int32)
    return ShapedRow(
        slot=0, generation=generation, shaping=shaping, prompt_length=2, known=len(prefix), prefix=prefix, drafts=list(drafts), stop_ids=[END]
    )


def shaper() -> Shaper:
    return Shaper(SIZE, GrammarShelf(lambda: VOCABULARY, 4))


def shaped(regex: str, **more: object) -> Shaping:
    return Shaping(grammar=grammar_source(StructuredOutputsParams(regex=regex)), **more)  # type: ignore[arg-type]


def test_allowed_ids_and_the_grammar_must_both_allow() -> None:
    made = shaper()
    edits = made.edits([row(shaped("[ab]c", allowed_token_ids=(*b"bc", 7)), b"")])
    assert edits is not None
    assert ids(edits.masks[0]) == of("b")
    assert not made.failures
    made.edits([row(shaped("[ab]c", allowed_token_ids=(7, 8)), b"", b"a", generation=2)])
    assert made.failures == {0: "", 1: ""}
    made.edits([row(shaped("[ab]c"), b"a", generation=3)])
    assert not made.failures


def test_bad_words_and_min_tokens_give_way_where_the_grammar_has_nothing_else() -> None:
    def never(shaping: Shaping, output: bytes) -> set[int]:
        edits = shaper().edits([row(shaping, output)])
        assert edits is not None
        return {int(token) for token, bias in zip(edits.ids, edits.biases, strict=True) if bias == -np.inf}

    assert never(shaped("[ab]c", bad_words=((ord("a"),),)), b"") == of("a")
    assert never(shaped("[ab]c", bad_words=((ord("a"),), (ord("b"),))), b"") == set()
    assert never(shaped("ab?", min_tokens=5), b"a") == {END}
    assert never(shaped("ab?", min_tokens=5), b"ab") == set()


def test_grammars_that_were_put_away_are_compiled_again() -> None:
    shelf = GrammarShelf(lambda: VOCABULARY, 1)
    sources = {text: grammar_source(StructuredOutputsParams(regex=text)) for text in ("ab", "cd")}
    for text, source in sources.items():
        shelf.prepare(text, source)
    while shelf.is_preparing:
        assert all(error == "" for _, error in shelf.take_prepared())
    assert [ids(shelf.state_of(text, source).masks([], [])[0]) for text, source in sources.items()] == [of("a"), of("c")]
    shelf.prepare("bad", grammar_source(StructuredOutputsParams(regex="((")))
    told = []
    while shelf.is_preparing:
        told += shelf.take_prepared()
    assert [(key, bool(re.search("unclosed", error))) for key, error in told] == [("bad", True)]
