"""Counts of what the scheduler did, for metrics and for `lockstep verify`, which asserts that a way of running really happened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """plans_with_unknown: plans written whose horizon lay past what had been received. plans_mixed: with rows that decode and rows that prefill.
    rows_max: most rows in one plan; requests_in_flight_max: most requests with a row in plans whose results had
    not been received.
    tokens_prompt: of requests when they were first admitted.
    chunks: rows that ended before the last known token, so that nothing was sampled. tokens_step_max: most tokens in one plan.
    imports: transfers that ended in a ready record; imports_failed: of those, with nothing.
    aborts_running: of requests that held a slot; aborts_in_flight: of those, with a row in a plan whose result had not been received."""

    plans: int = 0
    plans_empty: int = 0
    plans_mixed: int = 0
    plans_with_unknown: int = 0
    rows: int = 0
    rows_max: int = 0
    requests_in_flight_max: int = 0
    tokens_planned: int = 0
    tokens_prompt: int = 0
    tokens_delivered: int = 0
    tokens_step_max: int = 0
    samples: int = 0
    chunks: int = 0
    rows_dropped: int = 0
    preemptions: int = 0
    preemptions_in_prefill: int = 0
    preemptions_in_decode: int = 0
    aborts: int = 0
    aborts_running: int = 0
    aborts_in_flight: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    imports: int = 0
    imports_failed: int = 0

    def note_plan(self, *, rows: int, tokens: int, requests_in_flight: int, mixed: bool, samples: int, chunks: int, unknown: bool) -> None:
        self.plans += 1
        self.plans_empty += rows == 0
        self.plans_mixed += mixed
        self.plans_with_unknown += unknown
        self.rows += rows
        self.rows_max = max(self.rows_max, rows)
        self.requests_in_flight_max = max(self.requests_in_flight_max, requests_in_flight)
        self.tokens_planned += tokens
        self.tokens_step_max = max(self.tokens_step_max, tokens)
        self.samples += samples
        self.chunks += chunks
