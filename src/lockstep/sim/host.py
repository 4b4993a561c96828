"""`StageHost`: one stage's process in virtual time. It does what `runtime.transport.stage_process` does, and it can be killed and stopped.

A piece of work takes a time; what came meanwhile is taken before the next one. The stage itself is the real one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from lockstep.errors import InternalError, LinkError, LockstepError
from lockstep.runtime.handover import ToStage
from lockstep.runtime.messages import KVPart, KVPull, StageFailure, StageReady, StageStart
from lockstep.runtime.stage import DRIVER, Stage
from lockstep.sim.timeline import Timeline
from lockstep.sim.wires import End, MakeEnd, Wire


class ProcessEnded(Exception):
    """The process dies at this point of its work, without a word."""


class Network(Protocol):
    """What a stage's messages go into."""

    def carry(self, engine: int, wire: Wire) -> None: ...

    def carry_kv(self, engine: int, sent: ToStage) -> None: ...


class State(Enum):
    """running: in an epoch. waiting: for the next epoch, after a failure or a start. starting: not up yet. stopped: alive, and does nothing."""

    RUNNING = "running"
    WAITING = "waiting"
    STARTING = "starting"
    STOPPED = "stopped"
    ENDED = "ended"


class StageHost:
    """build(epoch): the stage as it begins an epoch. work_s(pieces of work so far): how long the next one takes. note_end: is called when it dies."""

    def __init__(
        self,
        index: int,
        engine: int,
        *,
        timeline: Timeline,
        network: Network,
        build: Callable[[int], Stage],
        make_end: MakeEnd,
        work_s: Callable[[int], float],
        forget_memory: Callable[[], None],
        note_end: Callable[[int], None],
    ) -> None:
        self.index = index
        self.state = State.RUNNING
        self.slowness = 1.0
        self._engine = engine
        self._timeline = timeline
        self._network = network
        self._build = build
        self._make_end = make_end
        self._work_s = work_s
        self._forget_memory = forget_memory
        self._note_end = note_end
        self._worked = 0
        self._life = 0
        self._due = False
        self._inbox: deque[Wire | KVPart | tuple[str, KVPull]] = deque()
        self._end: End = make_end(index, 0)
        self.stage: Stage | None = build(0)

    @property
    def answers(self) -> bool:
        """It would send heartbeats."""
        return self.state in (State.RUNNING, State.WAITING)

    # Life and death

    def kill(self) -> None:
        """End it from outside, which nobody needs to be told."""
        self.state = State.ENDED
        self.stage = None
        self._inbox.clear()

    def crash(self) -> None:
        if self.state is not State.ENDED:
            self.kill()
            self._note_end(self.index)

    def stop(self) -> None:
        """Alive, and never does anything again."""
        if self.state is not State.ENDED:
            self.state = State.STOPPED

    def start(self, epoch: int, startup_s: float, note_up: Callable[[int], None]) -> None:
        """A new process, which is up after startup_s; then note_up is called. Nothing of the former one is left."""
        self.kill()
        self.state = State.STARTING
        self.slowness = 1.0
        self._life += 1
        self._forget_memory()
        life = self._life

        def up() -> None:
            if self._life == life and self.state is State.STARTING:
                self.state = State.WAITING
                self._end = self._make_end(self.index, epoch)
                note_up(self.index)
                self._stir()

        self._timeline.after(startup_s, up)

    # Messages and work

    def receive(self, arrived: Wire | KVPart | tuple[str, KVPull]) -> None:
        """Whatever comes from a link, or from a stage of another engine (KVPart, or a pull with the instance that asks)."""
        if self.state is not State.ENDED:
            self._inbox.append(arrived)
            self._stir()

    def _stir(self) -> None:
        if self.answers and not self._due:
            self._due = True
            self._worked += 1
            self._timeline.after(self.slowness * self._work_s(self._worked), self._work)

    def _work(self) -> None:
        self._due = False
        if not self.answers:
            return
        try:
            if self._turn():
                self._stir()
        except ProcessEnded:
            self.crash()
        except LockstepError as error:
            self._fail(error)
            self._stir()
        except Exception as error:
            self._fail(InternalError(f"{type(error).__name__}: {error}"))
            self.crash()

    def _turn(self) -> bool:
        """Take what has come, then one piece of work; whether there may be more."""
        while (message := self._next_message()) is not None:
            if isinstance(message, StageStart):
                self._begin(message)
            elif self.stage is not None and self.state is State.RUNNING:
                self._take(self.stage, message)
        if self.stage is None or self.state is not State.RUNNING:
            return False
        sends = self.stage.advance()
        for send in sends or ():
            self._send(send.destination, send.message)
        for sent in self.stage.take_for_others():
            self._network.carry_kv(self._engine, sent)
        return sends is not None

    def _next_message(self) -> Any | None:
        while True:
            try:
                if (message := self._end.take_due()) is not None:
                    return message
                if not self._inbox:
                    return None
                arrived = self._inbox.popleft()
                message = self._end.unpack(arrived) if isinstance(arrived, Wire) else arrived
                if message is not None:
                    return message
            except LinkError:
                if self.state is State.RUNNING:
                    raise

    def _take(self, stage: Stage, message: Any) -> None:
        if isinstance(message, KVPart):
            for send in stage.offer_part(message):
                self._send(send.destination, send.message)
        elif isinstance(message, tuple):
            stage.offer_pull(*message)
        else:
            stage.offer(message)

    def _begin(self, start: StageStart) -> None:
        if self._end.epoch < start.epoch:
            self._end.begin(start.epoch)
        self.stage = self._build(start.epoch)
        self.state = State.RUNNING
        self._send(DRIVER, StageReady(stage=self.index, epoch=start.epoch, kv_bytes=0, threads=1))

    def _fail(self, error: LockstepError) -> None:
        step, concerned = (error.step, error.concerned) if isinstance(error, InternalError) else (-1, ())
        self.state = State.WAITING
        failure = StageFailure(stage=self.index, epoch=self._end.epoch, code=error.code, message=str(error), step=step, concerned=tuple(concerned))
        self._send(DRIVER, failure)

    def _send(self, destination: int, message: Any) -> None:
        self._network.carry(self._engine, self._end.pack(destination, message))
