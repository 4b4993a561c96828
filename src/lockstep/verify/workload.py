"""The requests that every cell runs: prompts of many lengths with shared prefixes, greedy and sampled, ended by tokens, by a string and by length.

Built from the model's own plain answers, so that ends fall where they are wanted on any model. Knows tokens and parameters; runs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.core.outputs import FinishReason, TokenLogprobs
from lockstep.core.params import SamplingParams

WINDOW = 256
"""Tokens of a request in every cell, or the model's window if that is smaller."""

_PROMPT_SHARES = (0.02, 0.24, 0.05, 0.56, 0.08, 0.38, 0.13, 0.57, 0.1, 0.57, 0.06, 0.56, 0.15, 0.57, 0.19, 0.57)
_OUTPUT_SHARES = (0.2, 0.05, 0.18, 0.06, 0.2, 0.05, 0.18, 0.06, 0.18, 0.05, 0.2, 0.06, 0.18, 0.05, 0.2, 0.05)
"""Lengths of prompts and of answers as parts of the window. Short prompts with long answers and long prompts with short answers take turns,
so that some requests always decode, and grow into blocks, while others prefill."""

SHARING = frozenset({9, 11, 13, 15})
LATE = frozenset({13, 15})
"""Requests whose prompts begin alike, and those of them that come only when another request has ended."""

REQUEST_COUNT = len(_PROMPT_SHARES)
NEIGHBOUR_COUNT = 3
HELD_OPEN = 7
STOPPED_BY_TEXT = frozenset({2, 5})
LOGPROBS = 2
PROMPT_LOGPROBS: Mapping[int, int] = {2: 0, 6: 2, 14: 1}
"""Alternatives a prompt token, by request. Prompts short enough to be told in one step, so that the plain way does not cut them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: params without its final stops on the first pass. late: submitted only once another request has ended."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """tokens, one logprobs entry a token, and why it ended; what was told of its prompt, if it asked. Two answers are equal if all bits are."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish: FinishReason | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """eos_ids: end tokens in force; the model's own, and where it never ends an answer by itself one that it really emits."""

    asks: tuple[Ask, ...]
    neighbours: tuple[Ask, ...]
    eos_ids: tuple[int, ...]


def first_asks(text_ids: Sequence[int], vocab_size: int, window: int, seed: int = 0) -> tuple[Ask, ...]:
    """Requests that run to their length. text_ids: tokens of some text, from which prompts are cut (random ids where it is too short)."""
    rng = random.Random(seed)
    ids = list(text_ids) or [0]
    while len(ids) < 4 * window:
        ids.extend(rng.randrange(vocab_size) for _ in range(64))
    base = ids[: int(0.3 * window)]
    asks = []
    for i, (share, output_share) in enumerate(zip(_PROMPT_SHARES, _OUTPUT_SHARES, strict=True)):
        length = max(2, int(share * window))
        start = rng.randrange(len(ids) - length)
        prompt = ids[start : start + length]
        if i in SHARING:
            prompt = (base + prompt)[:length]
        tokens = max(3, int(output_share * window) + rng.randrange(-1, 3))
        params = replace(_params(i, rng, tokens), **_shaping(i, rng, vocab_size), prompt_logprobs=PROMPT_LOGPROBS.get(i))
        asks.append(Ask(name=f"request-{i}", prompt=tuple(prompt), params=params, late=i in LATE))
    return tuple(asks)


