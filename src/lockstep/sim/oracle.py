"""A model made of hashes, in which wrong state is visible: any stale block, wrong position, lost or foreign token changes every later token.

Each layer's KV at a position holds a hash of the prefix that it was computed from. Attention reads positions 0..p back through the block table and
sums their hashes; the next token is a hash of the last layer's sum, of every sampling column and of the logit edits that the real shaper makes.
`closed_form` gives the same tokens from the token list alone: no blocks, no chunks, no batch, no stages, no counts that are kept.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.digest import mix64, mix64_array
from lockstep.core.layout import BatchLayout
from lockstep.core.logprobs import LogprobColumns
from lockstep.core.request import EngineRequest
from lockstep.core.types import F32, I32, U64
from lockstep.ops.step import LogitEdits
from lockstep.runtime.executor import shaped_rows
from lockstep.runtime.stage import Sampled
from lockstep.sampling.shaper import Shaper

_PHI = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1


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

    def draw(self, hidden: int, position: int, vocabulary: int, edits: int) -> int:
        """The next token: greedy rows look at the hidden value and the edits of their logits alone, others at their seed and filters too."""
        hidden ^= edits
        if self.temperature == 0.0:
            return mix64(hidden) % vocabulary
        fractions = np.array([self.temperature, self.top_p, self.min_p], np.float32).view(np.uint32).tolist()
        value = mix64(hidden ^ mix64(self.seed + position))
        for part in (*fractions, self.top_k):
            value = mix64(value + part)
        return value % vocabulary


Draft = Callable[[int, int], Sequence[int]]
"""(seed of a request, position of its next token) -> what is proposed from there on. A request is found by its seed, which no rule touches."""


class OracleExecutor:
    """Layers `layers` of a model of hashes, on pools of block_counts blocks, one a KV group; a layer's group is its number modulo their count.
    windows: of each group, how many positions a token sees, 0 for all. Activations are uint64 words, sent as pairs of float32 bit patterns.
    draft: proposes on the last stage; None proposes nothing. shaper: of the last stage. It serves and takes KV too (`runtime.handover.KVAccess`)."""

    def __init__(
        self,
        *,
        layers: range,
        first: bool,
        last: bool,
        block_counts: Sequence[int],
        block_size: int,
        vocabulary: int,
        windows: Sequence[int] = (0,),
        draft: Draft | None = None,
        shaper: Shaper | None = None,
    ) -> None:
        self._layers = layers
        self._first = first
        self._last = last
        self._block_size = block_size
        self._vocabulary = vocabulary
        self._draft = draft
        self._shaper = shaper or Shaper(vocabulary)
        self._windows = windows
        self.kv = np.zeros((len(layers), max(block_counts), block_size), np.uint64)

    def layers_of(self, group: int) -> list[int]:
        """Places in `kv` of this stage's layers of the group."""
        return [place for place, layer in enumerate(self._layers) if layer % len(self._windows) == group]

    def execute(self, layout: BatchLayout, tensors: Mapping[str, F32]) -> Mapping[str, F32] | Sampled:
        hidden = _embed(layout.token_ids, layout.positions) if self._first else tensors["hidden"].copy().view(np.uint64).reshape(-1)
        row = layout.row_of_token()
        read = _Read.of(layout, row)
        groups = range(len(self._windows))
        written = [self._addresses(layout, group, row, layout.positions) for group in groups]
        looked_at = [self._addresses(layout, group, read.row, read.positions) for group in groups]
        for i, layer in enumerate(self._layers):
            group = layer % len(self._windows)
            self.kv[i, written[group][0], written[group][1]] = _key(layer, hidden, layout.positions)
            hidden = mix64_array(hidden + read.sums(self.kv[i, looked_at[group][0], looked_at[group][1]], self._windows[group]))
        if not self._last:
            return {"hidden": hidden.view(np.float32).reshape(-1, 2)}
        return self._sample(layout, hidden)

    def _addresses(self, layout: BatchLayout, group: int, row: I32, positions: I32) -> tuple[I32, I32]:
        """Blocks and places in them. Behind a window there is no block; what is read in place of it cancels out of every sum."""
        return layout.block_tables[group][row, positions // self._block_size], positions % self._block_size

    def _sample(self, layout: BatchLayout, hidden: U64) -> Sampled:
        s = layout.sampling
        picked = hidden[s.index].tolist()
        edits = _words(self._shaper.edits(shaped_rows(layout)), len(picked))
        drawn = [
            _Filters(
                seed=int(s.seed[i]), temperature=float(s.temperature[i]), top_k=int(s.top_k[i]), top_p=float(s.top_p[i]), min_p=float(s.min_p[i])
            ).draw(picked[i], int(s.position[i]), self._vocabulary, edits[i])
            for i in range(len(picked))
        ]
        drafts = () if self._draft is None else self._propose(layout, drawn, self._draft)
        targets = layout.prompt_targets
        told = _foretold(hidden[targets.index], targets.token) if len(targets.index) else None
        return Sampled(tokens=np.array(drawn, np.int32), prompt_logprobs=told, drafts=drafts)

    @staticmethod
    def _propose(layout: BatchLayout, drawn: Sequence[int], draft: Draft) -> Sequence[Sequence[int]]:
        """From behind the accepted run of each sampling row on."""
        proposals = []
        for i in range(len(layout.sample_row)):
            first = int(layout.sample_starts[i])
            run = 1
            for proposed, token in zip(layout.draft_ids.row(i).tolist(), drawn[first:], strict=False):
                if proposed != token:
                    break
                run += 1
            proposals.append(draft(int(layout.sampling.seed[first]), int(layout.sampling.position[first]) + run))
        return proposals

    # Hand-over of KV

    def read_kv(self, layers: range, blocks: Sequence[I32], count: int) -> Mapping[str, NDArray[Any]]:
        own = slice(layers.start - self._layers.start, layers.stop - self._layers.start)
        return {"keys": self.kv[own, blocks[0]].reshape(len(layers), -1)[:, :count].copy()}

    def write_kv(self, layers: range, blocks: Sequence[I32], count: int, values: Mapping[str, NDArray[Any]]) -> None:
        if values["keys"].shape != (len(layers), count):
            raise ValueError(f"keys of shape {values['keys'].shape} came for {len(layers)} layers and {count} positions")
        own = slice(layers.start - self._layers.start, layers.stop - self._layers.start)
        position = np.arange(count)
        self.kv[own, blocks[0][position // self._block_size], position % self._block_size] = values["keys"]


def _words(edits: LogitEdits | None, count: int) -> list[int]:
    """A hash of each sampled position's entries, 0 without any."""
    if edits is None:
        return [0] * count
    hashes = [_entry(int(token), subtract) for token, subtract in zip(edits.ids, edits.subtracts, strict=True)]
    return [sum(hashes[a:b]) & _WORD for a, b in itertools.pairwise(edits.starts.tolist())]


def _entry(token: int, subtract: np.float32) -> int:
    return mix64((token << 32) + int(np.float32(subtract).view(np.uint32)))


def _counted_anew(tokens: Sequence[int], prompt_length: int, penalty: float) -> int:
    """The same hash for a frequency penalty, from the whole prefix."""
    if not penalty:
        return 0
    outputs = Counter(tokens[prompt_length:])
    return sum(_entry(token, np.float32(penalty) * np.float32(outputs[token])) for token in set(tokens)) & _WORD


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """Positions 0 .. end of every row of a layout, one row after the other. wanted: where among them the step's tokens stand; base: the place before
    their row's first, -1 if there is none."""

    row: I32
    positions: I32
    wanted: I32
    base: I32

    @staticmethod
    def of(layout: BatchLayout, row: I32) -> _Read:
        ends = layout.start + layout.count
        firsts = (np.cumsum(ends) - ends).astype(np.int32)
        rows = np.repeat(np.arange(len(ends), dtype=np.int32), ends)
        return _Read(
            row=rows,
            positions=np.arange(len(rows), dtype=np.int32) - firsts[rows],
            wanted=firsts[row] + layout.positions,
            base=firsts[row] - 1,
        )

    def sums(self, read: U64, window: int) -> U64:
        """read [positions]: what stands there. Of each of the step's tokens: the sum over the last `window` positions up to its own, 0 for all."""
        sums = np.cumsum(mix64_array(read + self.positions.astype(np.uint64)), dtype=np.uint64)
        before = np.maximum(self.base, self.wanted - window) if window else self.base
        return sums[self.wanted] - np.where(before >= 0, sums[before], np.uint64(0))


def _foretold(hidden: U64, tokens: I32) -> LogprobColumns:
    """What stands for the log probability of `tokens` where the hidden value before each is this: a hash of both."""
    words = mix64_array(hidden ^ mix64_array(tokens.astype(np.uint64) + _PHI))
    none = np.zeros((len(tokens), 0), np.int32)
    return LogprobColumns(
        logprobs=-(words >> np.uint64(40)).astype(np.float32),
        ranks=(words % np.uint64(1 << 20)).astype(np.int32),
        top_ids=none,
        top_logprobs=none.astype(np.float32),
    )


def prompt_logprobs_of(request: EngineRequest, *, layer_count: int, windows: Sequence[int] = (0,)) -> LogprobColumns:
    """What a request's prompt tokens, but for the first, are told to have, from the prompt alone."""
    prompt = request.prompt.tolist()
    hidden = list(_hidden_values(prompt, layer_count, windows))[:-1]
    return _foretold(np.array(hidden, np.uint64), request.prompt[1:])


def _hidden_values(tokens: Sequence[int], layer_count: int, windows: Sequence[int]) -> Iterator[int]:
    """The last layer's value at each position. tokens may grow meanwhile. windows: of each layer in turn."""
    of_layer = [mix64(layer + 1) for layer in range(layer_count)]
    terms: list[list[int]] = [[] for _ in range(layer_count)]
    sums = [0] * layer_count
    for position, token in enumerate(tokens):
        word = mix64(token * 0x1000003 + position + int(_PHI))
        for layer in range(layer_count):
            key = mix64(word ^ mix64(position + of_layer[layer]))
            window, added = windows[layer % len(windows)], mix64(key + position)
            terms[layer].append(added)
            sums[layer] += added - (terms[layer][position - window] if window and position >= window else 0)
            word = mix64(word + sums[layer])
        yield word


def closed_form(request: EngineRequest, *, layer_count: int, vocabulary: int, windows: Sequence[int] = (0,)) -> list[int]:
    """The output tokens of a request, stops and length cap applied, from its tokens alone. Shares no state logic with the engine."""
    tokens = list(request.prompt.tolist())
    filters = _Filters(seed=request.seed, temperature=request.temperature, top_k=request.top_k, top_p=request.top_p, min_p=request.min_p)
    values = _hidden_values(tokens, layer_count, windows)
    for _ in range(len(tokens) - 1):
        next(values)
    while True:
        hidden, position = next(values), len(tokens)
        edits = _counted_anew(tokens, len(request.prompt), request.side.shaping.frequency_penalty)
        token = filters.draw(hidden, position, vocabulary, edits)
        tokens.append(token)
        if token in request.side.stop_ids or len(tokens) == request.length_cap:
            return tokens[len(request.prompt) :]


def split_evenly(layer_count: int, stage_count: int) -> Sequence[range]:
    bounds = [layer_count * i // stage_count for i in range(stage_count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]
