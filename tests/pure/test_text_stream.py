"""Streams of text, against decoding everything at once and against a dumb search for stop strings."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import KINDS, LINES, tiny

from lockstep.errors import InternalError
from lockstep.text import TextDelta, TextStream, Tokenizer
from lockstep.text.stop_strings import StopScanner

FEW_CHARACTERS = st.text(alphabet="ab é", min_size=1, max_size=4)


@st.composite
def token_runs(draw: st.DrawFn, kind: str) -> list[list[int]]:
    """Tokens in runs, as they might arrive: random ids (one beyond the vocabulary among them) and ids of real text."""
    tokenizer, _ = tiny(kind)
    random_ids = st.lists(st.integers(0, tokenizer.vocab_size), max_size=6)
    real_ids = st.sampled_from(LINES).map(lambda line: tokenizer.encode(line, add_special_tokens=False))
    ids = [token for part in draw(st.lists(random_ids | real_ids, max_size=5)) for token in part]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def stream_all(stream: TextStream, runs: Sequence[Sequence[int]]) -> list[TextDelta]:
    return [*(stream.push(run) for run in runs), stream.finish()]


def joined(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_deltas_join_to_what_decoding_everything_gives(kind: str, skip: bool) -> None:
    tokenizer, backend = tiny(kind)

    @given(token_runs(kind))
    @settings(max_examples=150, deadline=None, derandomize=True)
    def check(runs: list[list[int]]) -> None:
        ids = [token for run in runs for token in run]
        deltas = stream_all(TextStream(tokenizer, skip_special_tokens=skip), runs)
        assert joined(deltas) == tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)
        assert [delta.token_count for delta in deltas] == [*map(len, runs), 0]

    check()


def dumb_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """End of the first complete stop string, and which; of those that end together the longest."""
    for end in range(1, len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            return end, max(complete, key=len)
    return None


def held_length(text: str, stop: Sequence[str]) -> int:
    return max((size for string in stop for size in range(1, len(string)) if text.endswith(string[:size])), default=0)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback-strip"])
def test_the_first_complete_stop_string_ends_text_and_count_and_only_its_beginnings_are_held(kind: str, include: bool) -> None:
    tokenizer, _ = tiny(kind)
    letters = [token for token in range(tokenizer.vocab_size) if set(tokenizer.token_text(token)) <= set("ab the")] + tokenizer.encode("é")

    @given(
        st.lists(st.sampled_from(letters), max_size=30),
        st.lists(FEW_CHARACTERS | st.sampled_from(["the", "he t", "�"]), max_size=4),
    )
    @settings(max_examples=300, deadline=None, derandomize=True)
    def check(ids: list[int], stop: list[str]) -> None:
        plain = TextStream(tokenizer)
        texts = [plain.push([token]).text for token in ids]
        last = plain.finish().text
        text, stream = "", TextStream(tokenizer, stop=stop, include_stop=include)
        got, count, ended = "", 0, None
        for token, new in zip(ids, texts, strict=True):
            delta = stream.push([token])
            text += new
            got += delta.text
            count += delta.token_count
            ended = dumb_stop(text, stop)
            if ended is not None:
                break
            assert got == text[: len(text) - held_length(text, stop)]
            assert delta.stopped is None
        delta = stream.finish()
        got += delta.text
        if ended is None:
            text += last
            ended = dumb_stop(text, stop)
        assert delta.token_count == 0
        assert delta.stopped == (ended[1] if ended else None)
        assert got == (text if ended is None else text[: ended[0] - (0 if include else len(ended[1]))])
        in_one = stream_all(TextStream(tokenizer, stop=stop, include_stop=include), [ids])
        assert (joined(in_one), in_one[0].token_count, in_one[1].stopped) == (got, count, delta.stopped)

    check()


def test_stop_strings_that_overlap_themselves_are_found_in_every_short_text() -> None:
    words = ["".join(letters) for size in (1, 2, 3, 4) for letters in itertools.product("ab", repeat=size)]
    texts = ["".join(letters) for letters in itertools.product("ab", repeat=7)]
    for stop in [[word] for word in words] + [["aab", "bab"], ["abab", "ba"]]:
        for text in texts:
            scanner = StopScanner(stop, include_stop=False)
            got = "".join(map(scanner.push, text))
            ended = dumb_stop(text, stop)
            assert scanner.found == (ended[1] if ended else None)
            assert got + scanner.flush() == (text[: ended[0] - len(ended[1])] if ended else text)


def byte_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a byte."""
    single = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))}
    return [single[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("text", ["😀", "안녕", "é", "a😀b"])
def test_a_character_split_over_tokens_arrives_whole_at_its_last_byte(text: str) -> None:
    tokenizer, _ = tiny("byte-level")
    stream = TextStream(tokenizer)
    arrived = [stream.push([token]).text for token in byte_tokens(tokenizer, text)]
    expected: list[str] = []
    for character in text:
        expected += [""] * (len(character.encode()) - 1) + [character]
    assert arrived == expected
    assert stream.finish().text == ""


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_never_ends_is_flushed_once_as_a_replacement(cut: int) -> None:
    tokenizer, backend = tiny("byte-level")
    ids = byte_tokens(tokenizer, "a😀")[: 1 + cut]
    stream = TextStream(tokenizer)
    assert stream.push(ids).text == "a"
    assert stream.finish().text == "\ufffd" == backend.decode(ids)[1:]
    assert stream.finish().text == ""


@pytest.mark.parametrize("marker", ["</tool_call>", "<|end|>", "\n\nUser:"])
def test_an_answer_that_ends_in_the_beginning_of_a_stop_string_loses_nothing(marker: str) -> None:
    tokenizer, _ = tiny("byte-level")
    for size in range(1, len(marker)):
        answer = "text " + marker[:size]
        stream = TextStream(tokenizer, stop=[marker])
        deltas = stream_all(stream, [[token] for token in byte_tokens(tokenizer, answer)])
        assert joined(deltas) == answer
        assert joined(deltas[:-1]) == "text "
        assert deltas[-1].text == marker[:size]


def test_a_stop_string_over_three_tokens_is_found_at_every_split() -> None:
    tokenizer, _ = tiny("byte-level")
    ids = byte_tokens(tokenizer, "yes END no")
    for first in range(len(ids) + 1):
        for second in range(first, len(ids) + 1):
            deltas = stream_all(TextStream(tokenizer, stop=["END"]), [ids[:first], ids[first:second], ids[second:]])
            assert joined(deltas) == "yes "
            assert sum(delta.token_count for delta in deltas) == len("yes END")
            assert deltas[-1].stopped == "END"


def test_the_earliest_end_wins_then_the_longest() -> None:
    tokenizer, _ = tiny("byte-level")
    for stop, text, found in ((["abcd", "bc"], "", "bc"), (["c", "bc", "abc"], "x", "abc"), (["bd", "ab"], "", "ab")):
        ids = byte_tokens(tokenizer, "xabcd"[0 if text else 1 :])
        deltas = stream_all(TextStream(tokenizer, stop=stop), [ids])
        assert deltas[-1].stopped == found
        assert joined(deltas) == (text if found != "bc" else "a")


def test_special_tokens_are_text_only_where_asked_for_and_can_then_stop() -> None:
    tokenizer, _ = tiny("byte-level")
    ids = [*tokenizer.encode("the cat"), 1, *tokenizer.encode(" sat")]
    assert joined(stream_all(TextStream(tokenizer, stop=["</s>"]), [ids])) == "the cat sat"
    assert joined(stream_all(TextStream(tokenizer, skip_special_tokens=False), [ids])) == "the cat</s> sat"
    assert joined(stream_all(TextStream(tokenizer, stop=["</s>"], skip_special_tokens=False), [ids])) == "the cat"


@pytest.mark.parametrize(("kind", "space"), [("byte-fallback-strip", ""), ("metaspace", ""), ("byte-level", " "), ("byte-fallback", " ")])
def test_a_leading_space_is_dropped_at_the_beginning_of_a_text_and_kept_after_a_prompt(kind: str, space: str) -> None:
    tokenizer, _ = tiny(kind)
    word = next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b" the")
    assert joined(stream_all(TextStream(tokenizer), [[word, word]])) == f"{space}the the"
    assert joined(stream_all(TextStream(tokenizer, prompt_tail=[word]), [[word, word]])) == " the the"


def test_a_character_begun_in_the_prompt_belongs_to_the_answer() -> None:
    tokenizer, _ = tiny("byte-level")
    ids = byte_tokens(tokenizer, "x😀")
    assert joined(stream_all(TextStream(tokenizer, prompt_tail=ids[:3]), [ids[3:]])) == "😀"


def test_nothing_comes_after_the_end() -> None:
    tokenizer, _ = tiny("byte-level")
    stream = TextStream(tokenizer, stop=["b"])
    ids = byte_tokens(tokenizer, "abab")
    assert stream.push(ids) == TextDelta(text="a", token_count=2, stopped="b")
    assert stream.push(ids) == TextDelta(text="", token_count=0, stopped="b")
    assert stream.finish() == stream.finish() == TextDelta(text="", token_count=0, stopped="b")
    with pytest.raises(InternalError, match="after the text was finished"):
        stream.push(ids)
    with pytest.raises(InternalError, match="must not be empty"):
        TextStream(tokenizer, stop=["a", ""])


def test_cost_is_linear_even_for_stop_strings_that_almost_match() -> None:
    tokenizer, _ = tiny("byte-level")
    token = byte_tokens(tokenizer, "a")[0]
    times = []
    for size in (4_000, 16_000):
        stop = "a" * size + "b"
        best = float("inf")
        for _ in range(3):
            stream = TextStream(tokenizer, stop=[stop])
            start = time.perf_counter()
            for _ in range(size):
                stream.push([token])
            assert stream.finish().text == "a" * size
            best = min(best, time.perf_counter() - start)
        times.append(best)
    assert times[1] < 8 * times[0]
