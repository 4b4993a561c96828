"""Mutants: parts in which one rule is loosened, to see which check notices. `MUTANTS` has all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.sim.mutants import booking, deciding, four, handing, linking, lives, replicas, sampling, shaping, windows
from lockstep.sim.mutants.mutant import ALL, ONE, Mutant, Witness

MUTANTS: Sequence[Mutant] = tuple(
    mutant for module in (four, deciding, lives, booking, replicas, sampling, shaping, handing, linking, windows) for mutant in module.MUTANTS
)

NO_CODE_YET: Mapping[str, str] = {
    "rule 25": "stop strings are found by clients, who are no part of what is simulated; to the log they are aborts",
    "rule 28": "no values stay on a GPU: every result comes to the driver before its tokens are used",
    "rule 29": "no tensor parallelism yet",
}
"""Rules that nothing in the engine can break yet, and why."""

__all__ = ["ALL", "MUTANTS", "NO_CODE_YET", "ONE", "Mutant", "Witness"]
