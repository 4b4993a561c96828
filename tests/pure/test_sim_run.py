"""What a simulated run is: the same every time, right without faults, and red where a rule is broken."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.core.provenance import Provenance
from lockstep.core.scheduler import Scheduler
from lockstep.core.table import SlotTable, TableShape
from lockstep.runtime.transport.numbers import LinkNumbers, Verdict
from lockstep.sim.drawing import draw
from lockstep.sim.log import Log
from lockstep.sim.parts import Parts
from lockstep.sim.rig import plain_table
from lockstep.sim.scenario import Abort, Ask, EngineShape, Fault, Scenario
from lockstep.sim.shrink import shrink
from lockstep.sim.simulation import Outcome, run
from lockstep.sim.story import tell


def engine(**changes: Any) -> EngineShape:
    """Two stages, asynchronous, room for everybody."""
    settings: dict[str, Any] = {
        "stage_count": 2,
        "asynchronous": True,
        "block_size": 4,
        "block_count": 40,
        "slot_count": 4,
        "token_budget": 8,
        "microbatch_count": 2,
        "prefix_caching": True,
        "priorities": False,
        "drafts_max": 0,
        "work_s": (0.01, 0.01),
    }
    return EngineShape(**{**settings, **changes})


def ask(number: int, **changes: Any) -> Ask:
    settings: dict[str, Any] = {"name": f"r{number}", "prompt": tuple(range(5 + number)), "tokens_max": 8, "seed": 100 + number, "at": 0.0}
    return Ask(**{**settings, **changes})


def scenario(*faults: Fault, engines: tuple[EngineShape, ...] = (), asks: tuple[Ask, ...] = (), **changes: Any) -> Scenario:
    return Scenario(seed=7, engines=engines or (engine(),), asks=asks or tuple(ask(i) for i in range(4)), faults=faults, **changes)


def checked(what: Scenario, parts: Parts | None = None) -> Outcome:
    outcome = run(what, parts)
    assert outcome.failures == (), outcome.failures
    return outcome


@pytest.mark.parametrize("seed", [3, 10, 17])
def test_same_seed_is_the_same_run(seed: int) -> None:
    first, second, other = (run(draw(s), log=Log()).log for s in (seed, seed, seed + 1))
    assert first == second != other


def test_scenario_is_data() -> None:
    for seed in range(20):
        drawn = draw(seed)
        assert Scenario.of_json(json.loads(json.dumps(drawn.as_json()))) == drawn


def test_bytes_on_the_links_change_nothing() -> None:
    plain = scenario(Fault(kind="crash", at=0.05, target=1))
    assert run(plain, log=Log()).log == run(replace(plain, framed=True), log=Log()).log


# Faults take effect, and what notices them


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize(
    ("kind", "seen_as"),
    [
        ("crash", ["StageLostError"]),
        ("stall", ["StalledError"]),
        ("slow", []),
        ("link-late", []),
        ("link-drop", ["LinkError"]),
        ("link-duplicate", ["LinkError"]),
        ("link-reorder", ["LinkError"]),
        ("link-damage", ["LinkError"]),
    ],
)
def test_fault_is_noticed_as_what_it_is_and_ends_nobody(kind: str, seen_as: list[str], framed: bool) -> None:
    """target, other: of a link, from stage 0 to stage 1."""
    outcome = checked(scenario(Fault(kind=kind, at=0.05, target=0, other=1), framed=framed))
    assert [detection.check for detection in outcome.detections] == seen_as
    assert [cell for cell in outcome.coverage if cell.startswith(f"{kind} / ")]


def test_crash_while_recovering_from_a_crash_ends_nobody() -> None:
    outcome = checked(scenario(Fault(kind="crash", at=0.05, target=0), Fault(kind="crash", at=0.07, phase="recovering", target=1)))
    assert outcome.coverage["crash / recovering / async"] == 1
    assert outcome.counts["restarts"] == 2


def test_poison_ends_itself_and_nobody_else() -> None:
    outcome = checked(scenario(Fault(kind="poison", at=0.0, target=1, other=2, request="r1")))
    assert {detection.check for detection in outcome.detections} == {"StageLostError"}
    assert outcome.counts["restarts"] >= 3


@pytest.mark.parametrize("target", [-1, 0, 1])
@pytest.mark.parametrize("what", ["token", "block", "seed", "computed", "known", "cap", "temperature"])
def test_changed_state_of_one_replica_is_noticed(what: str, target: int) -> None:
    """On the driver's replica or a stage's; `run` fails if a wrong token got out or an innocent request was ended."""
    phase = "prefill" if what in ("token", "computed") else "decode"
    chunks = engine(token_budget=3)
    for at in (0.03, 0.06, 0.09, 0.12):
        fault = Fault(kind=f"flip-{what}", at=at, phase=phase, target=target)
        outcome = checked(scenario(fault, engines=(chunks,), asks=tuple(ask(i, prompt=tuple(range(i, 20)), temperature=1.0) for i in range(4))))
        if outcome.detections:
            return
    raise AssertionError("no such change was noticed")


@pytest.mark.parametrize("other", [-1, 0])
def test_changed_draft_at_one_receiver_is_noticed(other: int) -> None:
    asks = tuple(ask(i, drafter="good", tokens_max=12) for i in range(3))
    outcome = checked(scenario(Fault(kind="flip-draft", at=0.0, target=1, other=other), engines=(engine(drafts_max=3),), asks=asks))
    assert [detection.check for detection in outcome.detections] == ["DivergenceError"]


@pytest.mark.parametrize("target", [0, 1])
def test_kv_of_another_owner_is_noticed_by_its_tags(target: int) -> None:
    outcome = checked(scenario(Fault(kind="foreign-kv", at=0.08, phase="decode", target=target)))
    assert [detection.check for detection in outcome.detections] == ["ProvenanceError"]


# Requests come, go and move


@pytest.mark.parametrize("phase", ["waiting", "prefill", "in flight", "finishing"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_abort_in_each_phase_and_again_under_the_same_name(phase: str, asynchronous: bool) -> None:
    one_by_one = engine(asynchronous=asynchronous, slot_count=2, token_budget=3)
    asks = (ask(0), ask(1, prompt=tuple(range(9)), abort=Abort(at=0.0, phase=phase, again_after=0.0)), ask(2), ask(3))
    outcome = checked(scenario(engines=(one_by_one,), asks=asks))
    assert outcome.coverage[f"abort-again / {phase} / {'async' if asynchronous else 'sync'}"] == 1


@pytest.mark.parametrize("counts", [(1, 3), (4, 2)])
def test_prefilled_requests_move_to_an_engine_of_another_split(counts: tuple[int, int]) -> None:
    engines = tuple(engine(stage_count=count, microbatch_count=count, work_s=(0.01,) * count) for count in counts)
    outcome = checked(scenario(engines=engines))
    assert (outcome.counts["imports"], outcome.counts["imports_failed"]) == (4, 0)


@pytest.mark.parametrize("kind", ["kv-pull-lost", "kv-part-lost", "kv-part-late"])
def test_lost_or_late_kv_is_prefilled_where_it_did_not_come(kind: str) -> None:
    outcome = checked(scenario(Fault(kind=kind, at=0.0), engines=(engine(), engine())))
    assert outcome.counts["imports_failed"] == 1


def test_foreign_kv_from_another_engine_ends_the_request_that_got_it() -> None:
    """PROTOCOL.md 13: the source's own tags come with it."""
    outcome = checked(scenario(Fault(kind="kv-part-foreign", at=0.0, engine=1), engines=(engine(stage_count=1, microbatch_count=1), engine())))
    assert [(detection.check, len(detection.concerned)) for detection in outcome.detections] == [("ProvenanceError", 1)]


