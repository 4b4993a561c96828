"""`draw(seed)`: a scenario in which every parameter is drawn. Small ones: they reach every state of the core, and many of them run in a second."""

from __future__ import annotations

import random
from dataclasses import replace

from lockstep.core.blocks import held_blocks_most
from lockstep.runtime.stage import DRIVER
from lockstep.sim.faults import BUSY, FLIPS, KINDS
from lockstep.sim.rig import VOCABULARY
from lockstep.sim.scenario import DRAFTERS, REQUEST_PHASES, Abort, Ask, EngineShape, Fault, Scenario

LENGTH_MAX = 56
STRIKING = ("crash", "stall", "link-drop", "link-damage")
"""May count as strikes against requests in flight; three of them could end an innocent one, by PROTOCOL.md 22, so a run has at most two."""

CHANGES = ("foreign-kv", *(f"flip-{name}" for name in FLIPS))


def draw(seed: int) -> Scenario:
    rng = random.Random(seed)
    two = rng.random() < 0.35
    asks = _asks(rng, two)
    cap_max = max(len(ask.prompt) + ask.tokens_max for ask in asks)
    engines = tuple(_engine(rng, cap_max) for _ in range(2 if two else 1))
    scenario = Scenario(
        seed=seed,
        engines=engines,
        asks=asks,
        faults=_faults(rng, engines, asks),
        link_s=rng.choice([0.0005, 0.002, 0.01]),
        jitter=rng.choice([0.0, 1.0, 4.0]),
        framed=rng.random() < 0.125,
    )
    return scenario if two or rng.random() < 0.5 else _with_windows(rng, scenario)


def _with_windows(rng: random.Random, scenario: Scenario) -> Scenario:
    """A model of which some layers, or all, see the last few positions. The pool of their group holds little more than one request at the least."""
    (engine,) = scenario.engines
    window = rng.choice([1, 2, 3, 5, 9, 14])
    step_positions = engine.token_budget + (engine.microbatch_count + engine.asynchronous) * (1 + engine.drafts_max)
    least = held_blocks_most(scenario.length_max, window, step_positions, engine.block_size)
    engine = replace(engine, window_blocks=least + rng.choice([0, 0, 1, least, 3 * least]))
    return replace(scenario, engines=(engine,), windows=rng.choice([(0, window), (0, window), (window,)]))


def _engine(rng: random.Random, cap_max: int) -> EngineShape:
    stage_count = rng.choice([1, 2, 2, 3, 3, 4, 5])
    block_size = rng.choice([1, 2, 4, 4, 8])
    least = -(-cap_max // block_size)
    slow = rng.randrange(stage_count) if rng.random() < 0.3 else -1
    return EngineShape(
        stage_count=stage_count,
        asynchronous=rng.random() < 0.5,
        block_size=block_size,
        block_count=least + rng.choice([0, 0, rng.randrange(1 + least // 2), least, 3 * least]),
        slot_count=rng.choice([1, 2, 3, 4, 4, 6, 8]),
        token_budget=rng.choice([1, 3, 8, 8, 16, 64]),
        microbatch_count=stage_count + rng.randrange(2),
        prefix_caching=rng.random() < 0.7,
        priorities=rng.random() < 0.3,
        drafts_max=rng.choice([0, 0, 0, 1, 2, 4, 8]),
        prompt_logprobs_max=1 + cap_max * block_size % 7,
        work_s=tuple(0.03 if stage == slow else rng.choice([0.005, 0.01, 0.015]) for stage in range(stage_count)),
        import_timeout_s=rng.choice([0.15, 0.3]),
        lease_s=rng.choice([0.01, 0.6, 0.6, 0.6, 0.6, 0.6]),
    )


# Requests


def _asks(rng: random.Random, two: bool) -> tuple[Ask, ...]:
    shared = [rng.randrange(VOCABULARY) for _ in range(30)]
    span_s = rng.choice([0.0, 0.1, 0.5])
    plain = rng.random() < 0.4
    asks: list[Ask] = []
    for number in range(rng.randrange(2, 8)):
        ask = _ask(rng, number, shared, span_s, plain=plain, direct=two and rng.random() < 0.2)
        asks.append(ask)
        if rng.random() < 0.1:
            asks += [_sibling(rng, ask, i) for i in range(1, rng.randrange(2, 4))]
    return tuple(asks)


def _ask(rng: random.Random, number: int, shared: list[int], span_s: float, *, plain: bool, direct: bool) -> Ask:
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 5, 9, 16, 30]))]
    if rng.random() < 0.4:
        prompt = (shared[: rng.randrange(1, 30)] + prompt[: rng.randrange(1, 8)])[:38]
    at = rng.random() * span_s
    greedy = rng.random() < 0.4
    ask = Ask(
        name=f"r{number}",
        prompt=tuple(prompt),
        tokens_max=min(rng.choice([1, 2, 4, 8, 12, 16]), LENGTH_MAX - len(prompt)),
        seed=rng.getrandbits(63),
        at=at,
        temperature=0.0 if greedy else rng.choice([0.5, 1.0]),
        top_k=0 if greedy else rng.choice([0, 7]),
        top_p=1.0 if greedy else rng.choice([1.0, 0.5]),
        min_p=0.0 if greedy else rng.choice([0.0, 0.25]),
        stop_ids=tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 10, 40]))),
        priority=rng.randrange(3),
        cache_salt=rng.choice(["", "", "", "a"]),
        prompt_logprobs=rng.random() < 0.15,
        direct=direct,
        drafter=rng.choice(DRAFTERS),
        abort=None if plain or rng.random() < 0.6 else _abort(rng, at),
    )
    return replace(ask, frequency_penalty=0.5) if ask.seed % 3 == 0 else ask


