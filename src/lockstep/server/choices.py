"""From engine events to pieces of text: one generator a choice, and several choices as one stream. Knows stop strings; does not know HTTP or JSON.

Whatever ends a generator (its end, a stop string, an error, the caller leaving) leaves nothing running: the engine request is aborted unless the
engine itself has ended it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from lockstep.core.outputs import FinishReason, LogprobSequence, TokenEvent, TokenLogprobs
from lockstep.core.params import SamplingParams
from lockstep.errors import CapacityError, InternalError
from lockstep.server.protocol import EngineClient
from lockstep.text.stream import TextStream
from lockstep.text.tokenizer import Tokenizer

PROMPT_TAIL_TOKENS = 4  # a character has at most four bytes, so at most so many tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePlan:
    """One choice to generate. index: in the answer; prompt_index: which of the request's prompts; choice: which of that prompt's choices.
    echo: text that the answer begins with. prompt_only: what is generated is left out of it."""

    index: int
    prompt_index: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    choice: int
    priority: int
    echo: str | None = None
    prompt_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one engine event adds to a choice.

    text: new text, perhaps empty (a tail that may become a stop string is held back). token_ids: tokens that count. logprobs: one a token, or none.
    finish_reason: "stop" or "length" on a choice's last piece. stop_reason: the stop string or the requested stop token that ended it.
    prompt_logprobs: of the prompt's tokens but the first, with the first piece of a choice that asked for them.
    """

    plan: ChoicePlan
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    prompt_logprobs: LogprobSequence | None = None


async def choice_pieces(client: EngineClient, tokenizer: Tokenizer, plan: ChoicePlan) -> AsyncGenerator[Piece, None]:
    """The pieces of one choice; the last has a finish reason. Raises the engine's error if it fails, before or in mid-answer."""
    params = plan.params
    text = TextStream(
        tokenizer,
        stop=params.stop,
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
        prompt_tail=plan.prompt_token_ids[-PROMPT_TAIL_TOKENS:],
    )
    events = client.generate(plan.request_id, plan.prompt_token_ids, params, choice=plan.choice, priority=plan.priority)
    token_count = 0
    ended = False
    try:
        async for event in events:
            if event.token_ids and event.index != token_count:
                raise InternalError(f"choice {plan.index} of {plan.request_id}: expected token {token_count} next, got token {event.index}")
            ended = event.finish_reason is not None
            piece = _piece(plan, text, event)
            token_count += len(event.token_ids)
            if piece.finish_reason is not None and not ended:
                client.abort(plan.request_id, choice=plan.choice)  # a stop string: the engine need not wait until the piece is sent
                ended = True
            if piece.token_ids or piece.cached_tokens or piece.prompt_logprobs is not None or piece.finish_reason is not None:
                yield piece
            if piece.finish_reason is not None:
                return
            if ended:
                raise event.error or CapacityError("the engine ended this request before it was complete; send it again")
        raise InternalError(f"choice {plan.index} of {plan.request_id}: the engine's events ended without a finish reason")
    finally:
        if not ended:
            client.abort(plan.request_id, choice=plan.choice)
        await _close(events)


async def _close(events: AsyncIterator[TokenEvent]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


def _piece(plan: ChoicePlan, text: TextStream, event: TokenEvent) -> Piece:
    if plan.prompt_only:
        end = event.finish_reason if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) else None
        return Piece(plan=plan, text="", finish_reason=end and "length", cached_tokens=event.cached_tokens, prompt_logprobs=event.prompt_logprobs)
    token_ids = tuple(event.token_ids)
    # The token that ends an answer counts, but is not text unless the caller wants to see what stopped it.
    silent = event.stop_token is not None and not plan.params.include_stop_str_in_output
    delta = text.push(token_ids[:-1] if silent else token_ids)
    count = delta.token_count + (silent and delta.stopped is None)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    written = delta.text
    if delta.stopped is None and event.finish_reason is not None:
        delta = text.finish()
        written += delta.text
    if delta.stopped is not None:
        finish_reason, stop_reason = "stop", delta.stopped
    elif event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
        finish_reason = event.finish_reason.value
        stop_reason = event.stop_token if event.stop_token in plan.params.stop_token_ids else None
    return Piece(
        plan=plan,
        text=written,
        token_ids=token_ids[:count],
        logprobs=event.logprobs[:count],
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        cached_tokens=event.cached_tokens,
        prompt_logprobs=event.prompt_logprobs,
    )


async def merged(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """Pieces of all `sources` as they come; a task a source, unless there is but one. The first error ends all of them and is raised here."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as pieces:
            async for piece in pieces:
                yield piece
        return
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(maxsize=2 * len(sources))
    tasks = [asyncio.create_task(_pump(source, queue)) for source in sources]
    try:
        open_count = len(tasks)
        while open_count:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_count -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: AsyncGenerator[Piece, None], queue: asyncio.Queue[Piece | Exception | None]) -> None:
    end: Exception | None = None
    try:
        async with aclosing(source) as pieces:
            async for piece in pieces:
                await queue.put(piece)
    except Exception as error:  # handed on to the one who asked, whatever it is
        end = error
    await queue.put(end)
