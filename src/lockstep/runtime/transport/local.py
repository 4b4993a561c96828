"""Stages in this process: no thread, no socket; whoever polls runs them.

One stage gets messages as objects. Several stages exchange the very frames that would cross a socket, so numbering, checksums and codec are
exercised too.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from lockstep.core.records import StepPlan, StepResult
from lockstep.runtime.stage import DRIVER, Stage
from lockstep.runtime.transport.frames import LinkReader, LinkWriter


class LocalCluster:
    """Runs each stage one piece of work at a time, the last stage first, so that the pipeline drains before it fills."""

    def __init__(self, stages: Sequence[Stage], description: dict[str, object] | None = None) -> None:
        self.stages = tuple(stages)
        self._description = description or {}
        self._results: deque[StepResult] = deque()
        self._direct = len(stages) == 1
        self._woken = threading.Event()
        ends = (DRIVER, *range(len(stages)))
        self._writers = {(a, b): LinkWriter(a, b) for a in ends for b in ends if a != b}
        self._readers = {end: LinkReader(end) for end in ends}

    def send(self, plan: StepPlan) -> None:
        for stage in self.stages:
            self._carry(DRIVER, stage.index, plan)

    def poll(self, timeout_s: float) -> list[StepResult]:
        """Runs stages until a result is there or none can go on; in the latter case waits for `wake`."""
        ran = False
        while not self._results and self.run_once():
            ran = True
        if not ran and not self._results and timeout_s > 0:
            self._woken.wait(timeout_s)
        self._woken.clear()
        results = list(self._results)
        self._results.clear()
        return results

    def run_once(self) -> bool:
        """One piece of work of the last stage that has any. False if every stage waits."""
        return any(self.run_stage(stage.index) for stage in reversed(self.stages))

    def run_stage(self, index: int) -> bool:
        """One piece of work of this stage; False if it has to wait."""
        sends = self.stages[index].advance()
        for send in sends or ():
            self._carry(index, send.destination, send.message)
        return sends is not None

    def _carry(self, source: int, destination: int, message: Any) -> None:
        if not self._direct:
            frames = self._writers[source, destination].pack(message)
            _, message = self._readers[destination].unpack(frames)
        if destination == DRIVER:
            self._results.append(message)
        else:
            self.stages[destination].offer(message)

    def wake(self) -> None:
        self._woken.set()

    def describe(self) -> dict[str, object]:
        return {"transport": "in-process", "pids": [os.getpid()] * len(self.stages), **self._description}

    def close(self) -> None:
        self._results.clear()

    def audit(self) -> list[str]:
        return [line for stage in self.stages for line in stage.audit()]
