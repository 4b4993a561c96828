"""One replica's state changed behind the log's back: a row of its table, or the KV and tags of a block."""

from __future__ import annotations

import numpy as np

from lockstep.core.provenance import Provenance
from lockstep.core.table import SlotTable
from lockstep.core.types import first_block_read
from lockstep.sim.oracle import OracleExecutor
from lockstep.sim.timeline import pick


def flip(what: str, table: SlotTable, slot: int, block_count: int, *words: int) -> bool:
    """Change `what` (`faults.FLIPS`) of a held slot; False where there is nothing to change, or where the result that the slot waits for
    will put it right. block_count: of the first KV group's pool. words choose where and by how much: two faults that changed all replicas alike would
    be nobody's to see."""
    c = {name: int(column[slot]) for name, column in table.columns.items() if name in ("known", "computed", "pending")}
    known, computed = c["known"], c["computed"]
    if c["pending"] >= 0 and what in ("token", "computed"):
        return False
    match what:
        case "token":
            table.tokens[slot, computed + pick(known - computed, *words)] += 1
        case "block":
            first = int(first_block_read(computed, table.shape.windows[0], table.shape.block_size))
            held = int(table.block_counts[0, slot]) - first
            if held <= 0 or block_count == 1:
                return False
            index = first + pick(held, *words)
            table.blocks[0, slot, index] = (table.blocks[0, slot, index] + 1) % block_count
        case "seed":
            table.columns["seed"][slot] ^= np.uint64(1 + pick(1 << 30, *words))
        case "computed":
            if known < 2:
                return False
            table.columns["computed"][slot] += 1 if computed + 1 < known else -1
        case "known":
            if known - 1 <= computed:
                return False
            table.columns["known"][slot] -= 1
        case "cap":
            table.columns["length_cap"][slot] += 1
        case _:
            assert what == "temperature", what
            table.columns["temperature"][slot] += np.float32(1 + pick(1 << 10, *words)) / np.float32(256)
    return True


def overwrite_block(executor: OracleExecutor, provenance: Provenance, block: int, *words: int) -> None:
    """As if another request's KV had been written there, in all of the stage's layers of that group, with its tags."""
    foreign = np.uint64(pick(1 << 62, *words, 3) | 1)
    executor.kv[executor.layers_of(provenance.group), block] ^= foreign
    provenance.tags[block] ^= foreign
    provenance.block_tags[block] ^= foreign
