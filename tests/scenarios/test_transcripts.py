"""Every transcript in this folder says what the real parts say. `pytest tests/scenarios --rewrite` writes their answers anew."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from lockstep.errors import InvalidRequestError
from lockstep.sim.transcript import parse, play
from lockstep.sim.transcript_world import World

HERE = Path(__file__).parent
TRANSCRIPTS = sorted(HERE.glob("*.txt"))


def played(text: str) -> str:
    return play(parse(text), World(), through_errors=True).text


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript_reads_as_the_real_parts_answer(path: Path, rewrites: bool) -> None:
    before = path.read_text()
    after = played(before)
    if rewrites:
        path.write_text(after)
        return
    difference = "\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), "written", "answered", lineterm="", n=6))
    assert before == after, f"{path.name}:\n{difference}"


@pytest.mark.parametrize("fault", ["S1", "S2", "S3", "S4"])
def test_each_of_the_four_faults_has_a_transcript(fault: str) -> None:
    assert any(path.name.startswith(f"{fault}-") for path in TRANSCRIPTS)


def test_another_answer_is_found_and_rewritten_in_its_place() -> None:
    right = played("# why\nengine\n----\n\nplan\n----\n\n# end\n")
    assert right == "# why\nengine\n----\n2 stages, asynchronous, 16 blocks of 4, 8 tokens a step, 0 drafts\n\nplan\n----\nnothing to do\n\n# end\n"
    wrong = right.replace("nothing to do", "something to do")
    found = play(parse(wrong), World())
    assert (found.text, found.differs_at) == (right, 6)
    assert play(parse(right), World()).differs_at is None


@pytest.mark.parametrize("text", ["plan\n----\n", "engine\n", "engine stages\n----\n", "engine\n----\n\nfly\n----\n", "tables\n----\n\nfly\n----\n"])
def test_a_text_that_is_no_transcript_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        played(text)
