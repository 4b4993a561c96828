"""Loosened books of blocks: what is hit, published, shared, given away. The driver's alone, so each has the scope ALL."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from lockstep.core.arrivals import Delivery
from lockstep.core.blocks import BlockBook, GroupBlocks
from lockstep.core.plan_builder import PlanBuilder
from lockstep.core.pool import BlockPool
from lockstep.core.prefix import KEY_BYTES, PrefixHasher
from lockstep.core.records import StepResult
from lockstep.core.request import LiveRequest
from lockstep.core.transfers import TransferBook
from lockstep.core.types import I32, ceil_div
from lockstep.sim.mutants.mutant import Mutant, of_scheduler
from lockstep.sim.mutants.setting import ANY, Setting
from lockstep.sim.mutants.watched_scheduler import WatchedScheduler


class OtherBooks(WatchedScheduler):
    """Each epoch has its own book, pools and hasher, of these classes; `owner` lets them say what they did."""

    book_kind: type[BlockBook] = BlockBook
    pool_kind: type[BlockPool] = BlockPool
    hasher_kind: type[PrefixHasher] = PrefixHasher

    def _begin(self, epoch: int, first_transfer: int) -> None:
        super()._begin(epoch, first_transfer)
        config = self.config
        hasher = self.hasher_kind(self._prefix_secret, config.block_size) if config.prefix_caching else None
        self.book = self.book_kind(config.block_counts, config.block_size, hasher, config.windows, config.step_positions)
        self.book.pools = [self.pool_kind(count) for count in config.block_counts]
        self.transfers = TransferBook(self.book, config.instance, config.stage_layers, first_transfer)
        for part in (self.book, hasher, *self.book.pools):
            if isinstance(part, (LooseBook, LoosePool, LooseHasher)):
                part.did = self.did


def _unseen(_otherwise: bool = True) -> None: ...


class LooseBook(BlockBook):
    did: Callable[..., None] = staticmethod(_unseen)


class LoosePool(BlockPool):
    did: Callable[..., None] = staticmethod(_unseen)


class LooseHasher(PrefixHasher):
    did: Callable[..., None] = staticmethod(_unseen)


# Rule 4: what may be hit


class HitsUpToKnown(LooseBook):
    """Whole blocks below `known`: a row may have nothing left to compute."""

    def find_hits(self, request: LiveRequest) -> list[list[int]]:
        if self._hasher is None or request.lacks_prompt_logprobs or request.transfer is not None:
            return [[] for _ in self.pools]
        count = request.known // self._size
        self._hasher.extend(request.chain, request.tokens, request.spec.side.cache_salt, count)
        found = [pool.find(request.chain[:count]) for pool in self.pools]
        shortest = min(len(blocks) for blocks in found)
        self.did(shortest * self._size == request.known)
        return [blocks[:shortest] for blocks in found]


class MayHitAll(OtherBooks):
    book_kind = HitsUpToKnown


class MayHitAllButOne(OtherBooks):
    """Up to known - 1, which may lie inside a block that others share."""

    book_kind = HitsUpToKnown

    def _admit(self, request: LiveRequest, hits: list[list[int]], build: PlanBuilder) -> None:
        most = request.known - 1
        admit = build.admit
        vars(build)["admit"] = lambda admitted, computed: admit(admitted, min(computed, most))
        super()._admit(request, hits, build)
        del vars(build)["admit"]
        request.scheduled = min(request.scheduled, most)


# Rule 18: log probabilities of prompts


class HitsWhateverIsLacking(LooseBook):
    """A request that wants its prompt's log probabilities hits what any other would."""

    def find_hits(self, request: LiveRequest) -> list[list[int]]:
        right = super().find_hits(request)
        start, request.prompt_logprob_start = request.prompt_logprob_start, request.prompt_length
        found = super().find_hits(request)
        request.prompt_logprob_start = start
        self.did(found != right)
        return found


class HitsInSpiteOfPromptLogprobs(OtherBooks):
    book_kind = HitsWhateverIsLacking


class PromptLogprobsOfASlot(WatchedScheduler):
    """Those that have come go when the request leaves its slot, and it goes on behind them."""

    def _preempt(self, request: LiveRequest, build: PlanBuilder) -> None:
        super()._preempt(request, build)
        self.did(bool(request.prompt_logprobs))
        request.prompt_logprobs.clear()


