"""From logits to a token, by (seed, position): the meaning of op `sample` for one position. Knows no steps, requests or vocabularies.

Randomness is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
so a token's noise can be computed anywhere, in any order.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.backends.reference.invariant import elementwise, fold
from lockstep.ops.step import F32, I32, LogitEdits, SampleOutputs

_MASK = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[NDArray[np.uint64], ...], key: tuple[int, int]) -> tuple[NDArray[np.uint64], ...]:
    """Four 32-bit words (held in uint64) of counter, encrypted under two words of key; vectorised over the counter's arrays."""
    x0, x1, x2, x3 = counter
    key0, key1 = key
    for _ in range(_ROUNDS):
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (product1 >> _WORD) ^ x1 ^ np.uint64(key0), product1 & _MASK, (product0 >> _WORD) ^ x3 ^ np.uint64(key1), product0 & _MASK
        key0, key1 = (key0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (key1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return x0, x1, x2, x3


def gumbel(seed: int, position: int, ids: NDArray[np.int64]) -> F32:
    """Gumbel noise of each vocabulary id at one position, float32. In float64 until the end: u needs 25 bits of mantissa to stay below 1."""
    zeros = np.zeros(ids.shape, np.uint64)
    first, *_ = philox((zeros + np.uint64(position), ids.astype(np.uint64), zeros, zeros), (seed & 0xFFFFFFFF, seed >> 32))
    u = ((first >> np.uint64(8)).astype(np.float64) + 0.5) * 2.0**-24
    return (-np.log(-np.log(u))).astype(np.float32)


def edit_logits(logits_V: Tensor, edits: LogitEdits, index: int) -> Tensor:
    """The logits of sample `index` as its edits leave them, float32; see `ops.step.LogitEdits`."""
    edited_V = logits_V.clone()
    if edits.mask_rows[index] >= 0:
        allowed = np.unpackbits(edits.masks[edits.mask_rows[index]].view(np.uint8), bitorder="little")[: edited_V.numel()]
        edited_V[torch.from_numpy(allowed == 0).to(edited_V.device)] = float("-inf")
    for entry in range(int(edits.starts[index]), int(edits.starts[index + 1])):
        value = edited_V[edits.ids[entry]].cpu().numpy() + edits.biases[entry]
        value = value / edits.penalties[entry] if value > 0 else value * edits.penalties[entry]
        edited_V[edits.ids[entry]] = float(np.float32(value - edits.subtracts[entry]))
    return edited_V


def choose_token(logits_V: Tensor, *, seed: int, position: int, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """The token at `position`; see op `sample` in `ops.vocabulary`."""
    if temperature == 0.0:
        return int(torch.argmax(logits_V))
    scaled_V = logits_V * float(np.float32(1.0) / np.float32(temperature))
    kept = _kept_ids(scaled_V, top_k=top_k, top_p=top_p, min_p=min_p)
    noise = torch.from_numpy(gumbel(seed, position, kept.cpu().numpy())).to(scaled_V.device)
    return int(kept[torch.argmax(scaled_V[kept] + noise)])


def _kept_ids(scaled_V: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Ids that the filters leave, ascending, int64."""
    if top_k == 0 and top_p >= 1.0 and min_p == 0.0:
        return torch.arange(scaled_V.numel(), device=scaled_V.device)
    exponentials = elementwise(torch.exp, scaled_V - scaled_V.max())
    probabilities = exponentials / fold(exponentials, -1)
    order = torch.sort(scaled_V, descending=True, stable=True).indices
    order = order[(probabilities >= probabilities.max() * min_p)[order]]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        reached = probabilities[order].double().cumsum(0)
        order = order[: int((reached < top_p * reached[-1]).sum()) + 1]
    return order.sort().values


def log_probabilities(logits_SV: Tensor, tokens: list[int], counts: I32) -> SampleOutputs:
    """The step's outputs: tokens, and for the positions that ask, log_softmax of the raw logits at the token and at the best `counts` ids."""
    widest = max([0, *counts.tolist()])
    logprobs = np.full(len(tokens), np.nan, np.float32)
    ranks = np.full(len(tokens), -1, np.int32)
    top_ids = np.full((len(tokens), widest), -1, np.int32)
    top_logprobs = np.full((len(tokens), widest), np.nan, np.float32)
    for index, (token, count) in enumerate(zip(tokens, counts.tolist(), strict=True)):
        if count < 0:
            continue
        shifted = logits_SV[index] - logits_SV[index].max()
        values = shifted - elementwise(torch.log, fold(elementwise(torch.exp, shifted), -1))
        best = torch.sort(values, descending=True, stable=True).indices[:count]
        logprobs[index] = float(values[token])
        ranks[index] = 1 + int((logits_SV[index] > logits_SV[index][token]).sum())
        top_ids[index, : len(best)] = best.cpu().numpy()
        top_logprobs[index, : len(best)] = values[best].cpu().numpy()
    return SampleOutputs(tokens=np.array(tokens, np.int32), logprobs=logprobs, ranks=ranks, top_ids=top_ids, top_logprobs=top_logprobs)
