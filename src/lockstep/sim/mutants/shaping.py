"""Mutants of what changes logits: the old output tokens that the sampler reads, and the counts that it keeps of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lockstep.core.layout import BatchLayout
from lockstep.core.ragged import Ragged
from lockstep.core.records import StepPlan
from lockstep.sampling.counts import TokenCounts
from lockstep.sampling.shaper import ShapedRow, Shaper
from lockstep.sim.mutants.mutant import ALL, ONE, UNSEEN, Mutant, of_table, watched
from lockstep.sim.mutants.replicas import NarrowDriver, NarrowStage
from lockstep.sim.mutants.watched_table import WatchedTable
from lockstep.sim.parts import Parts


class OtherHistory(WatchedTable):
    """The first output token of the layout's history is another."""

    def resolve(self, plan: StepPlan) -> BatchLayout:
        layout = super().resolve(plan)
        history = layout.history
        outputs = history.starts[:-1] + layout.prompt_length
        changed = outputs[history.lengths() > layout.prompt_length]
        self.did(len(changed) > 0)
        values = history.values.copy()
        values[changed] ^= 1
        return replace(layout, history=Ragged(starts=history.starts, values=values))


class HistoryUnseen(NarrowStage):
    flips = OtherHistory


class KeepsCounts(Shaper):
    """What was counted in a slot goes on, whoever holds it and whatever was counted."""

    witness = UNSEEN

    def _counted(self, row: ShapedRow) -> TokenCounts:
        held = self._counts.get(row.slot)
        if held is None:
            return super()._counted(row)
        counts = held[1]
        known = min(len(counts._seen), len(row.prefix))
        if known < len(counts._seen) or not np.array_equal(counts._seen, row.prefix[:known]):
            self.witness.note(0, 0)
        counts._seen = row.prefix[:known]
        counts.follow(row.prefix)
        return counts


MUTANTS: Sequence[Mutant] = (
    Mutant(name="other-history", kind="rule 8", loosens="an old output token is another", parts=of_table(OtherHistory)),
    Mutant(
        name="history-undigested",
        kind="rule 8",
        loosens="the digest leaves out old output tokens; the last stage has another",
        parts={ONE: lambda witness: Parts(make_stage=watched(HistoryUnseen, witness), make_driver=NarrowDriver)},
    ),
    Mutant(
        name="keeps-counts",
        kind="rule 14",
        loosens="counts of tokens are kept without a look at the prefix that they are of",
        parts={ALL: lambda witness: Parts(make_shaper=watched(KeepsCounts, witness))},
    ),
)
