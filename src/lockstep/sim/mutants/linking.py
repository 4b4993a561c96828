"""Loosened links and epochs: checksums, numbers, announcements, what a new epoch still takes of the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.core.outputs import TokenEvent
from lockstep.core.records import StepResult
from lockstep.runtime.driver import Driver
from lockstep.runtime.messages import Activations, StageStart
from lockstep.runtime.transport.numbers import LinkNumbers, Verdict
from lockstep.sim.mutants.mutant import ALL, ONE, UNSEEN, MakeParts, Mutant, Witness, of_driver, of_numbers, of_table, watched
from lockstep.sim.mutants.replicas import AddsToSeeds
from lockstep.sim.mutants.setting import Setting
from lockstep.sim.parts import Parts
from lockstep.sim.wires import NumberedEnd, Wire


class NoChecksum(NumberedEnd):
    """Rule 9: a message that was damaged on its way is taken; of activations, one bit of one hidden value has changed."""

    witness = UNSEEN

    def unpack(self, wire: Wire) -> Any | None:
        if not wire.damaged:
            return super().unpack(wire)
        message = wire.message
        if isinstance(message, Activations) and message.tensors:
            self.witness.note(wire.epoch, message.step)
            (name, hidden), *_ = message.tensors.items()
            flipped = hidden.copy()
            flipped.reshape(-1)[:1].view(np.uint32)[0] ^= 1 << 7
            message = replace(message, tensors={name: flipped})
        return super().unpack(replace(wire, message=message, damaged=False))


class WaitsOn(NumberedEnd):
    """Rule 21: the announcement of an epoch does not interrupt a stage that waits for a message of the epoch before."""

    witness = UNSEEN

    def unpack(self, wire: Wire) -> Any | None:
        if isinstance(wire.message, StageStart) and wire.epoch == self.epoch + 1 and self.taken:
            self.witness.note(wire.epoch, 0)
            return None
        self.taken = True
        return super().unpack(wire)

    taken = False


class AnyNumber(LinkNumbers):
    """A gap, a repeat or disorder on a link is taken as it comes."""

    witness = UNSEEN

    def accept(self, source: int, epoch: int, number: int) -> Verdict:
        if epoch == self.epoch and number != self._next.get(source, 0):
            self.witness.note(epoch, 0)
            self._next[source] = number
        return super().accept(source, epoch, number)


class TakesOlderEpochs(LinkNumbers):
    """Rule 21: what was sent before the epoch began is taken too."""

    witness = UNSEEN

    def accept(self, source: int, epoch: int, number: int) -> Verdict:
        if epoch < self.epoch:
            self.witness.note(self.epoch, 0)
            return Verdict.TAKE
        return super().accept(source, epoch, number)


class EventsWithoutIndex(Driver):
    """Rule 21: events count from what this epoch has delivered."""

    witness = UNSEEN

    def _begin(self) -> None:
        super()._begin()
        self._delivered: dict[str, int] = {}

    def _deliver(self, result: StepResult) -> list[TokenEvent]:
        events = []
        for event in super()._deliver(result):
            index = self._delivered.get(event.request_id, 0)
            if index != event.index:
                self.witness.note(self.epoch, result.step)
            self._delivered[event.request_id] = index + len(event.token_ids)
            events.append(replace(event, index=index))
        return events


class DeliversUnchecked(Driver):
    """Rule 10: digests come back and nobody compares them. For this to matter the last replica must be wrong: of a single stage, whose seeds are."""

    def _compare(self, result: StepResult) -> None: ...


def _of_end(end: type[NumberedEnd]) -> Mapping[str, MakeParts]:
    def parts(witness: Witness) -> Parts:
        made = watched(end, witness)
        return Parts(make_end=lambda place, numbers: made(place, numbers))

    return {ALL: parts}


def _mutant(kind: str, name: str, loosens: str, parts: Mapping[str, MakeParts], *faults: str) -> Mutant:
    return Mutant(name=name, kind=kind, loosens=loosens, parts=parts, setting=Setting(faults=faults, stages_least=2))


MUTANTS: Sequence[Mutant] = (
    _mutant("rule 9", "no-checksum", "damaged messages are taken", _of_end(NoChecksum), "link-damage"),
    Mutant(
        name="delivers-unchecked",
        kind="rule 10",
        loosens="the driver compares no digests; a single stage draws by other seeds",
        parts={ONE: of_table(AddsToSeeds, make_driver=DeliversUnchecked)[ONE]},
        setting=Setting(stages_most=1),
    ),
    _mutant("rule 21", "announcement-waits", "a wait goes on when a new epoch is announced", _of_end(WaitsOn), "crash"),
    _mutant("rule 21", "takes-older-epochs", "messages of an older epoch are taken", of_numbers(TakesOlderEpochs), "crash"),
    _mutant("rule 21", "events-without-index", "events count from the epoch's first", of_driver(EventsWithoutIndex), "crash"),
    _mutant("links", "any-number", "a gap, repeat or disorder is taken", of_numbers(AnyNumber), "link-drop", "link-duplicate", "link-reorder"),
)
