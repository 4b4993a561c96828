"""Transcript commands on a whole engine: scheduler, driver, loop, stages and links, with scripted draws. Nothing runs unless a command says so.

engine [name=P] [stages=2] [async=on] [blocks=16] [block_size=4] [chunk=8] [slots=4] [drafts=0] [length=64] [cache=off] [priorities=off]
       [restarts=0] [lease_ms=..] [import_ms=..]
submit id=A prompt=11,12,13 max_tokens=5 draws=101,102 [drafts=7,7] [guesses=3 wrong=1,4] [stop=102] [salt=x] [priority=1] [sibling_of=B]
       [exports=yes]
submit                several of them; its input, a line each:
    request id=A ...
abort id=A
plan                  the driver writes its next plan and sends it to every stage
run [stage=0]         one piece of work of that stage, or of each one, first to last
deliver               the loop takes the results that have come
beat [count=1]        stage times: the loop takes and plans all it can, then each stage does one piece of work on what it had before
finish                all of it, until the engine is idle
fail stage=1          the stage dies; or link=0-1, whose message is lost. With restarts, the loop goes on in a new epoch
show                  every held slot on every replica
counts                what the scheduler did so far that a client does not see
messages step=1       who sent what to whom for that step, and how many results each stage took
audit                 the idle audit of every replica

A drafter that guesses proposes the draws themselves, but for those of index `wrong` in the answer. An engine survives `restarts` failures; where it
survives none, a failure is the answer of the command that met it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.core.outputs import TokenEvent
from lockstep.core.records import Side, StepPlan, StepResult
from lockstep.core.request import EngineRequest
from lockstep.errors import InternalError, InvalidRequestError, LinkError, PeerError, StageLostError
from lockstep.runtime.driver import IMPORT_TIMEOUT_S, LEASE_S
from lockstep.runtime.messages import Activations, ImportReport
from lockstep.runtime.stage import DRIVER
from lockstep.sim import transcript_words as words
from lockstep.sim.parts import Parts
from lockstep.sim.scripted import Script
from lockstep.sim.transcript import Command
from lockstep.sim.transcript_rig import Shape, TranscriptRig

_TURNS_MAX = 200

_KINDS: Mapping[type[Any], str] = {StepPlan: "plan", StepResult: "result", Activations: "activations", ImportReport: "import report"}


def shape_of(command: Command) -> Shape:
    return Shape(
        name=command.text("name", ""),
        stage_count=command.number("stages", 2),
        asynchronous=command.flag("async", True),
        block_count=command.number("blocks", 16),
        block_size=command.number("block_size", 4),
        token_budget=command.number("chunk", 8),
        slot_count=command.number("slots", 4),
        drafts_max=command.number("drafts", 0),
        length_max=command.number("length", 64),
        prefix_caching=command.flag("cache", False),
        priorities=command.flag("priorities", False),
        restarts_max=command.number("restarts", 0),
        lease_s=command.number("lease_ms", round(LEASE_S * 1000)) / 1000,
        import_timeout_s=command.number("import_ms", round(IMPORT_TIMEOUT_S * 1000)) / 1000,
    )


class EngineCommands:
    """One engine, made by the command `engine`. scripts: by seed, of all engines; clock: seconds. requests, told: what was asked, and all tokens that
    clients got, by request."""

    def __init__(self, made_by: Command, parts: Parts, scripts: dict[int, Script], clock: Callable[[], float]) -> None:
        self._scripts = scripts
        self.rig = TranscriptRig(shape_of(made_by), scripts, clock, parts)
        self.requests: dict[str, EngineRequest] = {}
        self.told: dict[str, list[int]] = {}

    @property
    def name(self) -> str:
        return self.rig.shape.name

    def made(self) -> str:
        s = self.rig.shape
        stages = f"{s.stage_count} stage{'s' if s.stage_count > 1 else ''}, {'asynchronous' if s.asynchronous else 'synchronous'}"
        return f"{stages}, {s.block_count} blocks of {s.block_size}, {s.token_budget} tokens a step, {s.drafts_max} drafts"

    def carry_out(self, command: Command, body: tuple[Command, ...]) -> str:
        known = {
            "submit": self._submit_one,
            "abort": self._abort,
            "plan": self._plan,
            "run": self._run,
            "deliver": self._deliver,
            "beat": self._beat,
            "finish": self._finish,
            "fail": self._fail,
            "show": self._show,
            "counts": self._counts,
            "messages": self._messages,
            "audit": self._audit,
        }
        if command.word == "submit" and body:
            return self._submit_all(body)
        if command.word not in known or body:
            raise InvalidRequestError(f"line {command.line}: an engine takes {', '.join(known)}; got {command.word}")
        try:
            return known[command.word](command)
        except (PeerError, InternalError) as error:
            if self.rig.shape.restarts_max == 0:
                raise
            return self._failed(error)

    # Requests

    def _submit_all(self, body: tuple[Command, ...]) -> str:
        before = self.rig.driver.scheduler.waiting_count
        answers = [self._submit_one(line) for line in body]
        waiting = self.rig.driver.scheduler.waiting_count - before
        return f"{waiting} requests wait" if waiting == len(body) else "\n".join(answers)

    def _submit_one(self, command: Command) -> str:
        prompt, seed = command.numbers("prompt"), len(self._scripts) + 1
        script = Script(
            prompt=tuple(prompt),
            draws=tuple(command.numbers("draws")),
            drafts=tuple(command.numbers("drafts", "")),
            guess_count=command.number("guesses", 0),
            wrong=frozenset(command.numbers("wrong", "")),
        )
        if max(len(script.drafts), script.guess_count) > self.rig.shape.drafts_max:
            raise InvalidRequestError(f"line {command.line}: this engine takes at most {self.rig.shape.drafts_max} drafts a step")
        self._scripts[seed] = script
        request = EngineRequest(
            request_id=command.text("id"),
            prompt=np.array(prompt, np.int32),
            length_cap=len(prompt) + command.number("max_tokens"),
            seed=seed,
            priority=command.number("priority", 0),
            sibling_of=command.arguments.get("sibling_of"),
            side=Side(stop_ids=tuple(command.numbers("stop", "")), cache_salt=command.text("salt", "").encode()),
            exports=command.flag("exports", False),
        )
        return self.submit(request)

    def submit(self, request: EngineRequest) -> str:
        self.rig.submit(request)
        events, waits = self._events(), []
        if not any(event.finish_reason for event in events):
            self.requests[request.request_id] = request
            self.told[request.request_id] = [token for event in events for token in event.token_ids]
            known = len(request.prompt) + len(request.given)
            waits = [f"{request.request_id} waits, {known} tokens, ends at {request.length_cap}"]
        return "\n".join([*waits, *map(_event_words, events)])

    def _abort(self, command: Command) -> str:
        self.rig.loop.abort(command.text("id"))
        return "\n".join(map(_event_words, self._events())) or "no such request"

    def _events(self) -> list[TokenEvent]:
        events = self.rig.take_events()
        for event in events:
            self.told.setdefault(event.request_id, []).extend(event.token_ids)
        return events

    # Steps

    def _plan(self, _command: Command) -> str:
        if self.rig.waits_to_begin:
            return "no plan before the next epoch begins"
        plan = self.rig.plan()
        if plan is None:
            return "no plan before a result comes" if self.rig.driver.waits else "nothing to do"
        return words.plan(plan)

    def _run(self, command: Command) -> str:
        """What stages compute and send; stages that compute the same are said once."""
        chosen = [command.number("stage")] if "stage" in command.arguments else range(self.rig.shape.stage_count)
        did: dict[str, list[str]] = {}
        sent: list[str] = []
        for index in chosen:
            computed, messages = self._run_stage(index)
            did.setdefault(computed, []).append(f"stage {index}")
            sent += messages
        return "\n".join([*(f"{', '.join(names)}: {computed}" for computed, names in did.items()), *sent])

    def _run_stage(self, index: int) -> tuple[str, list[str]]:
        """One piece of work of a stage: what it computed, and what it sent."""
        cluster, executor = self.rig.cluster, self.rig.executors[index]
        stage = cluster.stages[index]
        executor.layout = None
        before = len(cluster.carried)
        if not cluster.run_stage(index):
            return f"waits for {stage.waits_for}", []
        rows = words.layout_rows(executor.layout) if executor.layout is not None else ["nothing"]
        carried = cluster.carried[before:]
        sent = [f"stage {index} sends {_message_words(m)} to {_end_words(to)}" for _, to, m in carried] or [f"stage {index} sends nothing"]
        results = [m for _, _, m in carried if isinstance(m, StepResult)][:1]
        sent += [f"  {row}" for result in results for row in words.result_rows(result)]
        return "\n".join([f"step {stage.next_step - 1} computes", *(f"  {row}" for row in rows)]), sent

    def _deliver(self, _command: Command) -> str:
        self.rig.turn()
        return "\n".join(map(_event_words, self._events())) or "nothing for a client"

    def _beat(self, command: Command) -> str:
        """A line a beat: the step that each stage computes, first stage first, and what clients are told at its begin."""
        lines = []
        for number in range(1, command.number("count", 1) + 1):
            self.rig.turn()
            self.rig.turn(plans=True)
            steps = " ".join("-" if step is None else str(step) for step in self.rig.cluster.beat())
            lines.append(", ".join([f"beat {number}: steps {steps}", *map(_event_words, self._events())]))
        return "\n".join(lines)

    def turn_all(self) -> list[TokenEvent]:
        """All that can be done before something comes from elsewhere."""
        self.rig.turn(plans=True, runs=True)
        return self._events()

    def _finish(self, _command: Command) -> str:
        """Turns until nothing is left; says once a request what came from here on."""
        events: list[TokenEvent] = []
        for _ in range(_TURNS_MAX):
            events += self.turn_all()
            if self.rig.is_idle:
                return self.told_words(events)
        return self.stuck_words()

    def told_words(self, events: Sequence[TokenEvent]) -> str:
        tokens: dict[str, list[int]] = {}
        ends: dict[str, str] = {}
        for event in events:
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            ends[event.request_id] = _end_of(event) or "goes on"
        return "\n".join(f"{name}: tokens {words.sequence(values)}, {ends[name]}" for name, values in tokens.items()) or "nothing came"

    def stuck_words(self) -> str:
        waits = [f"stage {stage.index} waits for {stage.waits_for}" for stage in self.rig.cluster.stages]
        return "\n".join([f"stuck, {', '.join(self.rig.driver.scheduler.request_ids)} unfinished", *waits])

    # Failures

    def _fail(self, command: Command) -> str:
        if "link" in command.arguments:
            a, b = command.text("link").split("-")
            return self._failed(LinkError(f"link {a} -> {b}: a message was lost"))
        return self._failed(StageLostError(f"stage {command.number('stage')} has ended"))

    def _failed(self, error: PeerError | InternalError) -> str:
        before = self.rig.driver.epoch
        self.rig.fail(error)
        incident = f"incident {self.rig.loop.counts.last_incident} ends epoch {before}: {type(error).__name__}: {self.rig.loop.counts.last}"
        ended = [_event_words(event) for event in self._events()]
        return "\n".join([incident, *ended, self.begun_words()])

    def begun_words(self) -> str:
        epoch = self.rig.driver.epoch
        if self.rig.waits_to_begin:
            return f"epoch {epoch} waits to begin"
        return f"epoch {epoch} begins with {', '.join(self.rig.driver.scheduler.request_ids) or 'nothing to do'}"

    # Looking in

    def _show(self, _command: Command) -> str:
        stages = {f"stage {stage.index}": stage.table for stage in self.rig.cluster.stages}
        epoch = self.rig.driver.epoch
        return (f"epoch {epoch}\n" if epoch else "") + words.tables({"driver": self.rig.driver.table, **stages})

    def _counts(self, _command: Command) -> str:
        stats = self.rig.driver.scheduler.stats
        return f"preemptions {stats.preemptions}, rows of results dropped {stats.rows_dropped}, prompt tokens hit {stats.prefix_hits}"

    def _messages(self, command: Command) -> str:
        step, count = command.number("step"), self.rig.shape.stage_count
        carried = [(a, b, m) for a, b, m in self.rig.cluster.carried if getattr(m, "step", None) == step]
        lines = [f"{_end_words(a)} to {_end_words(b)}: {_message_words(m)}" for a, b, m in carried if not isinstance(m, StepPlan)]
        for index in range(count):
            taken = sum(b == index and isinstance(m, StepResult) for _, b, m in carried)
            lines.append(f"(stages, last?, receives) = ({count}, {'yes' if index == count - 1 else 'no'}, {taken})")
        return "\n".join(lines)

    def _audit(self, _command: Command) -> str:
        scheduler = self.rig.driver.scheduler
        held = [str(transfer.number) for transfer in scheduler.transfers.held]
        pool = scheduler.pools[0]
        kept = [f"held for others: transfer {', '.join(held)}; {pool.free_count} of {pool.block_count} blocks are free"] if held else []
        return "\n".join([*(self.rig.audit() or ["clean"]), *kept])


def _end_words(end: int) -> str:
    return "driver" if end == DRIVER else f"stage {end}"


def _message_words(message: Any) -> str:
    rows = f" with {len(message)} rows" if isinstance(message, StepResult) else ""
    return f"{_KINDS[type(message)]} of step {message.step}{rows}"


def _end_of(event: TokenEvent) -> str:
    words_of_error = f" {type(event.error).__name__}" if event.error is not None else ""
    return f"{event.finish_reason}{words_of_error}" if event.finish_reason else ""


def _event_words(event: TokenEvent) -> str:
    parts = [f"tokens {words.sequence(event.token_ids)} from index {event.index}"] if event.token_ids else []
    parts += [f"{event.cached_tokens} of the prompt from the cache"] if event.cached_tokens and event.index == 0 else []
    parts += [_end_of(event)] if event.finish_reason else []
    return f"{event.request_id}: {', '.join(parts)}"
