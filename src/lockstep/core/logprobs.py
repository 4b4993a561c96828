"""Log probabilities of many tokens as columns: how they travel from the sampler to whoever asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.core.outputs import TokenLogprobs
from lockstep.core.types import F32, I32


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobColumns:
    """Log probabilities of N tokens, in their order; outside the digest. logprobs float32 [N], NaN where none was asked for; ranks int32 [N].
    top_ids int32, top_logprobs float32 [N, L]; unused entries -1 and NaN."""

    logprobs: F32
    ranks: I32
    top_ids: I32
    top_logprobs: F32

    def __post_init__(self) -> None:
        assert len(self.logprobs) == len(self.ranks) == len(self.top_ids) == len(self.top_logprobs), (self.logprobs.shape, self.ranks.shape)
        assert self.top_ids.shape == self.top_logprobs.shape, (self.top_ids.shape, self.top_logprobs.shape)

    def __len__(self) -> int:
        return len(self.logprobs)

    def entry(self, index: int, count: int) -> TokenLogprobs:
        """Of token `index`, with `count` alternatives or as many as there are."""
        return TokenLogprobs(
            token_logprob=float(self.logprobs[index]),
            rank=int(self.ranks[index]),
            top_ids=tuple(self.top_ids[index, :count].tolist()),
            top_logprobs=tuple(self.top_logprobs[index, :count].tolist()),
        )

    def rows(self, which: slice | list[int], count: int | None = None) -> LogprobColumns:
        """Some of the tokens, copied; with `count` alternatives each, or all."""
        return LogprobColumns(
            logprobs=self.logprobs[which].copy(),
            ranks=self.ranks[which].copy(),
            top_ids=self.top_ids[which, :count].copy(),
            top_logprobs=self.top_logprobs[which, :count].copy(),
        )

    @staticmethod
    def joined(parts: Sequence[LogprobColumns], count: int) -> LogprobColumns:
        """One after the other; each has `count` alternatives."""
        none = LogprobColumns(
            logprobs=np.zeros(0, np.float32),
            ranks=np.zeros(0, np.int32),
            top_ids=np.zeros((0, count), np.int32),
            top_logprobs=np.zeros((0, count), np.float32),
        )
        parts = [none, *parts]
        return LogprobColumns(
            logprobs=np.concatenate([part.logprobs for part in parts]),
            ranks=np.concatenate([part.ranks for part in parts]),
            top_ids=np.concatenate([part.top_ids for part in parts]),
            top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
        )
