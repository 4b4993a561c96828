"""One scenario, one run, in virtual time: the real core, driver, loop and stages over simulated links and hosts, on the oracle model.

`run` says what came out: failures, what the engines' own checks noticed, and which faults took effect where. Same scenario, same run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lockstep.core.layout import BatchLayout
from lockstep.core.outputs import FinishReason, TokenEvent
from lockstep.core.records import StepPlan
from lockstep.errors import LockstepError
from lockstep.runtime.handover import GONE, ToStage
from lockstep.runtime.messages import ImportReport, KVPart, KVPull
from lockstep.runtime.transport.cluster import FromStages
from lockstep.sim.clients import Client, Router, request_of
from lockstep.sim.drafter import Answer, propose
from lockstep.sim.engine import Detection, SimEngine, Watcher
from lockstep.sim.injector import Injector
from lockstep.sim.log import Log
from lockstep.sim.network import SimNetwork
from lockstep.sim.oracle import closed_form, prompt_logprobs_of
from lockstep.sim.parts import Parts
from lockstep.sim.rig import LAYER_COUNT, VOCABULARY
from lockstep.sim.scenario import Abort, Ask, Scenario
from lockstep.sim.timeline import Timeline
from lockstep.sim.wires import Wire

QUIET_S_MAX = 8.0
"""Longer than every time-out in a row. An engine that is not idle and has nothing on its way for so long is stuck."""

NAMES = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """kind: 'wrong tokens', 'wrong end', 'not finished', 'audit', 'unexplained', 'engine died', 'stream', 'not repeatable'."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """steps: plans written. seconds: virtual ones. coverage: how often each cell of `faults.cells` took effect. counts: of schedulers and loops.
    liveness: most steps after a disturbance, as a share of the bound, which is 100 plans and 4 for each token of all prompts and longest answers.
    log: a hash of every plan, result and event, with their times; empty if it was not asked for."""

    steps: int
    seconds: float
    failures: tuple[Failure, ...]
    detections: tuple[Detection, ...]
    coverage: Counter[str]
    counts: Counter[str] = field(default_factory=Counter)
    liveness: float = 0.0
    log: str = ""


def run(scenario: Scenario, parts: Parts | None = None, *, log: Log | None = None) -> Outcome:
    """log: keeps account of everything, if anybody wants it."""
    return Simulation(scenario, parts or Parts(), log).run()


class Simulation(Watcher):
    """steps, now: how far it is; a part under test may look."""

    def __init__(self, scenario: Scenario, parts: Parts, log: Log | None) -> None:
        self.scenario = scenario
        self.timeline = Timeline()
        self.steps = 0
        self._log = log
        self._failures: list[Failure] = []
        self._detections: list[Detection] = []
        model: dict[str, Any] = {"layer_count": LAYER_COUNT, "windows": scenario.windows}
        self._expected = {ask.name: closed_form(request_of(ask), vocabulary=VOCABULARY, **model) for ask in scenario.asks}
        self._answers = {ask.seed: Answer(kind=ask.drafter, prompt_length=len(ask.prompt), tokens=self._expected[ask.name]) for ask in scenario.asks}
        self._network = SimNetwork(scenario, self.timeline, {name: number for number, name in enumerate(NAMES)})
        self.engines = [self._engine(number, parts) for number in range(len(scenario.engines))]
        self._router = Router(self.engines, self.timeline, scenario.seed)
        self._injector = Injector(scenario, self.timeline, self._network, self.engines, self._note_effect)
        self._network.deliver = lambda engine, wire: self.engines[engine].deliver(wire)
        self._network.deliver_kv = self._deliver_kv
        self._network.seen = self._note_sent
        self._network.note = self._injector.note
        self._network.note_changed = self._injector.note_changed
        self._network.epoch_of = lambda engine: self.engines[engine].driver.epoch
        self._clients: list[Client] = []
        self._open = 0
        self._aborting: list[tuple[Client, Abort]] = []
        self._disturbed_at_step = 0
        self._liveness = 0
        self._steps_most = 100 + 4 * sum(len(ask.prompt) + ask.tokens_max for ask in scenario.asks)
        for ask in scenario.asks:
            self._open += 1
            self.timeline.at(ask.at, partial(self._submit, ask, 0))

    def _engine(self, number: int, parts: Parts) -> SimEngine:
        most = self.scenario.engines[number].drafts_max
        return SimEngine(
            number,
            self.scenario,
            name=NAMES[number],
            timeline=self.timeline,
            network=self._network,
            parts=parts,
            draft=lambda seed, position: propose(self._answers, most, seed, position),
            watcher=self,
        )

    # Running

    def run(self) -> Outcome:
        for engine in self.engines:
            engine.tick()
        quiet_since = 0.0
        while not self._failures:
            self.timeline.step()
            if self.timeline.pending:
                quiet_since = self.timeline.now
            elif not self._open and all(engine.is_settled for engine in self.engines):
                break
            elif self.timeline.now - quiet_since > QUIET_S_MAX:
                self._fail("not finished", f"nothing happens any more, {self._unfinished()}")
        if not self._failures:
            self._judge()
        return Outcome(
            steps=self.steps,
            seconds=self.timeline.now,
            failures=tuple(self._failures),
            detections=tuple(self._detections),
            coverage=self._injector.coverage,
            counts=self._counts(),
            liveness=self._liveness / self._steps_most,
            log=self._log.result() if self._log is not None else "",
        )

    def _counts(self) -> Counter[str]:
        """What the schedulers and loops did, of that which a set of runs should contain."""
        counts: Counter[str] = Counter()
        for engine in self.engines:
            stats = engine.driver.scheduler.stats
            counts.update({name: getattr(stats, name) for name in ("preemptions", "prefix_hits", "imports", "imports_failed")})
            counts["restarts"] += engine.loop.counts.restarts
        return counts

    def _unfinished(self) -> str:
        names = [client.ask.name for client in self._clients if client.end is None]
        waits = [
            f"engine {engine.number} stage {host.index} ({host.state.value}): {host.stage.waits_for if host.stage else 'no stage'}"
            for engine in self.engines
            for host in engine.hosts
        ]
        return f"unfinished: {names}; {'; '.join(waits)}"

    def _fail(self, kind: str, text: str) -> None:
        self._failures.append(Failure(kind=kind, text=text))
        if self._log is not None:
            self._log.said(self.timeline.now, f"FAILURE {kind}: {text}")

    # Requests

    def _submit(self, ask: Ask, attempt: int) -> None:
        client = Client(ask, attempt, self._note_event)
        self._clients.append(client)
        self._disturb()
        if self._log is not None:
            self._log.said(self.timeline.now, f"submit {ask.name}, attempt {attempt}")
        self._router.submit(client)
        if ask.abort is not None and attempt == 0:
            abort = ask.abort
            self.timeline.at(max(self.timeline.now, abort.at), lambda: self._arm_abort(client, abort), ticks=True)

    def _note_event(self, client: Client, event: TokenEvent) -> None:
        if self._log is not None:
            self._log.event(client, self.timeline.now, event)
        if event.finish_reason is not None:
            self._open -= 1
            abort = client.ask.abort
            if client.given_up and abort is not None and abort.again_after >= 0:
                self._open += 1
                self.timeline.after(abort.again_after, lambda: self._submit(client.ask, 1))

    def _arm_abort(self, client: Client, abort: Abort) -> None:
        self._aborting.append((client, abort))
        self._look_for_aborts()

    def _look_for_aborts(self) -> None:
        for entry in list(self._aborting):
            client, abort = entry
            if client.end is not None:
                self._aborting.remove(entry)
                continue
            phase = self._router.phase(client.ask.name)
            if phase and abort.phase in ("", phase):
                self._aborting.remove(entry)
                self._injector.count("abort-again" if abort.again_after >= 0 else "abort", phase, self._router.engine_of(client.ask.name))
                self._router.abort(client)

    def _note_effect(self, what: str) -> None:
        self._disturb()
        if self._log is not None:
            self._log.said(self.timeline.now, what)

    def _disturb(self) -> None:
        self._disturbed_at_step = self.steps

    # What the engines and the network do (Watcher)

    def note_plan(self, engine: int, plan: StepPlan) -> None:
        self.steps += 1
        if self._log is not None:
            self._log.plan(engine, self.timeline.now, plan)
        self._liveness = max(self._liveness, self.steps - self._disturbed_at_step)
        if self.steps - self._disturbed_at_step > self._steps_most:
            self._fail("not finished", f"{self._steps_most} steps after the last disturbance: {self._unfinished()}")

    def note_taken(self, engine: int, message: FromStages) -> None:
        if self._log is not None:
            self._log.taken(engine, self.timeline.now, message)
        if isinstance(message, ImportReport) and message.refused and not self._injector.altered_kv:
            self._fail("refused part", f"engine {engine} refused a part of an import that nobody altered: {message.refused}")

    def _note_sent(self, engine: int, wire: Wire) -> None:
        if self.engines[engine].note_sent(wire) and self._aborting:
            self.timeline.after(0.0, self._look_for_aborts)

    def note_turn(self, engine: int) -> None:
        self._router.note_turn(engine)
        if self._aborting:
            self._look_for_aborts()
        self._injector.look(engine)

    def note_detection(self, engine: int, error: LockstepError, concerned: Sequence[str]) -> None:
        name, text = type(error).__name__, str(error)
        foreign = text.split(": ")[1] if name == "InternalError" and text.startswith("stage ") and text.count(": ") > 1 else ""
        self._detections.append(
            Detection(engine=engine, step=self.steps, time=self.timeline.now, check=name, concerned=tuple(concerned), text=text, foreign=foreign)
        )
        self._disturb()
        if self._log is not None:
            self._log.said(self.timeline.now, f"engine {engine} noticed {name}: {text}; concerned: {list(concerned)}")
        for wrong in self._injector.explain(engine, error, concerned):
            self._fail("unexplained", wrong)

    def note_death(self, engine: int, error: Exception) -> None:
        self._fail("engine died", f"engine {engine}: {type(error).__name__}: {error}")

    def before_work(self, engine: int, stage: int, layout: BatchLayout) -> None:
        self._injector.before_work(engine, stage, layout)

    def _deliver_kv(self, to: int, sender: int, sent: ToStage) -> None:
        message, engine = sent.message, self.engines[to]
        if isinstance(message, KVPull):
            engine.hosts[sent.stage].receive((NAMES[sender], message))
            return
        assert isinstance(message, KVPart), message
        if message.layers == GONE:
            source = self.engines[sender].driver
            kind = "gone-by-lease" if message.transfer.epoch == source.epoch else "gone-by-restart"
            self._injector.count(kind, "importing", engine)
        engine.hosts[sent.stage].receive(message)

    # The verdict

    def _judge(self) -> None:
        for client in self._clients:
            for wrong in client.wrong:
                self._fail("stream", f"{client.ask.name}: {wrong}")
            self._judge_end(client)
        for engine in self.engines:
            for line in engine.audit():
                self._fail("audit", line)

    def _judge_end(self, client: Client) -> None:
        name, expected, end = client.ask.name, self._expected[client.ask.name], client.end
        assert end is not None, name
        reason = end.finish_reason
        self._judge_prompt_logprobs(client)
        if client.tokens != expected[: len(client.tokens)]:
            self._fail("wrong tokens", f"{name} got {client.tokens}, {expected} is right")
        elif reason is FinishReason.ABORT:
            if not client.given_up:
                self._fail("wrong end", f"{name} was aborted by nobody")
        elif reason is FinishReason.ERROR:
            self._judge_error(client, end)
        elif client.tokens != expected:
            self._fail("wrong tokens", f"{name} got {client.tokens} and {reason}, {expected} is right")
        else:
            stopped = expected[-1] in client.ask.stop_ids
            if reason is not (FinishReason.STOP if stopped else FinishReason.LENGTH):
                self._fail("wrong end", f"{name} ended by {reason}")
            elif name in self._injector.struck:
                self._fail("wrong end", f"{name} is poison and ended by {reason}")

    def _judge_prompt_logprobs(self, client: Client) -> None:
        """With the first token, all of them, as the prompt alone has them."""
        told = client.prompt_logprobs
        if not client.ask.prompt_logprobs:
            if told is not None:
                self._fail("prompt logprobs", f"{client.ask.name} was told what it did not ask for")
        elif client.tokens:
            right = prompt_logprobs_of(request_of(client.ask), layer_count=LAYER_COUNT, windows=self.scenario.windows)
            entries = [] if told is None else [told.entry(i, 0) for i in range(len(told))]
            if told is None or entries != [right.entry(i, 0) for i in range(len(right))]:
                self._fail("prompt logprobs", f"{client.ask.name} was told {entries}, {right} is right")

    def _judge_error(self, client: Client, end: TokenEvent) -> None:
        name, error = client.ask.name, end.error
        if name in self._injector.struck and type(error).__name__ == "PoisonError":
            return
        if not any(name in detection.concerned and detection.check == type(error).__name__ for detection in self._detections):
            self._fail("wrong end", f"{name} was ended by {type(error).__name__}: {error}")
