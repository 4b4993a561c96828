"""Faults on their way into a simulated run: each waits for its time and phase, is done, and is counted once it has taken effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lockstep.core.layout import BatchLayout
from lockstep.core.request import LiveRequest
from lockstep.core.types import first_block_read
from lockstep.errors import InternalError, LockstepError
from lockstep.runtime.stage import DRIVER
from lockstep.sim.engine import SimEngine
from lockstep.sim.faults import KINDS, mode_of
from lockstep.sim.flips import flip, overwrite_block
from lockstep.sim.host import ProcessEnded, State
from lockstep.sim.network import SimNetwork
from lockstep.sim.scenario import Fault, Scenario
from lockstep.sim.timeline import Timeline, pick

SLOWER = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Touched:
    """A change of state that some check has to find before anybody reads a wrong token. block: of a stage's KV, or -1."""

    fault: Fault
    phase: str
    request: str
    block: int = -1


class Injector:
    """coverage: how often each cell of `faults.cells` took effect. struck: poison requests that have crashed a stage. altered_kv: what some stage
    holds or hands over was changed, so that parts of an import may be refused.
    note_effect(what): a fault has taken effect."""

    def __init__(
        self, scenario: Scenario, timeline: Timeline, network: SimNetwork, engines: Sequence[SimEngine], note_effect: Callable[[str], None]
    ) -> None:
        self.coverage: Counter[str] = Counter()
        self.struck: set[str] = set()
        self.altered_kv = False
        self._note_effect = note_effect
        self._seed = scenario.seed
        self._timeline = timeline
        self._network = network
        self._engines = engines
        self._armed: list[Fault] = []
        self._poison: list[Fault] = []
        self._done: list[Fault] = []
        self._touched: list[_Touched] = []
        self._cut_off_at: dict[str, int] = {}
        for fault in scenario.faults:
            timeline.at(fault.at, partial(self._arm, fault), ticks=True)

    def _arm(self, fault: Fault) -> None:
        if fault.kind == "poison":
            self._poison.append(fault)
        else:
            self._armed.append(fault)
            self.look(fault.engine)

    def look(self, engine: int) -> None:
        """Do what is due on this engine in its present phase."""
        if self._armed:
            for fault in [fault for fault in self._armed if fault.engine == engine]:
                if self._inject(self._engines[engine], fault):
                    self._armed.remove(fault)

    def _inject(self, engine: SimEngine, fault: Fault) -> bool:
        if fault.kind == "flip-draft":
            self._network.arm(fault)
            return True
        if fault.kind.startswith("flip-") or fault.kind == "foreign-kv":
            return self._touch(engine, fault)
        if fault.phase and fault.phase != engine.phase:
            return False
        if fault.kind.startswith(("link-", "kv-")):
            self._network.arm(fault)
            return True
        host = engine.hosts[fault.target % len(engine.hosts)]
        if fault.kind == "crash" and fault.other and not self._all_got_past(engine):
            return False
        if host.state in (State.ENDED, State.STOPPED):
            return False
        self.note(fault)
        if fault.kind == "crash":
            host.crash()
        elif fault.kind == "stall":
            host.stop()
        else:
            assert fault.kind == "slow", fault
            host.slowness = SLOWER
        return True

    def _all_got_past(self, engine: SimEngine) -> bool:
        """Somebody runs, and everybody who runs knows more than the rows that the last failure cut off could have brought."""
        running = engine.driver.scheduler.running
        return bool(running) and all(request.known > self._cut_off_at.get(request.spec.request_id, 0) for request in running)

    def note(self, fault: Fault, phase: str = "") -> None:
        """It has taken effect."""
        self._done.append(fault)
        self.altered_kv |= fault.kind == "kv-part-foreign"
        if fault.kind.startswith("kv-"):
            self.count(fault.kind, "importing", self._engines[-1])
        else:
            self.count(fault.kind, phase or self._engines[fault.engine].phase, self._engines[fault.engine])

    def count(self, kind: str, phase: str, engine: SimEngine) -> None:
        mode = mode_of(asynchronous=engine.shape.asynchronous, drafts_max=engine.shape.drafts_max)
        self.coverage[f"{kind} / {phase} / {mode}"] += 1
        self._note_effect(f"engine {engine.number}, {phase}: {kind}")

    # Changes of state

    def _touch(self, engine: SimEngine, fault: Fault) -> bool:
        if engine.loop.recovering:
            return False
        owners = [request for request in engine.driver.scheduler.running if _computed_phase(engine, request) == fault.phase]
        words = (self._seed, fault.target, int(1e6 * fault.at))
        first = pick(len(owners), *words) if owners else 0
        return any(self._touch_request(engine, fault, request, words) for request in owners[first:] + owners[:first])

    def _touch_request(self, engine: SimEngine, fault: Fault, request: LiveRequest, words: tuple[int, ...]) -> bool:
        stage = None if fault.target == DRIVER else engine.hosts[fault.target % len(engine.hosts)].stage
        table = engine.driver.table if fault.target == DRIVER else None if stage is None else stage.table
        slot = request.slot
        if table is None or slot is None or int(table.columns["generation"][slot]) != request.generation:
            return False
        block = -1
        if fault.kind == "foreign-kv":
            computed, size = int(table.columns["computed"][slot]), engine.shape.block_size
            first = int(first_block_read(computed, table.shape.windows[0], size))
            count = min(-(-computed // size), int(table.block_counts[0, slot])) - first
            if count <= 0:
                return False
            block = int(table.blocks[0, slot, first + pick(count, *words, 1)])
            index = fault.target % len(engine.hosts)
            overwrite_block(engine.executors[index].inner, engine.provenance[index][0], block, *words)
        elif not flip(fault.kind.removeprefix("flip-"), table, slot, engine.driver.scheduler.config.block_counts[0], *words):
            return False
        self._touched.append(_Touched(fault=fault, phase=fault.phase, request=request.spec.request_id, block=block))
        self.altered_kv = True
        return True

    def note_changed(self, fault: Fault, generation: int) -> None:
        """The network has changed what one replica knows of this request."""
        live = self._engines[fault.engine].driver.scheduler.request_of(generation)
        self._touched.append(_Touched(fault=fault, phase="decode", request=live.spec.request_id if live is not None else ""))
        self.altered_kv = True

    # Poison

    def before_work(self, engine: int, stage: int, layout: BatchLayout) -> None:
        """The stage dies if a row of a poison request is to be computed once its fatal token is known."""
        for fault in self._poison:
            if fault.engine != engine or fault.target % len(self._engines[engine].hosts) != stage:
                continue
            for generation, known in zip(layout.generation.tolist(), layout.known.tolist(), strict=True):
                live = self._engines[engine].driver.scheduler.request_of(generation)
                if live is not None and live.spec.request_id == fault.request and known >= live.prompt_length + fault.other:
                    self.struck.add(fault.request)
                    self.note(fault, "prefill" if live.known == live.prompt_length else "decode")
                    raise ProcessEnded

    # Failures that the engines noticed

    def explain(self, engine: int, error: LockstepError, concerned: Sequence[str]) -> list[str]:
        """What is wrong about this failure: that no fault explains it, or whom it blames. The epoch is over, and its changes of state with it."""
        self._cut_off_at |= {request.spec.request_id: request.known_most for request in self._engines[engine].driver.scheduler.running}
        touched = [change for change in self._touched if change.fault.engine == engine]
        self._touched = [change for change in self._touched if change.fault.engine != engine]
        name = type(error).__name__
        change = next((change for change in touched if name in KINDS[change.fault.kind].seen_as), None)
        if change is not None:
            self.note(change.fault, change.phase)
        explaining = [fault for fault in self._done if fault.engine == engine and name in KINDS[fault.kind].seen_as]
        if not explaining:
            return [f"no fault explains {name}: {error}"]
        self._done.remove(explaining[-1])
        if not isinstance(error, InternalError) or not concerned:
            return []
        innocent = set(concerned) - self._concerned(self._engines[engine], touched)
        if explaining[-1].kind == "kv-part-foreign":
            innocent -= {request.spec.request_id for request in self._engines[engine].driver.scheduler.running if request.transfer is not None}
        return [f"{sorted(innocent)} are blamed and no fault concerns them: {name}: {error}"] if innocent else []

    @staticmethod
    def _concerned(engine: SimEngine, touched: Sequence[_Touched]) -> set[str]:
        names = {change.request for change in touched}
        blocks = {change.block for change in touched if change.block >= 0}
        return names | {request.spec.request_id for request in engine.driver.scheduler.running if blocks.intersection(*[request.blocks[0]])}


def _computed_phase(engine: SimEngine, request: LiveRequest) -> str:
    phase = engine.request_phase(request.spec.request_id)
    return "decode" if phase in ("in flight", "finishing") else phase
