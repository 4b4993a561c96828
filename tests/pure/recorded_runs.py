"""A scheduler, a driver's replica with a recorder, and ranks that are replicas and nothing else; the draws are a formula. No stages, links or model.

Beside the tests of the recorder, which use it."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from core_loop import make_scheduler

from lockstep.core.acceptance import accept
from lockstep.core.digest import Digest, mix64
from lockstep.core.records import Columns, Side, StepPlan, StepResult
from lockstep.core.request import EngineRequest
from lockstep.core.shaping import Shaping
from lockstep.core.table import SlotTable, TableShape
from lockstep.errors import DivergenceError
from lockstep.runtime.recorder import Recorder
from lockstep.runtime.replay import Replica

LENGTH_MAX = 48
VOCABULARY = 50_000
SALT = b"salt of a tenant"
PROCESSORS = (("module:Class", '{"word":"a secret argument"}'),)

Tamper = Callable[[int, int, SlotTable], None]
"""(step, rank, the rank's table), just before that rank runs the step."""


def token_at(generation: int, position: int) -> int:
    return mix64(generation * 1000 + position) % VOCABULARY


class RecordedRun:
    """Requests with seeds, drafts, stop ids and salts on `rank_count` ranks. Rank 0's draws are the results."""

    def __init__(self, seed: int = 0, *, rank_count: int = 2, steps_kept: int = 8, requests: int = 10, tamper: Tamper | None = None) -> None:
        self.scheduler = make_scheduler(drafts_max=3, block_counts=(20,))
        config = self.scheduler.config
        self.shape = TableShape(slot_count=config.slot_count, length_max=LENGTH_MAX, block_size=config.block_size, drafts_max=config.drafts_max)
        self.recorder = Recorder(rank_count=rank_count, fingerprint="numerics of a test", steps_kept=steps_kept)
        self.driver = self._replica()
        self.ranks = [self._replica() for _ in range(rank_count)]
        self.recorder.begin(0, self.driver)
        self.unresolved: deque[StepPlan] = deque()
        self.digests: list[int] = []
        self.prompts: list[list[int]] = []
        self._tamper = tamper
        draw = np.random.default_rng(seed)
        for i in range(requests):
            self._submit(draw, i)

    def _replica(self) -> Replica:
        return Replica(SlotTable(self.shape, poison=True), Digest(0))

    def _submit(self, draw: np.random.Generator, index: int) -> None:
        prompt = draw.integers(1000, VOCABULARY, int(draw.integers(1, 20)))
        self.prompts.append(prompt.tolist())
        stop_ids = tuple(draw.integers(1000, VOCABULARY, 3).tolist())
        ids = np.random.default_rng(index).integers(1000, VOCABULARY, 3).tolist()
        shaping = Shaping(
            frequency_penalty=0.5, logit_bias=((ids[0], 1.5),), allowed_token_ids=(ids[1],), bad_words=((ids[2], ids[0]),), processors=PROCESSORS
        )
        side = Side(stop_ids=stop_ids, shaping=shaping if index % 2 else Shaping(), cache_salt=SALT, extras={"grammar": b"a secret grammar"})
        sampling: dict[str, Any] = {"seed": int(draw.integers(1 << 62)), "temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.25, "side": side}
        length_cap = len(prompt) + int(draw.integers(1, 20))
        self.scheduler.submit(EngineRequest(request_id=f"r{index}", prompt=prompt.astype(np.int32), length_cap=length_cap, **sampling))

    def turn(self) -> bool:
        """Write the plans that can be written and answer the oldest. False if there was nothing to do. Raises what the engine would."""
        while (plan := self.scheduler.plan()) is not None:
            self.unresolved.append(plan)
        if not self.unresolved:
            return False
        self._answer(self.unresolved[0])
        return True

    def run(self, steps: int = 10_000) -> RecordedRun:
        """So many steps, or until nothing is left to do."""
        for _ in range(steps):
            if not self.turn():
                break
        return self

    def _answer(self, plan: StepPlan) -> None:
        layouts = []
        for rank, replica in enumerate(self.ranks):
            if self._tamper is not None:
                self._tamper(plan.step, rank, replica.table)
            layouts.append(replica.run(plan))
        layout = layouts[0]
        owners = np.repeat(layout.generation[layout.sample_row], np.diff(layout.sample_starts)).tolist()
        draws = [token_at(generation, position) for generation, position in zip(owners, layout.sampling.position.tolist(), strict=True)]
        rows = layout.sample_row
        drafts = [self._drafts(int(g), int(k)) for g, k in zip(layout.generation[rows], layout.known[rows], strict=True)]
        digests = np.array([replica.digest.value for replica in self.ranks], np.uint64)
        result = accept(layout, np.array(draws, np.int32), epoch=0, digests=digests, drafts=drafts)
        result = dataclasses.replace(result, reasons=("a secret reason",) * len(result))
        for replica in self.ranks:
            replica.offer(result)
        self._receive(plan, result)

    def _drafts(self, generation: int, known: int) -> Sequence[int]:
        """Some right, some wrong."""
        return [token_at(generation, known + 1 + i) + (known % 4 == i) for i in range((generation + known) % 4)]

    def _receive(self, plan: StepPlan, result: StepResult) -> None:
        """As a driver does: the plan is no longer out once its result has come."""
        self.unresolved.popleft()
        self.recorder.before(plan, self.driver)
        self.driver.run(plan)
        self.recorder.note(result, self.driver.digest.value)
        if (result.digests != np.uint64(self.driver.digest.value)).any():
            raise DivergenceError(f"step {plan.step}: replicas disagree", step=plan.step)
        self.digests.append(self.driver.digest.value)
        self.scheduler.receive(result)
        self.driver.offer(result)

    def columns_at(self, step: int) -> dict[int, Columns]:
        """Of every replica, the driver's too."""
        found = {rank: replica.columns_of(step) for rank, replica in enumerate([self.driver, *self.ranks], start=-1)}
        return {rank: columns for rank, columns in found.items() if columns is not None}
