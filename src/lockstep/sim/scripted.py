"""An executor without a model: the draws and drafts of each request are given. It finds a request by its seed, which no rule touches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.core.layout import BatchLayout
from lockstep.core.types import F32
from lockstep.runtime.stage import Sampled

NO_DRAW = 0
"""The token of a position that no script speaks of; a run that samples one has read wrong state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """draws[i]: what is drawn for the i-th token of the answer. drafts: proposed after every step."""

    prompt_length: int
    draws: tuple[int, ...]
    drafts: tuple[int, ...] = ()

    def draw(self, position: int) -> int:
        index = position - self.prompt_length
        return self.draws[index] if 0 <= index < len(self.draws) else NO_DRAW


class ScriptedExecutor:
    """scripts: by seed; whoever submits a request adds to it. layout: what was computed last, None before that."""

    def __init__(self, scripts: Mapping[int, Script], *, last: bool) -> None:
        self._scripts = scripts
        self._last = last
        self.layout: BatchLayout | None = None

    def execute(self, layout: BatchLayout, tensors: Mapping[str, F32]) -> Mapping[str, F32] | Sampled:
        self.layout = layout
        if not self._last:
            return {"hidden": np.zeros((layout.token_count, 1), np.float32)}
        sampling = layout.sampling
        scripts = [self._scripts.get(int(seed)) for seed in sampling.seed]
        drawn = [NO_DRAW if script is None else script.draw(int(at)) for script, at in zip(scripts, sampling.position, strict=True)]
        of_row = [scripts[first] for first in layout.sample_starts[:-1]]
        return Sampled(tokens=np.array(drawn, np.int32), drafts=[() if script is None else script.drafts for script in of_row])
