"""Collects what one plan will say, then freezes it into columns. Decides nothing."""

from __future__ import annotations

import numpy as np

from lockstep.core.blocks import GroupBlocks
from lockstep.core.ragged import Ragged
from lockstep.core.records import Admissions, Exports, NewBlocks, Ready, Rows, Slots, StepPlan, Transfer
from lockstep.core.request import LiveRequest
from lockstep.core.schema import ADMITTED, MARK_TOKEN, column_array


class PlanBuilder:
    def __init__(self, epoch: int, step: int) -> None:
        self.epoch = epoch
        self.step = step
        self.budget_used = 0
        self.prompt_logprobs = 0
        self.horizon_least = 0
        self.preempted = 0
        self.row_owners: dict[int, LiveRequest] = {}
        self._releases: list[tuple[int, int]] = []
        self._admissions: list[tuple[LiveRequest, int]] = []
        self._ready: list[tuple[LiveRequest, int]] = []
        self._exports: list[tuple[Transfer, int, int, int, GroupBlocks]] = []
        self._unexports: list[Transfer] = []
        self._new_blocks: list[tuple[int, int, list[int]]] = []
        self._rows: list[tuple[int, int, int, int, bool]] = []

    @property
    def row_count(self) -> int:
        return len(self._rows)

    @property
    def is_empty(self) -> bool:
        return not (self._rows or self._releases or self._ready or self._unexports or self._admissions)

    def release(self, slot: int, generation: int) -> None:
        """Before anything else is said of the generation in this plan: who has a row or a ready record in it is no victim (PROTOCOL.md 17)."""
        assert generation not in self.row_owners, (slot, generation)
        assert all(request.generation != generation for request in self.ready_requests), (slot, generation)
        self._releases.append((slot, generation))

    def ready(self, request: LiveRequest, computed: int) -> None:
        """Its import is over; `computed` positions came."""
        self._ready.append((request, computed))

    def export(self, transfer: Transfer, request: LiveRequest, computed: int, blocks: GroupBlocks) -> None:
        """The request is released in this plan, its first `computed` positions stay readable in these blocks."""
        assert request.slot is not None, request.spec.request_id
        self._exports.append((transfer, request.slot, request.generation, computed, blocks))

    def unexport(self, transfer: Transfer) -> None:
        self._unexports.append(transfer)

    def admit(self, request: LiveRequest, computed: int) -> None:
        """The request's slot and generation are set; its first `computed` positions come from shared blocks."""
        self._admissions.append((request, computed))

    def add_blocks(self, slot: int, group: int, blocks: list[int]) -> None:
        self._new_blocks.append((slot, group, blocks))

    def add_row(self, request: LiveRequest, *, count: int, start: int, samples: bool) -> None:
        assert request.slot is not None
        assert request.generation not in self.row_owners, (request.slot, request.generation)
        self._rows.append((request.slot, request.generation, count, start, samples))
        self.row_owners[request.generation] = request
        self.budget_used += count
        self.prompt_logprobs += request.prompt_logprobs_in(start, count)

    def has_row(self, request: LiveRequest) -> bool:
        return request.generation in self.row_owners

    def has_ready(self, request: LiveRequest) -> bool:
        return any(other is request for other, _ in self._ready)

    @property
    def ready_requests(self) -> list[LiveRequest]:
        return [request for request, _ in self._ready]

    def build(self, horizon: int) -> StepPlan:
        return StepPlan(
            epoch=self.epoch,
            step=self.step,
            horizon=horizon,
            releases=Slots(slots=_int32(r[0] for r in self._releases), generations=_int64(r[1] for r in self._releases)),
            admissions=self._admission_columns(),
            ready=Ready(
                slots=_int32(request.slot for request, _ in self._ready),
                generations=_int64(request.generation for request, _ in self._ready),
                computed=_int32(computed for _, computed in self._ready),
            ),
            exports=self._export_columns(),
            unexports=tuple(self._unexports),
            new_blocks=NewBlocks(
                slots=_int32(b[0] for b in self._new_blocks),
                groups=_int32(b[1] for b in self._new_blocks),
                blocks=Ragged.of([b[2] for b in self._new_blocks]),
            ),
            rows=Rows(
                slots=_int32(r[0] for r in self._rows),
                generations=_int64(r[1] for r in self._rows),
                counts=_int32(r[2] for r in self._rows),
                starts=_int32(r[3] for r in self._rows),
                samples=_int32(r[4] for r in self._rows),
            ),
        )

    def _export_columns(self) -> Exports:
        if not self._exports:
            return Exports()
        group_count = len(self._exports[0][4])
        return Exports(
            transfers=tuple(transfer for transfer, _, _, _, _ in self._exports),
            slots=Slots(
                slots=_int32(slot for _, slot, _, _, _ in self._exports),
                generations=_int64(generation for _, _, generation, _, _ in self._exports),
            ),
            computed=_int32(computed for _, _, _, computed, _ in self._exports),
            blocks=tuple(Ragged.of([blocks[group] for _, _, _, _, blocks in self._exports]) for group in range(group_count)),
        )

    def _admission_columns(self) -> Admissions:
        if not self._admissions:
            return Admissions()
        rows = [_admitted_values(request, computed) for request, computed in self._admissions]
        tokens = Ragged.of([request.tokens[: request.known] for request, _ in self._admissions])
        return Admissions(
            slots=_int32(request.slot for request, _ in self._admissions),
            values={name: column_array(name, [row[name] for row in rows]) for name in ADMITTED},
            tokens=tokens,
            marks=np.full(len(tokens.values), MARK_TOKEN, np.uint8),
            sides=tuple(request.spec.side for request, _ in self._admissions),
            transfers=tuple(request.transfer for request, _ in self._admissions),
        )


def _admitted_values(request: LiveRequest, computed: int) -> dict[str, int | float]:
    spec = request.spec
    return {
        "generation": request.generation,
        "known": request.known,
        "computed": computed,
        "prompt_length": request.prompt_length,
        "length_cap": spec.length_cap,
        "seed": spec.seed,
        "temperature": spec.temperature,
        "top_k": spec.top_k,
        "top_p": spec.top_p,
        "min_p": spec.min_p,
        "logprob_count": spec.logprob_count,
        "prompt_logprob_count": spec.prompt_logprob_count,
        "prompt_logprob_start": request.prompt_logprob_start,
        "side_hash": request.side_hash,
        "kv_salt": spec.side.kv_salt(),
        "importing": int(request.transfer is not None),
    }


def _int32(values: object) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.fromiter(values, np.int32)  # type: ignore[call-overload,no-any-return]


def _int64(values: object) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.fromiter(values, np.int64)  # type: ignore[call-overload,no-any-return]