def _shaping(index: int, rng: random.Random, vocab_size: int) -> dict[str, Any]:
    """What changes the logits of some of the requests: each kind alone, greedy and sampled, and all together."""

    def ids(count: int) -> list[int]:
        return sorted(rng.sample(range(vocab_size), min(count, vocab_size)))

    kinds: Mapping[int, dict[str, Any]] = {
        0: {"structured_outputs": {"regex": "([a-z]{1,9}[ ,.]){1000}"}},
        1: {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1000}, "disable_any_whitespace": True}},
        3: {"repetition_penalty": 1.2},
        4: {"presence_penalty": 0.9, "frequency_penalty": 0.4},
        6: {"frequency_penalty": -0.3, "repetition_penalty": 0.95},
        8: {"repetition_penalty": 1.3},
        10: {"logit_bias": dict.fromkeys(ids(50), 4.0)},
        11: {"bad_words_token_ids": (*((token,) for token in ids(200)), (1, 2), (2, 1))},
        12: {"allowed_token_ids": ids(vocab_size // 2)},
        14: {
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.2,
            "logit_bias": dict.fromkeys(ids(20), -2.0),
            "allowed_token_ids": ids(vocab_size // 2),
            "bad_words_token_ids": tuple((token,) for token in ids(50)),
        },
    }
    return kinds.get(index, {})


def _params(index: int, rng: random.Random, max_tokens: int) -> SamplingParams:
    plain = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=rng.getrandbits(64), logprobs=LOGPROBS, ignore_eos=True)
    variants: tuple[Mapping[str, float | int], ...] = (
        {},
        {"temperature": 1.0},
        {"temperature": 1.3, "top_k": 40},
        {"temperature": 1.2, "top_p": 0.9},
        {},
        {"temperature": 1.5, "min_p": 0.02},
        {"temperature": 1.1, "top_k": 200, "top_p": 0.95, "min_p": 0.001},
        {"temperature": 0.7},
    )
    return replace(plain, **variants[index % len(variants)])  # type: ignore[arg-type]


def neighbour_asks(asks: Sequence[Ask], window: int) -> tuple[Ask, ...]:
    """Requests that are aborted on the way: they share prefixes with the others, and sample."""
    longest = [asks[9], asks[7], asks[6]][:NEIGHBOUR_COUNT]
    return tuple(
        Ask(
            name=f"neighbour-{i}",
            prompt=ask.prompt,
            params=replace(ask.params, seed=1_000_003 + i, temperature=1.0, max_tokens=min(12, window - len(ask.prompt)), ignore_eos=True),
        )
        for i, ask in enumerate(longest)
    )


def with_ends(
    asks: Sequence[Ask], answers: Mapping[str, Answer], eos_ids: Sequence[int], window: int, decode: Callable[[Sequence[int]], str]
) -> Workload:
    """Give every third request a stop token out of its own answer, let every third end by end token, leave the rest to their length, or to a stop
    string out of their text. One has its first token for a stop token and must not end for some more.
    If none of the answers that may end by end token holds one of the model, a token that one of them holds is declared one."""
    ended = []
    for i, ask in enumerate(asks):
        tokens = answers[ask.name].tokens
        if i == HELD_OPEN:
            ended.append(replace(ask, params=replace(ask.params, stop_token_ids=(tokens[0],), min_tokens=max(1, len(tokens) // 2))))
        elif i in STOPPED_BY_TEXT:
            stop = _stop_string(tokens, decode)
            ended.append(replace(ask, params=replace(ask.params, stop=(stop,) if stop else (), ignore_eos=True)))
        elif i % 3 == 1:
            ended.append(replace(ask, params=replace(ask.params, stop_token_ids=(tokens[2 * len(tokens) // 3],))))
        else:
            ended.append(replace(ask, params=replace(ask.params, ignore_eos=i % 3 == 2)))
    ends = tuple(eos_ids)
    candidates = [answers[ask.name].tokens for i, ask in enumerate(asks) if i % 3 == 0]
    if not any(token in tokens for tokens in candidates for token in ends):
        longest = max(candidates, key=len)
        ends = (*ends, longest[len(longest) // 2])
    return Workload(asks=tuple(ended), neighbours=neighbour_asks(asks, window), eos_ids=ends)


def _stop_string(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """Some characters of the text in the middle of an answer, whole ones; empty if there are none."""
    for end in range(len(tokens) // 2, len(tokens)):
        before, text = decode(tokens[: end - 1]), decode(tokens[:end])
        if text.startswith(before) and len(text) > len(before) and "\ufffd" not in text[-3:]:
            return text[-3:]
    return ""


def truncated(ask: Ask, answer: Answer, eos_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> tuple[int, ...] | None:
    """What the first pass's answer becomes once the stops are in force: an account of stops that shares no code with the engine's. None where that
    cannot be said: a request that must not end yet draws other tokens."""
    if ask.params.min_tokens:
        return None
    for stop in ask.params.stop:
        for count in range(1, len(answer.tokens) + 1):
            if stop in decode(answer.tokens[:count]):
                return answer.tokens[:count]
    stops = set(ask.params.stop_token_ids) | (set() if ask.params.ignore_eos else set(eos_ids))
    for i, token in enumerate(answer.tokens):
        if token in stops:
            return answer.tokens[: i + 1]
    return answer.tokens


def shortened(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """The same for an answer of a few tokens."""
    fewer = min(max_tokens, params.max_tokens or max_tokens)
    return replace(params, max_tokens=fewer, min_tokens=min(fewer, params.min_tokens))


def changed_prompts(asks: Sequence[Ask], vocab_size: int, *, quick: bool) -> list[tuple[str, Ask]]:
    """(name of the original, the same request with one prompt token changed and a short answer). Every position of the shorter prompts,
    spread positions of the others; quick: a few positions of a few requests."""
    changed = []
    for i, ask in enumerate(asks):
        if quick and i % 4:
            continue
        length = len(ask.prompt)
        most = 4 if quick else 24
        positions = sorted({length * k // most for k in range(most)} | {length - 1})
        for position in positions:
            prompt = list(ask.prompt)
            prompt[position] = (prompt[position] + 1 + position) % vocab_size
            if prompt[position] == ask.prompt[position]:
                prompt[position] = (prompt[position] + 1) % vocab_size
            params = shortened(ask.params, 3)
            changed.append((ask.name, Ask(name=f"{ask.name}/changed-{position}", prompt=tuple(prompt), params=params)))
    return changed
