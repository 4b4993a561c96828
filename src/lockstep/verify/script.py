"""One run of the requests through an engine: how many at once, who is held back, which neighbours are aborted and when.

All of it happens on the engine's own thread, in its sink, so that an in-process run is the same every time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lockstep.core.outputs import FinishReason, TokenEvent, TokenLogprobs
from lockstep.core.params import LOGPROBS_MAX
from lockstep.core.request import EngineRequest
from lockstep.errors import InternalError, LockstepError
from lockstep.runtime.loop import Sink
from lockstep.text import TextStream
from lockstep.verify.workload import Answer

RUN_TIMEOUT_S = 900.0


class AnyEngine(Protocol):
    """What a script needs of an engine."""

    def submit_all(self, requests: Sequence[EngineRequest], sink: Sink) -> None: ...

    def abort(self, request_id: str) -> None: ...


@dataclass(slots=True)
class _Open:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None


class Script:
    """at_once: most requests open at a time (neighbours not counted). late: ids that wait until some other request has ended.
    texts: of requests with stop strings, which end where the text says so and are aborted then, as a client does (PROTOCOL.md 25).
    A neighbour is aborted when it has `neighbour_tokens` tokens (0: at the first event of anybody)."""

    def __init__(
        self,
        engine: AnyEngine,
        requests: Sequence[EngineRequest],
        *,
        at_once: int,
        late: frozenset[str] = frozenset(),
        neighbours: Sequence[EngineRequest] = (),
        texts: Mapping[str, TextStream] | None = None,
    ) -> None:
        self._engine = engine
        self._at_once = at_once
        self._queue = deque(r for r in requests if r.request_id not in late)
        self._late = deque(r for r in requests if r.request_id in late)
        self._neighbours = {n.request_id: i for i, n in enumerate(neighbours)}
        self._neighbour_requests = list(neighbours)
        self._texts = texts or {}
        self._aborted: set[str] = set()
        self._open: dict[str, _Open] = {}
        self._answers: dict[str, _Open] = {}
        self._error: LockstepError | None = None
        self._done = threading.Event()
        self.open_max = 0
        self.ended_by_text = 0

    def run(self) -> dict[str, Answer]:
        """Answers by request id, neighbours left out. Raises the engine's error if it stopped."""
        if not self._queue:
            self._queue, self._late = self._late, deque()
        first = self._take_next()
        self._engine.submit_all([*self._neighbour_requests, *first], self._take_events)
        if not self._done.wait(RUN_TIMEOUT_S):
            raise InternalError(f"requests {sorted(self._open)} have no end after {RUN_TIMEOUT_S:g} s")
        if self._error is not None:
            raise self._error
        return {
            name: Answer(tokens=tuple(a.tokens), logprobs=tuple(a.logprobs), finish=a.finish, prompt_logprobs=a.prompt_logprobs)
            for name, a in self._answers.items()
            if name not in self._neighbours
        }

    def _take_next(self) -> list[EngineRequest]:
        taken = []
        while self._queue and sum(name not in self._neighbours for name in self._open) < self._at_once:
            request = self._queue.popleft()
            self._open[request.request_id] = _Open()
            taken.append(request)
        for request in self._neighbour_requests:
            if request.request_id not in self._answers:
                self._open.setdefault(request.request_id, _Open())
        self.open_max = max(self.open_max, len(self._open))
        return taken

    def _take_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            request = self._open[event.request_id]
            kept = len(event.token_ids) if request.finish is None else 0
            if (text := self._texts.get(event.request_id)) is not None and kept:
                kept = self._push(text, request, event)
            request.tokens.extend(event.token_ids[:kept])
            request.logprobs.extend(event.logprobs[:kept])
            if (told := event.prompt_logprobs) is not None:
                request.prompt_logprobs = tuple(told.entry(i, LOGPROBS_MAX) for i in range(len(told)))
            if event.finish_reason is not None:
                request.finish = request.finish or event.finish_reason
                self._error = self._error or event.error
                self._answers[event.request_id] = self._open.pop(event.request_id)
                if event.request_id not in self._neighbours:
                    self._queue.extend(self._late)
                    self._late.clear()
        self._abort_neighbours()
        following = self._take_next() if self._error is None else []
        if following:
            self._engine.submit_all(following, self._take_events)
        if (not self._open and not self._queue) or self._error is not None:
            self._done.set()

    def _push(self, text: TextStream, request: _Open, event: TokenEvent) -> int:
        """How many of the event's tokens are the answer's; the engine is told if its text has ended."""
        delta = text.push(event.token_ids)
        if delta.stopped is not None:
            request.finish = FinishReason.STOP
            if event.finish_reason is None:
                self.ended_by_text += 1
                self._engine.abort(event.request_id)
        return delta.token_count

    def _abort_neighbours(self) -> None:
        """The first as soon as anything happens (most often in its prefill), the next after a token, the next after two, ..."""
        for name, index in self._neighbours.items():
            if name in self._open and name not in self._aborted and len(self._open[name].tokens) >= index:
                self._aborted.add(name)
                self._engine.abort(name)
