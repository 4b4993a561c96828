"""The driver, without IO: commands and results in, plans and token events out.

It keeps a replica of the log's table like every rank and compares digests: a result reaches a client only when all ranks agree on its step
(PROTOCOL.md 10) and the ledger's own account agrees too. It knows no links and no processes; time comes in as an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lockstep.core.arrivals import Delivery
from lockstep.core.digest import Digest
from lockstep.core.divergence import differences
from lockstep.core.logprobs import LogprobColumns
from lockstep.core.outputs import FinishReason, TokenEvent, TokenLogprobs
from lockstep.core.records import Columns, StepPlan, StepResult, Transfer
from lockstep.core.request import EngineRequest, LiveRequest
from lockstep.core.scheduler import Scheduler
from lockstep.core.schema import FINISH_STOP
from lockstep.core.table import SlotTable
from lockstep.errors import DivergenceError, InternalError, InvalidRequestError, LedgerError, LockstepError, LogError, PluginError
from lockstep.runtime.ledger import DeliveryLedger
from lockstep.runtime.messages import GrammarReport, GrammarRequest, ImportReport
from lockstep.runtime.replay import Replica, no_clock

IMPORT_TIMEOUT_S = 30.0
"""An import that is not complete by then prefills locally."""

LEASE_S = 120.0
"""So long is KV held for another engine that does not fetch it."""


class LogRecorder(Protocol):
    """What keeps the last steps of the log, to be dumped when something fails."""

    def begin(self, epoch: int, replica: Replica) -> None: ...

    def before(self, plan: StepPlan, replica: Replica) -> None:
        """The plan is replayed next."""
        ...

    def note(self, result: StepResult, digest: int) -> None:
        """The result that answered that plan, and the driver's digest of the step."""
        ...


@dataclass(slots=True, kw_only=True)
class _AwaitedImport:
    deadline: float
    reported: set[int] = field(default_factory=set)
    computed: list[int] = field(default_factory=list)


GRAMMARS_KNOWN = 64
"""More are forgotten, but for those that live requests have: so many a stage keeps at least."""


