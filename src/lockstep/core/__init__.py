"""The log and what replays it: records, `SlotTable`, `BatchLayout`, digest, provenance, `BlockPool`, prefix hashes, `Scheduler`.

numpy and the standard library only; no IO, clock, threads, logging or randomness: time and seeds are arguments.
"""