# Rule 15: when a block may be hit


class PublishesWhileBuilding(WatchedScheduler):
    """A block may be hit as soon as a row that fills it is in the plan, so also in that very plan."""

    def _add_row(self, request: LiveRequest, build: PlanBuilder, *, count: int, start: int, samples: bool) -> None:
        super()._add_row(request, build, count=count, start=start, samples=samples)
        before = request.published
        self.book.publish(request)
        self.did(request.published > before)


class PublishesOnAdmission(WatchedScheduler):
    """All blocks of a prompt may be hit from its admission on, while later chunks of it are not even planned."""

    def _admit(self, request: LiveRequest, hits: list[list[int]], build: PlanBuilder) -> None:
        super()._admit(request, hits, build)
        self._extend(request, request.known, build)
        scheduled, importing, before = request.scheduled, request.importing, request.published
        request.scheduled, request.importing = request.known - 1, False
        self.book.publish(request)
        request.scheduled, request.importing = scheduled, importing
        self.did(request.published > before)


class PublishesPlannedAnswers(LooseBook):
    """Blocks of an answer may be hit once they are planned, under the tokens that the list happens to hold."""

    def publish(self, request: LiveRequest) -> None:
        super().publish(request)
        planned = min(request.known_most, request.spec.length_cap - 1)
        if self._hasher is not None and not request.importing and request.outstanding and planned // self._size > request.published:
            self.did()
            held = min(planned // self._size, *(len(blocks) for blocks in request.blocks))
            request.admitted_known, admitted = planned, request.admitted_known
            request.scheduled, scheduled = held * self._size, request.scheduled
            super().publish(request)
            request.admitted_known, request.scheduled = admitted, scheduled


class AnswersBeforeResult(OtherBooks):
    book_kind = PublishesPlannedAnswers


# Class 4: keys, references, the one release path


class SaltIgnored(LooseHasher):
    """C4-07: who has another salt may hit."""

    def extend(self, chain: list[bytes], tokens: I32, salt: bytes, block_count: int) -> None:
        self.did(bool(salt))
        super().extend(chain, tokens, b"", block_count)


class TenantsShare(OtherBooks):
    hasher_kind = SaltIgnored


class KeyOfContent(LooseHasher):
    """A key of the block's own tokens; placed: and of where it stands. Nothing says what stood before it."""

    placed = False

    def extend(self, chain: list[bytes], tokens: I32, salt: bytes, block_count: int) -> None:
        for block in range(len(chain), block_count):
            self.did(block > 0)
            place = block.to_bytes(4, "little") if self.placed else b""
            own = np.ascontiguousarray(tokens[block * self._block_size : (block + 1) * self._block_size]).tobytes()
            chain.append(hashlib.blake2b(place + salt + own, digest_size=KEY_BYTES, key=self._secret).digest())


class KeyWithoutParent(KeyOfContent):
    placed = True


class ContentKeys(OtherBooks):
    hasher_kind = KeyOfContent


class ParentlessKeys(OtherBooks):
    hasher_kind = KeyWithoutParent


class CountsSharersOnce(LoosePool):
    """Who shares a held block adds no reference, so it is free when the first of them lets go."""

    def share(self, blocks: Iterable[int]) -> None:
        found = list(blocks)
        self.did(any(not self.is_free(block) for block in found))
        super().share(block for block in found if self.is_free(block))


class SharersOnce(OtherBooks):
    pool_kind = CountsSharersOnce


class KeepsKeys(LoosePool):
    """The key of a block that is given away goes on finding it."""

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        super()._forget(block)
        if key is not None:
            self.did()
            self._block_of[key] = block


class StaleKeys(OtherBooks):
    pool_kind = KeepsKeys


class ReleasesTwice(LooseBook):
    """C2-08: two paths let go of the same blocks."""

    def release(self, request: LiveRequest) -> None:
        self.did()
        for pool, blocks in zip(self.pools, request.blocks, strict=True):
            pool.release(blocks)
        super().release(request)


class DoubleFree(OtherBooks):
    book_kind = ReleasesTwice


class ReleasesNothing(LooseBook):
    """C2-05: the blocks of a request that was given up stay held."""

    def release(self, request: LiveRequest) -> None:
        if request.finished:
            super().release(request)
        else:
            self.did()
            request.blocks, request.published = [], 0


class LeaksAborted(OtherBooks):
    book_kind = ReleasesNothing


class FreesAtOnce(WatchedScheduler):
    """C4-09: a finish gives the blocks back when it comes, and the release finds none. Not those that are exported."""

    def _accept(self, request: LiveRequest, result: StepResult, row: int) -> Delivery:
        delivery = super()._accept(request, result, row)
        if delivery.finish is not None and not request.spec.exports:
            self.did()
            self.book.release(request)
            request.blocks = [[] for _ in self.book.pools]
        return delivery


# Rule 20: an export holds its blocks


class HoldsNothing(LooseBook):
    """C2-01: an export names blocks, and holds no reference to them."""

    def hold(self, request: LiveRequest, end: int) -> GroupBlocks:
        self.did()
        count = ceil_div(end, self._size)
        return tuple(tuple(blocks[:count]) for blocks in request.blocks)

    def let_go(self, held: GroupBlocks) -> None: ...


class ExportsUnheld(OtherBooks):
    book_kind = HoldsNothing


def _mutant(kind: str, name: str, loosens: str, scheduler: type[WatchedScheduler], setting: Setting = ANY, equivalent: str | None = None) -> Mutant:
    return Mutant(name=name, kind=kind, loosens=loosens, parts=of_scheduler(scheduler), setting=setting, equivalent=equivalent)


_ALIKE, _HAND_OVER, _TIGHT = Setting(alike=True), Setting(hand_over=True), Setting(tight=True)

MUTANTS: Sequence[Mutant] = (
    _mutant("rule 4", "may-hit-all", "a prefix hit may cover all known tokens", MayHitAll, _ALIKE),
    _mutant(
        "rule 4",
        "may-hit-all-but-one",
        "a prefix hit may end inside a shared block",
        MayHitAllButOne,
        _ALIKE,
        "the row writes at the last position of the block the very bits and tag that stand there (same prefix, row-invariant kernels)",
    ),
    _mutant(
        "rule 18",
        "hits-without-prompt-logprobs",
        "a request that lacks log probabilities of its prompt hits prefixes",
        HitsInSpiteOfPromptLogprobs,
        _ALIKE,
    ),
    _mutant("rule 18", "preemption-loses-prompt-logprobs", "a preempted request keeps its place and not what came", PromptLogprobsOfASlot, _TIGHT),
    _mutant("rule 15", "publishes-while-building", "a block may be hit in the plan that fills it", PublishesWhileBuilding, _ALIKE),
    _mutant("rule 15", "publishes-on-admission", "a prompt's blocks may be hit before they are planned", PublishesOnAdmission, _ALIKE),
    _mutant("rule 15", "publishes-planned-answers", "blocks of an answer may be hit once they are planned", AnswersBeforeResult, _ALIKE),
    _mutant("rule 20", "exports-unheld", "an export holds no reference to its blocks", ExportsUnheld, _HAND_OVER),
    _mutant("C2-05", "leaks-aborted", "blocks of a request that is not finished stay held", LeaksAborted, Setting(aborts=True)),
    _mutant("C2-08", "releases-twice", "blocks are let go of on two paths", DoubleFree),
    _mutant("C4-07", "ignores-salt", "the cache's key leaves out the salt", TenantsShare, _ALIKE),
    _mutant("C4 cache", "key-of-content", "the cache's key is the block's own tokens", ContentKeys, _ALIKE),
    _mutant("C4 cache", "key-without-parent", "the cache's key leaves out what stands before the block", ParentlessKeys, _ALIKE),
    _mutant("C4 cache", "counts-sharers-once", "a block is free when the first of its sharers lets go", SharersOnce, _ALIKE),
    _mutant("C4 cache", "keeps-keys", "a block that is given away is still found by its old key", StaleKeys, _ALIKE),
    _mutant(
        "C4-09",
        "frees-at-once",
        "a finish gives blocks back when it comes, not with the plan that releases the slot",
        FreesAtOnce,
        equivalent="a freed block is written by a later plan only, and every stage runs plans in order (PROTOCOL.md, tried and harmless)",
    ),
)
