"""`ProgramExecutor`: runs a stage's program on a layout. The arrays that the digest folded are the very ones that the backend reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.layout import BatchLayout, PromptTargets
from lockstep.core.logprobs import LogprobColumns
from lockstep.core.types import F32
from lockstep.errors import InternalError
from lockstep.ops.backend import Executable
from lockstep.ops.program import Program
from lockstep.ops.step import LogitEdits, SamplingInputs, StepInputs
from lockstep.runtime.stage import Sampled
from lockstep.sampling.grammar_shelf import GrammarShelf
from lockstep.sampling.processor_set import ProcessorSet
from lockstep.sampling.shaper import ShapedRow, Shaper


class ProgramExecutor:
    """executable: `program` bound to weights and KV by some backend. grammars, processors: for the sampler, if requests may have some."""

    def __init__(
        self, program: Program, executable: Executable, grammars: GrammarShelf | None = None, processors: ProcessorSet | None = None
    ) -> None:
        self._program = program
        self.executable = executable
        widths = [program.buffers[op.inputs[0]].width for op in program.ops if op.kind == "sample"]
        self._shaper = Shaper(widths[0], grammars, processors) if widths else None

    def execute(self, layout: BatchLayout, tensors: Mapping[str, F32]) -> Mapping[str, F32] | Sampled:
        """Outputs are fresh arrays, so whoever sends them owns them until they are sent."""
        program = self._program
        if set(tensors) != set(program.inputs):
            raise InternalError(f"step {layout.step}: the stage needs activations {program.inputs}, got {sorted(tensors)}")
        outputs = {name: np.empty((layout.token_count, program.buffers[name].width), np.float32) for name in program.outputs}
        edits = None if self._shaper is None else self._shaper.edits(shaped_rows(layout))
        samples = self.executable.run(step_inputs(layout, edits, samples=program.samples), tensors, outputs)
        if not program.samples:
            return outputs
        if samples is None:
            raise InternalError(f"step {layout.step}: the program samples and returned no samples")
        drawn, told = len(layout.sampling.index), len(layout.prompt_targets.index)
        columns = LogprobColumns(logprobs=samples.logprobs, ranks=samples.ranks, top_ids=samples.top_ids, top_logprobs=samples.top_logprobs)
        return Sampled(
            tokens=samples.tokens[:drawn],
            logprobs=columns.rows(slice(0, drawn)) if (layout.sampling.logprob_count >= 0).any() else None,
            prompt_logprobs=columns.rows(slice(drawn, None)) if told else None,
            failed=dict(self._shaper.failures) if self._shaper is not None else {},
        )


def shaped_rows(layout: BatchLayout) -> list[ShapedRow]:
    """The sampling rows, or none of them if nobody's logits are changed."""
    if all(side.shaping.is_plain for side in layout.sides):
        return []
    return [
        ShapedRow(
            slot=int(layout.slot[row]),
            generation=int(layout.generation[row]),
            shaping=side.shaping,
            prompt_length=int(layout.prompt_length[i]),
            known=int(layout.known[row]),
            prefix=layout.history.row(i),
            drafts=layout.draft_ids.row(i).tolist(),
            stop_ids=layout.stop_ids.row(i).tolist(),
        )
        for i, (row, side) in enumerate(zip(layout.sample_row.tolist(), layout.sides, strict=True))
    ]


def step_inputs(layout: BatchLayout, edits: LogitEdits | None = None, *, samples: bool = True) -> StepInputs:
    """The layout's arrays under the names that programs use; copied only where it samples and prompt tokens' log probabilities come behind the
    samples."""
    s = layout.sampling
    sampling = SamplingInputs(
        index=s.index,
        seeds=s.seed,
        positions=s.position,
        temperatures=s.temperature,
        top_ks=s.top_k,
        top_ps=s.top_p,
        min_ps=s.min_p,
        logprob_counts=s.logprob_count,
        edits=edits,
    )
    return StepInputs(
        token_ids=layout.token_ids,
        positions=layout.positions,
        row_starts=layout.row_starts,
        block_tables=layout.block_tables,
        sampling=_with_targets(sampling, layout.prompt_targets) if samples and len(layout.prompt_targets.index) else sampling,
    )


def _with_targets(drawn: SamplingInputs, targets: PromptTargets) -> SamplingInputs:
    """Prompt tokens as samples that choose nothing, behind those that do. Nobody's edits touch them."""
    count = len(targets.index)

    def behind(values: NDArray[Any], more: NDArray[Any] | int) -> NDArray[Any]:
        return np.concatenate([values, np.broadcast_to(np.asarray(more, values.dtype), count)])

    edits = drawn.edits
    if edits is not None:
        edits = replace(edits, mask_rows=behind(edits.mask_rows, -1), starts=behind(edits.starts, edits.starts[-1]))
    return SamplingInputs(
        index=behind(drawn.index, targets.index),
        seeds=behind(drawn.seeds, 0),
        positions=behind(drawn.positions, targets.position),
        temperatures=behind(drawn.temperatures, 0),
        top_ks=behind(drawn.top_ks, 0),
        top_ps=behind(drawn.top_ps, 1),
        min_ps=behind(drawn.min_ps, 0),
        logprob_counts=behind(drawn.logprob_counts, targets.logprob_count),
        targets=behind(np.full(len(drawn.index), -1, np.int32), targets.token),
        edits=edits,
    )