def _sibling(rng: random.Random, first: Ask, index: int) -> Ask:
    return Ask(
        name=f"{first.name}.{index}",
        prompt=first.prompt,
        tokens_max=first.tokens_max,
        seed=first.seed + index,
        at=first.at,
        temperature=first.temperature,
        top_k=first.top_k,
        top_p=first.top_p,
        min_p=first.min_p,
        frequency_penalty=first.frequency_penalty,
        stop_ids=first.stop_ids,
        priority=first.priority,
        cache_salt=first.cache_salt,
        sibling_of=first.name,
        direct=first.direct,
        drafter=rng.choice(DRAFTERS),
    )


def _abort(rng: random.Random, at: float) -> Abort:
    return Abort(
        at=at + rng.choice([0.0, rng.random() * 0.1, rng.random()]),
        phase=rng.choice(["", *REQUEST_PHASES]),
        again_after=rng.choice([-1.0, -1.0, 0.0, 0.001, 0.05]),
    )


# Faults


def _faults(rng: random.Random, engines: tuple[EngineShape, ...], asks: tuple[Ask, ...]) -> tuple[Fault, ...]:
    mix = rng.random()
    if mix < 0.25:
        return ()
    if mix < 0.35:
        return _poison(rng, engines, asks)
    if mix < 0.38:
        return tuple(_crash_after_progress(rng, engines) for _ in range(rng.randrange(3, 9)))
    if mix < 0.57:
        return tuple(_change(rng, engines) for _ in range(rng.randrange(1, 4)))
    faults: list[Fault] = []
    for _ in range(rng.randrange(1, 5)):
        fault = _fault(rng, engines)
        if fault.kind not in STRIKING or sum(other.kind in STRIKING for other in faults) < 2:
            faults.append(fault)
    return tuple(faults)


def _time(rng: random.Random) -> float:
    return rng.choice([0.0, rng.random() * 0.2, rng.random(), rng.random() * 2.0])


def _poison(rng: random.Random, engines: tuple[EngineShape, ...], asks: tuple[Ask, ...]) -> tuple[Fault, ...]:
    engine = rng.randrange(len(engines))
    chosen = rng.sample([ask.name for ask in asks], min(len(asks), rng.choice([1, 1, 2])))
    return tuple(
        Fault(kind="poison", at=0.0, engine=engine, target=rng.randrange(engines[engine].stage_count), other=rng.choice([0, 1, 2, 5]), request=name)
        for name in chosen
    )


def _crash_after_progress(rng: random.Random, engines: tuple[EngineShape, ...]) -> Fault:
    """However many of these there are, they end nobody: everybody gets on between two of them."""
    engine = len(engines) - 1
    return Fault(kind="crash", at=0.0, engine=engine, phase="decode", target=rng.randrange(engines[engine].stage_count), other=1)


def _change(rng: random.Random, engines: tuple[EngineShape, ...]) -> Fault:
    engine = rng.randrange(len(engines))
    kind = "flip-draft" if engines[engine].drafts_max and rng.random() < 0.3 else rng.choice(CHANGES)
    count = engines[engine].stage_count
    if kind == "flip-draft":
        return Fault(kind=kind, at=_time(rng), engine=engine, target=count - 1, other=rng.randrange(DRIVER, count - 1))
    target = rng.randrange(count) if kind == "foreign-kv" else rng.randrange(DRIVER, count)
    return Fault(kind=kind, at=_time(rng), engine=engine, phase=rng.choice(KINDS[kind].phases), target=target)


def _fault(rng: random.Random, engines: tuple[EngineShape, ...]) -> Fault:
    kinds = [kind for kind in KINDS if kind.startswith(("link-", "kv-")) or kind in ("crash", "stall", "slow")]
    kind = rng.choice([kind for kind in kinds if KINDS[kind].needs != "engines" or len(engines) > 1])
    phases = [phase for phase in KINDS[kind].phases if phase != "importing" or len(engines) > 1]
    phase = rng.choice(["", *phases])
    engine = len(engines) - 1 if phase == "importing" or kind.startswith("kv-") else rng.randrange(len(engines))
    if kind.startswith("kv-"):
        phase = ""
    target, other = _link(rng, engines[engine].stage_count, phase) if kind.startswith("link-") else (rng.randrange(engines[engine].stage_count), 0)
    return Fault(
        kind=kind, at=_time(rng), engine=engine, phase=phase if phase or kind not in ("slow",) else rng.choice(BUSY), target=target, other=other
    )


def _link(rng: random.Random, stage_count: int, phase: str) -> tuple[int, int]:
    """A link on which something travels in this phase."""
    last = stage_count - 1
    outward = [(DRIVER, stage) for stage in range(stage_count)]
    if phase == "recovering":
        return rng.choice(outward + [(stage, DRIVER) for stage in range(stage_count)])
    onward = [(stage, stage + 1) for stage in range(last)]
    return rng.choice(outward + onward + [(last, DRIVER)] + [(last, stage) for stage in range(last)])
