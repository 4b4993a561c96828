"""`Log`: a hash of all that happened in a simulated run, in order. Two runs of one scenario have the same one, or something is not repeatable."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from lockstep.core.outputs import TokenEvent
from lockstep.core.records import StepPlan, StepResult
from lockstep.runtime.transport.cluster import FromStages
from lockstep.sim.clients import Client


class Log:
    """engine: its number. time: virtual seconds."""

    def __init__(self) -> None:
        self._hasher = hashlib.blake2b(digest_size=16)

    def plan(self, engine: int, time: float, plan: StepPlan) -> None:
        self._fold(f"plan {engine} {time!r}", plan.columns())

    def taken(self, engine: int, time: float, message: FromStages) -> None:
        """What a driver has taken from its stages."""
        if isinstance(message, StepResult):
            self._fold(f"result {engine} {time!r}", message.columns())
        else:
            self._fold(f"taken {engine} {time!r} {message}")

    def event(self, client: Client, time: float, event: TokenEvent) -> None:
        name = f"{client.ask.name} {client.attempt}"
        self._fold(f"event {time!r} {name} {event.index} {event.token_ids} {event.finish_reason} {event.error}")

    def said(self, time: float, text: str) -> None:
        self._fold(f"{time!r} {text}")

    def _fold(self, text: str, columns: Mapping[str, NDArray[Any]] = MappingProxyType({})) -> None:
        self._hasher.update(text.encode())
        for name, array in columns.items():
            self._hasher.update(name.encode() + array.tobytes())

    def result(self) -> str:
        return self._hasher.hexdigest()
