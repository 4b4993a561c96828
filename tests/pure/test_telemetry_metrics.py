"""What a scrape sees: every count under its name, and nothing of another engine."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from lockstep.telemetry.metrics import EngineCounts, metrics_text

COUNTS = EngineCounts(
    running=3,
    waiting=5,
    blocks_used=6,
    blocks_total=24,
    prompt_tokens=7,
    generation_tokens=11,
    prefix_cache_queries=13,
    prefix_cache_hits=17,
    preemptions=19,
    steps=23,
    divergences=29,
    provenance_failures=31,
    restarts=37,
    check_seconds={-1: 0.5, 0: 0.25, 1: 0.125},
)


def scraped(counts: EngineCounts) -> dict[tuple[str, str], float]:
    """(name, rank) -> value."""
    content_type, body = metrics_text(counts, model_name="m")
    assert content_type.startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]
    assert all(sample.labels["model_name"] == "m" for sample in samples)
    return {(sample.name, sample.labels.get("rank", "")): sample.value for sample in samples}


def test_every_count_has_its_name() -> None:
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 5,
        "kv_cache_usage_perc": 0.25,
        "prompt_tokens_total": 7,
        "generation_tokens_total": 11,
        "prefix_cache_queries_total": 13,
        "prefix_cache_hits_total": 17,
        "num_preemptions_total": 19,
        "steps_total": 23,
        "divergence_total": 29,
        "provenance_failures_total": 31,
        "restarts_total": 37,
    }
    found = scraped(COUNTS)
    assert {name: value for (name, rank), value in found.items() if not rank} == {f"lockstep:{name}": value for name, value in expected.items()}


def test_seconds_of_checks_come_by_rank() -> None:
    found = scraped(COUNTS)
    assert {rank: value for (name, rank), value in found.items() if name == "lockstep:check_seconds_total"} == {"-1": 0.5, "0": 0.25, "1": 0.125}


def test_an_engine_that_has_done_nothing_says_zero() -> None:
    assert set(scraped(EngineCounts()).values()) == {0.0}


def test_scrapes_of_two_engines_do_not_meet() -> None:
    scraped(COUNTS)
    assert scraped(EngineCounts(running=1))["lockstep:num_requests_running", ""] == 1
