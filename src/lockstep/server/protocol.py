"""The engine as the HTTP server sees it. Knows requests in tokens and their events; does not know how or where the engine runs.

`runtime.client.AsyncClient` satisfies it; tests of the server pass their own engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.core.outputs import TokenEvent
from lockstep.core.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """alive: the engine can answer. recovering: not at once; requests wait until it has begun its next epoch. reason: why it cannot, or recovers.
    epoch: of its log. restarts: epochs begun after failures. running, waiting: requests. blocks_free, blocks_total: KV pool of the first group,
    cached blocks count as free."""

    alive: bool
    recovering: bool = False
    reason: str = ""
    epoch: int = 0
    restarts: int = 0
    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_total: int = 0


class EngineControls(Protocol):
    """What changes the engine for everybody. mode: "abort" ends what has begun, "wait" finishes it first, "keep" goes on with it afterwards."""

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Returns when nothing is computed any more; requests that come wait. Raises InvalidRequestError for another mode."""
        ...

    async def resume(self) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def update_weights(self, model: str) -> None:
        """Returns once every step is computed with the weights of this checkpoint. Raises a CallerError, and changes nothing, if it does not fit."""
        ...

    @property
    def is_paused(self) -> bool: ...


class EngineClient(Protocol):
    @property
    def max_model_len(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`: names weights, dtype, kernel numerics and engine numerics version."""
        ...

    def status(self) -> EngineStatus: ...

    async def check(self, params: SamplingParams) -> None:
        """What may take its time before `generate`: that structured outputs compile. Raises CallerError if they do not."""
        ...

    def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *, choice: int = 0, priority: int = 0
    ) -> AsyncIterator[TokenEvent]:
        """Submit choice `choice` of a request (an engine request of its own; `params.n` is not looked at beyond making siblings share a prefix)
        and yield its events. Raises CallerError before anything runs if it can never run (prompt over the window, ids out of range),
        CapacityError if the engine is full, PeerError or InternalError if the engine is dead.
        An engine failure in mid-answer arrives as the last event, with its error. Closing the iterator early (aclose) aborts the request."""
        ...

    def abort(self, request_id: str, *, choice: int = 0) -> None:
        """End a request now; unknown ids are ignored. Its iterator ends with finish_reason ABORT."""
        ...
