"""A run on known tokens: the real scheduler, driver and script, with a play-back of the plain answers in the stages' place.

It takes a fraction of a second, so it can try pool sizes until one makes a cell do what its name says.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lockstep.config import EngineConfig
from lockstep.core.ragged import Ragged
from lockstep.core.records import StepPlan, StepResult
from lockstep.core.request import EngineRequest
from lockstep.core.scheduler import Scheduler
from lockstep.core.schema import FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from lockstep.core.stats import SchedulerStats
from lockstep.core.table import SlotTable, TableShape
from lockstep.core.types import ceil_div
from lockstep.launch.engine import scheduler_config
from lockstep.runtime.driver import Driver
from lockstep.runtime.engine import Engine

TRIES_MAX = 24


class PlaybackCluster:
    """Answers one plan a poll, the oldest first, as `LocalCluster` does. tokens_of: by seed (unique a request) the prompt's length and the answer's
    tokens; a request that is not in it gets token 0 up to its cap."""

    def __init__(self, tokens_of: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        self._tokens_of = tokens_of
        self._plans: deque[StepPlan] = deque()
        self._known: dict[int, tuple[int, int, int]] = {}

    def send(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def poll(self, timeout_s: float) -> list[StepResult]:
        return [self._answer(self._plans.popleft())] if self._plans else []

    def _answer(self, plan: StepPlan) -> StepResult:
        """_known: by generation (seed, known tokens, cap); gone once a request has ended, so that its later rows resolve to nothing."""
        c = plan.admissions.columns
        for i in range(len(plan.admissions.slots)):
            self._known[int(c["generation"][i])] = (int(c["seed"][i]), int(c["known"][i]), int(c["length_cap"][i]))
        rows = [r for r in np.flatnonzero(plan.rows.samples) if int(plan.rows.generations[r]) in self._known]
        drawn = [self._draw(int(plan.rows.generations[r])) for r in rows]
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            slots=plan.rows.slots[rows],
            generations=plan.rows.generations[rows],
            tokens=Ragged.of([[token] for token, _ in drawn]),
            finishes=np.array([finish for _, finish in drawn], np.int32),
            drafts=Ragged.of([()] * len(rows)),
        )

    def _draw(self, generation: int) -> tuple[int, int]:
        seed, known, cap = self._known[generation]
        prompt_length, tokens = self._tokens_of.get(seed, (0, ()))
        index = known - prompt_length
        token = tokens[index] if index < len(tokens) else 0
        finish = FINISH_STOP if tokens and index == len(tokens) - 1 else FINISH_LENGTH if known + 1 == cap else FINISH_NONE
        if finish:
            del self._known[generation]
        else:
            self._known[generation] = (seed, known + 1, cap)
        return token, finish

    def wake(self) -> None:
        """Nothing to do: `poll` never waits."""

    def describe(self) -> dict[str, object]:
        return {"transport": "play-back"}

    def close(self) -> None:
        self._plans.clear()


def dry_engine(config: EngineConfig, window: int, block_count: int, tokens_of: Mapping[int, tuple[int, Sequence[int]]]) -> Engine:
    """The engine that `launch_engine` would build for this config in one process, on play-back. No rank takes part, so no digest is compared."""
    scheduler = Scheduler(scheduler_config(config, (block_count,)), prefix_secret=b"dry run")
    shape = TableShape(slot_count=config.max_num_seqs, length_max=window, block_size=config.block_size)
    return Engine(Driver(scheduler, SlotTable(shape), 0), PlaybackCluster(tokens_of))


def choose_pool(
    config: EngineConfig,
    window: int,
    requests: Sequence[EngineRequest],
    tokens_of: Mapping[int, tuple[int, Sequence[int]]],
    run: Callable[[Engine], None],
    missed: Callable[[SchedulerStats], Sequence[str]],
) -> EngineConfig:
    """The config with the largest tried pool on which a dry run misses no counter; or, if none does, that which misses fewest (the cell will say so)."""
    size = config.block_size
    least = ceil_div(window, size)
    most = sum(ceil_div(request.length_cap, size) for request in requests)
    best: tuple[int, int] | None = None
    for count in sorted({least + (most - least) * i // TRIES_MAX for i in range(TRIES_MAX)}, reverse=True):
        engine = dry_engine(config, window, count, tokens_of)
        run(engine)
        engine.close()
        misses = len(missed(engine.driver.scheduler.stats))
        if best is None or misses < best[0]:
            best = (misses, count)
        if misses == 0:
            break
    assert best is not None
    return dataclasses.replace(config, num_gpu_blocks_override=best[1])
