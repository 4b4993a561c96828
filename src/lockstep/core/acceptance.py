"""What the sampling rank decides from its draws: the accepted run of each row, and whether it ends the request.

Nothing else ends a request in the log, and nothing here predicts: every row that samples is in the result, whatever its length cap says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from lockstep.core.layout import BatchLayout
from lockstep.core.logprobs import LogprobColumns
from lockstep.core.ragged import Ragged
from lockstep.core.records import PromptLogprobs, StepResult
from lockstep.core.schema import FINISH_FAILED, FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from lockstep.core.types import I32, U64

_NONE: Mapping[int, str] = MappingProxyType({})


def accept(
    layout: BatchLayout,
    sampled: I32,
    *,
    epoch: int,
    digests: U64,
    logprobs: LogprobColumns | None = None,
    prompt_logprobs: LogprobColumns | None = None,
    drafts: Sequence[Sequence[int]] = (),
    failed: Mapping[int, str] = _NONE,
) -> StepResult:
    """sampled: int32 [S], the target's own draw at each sampled position. A draft is accepted while it equals the draw there; the draw behind the
    last accepted draft is the row's own new token. The earliest token that stops the request or fills its cap ends it; at one token, a stop wins over
    the cap.
    drafts: next drafts, one sequence a sampling row (empty: none); those of an ended request are left out. logprobs: one row a sampled position
    [S]. prompt_logprobs: one row for each of the layout's prompt targets.
    failed: sampled positions without a next token, and what a logits processor failed with there, empty if none did. A run ends before one; a row
    that begins with one fails."""
    count = len(layout.sample_row)
    assert len(sampled) == layout.sample_starts[-1], (len(sampled), layout.sample_starts)
    assert len(drafts) in (0, count), (len(drafts), count)
    assert logprobs is None or len(logprobs.logprobs) == len(sampled), len(sampled)
    accepted, finishes, reasons = [], np.zeros(count, np.int32), [""] * count
    kept: list[int] = []
    stops = [frozenset(layout.stop_ids.row(i).tolist()) for i in range(count)]
    for i, row in enumerate(layout.sample_row.tolist()):
        first, last = int(layout.sample_starts[i]), int(layout.sample_starts[i + 1])
        draws, proposed = sampled[first:last].tolist(), layout.draft_ids.row(i).tolist()
        room = int(layout.length_cap[i] - layout.known[row])
        run: list[int] = []
        for position, token in enumerate(draws):
            if run and first + position in failed:
                break
            run.append(token)
            if first + position in failed:
                finishes[i], reasons[i] = FINISH_FAILED, failed[first + position]
                break
            finishes[i] = FINISH_STOP if token in stops[i] else FINISH_LENGTH if len(run) == room else FINISH_NONE
            if finishes[i] or position == len(proposed) or proposed[position] != token:
                break
        assert 0 < len(run) <= len(proposed) + 1, (run, proposed)
        accepted.append(run)
        kept.extend(range(first, first + len(run)))
    columns = None if logprobs is None else logprobs.rows(kept)
    offered = [() if finishes[i] or not drafts else tuple(drafts[i]) for i in range(len(accepted))]
    return StepResult(
        epoch=epoch,
        step=layout.step,
        slots=layout.slot[layout.sample_row],
        generations=layout.generation[layout.sample_row],
        tokens=Ragged.of(accepted),
        finishes=finishes,
        drafts=Ragged.of(offered),
        logprobs=columns,
        prompt_logprobs=None if prompt_logprobs is None else _of_prompts(layout, prompt_logprobs),
        digests=digests,
        reasons=tuple(reasons) if any(reasons) else (),
    )


def _of_prompts(layout: BatchLayout, columns: LogprobColumns) -> PromptLogprobs:
    targets = layout.prompt_targets
    row = layout.row_of_token()[targets.index]
    assert len(columns) == len(row), (len(columns), len(row))
    return PromptLogprobs(slots=layout.slot[row], generations=layout.generation[row], positions=targets.position, columns=columns)
