"""KV that attention is about to read is the request's own prefix, or the step is refused: stale blocks, wrong positions, rejected drafts."""

from __future__ import annotations

import numpy as np
import pytest
from core_loop import Admission, Answer, Row, make_plan, make_result, run_plan

from lockstep.core.layout import BatchLayout
from lockstep.core.provenance import Provenance, token_mix
from lockstep.core.records import Side
from lockstep.core.table import SlotTable, TableShape
from lockstep.errors import ProvenanceError

BLOCK_SIZE = 4
PROMPT = [11, 12, 13, 14, 15, 16]


class OneRequest:
    """One request in slot 0 with blocks of its own choice, step by step, over one stage's tags."""

    def __init__(
        self, prompt: list[int], blocks: list[int], *, provenance: Provenance | None = None, computed: int = 0, side: Side | None = None
    ) -> None:
        self.table = SlotTable(TableShape(slot_count=1, length_max=32, block_size=BLOCK_SIZE, drafts_max=4), poison=True)
        self.provenance = provenance or Provenance(16, BLOCK_SIZE)
        self._admission = Admission(slot=0, generation=1, tokens=prompt, cap=30, computed=computed, side=side or Side())
        self._blocks = blocks
        self._step = self._applied = 0

    def step(self, count: int, *, samples: bool) -> BatchLayout:
        """Resolve a row of `count` tokens and check what it is about to read."""
        first = self._step == 0
        plan = make_plan(
            self._step,
            self._applied,
            admits=[self._admission] if first else [],
            blocks=[(0, self._blocks)] if first else [],
            rows=[Row(0, 1, count, -1, samples)],
        )
        self._step += 1
        layout = run_plan(self.table, plan)
        self.provenance.check(layout)
        return layout

    def compute(self, count: int, *, samples: bool) -> BatchLayout:
        layout = self.step(count, samples=samples)
        self.provenance.void(layout)
        self.provenance.set(layout)
        return layout

    def result(self, tokens: list[int], drafts: list[int] | None = None) -> None:
        while self._applied < self._step - 1:
            self.table.apply_result(make_result(self._applied))
            self._applied += 1
        self.table.apply_result(make_result(self._applied, [Answer(0, 1, tokens, 0, drafts or [])]))
        self._applied += 1


def test_own_chunks_and_decodes_are_accepted() -> None:
    request = OneRequest(PROMPT, [3, 5, 7])
    for count in (1, 2, 2):
        request.compute(count, samples=False)
    request.compute(1, samples=True)
    for token in (21, 22, 23, 24):
        request.result([token])
        request.compute(1, samples=True)


@pytest.mark.parametrize("position", range(len(PROMPT) - 1))
def test_another_token_anywhere_in_the_prefix_is_seen(position: int) -> None:
    """A stale block or a poisoned cache: the pool holds a prefix that differs in one token."""
    other = [*PROMPT]
    other[position] += 1
    owner = OneRequest(other, [3, 5])
    owner.compute(6, samples=True)
    reader = OneRequest(PROMPT, [3, 5], provenance=owner.provenance, computed=5)
    with pytest.raises(ProvenanceError) as caught:
        reader.step(1, samples=True)
    assert (caught.value.step, caught.value.concerned[0][0]) == (0, 0)
    same = OneRequest(other, [3, 5], provenance=owner.provenance, computed=5)
    same.step(1, samples=True)


def test_blocks_in_the_wrong_order_are_seen() -> None:
    owner = OneRequest([11] * 9, [3, 5, 7])
    owner.compute(9, samples=True)
    with pytest.raises(ProvenanceError):
        OneRequest([11] * 9, [5, 3, 7], provenance=owner.provenance, computed=8).step(1, samples=True)


def test_equal_tokens_at_another_position_are_another_prefix() -> None:
    tags = token_mix(np.full(8, 11, np.int32), np.arange(8, dtype=np.int32), np.ones(8, np.int32), np.zeros(1, np.uint64))
    assert len(set(tags.tolist())) == 8
    assert token_mix(np.array([11], np.int32), np.array([0], np.int32), np.array([2], np.int32), np.zeros(1, np.uint64))[0] != tags[0]


