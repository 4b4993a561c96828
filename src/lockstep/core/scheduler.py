"""`Scheduler`: decides what each step computes, and writes it as a `StepPlan`. The only decider; ranks only replay.

Continuous batching under a token budget: decode rows first, then prefill chunks of running requests, then admissions. Synchronous and asynchronous
scheduling are the same code: they differ in when a row's dependency counts as met and in how many plans may be in flight (PROTOCOL.md 23).
It knows requests, blocks and counts; not ranks, links, clocks or the model.
"""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass

from lockstep.core.arrivals import FINISHES, Delivery, check_awaited, told_of_prompts
from lockstep.core.blocks import BlockBook
from lockstep.core.logprobs import LogprobColumns
from lockstep.core.plan_builder import PlanBuilder
from lockstep.core.pool import BlockPool
from lockstep.core.prefix import PrefixHasher
from lockstep.core.records import StepPlan, StepResult
from lockstep.core.request import STRIKES_MAX, EngineRequest, LiveRequest
from lockstep.core.schema import FINISH_FAILED
from lockstep.core.stats import SchedulerStats
from lockstep.core.transfers import TransferBook
from lockstep.core.types import NO_STEP, UNKNOWN_START, ceil_div
from lockstep.errors import InternalError, LogError

PROMPT_LOGPROBS_A_STEP = 64
"""A row of logits each: enough to read the head's weights once for many, few enough that a large vocabulary's rows fit in tens of megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """slot_count: most requests at once. token_budget: most tokens a step. microbatch_count: M of PROTOCOL.md 23, at least the number of stages.
    priorities: rank by (priority, arrival) instead of arrival alone. block_counts: blocks in the pool, one a KV group;
    windows: of each group, how many positions a token sees, 0 for all. prompt_logprobs_max: most log probabilities of prompt tokens a step; each
    takes a row of logits. instance, stage_layers: what transfers of its KV are named by, and which layers each stage holds (first, one past the
    last)."""

    slot_count: int
    token_budget: int
    microbatch_count: int
    asynchronous: bool
    block_size: int
    block_counts: tuple[int, ...]
    windows: tuple[int, ...] = (0,)
    prefix_caching: bool = True
    priorities: bool = False
    drafts_max: int = 0
    prompt_logprobs_max: int = PROMPT_LOGPROBS_A_STEP
    instance: str = ""
    stage_layers: tuple[tuple[int, int], ...] = ()

    @property
    def plans_in_flight_max(self) -> int:
        return self.microbatch_count + (1 if self.asynchronous else 0)

    @property
    def step_positions(self) -> int:
        """The most positions from the first that a row may begin at to the last that blocks are reserved for."""
        return self.token_budget + self.plans_in_flight_max * (1 + self.drafts_max)


class Scheduler:
    """epoch: number of the log. prefix_secret: random bytes for the keys of the prefix cache. Generations start at first_generation and are never
    reused, nor are the numbers of transfers. admitting: False lets only those in that have been in before."""

    def __init__(self, config: SchedulerConfig, *, prefix_secret: bytes, epoch: int = 0, first_generation: int = 0) -> None:
        self.config = config
        self.stats = SchedulerStats()
        self._prefix_secret = prefix_secret
        self._next_generation = first_generation
        self._next_arrival = 0
        self._requests: dict[str, LiveRequest] = {}
        self._waiting: list[LiveRequest] = []
        self._isolated: list[LiveRequest] = []
        self.admitting = True
        self._begin(epoch, 0)

    def _begin(self, epoch: int, first_transfer: int) -> None:
        """Everything that belongs to one epoch, from zero (PROTOCOL.md 21)."""
        config = self.config
        hasher = PrefixHasher(self._prefix_secret, config.block_size) if config.prefix_caching else None
        self.epoch = epoch
        self.next_step = 0
        self.received = 0
        self.book = BlockBook(config.block_counts, config.block_size, hasher, config.windows, config.step_positions)
        self.transfers = TransferBook(self.book, config.instance, config.stage_layers, first_transfer)
        self._horizon = 0
        self._running: list[LiveRequest] = []
        self._by_generation: dict[int, LiveRequest] = {}
        self._free_slots = list(range(config.slot_count))
        self._ended: list[LiveRequest] = []
        self._ready: list[tuple[int, int]] = []
        self.grammars: set[str] = set()
        self._generations_in_plan: dict[int, frozenset[int]] = {}

    @property
    def pools(self) -> list[BlockPool]:
        return self.book.pools

    # Epochs

    def restart(self, epoch: int, *, strikes: bool) -> list[LiveRequest]:
        """Begin a new epoch: every live request waits again with all that it knows. strikes: requests with rows in unresolved plans get one.
        A request that has too many, and was alone in those plans, is returned and no longer known here: only it can have been the cause."""
        assert epoch > self.epoch, (epoch, self.epoch)
        in_plans = sorted(frozenset[int]().union(*self._generations_in_plan.values())) if strikes else []
        struck = [request for generation in in_plans if (request := self.request_of(generation)) is not None]
        poison = []
        for request in struck:
            request.strikes += 1
            request.suspect_until = request.known_most
            if request.strikes >= STRIKES_MAX and len(in_plans) == 1:
                del self._requests[request.spec.request_id]
                poison.append(request)
        for request in self._requests.values():
            request.leave_slot()
        self._waiting = sorted(self._requests.values(), key=self._rank)
        self._isolated = [request for request in self._waiting if request.isolated]
        self._begin(epoch, self.transfers.next_number)
        return poison

    def request_of(self, generation: int) -> LiveRequest | None:
        """Who holds a slot under this generation, if it is still live."""
        request = self._by_generation.get(generation)
        return request if request is not None and self._requests.get(request.spec.request_id) is request else None

    # Requests come and go

    def submit(self, spec: EngineRequest) -> None:
        """Queue a request. It must be able to run alone in the whole pool; the caller has checked that."""
        if spec.request_id in self._requests:
            raise InternalError(f"request {spec.request_id!r} is submitted twice")
        request = LiveRequest.of(spec, self._next_arrival)
        self._next_arrival += 1
        self._requests[spec.request_id] = request
        bisect.insort(self._waiting, request, key=self._rank)

    def abort(self, request_id: str) -> LiveRequest | None:
        """End a request in whatever phase it is. Its slot and blocks go back with the next plan; results in flight for it are dropped."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self.stats.aborts += 1
        if request.slot is None:
            self._waiting.remove(request)
        else:
            self.stats.aborts_running += 1
            if request.last_step >= self.received:
                self.stats.aborts_in_flight += 1
            self._running.remove(request)
            self._ended.append(request)
        return request

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._requests)

    def find(self, request_id: str) -> LiveRequest | None:
        return self._requests.get(request_id)

    @property
    def running(self) -> tuple[LiveRequest, ...]:
        """Those that hold a slot and have not ended, in rank order."""
        return tuple(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def has_begun_work(self) -> bool:
        """Some request has been in a slot and has not ended, or something waits for its end."""
        return bool(self._ended or self.transfers.has_ending) or any(request.has_begun for request in self._requests.values())

    def reset_prefix_cache(self) -> None:
        """No prefix is hit until it has been computed again."""
        for pool in self.pools:
            pool.clear_cache()

    @property
    def has_work(self) -> bool:
        """Some request is live, or a slot or an export waits for its end."""
        return bool(self._requests or self._ended or self.transfers.has_ending)

    @property
    def plans_in_flight(self) -> int:
        return self.next_step - self.received

    def make_ready(self, generation: int, computed: int) -> None:
        """An import is over: `computed` positions came, 0 after a failure. A generation that has left its slot meanwhile is of no concern."""
        self._ready.append((generation, computed))

    # Deciding

    def plan(self) -> StepPlan | None:
        """The next plan, committed; or None if nothing can be done before a result comes."""
        if self.plans_in_flight >= self.config.plans_in_flight_max:
            return None
        build = PlanBuilder(self.epoch, self.next_step)
        for request in self._ended:
            self._release(request, build)
        self._ended.clear()
        self._plan_ends_of_transfers(build)
        self._plan_decodes(build, newest=False)
        self._plan_prefills(build)
        self._plan_admissions(build)
        if not build.row_count and self.config.asynchronous:
            self._plan_decodes(build, newest=True)
        return None if build.is_empty else self._commit(build)

    def _plan_ends_of_transfers(self, build: PlanBuilder) -> None:
        self.transfers.plan_ends(build)
        for generation, computed in self._ready:
            request = self.request_of(generation)
            if request is None or not request.importing:
                continue
            assert 0 <= computed < request.known, (request.spec.request_id, computed, request.known)
            request.importing, request.scheduled = False, computed
            self.stats.imports += 1
            self.stats.imports_failed += computed == 0
            build.ready(request, computed)
        self._ready.clear()

    def _plan_decodes(self, build: PlanBuilder, *, newest: bool) -> None:
        """Rows that sample from the last known token on. A microbatch takes its share of the live ones and no more, so that M plans are equally full.
        newest: nothing else is eligible, so the rows of the oldest plan in flight are allowed too; fewer microbatches than M take turns by that."""
        live = [request for request in self._running if not request.prefilling]
        share = ceil_div(len(live), self.config.microbatch_count)
        if newest:
            waiting = [request for request in live if request.outstanding and not request.ending]
            oldest = min((request.outstanding[-1][0] for request in waiting), default=NO_STEP)
            live = [request for request in waiting if request.outstanding[-1][0] == oldest]
        for request in live:
            if build.row_count >= share or build.budget_used >= self.config.token_budget:
                break
            if request.slot is not None and not request.ending and self._dependency_met(request, newest):
                self._try_decode(request, build)

    def _dependency_met(self, request: LiveRequest, newest: bool) -> bool:
        if not request.outstanding:
            return True
        return self.config.asynchronous and (newest or request.outstanding[-1][0] <= self.next_step - self.config.microbatch_count)

    def _try_decode(self, request: LiveRequest, build: PlanBuilder) -> None:
        drafts = self.config.drafts_max if request.outstanding else request.drafts
        certain = not request.outstanding or self.config.drafts_max == 0
        room = min(request.spec.length_cap - 1, request.known_most + drafts)
        count = min(1 + drafts, request.spec.length_cap - request.known_least, self.config.token_budget - build.budget_used)
        self.book.retire(request, request.known_least - 1)
        if drafts and not request.outstanding and not self.book.fits(request, room):
            count, room = 1, request.known  # PROTOCOL.md 16: drafts are dropped before anybody is preempted
        if not self._reserve(request, room, build):
            return
        start = request.known_least - 1 if certain else UNKNOWN_START
        if request.outstanding:
            build.horizon_least = max(build.horizon_least, request.outstanding[-1][0] + 1)
        request.outstanding.append((build.step, count))
        request.scheduled = request.known_least - 1
        self._add_row(request, build, count=count, start=start, samples=True)

    def _plan_prefills(self, build: PlanBuilder) -> None:
        for request in list(self._running):
            if build.budget_used >= self.config.token_budget:
                break
            if request.slot is not None and request.prefilling and not request.importing and not build.has_row(request):
                self._try_prefill(request, build)

    def _try_prefill(self, request: LiveRequest, build: PlanBuilder) -> bool:
        start = request.scheduled
        count = self._prefill_count(request, start, build)
        self.book.retire(request, start)
        if count <= 0 or not self._reserve(request, start + count, build):
            return False
        samples = start + count == request.known
        if samples:
            request.outstanding.append((build.step, 1))
        request.scheduled = min(start + count, request.known - 1) if samples else start + count
        self._add_row(request, build, count=count, start=start, samples=samples)
        return True

    def _prefill_count(self, request: LiveRequest, start: int, build: PlanBuilder) -> int:
        """Tokens of its next chunk: as many as the budgets of tokens and of prompt log probabilities leave. 0: not in this plan."""
        count = min(self.config.token_budget - build.budget_used, request.known - start)
        room = self.config.prompt_logprobs_max - build.prompt_logprobs
        if request.prompt_logprobs_in(start, count) > room:
            count = max(start, request.prompt_logprob_start - 1) + room - start
        return count

    def _plan_admissions(self, build: PlanBuilder) -> None:
        """In rank order, none passing another but a sibling that waits for its elder and a request that waits for its grammar. After a preemption
        in this plan nobody comes in. Isolated requests go first, and alone."""
        if self._isolated:
            self._isolated = [request for request in self._isolated if request.isolated and self.find(request.spec.request_id) is request]
        if self._isolated:
            if not self._running and self.has_grammar_of(self._isolated[0]) and (self.admitting or self._isolated[0].has_begun):
                self._try_admit(self._isolated[0], build)
            return
        index = 0
        while index < len(self._waiting) and self._free_slots and not build.preempted and build.budget_used < self.config.token_budget:
            request = self._waiting[index]
            if self._waits_for_elder(request, build) or not self.has_grammar_of(request) or not (self.admitting or request.has_begun):
                index += 1
            elif not self._try_admit(request, build):
                break

    def _try_admit(self, request: LiveRequest, build: PlanBuilder) -> bool:
        hits = self.book.find_hits(request)
        if not self.book.fits_beside(hits, request.known):
            return False
        if request.lacks_prompt_logprobs and build.prompt_logprobs >= self.config.prompt_logprobs_max:
            return False
        self._waiting.remove(request)
        self._admit(request, hits, build)
        if request.importing:
            self._extend(request, request.known, build)
        elif not self._try_prefill(request, build):
            raise InternalError(f"request {request.spec.request_id!r} was admitted and its first chunk found no blocks")
        return True

    def has_grammar_of(self, request: LiveRequest) -> bool:
        """PROTOCOL.md 26: the sampling rank has compiled it in this epoch, or there is none."""
        return not request.grammar_key or request.grammar_key in self.grammars

    def _waits_for_elder(self, request: LiveRequest, build: PlanBuilder) -> bool:
        """PROTOCOL.md 26: a sibling comes in one plan after the first's prompt is planned, so that it hits its blocks."""
        elder = self._requests.get(request.spec.sibling_of or "")
        if elder is None or elder.delivered:
            return False
        return elder.slot is None or elder.prefilling or (len(elder.outstanding) == 1 and elder.last_step == build.step)

    def _admit(self, request: LiveRequest, hits: list[list[int]], build: PlanBuilder) -> None:
        request.slot = heapq.heappop(self._free_slots)
        request.generation = self._next_generation
        self._next_generation += 1
        self._by_generation[request.generation] = request
        request.admitted_known = request.known
        request.admitted_step = build.step
        request.drafts = 0
        self.book.attach(request, hits)
        request.scheduled = request.published * self.config.block_size
        for group, blocks in enumerate(hits):
            if blocks:
                build.add_blocks(request.slot, group, blocks)
        if self.config.prefix_caching:
            self.stats.prefix_queries += request.known
            self.stats.prefix_hits += request.scheduled
        if request.cached_tokens < 0:
            self.stats.tokens_prompt += request.prompt_length
            request.cached_tokens = request.scheduled
        build.admit(request, request.scheduled)
        request.importing = request.transfer is not None
        bisect.insort(self._running, request, key=self._rank)

    # Blocks

    def _reserve(self, request: LiveRequest, end: int, build: PlanBuilder) -> bool:
        """Blocks for positions below `end`. Short of them: wait for the request's own results; then preempt whoever ranks strictly below it
        and has no row in this plan; else not now."""
        while not self.book.fits(request, end):
            victim = None if request.outstanding else self._victim(request, build)
            if victim is None:
                return False
            assert self._rank(victim) > self._rank(request), (victim.spec.request_id, request.spec.request_id)
            self._preempt(victim, build)
        self._extend(request, end, build)
        return True

    def _extend(self, request: LiveRequest, end: int, build: PlanBuilder) -> None:
        assert request.slot is not None
        for group, blocks in self.book.extend(request, end):
            build.add_blocks(request.slot, group, blocks)

    def _victim(self, request: LiveRequest, build: PlanBuilder) -> LiveRequest | None:
        last = self._running[-1]
        taken = build.has_row(last) or build.has_ready(last)
        return None if taken or self._rank(last) <= self._rank(request) else last

    def _preempt(self, request: LiveRequest, build: PlanBuilder) -> None:
        """Out of its slot and back in the queue at its old rank, with every token that is known. What is in flight for it will be dropped; it comes
        again."""
        assert not build.has_row(request), request.spec.request_id
        assert not build.has_ready(request), request.spec.request_id
        self.stats.preemptions += 1
        if request.prefilling:
            self.stats.preemptions_in_prefill += 1
        else:
            self.stats.preemptions_in_decode += 1
        build.preempted += 1
        request.preemptions += 1
        self._running.remove(request)
        self._release(request, build)
        bisect.insort(self._waiting, request, key=self._rank)

    def _release(self, request: LiveRequest, build: PlanBuilder) -> None:
        """The one way out of a slot: finished, aborted or preempted."""
        assert request.slot is not None
        build.release(request.slot, request.generation)
        if request.finished and request.spec.exports:
            self.transfers.begin(request, build)
        self.book.release(request)
        del self._by_generation[request.generation]
        heapq.heappush(self._free_slots, request.slot)
        request.leave_slot()

    # Committing and receiving

    def _add_row(self, request: LiveRequest, build: PlanBuilder, *, count: int, start: int, samples: bool) -> None:
        request.last_step = build.step
        build.add_row(request, count=count, start=start, samples=samples)

    def _commit(self, build: PlanBuilder) -> StepPlan:
        self._horizon = max(self._horizon, self.received, build.horizon_least)
        plan = build.build(self._horizon)
        owners = list(build.row_owners.values())
        for request in [*owners, *build.ready_requests]:
            self.book.publish(request)
        self._generations_in_plan[plan.step] = frozenset(build.row_owners)
        samples = int(plan.rows.samples.sum())
        decodes = sum(request.known > request.admitted_known or len(request.outstanding) > 1 for request in owners)
        self.stats.note_plan(
            rows=len(owners),
            tokens=build.budget_used,
            requests_in_flight=len(frozenset[int]().union(*self._generations_in_plan.values())),
            mixed=0 < decodes < len(owners),
            samples=samples,
            chunks=len(owners) - samples,
            unknown=build.horizon_least > self.received,
        )
        self.next_step += 1
        return plan

    def receive(self, result: StepResult) -> list[Delivery]:
        """Take the next result. Rows of a generation that has ended are dropped. Raises LogError for one that nobody waits for, and takes nothing."""
        if result.step != self.received:
            raise LogError(f"result of step {self.received} comes next, got step {result.step}")
        if len(set(result.generations.tolist())) < len(result.generations):
            raise LogError(f"result of step {result.step} answers a generation twice: {result.generations}", step=result.step)
        answered = [(row, request) for row, generation in enumerate(result.generations.tolist()) if (request := self.request_of(generation))]
        for row, request in answered:
            self._check_awaited(request, result, row)
        told = told_of_prompts(result, self.request_of)
        self.received += 1
        del self._generations_in_plan[result.step]
        for request, columns in told:
            request.prompt_logprobs.append(columns)
            request.prompt_logprob_start += len(columns)
        self.stats.rows_dropped += len(result.generations) - len(answered)
        return [self._accept(request, result, row) for row, request in answered]

    _check_awaited = staticmethod(check_awaited)

    def _accept(self, request: LiveRequest, result: StepResult, row: int) -> Delivery:
        request.outstanding.popleft()
        tokens = result.tokens.row(row)
        request.tokens[request.known : request.known + len(tokens)] = tokens
        index = request.known - request.prompt_length
        request.known += len(tokens)
        request.drafts = len(result.drafts.row(row))
        if request.known > request.suspect_until:
            request.strikes = 0
        self.book.publish(request)
        finish = int(result.finishes[row])
        reason = FINISHES[finish]
        if reason is not None:
            request.finished = True
            del self._requests[request.spec.request_id]
            self._running.remove(request)
            self._ended.append(request)
        delivered = () if finish == FINISH_FAILED else tuple(tokens.tolist())
        request.delivered = index + len(delivered)
        self.stats.tokens_delivered += len(delivered)
        told = None
        if index == 0 and request.spec.prompt_logprob_count >= 0:
            told = LogprobColumns.joined(request.prompt_logprobs, request.spec.prompt_logprob_count)
            request.prompt_logprobs = []
        return Delivery(request=request, index=index, row=row, tokens=delivered, finish=reason, prompt_logprobs=told)

    def _rank(self, request: LiveRequest) -> tuple[int, int]:
        return (request.spec.priority if self.config.priorities else 0, request.arrival)

    def audit(self) -> list[str]:
        """What is wrong with the books, in words. When idle: nothing held, free blocks = pool."""
        wrong = self.book.audit()
        if len(self._generations_in_plan) != self.plans_in_flight:
            wrong.append(f"{len(self._generations_in_plan)} plans are kept, {self.plans_in_flight} are in flight")
        if not self.has_work:
            for name, entries in (("running", self._running), ("waiting", self._waiting), ("by generation", self._by_generation)):
                if entries:
                    wrong.append(f"idle, and {len(entries)} requests are {name}")
            if len(self._free_slots) != self.config.slot_count:
                wrong.append(f"idle, and {self.config.slot_count - len(self._free_slots)} slots are held")
            if not self.transfers.held:
                wrong.extend(f"idle, and {p.block_count - p.free_count} blocks are held" for p in self.pools if p.free_count != p.block_count)
        return wrong
