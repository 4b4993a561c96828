"""The text of an answer while its tokens arrive. Knows tokens and stop strings; does not know requests or HTTP.

Joined, the deltas are `tokenizer.decode` of all tokens, up to a stop string; how tokens are spread over calls makes no difference.
Work is constant a token: nothing is decoded twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import InternalError
from lockstep.text.stop_strings import StopScanner
from lockstep.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """text: new text. token_count: tokens of this call that belong to the answer; those after the one that completed a stop string do not.
    stopped: the stop string that has ended the text, if one has; later deltas are empty and repeat it."""

    text: str
    token_count: int
    stopped: str | None = None


class TextStream:
    """One answer. Call `push` for every run of new tokens and `finish` once at the end, whatever ended it.

    An unfinished character is held back until its bytes are there, and so is the end of the text that may become a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """min_tokens: stop strings are not looked for in the text of so many first tokens. prompt_tail: the last tokens of the prompt where the text
        is to go on from it. Then it does not begin a text, whose first space some tokenizers drop. A character that begins there and ends in the
        answer belongs to the answer."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._pieces = tokenizer.spelling.stream()
        self._scanner = StopScanner(stop, include_stop=include_stop)
        self._unscanned = min_tokens
        self._finished = False
        for token_id in prompt_tail:
            self._text_of(token_id)

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Text that these tokens make certain."""
        if self._finished:
            raise InternalError(f"tokens {list(token_ids)} came after the text was finished")
        texts: list[str] = []
        count = 0
        for token_id in token_ids:
            if self._scanner.found is not None:
                break
            text = self._text_of(token_id)
            texts.append(self._scanner.push(text) if self._unscanned <= 0 else text)
            self._unscanned -= 1
            count += 1
        return TextDelta(text="".join(texts), token_count=count, stopped=self._scanner.found)

    def finish(self) -> TextDelta:
        """What was held back, once. A stop string can still be completed by it: by the replacement characters of a broken end."""
        if self._finished or self._scanner.found is not None:
            self._finished = True
            return TextDelta(text="", token_count=0, stopped=self._scanner.found)
        self._finished = True
        text = self._scanner.push(self._pieces.flush()) + self._scanner.flush()
        return TextDelta(text=text, token_count=0, stopped=self._scanner.found)

    def _text_of(self, token_id: int) -> str:
        piece = None if token_id in self._skipped else self._tokenizer.token_piece(token_id)
        return "" if piece is None else self._pieces.push(piece)
