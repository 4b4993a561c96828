"""POST /tokenize and /detokenize, in vLLM's shape. Knows text and ids; does not need the engine to be alive."""

from __future__ import annotations

import msgspec

from lockstep.errors import InvalidRequestError
from lockstep.server.endpoint import ServerContext
from lockstep.server.exchange import Exchange
from lockstep.server.prompts import chat_prompt, checked_ids, text_prompt
from lockstep.server.requests import DetokenizeRequest, TokenizeRequest, read_request
from lockstep.server.responses import DetokenizeResponse, TokenizeResponse


async def answer_tokenize(context: ServerContext, exchange: Exchange, body: bytes) -> None:
    """Ids of a prompt (special tokens added unless told otherwise) or of messages (the template adds them). No tokens is a right answer here."""
    request = read_request(body, TokenizeRequest)
    context.require_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    if request.messages is None:
        tokens = await text_prompt(request.prompt or "", context.tokenizer, add_special_tokens=request.add_special_tokens is not False)
    else:
        tokens = await chat_prompt(
            request.messages,
            context.tokenizer,
            variables=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt is not False,
            add_special_tokens=bool(request.add_special_tokens),
        )
    strings = [context.tokenizer.token_text(token_id) for token_id in tokens] if request.return_token_strs else None
    response = TokenizeResponse(count=len(tokens), max_model_len=context.client.max_model_len, tokens=tokens, token_strs=strings)
    await exchange.answer(msgspec.json.encode(response))


async def answer_detokenize(context: ServerContext, exchange: Exchange, body: bytes) -> None:
    """Text of token ids, special tokens included."""
    request = read_request(body, DetokenizeRequest)
    context.require_model(request.model)
    ids = checked_ids(request.tokens, context.tokenizer.vocab_size, "tokens")
    await exchange.answer(msgspec.json.encode(DetokenizeResponse(prompt=context.tokenizer.decode(ids, skip_special_tokens=False))))
