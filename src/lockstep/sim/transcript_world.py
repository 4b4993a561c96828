"""What transcripts are about: engines or tables, what travels between engines, and the time.

`engine` and `tables` make a new one of their kind; a command goes to the engine that it names by on=, else to what was made last.

hand id=A from=P to=D max_tokens=4    P has finished A, which it exports; D goes on with it
carry [to=P] [count=1]                messages between engines arrive: all that are on their way, those to an engine, the first ones
lose [to=P] [count=1]                 they never do
done on=P transfer=0                  the receiver of a transfer tells P that it is done with it
time ms=200                           time passes, for all engines
finish, audit                         of all engines, unless on= names one
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lockstep.core.outputs import TokenEvent
from lockstep.errors import InvalidRequestError
from lockstep.runtime.handover import GONE, ToStage
from lockstep.runtime.messages import KVPull
from lockstep.sim.parts import Parts
from lockstep.sim.scripted import Script
from lockstep.sim.transcript import Command
from lockstep.sim.transcript_engine import EngineCommands
from lockstep.sim.transcript_tables import TablesCommands

_TURNS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class _Travelling:
    sender: str
    stage: int
    to: ToStage

    def describe(self) -> str:
        message, to = self.to.message, f"stage {self.to.stage} of {self.to.instance}"
        sender, transfer = f"stage {self.stage} of {self.sender}", f"transfer {message.transfer.number}"
        if isinstance(message, KVPull):
            return f"{sender} asks {to} for layers {message.layers[0]}..{message.layers[1]} of {transfer}"
        if message.layers == GONE:
            return f"{sender} tells {to} that {transfer} is gone"
        return f"{sender} sends layers {message.layers[0]}..{message.layers[1]} of {transfer}, {len(message.tags)} positions, to {to}"


class World:
    """parts: what engines and tables are made of."""

    def __init__(self, parts: Parts | None = None) -> None:
        self._parts = parts or Parts()
        self._present: EngineCommands | TablesCommands | None = None
        self._engines: dict[str, EngineCommands] = {}
        self._scripts: dict[int, Script] = {}
        self._travelling: list[_Travelling] = []
        self._now = 0.0

    def carry_out(self, command: Command, body: tuple[Command, ...]) -> str:
        known = {"engine": self._engine, "tables": self._tables, "hand": self._hand, "carry": self._carry, "lose": self._lose, "time": self._time}
        if command.word in known and not body:
            return known[command.word](command)
        if command.word in ("finish", "audit") and "on" not in command.arguments and len(self._engines) > 1:
            return self._finish() if command.word == "finish" else self._audit(command)
        target = self._engine_named(command, "on") if "on" in command.arguments else self._present
        if target is None:
            raise InvalidRequestError(f"line {command.line}: a transcript begins with `engine` or `tables`, got {command.word}")
        if command.word == "done":
            return self._done(command)
        answer = target.carry_out(command, body)
        return "\n".join([answer, *(travelling.describe() for travelling in self._collect())])

    def _engine(self, command: Command) -> str:
        """Without a name it is alone; what was there is gone."""
        if "name" not in command.arguments or command.text("name") in self._engines:
            self._engines, self._travelling, self._now = {}, [], 0.0
        engine = EngineCommands(command, self._parts, self._scripts, lambda: self._now)
        self._engines[engine.name] = self._present = engine
        return engine.made()

    def _tables(self, command: Command) -> str:
        self._present = tables = TablesCommands(command, self._parts)
        return tables.made()

    def _engine_named(self, command: Command, argument: str) -> EngineCommands:
        name = command.text(argument)
        if name not in self._engines:
            raise InvalidRequestError(f"line {command.line}: engines are {', '.join(self._engines) or 'not there'}, got {name}")
        return self._engines[name]

    # Between engines

    def _collect(self) -> list[_Travelling]:
        """What stages have for those of other engines is on its way from now on."""
        sent = [
            _Travelling(sender=name, stage=stage, to=message)
            for name, engine in self._engines.items()
            for stage, message in engine.rig.take_for_others()
        ]
        self._travelling += sent
        return sent

    def _hand(self, command: Command) -> str:
        source, target, name = self._engine_named(command, "from"), self._engine_named(command, "to"), command.text("id")
        if name not in source.rig.exported:
            raise InvalidRequestError(f"line {command.line}: {source.name} exports nothing of {name}")
        request = source.requests[name]
        given = np.array(source.told[name], np.int32)
        cap = len(request.prompt) + command.number("max_tokens")
        return target.submit(replace(request, given=given, length_cap=cap, transfer=source.rig.exported[name], exports=False))

    def _done(self, command: Command) -> str:
        self._engine_named(command, "on").rig.driver.end_export(command.number("transfer"))
        return "the next plan lets go of it"

    def _chosen(self, command: Command) -> list[_Travelling]:
        """They travel no more."""
        found = [travelling for travelling in self._travelling if command.text("to", travelling.to.instance) == travelling.to.instance]
        found = found[: command.number("count", len(found))]
        self._travelling = [travelling for travelling in self._travelling if not any(travelling is chosen for chosen in found)]
        return found

    def _carry(self, command: Command) -> str:
        lines = [line for travelling in self._chosen(command) for line in self._arrive(travelling)]
        return "\n".join(lines) or "nothing is on its way"

    def _arrive(self, travelling: _Travelling) -> list[str]:
        rig, to = self._engines[travelling.to.instance].rig, f"stage {travelling.to.stage} of {travelling.to.instance}"
        before = len(rig.cluster.carried)
        written = rig.give(travelling.sender, travelling.to)
        answers = [sent.describe() for sent in self._collect()]
        if written is None:
            return answers or [f"{to} lets it wait"]
        reports = [f"{to} reports {message.computed} positions to its driver" for _, _, message in rig.cluster.carried[before:]]
        return [f"{to} {'writes' if written else 'drops'} it", *reports, *answers]

    def _lose(self, command: Command) -> str:
        return "\n".join(f"lost: {travelling.describe()}" for travelling in self._chosen(command)) or "nothing is on its way"

    # All engines

    def _time(self, command: Command) -> str:
        self._now += command.number("ms") / 1000
        lines = [f"{round(self._now * 1000)} ms"]
        for engine in self._engines.values():
            waited = engine.rig.waits_to_begin
            engine.rig.tick(self._now)
            lines += [engine.begun_words()] if waited else []
        return "\n".join(lines)

    def _finish(self) -> str:
        """Engines take turns, and what travels arrives after each."""
        events: dict[str, list[TokenEvent]] = {name: [] for name in self._engines}
        for _ in range(_TURNS_MAX):
            for name, engine in self._engines.items():
                events[name] += engine.turn_all()
            self._collect()
            arriving, self._travelling = self._travelling, []
            for travelling in arriving:
                self._arrive(travelling)
            if not self._travelling and all(engine.rig.is_idle for engine in self._engines.values()):
                return "\n".join(f"{name}:\n{_indented(self._engines[name].told_words(told))}" for name, told in events.items())
        return "\n".join(f"{name}:\n{_indented(engine.stuck_words())}" for name, engine in self._engines.items() if not engine.rig.is_idle)

    def _audit(self, command: Command) -> str:
        return "\n".join(f"{name}:\n{_indented(engine.carry_out(command, ()))}" for name, engine in self._engines.items())


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
