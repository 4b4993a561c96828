"""`Setting`: which scenarios a mutant is run on. Drawn ones, of which those are taken, and changed, in which it can be met."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lockstep.runtime.stage import DRIVER
from lockstep.sim.drawing import draw
from lockstep.sim.scenario import Ask, EngineShape, Fault, Scenario

SOON_S = 0.3
"""Faults happen before that, while there is something to disturb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a scenario must have for a mutant to be met, and what it may have.

    drafts, asynchronous: None for either. hand_over: two engines. stages_least, stages_most: of every engine; 0 for any number.
    plans_in_flight: so many may be, 0 for any number; a message that never came is noticed by whoever waits for it, as many plans later.
    faults: of each kind there is one; all others are taken out, as are aborts unless `aborts`. alike: all prompts are made of two tokens, so that
    blocks are alike that stand behind different prefixes. tight: pools that hold one long request and hardly more.
    windows: some layers or all see the last few positions alone.
    """

    drafts: bool | None = None
    hand_over: bool = False
    asynchronous: bool | None = None
    stages_least: int = 1
    stages_most: int = 0
    plans_in_flight: int = 0
    faults: tuple[str, ...] = ()
    aborts: bool = False
    alike: bool = False
    tight: bool = False
    windows: bool = False

    def suits(self, scenario: Scenario) -> bool:
        """Links carry objects, since some mutants are ends of links."""
        engines = scenario.engines
        return (
            not scenario.framed
            and self.windows == any(scenario.windows)
            and self.hand_over == (len(engines) > 1)
            and (self.drafts is None or any(bool(engine.drafts_max) == self.drafts for engine in engines))
            and (self.asynchronous is None or all(engine.asynchronous == self.asynchronous for engine in engines))
            and all(engine.stage_count >= self.stages_least for engine in engines)
            and all(self.stages_most == 0 or engine.stage_count <= self.stages_most for engine in engines)
            and all(self.plans_in_flight in (0, engine.microbatch_count + engine.asynchronous) for engine in engines)
        )

    def changed(self, scenario: Scenario) -> Scenario:
        asks, engines = tuple(self._ask(ask) for ask in scenario.asks), scenario.engines
        if self.tight:
            longest = max(len(ask.prompt) + ask.tokens_max for ask in asks)
            engines = tuple(_tight(engine, longest) for engine in engines)
        return replace(scenario, engines=engines, asks=asks, faults=tuple(self._faults(scenario)))

    def _ask(self, ask: Ask) -> Ask:
        prompt = tuple(token % 2 for token in ask.prompt) if self.alike else ask.prompt
        return replace(ask, prompt=prompt, abort=ask.abort if self.aborts else None, at=0.1 * ask.at if self.tight else ask.at)

    def _faults(self, scenario: Scenario) -> Iterator[Fault]:
        rng = random.Random(scenario.seed)
        for kind in self.faults:
            engine = len(scenario.engines) - 1 if kind.startswith("kv-part") else rng.randrange(len(scenario.engines))
            target, other = _where(rng, kind, scenario.engines[engine].stage_count)
            request = rng.choice(scenario.asks).name if kind == "poison" else ""
            at = 0.0 if kind == "poison" else rng.random() * SOON_S
            yield Fault(kind=kind, at=at, engine=engine, target=target, other=other, request=request)


ANY = Setting()


def _tight(engine: EngineShape, longest: int) -> EngineShape:
    return replace(engine, block_count=-(-longest // engine.block_size), slot_count=max(4, engine.slot_count))


def _where(rng: random.Random, kind: str, stage_count: int) -> tuple[int, int]:
    """target and other of a fault: for links the two ends, for poison the stage and the fatal token."""
    stage, last = rng.randrange(stage_count), stage_count - 1
    if kind == "poison":
        return stage, rng.choice((0, 1, 2))
    if not kind.startswith("link-"):
        return stage, 0
    links: Sequence[tuple[int, int]] = [(DRIVER, stage), (last, DRIVER), *((i, i + 1) for i in range(last)), *((last, i) for i in range(last))]
    return rng.choice(links)


def scenarios(setting: Setting, first_seed: int) -> Iterator[Scenario]:
    """Those that suit, from a seed on, without end."""
    seed = first_seed
    while True:
        scenario = draw(seed)
        if setting.suits(scenario):
            yield setting.changed(scenario)
        seed += 1
