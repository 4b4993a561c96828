"""`SimEngine`: one engine of a simulated run: the real scheduler, driver and loop over a `SimCluster`.

It turns when something came, and every TICK_S. It knows what it is made of and what it is doing; not clients, and not what goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.layout import BatchLayout
from lockstep.core.outputs import TokenEvent
from lockstep.core.provenance import Provenance
from lockstep.core.records import Columns, StepPlan, StepResult
from lockstep.core.request import EngineRequest, LiveRequest
from lockstep.core.scheduler import SchedulerConfig
from lockstep.core.table import TableShape
from lockstep.core.types import F32
from lockstep.errors import InternalError, LockstepError
from lockstep.runtime.driver import Driver
from lockstep.runtime.loop import EngineLoop, RestartPolicy
from lockstep.runtime.stage import DRIVER, Sampled, Stage
from lockstep.runtime.transport.cluster import FromStages, ToStages
from lockstep.sim.cluster import SimCluster
from lockstep.sim.host import StageHost
from lockstep.sim.network import SimNetwork
from lockstep.sim.oracle import Draft, OracleExecutor, split_evenly
from lockstep.sim.parts import Parts
from lockstep.sim.rig import LAYER_COUNT, VOCABULARY
from lockstep.sim.scenario import Scenario
from lockstep.sim.timeline import Timeline, chance
from lockstep.sim.wires import End, FramedEnd, Wire

TURN_S, TICK_S = 0.0005, 0.1
STARTUP_S = 0.05
GARBAGE = 0xA5A5A5A5A5A5A5A5
"""What a process that has just started finds in its KV memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """A failure that some part of the engine noticed. check: the class of its error. step: plans written so far in the whole run. concerned: ids of
    requests that it blames; foreign: the kind of a Python error that was not raised on purpose, else ''."""

    engine: int
    step: int
    time: float
    check: str
    concerned: tuple[str, ...]
    text: str
    foreign: str = ""


class Watcher:
    """What a run wants to know of its engines. Here it wants nothing."""

    def note_plan(self, engine: int, plan: StepPlan) -> None: ...

    def note_taken(self, engine: int, message: FromStages) -> None: ...

    def note_turn(self, engine: int) -> None: ...

    def note_detection(self, engine: int, error: LockstepError, concerned: Sequence[str]) -> None: ...

    def note_death(self, engine: int, error: Exception) -> None: ...

    def before_work(self, engine: int, stage: int, layout: BatchLayout) -> None:
        """May raise `host.ProcessEnded`."""


class _SeenCluster(SimCluster):
    """Tells the watcher what crosses it."""

    watcher = Watcher()

    def send(self, message: ToStages) -> None:
        if isinstance(message, StepPlan):
            self.watcher.note_plan(self._engine, message)
        super().send(message)

    def poll(self, timeout_s: float) -> list[FromStages]:
        found = super().poll(timeout_s)
        for message in found:
            self.watcher.note_taken(self._engine, message)
        return found


class _SeenExecutor:
    """An oracle executor whose work can be cut off."""

    def __init__(self, inner: OracleExecutor, before: Callable[[BatchLayout], None]) -> None:
        self.inner = inner
        self._before = before

    def execute(self, layout: BatchLayout, tensors: Mapping[str, F32]) -> Mapping[str, F32] | Sampled:
        self._before(layout)
        return self.inner.execute(layout, tensors)


class _Dumper:
    """The loop shows it every failure, before the epoch is given up."""

    def __init__(self, note: Callable[[LockstepError], None]) -> None:
        self._note = note

    def dump(self, *, incident: str, error: LockstepError, unresolved: Sequence[StepPlan], columns: Mapping[int, Columns]) -> Path | None:
        self._note(error)
        return None

    def close(self) -> None: ...


