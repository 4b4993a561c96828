"""From a planned request to its answer on the wire, whole or streamed. Knows order, usage and errors; what an answer looks like is its form's.

The status line of a stream waits for the first piece: until then an engine that has no room or is dead is still answered by its proper status.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from lockstep.core.outputs import LogprobSequence, TokenLogprobs
from lockstep.server.choices import ChoicePlan, Piece, choice_pieces, merged
from lockstep.server.endpoint import ServerContext
from lockstep.server.exchange import Exchange
from lockstep.server.requests import GenerationRequest, StreamOptions
from lockstep.server.responses import Answered, PromptTokensDetails, Usage


@dataclass(slots=True)
class GatheredChoice:
    """A choice that is being put together for an answer in one piece."""

    plan: ChoicePlan
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: LogprobSequence | None = None

    def whole(self, last: Piece) -> Piece:
        """All pieces as one."""
        return Piece(
            plan=self.plan,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            prompt_logprobs=self.prompt_logprobs,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )


class AnswerForm(Protocol):
    """Writes one answer's pieces."""

    def chunk(self, piece: Piece, *, usage: Usage | None, usage_shown: bool) -> Answered | None:
        """The stream's chunk for `piece`; None if it has nothing to show yet."""
        ...

    def usage_chunk(self, usage: Usage) -> Answered:
        """The chunk without choices that ends a stream whose usage was asked for."""
        ...

    def whole(self, pieces: list[Piece], usage: Usage) -> Answered:
        """The answer in one piece: `pieces` holds every choice once, in the order of its index."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One request's plans and the way its answer goes out."""

    plans: list[ChoicePlan]
    form: AnswerForm
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False


def delivery_for(request: GenerationRequest, plans: list[ChoicePlan], form: AnswerForm) -> Delivery:
    """The delivery that `request` asks for."""
    options = request.stream_options or StreamOptions()
    return Delivery(
        plans=plans,
        form=form,
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )


class Tally:
    """The usage of one request. A prompt counts once, whatever its number of choices."""

    __slots__ = ("_cached", "_completion", "_prompt")

    def __init__(self, plans: list[ChoicePlan]) -> None:
        self._prompt = sum(len(plan.prompt_token_ids) for plan in plans if plan.choice == 0)
        self._completion = 0
        self._cached: dict[int, int] = {}

    def add(self, piece: Piece) -> None:
        self._completion += len(piece.token_ids)
        if piece.cached_tokens and piece.plan.choice == 0:
            self._cached[piece.plan.prompt_index] = piece.cached_tokens

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt,
            completion_tokens=self._completion,
            total_tokens=self._prompt + self._completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )


async def deliver(context: ServerContext, exchange: Exchange, delivery: Delivery) -> None:
    """Run all plans and answer. Raises what the engine raises; `exchange.started` says whether the client has seen anything by then."""
    with context.admission.reserve(len(delivery.plans)):
        sources = [choice_pieces(context.client, context.tokenizer, plan) for plan in delivery.plans]
        async with aclosing(merged(sources)) as pieces:
            if delivery.stream:
                await _stream(exchange, delivery, pieces)
            else:
                await _answer_whole(exchange, delivery, pieces)


async def _stream(exchange: Exchange, delivery: Delivery, pieces: AsyncIterator[Piece]) -> None:
    encoder = msgspec.json.Encoder()
    tally = Tally(delivery.plans)
    form = delivery.form
    async for piece in pieces:
        tally.add(piece)
        usage = tally.usage() if delivery.continuous_usage else None
        chunk = form.chunk(piece, usage=usage, usage_shown=delivery.include_usage or delivery.continuous_usage)
        if not exchange.started:
            await exchange.start_events()
        if chunk is not None:
            await exchange.send_event(encoder.encode(chunk))
    if delivery.include_usage:
        await exchange.send_event(encoder.encode(form.usage_chunk(tally.usage())))
    await exchange.end_events()


async def _answer_whole(exchange: Exchange, delivery: Delivery, pieces: AsyncIterator[Piece]) -> None:
    tally = Tally(delivery.plans)
    gathered = {plan.index: GatheredChoice(plan) for plan in delivery.plans}
    whole: dict[int, Piece] = {}
    async for piece in pieces:
        tally.add(piece)
        choice = gathered[piece.plan.index]
        choice.texts.append(piece.text)
        choice.token_ids += piece.token_ids
        choice.logprobs += piece.logprobs
        if piece.prompt_logprobs is not None:
            choice.prompt_logprobs = piece.prompt_logprobs
        if piece.finish_reason is not None:
            whole[piece.plan.index] = choice.whole(piece)
    answer = delivery.form.whole([whole[plan.index] for plan in delivery.plans], tally.usage())
    await exchange.answer(msgspec.json.encode(answer))
