"""What each op means, in plain torch: one function an op kind, as `ops.vocabulary` says it. Knows no programs and checks nothing.

Shape suffixes: T tokens of the step, S sampled positions, K and N widths, F width of the feed-forward layer, P key positions,
G KV heads, Q query heads a KV head, D head_dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from lockstep.backends.reference.invariant import elementwise, fold, padded_matrix, rows_times_matrix
from lockstep.backends.reference.sampling import choose_token, edit_logits, log_probabilities
from lockstep.ops.backend import DType
from lockstep.ops.step import SampleOutputs, SamplingInputs
from lockstep.ops.vocabulary import Attribute

TORCH_DTYPE: Mapping[str, torch.dtype] = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16})


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A packed weight: its values rounded to its dtype and widened to float32, [rows, columns] and zeros around them."""

    rows: int
    columns: int
    dtype: DType
    padded: Tensor

    @property
    def values(self) -> Tensor:
        return self.padded[: self.rows, : self.columns]

    @property
    def nbytes(self) -> int:
        return self.padded.numel() * self.padded.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPool:
    """One layer's keys and values in the KV dtype, [positions in the pool, G, D]; latent: values are a view of the keys' last elements. int8:
    float32 values that integers and scales stand for."""

    keys: Tensor
    values: Tensor
    group: int
    latent: bool
    int8: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What ops read of a step beside their buffers.

    positions, row_of_token: int64 [T]. kv_index: one int64 [R, positions] a KV group, where in a pool a row's position lies.
    """

    token_ids: Tensor
    positions: Tensor
    row_of_token: Tensor
    kv_index: tuple[Tensor, ...]
    sampling: SamplingInputs
    pools: tuple[KVPool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One op call: its inputs, what its output held before (None if it has no output), its weights and attributes."""

    inputs: tuple[Tensor, ...]
    held: Tensor | None
    weights: tuple[Matrix, ...]
    attributes: Mapping[str, Attribute]
    step: Step


def embed(call: Call) -> Tensor:
    return call.weights[0].values[call.step.token_ids] * float(call.attributes["scale"])


def rms_norm(call: Call) -> Tensor:
    (x_TK,), gain = call.inputs, call.weights[0].values[0] + float(call.attributes["offset"])
    column, groups = int(call.attributes["column"]), int(call.attributes["groups"])
    normed = slice(column, column + groups * gain.shape[0]) if groups else slice(None)
    x_TGD = x_TK[:, normed].unflatten(-1, (max(1, groups), -1))
    mean_TG1 = fold(x_TGD * x_TGD, -1)[..., None] / gain.shape[0]
    y_TN = (x_TGD / torch.sqrt(mean_TG1 + float(call.attributes["eps"])) * gain).flatten(1)
    assert call.held is not None, "rms_norm always has an output"
    y_TK = call.held.clone()
    y_TK[:, normed] = y_TK[:, normed] + y_TN if call.attributes["accumulate"] else y_TN
    return y_TK


def linear(call: Call) -> Tensor:
    matrix = call.weights[0]
    x_TK = call.inputs[0].to(TORCH_DTYPE[matrix.dtype]).float()
    y_TN = rows_times_matrix(x_TK, matrix.padded, matrix.rows)
    if len(call.weights) > 1:
        y_TN = y_TN + call.weights[1].values[0]
    if call.attributes["accumulate"]:
        assert call.held is not None, "linear always has an output"
        y_TN = call.held + y_TN
    return y_TN


def head_linear(call: Call) -> Tensor:
    matrix, heads, passed = call.weights[0], int(call.attributes["heads"]), int(call.attributes["passed"])
    x_THK, rows = call.inputs[0].unflatten(-1, (heads, -1)), matrix.rows // heads
    parts = []
    for head in range(heads):
        x_TK = x_THK[:, head, passed:].to(TORCH_DTYPE[matrix.dtype]).float().contiguous()
        own = padded_matrix(matrix.values[head * rows : (head + 1) * rows])
        parts += [x_THK[:, head, :passed], rows_times_matrix(x_TK, own, rows)]
    return torch.cat(parts, -1)


def rope_write(call: Call) -> Tensor:
    """Returns the rotated queries; writes keys and values to the pool."""
    head_dim, kv_width = int(call.attributes["head_dim"]), int(call.attributes["kv_heads"]) * int(call.attributes["head_dim"])
    queries, keys, values = call.inputs[0].split([call.inputs[0].shape[-1] - 2 * kv_width, kv_width, kv_width], -1)
    return _rotate_and_write(call, queries, keys, values.unflatten(-1, (-1, head_dim)))


def latent_write(call: Call) -> Tensor:
    """Returns the rotated queries; writes keys to the pool."""
    queries, keys = call.inputs
    return _rotate_and_write(call, queries, keys, None)


