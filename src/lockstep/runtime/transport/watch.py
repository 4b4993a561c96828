"""`Watch`: which stages are silent, and whether the log makes progress.

Time is an argument. It knows heartbeats and steps; not processes or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.runtime.messages import Heartbeat

ABSENCE_S = 1.0
"""Whoever watches looks several times a second; a longer gap means that it was not running itself."""


FIRST_WORD_S = 10.0
"""What a process that is started again may take to its first heartbeat, beyond the silence that any stage may keep. The first start may take longer:
nothing is in the machine's memory yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """startup_s: from the beginning of an epoch until every stage is ready. heartbeat_s: of silence. step_s: without a result."""

    startup_s: float
    heartbeat_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """What stands still, in words, and which stages must be started again for it."""

    text: str
    stages: tuple[int, ...] = ()


class Watch:
    """All times in seconds, of one clock that never goes back."""

    def __init__(self, stage_count: int, timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self._heard: list[float | None] = [None] * stage_count
        self._last = [_unheard(index) for index in range(stage_count)]
        self._suspect: int | None = None
        self._looked = now
        self.begin(now)

    def begin(self, now: float) -> None:
        """An epoch begins: steps count from 0 again, and stages get time to be ready."""
        self._sent = self._returned = 0
        self._begun = self._progress = now

    def end_beginning(self) -> None:
        """Every stage is ready, also the one that a step hung on."""
        self._suspect = None

    # What is seen

    def note_restart(self, index: int, now: float) -> None:
        """The stage is started again, and has not spoken yet."""
        self._heard[index] = now + FIRST_WORD_S
        self._last[index] = _unheard(index)
        if self._suspect == index:
            self._suspect = None

    def hear(self, index: int, now: float) -> None:
        self._heard[index] = now

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._last[heartbeat.stage] = heartbeat

    def note_plan(self, now: float) -> None:
        if self._sent == self._returned:
            self._progress = now
        self._sent += 1

    def note_results(self, count: int, now: float) -> None:
        if count:
            self._returned += count
            self._progress = now

    def last(self, index: int) -> Heartbeat:
        """What the stage said last of itself."""
        return self._last[index]

    # What follows

    def forgive_absence(self, now: float) -> None:
        """Time in which this process did not watch (stopped and continued together with its stages, say) is nobody's silence."""
        absent_s = now - self._looked - ABSENCE_S
        self._looked = now
        if absent_s > 0:
            self._progress = min(now, self._progress + absent_s)
            self._begun = min(now, self._begun + absent_s)
            self._heard = [None if heard is None else max(heard, min(now, heard + absent_s)) for heard in self._heard]

    def silent(self, now: float) -> list[int]:
        return [index for index, heard in enumerate(self._heard) if heard is not None and now - heard > self._timeouts.heartbeat_s]

    def look(self, now: float, unready: Sequence[int]) -> Stall | None:
        """unready: stages that have not begun the present epoch."""
        self.forgive_absence(now)
        return self._silence(now) or self._late_start(now, unready) or self._standstill(now)

    def _silence(self, now: float) -> Stall | None:
        silent = self.silent(now)
        if not silent:
            return None
        said = [f"stage {i} has not answered for {now - (self._heard[i] or 0.0):.1f} s, last at step {self._last[i].step}" for i in silent]
        return Stall(text=f"{'; '.join(said)}; it is stopped or its machine is overloaded", stages=tuple(silent))

    def _late_start(self, now: float, unready: Sequence[int]) -> Stall | None:
        waited_s = now - self._begun
        if self._suspect in unready and waited_s > self._timeouts.heartbeat_s:
            index, self._suspect = self._suspect, None
            assert index is not None
            return Stall(text=f"stage {index} has hung in a step and does not begin another epoch within {waited_s:.1f} s", stages=(index,))
        if unready and waited_s > self._timeouts.startup_s:
            text = f"stages {list(unready)} are not ready after {self._timeouts.startup_s:g} s; raise startup_timeout_s if they load slowly"
            return Stall(text=text, stages=tuple(unready))
        return None

    def _standstill(self, now: float) -> Stall | None:
        """Names the link that the step waits on. The stage at its far end is suspect: others wait on it, and it waits for nobody."""
        waited_s = now - self._progress
        if self._sent == self._returned or waited_s <= self._timeouts.step_s:
            return None
        step = self._returned
        waiting = next((heartbeat for heartbeat in self._last if heartbeat.step <= step), None)
        if waiting is None:
            self._suspect = len(self._last) - 1
            why = f"stage {self._suspect} has begun it and gives no result"
        else:
            self._suspect = waiting.stage - 1 if waiting.stage > 0 else None
            why = f"stage {waiting.stage} at step {waiting.step} waits for {waiting.waits_for}"
        return Stall(text=f"step {step} has no result after {waited_s:.0f} s: {why}")


def _unheard(index: int) -> Heartbeat:
    return Heartbeat(stage=index, step=-1, waits_for="start")
