"""A `SlotTable` as a value: what a replay needs to go on from the middle of a log, and nothing that can be made again from it.

Only held slots are in it, of their wide columns only what is valid; tags are made again from the tokens. A restored table answers every further
record as the one that was taken: same layouts, same errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.provenance import token_mix
from lockstep.core.ragged import Ragged
from lockstep.core.records import Side
from lockstep.core.schema import COLUMN_BY_NAME, COLUMNS
from lockstep.core.table import FREE, SlotTable, TableShape
from lockstep.core.types import I32, U8
from lockstep.errors import LogError


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSnapshot:
    """slots [H]: those that are held. columns: every column of the schema [H]. tokens, marks: known ones, a row a slot (marks lie as tokens do);
    drafts: of the last result; blocks: per KV group a row a slot; sides: one a slot."""

    next_step: int
    applied: int
    slots: I32
    columns: Mapping[str, NDArray[Any]]
    tokens: Ragged
    marks: U8
    drafts: Ragged
    blocks: tuple[Ragged, ...]
    sides: tuple[Side, ...]


def snapshot(table: SlotTable) -> TableSnapshot:
    """The table's state now; shares no memory with it."""
    slots = np.flatnonzero(table.columns["generation"] != FREE).astype(np.int32)
    held = slots.tolist()
    assert table.applied <= table.next_step, f"{table.applied} results of {table.next_step} plans"
    known, drafts = (table.columns[name][slots].tolist() for name in ("known", "draft_count"))
    counts = table.block_counts[:, slots].tolist()
    assert all(0 < count <= table.shape.length_max for count in known), f"slots {held} know {known} tokens"
    assert all(0 <= count <= table.shape.drafts_max for count in drafts), f"slots {held} have {drafts} drafts"
    tokens = Ragged.of([table.tokens[slot, :count] for slot, count in zip(held, known, strict=True)])
    return TableSnapshot(
        next_step=table.next_step,
        applied=table.applied,
        slots=slots,
        columns={column.name: table.columns[column.name][slots] for column in COLUMNS},
        tokens=tokens,
        marks=Ragged.of([table.marks[slot, :count] for slot, count in zip(held, known, strict=True)], np.uint8).values,
        drafts=Ragged.of([table.drafts[slot, :count] for slot, count in zip(held, drafts, strict=True)]),
        blocks=tuple(
            Ragged.of([table.blocks[group, slot, :count] for slot, count in zip(held, counts[group], strict=True)])
            for group in range(table.shape.group_count)
        ),
        sides=tuple(table.sides[slot] for slot in held),
    )


def restore(shape: TableShape, taken: TableSnapshot) -> SlotTable:
    """A table that goes on from the snapshot. Raises LogError for one that no table of this shape can have left."""
    _check(shape, taken)
    table = SlotTable(shape)
    assert not table.held_slots(), f"a new table holds slots {table.held_slots()}"
    table.next_step, table.applied = taken.next_step, taken.applied
    for name, values in taken.columns.items():
        table.columns[name][taken.slots] = values
    assert table.held_slots() == taken.slots.tolist(), f"slots {table.held_slots()} are held, the snapshot says {taken.slots}"
    for i, slot in enumerate(taken.slots.tolist()):
        tokens, drafts = taken.tokens.row(i), taken.drafts.row(i)
        marks = taken.marks[taken.tokens.starts[i] : taken.tokens.starts[i + 1]]
        table.tokens[slot, : len(tokens)] = tokens
        table.marks[slot, : len(tokens)] = marks
        mixed = token_mix(tokens, np.arange(len(tokens), dtype=np.int32), marks.astype(np.int32), taken.columns["kv_salt"][i : i + 1])
        table.tags[slot, : len(tokens)] = np.cumsum(mixed, dtype=np.uint64)
        table.drafts[slot, : len(drafts)] = drafts
        for group, blocks in enumerate(taken.blocks):
            row = blocks.row(i)
            table.blocks[group, slot, : len(row)] = row
            table.block_counts[group, slot] = len(row)
        table.sides[slot] = taken.sides[i]
    return table


def _check(shape: TableShape, taken: TableSnapshot) -> None:
    """Every part has a row a slot, of the columns' own dtypes, and fits into the table."""
    slots, columns = taken.slots, taken.columns
    count = len(slots)
    _expect(bool(((slots >= 0) & (slots < shape.slot_count)).all() and (np.diff(slots) > 0).all()), f"slots {slots} of {shape.slot_count}")
    _expect(set(columns) == set(COLUMN_BY_NAME), f"columns {sorted(columns)}, the schema has {sorted(COLUMN_BY_NAME)}")
    for name, values in columns.items():
        _expect(values.dtype == COLUMN_BY_NAME[name].dtype and values.shape == (count,), f"column {name}: {values.dtype} {values.shape}")
    rows = {"tokens": (taken.tokens, shape.length_max), "drafts": (taken.drafts, shape.drafts_max)}
    rows |= {f"blocks of group {group}": (blocks, shape.blocks_max) for group, blocks in enumerate(taken.blocks)}
    _expect(len(taken.blocks) == shape.group_count, f"{len(taken.blocks)} KV groups, the table has {shape.group_count}")
    for name, (ragged, most) in rows.items():
        lengths = ragged.lengths()
        sound = ragged.starts[0] == 0 and ragged.starts[-1] == len(ragged.values) and bool(((lengths >= 0) & (lengths <= most)).all())
        _expect(len(ragged) == count and sound, f"{name}: rows of {lengths} for {count} slots, at most {most} a slot")
    _expect(len(taken.marks) == len(taken.tokens.values) and len(taken.sides) == count, f"{len(taken.marks)} marks, {len(taken.sides)} sides")
    _expect(np.array_equal(taken.tokens.lengths(), columns["known"]), f"known {columns['known']}, tokens {taken.tokens.lengths()}")
    _expect(np.array_equal(taken.drafts.lengths(), columns["draft_count"]), f"drafts {columns['draft_count']}, brought {taken.drafts.lengths()}")


def _expect(condition: bool, found: str) -> None:
    if not condition:
        raise LogError(f"a snapshot does not fit the table: {found}")
