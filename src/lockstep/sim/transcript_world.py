"""What transcripts are about: `engine` and `tables` make a new one of their kind, every other command goes to the one made last."""

from __future__ import annotations

from lockstep.errors import InvalidRequestError
from lockstep.sim.parts import Parts
from lockstep.sim.transcript import Command
from lockstep.sim.transcript_engine import EngineCommands
from lockstep.sim.transcript_tables import TablesCommands


class World:
    """parts: what engines and tables are made of."""

    def __init__(self, parts: Parts | None = None) -> None:
        self._parts = parts or Parts()
        self._present: EngineCommands | TablesCommands | None = None

    def carry_out(self, command: Command, body: tuple[Command, ...]) -> str:
        if command.word in ("engine", "tables"):
            self._present = (EngineCommands if command.word == "engine" else TablesCommands)(command, self._parts)
            return self._present.made()
        if self._present is None:
            raise InvalidRequestError(f"line {command.line}: a transcript begins with `engine` or `tables`, got {command.word}")
        return self._present.carry_out(command, body)
