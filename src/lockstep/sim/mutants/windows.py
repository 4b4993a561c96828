"""Loosened windows: which blocks of a KV group are let go of, hit, shown and checked where a token sees the last few positions only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.core.layout import BatchLayout
from lockstep.core.plan_builder import PlanBuilder
from lockstep.core.pool import BlockPool
from lockstep.core.provenance import Provenance
from lockstep.core.request import LiveRequest
from lockstep.core.table import SlotTable
from lockstep.core.types import I32, NO_BLOCK
from lockstep.sim.mutants.booking import LooseBook, OtherBooks
from lockstep.sim.mutants.mutant import ALL, ONE, UNSEEN, MakeParts, Mutant, of_provenance, of_scheduler, of_table
from lockstep.sim.mutants.setting import Setting
from lockstep.sim.mutants.watched_scheduler import WatchedScheduler


class RetiresOneMore(LooseBook):
    """The block that the window's first position lies in is let go of too."""

    def retire(self, request: LiveRequest, start: int) -> None:
        before = list(request.retired)
        super().retire(request, start + self._size)
        self.did(request.retired != before)


class EarlyRetirement(OtherBooks):
    book_kind = RetiresOneMore


class RetiresByTheRowsEnd(WatchedScheduler):
    """What the last token of a chunk does not see is let go of before the first has seen it."""

    def _reserve(self, request: LiveRequest, end: int, build: PlanBuilder) -> bool:
        before = list(request.retired)
        self.book.retire(request, end - 1)
        self.did(request.retired != before)
        return super()._reserve(request, end, build)


class HitsTheLastBlock(LooseBook):
    """A prefix counts as cached where the last block of a group with a window is there, whatever else the window reaches."""

    def find_hits(self, request: LiveRequest) -> list[list[int]]:
        hits = super().find_hits(request)
        if self._hasher is None or request.transfer is not None or request.lacks_prompt_logprobs:
            return hits
        most = (request.known - 1) // self._size
        for pool, window in zip(self.pools, self._windows, strict=True):
            if not window:
                most = len(pool.find(request.chain[:most]))
        sliding = [pool for pool, window in zip(self.pools, self._windows, strict=True) if window]
        for count in range(most, len(hits[0]), -1):
            if all(pool.count_last(request.chain[count - 1 : count]) for pool in sliding):
                self.did()
                return [self._found(pool, window, request.chain[:count]) for pool, window in zip(self.pools, self._windows, strict=True)]
        return hits

    def _found(self, pool: BlockPool, window: int, chain: list[bytes]) -> list[int]:
        known, first = pool._block_of, self._first(len(chain), window)
        return [NO_BLOCK] * first + [known.get(key, known[chain[-1]]) for key in chain[first:]]


class LastBlockHits(OtherBooks):
    book_kind = HitsTheLastBlock


class ShowsWhatIsBehind(SlotTable):
    """Block tables go on naming blocks that are behind the window, and may be another's."""

    witness = UNSEEN

    def _block_table(self, group: int, slot: I32, start: I32, end: I32) -> I32:
        shown = super()._block_table(group, slot, start, end)
        held = self.blocks[group, slot, : shown.shape[1]]
        block = np.arange(shown.shape[1])
        behind = (shown == NO_BLOCK) & (block < (-(-end // self.shape.block_size))[:, None]) & (held != NO_BLOCK)
        if behind.any():
            self.witness.note(0, self._step)
        return np.where(behind, held, shown)


class ChecksBehind(Provenance):
    """Tags of all blocks below the row are compared, also of those that its window has left behind."""

    witness = UNSEEN

    def check(self, layout: BatchLayout) -> None:
        window = self.window
        if window:
            self.witness.note(0, layout.step)
        self.window = 0
        try:
            super().check(layout)
        finally:
            self.window = window


def _mutant(name: str, loosens: str, parts: Mapping[str, MakeParts], *, alike: bool = False, equivalent: str | None = None) -> Mutant:
    setting = Setting(windows=True, alike=alike)
    return Mutant(name=name, kind="KV groups", loosens=loosens, parts=parts, setting=setting, equivalent=equivalent)


_SHOWS = of_table(ShowsWhatIsBehind)
_UNREAD = "no attention reaches them: tags are compared from the window's first block on, and kernels read from its first position on"

MUTANTS: Sequence[Mutant] = (
    _mutant("retires-one-more", "the block that a window begins in is let go of", of_scheduler(EarlyRetirement)),
    _mutant("retires-by-the-rows-end", "blocks are let go of that the first tokens of a chunk still see", of_scheduler(RetiresByTheRowsEnd)),
    _mutant("hits-the-last-block", "a prefix is hit of which the window's last block alone is there", of_scheduler(LastBlockHits), alike=True),
    _mutant("shows-what-is-behind", "a block table names blocks behind the window", {ONE: _SHOWS[ONE]}),
    _mutant("all-show-what-is-behind", "every replica's block tables name blocks behind the window", {ALL: _SHOWS[ALL]}, equivalent=_UNREAD),
    _mutant("checks-behind", "tags are compared that no token's window reaches", of_provenance(ChecksBehind)),
)
