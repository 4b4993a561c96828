"""A whole engine in one process on the oracle model (or any executors): driver, stages, links; no clock, no thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lockstep.core.outputs import FinishReason, TokenEvent
from lockstep.core.provenance import Provenance
from lockstep.core.request import EngineRequest
from lockstep.core.scheduler import Scheduler, SchedulerConfig
from lockstep.core.table import SlotTable, TableShape
from lockstep.runtime.driver import Driver
from lockstep.runtime.messages import WeightsReport
from lockstep.runtime.stage import Executor, Stage
from lockstep.runtime.transport.local import LocalCluster
from lockstep.sim.oracle import OracleExecutor, split_evenly

VOCABULARY = 300
LAYER_COUNT = 6

MakeTable = Callable[[TableShape, int], SlotTable]
"""(shape, replica) -> table; replica is a stage's index, or -1 for the driver. Mutants come in here."""

MakeStage = Callable[..., Stage]
"""`Stage`'s own signature. Mutants of what a stage sends and waits for come in here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RigConfig:
    stage_count: int = 2
    asynchronous: bool = True
    block_size: int = 4
    block_count: int = 16
    slot_count: int = 6
    token_budget: int = 8
    length_max: int = 64
    microbatch_count: int | None = None
    prefix_caching: bool = True
    priorities: bool = False
    drafts_max: int = 0


def plain_table(shape: TableShape, _replica: int) -> SlotTable:
    return SlotTable(shape, poison=True)


@dataclass(slots=True)
class Output:
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


class Rig:
    """outputs: per request id what a client would have seen."""

    def __init__(
        self, config: RigConfig, *, make_table: MakeTable = plain_table, make_stage: MakeStage = Stage, executors: Sequence[Executor] | None = None
    ) -> None:
        c = config
        shape = TableShape(slot_count=c.slot_count, length_max=c.length_max, block_size=c.block_size, drafts_max=c.drafts_max)
        scheduler = Scheduler(
            SchedulerConfig(
                slot_count=c.slot_count,
                token_budget=c.token_budget,
                microbatch_count=c.microbatch_count or c.stage_count,
                asynchronous=c.asynchronous,
                block_size=c.block_size,
                block_counts=(c.block_count,),
                prefix_caching=c.prefix_caching,
                priorities=c.priorities,
                drafts_max=c.drafts_max,
            ),
            prefix_secret=b"rig",
        )
        self.config = config
        self.driver = Driver(scheduler, lambda: make_table(shape, -1), c.stage_count)
        held = executors or oracle_executors(config)

        def make_stages(epoch: int) -> Sequence[Stage]:
            return [
                make_stage(
                    index=i,
                    count=c.stage_count,
                    epoch=epoch,
                    table=make_table(shape, i),
                    provenance=[Provenance(c.block_count, c.block_size)],
                    executor=executor,
                )
                for i, executor in enumerate(held)
            ]

        self.make_stages = make_stages
        self.cluster = LocalCluster(make_stages)
        self.outputs: dict[str, Output] = {}

    def submit(self, request: EngineRequest) -> None:
        self.outputs[request.request_id] = Output()
        self.driver.submit(request)

    def abort(self, request_id: str) -> None:
        event = self.driver.abort(request_id)
        if event is not None:
            self._note(event)

    def plan(self) -> bool:
        """Write the next plan, if there is one, and send it."""
        plan = self.driver.next_plan()
        if plan is not None:
            self.cluster.send(plan)
        return plan is not None

    def receive(self) -> int:
        """Take results that have come. Returns how many tokens they delivered."""
        events: list[TokenEvent] = []
        try:
            for result in self.cluster.poll(0):
                assert not isinstance(result, WeightsReport), result
                self.driver.receive(result, events)
        finally:
            for event in events:
                self._note(event)
        return sum(len(event.token_ids) for event in events)

    def _note(self, event: TokenEvent) -> None:
        output = self.outputs[event.request_id]
        assert output.finish is None, (event, output)
        assert event.index == len(output.tokens), (event, output)
        output.tokens.extend(event.token_ids)
        output.finish = event.finish_reason

    def run(self, turns_max: int = 10_000) -> None:
        """Until nothing is left to do. A rig that does not get there in turns_max turns is stuck: AssertionError."""
        for _ in range(turns_max):
            while self.plan():
                pass
            self.receive()
            if not self.driver.scheduler.has_work and not self.driver.waits:
                return
        raise AssertionError(f"not idle after {turns_max} turns: {self.driver.scheduler.request_ids}; {[s.waits_for for s in self.cluster.stages]}")

    def audit(self) -> list[str]:
        """The idle audit, on every replica."""
        return [*self.driver.audit(), *self.cluster.audit()]


def oracle_executors(config: RigConfig) -> list[Executor]:
    return [
        OracleExecutor(
            layers=layers,
            first=i == 0,
            last=i == config.stage_count - 1,
            block_counts=(config.block_count,),
            block_size=config.block_size,
            vocabulary=VOCABULARY,
        )
        for i, layers in enumerate(split_evenly(LAYER_COUNT, config.stage_count))
    ]