def test_source_that_crashes_while_kv_is_fetched_costs_a_local_prefill() -> None:
    engines = (engine(), engine(work_s=(0.03, 0.03)))
    outcome = checked(scenario(Fault(kind="crash", at=0.06, target=0), Fault(kind="crash", at=0.08, target=1), engines=engines, link_s=0.01))
    assert outcome.counts["restarts"] == 2


def test_small_pool_preempts() -> None:
    assert checked(scenario(engines=(engine(block_count=5),))).counts["preemptions"] > 0


@pytest.mark.parametrize("drafter", ["perfect", "good", "random", "wrong", "right-then-wrong"])
def test_drafts_change_the_number_of_steps_and_no_token(drafter: str) -> None:
    plain, drafted = (
        checked(scenario(engines=(engine(drafts_max=most),), asks=tuple(ask(i, drafter=drafter, tokens_max=12) for i in range(3)))) for most in (0, 4)
    )
    assert drafted.steps < plain.steps if drafter == "perfect" else drafted.steps != 0


# It can fail


class AppliesLateResults(SlotTable):
    """Results go to whoever holds the slot now."""

    def _holds(self, slots: Any, generations: Any) -> Any:
        return self.columns["generation"][slots] >= 0


class PublishesEarly(Scheduler):
    """A prefix is hit in the plan that computes it."""

    def _try_prefill(self, request: Any, build: Any) -> bool:
        done = super()._try_prefill(request, build)
        self.book.publish(request)
        return done


