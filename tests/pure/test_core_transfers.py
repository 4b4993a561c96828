"""Hand-over between engines, on the scheduler's and the stage's books: held until ended, fetched with the source's tags, begun by a ready record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_loop import Answer, make_request, make_result, make_scheduler

from lockstep.core.provenance import VOID, Provenance
from lockstep.core.records import StepPlan, Transfer
from lockstep.core.scheduler import Scheduler
from lockstep.core.schema import FINISH_LENGTH
from lockstep.core.types import U64

SOURCE = Transfer(instance="P", epoch=0, step=3, number=7, layers=((0, 4),))


def finished(scheduler: Scheduler) -> StepPlan:
    """Request "a" (9 tokens) has sampled its only token; the plan that releases it."""
    scheduler.submit(replace(make_request("a", range(9), 1), exports=True))
    first = scheduler.plan()
    assert first is not None
    scheduler.receive(make_result(0, [Answer(0, 0, [5], FINISH_LENGTH)]))
    plan = scheduler.plan()
    assert plan is not None
    return plan


def test_export_begins_in_the_plan_that_releases_its_request_and_holds_its_blocks() -> None:
    scheduler = make_scheduler(instance="P", stage_layers=((0, 2), (2, 4)))
    plan = finished(scheduler)
    (transfer,) = plan.exports.transfers
    assert plan.releases.slots.tolist() == plan.exports.slots.slots.tolist() == [0]
    assert (transfer.instance, transfer.step, transfer.layers) == ("P", plan.step, ((0, 2), (2, 4)))
    assert plan.exports.computed.tolist() == [9]
    assert len(plan.exports.blocks[0].row(0)) == 3
    assert scheduler.pools[0].free_count == 32 - 3
    assert scheduler.transfers.take_begun() == [("a", transfer)]
    assert scheduler.transfers.take_begun() == []
    assert not scheduler.has_work


def test_export_ends_once_by_a_plan_record_that_lets_go_of_the_blocks() -> None:
    scheduler = make_scheduler()
    (transfer,) = finished(scheduler).exports.transfers
    scheduler.transfers.end(transfer.number)
    scheduler.transfers.end(transfer.number)
    scheduler.transfers.end(99)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.unexports == (transfer,)
    assert scheduler.pools[0].free_count == 32
    assert scheduler.transfers.held == ()
    assert scheduler.plan() is None
    assert scheduler.audit() == []


def test_aborted_request_exports_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.submit(replace(make_request("a", range(9), 1), exports=True))
    scheduler.plan()
    scheduler.abort("a")
    plan = scheduler.plan()
    assert plan is not None
    assert plan.exports.transfers == ()
    assert scheduler.pools[0].free_count == 32


def test_numbers_of_transfers_are_not_used_again_in_another_epoch() -> None:
    scheduler = make_scheduler()
    (first,) = finished(scheduler).exports.transfers
    scheduler.restart(1, strikes=False)
    assert scheduler.transfers.held == ()
    (second,) = finished_again(scheduler).exports.transfers
    assert second.number > first.number


def finished_again(scheduler: Scheduler) -> StepPlan:
    scheduler.submit(replace(make_request("b", range(9), 1), exports=True))
    plan = scheduler.plan()
    assert plan is not None
    generation = int(plan.rows.generations[0])
    scheduler.receive(make_result(0, [Answer(0, generation, [5], FINISH_LENGTH)]))
    plan = scheduler.plan()
    assert plan is not None
    return plan


def importing() -> tuple[Scheduler, StepPlan, int]:
    scheduler = make_scheduler()
    scheduler.submit(replace(make_request("d", range(9), 6), given=np.array([5], np.int32), transfer=SOURCE))
    plan = scheduler.plan()
    assert plan is not None
    return scheduler, plan, int(plan.admissions.values["generation"][0])


def test_import_is_an_admission_with_blocks_and_without_rows() -> None:
    """PROTOCOL.md 19."""
    scheduler, plan, _ = importing()
    assert plan.admissions.transfers == (SOURCE,)
    assert plan.admissions.values["importing"].tolist() == [1]
    assert plan.admissions.values["computed"].tolist() == [0]
    assert len(plan.rows) == 0
    assert len(plan.new_blocks.blocks.row(0)) == 3
    assert scheduler.plan() is None, "nothing more before the ready record"


@pytest.mark.parametrize("computed", [9, 4, 0])
def test_ready_record_starts_it_where_the_import_ended(computed: int) -> None:
    """At known - 1 it goes straight to decode (S3); at 0 it prefills here."""
    scheduler, _, generation = importing()
    scheduler.make_ready(generation, computed)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.ready.computed.tolist() == [computed]
    assert plan.rows.starts.tolist() == [computed]
    assert plan.rows.counts.tolist() == [10 - computed]
    assert plan.rows.samples.tolist() == [1]
    assert len(plan.new_blocks.slots) == 0, "into the same blocks"


def test_report_for_a_generation_that_has_left_is_of_no_concern() -> None:
    scheduler, _, generation = importing()
    scheduler.abort("d")
    scheduler.make_ready(generation, 9)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.ready.slots.tolist() == []
    assert plan.releases.generations.tolist() == [generation]


def test_import_is_published_once_it_is_ready_and_not_before() -> None:
    scheduler, _, generation = importing()
    scheduler.submit(make_request("e", [*range(9), 5, 1], 2))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.admissions.values["computed"].tolist() == [0], "no hit on what is being fetched"
    scheduler.receive(make_result(0))
    scheduler.make_ready(generation, 9)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.ready.generations.tolist() == [generation]
    scheduler.receive(make_result(1, [Answer(1, generation + 1, [8])]))
    scheduler.submit(make_request("f", [*range(9), 5, 1], 2))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.admissions.values["computed"].tolist() == [8]


def test_restart_drops_an_import_and_prefills_here() -> None:
    scheduler, _, generation = importing()
    scheduler.restart(1, strikes=True)
    scheduler.make_ready(generation, 9)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.admissions.transfers == (None,)
    assert plan.rows.counts.tolist() == [10]


# Tags


def tags(count: int) -> U64:
    return np.arange(100, 100 + count, dtype=np.uint64)


@pytest.mark.parametrize("count", [1, 3, 4, 9, 12])
def test_source_s_tags_are_set_as_they_came_and_nothing_behind_them_is_valid(count: int) -> None:
    """PROTOCOL.md 13: the receiver never stamps what it expects."""
    provenance = Provenance(8, 4)
    provenance.tags[:] = 7
    provenance.block_tags[:] = 7
    blocks = np.array([5, 2, 6], np.int32)
    provenance.write_source(blocks, tags(count))
    assert provenance.read(blocks, 12).tolist() == [*tags(count).tolist(), *[VOID] * (12 - count)]
    full = count // 4
    assert provenance.block_tags[blocks].tolist() == [*tags(count)[3::4].tolist(), *[VOID] * (3 - full)]
    assert provenance.tags[[0, 1, 3, 4, 7]].min() == 7