def _rotate_and_write(call: Call, queries: Tensor, keys: Tensor, values: Tensor | None) -> Tensor:
    step, head_dim = call.step, int(call.attributes["head_dim"])
    angles_T1D = (step.positions.float()[:, None] * call.weights[0].values)[:, None, :]
    magnitude = float(call.attributes["magnitude"])
    cos, sin = elementwise(torch.cos, angles_T1D) * magnitude, elementwise(torch.sin, angles_T1D) * magnitude
    pool = step.pools[int(call.attributes["kv_layer"])]
    place_T = step.kv_index[pool.group][step.row_of_token, step.positions]
    pool.keys[place_T] = _stored(_rotated(keys.unflatten(-1, (-1, head_dim)), cos, sin), pool)
    if values is not None:
        pool.values[place_T] = _stored(values, pool)
    return _rotated(queries.unflatten(-1, (-1, head_dim)), cos, sin).flatten(1)


def _stored(x_THD: Tensor, pool: KVPool) -> Tensor:
    """As the pool gives it back: rounded to its dtype; int8 keeps what its integers and scales stand for."""
    if not pool.int8:
        return x_THD.to(pool.keys.dtype)
    scale = x_THD.abs().amax(-1, keepdim=True) / 127.0
    scale = torch.where(torch.isfinite(x_THD).all(-1, keepdim=True), scale, torch.nan)
    whole = torch.where(scale > 0, torch.round(x_THD / scale).clamp(-127.0, 127.0), torch.zeros_like(x_THD))
    return torch.where(torch.isnan(scale), scale, whole * scale)


