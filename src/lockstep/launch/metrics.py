"""An engine's counts, gathered for a scrape. Reads numbers that the engine's thread keeps; each is right, together they may be a turn apart."""

from __future__ import annotations

from collections import Counter

from lockstep.launch.engine import RunningEngine
from lockstep.telemetry.metrics import EngineCounts


def engine_counts(running: RunningEngine) -> EngineCounts:
    state, driver = running.engine.state, running.engine.driver
    stats = driver.scheduler.stats
    check_seconds = Counter({-1: driver.check_seconds})
    check_seconds.update(running.cluster.check_seconds())
    return EngineCounts(
        running=state.running,
        waiting=state.waiting,
        blocks_used=state.blocks_total - state.blocks_free,
        blocks_total=state.blocks_total,
        prompt_tokens=stats.tokens_prompt,
        generation_tokens=stats.tokens_delivered,
        prefix_cache_queries=stats.prefix_queries,
        prefix_cache_hits=stats.prefix_hits,
        preemptions=stats.preemptions,
        steps=stats.plans,
        divergences=state.divergences,
        provenance_failures=state.provenance_failures,
        restarts=state.restarts,
        check_seconds=check_seconds,
    )
