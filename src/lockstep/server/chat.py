"""POST /v1/chat/completions. Knows the chat answer's shape; does not know how choices are generated or sent."""

from __future__ import annotations

from msgspec import UNSET, UnsetType, structs

from lockstep.server.choices import ChoicePlan, Piece
from lockstep.server.delivery import deliver, delivery_for
from lockstep.server.endpoint import ServerContext
from lockstep.server.exchange import Exchange
from lockstep.server.identity import AnswerIdentity, new_identity, spelling_for
from lockstep.server.logprobs import TokenSpelling, chat_logprobs, prompt_logprobs
from lockstep.server.prompts import chat_prompt
from lockstep.server.requests import ChatRequest, read_request
from lockstep.server.responses import Answered, ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessage, Usage
from lockstep.server.sampling import chat_budget, check_stream_options, params_of_choice, priority_of, sampling_params, tokens_max
from lockstep.server.sampling import chat_logprobs as logprobs_asked
from lockstep.server.sampling import prompt_logprobs as prompt_logprobs_asked
from lockstep.text import Tokenizer

_WHOLE = "chat.completion"
_CHUNK = "chat.completion.chunk"


async def answer_chat(context: ServerContext, exchange: Exchange, body: bytes) -> None:
    """Answer one request."""
    request = read_request(body, ChatRequest)
    context.require_model(request.model)
    check_stream_options(request)
    context.require_engine()
    identity = new_identity(context, "chatcmpl")
    plans = await _plans(context, request, identity)
    await context.client.check(plans[0].params)
    form = ChatForm(identity, spelling_for(context, request), context.tokenizer, token_ids_shown=bool(request.return_token_ids))
    await deliver(context, exchange, delivery_for(request, plans, form))


async def _plans(context: ServerContext, request: ChatRequest, identity: AnswerIdentity) -> list[ChoicePlan]:
    tokenizer = context.tokenizer
    logprobs = logprobs_asked(request, context.settings.max_logprobs)
    priority = priority_of(request)
    budget = chat_budget(request, context.settings.sampling_defaults)
    # The template writes the special tokens itself; the encoder must not add them again.
    prompt = await chat_prompt(
        request.messages,
        tokenizer,
        variables=request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt is not False,
        add_special_tokens=bool(request.add_special_tokens),
    )
    token_count_max = tokens_max(budget, len(prompt), context.client.max_model_len)
    params = sampling_params(
        request,
        token_count_max=token_count_max,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs_asked(request, context.settings.max_logprobs),
        tokenizer=tokenizer,
        defaults=context.settings.sampling_defaults,
    )
    return [
        ChoicePlan(
            index=choice,
            prompt_index=0,
            request_id=identity.id,
            prompt_token_ids=prompt,
            params=params_of_choice(params, choice),
            choice=choice,
            priority=priority,
        )
        for choice in range(params.n)
    ]


class ChatForm:
    """Writes chat completions. token_ids_shown: vLLM's return_token_ids; the prompt's ids then come once, beside the choices."""

    __slots__ = ("_begun", "_identity", "_spelling", "_token_ids_shown", "_tokenizer")

    def __init__(self, identity: AnswerIdentity, spelling: TokenSpelling, tokenizer: Tokenizer, *, token_ids_shown: bool) -> None:
        self._identity = identity
        self._tokenizer = tokenizer
        self._spelling = spelling
        self._token_ids_shown = token_ids_shown
        self._begun: dict[int, bool] = {}

    def chunk(self, piece: Piece, *, usage: Usage | None, usage_shown: bool) -> Answered | None:
        index = piece.plan.index
        first = index not in self._begun
        if not (first or piece.text or piece.finish_reason or piece.logprobs or (self._token_ids_shown and piece.token_ids) or usage):
            return None
        first_of_all = not self._begun
        self._begun[index] = True
        delta = ChatDelta(role="assistant", content=piece.text) if first else ChatDelta(content=piece.text) if piece.text else ChatDelta()
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=self._token_ids(piece),
        )
        answered = self._identity.answered(_CHUNK, [choice], usage=usage if usage_shown else UNSET)
        return self._with_prompt(answered, piece) if first_of_all else answered

    def usage_chunk(self, usage: Usage) -> Answered:
        return self._identity.answered(_CHUNK, [], usage=usage)

    def whole(self, pieces: list[Piece], usage: Usage) -> Answered:
        choices = [
            ChatChoice(
                index=piece.plan.index,
                message=ChatMessage(content=piece.text),
                logprobs=self._logprobs(piece),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=self._token_ids(piece),
            )
            for piece in pieces
        ]
        return self._with_prompt(self._identity.answered(_WHOLE, choices, usage=usage), pieces[0])

    def _with_prompt(self, answered: Answered, piece: Piece) -> Answered:
        ids, count = piece.plan.prompt_token_ids, piece.plan.params.prompt_logprobs
        if piece.prompt_logprobs is not None and count is not None:
            answered = structs.replace(answered, prompt_logprobs=prompt_logprobs(self._tokenizer, ids, piece.prompt_logprobs, count))
        return structs.replace(answered, prompt_token_ids=ids) if self._token_ids_shown else answered

    def _token_ids(self, piece: Piece) -> tuple[int, ...] | UnsetType:
        return piece.token_ids if self._token_ids_shown else UNSET

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return None if piece.plan.params.logprobs is None else chat_logprobs(self._spelling, piece.token_ids, piece.logprobs)
