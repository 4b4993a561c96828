"""One stage, without IO: plans, results and activations in; activations and results out.

Every stage runs the same code on the same log. What differs is only what it computes, and to whom it sends:

    stage i < last   activations of step t to stage i + 1; takes exactly one result message a step
    last stage       the result of step t to the driver and to every other stage; takes none

It knows no links, processes, clocks or model; compute is behind `Executor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lockstep.core.acceptance import accept
from lockstep.core.digest import Digest
from lockstep.core.layout import BatchLayout
from lockstep.core.logprobs import LogprobColumns
from lockstep.core.provenance import Provenance
from lockstep.core.records import Columns, StepPlan, StepResult
from lockstep.core.table import SlotTable
from lockstep.core.types import F32, I32
from lockstep.errors import DivergenceError, InternalError, LinkError
from lockstep.runtime.handover import Handover, KVAccess, ToStage
from lockstep.runtime.messages import Activations, GrammarReport, GrammarRequest, ImportReport, KVPart, KVPull, WeightsReport, WeightsRequest
from lockstep.runtime.replay import Replica, no_clock

DRIVER = -1
"""The driver as a destination; stages are 0, 1, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What the last stage's compute drew: tokens int32 [S], log probabilities [S] if any row wants them and those of the layout's prompt targets
    [P] if it has any, next drafts a sampling row (empty: none). failed: positions of S without a next token, as `accept` has them."""

    tokens: I32
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    drafts: Sequence[Sequence[int]] = ()
    failed: Mapping[int, str] = field(default_factory=dict)


class Executor(Protocol):
    """Computes one step of one stage from its layout. Owns the stage's KV."""

    def execute(self, layout: BatchLayout, tensors: Mapping[str, F32]) -> Mapping[str, F32] | Sampled:
        """tensors: the activations of the stage before (empty on the first). Returns the activations for the next stage, in memory that
        nobody writes again, or on the last stage the draws. Not called for a layout without rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    destination: int
    message: Activations | StepResult | ImportReport | GrammarReport | WeightsReport


def results_expected(stage_count: int, is_last: bool) -> int:
    """Result messages that a stage takes from another one a step. The last stage sends them, and never waits for what it alone sends."""
    return 0 if is_last or stage_count == 1 else 1


class GrammarShelf(Protocol):
    """Compiles grammars beside the steps, and keeps them for the sampler."""

    def prepare(self, key: str, source: str) -> None:
        """Begin. Returns at once."""
        ...

    @property
    def is_preparing(self) -> bool:
        """Some have begun and were not taken."""
        ...

    def take_prepared(self) -> list[tuple[str, str]]:
        """(key, why it does not compile or nothing) of those that have ended since the last call."""
        ...


class WeightsShelf(Protocol):
    """Loads other weights beside the steps, and keeps them for the epoch that names them."""

    def prepare(self, weights: str) -> None:
        """Begin. Returns at once; what was kept before is let go of."""
        ...

    @property
    def is_preparing(self) -> bool:
        """Some have begun and were not taken."""
        ...

    def take_prepared(self) -> list[tuple[str, str]]:
        """(weights, why they cannot be had or nothing) of those that have ended since the last call."""
        ...


class Stage:
    """Stage `index` of `count` in epoch `epoch`; a new epoch is a new Stage. provenance: one a KV group. layers, kv: for the hand-over of KV between
    engines; without kv it takes no part in any. grammars: of the stage that samples. weights: None if it can have no others. accept: what the last
    stage decides by; tests loosen it. checks: False leaves out digests and provenance, to measure what they cost. clock: seconds, to time the checks;
    without one they are not timed."""

    def __init__(
        self,
        *,
        index: int,
        count: int,
        epoch: int,
        table: SlotTable,
        provenance: Sequence[Provenance],
        executor: Executor,
        layers: range = range(0),
        kv: KVAccess | None = None,
        grammars: GrammarShelf | None = None,
        weights: WeightsShelf | None = None,
        accept: Callable[..., StepResult] = accept,
        checks: bool = True,
        clock: Callable[[], float] = no_clock,
    ) -> None:
        self.index = index
        self.count = count
        self.epoch = epoch
        self.is_last = index == count - 1
        self._clock = clock
        self._replica = Replica(table, Digest(epoch), checks=checks, clock=clock)
        self._provenance = provenance if checks else ()
        self._provenance_seconds = 0.0
        self._executor = executor
        self._grammars = grammars
        self._weights = weights
        self._accept = accept
        self._handover = None
        if kv is not None:
            self._handover = Handover(stage=index, epoch=epoch, layers=layers, table=table, provenance=provenance, kv=kv)
        self._plans: dict[int, StepPlan] = {}
        self._activations: dict[int, Activations] = {}
        self._layout: BatchLayout | None = None
        self._to_others: list[ToStage] = []

    @property
    def table(self) -> SlotTable:
        return self._replica.table

    @property
    def check_seconds(self) -> float:
        return self._provenance_seconds + self._replica.check_seconds

    def columns_of(self, step: int) -> Columns | None:
        """What the digest folded for this step, if the stage has come to it and still knows."""
        return self._replica.columns_of(step)

    # What comes in; links deliver each kind in order and once

    def offer(self, message: StepPlan | StepResult | Activations | GrammarRequest | WeightsRequest) -> None:
        """Keep a message until its step. A message of another epoch, or one that this stage never takes, is an error."""
        if message.epoch != self.epoch:
            raise LinkError(f"stage {self.index} is in epoch {self.epoch} and got {type(message).__name__} of epoch {message.epoch}")
        if isinstance(message, GrammarRequest):
            if self._grammars is not None:
                self._grammars.prepare(message.key, message.source)
        elif isinstance(message, WeightsRequest):
            if self._weights is None:
                raise LinkError(f"stage {self.index} has the weights that it was made with, and was asked to load others")
            self._weights.prepare(message.weights)
        elif isinstance(message, StepPlan):
            self._plans[message.step] = message
        elif isinstance(message, StepResult):
            if not results_expected(self.count, self.is_last):
                raise LinkError(f"stage {self.index} of {self.count} sends results and got one, for step {message.step}")
            self._replica.offer(message)
        else:
            self._activations[message.step] = message

    def offer_pull(self, reader: str, pull: KVPull) -> None:
        """A stage of engine `reader` asks for KV. What it gets is in `take_for_others`."""
        self._to_others += self._handing().offer_pull(reader, pull, self.table.next_step)

    def offer_part(self, part: KVPart) -> list[Send]:
        """KV that this stage has asked for."""
        report = self._handing().take_part(part)
        return [] if report is None else [Send(destination=DRIVER, message=report)]

    def _handing(self) -> Handover:
        if self._handover is None:
            raise LinkError(f"stage {self.index} takes no part in the hand-over of KV, and was sent a message of one")
        return self._handover

    def take_for_others(self) -> list[ToStage]:
        """Messages for stages of other engines, each once."""
        messages, self._to_others = self._to_others, []
        return messages

    # One step at a time

    @property
    def next_step(self) -> int:
        """The step that runs next."""
        layout = self._layout
        return self.table.next_step if layout is None else layout.step

    def advance(self) -> list[Send] | None:
        """Do the next piece of work that can be done: resolve the next plan, then compute it once its activations are here.
        Returns what to send (perhaps nothing yet), or None if the stage has to wait; `waits_for` says for what.
        What it raises names the step."""
        try:
            return self._reports() or self._advance()
        except InternalError as error:
            error.step = self.next_step if error.step < 0 else error.step
            raise

    @property
    def is_preparing(self) -> bool:
        """Something that `advance` will tell of goes on beside it; nothing that comes in says when."""
        return any(shelf is not None and shelf.is_preparing for shelf in (self._grammars, self._weights))

    def _reports(self) -> list[Send]:
        """Of what went on beside the steps and has ended."""
        reports: list[GrammarReport | WeightsReport] = []
        if self._grammars is not None:
            reports += [GrammarReport(epoch=self.epoch, key=key, error=error) for key, error in self._grammars.take_prepared()]
        if self._weights is not None:
            taken = self._weights.take_prepared()
            reports += [WeightsReport(epoch=self.epoch, stage=self.index, weights=name, error=error) for name, error in taken]
        return [Send(destination=DRIVER, message=report) for report in reports]

    def _advance(self) -> list[Send] | None:
        if self._layout is None:
            plan = self._plans.get(self.table.next_step)
            if plan is None or not self._replica.can_run(plan):
                return None
            del self._plans[plan.step]
            self._layout = self._replica.run(plan)
            self._hand_over(plan)
        if self.index > 0 and self._layout.step not in self._activations:
            return None
        layout, self._layout = self._layout, None
        return self._compute(layout, self._activations.pop(layout.step, None))

    def _hand_over(self, plan: StepPlan) -> None:
        """All earlier steps have been computed, so what the plan exports is complete."""
        if self._handover is not None:
            self._to_others += self._handover.note(plan)
            self._to_others += self._handover.serve_waiting(self.table.next_step)

    def _compute(self, layout: BatchLayout, received: Activations | None) -> list[Send]:
        digests = self._checked_digests(layout, received)
        output: Mapping[str, F32] | Sampled = Sampled(tokens=np.zeros(0, np.int32)) if self.is_last else {}
        if layout.row_count:
            began = self._clock()
            for provenance in self._provenance:
                provenance.check(layout)
                provenance.void(layout)
            computed = self._clock()
            output = self._executor.execute(layout, received.tensors if received else {})
            self._provenance_seconds += computed - began - self._clock()
            for provenance in self._provenance:
                provenance.set(layout)
            self._provenance_seconds += self._clock()
        if not isinstance(output, Sampled):
            return [Send(destination=self.index + 1, message=Activations(epoch=self.epoch, step=layout.step, digests=digests, tensors=output))]
        result = self._accept(
            layout,
            output.tokens,
            epoch=self.epoch,
            digests=digests,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            drafts=output.drafts,
            failed=output.failed,
        )
        self._replica.offer(result)
        return [Send(destination=destination, message=result) for destination in (DRIVER, *range(self.count - 1))]

    def _checked_digests(self, layout: BatchLayout, received: Activations | None) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        own = np.array([self._replica.digest.value], np.uint64)
        if received is None:
            return own
        if len(received.digests) != self.index or (received.digests != own).any():
            found = ", ".join(f"stage {i}: {int(d):#018x}" for i, d in enumerate(received.digests))
            raise DivergenceError(
                f"step {layout.step}: replicas of the log disagree; stage {self.index}: {int(own[0]):#018x}, {found}. The step is not computed",
                step=layout.step,
            )
        return np.concatenate([received.digests, own])

    @property
    def waits_for(self) -> str:
        """What the next step lacks, in words. May be asked by another thread while this one computes, so each field is read once."""
        layout = self._layout
        if layout is not None:
            return f"activations of step {layout.step} from stage {self.index - 1}"
        plan = self._plans.get(self.table.next_step)
        if plan is None:
            return f"plan {self.table.next_step} from the driver"
        return f"result of step {plan.horizon - 1} from stage {self.count - 1}"

    def audit(self) -> list[str]:
        """When idle: nothing queued, no slot held, at most the last results buffered (no plan has needed them yet)."""
        wrong = []
        if self._plans or self._activations or self._layout is not None:
            wrong.append(f"stage {self.index}: {len(self._plans)} plans and {len(self._activations)} activations are queued")
        if self._handover is not None:
            wrong += self._handover.audit()
        if held := self.table.held_slots():
            wrong.append(f"stage {self.index}: slots {held} are held")
        return wrong
