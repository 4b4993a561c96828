"""`LinkNumbers`: what the receiving end makes of a message's epoch and number, before anybody looks into it (PROTOCOL.md 21).

    older epoch    dropped: whoever sent it did not know yet that its epoch is over
    newer epoch    waits until that epoch begins here
    this epoch     the next number is taken; a gap, a repeat or disorder is an error at once, never a silent wait

A link of an epoch is renewed by the next one. One that belongs to a process's life outlives epochs, so it goes on behind the gap that it reported.

It knows numbers only; frames carry them between processes, and the simulator uses them without frames.
"""

from __future__ import annotations

from enum import Enum

from lockstep.errors import LinkError


class Verdict(Enum):
    TAKE = "take"
    DROP = "drop"
    WAIT = "wait"


class LinkNumbers:
    """Of every link that leads to `destination`. Numbers count from 0 within an epoch, a sender at a time."""

    def __init__(self, destination: int, epoch: int = 0) -> None:
        self.destination = destination
        self.epoch = epoch
        self._next: dict[int, int] = {}
        self._lives: dict[int, int] = {}

    def begin(self, epoch: int) -> None:
        """A new epoch: every link that belongs to epochs counts from 0 again."""
        assert epoch > self.epoch, (epoch, self.epoch)
        self.epoch = epoch
        self._next = {source: number for source, number in self._next.items() if source in self._lives}

    def renew(self, source: int, life: int) -> None:
        """This source belongs to no epoch of the log: what it sends is numbered from 0 in its life, whatever epochs begin meanwhile.
        life: where its messages have their epoch; a later one is larger."""
        assert life >= self._lives.get(source, life), (source, life, self._lives)
        self._lives[source] = life
        self._next[source] = 0

    def accept(self, source: int, epoch: int, number: int) -> Verdict:
        """Raises LinkError for a message that is not the next one of its link."""
        present = self._lives.get(source, self.epoch)
        if epoch < present:
            return Verdict.DROP
        if epoch > present:
            return Verdict.WAIT
        expected = self._next.get(source, 0)
        if number != expected:
            if source in self._lives:
                self._next[source] = max(expected, number + 1)
            raise LinkError(f"link {source} -> {self.destination}, epoch {epoch}: message {expected} comes next, got message {number}")
        self._next[source] = expected + 1
        return Verdict.TAKE
