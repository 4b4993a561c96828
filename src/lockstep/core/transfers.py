"""`TransferBook`: KV that is held for other engines, from the plan that releases its request to the plan that lets go of it (PROTOCOL.md 20).

The scheduler's: it says when a transfer begins; whoever knows the receiver says when it ends. No clock: leases are the driver's.
"""

from __future__ import annotations

from lockstep.core.blocks import BlockBook, GroupBlocks
from lockstep.core.plan_builder import PlanBuilder
from lockstep.core.records import Transfer
from lockstep.core.request import LiveRequest


class TransferBook:
    """instance, stage_layers: what transfers are named by, and which layers each stage holds. Numbers from first_number on are never used again."""

    def __init__(self, book: BlockBook, instance: str, stage_layers: tuple[tuple[int, int], ...], first_number: int) -> None:
        self.next_number = first_number
        self._book = book
        self._instance = instance
        self._stage_layers = stage_layers
        self._held: dict[int, tuple[Transfer, GroupBlocks]] = {}
        self._begun: list[tuple[str, Transfer]] = []
        self._ending: list[int] = []

    @property
    def held(self) -> tuple[Transfer, ...]:
        return tuple(transfer for transfer, _ in self._held.values())

    @property
    def has_ending(self) -> bool:
        """Some transfer waits for the plan that ends it."""
        return bool(self._ending)

    def begin(self, request: LiveRequest, build: PlanBuilder) -> None:
        """The KV of all that a finished request computed stays readable from the plan that releases it on."""
        computed = request.known - 1
        assert computed > 0, (request.spec.request_id, request.known)
        transfer = Transfer(instance=self._instance, epoch=build.epoch, step=build.step, number=self.next_number, layers=self._stage_layers)
        self.next_number += 1
        blocks = self._book.hold(request, computed)
        self._held[transfer.number] = (transfer, blocks)
        self._begun.append((request.spec.request_id, transfer))
        build.export(transfer, request, computed, blocks)

    def take_begun(self) -> list[tuple[str, Transfer]]:
        """Whose transfers have begun since this was asked last: (request, transfer)."""
        begun, self._begun = self._begun, []
        return begun

    def end(self, number: int) -> None:
        """With the next plan. Unknown numbers are of transfers that have ended."""
        if number in self._held and number not in self._ending:
            self._ending.append(number)

    def plan_ends(self, build: PlanBuilder) -> None:
        for number in self._ending:
            transfer, blocks = self._held.pop(number)
            self._book.let_go(blocks)
            build.unexport(transfer)
        self._ending.clear()
