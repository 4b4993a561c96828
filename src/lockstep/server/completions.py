"""POST /v1/completions. Knows the legacy answer's shape; does not know how choices are generated or sent."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from lockstep.core.outputs import TokenLogprobs
from lockstep.server.choices import ChoicePlan, Piece
from lockstep.server.delivery import deliver, delivery_for
from lockstep.server.endpoint import ServerContext
from lockstep.server.exchange import Exchange
from lockstep.server.identity import AnswerIdentity, new_identity, spelling_for
from lockstep.server.logprobs import CompletionColumns, TokenSpelling, prompt_entries
from lockstep.server.logprobs import prompt_logprobs as in_vllm_shape
from lockstep.server.prompts import completion_prompts
from lockstep.server.requests import CompletionRequest, read_request
from lockstep.server.responses import Answered, CompletionChoice, CompletionLogprobs, PromptLogprobs, Usage
from lockstep.server.sampling import (
    check_stream_options,
    completion_budget,
    completion_logprobs,
    params_of_choice,
    priority_of,
    prompt_logprobs,
    prompt_only,
    sampling_params,
    tokens_max,
)
from lockstep.text import Tokenizer

_KIND = "text_completion"


async def answer_completion(context: ServerContext, exchange: Exchange, body: bytes) -> None:
    """Answer one request. Choices are numbered prompt by prompt: choice c of prompt p has index p * n + c."""
    request = read_request(body, CompletionRequest)
    context.require_model(request.model)
    check_stream_options(request)
    context.require_engine()
    identity = new_identity(context, "cmpl")
    plans = await _plans(context, request, identity)
    await context.client.check(plans[0].params)
    hidden_ids = frozenset[int]() if request.skip_special_tokens is False else context.tokenizer.special_ids
    form = CompletionForm(
        identity,
        spelling_for(context, request),
        tokenizer=context.tokenizer,
        hidden_ids=hidden_ids,
        token_ids_shown=bool(request.return_token_ids),
        prompt_logprobs=request.prompt_logprobs,
    )
    await deliver(context, exchange, delivery_for(request, plans, form))


async def _plans(context: ServerContext, request: CompletionRequest, identity: AnswerIdentity) -> list[ChoicePlan]:
    tokenizer = context.tokenizer
    logprobs = completion_logprobs(request, context.settings.max_logprobs)
    told = prompt_logprobs(request, context.settings.max_logprobs)
    priority = priority_of(request)
    budget = completion_budget(request, context.settings.sampling_defaults)
    window = context.client.max_model_len
    plans: list[ChoicePlan] = []
    prompts = await completion_prompts(
        request.prompt,
        tokenizer,
        add_special_tokens=request.add_special_tokens is not False,
        prompts_max=context.settings.requests_max,
    )
    for prompt_index, prompt in enumerate(prompts):
        token_count_max = tokens_max(budget, len(prompt), window)
        params = sampling_params(
            request,
            token_count_max=token_count_max,
            logprobs=logprobs,
            prompt_logprobs=told,
            tokenizer=tokenizer,
            defaults=context.settings.sampling_defaults,
        )
        for choice in range(params.n):
            plans.append(
                ChoicePlan(
                    index=len(plans),
                    prompt_index=prompt_index,
                    request_id=f"{identity.id}-{prompt_index}",
                    prompt_token_ids=prompt,
                    params=params_of_choice(params, choice),
                    choice=choice,
                    priority=priority,
                    echo=_prompt_text(request, prompt_index, prompt, tokenizer) if request.echo else None,
                    prompt_only=prompt_only(request),
                )
            )
    return plans


def _prompt_text(request: CompletionRequest, index: int, ids: tuple[int, ...], tokenizer: Tokenizer) -> str:
    """As it was sent, or what its ids say."""
    sent = request.prompt if isinstance(request.prompt, str) else request.prompt[index]
    return sent if isinstance(sent, str) else tokenizer.decode(list(ids), skip_special_tokens=request.skip_special_tokens is not False)


class CompletionForm:
    """Writes completions. token_ids_shown: vLLM's return_token_ids. prompt_logprobs: alternatives a prompt token, None for none."""

    __slots__ = ("_columns", "_hidden_ids", "_identity", "_prompt_logprobs", "_seen", "_spelling", "_token_ids_shown", "_tokenizer")

    def __init__(
        self,
        identity: AnswerIdentity,
        spelling: TokenSpelling,
        *,
        tokenizer: Tokenizer,
        hidden_ids: frozenset[int],
        token_ids_shown: bool,
        prompt_logprobs: int | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_logprobs = prompt_logprobs
        self._identity = identity
        self._spelling = spelling
        self._hidden_ids = hidden_ids
        self._token_ids_shown = token_ids_shown
        self._columns: dict[int, CompletionColumns] = {}
        self._seen: dict[int, bool] = {}

    def chunk(self, piece: Piece, *, usage: Usage | None, usage_shown: bool) -> Answered | None:
        if not (piece.text or piece.finish_reason or piece.logprobs or (self._token_ids_shown and piece.token_ids) or usage):
            return None
        return self._identity.answered(_KIND, [self._choice(piece)], usage=usage if usage_shown else UNSET)

    def usage_chunk(self, usage: Usage) -> Answered:
        return self._identity.answered(_KIND, [], usage=usage)

    def whole(self, pieces: list[Piece], usage: Usage) -> Answered:
        return self._identity.answered(_KIND, [self._choice(piece) for piece in pieces], usage=usage)

    def _choice(self, piece: Piece) -> CompletionChoice:
        plan, index = piece.plan, piece.plan.index
        first, self._seen[index] = index not in self._seen, True
        text = plan.echo + piece.text if first and plan.echo is not None else piece.text
        told: PromptLogprobs | UnsetType = UNSET
        if piece.prompt_logprobs is not None and self._prompt_logprobs is not None:
            told = in_vllm_shape(self._tokenizer, plan.prompt_token_ids, piece.prompt_logprobs, self._prompt_logprobs)
        token_ids: tuple[int, ...] | UnsetType = UNSET
        prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
        if self._token_ids_shown:
            token_ids = piece.token_ids
            if first:
                prompt_token_ids = piece.plan.prompt_token_ids
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(piece, first),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=token_ids,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=told,
        )

    def _logprobs(self, piece: Piece, first: bool) -> CompletionLogprobs | None:
        """Of an echoed prompt too."""
        plan, count = piece.plan, piece.plan.params.logprobs
        if count is None:
            return None
        if first:
            self._columns[plan.index] = CompletionColumns(self._spelling, hidden_ids=self._hidden_ids)
        ids: tuple[int, ...] = piece.token_ids
        entries: list[TokenLogprobs | None] = [*piece.logprobs]
        if first and plan.echo is not None and piece.prompt_logprobs is not None:
            ids, entries = plan.prompt_token_ids + ids, [*prompt_entries(piece.prompt_logprobs, count), *entries]
        return self._columns[plan.index].columns(ids, entries)
