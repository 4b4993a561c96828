"""An engine's counts in Prometheus's text format. Names are vLLM's behind `lockstep:`, so that dashboards move over, and our own for the checks.

Nothing is counted here and there is no global registry: a scrape turns one `EngineCounts` into bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "lockstep:"

LABELS = ("model_name",)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """What the engine has done since it started, over all its epochs; running, waiting and blocks are of now.

    prefix_cache_queries, prefix_cache_hits: tokens looked up, and found. check_seconds: spent in run-time checks, by rank (-1: the driver)."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    divergences: int = 0
    provenance_failures: int = 0
    restarts: int = 0
    check_seconds: Mapping[int, float] = field(default_factory=dict)


GAUGES: Mapping[str, tuple[str, str]] = {
    "num_requests_running": ("running", "Requests that hold a slot."),
    "num_requests_waiting": ("waiting", "Requests that wait for a slot."),
}
COUNTERS: Mapping[str, tuple[str, str]] = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that were admitted."),
    "generation_tokens": ("generation_tokens", "Tokens generated and delivered."),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "num_preemptions": ("preemptions", "Requests put back into the queue for want of KV blocks."),
    "steps": ("steps", "Steps of the log that were resolved."),
    "divergence": ("divergences", "Times that replicas of the log disagreed."),
    "provenance_failures": ("provenance_failures", "Times that KV was not of the request's own prefix."),
    "restarts": ("restarts", "Epochs begun after a failure."),
}
"""Metric name without prefix (and without a counter's _total): field of `EngineCounts`, help."""


class Metrics:
    """Collects one `EngineCounts`, as prometheus-client's registries want it."""

    def __init__(self, counts: EngineCounts, model_name: str) -> None:
        self._counts = counts
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        counts, labels = self._counts, (self._model_name,)
        for name, (attribute, meaning) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, meaning, labels=LABELS)
            gauge.add_metric(labels, getattr(counts, attribute))
            yield gauge
        usage = GaugeMetricFamily(PREFIX + "kv_cache_usage_perc", "KV blocks in use, 1 is all.", labels=LABELS)
        usage.add_metric(labels, counts.blocks_used / max(1, counts.blocks_total))
        yield usage
        for name, (attribute, meaning) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, meaning, labels=LABELS)
            counter.add_metric(labels, getattr(counts, attribute))
            yield counter
        seconds = CounterMetricFamily(PREFIX + "check_seconds", "Seconds in run-time checks; rank -1 is the driver.", labels=(*LABELS, "rank"))
        for rank, value in sorted(counts.check_seconds.items()):
            seconds.add_metric((*labels, str(rank)), value)
        yield seconds


def metrics_text(counts: EngineCounts, *, model_name: str) -> tuple[str, bytes]:
    """(content type, body) of an answer to a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Metrics(counts, model_name))
    return CONTENT_TYPE_LATEST, generate_latest(registry)
