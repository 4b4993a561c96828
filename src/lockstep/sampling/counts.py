"""`TokenCounts`: which tokens a request's prefix holds, kept from step to step. Derived state (PROTOCOL.md 14): it holds the very prefix that it was
made from, and is made again where that is no beginning of the present one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.ops.step import I32

I64 = NDArray[np.int64]


class TokenCounts:
    """prompt_length: tokens that are no output."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._seen = np.zeros(0, np.int32)
        self._index: dict[int, int] = {}
        self._outputs: list[int] = []

    def follow(self, prefix: I32) -> bool:
        """Count what `prefix` (int32, all known tokens) has more than what was counted. False, and nothing is counted, if it does not begin so."""
        count = len(self._seen)
        if count > len(prefix) or not np.array_equal(self._seen, prefix[:count]):
            return False
        self._add(prefix[count:].tolist(), count)
        self._seen = prefix
        return True

    def _add(self, tokens: Sequence[int], position: int) -> None:
        for token in tokens:
            at = self._index.setdefault(token, len(self._outputs))
            if at == len(self._outputs):
                self._outputs.append(0)
            self._outputs[at] += position >= self._prompt_length
            position += 1

    def with_drafts(self, drafts: Sequence[int]) -> tuple[I32, I64]:
        """(ids, how often each is in the output), of the prefix with these tokens behind it. An id of the prompt alone has count 0."""
        extra: dict[int, int] = {}
        for token in drafts:
            extra[token] = extra.get(token, 0) + 1
        new = [token for token in extra if token not in self._index]
        ids = np.array([*self._index, *new], np.int32)
        counts = np.array([*self._outputs, *[0] * len(new)], np.int64)
        for i, token in enumerate(new, len(self._outputs)):
            counts[i] = extra[token]
        for token, count in extra.items():
            if token in self._index:
                counts[self._index[token]] += count
        return ids, counts
