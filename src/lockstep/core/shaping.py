"""`Shaping`: what a request wants changed in its logits before each draw. Part of its side record, so every replica has it and the digest covers it.

Every change at a position is a function of the tokens before it and of what stands here, and of nothing else; that is why neither batch mates, nor
drafts, nor a restart can alter it. How logits are changed is `sampling`'s; this knows only what was asked.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """repetition_penalty: above 0; logits of tokens of prompt and output are divided by it (multiplied where they are negative). presence_penalty:
    taken from the logit of every token of the output; frequency_penalty: as often as it is there. min_tokens: of output, before which no stop id is
    drawn.
    logit_bias: (id, added to its logit), each id once. allowed_token_ids: only these are drawn; empty allows all. bad_words: token sequences that the
    output does not come to hold. grammar: source of what the output must be a beginning of, and be whole where it ends; empty for anything.
    processors: (name, its arguments as JSON) of each logits processor that is asked, in the order in which they were loaded.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    processors: tuple[tuple[str, str], ...] = ()

    @property
    def penalises(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def reads_history(self) -> bool:
        """The sampler needs the tokens before the position, not only how many there are."""
        return self.penalises or self.is_guided or any(len(word) > 1 for word in self.bad_words)

    @property
    def is_guided(self) -> bool:
        """Something says at each position which ids may come, and may say that none may."""
        return bool(self.grammar or self.processors)

    @property
    def grammar_key(self) -> str:
        """Names the grammar by its content; empty without one."""
        return hashlib.blake2b(self.grammar.encode(), digest_size=16).hexdigest() if self.grammar else ""

    @property
    def is_plain(self) -> bool:
        """Nothing is changed."""
        return self == PLAIN

    def data(self) -> bytes:
        """All of it, unambiguously, for hashes."""
        numbers = struct.pack("<dddq", self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.min_tokens)
        biases = b"".join(struct.pack("<qd", token, bias) for token, bias in self.logit_bias)
        words = b"".join(_ids(word) for word in self.bad_words)
        counts = struct.pack("<qqq", len(self.logit_bias), len(self.bad_words), len(self.processors))
        texts = [text.encode() for pair in self.processors for text in pair] + [self.grammar.encode()]
        return b"".join([numbers, counts, biases, _ids(self.allowed_token_ids), words, *(struct.pack("<q", len(text)) + text for text in texts)])


def _ids(ids: Iterable[int]) -> bytes:
    listed = list(ids)
    return struct.pack(f"<q{len(listed)}q", len(listed), *listed)


PLAIN = Shaping()