class LooksAtNothing(Provenance):
    def check(self, layout: Any) -> None:
        pass


class SeesNoGap(LinkNumbers):
    def accept(self, source: int, epoch: int, number: int) -> Verdict:
        verdict = super().accept(source, epoch, self._next.get(source, 0))
        return verdict


class ForgetsPreempted(Scheduler):
    """A preempted request keeps its blocks' references."""

    def _release(self, request: Any, build: Any) -> None:
        if not request.finished:
            self.book.hold(request, 1)
        super()._release(request, build)


def late_table(shape: TableShape, _replica: int) -> SlotTable:
    return AppliesLateResults(shape)


BROKEN = {
    "late results are applied": Parts(make_table=late_table),
    "published too early": Parts(make_scheduler=PublishesEarly),
    "blocks leak": Parts(make_scheduler=ForgetsPreempted),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_part_is_found_within_sixty_seeds(name: str) -> None:
    assert any(run(draw(seed), BROKEN[name]).failures for seed in range(60))


@pytest.mark.parametrize(
    ("parts", "fault", "kind"),
    [
        (
            Parts(make_provenance=lambda *given, stage: LooksAtNothing(*given)),
            Fault(kind="foreign-kv", at=0.08, phase="decode", target=1),
            "wrong tokens",
        ),
        (Parts(make_numbers=SeesNoGap), Fault(kind="link-duplicate", at=0.05, target=1, other=0), "unexplained"),
    ],
)
def test_check_that_is_left_out_is_missed(parts: Parts, fault: Fault, kind: str) -> None:
    assert run(scenario(fault), parts).failures[0].kind == kind


def test_failing_run_is_made_smaller_and_told() -> None:
    parts = BROKEN["blocks leak"]
    seed = next(seed for seed in range(100) if run(draw(seed), parts).failures)
    kind = run(draw(seed), parts).failures[0].kind
    small = shrink(draw(seed), kind, parts)
    assert len(small.asks) < len(draw(seed).asks)
    outcome, text = tell(small, parts)
    assert outcome.failures[0].kind == kind
    assert f"# seed {seed}" in text
    assert text.splitlines()[-1].startswith(kind)


def test_wrong_token_is_not_let_through() -> None:
    """The oracle's own check: a stage that draws otherwise on every replica alike is seen by nobody else."""

    def other_draw(layout: Any, sampled: Any, **others: Any) -> Any:
        from lockstep.core.acceptance import accept

        return accept(layout, np.asarray((sampled + 1) % 300, np.int32), **others)

    failures = run(scenario(), Parts(make_table=plain_table, accept=other_draw)).failures
    assert {failure.kind for failure in failures} == {"wrong tokens"}
