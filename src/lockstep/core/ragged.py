"""Rows of unequal length in two flat arrays. Frozen: whoever decodes one from a message may share its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.types import I32


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """Row i is values[starts[i] : starts[i + 1]]. starts: int32 [n + 1], starts[0] = 0, never decreasing, ending at len(values)."""

    starts: I32
    values: NDArray[Any]

    @staticmethod
    def of(rows: Iterable[Sequence[int] | NDArray[Any]], dtype: type[np.generic] = np.int32) -> Ragged:
        parts = [np.asarray(row, dtype) for row in rows]
        starts = np.zeros(len(parts) + 1, np.int32)
        np.cumsum([len(part) for part in parts], out=starts[1:])
        return Ragged(starts=starts, values=np.concatenate(parts) if parts else np.zeros(0, dtype))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> NDArray[Any]:
        assert 0 <= index < len(self), (index, len(self))
        return self.values[self.starts[index] : self.starts[index + 1]]

    def lengths(self) -> I32:
        return np.diff(self.starts)
