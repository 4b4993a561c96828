"""The ways to run, and a list of them that covers every pair of settings and the triples that matter. Knows names; runs nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

FACTORS: Mapping[str, tuple[str, ...]] = {
    "stages": ("1", "2", "3", "4", "uneven"),
    "async": ("off", "on"),
    "budget": ("8", "64", "whole"),
    "at_once": ("1", "4", "all"),
    "cache": ("off", "cold", "warm"),
    "preemption": ("none", "forced"),
    "order": ("given", "shuffled"),
    "aborts": ("none", "neighbours"),
    "threads": ("1", "2"),
}
TRIPLES = tuple(("stages", "async", third) for third in ("budget", "cache", "preemption"))
CELLS_LEAST = 40
QUICK_CELLS = 12
QUICK_FORCED = 3
_CANDIDATES = 40

Assignment = tuple[tuple[str, str], ...]
"""Settings of some factors, sorted by factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way to run. processes: each stage in a process of its own, else all in this one."""

    settings: Mapping[str, str]
    processes: bool = False

    def __getitem__(self, factor: str) -> str:
        return self.settings[factor]

    @property
    def name(self) -> str:
        parts = [f"{factor}={self.settings[factor]}" for factor in FACTORS]
        return " ".join([*parts, "processes" if self.processes else "in-process"])


def possible(settings: Mapping[str, str]) -> bool:
    """One request alone has no neighbours, and nobody to be preempted for. A partial assignment is judged by what it has."""
    alone = settings.get("at_once") == "1"
    return not (alone and (settings.get("aborts") == "neighbours" or settings.get("preemption") == "forced"))


def required() -> set[Assignment]:
    """All pairs of settings of two factors, and all triples of TRIPLES, that are possible."""
    groups: Iterable[tuple[str, ...]] = [*itertools.combinations(FACTORS, 2), *TRIPLES]
    return {
        tuple(sorted(zip(group, values, strict=True)))
        for group in groups
        for values in itertools.product(*(FACTORS[f] for f in group))
        if possible(dict(zip(group, values, strict=True)))
    }


def covered(cell: Cell, wanted: set[Assignment]) -> set[Assignment]:
    return {a for a in wanted if all(cell.settings[factor] == value for factor, value in a)}


def full_cells(seed: int = 0) -> list[Cell]:
    """Every required assignment at least once, at least CELLS_LEAST cells, each stages x async pair once in processes."""
    rng = random.Random(seed)
    missing, cells = required(), list[Cell]()
    while missing or len(cells) < CELLS_LEAST:
        cell = _best_of(rng, missing)
        missing -= covered(cell, missing)
        if cell not in cells:
            cells.append(cell)
    return _with_processes(cells, list(itertools.product(FACTORS["stages"], FACTORS["async"])))


def quick_cells(seed: int = 0) -> list[Cell]:
    """QUICK_CELLS cells that cover as many pairs as they can, QUICK_FORCED of them with preemption (whose pools take time to find), two in
    processes."""
    rng = random.Random(seed)
    missing: set[Assignment] = {a for a in required() if len(a) == 2}
    cells: list[Cell] = []
    while len(cells) < QUICK_CELLS:
        if sum(cell["preemption"] == "forced" for cell in cells) == QUICK_FORCED:
            missing = {assignment for assignment in missing if ("preemption", "forced") not in assignment}
        cell = _best_of(rng, missing)
        if cell["preemption"] == "forced" and ("preemption", "forced") not in {setting for a in missing for setting in a}:
            cell = Cell(settings={**cell.settings, "preemption": "none"})
        missing -= covered(cell, missing)
        if cell not in cells:
            cells.append(cell)
    return _with_processes(cells, [("2", "on"), ("3", "off")], exact=False)


def _best_of(rng: random.Random, missing: set[Assignment]) -> Cell:
    """Of some random cells, each built around an assignment that is still missing, the one that covers most."""
    ordered = sorted(missing)
    candidates = [_random_cell(rng, dict(rng.choice(ordered)) if ordered else {}) for _ in range(_CANDIDATES)]
    return max(candidates, key=lambda cell: len(covered(cell, missing)))


def _random_cell(rng: random.Random, fixed: dict[str, str]) -> Cell:
    while True:
        settings = {factor: fixed.get(factor) or rng.choice(values) for factor, values in FACTORS.items()}
        if possible(settings):
            return Cell(settings=settings)


def _with_processes(cells: list[Cell], pairs: Sequence[tuple[str, str]], *, exact: bool = True) -> list[Cell]:
    """For each (stages, async) pair make one cell run in processes: one that forces no preemption, since its timing is not ours to choose.
    Where no cell of the pair is fit (quick), one is changed to that pair."""
    cells = list(cells)
    for stages, asynchronous in pairs:
        fit = [
            i for i, c in enumerate(cells) if c["preemption"] == "none" and not c.processes and (c["stages"], c["async"]) == (stages, asynchronous)
        ]
        if not fit and exact:
            settings = {**cells[0].settings, "stages": stages, "async": asynchronous, "preemption": "none"}
            cells.append(Cell(settings=settings, processes=True))
            continue
        at = fit[0] if fit else next(i for i, c in enumerate(cells) if c["preemption"] == "none" and not c.processes)
        cells[at] = Cell(settings={**cells[at].settings, "stages": stages, "async": asynchronous}, processes=True)
    return cells
