"""What all chunks of one answer have in common. Knows ids, names, the fingerprint and how tokens are spelled; does not know choices."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType

from lockstep.server.endpoint import ServerContext
from lockstep.server.logprobs import TokenSpelling
from lockstep.server.requests import GenerationRequest
from lockstep.server.responses import Answered, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerIdentity:
    """id: as the client sees it; also the stem of the engine's request ids. created_s: seconds since 1970."""

    id: str
    created_s: int
    model: str
    fingerprint: str

    def answered(self, kind: str, choices: list[Any], *, usage: Usage | UnsetType | None = UNSET) -> Answered:
        """An answer or chunk of the `object` kind `kind`."""
        return Answered(
            id=self.id, object=kind, created=self.created_s, model=self.model, system_fingerprint=self.fingerprint, choices=choices, usage=usage
        )


def new_identity(context: ServerContext, prefix: str) -> AnswerIdentity:
    """A fresh identity; the id is random and begins with `prefix`."""
    return AnswerIdentity(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created_s=int(time.time()),
        model=context.settings.served_model_names[0],
        fingerprint=context.client.fingerprint,
    )


def spelling_for(context: ServerContext, request: GenerationRequest) -> TokenSpelling:
    """How this request wants its tokens named."""
    asked = request.return_tokens_as_token_ids
    return TokenSpelling(context.tokenizer, as_ids=context.settings.return_tokens_as_token_ids if asked is None else asked)
