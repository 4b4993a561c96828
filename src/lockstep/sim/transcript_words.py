"""Tables, plans, layouts and results in words, for transcripts. Knows how they read; changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from lockstep.core.layout import BatchLayout
from lockstep.core.records import StepPlan, StepResult
from lockstep.core.schema import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, MARK_EMBEDDING, MARK_TOKEN, MARK_VOID
from lockstep.core.table import SlotTable

FINISH_WORDS = {FINISH_NONE: "no", FINISH_STOP: "stop", FINISH_LENGTH: "length"}
MARK_LETTERS = {MARK_VOID: "-", MARK_TOKEN: "T", MARK_EMBEDDING: "E"}

DIGESTS_DIFFER = "digests differ"

_SHOWN_MAX = 12


def sequence(values: Iterable[Any]) -> str:
    """Numbers with blanks between; of many only both ends and the count."""
    items = [str(int(v)) for v in values]
    if len(items) > _SHOWN_MAX:
        items = [*items[:3], "..", *items[-3:], f"({len(items)})"]
    return " ".join(items) or "none"


def marks(values: Iterable[int]) -> str:
    """Runs: `E3 T1` is three embeddings and a token."""
    return " ".join(f"{MARK_LETTERS.get(value, '?')}{len(list(run))}" for value, run in groupby(int(v) for v in values))


def slot_line(table: SlotTable, slot: int) -> str:
    c = {name: int(table.columns[name][slot]) for name in ("generation", "known", "computed", "draft_count", "pending", "finished", "importing")}
    parts = [
        f"known {c['known']}",
        f"computed {c['computed']}",
        f"tokens {sequence(table.known_tokens(slot))}",
        f"marks {marks(table.marks[slot, : c['known']])}",
        f"drafts {sequence(table.drafts[slot, : c['draft_count']])}",
        f"blocks {sequence(table.blocks[0, slot, : table.block_counts[0, slot]])}",
    ]
    parts += [f"pending {c['pending']}"] if c["pending"] >= 0 else []
    parts += ["importing"] if c["importing"] else []
    parts += [f"finished {FINISH_WORDS.get(c['finished'], '?')}"] if c["finished"] else []
    return f"slot {slot} generation {c['generation']}: {', '.join(parts)}"


def tables(named: Mapping[str, SlotTable]) -> str:
    """Every held slot on every replica; replicas whose tables read alike are said once."""
    groups: dict[str, list[str]] = {}
    for name, table in named.items():
        text = "\n".join(f"  {slot_line(table, slot)}" for slot in table.held_slots()) or "  no slot is held"
        groups.setdefault(text, []).append(name)
    return "\n".join(f"{', '.join(names)}:\n{text}" for text, names in groups.items())


def plan(record: StepPlan) -> str:
    lines = [f"plan {record.step}, horizon {record.horizon}"]
    lines += [f"  release slot {s} generation {g}" for s, g in zip(record.releases.slots, record.releases.generations, strict=True)]
    admitted = record.admissions
    for i, slot in enumerate(admitted.slots):
        generation, known, computed = (int(admitted.values[name][i]) for name in ("generation", "known", "computed"))
        transfer = admitted.transfers[i]
        fetches = f", fetches transfer {transfer.number} of {transfer.instance}" if transfer is not None else ""
        lines.append(f"  admit slot {slot} generation {generation}: known {known}, computed {computed}{fetches}")
    ready = record.ready
    for slot, generation, computed in zip(ready.slots, ready.generations, ready.computed, strict=True):
        lines.append(f"  ready slot {slot} generation {generation}: computed {computed}")
    for i, transfer in enumerate(record.exports.transfers):
        blocks = sequence(record.exports.blocks[0].row(i))
        lines.append(f"  export transfer {transfer.number}: {record.exports.computed[i]} positions in blocks {blocks}")
    lines += [f"  end of transfer {transfer.number}" for transfer in record.unexports]
    rows = record.rows
    for slot, generation, count, start, samples in zip(rows.slots, rows.generations, rows.counts, rows.starts, rows.samples, strict=True):
        where = f"from {start}" if start >= 0 else "from where it will be"
        lines.append(f"  row slot {slot} generation {generation}: up to {count} {where}{', samples' if samples else ''}")
    return "\n".join(lines)


def layout_rows(layout: BatchLayout) -> Sequence[str]:
    """What each row computes: positions, half-open, and what stands there."""
    lines = []
    for row in range(layout.row_count):
        inside = slice(layout.row_starts[row], layout.row_starts[row + 1])
        where = f"{layout.start[row]}..{layout.start[row] + layout.count[row]}"
        does = "samples" if row in layout.sample_row else "does not sample"
        kinds = "" if (layout.marks[inside] == MARK_TOKEN).all() else f" marks {marks(layout.marks[inside])}"
        owner = f"slot {layout.slot[row]} generation {layout.generation[row]}"
        lines.append(f"{owner}: positions {where} tokens {sequence(layout.token_ids[inside])}{kinds}, {does}")
    return lines


def result_rows(result: StepResult) -> Sequence[str]:
    return [
        f"slot {result.slots[i]} generation {result.generations[i]}: tokens {sequence(result.tokens.row(i))}, "
        f"finish {FINISH_WORDS[int(result.finishes[i])]}, drafts {sequence(result.drafts.row(i))}"
        for i in range(len(result))
    ]


def digests(values: Sequence[int]) -> str:
    """Whether replicas agree; the values would say nothing to a reader."""
    return f"digests of {len(values)} replicas are equal" if len(np.unique(np.array(values, np.uint64))) == 1 else DIGESTS_DIFFER
