"""What the engine loop needs of its stages, wherever they run."""

from __future__ import annotations

from typing import Protocol

from lockstep.core.records import StepPlan, StepResult


class Cluster(Protocol):
    """Stages that have shaken hands and allocated their KV."""

    def send(self, plan: StepPlan) -> None:
        """Hand the same plan to every stage. Returns without waiting for any of them."""
        ...

    def poll(self, timeout_s: float) -> list[StepResult]:
        """Results that have come, in order; waits at most timeout_s for the first one, or until `wake`.
        Raises PeerError or InternalError once a stage is lost, stalled, or has reported a failure."""
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
