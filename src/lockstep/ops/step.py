"""What one step hands to a program and gets back: plain arrays, in the order of PROTOCOL.md's rows. Axes as in `program`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """One entry a sampled position [S].

    index: int32, which of the step's T tokens has the hidden state to sample from.
    seeds: uint64. positions: int32, the position that the sampled token will have (index's position + 1).
    temperatures, top_ps, min_ps: float32. top_ks: int32, 0 keeps all. logprob_counts: int32, -1 none, else the number of top ids to report.
    """

    index: I32
    seeds: U64
    positions: I32
    temperatures: F32
    top_ks: I32
    top_ps: F32
    min_ps: F32
    logprob_counts: I32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """token_ids, positions: int32 [T]. row_starts: int32 [R + 1], row r owns tokens row_starts[r] .. row_starts[r + 1], consecutive positions.
    block_tables: one int32 [R, W] a KV group; entry [r, p // block_size] is the block that holds position p of row r, for all p up to the row's last;
    entries beyond are -1 and never read. All arrays are C-contiguous."""

    token_ids: I32
    positions: I32
    row_starts: I32
    block_tables: tuple[I32, ...]
    sampling: SamplingInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutputs:
    """tokens: int32 [S]. logprobs: float32 [S], NaN where none was asked for.
    top_ids int32 [S, L], top_logprobs float32 [S, L]: L = the largest logprob_counts (at least 0); unused entries are -1 and NaN."""

    tokens: I32
    logprobs: F32
    top_ids: I32
    top_logprobs: F32
