"""Bad words as token ids: how a word is spelled at the beginning of a text and behind a space. Knows tokenizers; not what is done with the ids."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell each word as it stands, without its leading spaces, and behind one space; each once. A tokenizer may spell a word in
    still other ways in the middle of a text; those are not found (nor by vLLM, whose parameter this is)."""
    spelled: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in dict.fromkeys([word, bare, f" {bare}"]):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if text and ids:
                spelled[ids] = None
    return tuple(spelled)