class Driver:
    """make_table: an empty table for each epoch. rank_count: ranks whose digests every result must carry. checks: False leaves out digests and
    ledger, to measure what they cost. clock: seconds, to time the checks."""

    def __init__(
        self,
        scheduler: Scheduler,
        make_table: Callable[[], SlotTable],
        rank_count: int,
        *,
        recorder: LogRecorder | None = None,
        checks: bool = True,
        clock: Callable[[], float] = no_clock,
        import_timeout_s: float = IMPORT_TIMEOUT_S,
        lease_s: float = LEASE_S,
    ) -> None:
        self.scheduler = scheduler
        self.ledger = DeliveryLedger()
        self._check_seconds = 0.0
        self._make_table = make_table
        self.rank_count = rank_count
        self._recorder = recorder
        self._checks = checks
        self._clock = clock
        self._import_timeout_s = import_timeout_s
        self._lease_s = lease_s
        self._now = 0.0
        self._begin()

    def _begin(self) -> None:
        """The scheduler's epoch, from zero."""
        self._replica = Replica(self._make_table(), Digest(self.scheduler.epoch), checks=self._checks, clock=self._clock)
        self._unresolved: deque[StepPlan] = deque()
        self._imports: dict[int, _AwaitedImport] = {}
        self._leases: dict[int, float] = {}
        self._asked: set[str] = set()
        self._to_ask: list[GrammarRequest] = []
        self.ledger.begin_epoch()
        if self._recorder is not None:
            self._recorder.begin(self.scheduler.epoch, self._replica)

    @property
    def table(self) -> SlotTable:
        return self._replica.table

    @property
    def epoch(self) -> int:
        return self.scheduler.epoch

    @property
    def check_seconds(self) -> float:
        """What digests and ledger have taken here, in all epochs."""
        return self._check_seconds + self._replica.check_seconds

    # Requests

    def submit(self, request: EngineRequest) -> list[TokenEvent]:
        """Queue it. The events: tokens that it brought from another engine, which this one delivers (PROTOCOL.md 20)."""
        self.scheduler.submit(request)
        self.ledger.open(request)
        self._ask_for_grammar(request)
        if not len(request.given):
            return []
        return [TokenEvent(request_id=request.request_id, index=0, token_ids=tuple(request.given.tolist()))]

    def abort(self, request_id: str) -> TokenEvent | None:
        """The request's last event, or None if there is no such request."""
        request = self.scheduler.abort(request_id)
        if request is None:
            return None
        self.ledger.close(request_id)
        return TokenEvent(request_id=request_id, index=request.delivered, finish_reason=FinishReason.ABORT)

    # Grammars

    def _ask_for_grammar(self, request: EngineRequest) -> None:
        shaping = request.side.shaping
        if len(self._asked) > GRAMMARS_KNOWN:  # the stage may have put away those that nobody waits for: ask again
            live = {found.grammar_key for name in self.scheduler.request_ids if (found := self.scheduler.find(name)) is not None}
            self._asked &= live
            self.scheduler.grammars &= live
        if shaping.grammar and shaping.grammar_key not in self._asked:
            self._asked.add(shaping.grammar_key)
            self._to_ask.append(GrammarRequest(epoch=self.epoch, key=shaping.grammar_key, source=shaping.grammar))

    def take_grammars(self) -> list[GrammarRequest]:
        """What the stage that samples is to compile, each once an epoch; requests wait for it (PROTOCOL.md 26)."""
        asked, self._to_ask = self._to_ask, []
        return asked

    def _note_grammar(self, report: GrammarReport) -> list[TokenEvent]:
        """Its requests may be admitted, or end."""
        if not report.error:
            self.scheduler.grammars.add(report.key)
            return []
        self._asked.discard(report.key)
        found = [(name, self.scheduler.find(name)) for name in self.scheduler.request_ids]
        ended = [(name, request.delivered) for name, request in found if request is not None and request.grammar_key == report.key]
        for name, _ in ended:
            self.scheduler.abort(name)
            self.ledger.close(name)
        error = InvalidRequestError(f"structured_outputs cannot be compiled: {report.error}", param="structured_outputs")
        return [TokenEvent(request_id=name, index=index, finish_reason=FinishReason.ERROR, error=error) for name, index in ended]

    # The log

    def tick(self, now: float) -> None:
        """The time, read once a turn. Imports that are late prefill here; leases that are over let go of their blocks."""
        self._now = now
        for generation in [generation for generation, awaited in self._imports.items() if now > awaited.deadline]:
            self._end_import(generation, 0)
        for number in [number for number, end in self._leases.items() if now > end]:
            self.end_export(number)

    def next_plan(self) -> StepPlan | None:
        """The next plan to send to every stage, or None until a result, a submission or an abort changes something."""
        plan = self.scheduler.plan()
        if plan is None:
            return None
        self._unresolved.append(plan)
        for generation in plan.releases.generations.tolist():
            self._imports.pop(generation, None)
        generations = plan.admissions.values["generation"].tolist() if len(plan.admissions.slots) else []
        for transfer, generation in zip(plan.admissions.transfers, generations, strict=True):
            if transfer is not None:
                self._imports[generation] = _AwaitedImport(deadline=self._now + self._import_timeout_s)
        for transfer in plan.exports.transfers:
            self._leases[transfer.number] = self._now + self._lease_s
        if self._checks:
            began = self._clock()
            self.ledger.note_plan(plan, [self._owner(generation) for generation in generations])
            self._check_seconds += self._clock() - began
        return plan

    def _owner(self, generation: int) -> str:
        request = self.scheduler.request_of(generation)
        assert request is not None, generation
        return request.spec.request_id

    @property
    def waits(self) -> bool:
        """Plans are out whose results have not come."""
        return bool(self._unresolved)

    @property
    def unresolved(self) -> tuple[StepPlan, ...]:
        return tuple(self._unresolved)

    def receive(self, message: StepResult | ImportReport | GrammarReport, events: list[TokenEvent]) -> None:
        """Replay the plan that a result answers, compare every rank's digest with this replica's, and add to `events` what clients are to get: also
        where it raises, then for those that the error does not concern.
        Raises DivergenceError naming the step and the rank, LedgerError, LogError for a result that is not the next one."""
        if isinstance(message, ImportReport):
            self._note_import(message)
            return
        if isinstance(message, GrammarReport):
            events += self._note_grammar(message)
            return
        result = message
        if not self._unresolved or self._unresolved[0].step != result.step:
            awaited = [plan.step for plan in self._unresolved]
            raise LogError(f"result of step {result.step} came; results are awaited for steps {awaited}, in this order", step=result.step)
        self._replay_next()
        if self._recorder is not None:
            self._recorder.note(result, self._replica.digest.value)
        if not self._checks:
            events += self._deliver(result)
            return
        began = self._clock()
        self._compare(result)
        due = self.ledger.note_result(result)
        judged = self._clock()
        try:
            found = self._deliver(result)
        except Exception as error:
            words = f"step {result.step} was taken and cannot be told to its clients: {type(error).__name__}: {error}"
            raise InternalError(words, step=result.step, request_ids=sorted(due)) from error
        delivered = self._clock()
        try:
            self.ledger.check_events(result.step, due, found)
        except LedgerError as error:
            events += [event for event in found if event.request_id not in error.request_ids]
            raise
        self._check_seconds += judged - began + self._clock() - delivered
        events += found

    def _replay_next(self) -> None:
        plan = self._unresolved[0]
        if self._recorder is not None:
            self._recorder.before(plan, self._replica)
        try:
            self._replica.run(plan)
        except LogError as error:
            error.step = plan.step
            raise
        self._unresolved.popleft()

    def _deliver(self, result: StepResult) -> list[TokenEvent]:
        deliveries = self.scheduler.receive(result)
        self._replica.offer(result)
        return [_event(delivery, result.logprobs, result) for delivery in deliveries]

    def _compare(self, result: StepResult) -> None:
        found, own = result.digests, np.uint64(self._replica.digest.value)
        if len(found) != self.rank_count or (found != own).any():
            ranks = [f"stage {i}: {int(d):#018x}" for i, d in enumerate(found)]
            raise DivergenceError(
                f"step {result.step}: replicas of the log disagree; driver: {int(own):#018x}, {', '.join(ranks)} ({self.rank_count} expected). "
                "No token of this step is delivered",
                step=result.step,
            )

    # Hand-over

    def take_exported(self) -> list[tuple[str, Transfer]]:
        """Transfers that have begun: (request, transfer), each once."""
        return self.scheduler.transfers.take_begun()

    def end_export(self, number: int) -> None:
        """The receiver is done with it, or its lease is over."""
        self._leases.pop(number, None)
        self.scheduler.transfers.end(number)

    def _note_import(self, report: ImportReport) -> None:
        awaited = self._imports.get(report.generation)
        if awaited is None or report.stage in awaited.reported:
            return
        awaited.reported.add(report.stage)
        awaited.computed.append(report.computed)
        if report.computed == 0 or len(awaited.reported) == self.rank_count:
            self._end_import(report.generation, min(awaited.computed))

    def _end_import(self, generation: int, computed: int) -> None:
        del self._imports[generation]
        self.scheduler.make_ready(generation, computed)

    # Failures

    def explain(self, error: InternalError, columns: Mapping[int, Columns]) -> tuple[InternalError, frozenset[str]]:
        """What replicas disagree about, and the requests concerned. columns: by stage, what its digest folded for the error's step.
        The engine stops there, so this replica runs on to that step if it can."""
        concerned = list(error.concerned)
        if isinstance(error, DivergenceError):
            error = self._located(error, columns)
            concerned += error.concerned
        owners = [self.scheduler.request_of(generation) for _, generation in concerned]
        return error, frozenset([request.spec.request_id for request in owners if request is not None] + list(error.request_ids))

    def _located(self, error: DivergenceError, columns: Mapping[int, Columns]) -> DivergenceError:
        try:
            while self._unresolved and self._unresolved[0].step <= error.step and self._replica.can_run(self._unresolved[0]):
                self._replay_next()
        except Exception as own_error:
            words = f"{error}. The driver's own replica does not get there: {type(own_error).__name__}: {own_error}"
            return DivergenceError(words, step=error.step, concerned=own_error.concerned if isinstance(own_error, InternalError) else ())
        own = self._replica.columns_of(error.step)
        named: dict[str, Columns] = {} if own is None else {"the driver": own}
        named |= {f"stage {stage}": folded for stage, folded in sorted(columns.items()) if folded}
        if len(named) < 2:
            return error
        (first, ours), *others = named.items()
        found = [(name, difference) for name, theirs in others if (difference := differences(ours, theirs)) is not None]
        if not found:
            return DivergenceError(f"{error}; the columns of step {error.step} are equal, an earlier step's were not", step=error.step)
        words = "; ".join(f"{first} and {name}: {difference.describe()}" for name, difference in found)
        slots = sorted({pair for _, difference in found for pair in difference.slots})
        return DivergenceError(f"{error}. {words}", step=error.step, concerned=slots)

    def restart(self, epoch: int, ended: Collection[str], *, strikes: bool) -> frozenset[str]:
        """Begin a new epoch with every request but those of `ended`, which are concerned by the failure. strikes: requests with rows in unresolved
        plans get one. Returns those that were struck too often; they are ended too."""
        for request_id in sorted(ended):
            self.scheduler.abort(request_id)
            self.ledger.close(request_id)
        poison = frozenset(request.spec.request_id for request in self.scheduler.restart(epoch, strikes=strikes))
        for request_id in poison:
            self.ledger.close(request_id)
        self._check_seconds += self._replica.check_seconds
        self._begin()
        for name in self.scheduler.request_ids:
            request = self.scheduler.find(name)
            assert request is not None, name
            self._ask_for_grammar(request.spec)
        return poison

    def audit(self) -> list[str]:
        """The driver's part of the idle audit."""
        wrong = [*self.scheduler.audit(), *self.ledger.audit()]
        return wrong + [f"driver: the import of generation {generation} is awaited" for generation in self._imports]


