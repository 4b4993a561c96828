"""Makes a failing scenario smaller while it fails in the same way: what is left is what the failure needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lockstep.sim.parts import Parts
from lockstep.sim.scenario import Ask, EngineShape, Scenario
from lockstep.sim.simulation import run

RUNS_MAX = 400


def shrink(scenario: Scenario, kind: str, parts: Parts | None = None) -> Scenario:
    """kind: of the failure that has to stay. After RUNS_MAX runs whatever is smallest then."""
    runs = 0
    smaller = True
    while smaller and runs < RUNS_MAX:
        smaller = False
        for candidate in _smaller(scenario):
            runs += 1
            if any(failure.kind == kind for failure in run(candidate, parts).failures):
                scenario, smaller = candidate, True
                break
            if runs == RUNS_MAX:
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    for index in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:index] + scenario.faults[index + 1 :])
    if len(scenario.asks) > 1:
        yield from (_without(scenario, ask) for ask in scenario.asks)
    if len(scenario.engines) > 1:
        faults = tuple(replace(fault, engine=0) for fault in scenario.faults if fault.engine == 1)
        yield replace(scenario, engines=scenario.engines[1:], faults=faults)
    for changed in ({"framed": False}, {"jitter": 0.0}):
        if any(getattr(scenario, name) != value for name, value in changed.items()):
            yield replace(scenario, **changed)  # type: ignore[arg-type]
    for number, engine in enumerate(scenario.engines):
        for simpler in _simpler_engines(engine):
            yield replace(scenario, engines=(*scenario.engines[:number], simpler, *scenario.engines[number + 1 :]))
    for index, ask in enumerate(scenario.asks):
        for shorter in _simpler_asks(ask):
            yield replace(scenario, asks=(*scenario.asks[:index], shorter, *scenario.asks[index + 1 :]))


def _without(scenario: Scenario, gone: Ask) -> Scenario:
    asks = tuple(replace(ask, sibling_of="" if ask.sibling_of == gone.name else ask.sibling_of) for ask in scenario.asks if ask is not gone)
    return replace(scenario, asks=asks, faults=tuple(fault for fault in scenario.faults if fault.request != gone.name))


def _simpler_engines(engine: EngineShape) -> Iterator[EngineShape]:
    if engine.stage_count > 1:
        count = engine.stage_count - 1
        extra = engine.microbatch_count - engine.stage_count
        yield replace(engine, stage_count=count, microbatch_count=count + extra, work_s=engine.work_s[:count])
    plain = {"drafts_max": 0, "asynchronous": False, "prefix_caching": False, "priorities": False, "microbatch_count": engine.stage_count}
    for name, value in plain.items():
        if getattr(engine, name) != value:
            yield replace(engine, **{name: value})  # type: ignore[arg-type]
    if len(set(engine.work_s)) > 1:
        yield replace(engine, work_s=(0.01,) * engine.stage_count)


def _simpler_asks(ask: Ask) -> Iterator[Ask]:
    if ask.abort is not None:
        yield replace(ask, abort=None)
    if len(ask.prompt) > 1:
        yield replace(ask, prompt=ask.prompt[: len(ask.prompt) // 2])
    if ask.tokens_max > 1:
        yield replace(ask, tokens_max=ask.tokens_max // 2)
    plain = {"stop_ids": (), "temperature": 0.0, "drafter": "none", "cache_salt": "", "sibling_of": "", "priority": 0, "at": 0.0}
    for name, value in plain.items():
        if getattr(ask, name) != value:
            yield replace(ask, **{name: value})  # type: ignore[arg-type]