def _rotated(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split pairs within the first 2 * cos.shape[-1] values; the rest of a head passes."""
    half = cos.shape[-1]
    a, b, rest = x_THD.split([half, half, x_THD.shape[-1] - 2 * half], -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def paged_attention(call: Call) -> Tensor:
    step, (queries,) = call.step, call.inputs
    kv_heads, head_dim, window = (int(call.attributes[name]) for name in ("kv_heads", "head_dim", "window"))
    scale, soft_cap = float(call.attributes["scale"]), float(call.attributes["soft_cap"])
    pool = step.pools[int(call.attributes["kv_layer"])]
    queries_TGQD = queries.unflatten(-1, (kv_heads, -1, head_dim))
    y = queries_TGQD.new_empty((*queries_TGQD.shape[:-1], pool.values.shape[-1]))
    sinks_GQ = call.weights[0].values[0].unflatten(0, (kv_heads, -1)) if call.weights else None
    for token, (row, position) in enumerate(zip(step.row_of_token.tolist(), step.positions.tolist(), strict=True)):
        first = max(0, position + 1 - window) if window else 0
        place_P = step.kv_index[pool.group][row, first : position + 1]
        keys_GPD, values_GPD = pool.keys[place_P].float().transpose(0, 1), pool.values[place_P].float().transpose(0, 1)
        y[token] = _attended(queries_TGQD[token], keys_GPD, values_GPD, scale, soft_cap, sinks_GQ)
    return y.flatten(1)


def _attended(query_GQD: Tensor, keys_GPD: Tensor, values_GPD: Tensor, scale: float, soft_cap: float, sinks_GQ: Tensor | None) -> Tensor:
    """softmax(cap(scale * q . k)) @ v of one token, over all the positions given."""
    scores_GQP = fold(query_GQD[:, :, None, :] * keys_GPD[:, None], -1) * scale
    if soft_cap:
        scores_GQP = elementwise(torch.tanh, scores_GQP / soft_cap) * soft_cap
    largest_GQ1 = scores_GQP.amax(-1, keepdim=True)
    if sinks_GQ is not None:
        largest_GQ1 = torch.maximum(largest_GQ1, sinks_GQ[..., None])
    weights_GQP = elementwise(torch.exp, scores_GQP - largest_GQ1)
    totals_GQ1 = fold(weights_GQP, -1)[..., None]
    if sinks_GQ is not None:
        totals_GQ1 = totals_GQ1 + elementwise(torch.exp, sinks_GQ[..., None] - largest_GQ1)
    return fold(weights_GQP[..., None] * values_GPD[:, None], -2) / totals_GQ1


def gated_activation(call: Call) -> Tensor:
    return _gated(call.inputs[0], call.attributes["kind"])


def _gated(gate_up: Tensor, kind: Attribute) -> Tensor:
    gate_TF, up_TF = gate_up.chunk(2, -1)
    if kind == "gelu_tanh":
        z_TF = (gate_TF + gate_TF * gate_TF * gate_TF * 0.044715) * math.sqrt(2.0 / math.pi)
        return gate_TF * (1.0 + elementwise(torch.tanh, z_TF)) * 0.5 * up_TF
    if kind == "clamped_silu":
        gate_TF, up_TF = gate_TF.clamp(max=7.0), up_TF.clamp(-7.0, 7.0)
        return gate_TF / (1.0 + elementwise(torch.exp, -(gate_TF * 1.702))) * (up_TF + 1.0)
    assert kind == "silu", kind
    return gate_TF / (1.0 + elementwise(torch.exp, -gate_TF)) * up_TF


def soft_cap(call: Call) -> Tensor:
    cap = float(call.attributes["cap"])
    return elementwise(torch.tanh, call.inputs[0] / cap) * cap


def route(call: Call) -> Tensor:
    (logits_TE,), settings = call.inputs, call.attributes
    if settings["scoring"] == "softmax":
        exponentials_TE = elementwise(torch.exp, logits_TE - logits_TE.amax(-1, keepdim=True))
        scores_TE = exponentials_TE / fold(exponentials_TE, -1)[:, None]
    else:
        scores_TE = 1.0 / (1.0 + elementwise(torch.exp, -logits_TE))
    ranks_TE = scores_TE + call.weights[0].values[0] if call.weights else scores_TE
    groups, kept, best, top_k = (int(settings[name]) for name in ("groups", "groups_kept", "group_best", "top_k"))
    if kept < groups:
        members_TGM = ranks_TE.unflatten(-1, (groups, -1))
        worth_TG = torch.sort(members_TGM, dim=-1, descending=True, stable=True).values[..., 0]
        for i in range(1, best):
            worth_TG = worth_TG + torch.sort(members_TGM, dim=-1, descending=True, stable=True).values[..., i]
        stays_TG = torch.zeros_like(worth_TG, dtype=torch.bool).scatter(1, _best(worth_TG, kept), True)
        ranks_TE = torch.where(stays_TG[..., None], members_TGM, float("-inf")).flatten(1)
    ids_Tk = _best(ranks_TE, top_k).sort(-1).values
    weights_Tk = scores_TE.gather(1, ids_Tk)
    if settings["renormalise"]:
        total_T = weights_Tk[:, 0]
        for i in range(1, top_k):
            total_T = total_T + weights_Tk[:, i]
        weights_Tk = weights_Tk / total_T[:, None]
    return torch.cat((ids_Tk.float(), weights_Tk * float(settings["scale"])), -1)


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the largest of each row, best first; the lower index wins a tie."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


def experts(call: Call) -> Tensor:
    (x_TH, routing), (gate_up, down), biases = call.inputs, call.weights[:2], call.weights[2:]
    count, top_k = int(call.attributes["expert_count"]), int(call.attributes["top_k"])
    dtype, width, ffn = TORCH_DTYPE[down.dtype], x_TH.shape[1], down.columns
    assert call.held is not None, "experts always has an output"
    y_TH = call.held.clone() if call.attributes["accumulate"] else torch.zeros_like(call.held)
    for expert in range(count):
        chosen = (routing[:, :top_k] == expert).nonzero()
        if not len(chosen):
            continue
        tokens, weights = chosen[:, 0], routing[chosen[:, 0], top_k + chosen[:, 1]]
        own = slice(expert * 2 * ffn, (expert + 1) * 2 * ffn)
        both = rows_times_matrix(x_TH[tokens].to(dtype).float(), padded_matrix(gate_up.values[own]), 2 * ffn)
        both = both + biases[0].values[0, own] if biases else both
        activated, own = _gated(both, call.attributes["kind"]), slice(expert * width, (expert + 1) * width)
        out = rows_times_matrix(activated.to(dtype).float(), padded_matrix(down.values[own]), width)
        out = out + biases[1].values[0, own] if biases else out
        y_TH[tokens] = y_TH[tokens] + weights[:, None] * out
    return y_TH


def select(call: Call) -> Tensor:
    return call.inputs[0][torch.from_numpy(call.step.sampling.index.astype(np.int64)).to(call.inputs[0].device)]


def sample(call: Call) -> SampleOutputs:
    """One position after the other; each is a function of its own logits and columns."""
    (logits_SV,), columns = call.inputs, call.step.sampling
    targets = [-1] * logits_SV.shape[0] if columns.targets is None else columns.targets.tolist()
    tokens = [
        target
        if target >= 0
        else choose_token(
            logits_SV[index] if columns.edits is None else edit_logits(logits_SV[index], columns.edits, index),
            seed=int(columns.seeds[index]),
            position=int(columns.positions[index]),
            temperature=float(columns.temperatures[index]),
            top_k=int(columns.top_ks[index]),
            top_p=float(columns.top_ps[index]),
            min_p=float(columns.min_ps[index]),
        )
        for index, target in enumerate(targets)
    ]
    return log_probabilities(logits_SV, tokens, columns.logprob_counts)
