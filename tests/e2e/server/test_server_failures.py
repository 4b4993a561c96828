"""An engine that fails: before a request, in mid-answer, for good."""

from __future__ import annotations

import json

import httpx2
import openai
import pytest
from scripted_engine import Hold, ScriptedEngine, Submission, events_of, say
from server_answers import error_of, healthy

from lockstep.core.outputs import FinishReason, TokenEvent
from lockstep.errors import CapacityError, DivergenceError, StageLostError
from lockstep.server.protocol import EngineStatus


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_engine_without_room_is_answered_by_status_even_for_a_stream(http: httpx2.Client, engine: ScriptedEngine, stream: bool) -> None:
    engine.script = lambda submission: [CapacityError("no blocks; try later")]
    answer = http.post("/v1/completions", json={"prompt": "p", "stream": stream, "n": 3})
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert error_of(answer)["message"] == "no blocks; try later"


def failing(submission: Submission) -> list[TokenEvent]:
    error = DivergenceError("slot 3 differs at step 9", step=9)
    return [*events_of(b"ab", finish=None), TokenEvent(request_id="", index=2, finish_reason=FinishReason.ERROR, error=error)]


def test_failure_in_mid_stream_is_an_event_of_its_own(http: httpx2.Client, client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda submission: failing(submission) if submission.choice == 0 else [*events_of(b"z", finish=None), Hold()]
    answer = http.post("/v1/completions", json={"prompt": "p", "stream": True, "n": 2})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "divergence"
    assert json.loads(events[-2])["error"]["message"] == "slot 3 differs at step 9"
    engine.wait_until(lambda: not engine.live)
    assert [choice for _, choice in engine.aborted] == [1]
    engine.script = failing
    with pytest.raises(openai.APIError, match="slot 3 differs"):
        list(client.completions.create(model="lock-1", prompt="p", stream=True))


def test_failure_of_a_whole_answer_is_its_status(http: httpx2.Client, engine: ScriptedEngine) -> None:
    engine.script = failing
    answer = http.post("/v1/completions", json={"prompt": "p"})
    assert answer.status_code == 500
    assert error_of(answer)["code"] == "divergence"
    engine.script = say("Hello, world")
    assert healthy(http)


def test_skipped_or_repeated_token_is_never_delivered(http: httpx2.Client, engine: ScriptedEngine) -> None:
    for index in (1, 3):
        wrong = TokenEvent(request_id="", index=index, token_ids=(98,), finish_reason=FinishReason.LENGTH)
        engine.script = lambda submission, wrong=wrong: [*events_of(b"ab", finish=None), wrong]  # type: ignore[misc]
        answer = http.post("/v1/completions", json={"prompt": "p"})
        assert answer.status_code == 500
        assert f"expected token 2 next, got token {index}" in error_of(answer)["message"]


def test_events_that_end_without_a_finish_are_an_error(http: httpx2.Client, engine: ScriptedEngine) -> None:
    engine.script = lambda submission: events_of(b"ab", finish=None)
    assert http.post("/v1/completions", json={"prompt": "p"}).status_code == 500


def test_dead_engine_gives_503_with_its_reason_everywhere(http: httpx2.Client, engine: ScriptedEngine) -> None:
    engine.state = EngineStatus(alive=False, reason="stage 1 was killed")
    for answer in (http.get("/health"), http.get("/ping"), http.get("/ready"), http.post("/v1/completions", json={"prompt": "p"})):
        assert answer.status_code == 503
        assert "stage 1 was killed" in error_of(answer)["message"]
    assert not engine.submissions
    engine.script = lambda submission: [StageLostError("stage 0 ended")]
    engine.state = EngineStatus(alive=True)
    assert http.post("/v1/completions", json={"prompt": "p"}).status_code == 503
