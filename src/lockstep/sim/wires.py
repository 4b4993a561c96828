"""Both ends of simulated links: how a message becomes a `Wire`, and what the receiver makes of it.

`NumberedEnd` keeps objects and numbers, by the numbering that frames use (`runtime.transport.numbers`); `FramedEnd` sends the very bytes that would
cross a socket. When a wire arrives is the network's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lockstep.errors import LinkError
from lockstep.runtime.messages import StageStart
from lockstep.runtime.stage import DRIVER
from lockstep.runtime.transport.frames import LinkReader, LinkWriter
from lockstep.runtime.transport.numbers import LinkNumbers, Verdict
from lockstep.sim.timeline import pick


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One message on its way. frames: its bytes, where links carry bytes. damaged: a checksum would not fit. fault: what was done to it, or ''."""

    source: int
    destination: int
    epoch: int
    number: int
    message: Any
    frames: tuple[bytes, ...] = ()
    damaged: bool = False
    fault: str = ""

    def damage(self, *words: int) -> Wire:
        """With one bit flipped, chosen by `words`."""
        if not self.frames:
            return replace(self, damaged=True, fault="damage")
        at = pick(sum(len(part) for part in self.frames), *words)
        parts = []
        for part in self.frames:
            flipped = bytearray(part)
            if 0 <= at < len(part):
                flipped[at] ^= 1 << pick(8, at, *words)
            at -= len(part)
            parts.append(bytes(flipped))
        return replace(self, frames=tuple(parts), fault="damage")


class End(Protocol):
    """One end of every link that leads to or from `place` (a stage, or DRIVER)."""

    @property
    def epoch(self) -> int: ...

    def begin(self, epoch: int) -> None:
        """A new epoch begins here; what came early for it is due."""
        ...

    def pack(self, destination: int, message: Any) -> Wire: ...

    def unpack(self, wire: Wire) -> Any | None:
        """The message, or None if it is dropped or has to wait. Raises LinkError."""
        ...

    def take_due(self) -> Any | None:
        """The next message that had to wait for the present epoch, or None."""
        ...


MakeEnd = Callable[[int, int], End]
"""(place, epoch) -> end."""


class NumberedEnd:
    def __init__(self, place: int, numbers: LinkNumbers) -> None:
        self._place = place
        self._numbers = numbers
        self._sent: dict[int, int] = {}
        self._waiting: list[Wire] = []
        self._due: deque[Wire] = deque()

    @property
    def epoch(self) -> int:
        return self._numbers.epoch

    def begin(self, epoch: int) -> None:
        self._numbers.begin(epoch)
        self._sent.clear()
        self._due.extend(self._waiting)
        self._waiting = []

    def pack(self, destination: int, message: Any) -> Wire:
        number = self._sent.get(destination, 0)
        self._sent[destination] = number + 1
        return Wire(source=self._place, destination=destination, epoch=self.epoch, number=number, message=message)

    def unpack(self, wire: Wire) -> Any | None:
        if wire.damaged:
            raise LinkError(f"message {wire.number} on the link {wire.source} -> {wire.destination} arrived damaged (checksum)")
        if wire.source == DRIVER and isinstance(wire.message, StageStart) and wire.epoch > self.epoch:
            self.begin(wire.epoch)
        verdict = self._numbers.accept(wire.source, wire.epoch, wire.number)
        if verdict is Verdict.WAIT:
            self._waiting.append(wire)
        return wire.message if verdict is Verdict.TAKE else None

    def take_due(self) -> Any | None:
        while self._due:
            if (message := self.unpack(self._due.popleft())) is not None:
                return message
        return None


class FramedEnd:
    def __init__(self, place: int, epoch: int) -> None:
        self._place = place
        self._reader = LinkReader(place, epoch=epoch)
        self._writers: dict[int, LinkWriter] = {}
        self._sent: dict[int, int] = {}

    @property
    def epoch(self) -> int:
        return self._reader.epoch

    def begin(self, epoch: int) -> None:
        self._reader.begin(epoch)
        self._forget_links()

    def _forget_links(self) -> None:
        self._writers.clear()
        self._sent.clear()

    def pack(self, destination: int, message: Any) -> Wire:
        if destination not in self._writers:
            self._writers[destination] = LinkWriter(self._place, destination, epoch=self.epoch)
        number = self._sent.get(destination, 0)
        self._sent[destination] = number + 1
        frames = tuple(bytes(part) for part in self._writers[destination].pack(message))
        return Wire(source=self._place, destination=destination, epoch=self.epoch, number=number, message=message, frames=frames)

    def unpack(self, wire: Wire) -> Any | None:
        before = self.epoch
        found = self._reader.unpack(list(wire.frames))
        if self.epoch != before:
            self._forget_links()
        return None if found is None else found[1]

    def take_due(self) -> Any | None:
        found = self._reader.take_due()
        return None if found is None else found[1]
