"""Clients of a simulated run, and the router that hands prefilled requests from one engine to the other. A client keeps what it was told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lockstep.core.outputs import FinishReason, LogprobSequence, TokenEvent
from lockstep.core.records import Side, Transfer
from lockstep.core.request import EngineRequest
from lockstep.core.shaping import Shaping
from lockstep.sim.engine import SimEngine
from lockstep.sim.scenario import Ask
from lockstep.sim.timeline import Timeline, chance

TRANSFER_AWAITED_S = 0.4
"""The decode engine gets a request without its KV if the prefill engine has not named a transfer by then."""


def request_of(ask: Ask) -> EngineRequest:
    """The whole request, as one engine would get it."""
    return EngineRequest(
        request_id=ask.name,
        prompt=np.array(ask.prompt, np.int32),
        length_cap=len(ask.prompt) + ask.tokens_max,
        seed=ask.seed,
        temperature=ask.temperature,
        top_k=ask.top_k,
        top_p=ask.top_p,
        min_p=ask.min_p,
        priority=ask.priority,
        sibling_of=ask.sibling_of or None,
        prompt_logprob_count=0 if ask.prompt_logprobs else -1,
        side=Side(stop_ids=ask.stop_ids, shaping=Shaping(frequency_penalty=ask.frequency_penalty), cache_salt=ask.cache_salt.encode()),
    )


class Client:
    """One attempt at a request. tokens, end: what it was told. wrong: what it was told and must not have been, in words. given_up: it has aborted.
    prompt_logprobs: of its prompt, once they have come."""

    def __init__(self, ask: Ask, attempt: int, note: Callable[[Client, TokenEvent], None]) -> None:
        self.ask = ask
        self.attempt = attempt
        self.tokens: list[int] = []
        self.end: TokenEvent | None = None
        self.wrong: list[str] = []
        self.given_up = False
        self.prompt_logprobs: LogprobSequence | None = None
        self._note = note

    def take(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            if self.end is not None:
                self.wrong.append(f"after its end it was told {event}")
            if event.index != len(self.tokens):
                self.wrong.append(f"token {len(self.tokens)} comes next, it was told {event}")
            if event.prompt_logprobs is not None:
                self.wrong += ["its prompt's log probabilities came twice"] if self.prompt_logprobs is not None else []
                self.prompt_logprobs = event.prompt_logprobs
            self.tokens.extend(event.token_ids)
            self.end = event if event.finish_reason is not None else self.end
            self._note(self, event)


class Router:
    """engines: one, or a prefill engine and a decode engine. moved: requests that the decode engine got with a transfer."""

    def __init__(self, engines: Sequence[SimEngine], timeline: Timeline, seed: int) -> None:
        self._engines = engines
        self._timeline = timeline
        self._seed = seed
        self._here: dict[str, int] = {}
        self._between: dict[str, tuple[Client, tuple[int, ...]]] = {}
        self._importing: dict[str, Transfer] = {}
        self._moves = 0

    def submit(self, client: Client) -> None:
        ask, name = client.ask, client.ask.name
        if len(self._engines) == 1 or ask.direct:
            self._here[name] = len(self._engines) - 1
            self._engines[-1].submit(request_of(ask), client.take)
            return
        whole = request_of(ask)
        self._here[name] = 0
        first = replace(whole, length_cap=len(ask.prompt) + 1, exports=True)
        self._engines[0].submit(first, lambda events: self._take_first(client, events))

    def abort(self, client: Client) -> None:
        """The client gives up, wherever its request is."""
        name = client.ask.name
        client.given_up = True
        if self._between.pop(name, None) is not None:
            client.take([TokenEvent(request_id=name, index=0, finish_reason=FinishReason.ABORT)])
        else:
            self._engines[self._here[name]].abort(name)

    def phase(self, name: str) -> str:
        """Of a request, as `scenario.REQUEST_PHASES` names it; '' if it is nowhere."""
        return "between" if name in self._between else self._engines[self._here[name]].request_phase(name)

    def engine_of(self, name: str) -> SimEngine:
        """Where the request is, or was last."""
        return self._engines[self._here[name]]

    # Hand-over

    def _take_first(self, client: Client, events: Sequence[TokenEvent]) -> None:
        """What the prefill engine says. The first token is delivered by the decode engine, unless there is nothing behind it."""
        for event in events:
            ended = event.finish_reason is FinishReason.STOP or client.ask.tokens_max == 1
            if event.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) or ended:
                client.take([event])
            else:
                assert event.finish_reason is FinishReason.LENGTH, event
                client.prompt_logprobs = event.prompt_logprobs
                self._await_transfer(client, event.token_ids)

    def _await_transfer(self, client: Client, token: tuple[int, ...]) -> None:
        name = client.ask.name
        self._between[name] = (client, token)

        def give_up() -> None:
            if self._between.get(name, (None,))[0] is client:
                self._move(name, None)

        self._timeline.after(TRANSFER_AWAITED_S, give_up)

    def note_turn(self, number: int) -> None:
        """An engine has turned: transfers have begun, or imports are over."""
        if len(self._engines) == 1:
            return
        if number == 0:
            for name, transfer in self._engines[0].driver.take_exported():
                self._begin_transfer(name, transfer)
        else:
            for name in [name for name in self._importing if self._is_over(name)]:
                self._let_go(self._importing.pop(name))

    def _begin_transfer(self, name: str, transfer: Transfer) -> None:
        waiting = self._between.get(name)
        if waiting is None:
            self._let_go(transfer)
            return

        def move() -> None:
            if self._between.get(name) is waiting:
                self._move(name, transfer)
            else:
                self._let_go(transfer)

        self._moves += 1
        self._timeline.after(0.02 * chance(self._seed, 5, self._moves), move)

    def _move(self, name: str, transfer: Transfer | None) -> None:
        client, token = self._between.pop(name)
        self._here[name] = 1
        if transfer is not None:
            self._importing[name] = transfer
        whole = request_of(client.ask)
        self._engines[1].submit(
            replace(whole, given=np.array(token, np.int32), transfer=transfer, sibling_of=None, prompt_logprob_count=-1), client.take
        )

    def _is_over(self, name: str) -> bool:
        live = self._engines[1].live(name)
        return live is None or live.transfer is None or (live.slot is not None and not live.importing)

    def _let_go(self, transfer: Transfer) -> None:
        """The source is told that nobody reads any more; one time in five that is lost, and the lease has to end it."""
        self._moves += 1
        if chance(self._seed, 6, self._moves) < 0.8:
            self._timeline.after(0.02 * chance(self._seed, 7, self._moves), lambda: self._end_export(transfer))

    def _end_export(self, transfer: Transfer) -> None:
        self._engines[0].driver.end_export(transfer.number)
        self._engines[0].wake()
