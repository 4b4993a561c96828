"""The engine of a transcript: real scheduler, driver, loop, stages and links, scripted draws. Nothing runs unless a command says so.

It knows no words; `transcript_engine` speaks to it, `transcript_world` carries messages between two of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.core.outputs import TokenEvent
from lockstep.core.records import StepPlan, Transfer
from lockstep.core.request import EngineRequest
from lockstep.core.scheduler import SchedulerConfig
from lockstep.core.table import TableShape
from lockstep.errors import InternalError, PeerError
from lockstep.runtime.handover import ToStage
from lockstep.runtime.loop import EngineLoop, RestartPolicy
from lockstep.runtime.messages import KVPull
from lockstep.runtime.stage import DRIVER, Stage
from lockstep.runtime.transport.cluster import FromStages
from lockstep.runtime.transport.local import LocalCluster
from lockstep.sim.oracle import split_evenly
from lockstep.sim.parts import Parts
from lockstep.sim.rig import LAYER_COUNT
from lockstep.sim.scripted import Script, ScriptedExecutor


class HeldCluster(LocalCluster):
    """Runs stages and takes plans only while it is told to, and fails when it is told to. carried: every message of the epoch, (source, destination,
    message)."""

    def __init__(self, make_stages: Callable[[int], Sequence[Stage]]) -> None:
        self.carried: list[tuple[int, int, Any]] = []
        self.takes_plans = False
        self.runs = False
        self._failure: PeerError | InternalError | None = None
        self._is_beginning = False
        self._kept: list[tuple[int, int, Any]] | None = None
        super().__init__(make_stages)

    def begin(self, epoch: int) -> None:
        """As in real processes, the epoch is ready in a later `poll`."""
        super().begin(epoch)
        self.carried.clear()
        self._is_beginning = epoch > 0

    @property
    def is_ready(self) -> bool:
        return super().is_ready and not self._is_beginning and self.takes_plans

    def fail(self, error: PeerError | InternalError) -> None:
        """The next `poll` raises it."""
        self._failure = error
        self._is_over = True

    def poll(self, timeout_s: float) -> list[FromStages]:
        """What has come."""
        if self._failure is not None:
            error, self._failure = self._failure, None
            self._end_epoch()
            raise error
        self._is_beginning = False
        if self.runs:
            self._run_all()
        results = list(self._results)
        self._results.clear()
        return results

    def _run_all(self) -> None:
        try:
            while self.run_once():
                pass
        except (PeerError, InternalError):
            self._end_epoch()
            raise

    def report(self, stage: int, message: Any) -> None:
        """From a stage to the driver, between two pieces of work."""
        self._carry(stage, DRIVER, message)

    def beat(self) -> list[int | None]:
        """One stage time: each stage does one piece of work on what it had before. The step that each computed, None for one that waited."""
        self._kept = []
        try:
            steps = [stage.next_step - 1 if self.run_stage(stage.index) else None for stage in self.stages]
        finally:
            kept, self._kept = self._kept, None
        for source, destination, message in kept:
            self._carry(source, destination, message)
        return steps

    def _carry(self, source: int, destination: int, message: Any) -> None:
        if self._kept is not None:
            self._kept.append((source, destination, message))
            return
        super()._carry(source, destination, message)
        self.carried.append((source, destination, message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What `engine` says of one. restarts_max: failures that it survives. lease_s, import_timeout_s: of KV handed over."""

    name: str
    stage_count: int
    asynchronous: bool
    block_count: int
    block_size: int
    token_budget: int
    slot_count: int
    drafts_max: int
    length_max: int
    prefix_caching: bool
    priorities: bool
    restarts_max: int
    lease_s: float
    import_timeout_s: float


