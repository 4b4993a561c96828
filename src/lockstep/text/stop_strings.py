"""Finding stop strings in a text that arrives in parts. Knows characters; does not know tokens.

The first stop string to be complete ends the text: the occurrence with the earliest end, of those that end together the longest.
So the outcome depends on the text alone, never on how it was cut into tokens or messages.
Held back is exactly the longest end of the text that is the beginning of a stop string: the rest can no longer become part of one.

Each string is matched by the method of Knuth, Morris and Pratt: constant time a character on average, whatever the strings.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import InternalError


class StopScanner:
    """Feed it text with `push`. found: the stop string that ended the text, or None as long as there was none."""

    def __init__(self, stop: Sequence[str], *, include_stop: bool) -> None:
        """stop: non-empty strings. include_stop: the stop string itself belongs to the text."""
        if not all(stop):
            raise InternalError(f"stop strings must not be empty, got {list(stop)!r}")
        self._matchers = [_Matcher(string) for string in stop]
        self._include_stop = include_stop
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Text that is certain to be the answer's, in order. Nothing more comes once a stop string was found."""
        if self.found is not None:
            return ""
        if not self._matchers:
            return text
        window = self._held + text
        for index in range(len(self._held), len(window)):
            complete = [matcher.pattern for matcher in self._matchers if matcher.advance(window[index])]
            if complete:
                self.found = max(complete, key=len)
                self._held = ""
                end = index + 1
                return window[: end if self._include_stop else end - len(self.found)]
        keep = max(matcher.matched for matcher in self._matchers)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """matched: how many characters of the pattern the end of the text spells, as many as possible."""

    __slots__ = ("_fallback", "matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        # _fallback[n]: the longest proper beginning of pattern[:n] that is also its end.
        self._fallback = [0, 0]
        length = 0
        for character in pattern[1:]:
            length = self._extend(length, character)
            self._fallback.append(length)

    def advance(self, character: str) -> bool:
        """Take one character more; True if the pattern ends here."""
        self.matched = self._extend(self.matched, character)
        return self.matched == len(self.pattern)

    def _extend(self, length: int, character: str) -> int:
        while length and self.pattern[length] != character:
            length = self._fallback[length]
        return length + (self.pattern[length] == character)
