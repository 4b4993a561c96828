"""Runs mutants until something kills them, and says what: a check at run time, and after how many steps, or only the oracle after the run.

A run kills a mutant if it fails where the same scenario with the real parts does not. What Python raises in the mutant's own code is no kill: such a
mutant is broken.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep import errors
from lockstep.errors import InternalError, LockstepError
from lockstep.sim import mutants
from lockstep.sim.mutants import MUTANTS, Mutant, Witness
from lockstep.sim.mutants.setting import scenarios
from lockstep.sim.mutation_bounds import broken_bound
from lockstep.sim.parts import Parts
from lockstep.sim.scenario import Scenario
from lockstep.sim.simulation import Outcome, Simulation

SEEDS_MOST = 300
"""Scenarios that suit a mutant, after which it counts as a survivor."""

SEEDS_EQUIVALENT = 40
"""So many of them an equivalent one has to survive."""

SEEDS_AFTER_KILL = 3
"""More of them after the first that kills it, to see what else does."""

FAILURES_MOST = 60
"""An engine that fails more often in one run begins again for ever."""

ORACLE, AUDIT, LIVENESS, BOUND, REFUSAL = "oracle", "audit", "liveness", "bound", "refusal"
"""What kills besides checks at run time, which go by the class of their error: only the closed form saw it; the books when idle; nothing ended; a
stage refused what another engine handed over."""

_AFTER_RUN = {
    "wrong tokens": ORACLE,
    "prompt logprobs": ORACLE,
    "wrong end": ORACLE,
    "stream": ORACLE,
    "audit": AUDIT,
    "not finished": LIVENESS,
    "refused part": REFUSAL,
}
_CHECKS = frozenset(name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, LockstepError)) | {"AssertionError"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """applied: the scope. by: every check that killed it in the runs looked at, first the first. first_seed: of the first killing run, -1 for none.
    steps_to_detect: from the step at which it first did otherwise to the one that a check at run time stopped, in that run; None if it was seen
    after the run, or in another epoch. met: in how many runs it did otherwise. broken: what Python raised in it, or ''."""

    name: str
    kind: str
    applied: str
    killed: bool
    by: tuple[str, ...]
    first_seed: int
    steps_to_detect: int | None
    equivalent: str | None
    runs: int
    met: int
    broken: str = ""

    @property
    def right(self) -> bool:
        """Equivalent ones survive, all others are killed."""
        return not self.broken and self.killed == (self.equivalent is None)


@dataclass(slots=True, kw_only=True)
class _Run:
    """by: what killed it, '' for nothing. at: (epoch, step) of what was noticed."""

    by: str = ""
    at: tuple[int, int] | None = None
    broken: str = ""
    text: str = ""


@dataclass(slots=True)
class _Raised:
    """What stages raised that no part of the engine raises on purpose."""

    names: list[str] = field(default_factory=list)


class _Noticing(Simulation):
    """Keeps at which step of which epoch the last failure was noticed, and what ended an engine."""

    at: tuple[int, int] | None = None
    death = ""

    def note_detection(self, engine: int, error: LockstepError, concerned: Sequence[str]) -> None:
        driver = self.engines[engine].driver
        named = error.step if isinstance(error, InternalError) else -1
        self.at = (driver.epoch, named if named >= 0 else driver.scheduler.received)
        super().note_detection(engine, error, concerned)
        if len(self._detections) > FAILURES_MOST:
            self._fail("not finished", f"an engine begins again for the {FAILURES_MOST}th time")

    def note_death(self, engine: int, error: Exception) -> None:
        driver = self.engines[engine].driver
        self.at, self.death = (driver.epoch, driver.scheduler.received), _kind(error)
        super().note_death(engine, error)


def _kind(error: Exception) -> str:
    """The class of the error, and whether the mutant's own code raised it: then it is no check, whatever its class."""
    frames = traceback.extract_tb(error.__traceback__)
    own = bool(frames) and Path(frames[-1].filename).parent == Path(mutants.__file__).parent
    return type(error).__name__ + " in the mutant" * own


