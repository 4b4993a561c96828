"""A run on known tokens: the real scheduler and script, with a play-back of the plain answers in the stages' place.

It takes milliseconds, so it can try pool sizes until one makes a cell do what its name says.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lockstep.config import EngineConfig
from lockstep.core.arrivals import Delivery
from lockstep.core.logprobs import LogprobColumns
from lockstep.core.outputs import FinishReason, TokenEvent
from lockstep.core.params import LOGPROBS_MAX
from lockstep.core.ragged import Ragged
from lockstep.core.records import PromptLogprobs, StepPlan, StepResult
from lockstep.core.request import EngineRequest
from lockstep.core.scheduler import Scheduler
from lockstep.core.schema import FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from lockstep.core.types import ceil_div
from lockstep.launch.kv_pools import blocks_needed, scaled_counts, scheduler_config
from lockstep.runtime.loop import Sink


class DryEngine:
    """`Engine` without thread, driver or stages: the outermost `submit_all` runs until nothing is left. As with `LocalCluster`, results come one at a
    time, the oldest plan's first. tokens_of: by seed (unique a request) the prompt's length and the answer's tokens; a request that is not in it gets
    token 0 up to its cap."""

    def __init__(self, scheduler: Scheduler, tokens_of: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        self.scheduler = scheduler
        self._tokens_of = tokens_of
        self._sinks: dict[str, Sink] = {}
        self._plans: deque[StepPlan] = deque()
        self._commands: deque[tuple[EngineRequest, Sink] | str] = deque()
        self._known: dict[int, tuple[int, int, int]] = {}
        self._prompts: dict[int, tuple[int, int, int]] = {}
        self._running = False

    def submit_all(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        self._commands.extend((request, sink) for request in requests)
        if self._running:
            return
        self._running = True
        while self._commands or self.scheduler.has_work or self._plans:
            self._turn()
        self._running = False

    def abort(self, request_id: str) -> None:
        self._commands.append(request_id)

    def _turn(self) -> None:
        commands, self._commands = self._commands, deque()
        aborted = []
        for command in commands:
            if isinstance(command, str):
                request = self.scheduler.abort(command)
                if request is not None:
                    aborted.append(TokenEvent(request_id=command, index=request.delivered, finish_reason=FinishReason.ABORT))
            else:
                self._sinks[command[0].request_id] = command[1]
                self.scheduler.submit(command[0])
                self.scheduler.grammars.add(command[0].side.shaping.grammar_key)
        while (plan := self.scheduler.plan()) is not None:
            self._plans.append(plan)
        self._dispatch(aborted)
        if self._plans:
            self._dispatch([_event(delivery) for delivery in self.scheduler.receive(self._answer(self._plans.popleft()))])

    def _dispatch(self, events: list[TokenEvent]) -> None:
        if events:
            self._sinks[events[0].request_id](events)

    def _answer(self, plan: StepPlan) -> StepResult:
        """_known: by generation (seed, known tokens, cap); gone once a request has ended, so that its later rows resolve to nothing."""
        c = plan.admissions.values
        for i in range(len(plan.admissions.slots)):
            self._known[int(c["generation"][i])] = (int(c["seed"][i]), int(c["known"][i]), int(c["length_cap"][i]))
            self._prompts[int(c["generation"][i])] = (
                int(c["prompt_length"][i]),
                int(c["prompt_logprob_start"][i]),
                int(c["prompt_logprob_count"][i]),
            )
        rows = [r for r in np.flatnonzero(plan.rows.samples) if int(plan.rows.generations[r]) in self._known]
        drawn = [self._draw(int(plan.rows.generations[r])) for r in rows]
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            slots=plan.rows.slots[rows],
            generations=plan.rows.generations[rows],
            tokens=Ragged.of([[token] for token, _ in drawn]),
            finishes=np.array([finish for _, finish in drawn], np.int32),
            drafts=Ragged.of([()] * len(rows)),
            prompt_logprobs=self._told(plan),
        )

    def _told(self, plan: StepPlan) -> PromptLogprobs | None:
        """Log probabilities of prompts where the rows would tell some: no numbers, but their number decides how prompts are cut."""
        told: list[tuple[int, int, int]] = []
        rows = plan.rows
        for slot, generation, start, count in zip(
            rows.slots.tolist(), rows.generations.tolist(), rows.starts.tolist(), rows.counts.tolist(), strict=True
        ):
            prompt_length, first, alternatives = self._prompts[generation]
            if alternatives >= 0 and start >= 0:
                told += [(slot, generation, at + 1) for at in range(max(start, first - 1), min(start + count, prompt_length - 1))]
        if not told:
            return None
        zeros = np.zeros(len(told), np.float32)
        none = np.zeros((len(told), LOGPROBS_MAX), np.int32)
        columns = LogprobColumns(logprobs=zeros, ranks=zeros.astype(np.int32), top_ids=none, top_logprobs=none.astype(np.float32))
        slots, generations, positions = (np.array(column) for column in zip(*told, strict=True))
        return PromptLogprobs(
            slots=slots.astype(np.int32), generations=generations.astype(np.int64), positions=positions.astype(np.int32), columns=columns
        )

    def _draw(self, generation: int) -> tuple[int, int]:
        seed, known, cap = self._known[generation]
        prompt_length, tokens = self._tokens_of.get(seed, (0, ()))
        index = known - prompt_length
        token = tokens[index] if index < len(tokens) else 0
        finish = FINISH_STOP if tokens and index == len(tokens) - 1 else FINISH_LENGTH if known + 1 == cap else FINISH_NONE
        if finish:
            del self._known[generation]
        else:
            self._known[generation] = (seed, known + 1, cap)
        return token, finish


def _event(delivery: Delivery) -> TokenEvent:
    request_id = delivery.request.spec.request_id
    return TokenEvent(request_id=request_id, index=delivery.index, token_ids=delivery.tokens, finish_reason=delivery.finish)


VARIANTS: tuple[tuple[int, int, int | None], ...] = (
    (4, 0, None),
    (4, 0, 9),
    (2, 0, None),
    (4, 1, None),
    (2, 0, 9),
    (1, 0, None),
    (4, 1, 9),
    (8, 0, None),
    (2, 1, None),
    (1, 1, None),
    (3, 0, None),
    (5, 0, None),
)
"""What is varied until a pool is found that forces preemption: block size, microbatches beyond the stages, slots (None: enough for all)."""

POSITION_STRIDES = ((96, 64), (24, 24), (8, 32), (2, 32), (16, 512), (4, 2048))
"""(stride, steps) of pool sizes, in positions above one request's: first coarsely, then finely where pools are tight, then finely everywhere."""


