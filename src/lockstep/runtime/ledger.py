"""`DeliveryLedger`: the driver's own account of what each request was promised and got. Shares no code with `SlotTable`, `Scheduler` or `accept`.

Replicas that are all wrong in the same way agree, so their digests say nothing. This looks at what plans admit, what results bring and what clients
are told, and at nothing else: lists of tokens, and counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.core.outputs import FinishReason, TokenEvent
from lockstep.core.records import StepPlan, StepResult
from lockstep.core.request import EngineRequest
from lockstep.core.schema import FINISH_FAILED, FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from lockstep.errors import LedgerError

_REASONS = {FINISH_NONE: None, FINISH_STOP: FinishReason.STOP, FINISH_LENGTH: FinishReason.LENGTH, FINISH_FAILED: FinishReason.ERROR}


@dataclass(slots=True, kw_only=True)
class _Account:
    """tokens: prompt, then everything that was delivered. stops: ids that end it. allowed: the only ids that may come, empty for all. generation: of
    its present admission, -1 for none."""

    request: EngineRequest
    tokens: list[int]
    prompt_length: int
    stops: frozenset[int]
    allowed: frozenset[int]
    generation: int = -1

    @property
    def delivered(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    """What a row of a result must turn into: tokens from `index` on, and the end if it is one. prompt_logprobs: how many come with them, -1 for none
    asked."""

    index: int
    tokens: tuple[int, ...]
    finish: FinishReason | None
    prompt_logprobs: int


@dataclass(slots=True, kw_only=True)
class _Slot:
    generation: int
    request_id: str
    finished: bool = False


@dataclass(slots=True)
class DeliveryLedger:
    """Raises LedgerError, with the slots concerned, at the first thing that does not fit."""

    _accounts: dict[str, _Account] = field(default_factory=dict)
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _generations: set[int] = field(default_factory=set)
    _sampling: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    # Requests

    def open(self, request: EngineRequest) -> None:
        tokens = [*request.prompt.tolist(), *request.given.tolist()]
        self._accounts[request.request_id] = _Account(
            request=request,
            tokens=tokens,
            prompt_length=len(request.prompt),
            stops=frozenset(request.side.stop_ids),
            allowed=frozenset(request.side.shaping.allowed_token_ids),
        )

    def close(self, request_id: str) -> None:
        """Ended by its client, or by an error: nothing more may be delivered."""
        self._accounts.pop(request_id, None)

    def begin_epoch(self) -> None:
        """No slot is held and no plan is out; accounts go on."""
        self._slots.clear()
        self._generations.clear()
        self._sampling.clear()
        for account in self._accounts.values():
            account.generation = -1

    # The log

    def note_plan(self, plan: StepPlan, owners: Sequence[str]) -> None:
        """owners: the request of each admission. An admission must bring exactly the tokens that the account has, and the terms that were asked."""
        step = plan.step
        for slot, generation in zip(plan.releases.slots.tolist(), plan.releases.generations.tolist(), strict=True):
            held = self._slots.pop(slot, None)
            if held is None or held.generation != generation:
                self._fail(step, slot, generation, f"it is released, the ledger has {held}")
            self._generations.discard(generation)
        admissions = plan.admissions
        for i, slot in enumerate(admissions.slots.tolist()):
            self._admit(plan, i, slot, owners[i])
        rows = plan.rows
        sampling = []
        for slot, generation, count, samples in zip(
            rows.slots.tolist(), rows.generations.tolist(), rows.counts.tolist(), rows.samples.tolist(), strict=True
        ):
            held = self._slots.get(slot)
            if held is None or held.generation != generation:
                self._fail(step, slot, generation, f"it has a row, the ledger has {held}")
            if samples:
                sampling.append((slot, generation, count))
        self._sampling[step] = sampling

    def _admit(self, plan: StepPlan, index: int, slot: int, request_id: str) -> None:
        values = {name: array[index] for name, array in plan.admissions.values.items()}
        generation, account = int(values["generation"]), self._accounts.get(request_id)
        if slot in self._slots or account is None or account.generation in self._generations:
            self._fail(plan.step, slot, generation, f"request {request_id!r} is admitted to a slot that is held, twice, or after its end")
        assert account is not None
        request = account.request
        if plan.admissions.tokens.row(index).tolist() != account.tokens:
            self._fail(plan.step, slot, generation, f"request {request_id!r} is admitted with other tokens than its {len(account.tokens)}")
        asked = {
            "prompt_length": account.prompt_length,
            "length_cap": request.length_cap,
            "seed": request.seed,
            "temperature": float(np.float32(request.temperature)),
            "top_k": request.top_k,
            "top_p": float(np.float32(request.top_p)),
            "min_p": float(np.float32(request.min_p)),
            "logprob_count": request.logprob_count,
            "prompt_logprob_count": request.prompt_logprob_count,
            "side_hash": request.side.hash64(),
            "kv_salt": request.side.kv_salt(),
        }
        for name, value in asked.items():
            if values[name].item() != value:
                self._fail(plan.step, slot, generation, f"request {request_id!r} is admitted with {name} {values[name]}, it asked for {value}")
        account.generation = generation
        self._generations.add(generation)
        self._slots[slot] = _Slot(generation=generation, request_id=request_id)

    def note_result(self, result: StepResult) -> dict[str, _Due]:
        """Every row that samples answers, but for those of requests that ended in an earlier result; nobody else does.
        Returns what must be delivered. All rows are judged before any is booked: where one is wrong, none has been."""
        step = result.step
        planned = {generation: (slot, count) for slot, generation, count in self._sampling.get(step, [])}
        taken: list[tuple[_Slot, list[int], int]] = []
        for row, (slot, generation) in enumerate(zip(result.slots.tolist(), result.generations.tolist(), strict=True)):
            found = planned.pop(generation, None)
            tokens = result.tokens.row(row).tolist()
            if found is None or found[0] != slot:
                self._fail(step, slot, generation, "its result answers no row of the plan, or answers twice")
            elif not 0 < len(tokens) <= found[1]:
                self._fail(step, slot, generation, f"{len(tokens)} tokens came for a row of at most {found[1]}")
            held = self._slots.get(slot)
            if held is not None and held.generation == generation:
                self._judge(step, slot, held, tokens, int(result.finishes[row]))
                taken.append((held, tokens, int(result.finishes[row])))
        for generation, (slot, _count) in planned.items():
            held = self._slots.get(slot)
            if held is not None and held.generation == generation and not held.finished:
                self._fail(step, slot, generation, "its row samples and has no answer in the result")
        self._sampling.pop(step, None)
        due: dict[str, _Due] = {}
        for held, tokens, finish in taken:
            self._book(held, tokens, finish, due)
        return due

    def _account_of(self, held: _Slot) -> _Account | None:
        """None once the request has ended, also if another has its name by now."""
        account = self._accounts.get(held.request_id)
        return account if account is not None and account.generation == held.generation else None

    def _judge(self, step: int, slot: int, held: _Slot, tokens: list[int], finish: int) -> None:
        if held.finished:
            self._fail(step, slot, held.generation, "tokens came after its end")
        account = self._account_of(held)
        if account is None:
            return
        if finish == FINISH_FAILED:
            if len(tokens) != 1 or not account.request.side.shaping.is_guided:
                self._fail(
                    step,
                    slot,
                    held.generation,
                    f"it failed for want of a next token, with {len(tokens)} tokens and no grammar or processor to say so",
                )
            return
        if account.allowed and not account.allowed.issuperset(tokens):
            self._fail(step, slot, held.generation, f"tokens came that are not among the {len(account.allowed)} that are allowed")
        early = tokens[: max(0, account.request.side.shaping.min_tokens - account.delivered)]
        if not account.request.side.shaping.is_guided and not account.stops.isdisjoint(early):  # what guides it may leave nothing but the end
            self._fail(step, slot, held.generation, f"a stop came before {account.request.side.shaping.min_tokens} tokens")
        stop = next((i for i, token in enumerate(tokens) if token in account.stops), None)
        full = len(account.tokens) + len(tokens) - account.request.length_cap
        expected = FINISH_STOP if stop == len(tokens) - 1 else FINISH_LENGTH if full == 0 else FINISH_NONE
        if full > 0 or (stop is not None and stop < len(tokens) - 1) or finish != expected:
            self._fail(
                step,
                slot,
                held.generation,
                f"{len(tokens)} tokens after {len(account.tokens)} of at most {account.request.length_cap}, stop at {stop}: "
                f"finish {finish} came, {expected} is right",
            )

    def _book(self, held: _Slot, tokens: list[int], finish: int, due: dict[str, _Due]) -> None:
        account = self._account_of(held)
        held.finished = finish != FINISH_NONE
        if account is None:
            return
        tokens = [] if finish == FINISH_FAILED else tokens
        told = account.prompt_length - 1 if account.delivered == 0 and account.request.prompt_logprob_count >= 0 else -1
        due[held.request_id] = _Due(index=account.delivered, tokens=tuple(tokens), finish=_REASONS[finish], prompt_logprobs=told)
        account.tokens += tokens
        if held.finished:
            del self._accounts[held.request_id]

    # Clients

    def check_events(self, step: int, due: dict[str, _Due], events: Sequence[TokenEvent]) -> None:
        """The events of a step are exactly what is due: no token twice, skipped, late or for somebody else. The error names all requests that are
        concerned; what is told to others is right."""
        told: dict[str, list[_Due]] = {}
        for event in events:
            prompts = -1 if event.prompt_logprobs is None else len(event.prompt_logprobs)
            told.setdefault(event.request_id, []).append(
                _Due(index=event.index, tokens=tuple(event.token_ids), finish=event.finish_reason, prompt_logprobs=prompts)
            )
        right = {name: [what] for name, what in due.items()}
        differing = sorted(name for name in told.keys() | due.keys() if told.get(name) != right.get(name))
        if differing:
            wrong = {name: (told.get(name), due.get(name)) for name in differing}
            raise LedgerError(
                f"step {step}: what would be delivered is not what the results brought, by request: {wrong}", step=step, request_ids=differing
            )

    @property
    def open_count(self) -> int:
        return len(self._accounts)

    def audit(self) -> list[str]:
        """When idle: no account is open and no slot held."""
        wrong = [f"ledger: request {name!r} is open" for name in self._accounts]
        return wrong + [f"ledger: slot {slot} is held by {held.request_id!r}" for slot, held in self._slots.items()]

    def _fail(self, step: int, slot: int, generation: int, what: str) -> None:
        raise LedgerError(f"step {step}, slot {slot} generation {generation}: {what}", step=step, concerned=[(slot, generation)])
