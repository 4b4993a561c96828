"""What a cell must have done to count as what its name says: each counter asserted from both sides, zero where the thing is off."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.core.stats import SchedulerStats
from lockstep.verify.cells import Cell

Counters = dict[str, Any]


def read_counters(stats: SchedulerStats, *, open_max: int, description: Mapping[str, Any], warm_hits: int = 0, ended_by_text: int = 0) -> Counters:
    """description: of the cluster. warm_hits: prefix hits before the measured run. ended_by_text: requests that the script aborted since their text
    had come to its end, which is no abort to whoever asked."""
    return {
        "preemptions": stats.preemptions,
        "preemptions_in_prefill": stats.preemptions_in_prefill,
        "preemptions_in_decode": stats.preemptions_in_decode,
        "prefix_hits": stats.prefix_hits - warm_hits,
        "prefix_queries": stats.prefix_queries,
        "steps": stats.plans,
        "steps_mixed": stats.plans_mixed,
        "steps_with_unknown_result": stats.plans_with_unknown,
        "step_tokens_max": stats.tokens_step_max,
        "chunks": stats.chunks,
        "requests_at_once_max": stats.requests_in_flight_max,
        "requests_open_max": open_max,
        "rows_max": stats.rows_max,
        "aborts_running": stats.aborts_running - ended_by_text,
        "aborts_in_flight": stats.aborts_in_flight,
        **{name: description[name] for name in ("transport", "pids", "layers", "threads") if name in description},
    }


def missed_scheduling(cell: Cell, counters: Counters, *, request_count: int, budget: int, prompt_max: int) -> list[str]:
    """Counters of the scheduler that do not fit the cell's name."""
    c, missed = counters, _Missed()
    forced = cell["preemption"] == "forced"
    missed.check(not forced or c["preemptions"] >= 3, "preemptions >= 3", c["preemptions"])
    missed.check(not forced or c["preemptions_in_prefill"] >= 1, "preemptions_in_prefill >= 1", c["preemptions_in_prefill"])
    missed.check(not forced or c["preemptions_in_decode"] >= 1, "preemptions_in_decode >= 1", c["preemptions_in_decode"])
    missed.check(forced or c["preemptions"] == 0, "preemptions == 0", c["preemptions"])
    cached = cell["cache"] != "off"
    missed.check(not cached or c["prefix_hits"] > 0, "prefix_hits > 0", c["prefix_hits"])
    missed.check(cached or c["prefix_queries"] == 0, "prefix_queries == 0", c["prefix_queries"])
    asynchronous = cell["async"] == "on"
    unknown = c["steps_with_unknown_result"]
    missed.check(not asynchronous or unknown > 0, "steps_with_unknown_result > 0", unknown)
    missed.check(asynchronous or unknown == 0, "steps_with_unknown_result == 0", unknown)
    named = {"1": 1, "4": 4, "all": request_count}[cell["at_once"]]
    alone = cell["at_once"] == "1"
    at_once = min(named, budget) / 2  # a step of 8 tokens has at most 8 rows, however many requests are open
    missed.check(c["requests_at_once_max"] >= at_once, f"requests_at_once_max >= {at_once:g}", c["requests_at_once_max"])
    rows = -(-named // 2 // _stage_count(cell)) if budget >= named else 1
    missed.check(c["rows_max"] >= rows, f"rows_max >= {rows}", c["rows_max"])
    missed.check(not alone or c["requests_open_max"] == 1, "requests_open_max == 1", c["requests_open_max"])
    # With no more requests than microbatches each decodes in a plan of its own, so that a newcomer need not meet any.
    mixing = named > _stage_count(cell)
    missed.check(not mixing or c["steps_mixed"] > 0, "steps_mixed > 0", c["steps_mixed"])
    missed.check(not alone or c["steps_mixed"] == 0, "steps_mixed == 0", c["steps_mixed"])
    missed.check(c["step_tokens_max"] <= budget, f"step_tokens_max <= {budget}", c["step_tokens_max"])
    chunked = budget < prompt_max
    missed.check(not chunked or cell["cache"] == "warm" or c["chunks"] > 0, "chunks > 0", c["chunks"])
    missed.check(chunked or not alone or c["chunks"] == 0, "chunks == 0", c["chunks"])
    aborting = cell["aborts"] == "neighbours"
    missed.check(not aborting or c["aborts_running"] >= 1, "aborts_running >= 1", c["aborts_running"])
    missed.check(not (aborting and asynchronous) or c["aborts_in_flight"] >= 1, "aborts_in_flight >= 1", c["aborts_in_flight"])
    missed.check(aborting or c["aborts_running"] == 0, "aborts_running == 0", c["aborts_running"])
    return missed.lines


def _stage_count(cell: Cell) -> int:
    return 2 if cell["stages"] == "uneven" else int(cell["stages"])


def missed_deployment(cell: Cell, counters: Counters, *, layers: Sequence[range]) -> list[str]:
    """Processes, transport, split and threads that do not fit the cell's name. layers: the split that the cell asked for."""
    missed = _Missed()
    pids = set(counters["pids"])
    own = os.getpid()
    processes = cell.processes
    missed.check(not processes or (len(pids) == len(layers) and own not in pids), f"{len(layers)} processes other than this", sorted(pids))
    missed.check(processes or pids == {own}, "this process only", sorted(pids))
    missed.check(counters["transport"] == ("ipc" if processes else "in-process"), "transport", counters["transport"])
    found = [tuple(pair) for pair in counters["layers"]]
    missed.check(found == [(r.start, r.stop) for r in layers], f"layers {[(r.start, r.stop) for r in layers]}", found)
    threads = int(cell["threads"])
    missed.check(all(count == threads for count in counters["threads"]), f"threads == {threads}", counters["threads"])
    return missed.lines


class _Missed:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def check(self, met: bool, wanted: str, found: object) -> None:
        if not met:
            self.lines.append(f"wanted {wanted}, found {found}")
