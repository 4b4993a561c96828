"""Stages in this process: no thread, no socket; whoever polls runs them.

One stage gets messages as objects. Several stages exchange the very frames that would cross a socket, so numbering, checksums and codec are
exercised too.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.core.records import Columns
from lockstep.errors import InternalError, PeerError
from lockstep.runtime.stage import DRIVER, Stage
from lockstep.runtime.transport.cluster import FromStages, ToStages
from lockstep.runtime.transport.frames import LinkReader, LinkWriter

PREPARING_S = 0.005


class LocalCluster:
    """Runs each stage one piece of work at a time, the last stage first, so that the pipeline drains before it fills.

    make_stages(epoch): the stages as they begin that epoch, over the same executors. use_weights: tells it with which weights, from the next on; None
    if there are no others. describe_stages: what `describe` adds. checks: False takes no checksums."""

    def __init__(
        self,
        make_stages: Callable[[int], Sequence[Stage]],
        describe_stages: Callable[[], Mapping[str, object]] = dict,
        *,
        use_weights: Callable[[str], None] | None = None,
        checks: bool = True,
    ) -> None:
        self._use_weights = use_weights
        self._make_stages = make_stages
        self._describe_stages = describe_stages
        self._checks = checks
        self._woken = threading.Event()
        self._results: deque[FromStages] = deque()
        self._former_seconds: Counter[int] = Counter()
        self.stages: tuple[Stage, ...] = ()
        self.begin(0)

    def begin(self, epoch: int) -> None:
        if self.stages:
            self._former_seconds.update(self._epoch_seconds())
        self.stages = tuple(self._make_stages(epoch))
        self._is_over = False
        self._direct = len(self.stages) == 1
        self._results.clear()
        ends = (DRIVER, *range(len(self.stages)))
        self._writers = {(a, b): LinkWriter(a, b, epoch=epoch, checks=self._checks) for a in ends for b in ends if a != b}
        self._readers = {end: LinkReader(end, epoch=epoch, checks=self._checks) for end in ends}

    def use_weights(self, weights: str) -> None:
        assert self._use_weights is not None, "these stages have no other weights"
        self._use_weights(weights)

    @property
    def is_ready(self) -> bool:
        return not self._is_over

    def send(self, message: ToStages) -> None:
        for stage in self.stages:
            self._carry(DRIVER, stage.index, message)

    def poll(self, timeout_s: float) -> list[FromStages]:
        """Runs stages until a result is there or none can go on; in the latter case waits for `wake`."""
        ran = not self._is_over and self._run()
        if not ran and not self._results and timeout_s > 0:
            preparing = any(stage.is_preparing for stage in self.stages)
            self._woken.wait(min(timeout_s, PREPARING_S) if preparing else timeout_s)
        self._woken.clear()
        results = list(self._results)
        self._results.clear()
        return results

    def _run(self) -> bool:
        """Something ran. An error in it ends the epoch; one that no part of the engine raises on purpose is ours too."""
        ran = False
        try:
            while not self._results and self.run_once():
                ran = True
        except (PeerError, InternalError):
            self._end_epoch()
            raise
        except Exception as error:
            self._end_epoch()
            raise InternalError(f"a stage failed in its work: {type(error).__name__}: {error}") from error
        return ran

    def _end_epoch(self) -> None:
        self._is_over = True
        self._results.clear()

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
            received = self._readers[destination].unpack(self._writers[source, destination].pack(message))
            assert received is not None, (source, destination)
            message = received[1]
        if destination == DRIVER:
            self._results.append(message)
        else:
            self.stages[destination].offer(message)

    def columns_of(self, step: int) -> dict[int, Columns]:
        found = {stage.index: stage.columns_of(step) for stage in self.stages}
        return {index: columns for index, columns in found.items() if columns is not None}

    def check_seconds(self) -> Mapping[int, float]:
        seconds = self._former_seconds.copy()
        seconds.update(self._epoch_seconds())
        return seconds

    def _epoch_seconds(self) -> dict[int, float]:
        seconds = {stage.index: stage.check_seconds for stage in self.stages} | {DRIVER: 0.0}
        for (source, _), writer in self._writers.items():
            seconds[source] += writer.check_seconds
        for destination, reader in self._readers.items():
            seconds[destination] += reader.check_seconds
        return seconds

    def wake(self) -> None:
        self._woken.set()

    def describe(self) -> dict[str, object]:
        return {"transport": "in-process", "pids": [os.getpid()] * len(self.stages), **self._describe_stages()}

    def close(self) -> None:
        self._results.clear()

    def audit(self) -> list[str]:
        return [line for stage in self.stages for line in stage.audit()]
