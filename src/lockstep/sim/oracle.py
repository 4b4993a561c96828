"""A model made of hashes, in which wrong state is visible: any stale block, wrong position, lost or foreign token changes every later token.

Each layer's KV at a position holds a hash of the prefix that it was computed from. Attention reads positions 0..p back through the block table and
sums their hashes; the next token is a hash of the last layer's sum and of every sampling column. `closed_form` gives the same tokens from the
token list alone: no blocks, no chunks, no batch, no stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.core.digest import mix64, mix64_array
from lockstep.core.layout import BatchLayout
from lockstep.core.request import EngineRequest
from lockstep.core.types import F32, I32, U64
from lockstep.runtime.stage import Sampled

_PHI = np.uint64(0x9E3779B97F4A7C15)


def _embed(tokens: I32, positions: I32) -> U64:
    return mix64_array(tokens.astype(np.uint64) * np.uint64(0x1000003) + positions.astype(np.uint64) + _PHI)


def _key(layer: int, hidden: U64, positions: I32) -> U64:
    return mix64_array(hidden ^ mix64_array(positions.astype(np.uint64) + np.uint64(mix64(layer + 1))))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filters:
    """A request's sampling columns, as float32 bits where they are fractions."""

    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    def draw(self, hidden: int, position: int, vocabulary: int) -> int:
        """The next token: greedy rows look at the hidden value alone, others at their seed and filters too."""
        if self.temperature == 0.0:
            return mix64(hidden) % vocabulary
        fractions = np.array([self.temperature, self.top_p, self.min_p], np.float32).view(np.uint32).tolist()
        value = mix64(hidden ^ mix64(self.seed + position))
        for part in (*fractions, self.top_k):
            value = mix64(value + part)
        return value % vocabulary


class OracleExecutor:
    """Layers `layers` of a model of hashes, on a pool of block_count blocks. Activations are uint64 words, sent as pairs of float32 bit patterns."""

    def __init__(self, *, layers: range, first: bool, last: bool, block_count: int, block_size: int, vocabulary: int) -> None:
        self._layers = layers
        self._first = first
        self._last = last
        self._block_size = block_size
        self._vocabulary = vocabulary
        self.kv = np.zeros((len(layers), block_count, block_size), np.uint64)

    def execute(self, layout: BatchLayout, tensors: Mapping[str, F32]) -> Mapping[str, F32] | Sampled:
        hidden = _embed(layout.token_ids, layout.positions) if self._first else tensors["hidden"].copy().view(np.uint64).reshape(-1)
        table = layout.block_tables[0]
        row = layout.row_of_token()
        blocks, offsets = table[row, layout.positions // self._block_size], layout.positions % self._block_size
        for i, layer in enumerate(self._layers):
            self.kv[i, blocks, offsets] = _key(layer, hidden, layout.positions)
            hidden = mix64_array(hidden + self._attend(self.kv[i], layout, row))
        if not self._last:
            return {"hidden": hidden.view(np.float32).reshape(-1, 2)}
        s = layout.sampling
        picked = hidden[s.index].tolist()
        drawn = [
            _Filters(
                seed=int(s.seed[i]), temperature=float(s.temperature[i]), top_k=int(s.top_k[i]), top_p=float(s.top_p[i]), min_p=float(s.min_p[i])
            ).draw(picked[i], int(s.position[i]), self._vocabulary)
            for i in range(len(picked))
        ]
        return Sampled(tokens=np.array(drawn, np.int32))

    def _attend(self, kv: U64, layout: BatchLayout, row: I32) -> U64:
        sums = np.zeros(layout.token_count, np.uint64)
        for r in range(layout.row_count):
            end = int(layout.start[r] + layout.count[r])
            positions = np.arange(end)
            read = kv[layout.block_tables[0][r][positions // self._block_size], positions % self._block_size]
            sums[row == r] = np.cumsum(mix64_array(read + positions.astype(np.uint64)), dtype=np.uint64)[layout.start[r] :]
        return sums


def closed_form(request: EngineRequest, *, layer_count: int, vocabulary: int) -> list[int]:
    """The output tokens of a request, stops and length cap applied, from its tokens alone. Shares no state logic with the engine."""
    tokens = list(request.prompt.tolist())
    filters = _Filters(seed=request.seed, temperature=request.temperature, top_k=request.top_k, top_p=request.top_p, min_p=request.min_p)
    sums = [0] * layer_count
    hidden = 0
    mask = (1 << 64) - 1
    position = 0
    while True:
        while position < len(tokens):
            word = int(_embed(np.array([tokens[position]], np.int32), np.array([position], np.int32))[0])
            at = np.array([position], np.int32)
            for layer in range(layer_count):
                key = int(_key(layer, np.array([word], np.uint64), at)[0])
                sums[layer] = (sums[layer] + mix64((key + position) & mask)) & mask
                word = mix64((word + sums[layer]) & mask)
            hidden = word
            position += 1
        token = filters.draw(hidden, position, vocabulary)
        tokens.append(token)
        if token in request.side.stop_ids or len(tokens) == request.length_cap:
            return tokens[len(request.prompt) :]


def split_evenly(layer_count: int, stage_count: int) -> Sequence[range]:
    bounds = [layer_count * i // stage_count for i in range(stage_count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]
