"""A model's tokenizer: text to token ids and back, one token's bytes, chats to text. Knows the `tokenizers` library; does not know files.

Immutable once built, so it is shared freely between threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from lockstep.errors import InvalidRequestError
from lockstep.text.chat_template import ChatTemplates
from lockstep.text.spelling import Spelling


class Tokenizer:
    """vocab_size: number of ids, added tokens included. bos_token_id: None where the model has none. eos_token_ids: ids that end an answer, as far as
    the tokenizer knows them. special_ids: tokens that `skip_special_tokens` leaves out. chat_template: the default template's source, or None."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        spelling: Spelling,
        *,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        chat_templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
    ) -> None:
        """backend: decides the ids. spelling: must agree with the backend's decoder. special_tokens: what templates may name, such as "bos_token"."""
        self._backend = backend
        self._templates = ChatTemplates(chat_templates, special_tokens)
        self.spelling = spelling
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.special_ids = frozenset(index for index, token in backend.get_added_tokens_decoder().items() if token.special)
        self.chat_template = self._templates.default

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens spelled out in it become those tokens. add_special_tokens: with what the model wants around a text,
        often a BOS. Raises InvalidRequestError for text that is not Unicode (a lone surrogate)."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError(f"text must be valid Unicode, got a string with a lone surrogate ({error})") from None
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, replacement characters where bytes are no UTF-8. Ids outside the vocabulary have no text."""
        known = [index for index in ids if 0 <= index < 1 << 32]
        return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))

    def token_piece(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id outside it."""
        piece: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        return piece

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds in the middle of a text, special tokens as they are spelled; empty for an id outside the vocabulary."""
        piece = self.token_piece(token_id)
        return b"" if piece is None else self.spelling.piece_bytes(piece)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; replacement characters stand for the parts of a split character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt that the model's template makes of `messages`; special tokens are in it, so encode it with add_special_tokens=False.

        continue_final_message: the last message is left open, to be gone on with; a string names its field that is. chat_template: one of the
        model's templates by name, or a template. variables: anything else for the template, such as tools and documents. Raises
        InvalidRequestError if there is no template or it refuses.
        """
        return self._templates.render(
            messages,
            {"add_generation_prompt": add_generation_prompt, **variables},
            chat_template=chat_template,
            continue_final_message=continue_final_message,
        )
