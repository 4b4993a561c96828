"""Every transcript in this folder says what the real parts say. `pytest tests/scenarios --rewrite` writes their answers anew."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from lockstep.core.layout import BatchLayout
from lockstep.core.provenance import Provenance
from lockstep.core.records import StepPlan
from lockstep.core.table import SlotTable
from lockstep.errors import InvalidRequestError
from lockstep.sim.parts import Parts
from lockstep.sim.scripted import NO_DRAW
from lockstep.sim.transcript import parse, play
from lockstep.sim.transcript_world import World

HERE = Path(__file__).parent
TRANSCRIPTS = sorted(HERE.glob("*.txt"))


LISTED = re.compile(r"^\| (C\d-\d\d) \| [^|]+ \| ([^|]+) \|", re.MULTILINE)
"""A row of `docs/TESTING.md`: the fault, and what shows it."""


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


def test_faults_that_are_listed_as_shown_by_a_transcript_have_it_and_no_others_do() -> None:
    rows = LISTED.findall((HERE.parents[1] / "docs" / "TESTING.md").read_text())
    shown = {fault: cell.strip("`") for fault, cell in rows if cell.startswith("`")}
    assert len(rows) == len({fault for fault, _ in rows})
    assert {cell for _, cell in rows if not cell.startswith("`")} == {"not yet", "other tests"}
    assert all(name.startswith(f"{fault}-") for fault, name in shown.items()), shown
    assert sorted(shown.values()) == [path.name for path in TRANSCRIPTS if path.name.startswith("C")]


def test_another_answer_is_found_and_rewritten_in_its_place() -> None:
    right = played("# why\nengine\n----\n\nplan\n----\n\n# end\n")
    assert right == "# why\nengine\n----\n2 stages, asynchronous, 16 blocks of 4, 8 tokens a step, 0 drafts\n\nplan\n----\nnothing to do\n\n# end\n"
    wrong = right.replace("nothing to do", "something to do")
    found = play(parse(wrong), World())
    assert (found.text, found.differs_at) == (right, 6)
    assert play(parse(right), World()).differs_at is None


class BlindProvenance(Provenance):
    def check(self, layout: BatchLayout) -> None:
        pass


class ReadsAnotherBlock(SlotTable):
    """A decode looks for the first positions in block 9."""

    def resolve(self, plan: StepPlan) -> BatchLayout:
        layout = super().resolve(plan)
        layout.block_tables[0][layout.start > 0, :1] = 9
        return layout


def test_reader_of_kv_that_is_not_its_own_draws_nothing_where_no_check_looks() -> None:
    parts = Parts(make_table=lambda shape, _replica: ReadsAnotherBlock(shape), make_provenance=lambda *given, stage: BlindProvenance(*given))
    text = "engine\n----\n\nsubmit id=A prompt=1..6 max_tokens=3 draws=11..14\n----\n\nfinish\n----\n"
    assert "A: tokens 11 12 13, length" in played(text)
    assert f"A: tokens 11 {NO_DRAW} {NO_DRAW}, length" in play(parse(text), World(parts)).text


NO_TRANSCRIPTS = (
    "plan\n----\n",
    "engine\n",
    "engine stages\n----\n",
    "engine\n----\n\nfly\n----\n",
    "tables\n----\n\nfly\n----\n",
    "engine name=P\n----\n\nplan on=D\n----\n",
    "engine name=P\n----\n\nengine name=D\n----\n\nhand id=A from=P to=D max_tokens=2\n----\n",
    "engine drafts=1\n----\n\nsubmit id=A prompt=1 max_tokens=2 draws=1,2 guesses=2\n----\n",
)


@pytest.mark.parametrize("text", NO_TRANSCRIPTS)
def test_a_text_that_is_no_transcript_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        played(text)
