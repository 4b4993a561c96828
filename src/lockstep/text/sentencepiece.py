"""A SentencePiece vocabulary as a tokenizer of the `tokenizers` library. Knows pieces, scores and how SentencePiece treats spaces; does not know
files.

It encodes as SentencePiece does (src/normalizer.cc, bpe_model.cc and unigram_model.cc of its source): spaces become U+2581, one of which may be put
before a text; the pair of pieces whose joint piece has the highest score is merged first, or the likeliest division is taken; a character outside
the vocabulary is spelled by its bytes. Control tokens are cut out of a text before, and what follows one is a text of its own, with its own space
before it. So do llama.cpp and the models' own tokenizer.json, if made before transformers had a Metaspace for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from lockstep.errors import CheckpointError
from lockstep.text.spelling import SPACE_MARK, ByteFallback, Spelling

# Characters that a map of any use has entries for: a damaged one shows here, not in a request.
_PROBE = "".join(map(chr, (*range(0x20, 0x250), *range(0x2000, 0x2070), *range(0x3000, 0x3100), *range(0xFF00, 0xFFF0))))


class PieceKind(IntEnum):
    """The numbers of sentencepiece_model.proto, which GGUF's `tokenizer.ggml.token_type` took over."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceVocabulary:
    """pieces, scores, kinds: one entry an id. unigram: the likeliest division is taken; else pairs are merged, the highest score first.
    merges: pairs in their order where the file lists them; else they follow from the scores. unknown_id: stands for what has no piece.
    prefixes_space: a text begins with a space that is not in it. squeezes_spaces: spaces at both ends go, runs of them become one.
    character_map: SentencePiece's compiled normalisation, or empty. splits_user_pieces: user-defined pieces are divided off inside a text, as
    SentencePiece does; else they are cut out before anything else, as control tokens are."""

    pieces: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    unigram: bool
    merges: Sequence[tuple[str, str]] | None = None
    unknown_id: int | None
    prefixes_space: bool
    squeezes_spaces: bool
    character_map: bytes = b""
    splits_user_pieces: bool = False

    def backend(self) -> tokenizers.Tokenizer:
        """Raises CheckpointError for pieces that do not fit together."""
        backend = tokenizers.Tokenizer(self._model())
        backend.normalizer = self._normalizer()
        if self.splits_user_pieces and (user_pieces := self._of_kind(PieceKind.USER_DEFINED)):
            longest_first = sorted(user_pieces, key=len, reverse=True)
            backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
        steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if self.prefixes_space else steps)
        return backend

    def spelling(self) -> Spelling:
        return ByteFallback(strips_first_space=self.prefixes_space)

    def special_tokens(self, *, takes_spaces_after: frozenset[str] = frozenset()) -> list[AddedToken]:
        """Control and unknown tokens. takes_spaces_after: those that swallow the spaces that follow them."""
        return [
            AddedToken(piece, special=True, normalized=False, rstrip=piece in takes_spaces_after)
            for piece in self._of_kind(PieceKind.CONTROL, PieceKind.UNKNOWN)
        ]

    def _of_kind(self, *kinds: PieceKind) -> list[str]:
        return [piece for piece, kind in zip(self.pieces, self.kinds, strict=True) if kind in kinds]

    def _model(self) -> models.Model:
        vocabulary = {piece: index for index, piece in enumerate(self.pieces)}
        if len(vocabulary) != len(self.pieces):
            raise CheckpointError("the vocabulary has a piece twice; copy or download the file again")
        spells_bytes = PieceKind.BYTE in self.kinds
        if self.unigram:
            scored = list(zip(self.pieces, map(float, self.scores), strict=True))
            return models.Unigram(scored, unk_id=self.unknown_id, byte_fallback=spells_bytes)
        return models.BPE(
            vocabulary,
            list(self.merges) if self.merges is not None else self._merges_by_score(),
            unk_token=None if self.unknown_id is None else self.pieces[self.unknown_id],
            fuse_unk=True,
            byte_fallback=spells_bytes,
            ignore_merges=self.splits_user_pieces,
        )

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Every way to make a piece of two, the highest score first; of one piece that with the longest left part first."""
        mergeable = frozenset(self._of_kind(PieceKind.NORMAL))
        ranked = [
            (-score, -left, left - len(piece), index)
            for index, (piece, score) in enumerate(zip(self.pieces, map(float, self.scores), strict=True))
            if piece in mergeable
            for left in range(1, len(piece))
            if piece[:left] in mergeable and piece[left:] in mergeable
        ]
        ranked.sort()
        return [(self.pieces[index][:-minus_left], self.pieces[index][-minus_left:]) for _, minus_left, _, index in ranked]

    def _normalizer(self) -> normalizers.Normalizer:
        steps: list[normalizers.Normalizer] = []
        if self.character_map:
            steps.append(_character_map(self.character_map))
        if self.squeezes_spaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if self.prefixes_space:
            steps.append(normalizers.Prepend(SPACE_MARK))
        steps.append(normalizers.Replace(" ", SPACE_MARK))
        return normalizers.Sequence(steps)


def _character_map(compiled: bytes) -> normalizers.Normalizer:
    try:
        made = normalizers.Precompiled(compiled)
        made.normalize_str(_PROBE)
    except BaseException as error:  # the library raises a bare Exception for a map that it sees is damaged, and panics over another when it is used
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(f"the vocabulary's character map is damaged ({error}); copy or download the file again") from None
    return made
