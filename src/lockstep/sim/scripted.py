"""An executor without a model: the draws and drafts of each request are given. It finds a request by its seed, which no rule touches.

Its KV at a position is the token that was computed there. Whoever reads other KV than the script's own tokens draws NO_DRAW, so a stale block, a
wrong position or a foreign import shows in the answer also where no check looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.layout import BatchLayout
from lockstep.core.types import F32, I32
from lockstep.runtime.stage import Sampled

NO_DRAW = 0
"""The token of a position that no script speaks of, or that was drawn from wrong KV."""

WRONG_GUESS = 999
"""What a guessing drafter proposes where it is told to be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """draws[i]: what is drawn for the i-th token of the answer. drafts: proposed after every step; else guess_count tokens are guessed right, but
    for those of index `wrong` in the answer."""

    prompt: tuple[int, ...]
    draws: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    guess_count: int = 0
    wrong: frozenset[int] = frozenset()

    def draw(self, position: int) -> int:
        index = position - len(self.prompt)
        return self.draws[index] if 0 <= index < len(self.draws) else NO_DRAW

    def propose(self, known: int) -> tuple[int, ...]:
        """known: tokens of prompt and answer together."""
        if self.drafts:
            return self.drafts
        first = known - len(self.prompt)
        ahead = range(first, min(first + self.guess_count, len(self.draws)))
        return tuple(WRONG_GUESS if index in self.wrong else self.draws[index] for index in ahead)

    def expected(self, end: int) -> I32:
        """The tokens at positions 0 .. end."""
        whole = (*self.prompt, *self.draws)[:end]
        return np.array([*whole, *[NO_DRAW] * (end - len(whole))], np.int32)


class ScriptedExecutor:
    """scripts: by seed; whoever submits a request adds to it. layers: that the stage holds. layout: what was computed last, None before that.
    parts_written: how many parts of KV came from another engine."""

    def __init__(self, scripts: Mapping[int, Script], *, last: bool, layers: range, block_count: int, block_size: int) -> None:
        self._scripts = scripts
        self._last = last
        self._layers = layers
        self._size = block_size
        self._kv = np.full((len(layers), block_count, block_size), NO_DRAW, np.int32)
        self.layout: BatchLayout | None = None
        self.parts_written = 0

    def execute(self, layout: BatchLayout, tensors: Mapping[str, F32]) -> Mapping[str, F32] | Sampled:
        self.layout = layout
        row = layout.row_of_token()
        blocks, offsets = layout.block_tables[0][row, layout.positions // self._size], layout.positions % self._size
        self._kv[:, blocks, offsets] = layout.token_ids
        scripts = [self._scripts.get(int(layout.sampling.seed[first])) for first in layout.sample_starts[:-1]]
        wrong = tensors["wrong"][:, 0] != 0 if tensors else np.zeros(layout.token_count, bool)
        for script, sampled in zip(scripts, layout.sample_row.tolist(), strict=True):
            wrong[layout.row_starts[sampled] : layout.row_starts[sampled + 1]] |= self._reads_wrong(layout, sampled, script)
        if not self._last:
            return {"wrong": wrong.astype(np.float32)[:, None]}
        return self._sample(layout, scripts, wrong)

    def _reads_wrong(self, layout: BatchLayout, row: int, script: Script | None) -> NDArray[np.bool_]:
        """For each position of the row: whether KV up to and including it is not that of the script's tokens, in some layer."""
        start, end = int(layout.start[row]), int(layout.start[row] + layout.count[row])
        if script is None:
            return np.ones(end - start, bool)
        positions = np.arange(end)
        read = self._kv[:, layout.block_tables[0][row][positions // self._size], positions % self._size]
        differs = (read != script.expected(end)).any(axis=0)
        return np.cumsum(differs)[start:] > 0

    def _sample(self, layout: BatchLayout, scripts: Sequence[Script | None], wrong: NDArray[np.bool_]) -> Sampled:
        tokens, drafts = np.full(layout.sample_starts[-1], NO_DRAW, np.int32), []
        for i, script in enumerate(scripts):
            inside = range(layout.sample_starts[i], layout.sample_starts[i + 1])
            if script is not None:
                for at in inside:
                    tokens[at] = NO_DRAW if wrong[layout.sampling.index[at]] else script.draw(int(layout.sampling.position[at]))
            checked = layout.draft_ids.row(i)
            right = int(np.cumprod(checked == tokens[inside.start : inside.start + len(checked)]).sum())
            known = int(layout.known[layout.sample_row[i]]) + right + 1
            drafts.append(() if script is None else script.propose(known))
        return Sampled(tokens=tokens, drafts=drafts)

    # KVAccess, for hand-over

    def read_kv(self, layers: range, blocks: Sequence[I32], count: int) -> Mapping[str, NDArray[Any]]:
        return {"tokens": self._kv[self._at(layers), *self._addresses(blocks, count)].copy()}

    def write_kv(self, layers: range, blocks: Sequence[I32], count: int, values: Mapping[str, NDArray[Any]]) -> None:
        if values["tokens"].shape != (len(layers), count):
            raise ValueError(f"KV of {len(layers)} layers and {count} positions is wanted, shape {values['tokens'].shape} came")
        self.parts_written += 1
        self._kv[self._at(layers), *self._addresses(blocks, count)] = values["tokens"]

    def _at(self, layers: range) -> NDArray[np.int64]:
        return np.arange(layers.start, layers.stop)[:, None] - self._layers.start

    def _addresses(self, blocks: Sequence[I32], count: int) -> tuple[I32, NDArray[np.int64]]:
        positions = np.arange(count)
        return blocks[0][positions // self._size], positions % self._size
