"""The links of a simulated run: when each message arrives, and what faults do to it.

A link keeps order unless a fault says otherwise; between links there is none. How long a message takes is a function of (seed, link, how many
messages before it), so that one request or fault less does not reshuffle the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.core.records import StepResult
from lockstep.runtime.handover import GONE, ToStage
from lockstep.runtime.messages import KVPart, KVPull
from lockstep.sim.scenario import Fault, Scenario
from lockstep.sim.timeline import Timeline, chance
from lockstep.sim.wires import Wire

Link = tuple[int, int, int]
"""(engine, source, destination)."""

HELD_S, LATE_S, KV_LATE_S = 0.2, 0.3, 0.6
"""A message that waits to be overtaken goes on after HELD_S at the latest. A late one takes so much longer, and so do all behind it."""


FOREIGN = 0x5A5A5A5A5A5A5A5B


@dataclass(slots=True)
class _Held:
    wire: Wire
    fault: Fault
    released: bool = False


class SimNetwork:
    """deliver(engine, wire), deliver_kv(engine, reader's engine, message): what arrives. seen(engine, wire): what is sent. note(fault): it has taken
    effect. note_changed(fault, generation): it has changed what a receiver knows of that request. epoch_of(engine): as its driver has it; messages of
    another epoch are not worth a fault."""

    def __init__(self, scenario: Scenario, timeline: Timeline, engine_numbers: Mapping[str, int]) -> None:
        self.deliver: Callable[[int, Wire], None] = _nowhere
        self.deliver_kv: Callable[[int, int, ToStage], None] = _nowhere
        self.note: Callable[[Fault], None] = _nowhere
        self.note_changed: Callable[[Fault, int], None] = _nowhere
        self.seen: Callable[[int, Wire], None] = _nowhere
        self.epoch_of: Callable[[int], int] = _nowhere
        self._scenario = scenario
        self._timeline = timeline
        self._engine_numbers = engine_numbers
        self._counts: dict[Link, int] = defaultdict(int)
        self._busy_until: dict[Link, float] = defaultdict(float)
        self._armed: dict[Link, list[Fault]] = defaultdict(list)
        self._armed_kv: list[Fault] = []
        self._held: dict[Link, _Held] = {}

    def arm(self, fault: Fault) -> None:
        """The next message on its link, or the next message between its engine and another, gets it."""
        if fault.kind.startswith("kv-"):
            self._armed_kv.append(fault)
        else:
            self._armed[fault.engine, fault.target, fault.other].append(fault)

    # Links inside an engine

    def carry(self, engine: int, wire: Wire) -> None:
        link = (engine, wire.source, wire.destination)
        self.seen(engine, wire)
        self._counts[link] += 1
        armed = self._armed.get(link)
        if armed and link not in self._held and wire.epoch == self.epoch_of(engine):
            self._spoil(link, wire, armed.pop(0))
        else:
            self._pass(link, wire)
        self._let_overtake(link, wire)

    def _pass(self, link: Link, wire: Wire, late_s: float = 0.0) -> None:
        arrival = max(self._busy_until[link], self._timeline.now + late_s + self._delay_s(link))
        self._busy_until[link] = arrival
        self._timeline.at(arrival, lambda: self.deliver(link[0], wire))

    def _delay_s(self, link: Link) -> float:
        engine, source, destination = link
        scenario = self._scenario
        return scenario.link_s * (1.0 + scenario.jitter * chance(scenario.seed, 1, engine, source + 1, destination + 1, self._counts[link]))

    def _spoil(self, link: Link, wire: Wire, fault: Fault) -> None:
        if fault.kind == "flip-draft":
            self._alter(link, wire, fault)
            return
        if fault.kind == "link-reorder":
            self._hold(link, wire, fault)
            return
        self.note(fault)
        if fault.kind == "link-duplicate":
            self._pass(link, wire)
            self._pass(link, wire)
        elif fault.kind == "link-damage":
            self._pass(link, wire.damage(self._scenario.seed, self._counts[link]))
        elif fault.kind == "link-late":
            self._pass(link, wire, LATE_S)
        else:
            assert fault.kind == "link-drop", fault

    def _alter(self, link: Link, wire: Wire, fault: Fault) -> None:
        """One draft of a result is another at this receiver, and no checksum says so: as if its memory had changed."""
        result = wire.message
        if wire.frames or not isinstance(result, StepResult) or not len(result.drafts.values):
            self._armed[link].append(fault)
            self._pass(link, wire)
            return
        row = int(np.flatnonzero(result.drafts.lengths())[0])
        values = result.drafts.values.copy()
        values[result.drafts.starts[row]] += 1
        self.note_changed(fault, int(result.generations[row]))
        self._pass(link, replace(wire, message=replace(result, drafts=replace(result.drafts, values=values))))

    def _hold(self, link: Link, wire: Wire, fault: Fault) -> None:
        held = self._held[link] = _Held(wire, fault)

        def go_on() -> None:
            if not held.released:
                held.released = True
                del self._held[link]
                self._pass(link, wire)

        self._timeline.after(HELD_S, go_on)

    def _let_overtake(self, link: Link, wire: Wire) -> None:
        held = self._held.get(link)
        if held is not None and held.wire is not wire:
            held.released = True
            del self._held[link]
            if held.wire.epoch == wire.epoch:
                self.note(held.fault)
            self._pass(link, held.wire)

    # Between engines

    def carry_kv(self, engine: int, sent: ToStage) -> None:
        """From a stage of `engine`; this is unordered, and nobody numbers it."""
        scenario, to = self._scenario, self._engine_numbers[sent.instance]
        link = (engine, -2, sent.stage)
        self._counts[link] += 1
        delay = 4.0 * scenario.link_s * (1.0 + 3.0 * scenario.jitter * chance(scenario.seed, 2, engine, sent.stage, self._counts[link]))
        wanted = "kv-pull" if isinstance(sent.message, KVPull) else "kv-part" if sent.message.layers != GONE else "nothing"
        fault = next((fault for fault in self._armed_kv if fault.kind.startswith(wanted)), None)
        if fault is not None:
            self._armed_kv.remove(fault)
            self.note(fault)
            if fault.kind == "kv-part-foreign":
                sent = replace(sent, message=_foreign(sent.message))
            elif fault.kind == "kv-part-late":
                delay += KV_LATE_S
            else:
                return
        self._timeline.after(delay, lambda: self.deliver_kv(to, engine, sent))


def _foreign(part: KVPull | KVPart) -> KVPart:
    """As if the source's blocks had been another request's: keys and tags alike."""
    assert isinstance(part, KVPart), part
    other = np.uint64(FOREIGN)
    return replace(part, tags=part.tags ^ other, values={name: array ^ other for name, array in part.values.items()})


def _nowhere(*_: Any) -> Any:
    raise AssertionError("the network is not connected")