class SimEngine:
    """Engine `number` of a scenario. finishing: generations that the sampler has ended, in this epoch. provenance: of each stage, in
    this epoch."""

    def __init__(
        self, number: int, scenario: Scenario, *, name: str, timeline: Timeline, network: SimNetwork, parts: Parts, draft: Draft, watcher: Watcher
    ) -> None:
        self.number = number
        self.shape = shape = scenario.engines[number]
        self.timeline = timeline
        self.finishing: set[int] = set()
        self._scenario = scenario
        self._parts = parts
        self._watcher = watcher
        self._turning = False
        self._dead = False
        self.provenance: dict[int, list[Provenance]] = {}
        self._splits = split_evenly(LAYER_COUNT, shape.stage_count)
        self._table_shape = TableShape(
            slot_count=shape.slot_count,
            length_max=scenario.length_max,
            block_size=shape.block_size,
            drafts_max=shape.drafts_max,
            windows=scenario.windows,
        )
        self.executors = [self._executor(stage, draft) for stage in range(shape.stage_count)]
        self.cluster = _SeenCluster(
            number,
            shape.stage_count,
            timeline=timeline,
            network=network,
            make_end=self._make_end,
            startup_s=lambda stage, epoch: STARTUP_S * (1.0 + 3.0 * chance(scenario.seed, 3, number, stage, epoch)),
            wake=self.wake,
        )
        self.cluster.watcher = watcher
        self.cluster.hosts = self.hosts = [self._host(stage, network) for stage in range(shape.stage_count)]
        self.driver = self._make_driver(name)
        self.loop = EngineLoop(
            self.driver,
            self.cluster,
            restarts=RestartPolicy(most=1000),
            clock=lambda: timeline.now,
            make_incident=lambda: f"{name}{self.driver.epoch}",
            dumper=_Dumper(self._note_failure),
        )

    # What it is made of

    def _make_end(self, place: int, epoch: int) -> End:
        if self._scenario.framed:
            return FramedEnd(place, epoch)
        return self._parts.make_end(place, self._parts.make_numbers(place, epoch))

    def _executor(self, stage: int, draft: Draft) -> _SeenExecutor:
        shape = self.shape
        inner = OracleExecutor(
            layers=self._splits[stage],
            first=stage == 0,
            last=stage == shape.stage_count - 1,
            block_counts=self._scenario.block_counts(shape),
            windows=self._scenario.windows,
            block_size=shape.block_size,
            vocabulary=VOCABULARY,
            draft=draft if shape.drafts_max else None,
            shaper=self._parts.make_shaper(VOCABULARY),
        )
        return _SeenExecutor(inner, lambda layout: self._watcher.before_work(self.number, stage, layout))

    def _host(self, index: int, network: SimNetwork) -> StageHost:
        seed, number, mean_s = self._scenario.seed, self.number, self.shape.work_s[index]

        def forget_memory() -> None:
            self.executors[index].inner.kv[:] = GARBAGE

        def note_end(stage: int) -> None:
            self.timeline.after(TURN_S, lambda: self.cluster.note_end(stage))

        return StageHost(
            index,
            number,
            timeline=self.timeline,
            network=network,
            build=lambda epoch: self._stage(index, epoch),
            make_end=self._make_end,
            work_s=lambda worked: mean_s * (0.5 + chance(seed, 4, number, index, worked)),
            forget_memory=forget_memory,
            note_end=note_end,
        )

    def _stage(self, index: int, epoch: int) -> Stage:
        shape, executor = self.shape, self.executors[index]
        pools = zip(self._scenario.block_counts(shape), self._scenario.windows, strict=True)
        self.provenance[index] = [
            self._parts.make_provenance(count, shape.block_size, group, window, stage=index) for group, (count, window) in enumerate(pools)
        ]
        return self._parts.make_stage(
            index=index,
            count=shape.stage_count,
            epoch=epoch,
            table=self._parts.make_table(self._table_shape, index),
            provenance=self.provenance[index],
            executor=executor,
            layers=self._splits[index],
            kv=executor.inner,
            accept=self._parts.accept,
        )

    def _make_driver(self, name: str) -> Driver:
        shape = self.shape
        config = SchedulerConfig(
            slot_count=shape.slot_count,
            token_budget=shape.token_budget,
            microbatch_count=shape.microbatch_count,
            asynchronous=shape.asynchronous,
            block_size=shape.block_size,
            block_counts=self._scenario.block_counts(shape),
            windows=self._scenario.windows,
            prefix_caching=shape.prefix_caching,
            priorities=shape.priorities,
            drafts_max=shape.drafts_max,
            prompt_logprobs_max=shape.prompt_logprobs_max,
            instance=name,
            stage_layers=tuple((layers.start, layers.stop) for layers in self._splits),
        )
        return self._parts.make_driver(
            self._parts.make_scheduler(config, prefix_secret=b"sim"),
            lambda: self._parts.make_table(self._table_shape, DRIVER),
            shape.stage_count,
            import_timeout_s=shape.import_timeout_s,
            lease_s=shape.lease_s,
        )

    # Turning

    def wake(self) -> None:
        if not self._turning and not self._dead:
            self._turning = True
            self.timeline.after(TURN_S, self._turn)

    def tick(self) -> None:
        """Every TICK_S: time passes also where nothing comes."""
        self._turn()
        self.timeline.after(TICK_S, self.tick, ticks=True)

    def _turn(self) -> None:
        self._turning = False
        if self._dead:
            return
        self.cluster.stirred = False
        try:
            self.loop.turn(0.0)
        except Exception as error:
            self._dead = True
            self._watcher.note_death(self.number, error)
        if self._dead:
            return
        self._watcher.note_turn(self.number)
        if self.cluster.stirred:
            self.wake()

    def _note_failure(self, error: LockstepError) -> None:
        self.finishing.clear()
        if isinstance(error.__cause__, Exception) and not isinstance(error.__cause__, LockstepError):
            self._dead = True  # an engine goes on after what no part of it raises on purpose; a simulated run is to fail by it
            self._watcher.note_death(self.number, error.__cause__)
            return
        names: list[str] = []
        if isinstance(error, InternalError):
            owners = [self.driver.scheduler.request_of(generation) for _, generation in error.concerned]
            names = sorted({owner.spec.request_id for owner in owners if owner is not None}.union(error.request_ids))
        self._watcher.note_detection(self.number, error, names)

    def deliver(self, wire: Wire) -> None:
        if wire.destination != DRIVER:
            self.hosts[wire.destination].receive(wire)
            return
        self.cluster.receive(wire)

    def note_sent(self, wire: Wire) -> bool:
        """A message of this engine has been handed to a link; whether it ends a request."""
        ends = wire.destination == DRIVER and isinstance(wire.message, StepResult) and bool(wire.message.finishes.any())
        if ends:
            self.finishing.update(wire.message.generations[wire.message.finishes != 0].tolist())
        return ends

    # Requests

    def submit(self, request: EngineRequest, sink: Callable[[list[TokenEvent]], None]) -> None:
        self.loop.submit(request, sink)
        self.wake()

    def abort(self, request_id: str) -> None:
        self.loop.abort(request_id)
        self.wake()

    def live(self, request_id: str) -> LiveRequest | None:
        return self.driver.scheduler.find(request_id)

    @property
    def is_settled(self) -> bool:
        """Nothing is left to do or to wait for."""
        scheduler = self.driver.scheduler
        return not (self.loop.recovering or scheduler.has_work or self.driver.waits or scheduler.transfers.held)

    # Phases, as `scenario` names them

    @property
    def phase(self) -> str:
        scheduler = self.driver.scheduler
        if self.loop.recovering:
            return "recovering"
        running = scheduler.running
        if any(request.importing for request in running):
            return "importing"
        if any(not request.prefilling for request in running):
            return "decode"
        if running or not self.driver.waits:
            return "prefill" if scheduler.has_work else "idle"
        return "decode"

    def request_phase(self, request_id: str) -> str:
        """'' if it is not here."""
        request = self.live(request_id)
        if request is None:
            return ""
        if self.loop.recovering:
            return "recovering"
        if request.slot is None:
            return "waiting"
        if request.importing:
            return "importing"
        if request.generation in self.finishing:
            return "finishing"
        if request.prefilling:
            return "prefill"
        return "in flight" if request.outstanding else "decode"

    def audit(self) -> list[str]:
        """The idle audit of every replica."""
        return [f"engine {self.number}: {line}" for line in (*self.driver.audit(), *self.cluster.audit())]