def test_another_tenant_s_kv_is_another_prefix() -> None:
    owner = OneRequest(PROMPT, [3, 5], side=Side(cache_salt=b"a"))
    owner.compute(6, samples=True)
    with pytest.raises(ProvenanceError):
        OneRequest(PROMPT, [3, 5], provenance=owner.provenance, computed=4, side=Side(cache_salt=b"b")).step(2, samples=True)


def test_block_that_nobody_wrote_is_seen() -> None:
    with pytest.raises(ProvenanceError, match="position 3"):
        OneRequest(PROMPT, [3, 5], computed=4).step(2, samples=True)


@pytest.mark.parametrize("computed", [1, 2, 3, 5])
def test_tail_inside_a_block_is_checked(computed: int) -> None:
    provenance = Provenance(16, BLOCK_SIZE)
    if computed == 5:
        OneRequest([*PROMPT[:4], 0], [3, 9], provenance=provenance).compute(4, samples=False)
    reader = OneRequest(PROMPT, [3, 5], provenance=provenance, computed=computed)
    with pytest.raises(ProvenanceError, match=f"position {computed - 1}"):
        reader.step(1, samples=computed == 5)


@pytest.mark.parametrize("position", range(4))
def test_partly_overwritten_block_is_seen(position: int) -> None:
    """Another request wrote one position through a stale table: the block's last tag is void, whatever its other positions hold."""
    owner = OneRequest(PROMPT, [3, 5])
    owner.compute(6, samples=True)
    intruder = OneRequest([1, 2, 3, 4], [3], provenance=owner.provenance, computed=position)
    layout = run_plan(intruder.table, make_plan(0, 0, admits=[intruder._admission], blocks=[(0, [3])], rows=[Row(0, 1, 1, -1, position == 3)]))
    owner.provenance.void(layout)
    owner.provenance.set(layout)
    owner.result([21])
    with pytest.raises(ProvenanceError, match="position 3"):
        owner.step(1, samples=True)


@pytest.mark.parametrize("written", range(1, 5))
def test_write_in_the_middle_voids_what_lies_behind_it_in_the_block(written: int) -> None:
    owner = OneRequest([1, 2, 3, 4, 5], [3, 5])
    owner.compute(5, samples=True)
    OneRequest([1, 2, 3, 4, 5], [3, 5], provenance=owner.provenance).compute(written, samples=False)
    assert (owner.provenance.tags[3] != 0).tolist() == [offset < written for offset in range(4)]
    assert (owner.provenance.block_tags[3] != 0) == (written == 4)


@pytest.mark.parametrize("accepted", range(1, 5))
def test_rejected_drafts_leave_nothing_valid_behind(accepted: int) -> None:
    """Known 6, drafts at 7..9 over a block's end: after the result only what was accepted may be read, and the request itself goes on."""
    request = OneRequest(PROMPT, [3, 5, 7])
    request.compute(6, samples=True)
    request.result([21], [31, 32, 33])
    request.compute(4, samples=True)
    assert request.provenance.block_tags[5] != 0
    run = [*[31, 32, 33, 40][: accepted - 1], 50]
    request.result(run)
    layout = request.compute(1, samples=True)
    assert layout.start[0] == 6 + accepted
    after = request.provenance.tags.reshape(-1)
    behind = [request._blocks[p // 4] * 4 + p % 4 for p in range(7 + accepted, 4 * (1 + (6 + accepted) // 4))]
    assert (after[behind] == 0).all()
    request.result([51])
    request.compute(1, samples=True)


def test_reader_that_expects_a_rejected_draft_is_refused() -> None:
    """The tags of rejected drafts are those of another prefix; whoever expects what was accepted there does not find it."""
    request = OneRequest(PROMPT, [3, 5])
    request.compute(6, samples=True)
    request.result([21], [31])
    request.compute(2, samples=True)
    assert request.provenance.block_tags[5] != 0, "position 7 is the draft"
    request.result([41, 42])
    with pytest.raises(ProvenanceError, match="position 7"):
        OneRequest([*PROMPT, 21, 41, 42], [3, 5, 7], provenance=request.provenance, computed=8).step(1, samples=True)


def test_step_without_rows_reads_and_writes_nothing() -> None:
    provenance = Provenance(4, BLOCK_SIZE)
    layout = run_plan(SlotTable(TableShape(slot_count=1, length_max=8, block_size=BLOCK_SIZE)), make_plan(0, 0))
    provenance.check(layout)
    provenance.void(layout)
    provenance.set(layout)
    assert not provenance.tags.any()
