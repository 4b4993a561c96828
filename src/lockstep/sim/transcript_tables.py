"""Transcript commands on replicas of the log that are fed by hand, for records that the scheduler never writes.

tables [replicas=2] [slots=4] [length=64] [block_size=4] [drafts=7]
plan [horizon=0]      the next plan; its input, a line a record:
    release slot=0 generation=1
    admit slot=0 generation=1 tokens=11,12,13 [marks=E2,T1] [computed=0] [prompt=3] cap=8 [seed=1] [importing=yes] [stop=..]
    ready slot=0 generation=1 computed=2
    blocks slot=0 blocks=0..4
    row slot=0 generation=1 count=3 [start=-1] samples=yes
draw [draws=101,201] [drafts=7,7/8,8]   acceptance of the last plan's rows on these draws, in order; the result goes to every replica
result step=0         a result by hand; its input, a line a row:
    row slot=0 generation=1 tokens=101 [drafts=7,7] [finish=no]
show                  every held slot on every replica
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.core.digest import Digest
from lockstep.core.layout import BatchLayout
from lockstep.core.ragged import Ragged
from lockstep.core.records import Admissions, NewBlocks, Ready, Rows, Side, Slots, StepPlan, StepResult
from lockstep.core.schema import ADMITTED, column_array
from lockstep.core.table import TableShape
from lockstep.core.types import UNKNOWN_START
from lockstep.errors import InvalidRequestError
from lockstep.runtime.replay import Replica
from lockstep.sim import transcript_words as words
from lockstep.sim.parts import Parts
from lockstep.sim.transcript import Command

_MARK_OF = {letter: mark for mark, letter in words.MARK_LETTERS.items()}
_FINISH_OF = {word: code for code, word in words.FINISH_WORDS.items()}


class TablesCommands:
    """Replicas of one log, made by the command `tables`."""

    def __init__(self, made_by: Command, parts: Parts) -> None:
        shape = TableShape(
            slot_count=made_by.number("slots", 4),
            length_max=made_by.number("length", 64),
            block_size=made_by.number("block_size", 4),
            drafts_max=made_by.number("drafts", 7),
        )
        self._shape = shape
        self._accept = parts.accept
        self._replicas = [Replica(parts.make_table(shape, index), Digest(0)) for index in range(made_by.number("replicas", 2))]
        self._layout: BatchLayout | None = None
        self._next_step = 0

    def made(self) -> str:
        s = self._shape
        return f"{len(self._replicas)} replicas of {s.slot_count} slots, at most {s.length_max} tokens and {s.drafts_max} drafts each"

    def carry_out(self, command: Command, body: tuple[Command, ...]) -> str:
        if command.word == "plan":
            return self._plan(command, body)
        if command.word == "result":
            return self._offer(_result(command, body))
        if command.word == "draw":
            return self._draw(command)
        if command.word == "show":
            return words.tables({f"replica {i}": replica.table for i, replica in enumerate(self._replicas)})
        raise InvalidRequestError(f"line {command.line}: tables take plan, draw, result, show; got {command.word}")

    def _plan(self, command: Command, body: tuple[Command, ...]) -> str:
        plan = _plan_record(self._next_step, command, body)
        if not all(replica.can_run(plan) for replica in self._replicas):
            return f"waits for the result of step {plan.horizon - 1}"
        self._next_step += 1
        layouts = [replica.run(plan) for replica in self._replicas]
        self._layout = layouts[-1]
        digests = [replica.digest.value for replica in self._replicas]
        seen = ["\n".join(words.layout_rows(layout)) or "no rows" for layout in layouts]
        by_replica = seen[:1] if len(set(seen)) == 1 else [f"replica {i}:\n{text}" for i, text in enumerate(seen)]
        return "\n".join([*by_replica, words.digests(digests)])

    def _draw(self, command: Command) -> str:
        if self._layout is None:
            raise InvalidRequestError(f"line {command.line}: no plan has run yet")
        drafts = [Command.parse(f"row drafts={part}", command.line).numbers("drafts") for part in command.text("drafts", "").split("/") if part]
        draws = np.array(command.numbers("draws", ""), np.int32)
        if len(draws) != self._layout.sample_starts[-1]:
            return f"{len(draws)} draws for {self._layout.sample_starts[-1]} sampled positions"
        return self._offer(self._accept(self._layout, draws, epoch=0, digests=np.zeros(0, np.uint64), drafts=drafts))

    def _offer(self, result: StepResult) -> str:
        for replica in self._replicas:
            replica.offer(result)
        return "\n".join(words.result_rows(result)) or "no rows"


def _plan_record(step: int, command: Command, body: tuple[Command, ...]) -> StepPlan:
    of = {word: [line for line in body if line.word == word] for word in ("release", "admit", "ready", "blocks", "row")}
    if sum(map(len, of.values())) != len(body):
        raise InvalidRequestError(f"line {command.line}: a plan's input is lines of {', '.join(of)}")
    return StepPlan(
        epoch=0,
        step=step,
        horizon=command.number("horizon", 0),
        releases=Slots(slots=_int32(of["release"], "slot"), generations=_int64(of["release"], "generation")),
        admissions=_admissions(of["admit"]),
        ready=Ready(slots=_int32(of["ready"], "slot"), generations=_int64(of["ready"], "generation"), computed=_int32(of["ready"], "computed")),
        new_blocks=NewBlocks(
            slots=_int32(of["blocks"], "slot"),
            groups=np.zeros(len(of["blocks"]), np.int32),
            blocks=Ragged.of([line.numbers("blocks") for line in of["blocks"]]),
        ),
        rows=Rows(
            slots=_int32(of["row"], "slot"),
            generations=_int64(of["row"], "generation"),
            counts=_int32(of["row"], "count"),
            starts=np.array([line.number("start", UNKNOWN_START) for line in of["row"]], np.int32),
            samples=np.array([line.flag("samples", True) for line in of["row"]], np.int32),
        ),
    )


def _admissions(lines: list[Command]) -> Admissions:
    if not lines:
        return Admissions()
    sides = [Side(stop_ids=tuple(line.numbers("stop", ""))) for line in lines]
    columns = [_admitted_columns(line, side) for line, side in zip(lines, sides, strict=True)]
    return Admissions(
        slots=_int32(lines, "slot"),
        values={name: column_array(name, [row[name] for row in columns]) for name in ADMITTED},
        tokens=Ragged.of([line.numbers("tokens") for line in lines]),
        marks=np.concatenate([_marks(line) for line in lines]),
        sides=tuple(sides),
        transfers=(None,) * len(lines),
    )


def _admitted_columns(line: Command, side: Side) -> dict[str, int | float]:
    known = len(line.numbers("tokens"))
    given: dict[str, Any] = {
        "generation": line.number("generation"),
        "known": line.number("known", known),
        "computed": line.number("computed", 0),
        "prompt_length": line.number("prompt", known),
        "length_cap": line.number("cap"),
        "seed": line.number("seed", 1),
        "top_p": 1.0,
        "logprob_count": -1,
        "prompt_logprob_count": -1,
        "side_hash": side.hash64(),
        "kv_salt": side.kv_salt(),
        "importing": line.flag("importing", False),
    }
    return dict.fromkeys(ADMITTED, 0) | given


def _marks(line: Command) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """`E2,T1`: two embeddings, then a token."""
    known = len(line.numbers("tokens"))
    runs = [(part[0], int(part[1:])) for part in line.text("marks", f"T{known}").split(",")]
    return np.array([_MARK_OF[letter] for letter, count in runs for _ in range(count)], np.uint8)


def _result(command: Command, body: tuple[Command, ...]) -> StepResult:
    return StepResult(
        epoch=0,
        step=command.number("step"),
        slots=_int32(body, "slot"),
        generations=_int64(body, "generation"),
        tokens=Ragged.of([line.numbers("tokens") for line in body]),
        finishes=np.array([_FINISH_OF[line.text("finish", "no")] for line in body], np.int32),
        drafts=Ragged.of([line.numbers("drafts", "") for line in body]),
    )


def _int32(lines: list[Command] | tuple[Command, ...], name: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([line.number(name) for line in lines], np.int32)


def _int64(lines: list[Command] | tuple[Command, ...], name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([line.number(name) for line in lines], np.int64)
