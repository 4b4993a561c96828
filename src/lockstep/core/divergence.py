"""Where two replicas of the log differ: the first column, in the order of the digest's fold, and every request that is concerned.

It compares what the digest folded, bit for bit, and knows to which (slot, generation) each entry of a column belongs. Entries are compared request
by request, so that one request's longer row does not put its neighbours, whose entries only moved, under suspicion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.records import Columns
from lockstep.core.types import I64

Owner = tuple[int, int]
"""(slot, generation)."""

NOBODY: Owner = (-1, -1)
"""Of entries that belong to no request, or that cannot be told."""

_ROW, _TOKEN, _SAMPLING_ROW, _POSITION = "row", "token", "sampling row", "sampled position"

_LAYOUT_AXES: Mapping[str, str] = {
    **dict.fromkeys(("slot", "generation", "start", "count", "known", "row_starts", "block_tags", "tail_tags"), _ROW),
    **dict.fromkeys(("token_ids", "positions", "marks", "tags"), _TOKEN),
    **dict.fromkeys(("sample_row", "sample_starts", "prompt_length", "length_cap", "side_hash"), _SAMPLING_ROW),
}
"""Axis of a layout's columns; block tables and what is under `sampling.` go by their prefix, ragged columns by their own starts."""

_PADDED = {"block_tables": -1, "block_tags": 0}
"""What fills a row of these up to the longest row's width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """index: of the first differing entry in `column`, empty if the column is missing on one side or its sizes differ. ours, theirs: the values
    there, or the shapes (None: no such column). owner: the request that the entry belongs to. position: in its sequence, -1 if the column has none.
    slots: every (slot, generation) with a difference in any column; empty if some difference belongs to no request."""

    column: str
    index: tuple[int, ...]
    ours: Any
    theirs: Any
    owner: Owner
    position: int
    slots: tuple[Owner, ...]

    def describe(self, ours: str = "here", theirs: str = "there") -> str:
        """For example: layout.token_ids of slot 3 generation 17 at position 12 is 101 here and 99 there."""
        whose = "" if self.owner == NOBODY else f" of slot {self.owner[0]} generation {self.owner[1]}"
        if self.ours is None or self.theirs is None:
            there, missing = (ours, theirs) if self.theirs is None else (theirs, ours)
            return f"{self.column} is {there} and not {missing}"
        if not self.index:
            return f"{self.column}{whose} has shape {self.ours} {ours} and {self.theirs} {theirs}"
        where = f" at position {self.position}" if self.position >= 0 else f" at {self.index[-1]}" if len(self.index) > 1 or not whose else ""
        return f"{self.column}{whose}{where} is {self.ours} {ours} and {self.theirs} {theirs}"


def differences(ours: Columns, theirs: Columns) -> Difference | None:
    """None if both hold the same bits under the same names."""
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            return _difference(name, (), None if a is None else a.shape, None if b is None else b.shape, ours, theirs)
        if a.shape != b.shape or a.dtype != b.dtype:
            return _difference(name, (), _shape(a, b), _shape(b, a), ours, theirs)
        unequal = np.argwhere(_bits(a) != _bits(b))
        if len(unequal):
            index = tuple(int(i) for i in unequal[0])
            return _difference(name, index, a[index].item(), b[index].item(), ours, theirs)
    return None


def _shape(array: NDArray[Any], other: NDArray[Any]) -> str:
    return str(list(array.shape)) if array.dtype == other.dtype else f"{list(array.shape)} of {array.dtype}"


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    """As the digest reads it: a NaN equals itself, 0.0 is not -0.0."""
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}")).reshape(array.shape)


def _difference(column: str, index: tuple[int, ...], a: Any, b: Any, ours: Columns, theirs: Columns) -> Difference:
    assert a is not None or b is not None, f"{column} is on neither side"
    mine, other = _contents(ours), _contents(theirs)
    slots = sorted(owner for owner in mine.keys() | other.keys() if mine.get(owner) != other.get(owner))
    owner, position = NOBODY, -1
    if index:
        owners = _Owners(ours).of(column)
        owner = owners[min(index[0], len(owners) - 1)] if owners else NOBODY
        positions = ours.get(_positions_of(column))
        position = int(positions[index[0]]) if positions is not None and index[0] < len(positions) else -1
    elif len(slots) == 1:
        owner = slots[0]
    return Difference(
        column=column, index=index, ours=a, theirs=b, owner=owner, position=position, slots=() if NOBODY in slots or not slots else tuple(slots)
    )


def _positions_of(column: str) -> str:
    prefix, _, name = column.partition(".")
    if prefix != "layout":
        return ""
    return "layout.positions" if _LAYOUT_AXES.get(name) == _TOKEN else "layout.sampling.position" if name.startswith("sampling.") else ""


def _contents(columns: Columns) -> dict[Owner, list[tuple[str, bytes]]]:
    """Per request, entry by entry, what the columns hold of it. Offsets into other columns are taken as what they say of their own row: a length, a
    distance. NOBODY has the names of all columns, and what belongs to no request."""
    owners = _Owners(columns)
    contents: dict[Owner, list[tuple[str, bytes]]] = {NOBODY: [(name, str(array.dtype).encode()) for name, array in columns.items()]}
    for name, array in columns.items():
        if name != "layout.sample_row":  # it says who owns a sampling row, and nothing else
            for owner, entry in zip(owners.of(name), _entries(name, array, owners), strict=True):
                contents.setdefault(owner, []).append((name, entry))
    return contents


def _entries(name: str, array: NDArray[Any], owners: _Owners) -> Iterator[bytes]:
    last = name.rpartition(".")[2]
    if last in ("starts", "row_starts", "sample_starts"):
        array = np.diff(array)
    elif name == "layout.sampling.index":
        array = array - owners.first_tokens(len(array))
    padding = next((value for prefix, value in _PADDED.items() if last.startswith(prefix)), None)
    for entry in array:
        if padding is not None:
            entry = entry[: int((entry != padding).nonzero()[0].max(initial=-1)) + 1]
        yield entry.tobytes()


class _Owners:
    """Who owns each entry of each column, along its first axis. Columns may come from a replica that has gone wrong: what does not fit together
    has no owner."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._generations = dict(self._held())

    def _held(self) -> Iterator[tuple[int, int]]:
        """(slot, generation) of whoever holds a slot in this step, as far as its rows and admissions say it."""
        for part in ("layout.slot layout.generation", "plan.admissions.slots plan.admissions.generation", "plan.rows.slots plan.rows.generations"):
            slots, generations = part.split()
            yield from zip(self._list(slots), self._list(generations), strict=False)

    def _list(self, name: str) -> list[int]:
        array = self._columns.get(name)
        return [] if array is None else [int(value) for value in array]

    def of(self, name: str) -> list[Owner]:
        """As many owners as the column has entries; a column of starts has an entry a row."""
        array, (prefix, _, last) = self._columns[name], name.rpartition(".")
        count = len(array) - 1 if last in ("starts", "row_starts", "sample_starts") else len(array)
        if last == "head":
            return [NOBODY] * count
        owners = self._layout(name) if name.startswith("layout.") else self._record(prefix, name)
        owners = [*owners[:count], *[NOBODY] * (count - len(owners))]
        assert len(owners) == max(0, count), f"{name} has {count} entries, {len(owners)} owners"
        return owners

    def _record(self, prefix: str, name: str) -> list[Owner]:
        part = prefix if f"{prefix}.slots" in self._columns else prefix.rpartition(".")[0]
        slots = self._list(f"{part}.slots")
        named = next((key for key in (f"{part}.generations", f"{part}.generation") if key in self._columns), "")
        generations = self._list(named) if named else [self._generations.get(slot, -1) for slot in slots]
        rows = [owner if owner[1] >= 0 else NOBODY for owner in zip(slots, generations, strict=False)]
        starts = f"{name}.starts" if f"{name}.starts" in self._columns else f"{part}.tokens.starts" if name.endswith(".marks") else ""
        return self._spread(rows, starts) if starts else rows

    def _layout(self, name: str) -> list[Owner]:
        rows = list(zip(self._list("layout.slot"), self._list("layout.generation"), strict=False))
        short = name.removeprefix("layout.")
        axis = _ROW if short.startswith("block_tables") else _POSITION if short.startswith("sampling.") else _LAYOUT_AXES.get(short)
        if axis == _ROW:
            return rows
        if axis == _TOKEN:
            return self._spread(rows, "layout.row_starts")
        sampling = [rows[row] if 0 <= row < len(rows) else NOBODY for row in self._list("layout.sample_row")]
        if axis == _POSITION:
            return self._spread(sampling, "layout.sample_starts")
        if axis == _SAMPLING_ROW or name.endswith(".starts"):
            return sampling
        return self._spread(sampling, f"{name}.starts")

    def _spread(self, rows: list[Owner], starts_name: str) -> list[Owner]:
        """rows[i] for each entry of row i."""
        lengths = self._lengths(starts_name)
        if lengths is None or len(lengths) != len(rows):
            return []
        return [owner for owner, length in zip(rows, lengths.tolist(), strict=True) for _ in range(length)]

    def _lengths(self, name: str) -> I64 | None:
        starts = self._columns.get(name)
        if starts is None:
            return None
        lengths: I64 = np.diff(starts.astype(np.int64)).astype(np.int64)
        return lengths if bool((lengths >= 0).all()) else None

    def first_tokens(self, count: int) -> NDArray[Any]:
        """int32 [count]: for each sampled position, where its row begins among the step's tokens; 0 where that cannot be told."""
        starts, rows = self._columns["layout.row_starts"], self._list("layout.sample_row")
        firsts = [(int(starts[row]), 0) if 0 <= row < len(starts) else NOBODY for row in rows]
        spread = [first for first, _ in self._spread(firsts, "layout.sample_starts")][:count]
        return np.array([*spread, *[0] * (count - len(spread))], np.int32)
