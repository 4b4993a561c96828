"""Grammars between driver and stages (PROTOCOL.md 26): asked for once an epoch, waited for, forgotten; one that does not compile ends requests."""

from __future__ import annotations

from core_loop import make_request

from lockstep.core.outputs import FinishReason, TokenEvent
from lockstep.core.records import Side
from lockstep.core.request import EngineRequest
from lockstep.core.shaping import Shaping
from lockstep.errors import InvalidRequestError
from lockstep.runtime.driver import GRAMMARS_KNOWN, Driver
from lockstep.runtime.messages import GrammarReport
from lockstep.sim.rig import Rig, RigConfig


def structured(name: str, grammar: str) -> EngineRequest:
    return make_request(name, [1, 2, 3], 4, side=Side(shaping=Shaping(grammar=grammar)))


def asked(driver: Driver) -> list[str]:
    return [request.source for request in driver.take_grammars()]


def report(driver: Driver, grammar: str, error: str = "") -> list[TokenEvent]:
    events: list[TokenEvent] = []
    driver.receive(GrammarReport(epoch=driver.epoch, key=Shaping(grammar=grammar).grammar_key, error=error), events)
    return events


def test_a_grammar_is_asked_for_once_and_its_requests_wait_for_it() -> None:
    driver = Rig(RigConfig()).driver
    for name, grammar in (("a", "g"), ("b", "g"), ("c", "h")):
        driver.submit(structured(name, grammar))
    assert asked(driver) == ["g", "h"]
    assert asked(driver) == []
    assert driver.next_plan() is None
    assert report(driver, "g") == []
    plan = driver.next_plan()
    assert plan is not None
    assert len(plan.admissions.slots) == 2
    driver.restart(1, (), strikes=False)
    assert asked(driver) == ["g", "h"]
    assert driver.next_plan() is None


def test_a_grammar_that_does_not_compile_ends_its_requests_and_nobody_else() -> None:
    driver = Rig(RigConfig()).driver
    for name, grammar in (("a", "g"), ("b", "h"), ("c", "g")):
        driver.submit(structured(name, grammar))
    events = report(driver, "g", "it is too long")
    assert [(event.request_id, event.finish_reason) for event in events] == [("a", FinishReason.ERROR), ("c", FinishReason.ERROR)]
    assert all(isinstance(event.error, InvalidRequestError) and "it is too long" in str(event.error) for event in events)
    assert driver.scheduler.request_ids == ("b",)
    driver.abort("b")
    assert driver.audit() == []


def test_grammars_that_no_live_request_has_are_forgotten_and_asked_for_again() -> None:
    driver = Rig(RigConfig()).driver
    driver.submit(structured("kept", "kept"))
    report(driver, "kept")
    for i in range(GRAMMARS_KNOWN + 1):
        driver.submit(structured(f"r{i}", f"g{i}"))
        report(driver, f"g{i}")
        driver.abort(f"r{i}")
    asked(driver)
    driver.submit(structured("again", "g0"))
    driver.submit(structured("also", "kept"))
    assert asked(driver) == ["g0"]
    assert len(driver.scheduler.grammars) < GRAMMARS_KNOWN
