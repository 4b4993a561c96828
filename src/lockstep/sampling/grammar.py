"""Grammars: what a request's structure is as a source for llguidance, and what may come next in it. Knows tokens as bytes; not requests or steps.

Limits are llguidance's own counts of work, so the same grammar fails at the same place everywhere, whatever else the machine does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.core.params import StructuredOutputsParams
from lockstep.errors import InvalidRequestError
from lockstep.ops.step import U32

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

SOURCE_BYTES_MAX = 256 * 1024
LEXER_STATES_MAX = 50_000
GRAMMAR_SYMBOLS_MAX = 200_000
"""A lexer state takes one or two kilobytes; a symbol is one of a grammar's productions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """tokens: the bytes of each id; of a special one, its name. special_ids: those that are no text. end_ids: those that end an answer.
    encode: of text, without special tokens."""

    tokens: Sequence[bytes]
    special_ids: Sequence[int]
    end_ids: Sequence[int]
    encode: Callable[[str], list[int]]


def grammar_source(asked: StructuredOutputsParams) -> str:
    """llguidance's form of it, one string. Raises InvalidRequestError if it is none; that it compiles is another matter."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if asked.json is not None or asked.json_object:
            schema: Any = {"type": "object"} if asked.json is None else asked.json
            options: JsonCompileOptions = {"whitespace_flexible": not asked.disable_any_whitespace}
            if asked.whitespace_pattern is not None:
                options["whitespace_pattern"] = asked.whitespace_pattern
            source = LLMatcher.grammar_from_json_schema(json.loads(schema) if isinstance(schema, str) else schema, overrides=options)
        elif asked.regex is not None:
            source = LLMatcher.grammar_from_regex(asked.regex)
        elif asked.choice is not None:
            source = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.choice))
        else:
            source = LLMatcher.grammar_from_lark(any_to_lark(asked.grammar or ""))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"structured_outputs is no {asked.kind}: {error!s:.500}", param="structured_outputs") from None
    if len(source.encode()) > SOURCE_BYTES_MAX:
        raise InvalidRequestError(
            f"structured_outputs must have at most {SOURCE_BYTES_MAX} bytes, got {len(source.encode())}", param="structured_outputs"
        )
    return source


class Grammars:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = _tokenizer(vocabulary) if vocabulary.end_ids else None

    def compile(self, source: str) -> LLMatcher:
        """A matcher at its beginning. Raises ValueError in words for a caller."""
        from llguidance import LLMatcher, LLParserLimits

        if self._tokenizer is None:
            raise ValueError("the model has no end token, which a structure needs")
        limits = LLParserLimits(max_lexer_states=LEXER_STATES_MAX, max_grammar_size=GRAMMAR_SYMBOLS_MAX, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if not matcher.is_error():
            next_ids(matcher, len(self._vocabulary.tokens))
        if matcher.is_error():
            raise ValueError(matcher.get_error()[:500])
        return matcher


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    class Wrapped:
        """What llguidance asks of a tokenizer."""

        eos_token_id = vocabulary.end_ids[0]
        bos_token_id = None
        tokens = vocabulary.tokens
        special_token_ids = tuple(vocabulary.special_ids)

        def __call__(self, text: str) -> list[int]:
            return vocabulary.encode(text)

    return LLTokenizer(TokenizerWrapper(Wrapped()), n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.end_ids))


def next_ids(matcher: LLMatcher, vocab_size: int) -> U32:
    """A mask of the ids that may come next, as `ops.step.LogitEdits` has them. Where the matcher fails it is in error, and the mask says nothing."""
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    found: U32 = mask.view(np.uint32)
    return found


class GrammarState:
    """Where one admission of a request is in its grammar. Derived state (PROTOCOL.md 14): it holds the output that it has taken, and begins anew
    where that is no beginning of the present one. start: a matcher at its beginning, which it copies."""

    def __init__(self, start: LLMatcher, vocab_size: int) -> None:
        self._start = start
        self._vocab_size = vocab_size
        self._matcher = start.deep_copy()
        self._taken: list[int] = []

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[U32 | None]:
        """What may come behind the output, and behind each of the drafts. None: the grammar has failed there. Behind a draft that may not come stands
        what may come before it: nobody gets there."""
        self._follow(output)
        matcher, found = self._matcher, [self._mask(self._matcher)]
        for i, draft in enumerate(drafts):
            matcher = matcher.deep_copy() if i == 0 else matcher
            mask = found[-1]
            if mask is None or not may_come(mask, draft):
                return found + [mask] * (len(drafts) - i)
            if not matcher.is_stopped():
                matcher.consume_token(draft)
            found.append(self._mask(matcher))
        return found

    def _follow(self, output: Sequence[int]) -> None:
        count = len(self._taken)
        if count > len(output) or self._taken != list(output[:count]):
            self._matcher, count = self._start.deep_copy(), 0
        for token in output[count:]:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
        self._taken = list(output)

    def _mask(self, matcher: LLMatcher) -> U32 | None:
        mask = next_ids(matcher, self._vocab_size)
        return None if matcher.is_error() or not mask.any() else mask


def may_come(mask: U32, token: int) -> bool:
    """A mask as `next_ids` gives it has the token."""
    return bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))
