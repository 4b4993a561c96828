"""`Mutant`: a small loosening of one rule, as parts that take the place of the real ones; where it is applied; and what a scenario needs to meet it.

A mutant must run: it may be wrong, but what it raises must come from the checks of the real parts. It tells a `Witness` where it does otherwise than
the real part would have done, so that one can count the steps from there to the first check that saw it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep.core.acceptance import accept
from lockstep.core.provenance import Provenance
from lockstep.core.scheduler import Scheduler
from lockstep.core.table import SlotTable, TableShape
from lockstep.runtime.driver import Driver
from lockstep.runtime.stage import Stage
from lockstep.runtime.transport.numbers import LinkNumbers
from lockstep.sim.mutants.setting import ANY, Setting
from lockstep.sim.parts import Accept, Parts, plain_provenance
from lockstep.sim.rig import plain_table

ONE, ALL = "one", "all"
"""Scopes: the first stage's replica only, or the driver and every stage alike. What only one party does has the one scope that there is: ONE for what
the last stage sends, ALL for what the driver or the sampler decides for all."""

NOTED_MAX = 1000


class Witness:
    """(epoch, step) wherever a mutant did otherwise; the step is the one that is run, or written, at that moment."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, int]] = []

    def note(self, epoch: int, step: int) -> None:
        if len(self.noted) < NOTED_MAX:
            self.noted.append((epoch, step))

    def first_in(self, epoch: int) -> int | None:
        """The first step of that epoch at which it did otherwise."""
        return min((step for at, step in self.noted if at == epoch), default=None)


PLAIN = Parts()

UNSEEN = Witness()
"""Of a mutant that nobody watches."""

MakeParts = Callable[[Witness], Parts]

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """kind: whose rule it loosens: S1 to S4, a rule of the protocol, or a kind of fault that the field has met. parts: by scope.
    beside: the real parts that it is compared with; other than the plain ones where only a certain scheduler's plans meet it.
    equivalent: why no check can see it, or None. bound: it costs speed alone, and is killed by a bound (`mutation_bounds`) instead of a run."""

    name: str
    kind: str
    loosens: str
    parts: Mapping[str, MakeParts]
    setting: Setting = ANY
    beside: Parts = PLAIN
    equivalent: str | None = None
    bound: str | None = None


def watched(part: type[Part], witness: Witness) -> type[Part]:
    """The same class, with this witness."""
    return type(part.__name__, (part,), {"witness": witness})


def of_table(table: type[SlotTable], **others: Any) -> Mapping[str, MakeParts]:
    """Without poison, as in production: a mutant that reads what a former owner left must find it. others: parts beside it, in either scope."""

    def everywhere(witness: Witness) -> Parts:
        made = watched(table, witness)
        return Parts(make_table=lambda shape, _replica: made(shape), **others)

    def on_first(witness: Witness) -> Parts:
        made = watched(table, witness)

        def make(shape: TableShape, replica: int) -> SlotTable:
            return made(shape) if replica == 0 else plain_table(shape, replica)

        return Parts(make_table=make, **others)

    return {ONE: on_first, ALL: everywhere}


def of_provenance(provenance: type[Provenance]) -> Mapping[str, MakeParts]:
    def everywhere(witness: Witness) -> Parts:
        made = watched(provenance, witness)

        def make(*given: int, stage: int) -> Provenance:
            assert stage >= 0, stage
            return made(*given)

        return Parts(make_provenance=make)

    def on_first(witness: Witness) -> Parts:
        made = watched(provenance, witness)

        def make(*given: int, stage: int) -> Provenance:
            return made(*given) if stage == 0 else plain_provenance(*given, stage=stage)

        return Parts(make_provenance=make)

    return {ONE: on_first, ALL: everywhere}


def of_last_stage(stage: type[Stage], **others: Any) -> Mapping[str, MakeParts]:
    """Of what the stage that samples does; others do not do it."""
    return {ONE: lambda witness: Parts(make_stage=watched(stage, witness), **others)}


def of_stage(stage: type[Stage], **others: Any) -> Mapping[str, MakeParts]:
    def on_first(witness: Witness) -> Parts:
        made = watched(stage, witness)
        return Parts(make_stage=lambda **given: made(**given) if given["index"] == 0 else Stage(**given), **others)

    return {ONE: on_first, ALL: lambda witness: Parts(make_stage=watched(stage, witness), **others)}


def of_scheduler(scheduler: type[Scheduler], **others: Any) -> Mapping[str, MakeParts]:
    return {ALL: lambda witness: Parts(make_scheduler=watched(scheduler, witness), **others)}


def of_driver(driver: type[Driver], **others: Any) -> Mapping[str, MakeParts]:
    return {ALL: lambda witness: Parts(make_driver=watched(driver, witness), **others)}


def of_numbers(numbers: type[LinkNumbers]) -> Mapping[str, MakeParts]:
    def on_first(witness: Witness) -> Parts:
        made = watched(numbers, witness)
        return Parts(make_numbers=lambda destination, epoch: (made if destination == 0 else LinkNumbers)(destination, epoch))

    return {ONE: on_first, ALL: lambda witness: Parts(make_numbers=watched(numbers, witness))}


def of_accept(function: Accept, **others: Any) -> Mapping[str, MakeParts]:
    """One rank decides for all. Whatever it decides otherwise is noted."""

    def parts(witness: Witness) -> Parts:
        def decide(layout: Any, sampled: Any, *, epoch: int, **given: Any) -> Any:
            found = function(layout, sampled, epoch=epoch, **given)
            right = accept(layout, sampled, epoch=epoch, **given)
            if any((a.shape != b.shape) or (a != b).any() for a, b in zip(found.columns().values(), right.columns().values(), strict=True)):
                witness.note(epoch, layout.step)
            return found

        return Parts(accept=decide, **others)

    return {ALL: parts}