def _event(delivery: Delivery, logprobs: LogprobColumns | None, result: StepResult) -> TokenEvent:
    request: LiveRequest = delivery.request
    entries: tuple[TokenLogprobs, ...] = ()
    if logprobs is not None and request.spec.logprob_count >= 0:
        first = int(result.tokens.starts[delivery.row])
        entries = tuple(logprobs.entry(i, request.spec.logprob_count) for i in range(first, first + len(delivery.tokens)))
    return TokenEvent(
        request_id=request.spec.request_id,
        index=delivery.index,
        token_ids=delivery.tokens,
        logprobs=entries,
        prompt_logprobs=delivery.prompt_logprobs,
        finish_reason=delivery.finish,
        error=_no_next_token(delivery, result) if delivery.finish is FinishReason.ERROR else None,
        stop_token=delivery.tokens[-1] if result.finishes[delivery.row] == FINISH_STOP else None,
        cached_tokens=max(0, request.cached_tokens),
    )


def _no_next_token(delivery: Delivery, result: StepResult) -> LockstepError:
    if result.reasons and result.reasons[delivery.row]:
        return PluginError(f"after {delivery.index} tokens: {result.reasons[delivery.row]}")
    shaping = delivery.request.spec.side.shaping
    if not shaping.processors:
        return InvalidRequestError(
            f"structured_outputs: after {delivery.index} tokens the grammar has no next one, within its limits and among the ids that the request "
            "allows; make it simpler, or allow more",
            param="structured_outputs",
        )
    names = ", ".join(name for name, _ in shaping.processors)
    return InvalidRequestError(
        f"extra_args: after {delivery.index} tokens no next one is left of what {names}{' and the grammar' if shaping.grammar else ''} allow and the "
        "request does; ask for less, or allow more",
        param="extra_args",
    )
