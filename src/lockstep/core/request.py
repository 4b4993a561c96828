"""One request as the driver keeps it: what was asked (`EngineRequest`) and how far it is (`LiveRequest`).

The token list here is the truth; every KV cache is only a cache of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from lockstep.core.logprobs import LogprobColumns
from lockstep.core.records import Side, Transfer
from lockstep.core.types import I32, NO_STEP

STRIKES_MAX = 3
"""From so many strikes on a request runs alone, and if the engine fails then it is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request as submitted, nothing left open: seed drawn, cap clipped to the window, stop ids merged with the model's end tokens.

    prompt: int32 [prompt_length]. length_cap: prompt_length + max_tokens at most. priority: lower goes first under the policy 'priority'.
    sibling_of: the request whose prompt it shares (n > 1); it is admitted after that one's prompt is planned.
    prompt_logprob_count: alternatives a prompt token whose log probability is wanted, -1 if none is (PROTOCOL.md 18).
    given: int32, output tokens that another engine has sampled. transfer: where that engine holds the KV, to be imported; None prefills here.
    exports: when it finishes, its KV is held for another engine to fetch.
    """

    request_id: str
    prompt: I32
    length_cap: int
    seed: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logprob_count: int = -1
    priority: int = 0
    sibling_of: str | None = None
    prompt_logprob_count: int = -1
    side: Side = field(default_factory=Side)
    given: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    transfer: Transfer | None = None
    exports: bool = False


@dataclass(slots=True, eq=False)
class LiveRequest:
    """arrival: order of submission; with priority it survives preemption. tokens[:known]: prompt and accepted tokens received so far.

    generation, slot: of the present admission, None while waiting. admitted_known: known tokens at that admission.
    scheduled: positions below it are in plans (the first `computed` that the log will reach). outstanding: (step, most tokens that its result can
    add) of rows whose result has not been received. last_step: the last plan with a row of it.
    prompt_logprobs: those that have come, in order; they survive preemption and epochs. prompt_logprob_start: the first position that lacks one.
    transfer: KV to be fetched at the next admission. importing: it is being fetched; no rows until the ready record.
    blocks: a KV group a list; retired: of each, how many first ones no later token sees.
    strikes: failures of the engine while it had rows in unresolved plans; forgotten once it knows more than suspect_until tokens, which is
    what those rows could have brought (PROTOCOL.md 22).
    """

    spec: EngineRequest
    arrival: int
    tokens: I32
    known: int
    side_hash: int
    grammar_key: str
    slot: int | None = None
    generation: int = -1
    admitted_known: int = 0
    scheduled: int = 0
    drafts: int = 0
    outstanding: deque[tuple[int, int]] = field(default_factory=deque)
    last_step: int = -1
    admitted_step: int = -1
    blocks: list[list[int]] = field(default_factory=list)
    retired: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    published: int = 0
    cached_tokens: int = -1
    delivered: int = 0
    prompt_logprobs: list[LogprobColumns] = field(default_factory=list)
    prompt_logprob_start: int = 1
    preemptions: int = 0
    transfer: Transfer | None = None
    importing: bool = False
    finished: bool = False
    strikes: int = 0
    suspect_until: int = 0

    @staticmethod
    def of(spec: EngineRequest, arrival: int) -> LiveRequest:
        tokens = np.zeros(spec.length_cap, np.int32)
        known = len(spec.prompt) + len(spec.given)
        assert len(spec.prompt), spec.request_id
        assert spec.prompt_logprob_count < 0 or (spec.transfer is None and not len(spec.given)), spec.request_id  # who computed the prompt tells them
        assert known < spec.length_cap, (spec.request_id, len(spec.prompt), len(spec.given), spec.length_cap)
        tokens[:known] = np.concatenate([spec.prompt, spec.given])
        return LiveRequest(
            spec=spec,
            arrival=arrival,
            tokens=tokens,
            known=known,
            side_hash=spec.side.hash64(),
            grammar_key=spec.side.shaping.grammar_key,
            delivered=len(spec.given),
            transfer=spec.transfer,
        )

    def leave_slot(self) -> None:
        """What belongs to an admission is void; what the request knows, is owed and has suffered stays. An import is not tried again."""
        self.slot, self.generation = None, -1
        self.blocks, self.retired = [], []
        self.outstanding.clear()
        self.scheduled = self.drafts = self.published = 0
        self.last_step = self.admitted_step = NO_STEP
        self.importing, self.transfer = False, None

    @property
    def prompt_length(self) -> int:
        return len(self.spec.prompt)

    @property
    def known_least(self) -> int:
        """Known tokens once all outstanding results are in, if each adds as few as it can: one."""
        return self.known + len(self.outstanding)

    @property
    def known_most(self) -> int:
        """The same if each adds as many as it can, within the cap."""
        return min(self.known + sum(most for _, most in self.outstanding), self.spec.length_cap)

    @property
    def has_begun(self) -> bool:
        """It has been admitted, now or before."""
        return self.cached_tokens >= 0

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.spec.prompt_logprob_count >= 0 and self.prompt_logprob_start < self.prompt_length

    def prompt_logprobs_in(self, start: int, count: int) -> int:
        """How many log probabilities of its prompt a row of `count` tokens from position `start` on tells: one a token whose next one lacks it."""
        if not self.lacks_prompt_logprobs:
            return 0
        return max(0, min(start + count, self.prompt_length - 1) - max(start, self.prompt_logprob_start - 1))

    @property
    def prefilling(self) -> bool:
        """Some known token other than the last is not in any plan yet, or nothing was sampled since the admission."""
        return not self.outstanding and self.known == self.admitted_known

    @property
    def isolated(self) -> bool:
        """It was there in so many failures that it runs with nobody else: if it is innocent, nobody can make it look guilty."""
        return self.strikes >= STRIKES_MAX

    @property
    def ending(self) -> bool:
        """The outstanding results fill its cap whatever they hold. A matter of planning only; the sampler alone ends it."""
        return self.known_least >= self.spec.length_cap
