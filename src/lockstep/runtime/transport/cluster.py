"""What the engine loop needs of its stages, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lockstep.core.records import Columns, StepPlan, StepResult
from lockstep.runtime.messages import GrammarReport, GrammarRequest, ImportReport, WeightsReport, WeightsRequest

FromStages = StepResult | ImportReport | GrammarReport | WeightsReport
"""What the driver and its loop take from stages."""

ToStages = StepPlan | GrammarRequest | WeightsRequest
"""What every stage gets from the driver."""


class Cluster(Protocol):
    """Stages that have shaken hands and allocated their KV. It is made with its first epoch begun and ready."""

    def send(self, message: ToStages) -> None:
        """Hand the same message to every stage. Returns without waiting for any of them. Only while `is_ready`."""
        ...

    def poll(self, timeout_s: float) -> list[FromStages]:
        """What has come in the present epoch, in order; waits at most timeout_s for the first, or until `wake`. Moves a beginning epoch on.
        Raises PeerError or InternalError once a stage is lost, stalled, does not come up, or has reported a failure. The epoch is over then: until
        `begin`, `poll` only waits."""
        ...

    def begin(self, epoch: int) -> None:
        """End what is left of the epoch before and begin another: interrupts every stage, whatever it does or waits for, and starts again
        those that are lost or do not answer. Returns at once; `is_ready` turns true in a later `poll`, or that raises."""
        ...

    def use_weights(self, weights: str) -> None:
        """What stages compute with from the next `begin` on; those that are started again too. They have said that they have it ready."""
        ...

    @property
    def is_ready(self) -> bool:
        """Every stage has begun the present epoch."""
        ...

    def columns_of(self, step: int) -> Mapping[int, Columns]:
        """What the digest of each stage folded for a step of the epoch that has just failed, by stage; of those that can still say, within a second.
        Called between a failure and `begin`."""
        ...

    def check_seconds(self) -> Mapping[int, float]:
        """Seconds that run-time checks have taken: by stage, as last heard; -1: of the driver's ends of its links."""
        ...

    def wake(self) -> None:
        """End a `poll` that waits. May be called from any thread."""
        ...

    def describe(self) -> dict[str, object]:
        """For logs and `lockstep verify`: transport, process ids, layers, bytes of weights and KV of each stage."""
        ...

    def close(self) -> None:
        """Stop the stages and free what they hold. Leaves no process behind. May be called twice."""
        ...