def _guarded(make_stage: Callable[..., Any], raised: _Raised) -> Callable[..., Any]:
    """Stages that say what Python raised in them."""

    def guard(call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*given: Any) -> Any:
            try:
                return call(*given)
            except LockstepError:
                raise
            except Exception as error:
                raised.names.append(f"{_kind(error)}: {error}")
                raise

        return guarded

    def make(**given: Any) -> Any:
        stage = make_stage(**given)
        for name in ("advance", "offer", "offer_part", "offer_pull"):
            setattr(stage, name, guard(getattr(stage, name)))
        return stage

    return make


def _run(scenario: Scenario, parts: Parts) -> _Run:
    raised = _Raised()
    try:
        simulation = _Noticing(scenario, replace(parts, make_stage=_guarded(parts.make_stage, raised)), None)
        outcome = simulation.run()
    except LockstepError as error:
        return _Run(by=type(error).__name__, text=str(error))
    except Exception as error:
        return _Run(broken=f"{_kind(error)}: {error}")
    return _judged(outcome, simulation, [name for name in raised.names if not name.startswith("ProcessEnded")])


def _judged(outcome: Outcome, simulation: _Noticing, raised: Sequence[str]) -> _Run:
    if not outcome.failures:
        return _Run()
    first = outcome.failures[0]
    by, at = _AFTER_RUN.get(first.kind, ""), None
    if not by:
        at = simulation.at
        by = simulation.death or (raised[0].split(":")[0] if raised else outcome.detections[-1].check)
    broken = "" if by in _CHECKS or by in _AFTER_RUN.values() else (raised[0] if raised else first.text)
    return _Run(by="" if broken else by, at=at, broken=broken, text=first.text)


# Verdicts


def judge(mutant: Mutant, scope: str, *, first_seed: int = 0, seeds_most: int = 0, seeds_after: int = SEEDS_AFTER_KILL) -> Verdict:
    """Runs it until it is killed and a little longer, or for as many scenarios as there may be (0: what is usual)."""
    seeds_most = seeds_most or (SEEDS_MOST if mutant.equivalent is None else SEEDS_EQUIVALENT)
    by: dict[str, None] = {}
    seed, steps, runs, met, broken = -1, None, 0, 0, ""
    if mutant.bound is not None and broken_bound(mutant.bound, mutant.parts[scope](Witness())):
        by[BOUND], seed, seeds_most = None, first_seed, seeds_after
    for scenario in scenarios(mutant.setting, first_seed):
        if runs >= seeds_most or broken:
            break
        runs += 1
        witness = Witness()
        seen = _run(scenario, mutant.parts[scope](witness))
        met += bool(witness.noted)
        broken = seen.broken
        if not seen.by or _run(scenario, mutant.beside).by:
            continue
        if not by:
            began = None if seen.at is None else witness.first_in(seen.at[0])
            steps = None if began is None or seen.at is None else max(0, seen.at[1] - began)
            seed, seeds_most = scenario.seed, min(seeds_most, runs + seeds_after)
        by[seen.by] = None
    return Verdict(
        name=mutant.name,
        kind=mutant.kind,
        applied=scope,
        killed=bool(by),
        by=tuple(by),
        first_seed=seed,
        steps_to_detect=steps,
        equivalent=mutant.equivalent,
        runs=runs,
        met=met,
        broken=broken,
    )


def cases(name: str | None = None) -> list[tuple[str, str]]:
    """(name, scope) of all mutants, or of one."""
    return [(mutant.name, scope) for mutant in MUTANTS if name in (None, mutant.name) for scope in mutant.parts]


def judge_all(chosen: Sequence[tuple[str, str]], jobs: int) -> Iterator[Verdict]:
    """In the order of the cases, as they become known."""
    if jobs <= 1:
        yield from map(judge_case, chosen)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(judge_case, chosen)


def judge_case(case: tuple[str, str]) -> Verdict:
    name, scope = case
    return judge(next(mutant for mutant in MUTANTS if mutant.name == name), scope)
