"""What one step hands to a program and gets back: plain arrays, in the order of PROTOCOL.md's rows. Axes as in `program`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """Changes of logits before tokens are chosen; log probabilities are of the logits without them.

    mask_rows: int32 [S], a row of masks, or -1 where every id may be chosen. masks: uint32 [M, ceil(V / 32)], bit id % 32 of word id // 32 is set for
    an id that may be. starts: int32 [S + 1]: sample s has entries starts[s] .. starts[s + 1] of ids int32 [E], in [0, V), and biases, penalties
    (above 0) and subtracts, float32 [E]. An id may have several. In float32, masked ids first, then entry by entry:

        l = -inf where the mask has no bit;  l = l + bias;  l = l / penalty if l > 0 else l * penalty;  l = l - subtract
    """

    mask_rows: I32
    masks: U32
    starts: I32
    ids: I32
    biases: F32
    penalties: F32
    subtracts: F32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """One entry a sampled position [S].

    index: int32, which of the step's T tokens has the hidden state to sample from.
    seeds: uint64. positions: int32, the position that the sampled token will have (index's position + 1).
    temperatures, top_ps, min_ps: float32. top_ks: int32, 0 keeps all. logprob_counts: int32, -1 none, else the number of top ids to report.
    targets: int32, the id whose log probability is wanted where no token is to be chosen (it is told as the token, and edits say nothing of it), else
    -1; None where all are chosen.
    edits: None if no logits are changed.
    """

    index: I32
    seeds: U64
    positions: I32
    temperatures: F32
    top_ks: I32
    top_ps: F32
    min_ps: F32
    logprob_counts: I32
    targets: I32 | None = None
    edits: LogitEdits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """token_ids, positions: int32 [T]. row_starts: int32 [R + 1], row r owns tokens row_starts[r] .. row_starts[r + 1], consecutive positions.
    block_tables: one int32 [R, W] a KV group; entry [r, p // block_size] is the block that holds position p of row r, for all p up to the row's last
    from the first that the group's widest window reaches; the other entries are -1 and never read. All arrays are C-contiguous."""

    token_ids: I32
    positions: I32
    row_starts: I32
    block_tables: tuple[I32, ...]
    sampling: SamplingInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutputs:
    """tokens: int32 [S]. logprobs: float32 [S], NaN where none was asked for; ranks: int32 [S], 1 + how many ids have a larger logit, -1 there.
    top_ids int32 [S, L], top_logprobs float32 [S, L]: L = the largest logprob_counts (at least 0); unused entries are -1 and NaN."""

    tokens: I32
    logprobs: F32
    ranks: I32
    top_ids: I32
    top_logprobs: F32
