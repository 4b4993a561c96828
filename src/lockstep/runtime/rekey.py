"""Token ids out of a recording: keyed hashes in their place, and in the place of everything that is made of them.

Equal ids get equal hashes, so the log replays as before. The key is drawn for one file and written nowhere. It knows which columns hold tokens; not
how a recording is made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.ragged import Ragged
from lockstep.core.records import Columns, Side, StepPlan, StepResult
from lockstep.core.shaping import Shaping
from lockstep.core.snapshot import TableSnapshot
from lockstep.core.types import I32, U64

_IDS = re.compile(r"(layout\.(token_ids|draft_ids|stop_ids|history)|plan\.admissions\.tokens|result \d+\.(tokens|drafts))$")
_WORDS = re.compile(r"(layout\.side_hash|plan\.admissions\.(side_hash|kv_salt))$")
_TAGS = re.compile(r"layout\.(tags|block_tags|tail_tags)$")

_PLAIN = r"(?:steps?|plans?|results?|slots?|generations?|positions?|stages?|ranks?|epoch|horizon|at)\b"
_NUMBERS = r"\[?\s*-?\d+(?:[\s,]+-?\d+)*\s*\]?"
_TEXT = re.compile(rf"(?P<kept>\b{_PLAIN}:? {_NUMBERS})|(?P<hex>0x[0-9a-fA-F]+)|(?<![\w.])(?P<number>\d+)(?!\.\d)")
"""Numbers behind a word that says that they are no token, and all others."""


def holds_tokens(column: str) -> bool:
    """The folded column of this name holds token ids, or is made of them."""
    return any(pattern.match(column) for pattern in (_IDS, _WORDS, _TAGS))


class Rekey:
    """key: random bytes, 16 to 64."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def _hash(self, data: bytes, size: int, kind: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=size, key=self._key, person=kind).digest()

    def _each(self, values: NDArray[Any], size: int, kind: bytes) -> NDArray[Any]:
        """As many bytes of hash for each value as `size`, unsigned."""
        found, inverse = np.unique(values, return_inverse=True)
        hashes = b"".join(self._hash(int(value).to_bytes(9, "little", signed=True), size, kind) for value in found)
        return np.frombuffer(hashes, f"<u{size}")[inverse].reshape(values.shape)

    def ids(self, values: NDArray[Any]) -> I32:
        """31-bit hashes of token ids."""
        return (self._each(values, 4, b"id") & np.uint32(0x7FFFFFFF)).astype(np.int32)

    def words(self, values: U64) -> U64:
        """64-bit hashes of hashes: of side records, salts, digests."""
        return self._each(values, 8, b"word").astype(np.uint64)

    def word(self, value: int) -> int:
        return int(self.words(np.array([value], np.uint64))[0])

    def text(self, text: str) -> str:
        """A message with every number hashed that might be a token id or made of some."""

        def hashed(found: re.Match[str]) -> str:
            if found["hex"]:
                return f"{self.word(int(found['hex'], 16) & ((1 << 64) - 1)):#018x}"
            if found["number"]:
                return str(int(self.ids(np.array([int(found["number"]) & ((1 << 63) - 1)], np.int64))[0]))
            return found["kept"]

        return _TEXT.sub(hashed, text)

    def side(self, side: Side) -> Side:
        extras = {name: self._hash(value, 16, b"extra") for name, value in side.extras.items()}
        salt = self._hash(side.cache_salt, 16, b"salt") if side.cache_salt else b""
        return Side(stop_ids=self._listed(side.stop_ids), shaping=self.shaping(side.shaping), cache_salt=salt, extras=extras)

    def shaping(self, shaping: Shaping) -> Shaping:
        """Numbers stay, ids do not."""
        biased = zip(self._listed([token for token, _ in shaping.logit_bias]), shaping.logit_bias, strict=True)
        return dataclasses.replace(
            shaping,
            logit_bias=tuple((token, bias) for token, (_, bias) in biased),
            allowed_token_ids=self._listed(shaping.allowed_token_ids),
            bad_words=tuple(self._listed(word) for word in shaping.bad_words),
            processors=tuple((name, self._hash(arguments.encode(), 16, b"arguments").hex()) for name, arguments in shaping.processors),
        )

    def _listed(self, ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.ids(np.array(ids, np.int64)).tolist())

    def _ragged(self, rows: Ragged) -> Ragged:
        return Ragged(starts=rows.starts, values=self.ids(rows.values))

    def plan(self, plan: StepPlan) -> StepPlan:
        admitted = plan.admissions
        if not len(admitted.slots):
            return plan
        values = {**admitted.values, **{name: self.words(admitted.values[name]) for name in ("side_hash", "kv_salt")}}
        sides = tuple(self.side(side) for side in admitted.sides)
        return dataclasses.replace(plan, admissions=dataclasses.replace(admitted, values=values, tokens=self._ragged(admitted.tokens), sides=sides))

    def result(self, result: StepResult) -> StepResult:
        return dataclasses.replace(
            result,
            tokens=self._ragged(result.tokens),
            drafts=self._ragged(result.drafts),
            digests=self.words(result.digests),
            logprobs=None,
            prompt_logprobs=None,
            reasons=(),
        )

    def table(self, taken: TableSnapshot) -> TableSnapshot:
        columns = {**taken.columns, **{name: self.words(taken.columns[name]) for name in ("side_hash", "kv_salt")}}
        return dataclasses.replace(
            taken,
            columns=columns,
            tokens=self._ragged(taken.tokens),
            drafts=self._ragged(taken.drafts),
            sides=tuple(self.side(side) for side in taken.sides),
        )

    def columns(self, columns: Columns, true: Columns, rekeyed: Columns) -> Columns:
        """What a rank folded in a step. true, rekeyed: what a replay folds there, with true ids and with hashed ones (empty if there is none): a tag
        becomes what it is in the replay with hashed ids, or a hash of itself if no replay has it."""
        tags = {0: 0}
        for name in true.keys() & rekeyed.keys():
            if _TAGS.match(name) and true[name].shape == rekeyed[name].shape:
                tags |= dict(zip(true[name].reshape(-1).tolist(), rekeyed[name].reshape(-1).tolist(), strict=True))
        return {name: self._column(name, array, tags) for name, array in columns.items()}

    def _column(self, name: str, array: NDArray[Any], tags: dict[int, int]) -> NDArray[Any]:
        if _IDS.match(name):
            return self.ids(array)
        if _WORDS.match(name):
            return self.words(array)
        if _TAGS.match(name):
            flat: Sequence[int] = array.reshape(-1).tolist()
            return np.array([tags[tag] if tag in tags else self.word(tag) for tag in flat], np.uint64).reshape(array.shape)
        return array
