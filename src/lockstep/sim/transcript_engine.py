"""Transcript commands on a whole engine: scheduler, driver, stages and links, with scripted draws. Nothing runs unless a command says so.

engine [stages=2] [async=on] [blocks=16] [block_size=4] [chunk=8] [slots=4] [drafts=0] [length=64] [cache=off]
submit id=A prompt=11,12,13 max_tokens=5 draws=101,102 [drafts=7,7] [stop=102]     abort id=A
plan                  the driver writes its next plan and sends it to every stage
run [stage=0]         one piece of work of that stage, or of each one, first to last
deliver               the driver takes the results that have come
finish                all of it, until the engine is idle
show                  every held slot on every replica
messages step=1       who sent what to whom for that step, and how many results each stage took
audit                 the idle audit of every replica
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.core.outputs import TokenEvent
from lockstep.core.records import Side, StepPlan, StepResult
from lockstep.core.request import EngineRequest
from lockstep.errors import InvalidRequestError
from lockstep.runtime.stage import DRIVER, Stage
from lockstep.runtime.transport.cluster import FromStages
from lockstep.runtime.transport.local import LocalCluster
from lockstep.sim import transcript_words as words
from lockstep.sim.parts import Parts
from lockstep.sim.rig import Rig, RigConfig
from lockstep.sim.scripted import Script, ScriptedExecutor
from lockstep.sim.transcript import Command

_TURNS_MAX = 200


class WatchedCluster(LocalCluster):
    """Keeps account of every message: (source, destination, message)."""

    def __init__(self, make_stages: Callable[[int], Sequence[Stage]]) -> None:
        super().__init__(make_stages)
        self.carried: list[tuple[int, int, Any]] = []

    def _carry(self, source: int, destination: int, message: Any) -> None:
        super()._carry(source, destination, message)
        self.carried.append((source, destination, message))

    def take_results(self) -> list[FromStages]:
        """Those that have come; runs nothing."""
        results = list(self._results)
        self._results.clear()
        return results


class EngineCommands:
    """One engine, made by the command `engine`."""

    def __init__(self, made_by: Command, parts: Parts) -> None:
        self._config = config = RigConfig(
            stage_count=made_by.number("stages", 2),
            asynchronous=made_by.flag("async", True),
            block_count=made_by.number("blocks", 16),
            block_size=made_by.number("block_size", 4),
            token_budget=made_by.number("chunk", 8),
            slot_count=made_by.number("slots", 4),
            drafts_max=made_by.number("drafts", 0),
            length_max=made_by.number("length", 64),
            prefix_caching=made_by.flag("cache", False),
        )
        self._scripts: dict[int, Script] = {}
        self._executors = [ScriptedExecutor(self._scripts, last=i == config.stage_count - 1) for i in range(config.stage_count)]
        self._rig = Rig(config, make_table=parts.make_table, make_stage=parts.make_stage, executors=self._executors)
        self._rig.cluster = self._cluster = WatchedCluster(self._rig.make_stages)

    def made(self) -> str:
        c = self._config
        stages = f"{c.stage_count} stage{'s' if c.stage_count > 1 else ''}, {'asynchronous' if c.asynchronous else 'synchronous'}"
        return f"{stages}, {c.block_count} blocks of {c.block_size}, {c.token_budget} tokens a step, {c.drafts_max} drafts"

    def carry_out(self, command: Command, body: tuple[Command, ...]) -> str:
        known = {
            "submit": self._submit,
            "abort": self._abort,
            "plan": self._plan,
            "run": self._run,
            "deliver": self._deliver,
            "finish": self._finish,
            "show": self._show,
            "messages": self._messages,
            "audit": self._audit,
        }
        if command.word not in known or body:
            raise InvalidRequestError(f"line {command.line}: an engine takes {', '.join(known)}, each without input; got {command.word}")
        return known[command.word](command)

    def _submit(self, command: Command) -> str:
        prompt, seed = command.numbers("prompt"), len(self._scripts) + 1
        drafts = tuple(command.numbers("drafts", ""))
        if len(drafts) > self._config.drafts_max:
            raise InvalidRequestError(f"line {command.line}: this engine takes at most {self._config.drafts_max} drafts a step, got {len(drafts)}")
        self._scripts[seed] = Script(prompt_length=len(prompt), draws=tuple(command.numbers("draws")), drafts=drafts)
        self._rig.submit(
            EngineRequest(
                request_id=command.text("id"),
                prompt=np.array(prompt, np.int32),
                length_cap=len(prompt) + command.number("max_tokens"),
                seed=seed,
                side=Side(stop_ids=tuple(command.numbers("stop", ""))),
            )
        )
        return f"{command.text('id')} waits, {len(prompt)} tokens, ends at {len(prompt) + command.number('max_tokens')}"

    def _abort(self, command: Command) -> str:
        event = self._rig.driver.abort(command.text("id"))
        return "no such request" if event is None else _event_words(event)

    def _plan(self, _command: Command) -> str:
        plan = self._rig.driver.next_plan()
        if plan is None:
            return "no plan before a result comes" if self._rig.driver.waits else "nothing to do"
        self._cluster.send(plan)
        return words.plan(plan)

    def _run(self, command: Command) -> str:
        """What stages compute and send; stages that compute the same are said once."""
        chosen = [command.number("stage")] if "stage" in command.arguments else range(self._config.stage_count)
        did: dict[str, list[str]] = {}
        sent: list[str] = []
        for index in chosen:
            computed, messages = self._run_stage(index)
            did.setdefault(computed, []).append(f"stage {index}")
            sent += messages
        return "\n".join([*(f"{', '.join(names)}: {computed}" for computed, names in did.items()), *sent])

    def _run_stage(self, index: int) -> tuple[str, list[str]]:
        """One piece of work of a stage: what it computed, and what it sent."""
        stage, executor = self._cluster.stages[index], self._executors[index]
        executor.layout = None
        before = len(self._cluster.carried)
        if not self._cluster.run_stage(index):
            return f"waits for {stage.waits_for}", []
        rows = words.layout_rows(executor.layout) if executor.layout is not None else ["nothing"]
        carried = self._cluster.carried[before:]
        sent = [f"stage {index} sends {_message_words(m)} to {_end_words(to)}" for _, to, m in carried] or [f"stage {index} sends nothing"]
        results = [m for _, _, m in carried if isinstance(m, StepResult)][:1]
        sent += [f"  {row}" for result in results for row in words.result_rows(result)]
        return "\n".join([f"step {stage.next_step - 1} computes", *(f"  {row}" for row in rows)]), sent

    def _deliver(self, _command: Command) -> str:
        return "\n".join(_event_words(event) for event in self._receive()) or "nothing for a client"

    def _receive(self) -> list[TokenEvent]:
        return [event for result in self._cluster.take_results() for event in self._rig.driver.receive(result)]

    def _finish(self, command: Command) -> str:
        """Plans, runs and delivers until nothing is left; says once a request what came from here on."""
        tokens: dict[str, list[int]] = {}
        ends: dict[str, str] = {}
        driver = self._rig.driver
        for _ in range(_TURNS_MAX):
            while (plan := driver.next_plan()) is not None:
                self._cluster.send(plan)
            while self._cluster.run_once():
                pass
            for event in self._receive():
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
                ends[event.request_id] = event.finish_reason or "goes on"
            if not driver.scheduler.has_work and not driver.waits:
                return "\n".join(f"{name}: tokens {words.sequence(values)}, {ends[name]}" for name, values in tokens.items()) or "nothing came"
        stuck = [f"stage {stage.index} waits for {stage.waits_for}" for stage in self._cluster.stages]
        return "\n".join([f"stuck, {', '.join(driver.scheduler.request_ids)} unfinished", *stuck])

    def _show(self, _command: Command) -> str:
        stages = {f"stage {stage.index}": stage.table for stage in self._cluster.stages}
        return words.tables({"driver": self._rig.driver.table, **stages})

    def _messages(self, command: Command) -> str:
        step, count = command.number("step"), self._config.stage_count
        carried = [(a, b, m) for a, b, m in self._cluster.carried if m.step == step]
        lines = [f"{_end_words(a)} to {_end_words(b)}: {_message_words(m)}" for a, b, m in carried if not isinstance(m, StepPlan)]
        for index in range(count):
            taken = sum(b == index and isinstance(m, StepResult) for _, b, m in carried)
            lines.append(f"(stages, last?, receives) = ({count}, {'yes' if index == count - 1 else 'no'}, {taken})")
        return "\n".join(lines)

    def _audit(self, _command: Command) -> str:
        return "\n".join(self._rig.audit()) or "clean"


def _end_words(end: int) -> str:
    return "driver" if end == DRIVER else f"stage {end}"


def _message_words(message: Any) -> str:
    rows = f" with {len(message)} rows" if isinstance(message, StepResult) else ""
    return f"{ {StepPlan: 'plan', StepResult: 'result'}.get(type(message), 'activations') } of step {message.step}{rows}"


def _event_words(event: TokenEvent) -> str:
    parts = [f"tokens {words.sequence(event.token_ids)} from index {event.index}"] if event.token_ids else []
    parts += [str(event.finish_reason)] if event.finish_reason else []
    return f"{event.request_id}: {', '.join(parts)}"
