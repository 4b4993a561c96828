"""The columns of the `SlotTable`, declared once.

An admission overwrites every one of them: with the admission record's value where `initial` is None, else with `initial`. So a new column
cannot be forgotten when a slot changes hands: it does not exist before it stands here, and the record does not build without it.
The wide columns (tokens, marks, tags, drafts, blocks) are the table's own and are overwritten in the same place.

Four counts of a request, four names: *known* tokens (prompt and accepted), *scheduled* (in plans; the scheduler's), *computed* (positions whose
KV is or will be written by plans up to this one), *delivered* (sent to the client; the driver's). Always 0 <= computed < known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    dtype: type[np.generic]
    initial: int | None
    meaning: str


COLUMNS: tuple[Column, ...] = (
    Column("generation", np.int64, None, "which admission holds the slot; -1 for a free slot"),
    Column("known", np.int32, None, "tokens whose value is known"),
    Column("computed", np.int32, None, "positions below it hold this request's KV once all plans so far have run"),
    Column("prompt_length", np.int32, None, "known tokens that the caller gave"),
    Column("length_cap", np.int32, None, "the request ends when it knows this many tokens"),
    Column("seed", np.uint64, None, "key of its draws"),
    Column("temperature", np.float32, None, "0 is greedy"),
    Column("top_k", np.int32, None, "0 keeps all"),
    Column("top_p", np.float32, None, "1 keeps all"),
    Column("min_p", np.float32, None, "0 keeps all"),
    Column("logprob_count", np.int32, None, "-1: no log probabilities; else how many alternatives beside the sampled token's"),
    Column("prompt_logprob_count", np.int32, None, "the same for its prompt tokens"),
    Column("prompt_logprob_start", np.int32, None, "first prompt position whose log probability is lacking; positions before it have been told"),
    Column("side_hash", np.uint64, None, "hash of the side record (stop ids, cache salt, later grammar, bias, adapter)"),
    Column("kv_salt", np.uint64, None, "hash of what besides tokens shapes its KV (cache salt, later adapter); part of its provenance tags"),
    Column("importing", np.int32, None, "1 while its KV is being fetched from another engine: no rows before the ready record"),
    Column("draft_count", np.int32, 0, "drafts that came with the last result"),
    Column("pending", np.int64, -1, "step of the row whose sample is not applied yet; no row may be resolved on the slot meanwhile"),
    Column("pending_count", np.int32, 0, "positions that the pending row samples: its result brings at most as many tokens"),
    Column("finished", np.int32, 0, "0, or the finish code of the result that ended it"),
)

ADMITTED: tuple[str, ...] = tuple(column.name for column in COLUMNS if column.initial is None)
"""Columns that an admission record must carry."""

COLUMN_BY_NAME: dict[str, Column] = {column.name: column for column in COLUMNS}

FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_FAILED = 0, 1, 2, 3
"""Finish codes in results and in the column `finished`. FAILED: what guides the request leaves no next token, or fails itself; the token that comes
with it is nobody's."""

MARK_VOID, MARK_TOKEN, MARK_EMBEDDING = 0, 1, 2
"""What a position of the known sequence is: nothing yet, a token id, or an embedding given by the caller."""

POISON = {np.int32: -1515870811, np.int64: -6510615555426900571, np.uint64: 0xA5A5A5A5A5A5A5A5, np.float32: float("nan"), np.uint8: 0xA5}
"""What a free slot's columns hold in tests, so that a read of them cannot go unseen."""


def column_array(name: str, values: Any) -> np.ndarray[Any, Any]:
    """Values of an admission column in the column's dtype."""
    return np.asarray(values, COLUMN_BY_NAME[name].dtype)