def choose_pool(
    config: EngineConfig,
    window: int,
    windows: tuple[int, ...],
    requests: Sequence[EngineRequest],
    tokens_of: Mapping[int, tuple[int, Sequence[int]]],
    misses: Callable[[DryEngine], int],
) -> EngineConfig:
    """The config with a pool, and if need be another of VARIANTS, on which a dry run misses no counter; or, if none does, that which misses fewest
    (the cell will say so). window: the most tokens of a request; windows: of KV groups.
    misses: runs the cell on an engine and counts. Pool sizes go over the whole range coarsely, then finely."""
    best: tuple[int, EngineConfig] | None = None
    for size, more, slots, count in _candidates(window, [request.length_cap for request in requests]):
        tried = dataclasses.replace(
            config,
            block_size=size,
            num_gpu_blocks_override=count,
            microbatches=config.pipeline_parallel_size + more,
            max_num_seqs=slots or config.max_num_seqs,
        )
        counts = scaled_counts(blocks_needed(tried, windows, window), count)
        missed = misses(DryEngine(Scheduler(scheduler_config(tried, windows, counts), prefix_secret=b"dry run"), tokens_of))
        if best is None or missed < best[0]:
            best = (missed, tried)
        if missed == 0:
            break
    assert best is not None
    return best[1]


def _candidates(window: int, lengths: Sequence[int]) -> list[tuple[int, int, int | None, int]]:
    """(block size, further microbatches, slots, blocks), each once: pools from little more than one request upwards."""
    found: dict[tuple[int, int, int | None, int], None] = {}
    for stride, steps in POSITION_STRIDES:
        for size, more, slots in VARIANTS:
            least, most = ceil_div(window, size) + 1, sum(ceil_div(length, size) for length in lengths)
            scaled = max(1, stride // size)
            counts = range(least, min(most, least + steps * scaled), scaled)
            found.update(dict.fromkeys((size, more, slots, count) for count in counts))
    return list(found)
