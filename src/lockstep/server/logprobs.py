"""Log probabilities in the two shapes of OpenAI's API. Knows how tokens are spelled; does not know requests or chunks.

A token is spelled by its text; one that is only a part of a character by its bytes ("bytes:\\xf0\\x9f"), so that no two such tokens look alike;
every one as "token_id:17" if that was asked for. Minus infinity, which JSON has not, is null.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from lockstep.core.outputs import LogprobSequence, TokenLogprobs
from lockstep.server.responses import AlternativeLogprob, ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, PromptLogprob, PromptLogprobs
from lockstep.text.tokenizer import Tokenizer


class TokenSpelling:
    """How tokens are named in logprobs. as_ids: "token_id:17" instead of text."""

    __slots__ = ("_as_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def spell(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return self._tokenizer.token_text(token_id)

    def raw(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)


class CompletionColumns:
    """The legacy columns of one choice, chunk by chunk; keeps the count of characters so far for text_offset."""

    __slots__ = ("_characters", "_decoder", "_hidden", "_spelling")

    def __init__(self, spelling: TokenSpelling, *, hidden_ids: frozenset[int]) -> None:
        """hidden_ids: tokens that do not show in the text (special tokens that are skipped)."""
        self._spelling = spelling
        self._hidden = hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def columns(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """Columns of the next tokens, one entry of `logprobs` a token; None is told as null."""
        offsets: list[int] = []
        tops: list[dict[str, float | None] | None] = []
        tokens = [self._spelling.spell(token_id) for token_id in token_ids]
        for token_id, token, entry in zip(token_ids, tokens, logprobs, strict=True):
            offsets.append(self._characters)
            if token_id not in self._hidden:
                self._characters += len(self._decoder.decode(self._spelling.raw(token_id)))
            if entry is None:
                tops.append(None)
                continue
            top = {self._spelling.spell(i): _finite(p) for i, p in zip(entry.top_ids, entry.top_logprobs, strict=True)}
            top.setdefault(token, _finite(entry.token_logprob))
            tops.append(top)
        values = [None if entry is None else _finite(entry.token_logprob) for entry in logprobs]
        return CompletionLogprobs(text_offset=offsets, token_logprobs=values, tokens=tokens, top_logprobs=tops)


def chat_logprobs(spelling: TokenSpelling, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """The chat shape, one entry of `logprobs` a token."""
    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        alternatives = [
            AlternativeLogprob(token=spelling.spell(i), logprob=_finite(p), bytes=list(spelling.raw(i)))
            for i, p in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        content.append(
            ChatTokenLogprob(
                token=spelling.spell(token_id),
                logprob=_finite(entry.token_logprob),
                bytes=list(spelling.raw(token_id)),
                top_logprobs=alternatives,
            )
        )
    return ChatLogprobs(content=content)


def prompt_entries(columns: LogprobSequence, count: int) -> list[TokenLogprobs | None]:
    """One a token of the prompt, None for the first, with `count` alternatives."""
    return [None, *(columns.entry(i, count) for i in range(len(columns)))]


def prompt_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], columns: LogprobSequence, count: int) -> PromptLogprobs:
    """vLLM's shape: the alternatives by rank, and the token itself behind them if it is none of them."""
    told: PromptLogprobs = []
    for token_id, entry in zip(token_ids, prompt_entries(columns, count), strict=True):
        if entry is None:
            told.append(None)
            continue
        best = enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
        found = {str(i): PromptLogprob(logprob=_finite(p), rank=rank, decoded_token=tokenizer.token_text(i)) for rank, (i, p) in best if i >= 0}
        own = PromptLogprob(logprob=_finite(entry.token_logprob), rank=entry.rank, decoded_token=tokenizer.token_text(token_id))
        found.setdefault(str(token_id), own)
        told.append(found)
    return told


def _finite(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None
