"""Virtual time: what happens next, and chance that does not depend on what else happens. It knows nothing of engines."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from lockstep.core.digest import mix64

Action = Callable[[], None]


class Timeline:
    """Actions in the order of (time, order of asking). Seconds. `pending`: actions that are due and do not merely tick."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pending = 0
        self._order = 0
        self._heap: list[tuple[float, int, Action, bool]] = []

    def at(self, time: float, action: Action, *, ticks: bool = False) -> None:
        """ticks: a run that has nothing else left is over."""
        assert time >= self.now, (time, self.now)
        heapq.heappush(self._heap, (time, self._order, action, ticks))
        self._order += 1
        self.pending += not ticks

    def after(self, delay: float, action: Action, *, ticks: bool = False) -> None:
        self.at(self.now + delay, action, ticks=ticks)

    def step(self) -> None:
        """Let the next thing happen."""
        self.now, _, action, ticks = heapq.heappop(self._heap)
        self.pending -= not ticks
        action()


def chance(*words: int) -> float:
    """In [0, 1), a function of `words` alone: drawing one number more or less elsewhere changes nothing here."""
    value = 0
    for word in words:
        value = mix64(value ^ mix64(word))
    return value / 2.0**64


def pick(count: int, *words: int) -> int:
    """In 0 .. count, a function of `words` alone."""
    assert count > 0, (count, words)
    return min(count - 1, int(chance(*words) * count))