class TranscriptRig:
    """scripts: by seed, of all engines. clock: seconds. exported: transfers that have begun, by request."""

    def __init__(self, shape: Shape, scripts: dict[int, Script], clock: Callable[[], float], parts: Parts) -> None:
        s = self.shape = shape
        self._parts = parts
        self._told: list[TokenEvent] = []
        self.exported: dict[str, Transfer] = {}
        self._split = split_evenly(LAYER_COUNT, s.stage_count)
        self.executors = [
            ScriptedExecutor(scripts, last=i == s.stage_count - 1, layers=layers, block_count=s.block_count, block_size=s.block_size)
            for i, layers in enumerate(self._split)
        ]
        table = TableShape(slot_count=s.slot_count, length_max=s.length_max, block_size=s.block_size, drafts_max=s.drafts_max)
        self._table_shape = table
        self.driver = parts.make_driver(
            parts.make_scheduler(self._scheduling(), prefix_secret=b"transcript"),
            lambda: parts.make_table(table, DRIVER),
            s.stage_count,
            import_timeout_s=s.import_timeout_s,
            lease_s=s.lease_s,
        )
        self.cluster = HeldCluster(self._make_stages)
        self.loop = EngineLoop(
            self.driver,
            self.cluster,
            restarts=RestartPolicy(most=s.restarts_max),
            clock=clock,
            make_incident=lambda: str(self.loop.counts.restarts + 1),
        )

    def _scheduling(self) -> SchedulerConfig:
        s = self.shape
        return SchedulerConfig(
            slot_count=s.slot_count,
            token_budget=s.token_budget,
            microbatch_count=s.stage_count,
            asynchronous=s.asynchronous,
            block_size=s.block_size,
            block_counts=(s.block_count,),
            prefix_caching=s.prefix_caching,
            priorities=s.priorities,
            drafts_max=s.drafts_max,
            instance=s.name,
            stage_layers=tuple((layers.start, layers.stop) for layers in self._split),
        )

    def _make_stages(self, epoch: int) -> Sequence[Stage]:
        return [
            self._parts.make_stage(
                index=i,
                count=self.shape.stage_count,
                epoch=epoch,
                table=self._parts.make_table(self._table_shape, i),
                provenance=[self._parts.make_provenance(self.shape.block_count, self.shape.block_size, stage=i)],
                executor=executor,
                layers=layers,
                kv=executor,
                accept=self._parts.accept,
            )
            for i, (executor, layers) in enumerate(zip(self.executors, self._split, strict=True))
        ]

    # What the loop does, in parts

    def submit(self, request: EngineRequest) -> None:
        self.loop.submit(request, self._take)

    def _take(self, events: list[TokenEvent]) -> None:
        self._told += events

    def take_events(self) -> list[TokenEvent]:
        """What clients were told since this was asked last."""
        events = list(self._told)
        self._told.clear()
        return events

    def plan(self) -> StepPlan | None:
        plan = self.driver.next_plan()
        if plan is not None:
            self.cluster.send(plan)
            self.exported.update(self.driver.take_exported())
        return plan

    def turn(self, *, plans: bool = False, runs: bool = False) -> None:
        """A turn of the loop: plans that can be written, if `plans`; all that stages can do, if `runs`; and what has come."""
        self.cluster.takes_plans, self.cluster.runs = plans, runs
        self.loop.turn(0.0)
        self.cluster.takes_plans, self.cluster.runs = False, False
        self.exported.update(self.driver.take_exported())

    def tick(self, now: float) -> None:
        """What a turn of the loop does first; and it begins an epoch that is due."""
        self.driver.tick(now)
        if self.waits_to_begin:
            self.turn()

    def fail(self, error: PeerError | InternalError) -> None:
        """The epoch ends; the next one begins, if it need not wait. Raises the error once there were too many."""
        self.cluster.fail(error)
        self.turn()
        self.turn()

    @property
    def waits_to_begin(self) -> bool:
        """An epoch is over and the next has not begun."""
        return self.driver.epoch != self.cluster.stages[0].epoch

    @property
    def is_idle(self) -> bool:
        return not self.driver.scheduler.has_work and not self.driver.waits and not self.waits_to_begin

    # What stages of other engines have to do with it

    def take_for_others(self) -> list[tuple[int, ToStage]]:
        """(stage, message), each once."""
        return [(stage.index, message) for stage in self.cluster.stages for message in stage.take_for_others()]

    def give(self, reader: str, to: ToStage) -> bool | None:
        """A message of engine `reader`. For a part: whether it was written."""
        stage, executor = self.cluster.stages[to.stage], self.executors[to.stage]
        if isinstance(to.message, KVPull):
            stage.offer_pull(reader, to.message)
            return None
        before = executor.parts_written
        for send in stage.offer_part(to.message):
            self.cluster.report(to.stage, send.message)
        return executor.parts_written > before

    def audit(self) -> list[str]:
        return [*self.driver.audit(), *self.cluster.audit()]
