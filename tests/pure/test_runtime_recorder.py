"""The recorder keeps enough, writes files that are private, whole and within their cap, and a replay of them says where replicas parted."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import re
import stat
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_runs import SALT, RecordedRun

from lockstep.core.digest import Digest
from lockstep.core.table import SlotTable
from lockstep.errors import CallerError, DivergenceError, InternalError, LogError, ProvenanceError, StalledError
from lockstep.runtime.recorder import Recorder, file_name
from lockstep.runtime.recording import _FRAME, VERSION, Recording, read, to_bytes
from lockstep.runtime.replay import Replica
from lockstep.runtime.retrace import compare, retrace

STALLED = StalledError("no result for 30 s: stage 1 waits for activations of step 12 from stage 0")


def dump(recorder: Recorder, folder: Path, *, incident: str, with_tokens: bool = False, **what: Any) -> Path | None:
    return recorder.save(recorder.take(incident=incident, **what), folder / file_name(incident), with_tokens=with_tokens)


def dumped(run: RecordedRun, folder: Path, *, error: Exception = STALLED, with_tokens: bool = False, incident: str = "i1") -> Path:
    step = getattr(error, "step", -1)
    columns = run.columns_at(step) if step >= 0 else {}
    path = dump(run.recorder, folder, incident=incident, error=error, unresolved=tuple(run.unresolved), columns=columns, with_tokens=with_tokens)
    assert path is not None
    return path


def diverged(tamper_step: int, rank: int, change: str, **settings: int) -> tuple[RecordedRun, DivergenceError]:
    """A run in which one rank's column of one held slot is changed before a step, until digests differ."""
    hit: list[int] = []

    def tamper(step: int, at: int, table: SlotTable) -> None:
        if step >= tamper_step and at == rank and not hit:
            waiting = [slot for slot in table.held_slots() if table.columns["finished"][slot] == 0]
            hit.extend(waiting[:1])
            for slot in hit:
                if change == "blocks":
                    table.blocks[0, slot, 0] += 1
                else:
                    table.columns[change][slot] += 1

    run = RecordedRun(tamper=tamper, **settings)
    with pytest.raises(DivergenceError) as caught:
        run.run()
    return run, caught.value


# What is kept


@pytest.mark.parametrize("steps", [0, 1, 7, 8, 9, 16, 17, 30, 40])
def test_the_last_steps_can_always_be_replayed(steps: int, tmp_path: Path) -> None:
    run = RecordedRun(steps_kept=8, requests=20).run(steps)
    assert len(run.digests) == steps
    recording = read(dumped(run, tmp_path))
    kept = [entry.plan.step for entry in recording.entries]
    assert kept == list(range(steps - len(kept), steps))
    assert len(kept) == steps if steps < 16 else 8 <= len(kept) <= 16
    found = retrace(recording)
    assert found.finding is None
    assert found.reached >= steps - 1


def test_recorder_holds_no_more_than_twice_the_steps() -> None:
    run = RecordedRun(steps_kept=4, requests=30)
    while run.turn():
        assert sum(len(span.entries) for span in run.recorder._spans) <= 8
    assert len(run.digests) > 40


def test_a_new_epoch_forgets_the_former(tmp_path: Path) -> None:
    run = RecordedRun().run(12)
    run.recorder.begin(7, Replica(SlotTable(run.shape), Digest(7)))
    path = dump(run.recorder, tmp_path, incident="new", error=STALLED)
    assert path is not None
    recording = read(path)
    assert (recording.head.epoch, recording.entries, recording.start.table.next_step) == (7, (), 0)


def test_plan_in_which_the_driver_itself_fails_is_recorded_and_fails_again(tmp_path: Path) -> None:
    run = RecordedRun().run(10)
    while not run.unresolved:
        plan = run.scheduler.plan()
        assert plan is not None
        run.unresolved.append(plan)
    plan = run.unresolved.popleft()
    broken = dataclasses.replace(plan, rows=dataclasses.replace(plan.rows, generations=plan.rows.generations + 1))
    run.unresolved.clear()
    run.recorder.before(broken, run.driver)
    with pytest.raises(LogError) as caught:
        run.driver.run(broken)
    recording = read(dumped(run, tmp_path, error=caught.value, with_tokens=True))
    assert [plan.step for plan in recording.unresolved] == [10]
    finding = retrace(recording).finding
    assert finding is not None
    assert finding.step == 10
    assert str(caught.value) in finding.lines[0]


# Replaying


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("change", ["seed", "blocks", "length_cap", "side_hash", "prompt_length"])
def test_replay_names_step_column_and_request_of_a_divergence(change: str, with_tokens: bool, tmp_path: Path) -> None:
    run, error = diverged(11, 1, change)
    found = retrace(read(dumped(run, tmp_path, error=error, with_tokens=with_tokens)))
    assert found.finding is not None
    assert found.finding.step == error.step >= 11
    assert found.finding.lines[0] == "digests differ from the driver's: stage 1"
    column = {"seed": "sampling.seed", "blocks": "block_tables0"}.get(change, change)
    assert any(f"layout.{column} of slot" in line and "on stage 1" in line for line in found.finding.lines)
    assert not any("on stage 0" in line or "on the driver" in line for line in found.finding.lines)
    assert len(found.finding.slots) == 1


def test_values_are_true_with_tokens_and_hashed_without(tmp_path: Path) -> None:
    """A token of stage 1's layout is another: both values are in the words, or hashes of both."""
    run, error = diverged(11, 1, "seed")
    columns = run.columns_at(error.step)
    changed = columns[1]["layout.token_ids"].copy()
    true = int(changed[0])
    changed[0] ^= 1
    columns[1] = {**columns[1], "layout.token_ids": changed}
    lines = []
    for with_tokens in (True, False):
        text = f"layout.token_ids of slot 2 generation 3 at position 12 is {true} here and {true ^ 1} there"
        failure = DivergenceError(text, step=error.step)
        path = dump(run.recorder, tmp_path, incident=f"{with_tokens}", error=failure, columns=columns, with_tokens=with_tokens)
        assert path is not None
        recording = read(path)
        finding = retrace(recording).finding
        assert finding is not None
        lines.append(next(line for line in finding.lines if "layout.token_ids" in line))
        assert "slot 2 generation 3 at position 12 is" in recording.head.error_text
        a, b = recording.head.error_text.split(" is ")[1].replace(" there", "").split(" here and ")
        assert lines[-1].split(" is ")[1] == f"{a} in the replay and {b} on stage 1", "the message and the replay speak of one value"
    assert f"is {true} in the replay and {true ^ 1} on stage 1" in lines[0]
    assert str(true) not in lines[1].split(" is ")[1].split()


def test_table_of_the_driver_that_changed_outside_the_log_is_said(tmp_path: Path) -> None:
    run = RecordedRun().run(10)
    slot = next(slot for slot in run.driver.table.held_slots() if run.driver.table.columns["finished"][slot] == 0)
    run.driver.table.columns["seed"][slot] += np.uint64(1)
    with pytest.raises(DivergenceError) as caught:
        run.run()
    for with_tokens in (True, False):
        recording = read(dumped(run, tmp_path, error=caught.value, with_tokens=with_tokens))
        assert recording.head.departs == caught.value.step
        finding = retrace(recording).finding
        assert finding is not None
        assert finding.step == caught.value.step
        assert any("changed outside the log" in line for line in finding.lines)
        assert any("on the driver" in line for line in finding.lines)


def test_step_that_a_rank_refused_is_replayed_from_plans_without_a_result(tmp_path: Path) -> None:
    """The failing step has no result; its columns still show where the rank went wrong."""
    run, error = diverged(11, 1, "seed")
    columns = run.columns_at(error.step)
    spans = run.recorder._spans
    plan, _, _ = spans[-1].entries.pop()
    path = dump(run.recorder, tmp_path, incident="x", error=error, unresolved=[plan, *run.unresolved], columns={1: columns[1]})
    assert path is not None
    found = retrace(read(path))
    assert found.finding is not None
    assert (found.finding.step, found.reached >= error.step) == (error.step, True)
    assert "layout.sampling.seed" in found.finding.lines[0]


def test_plans_that_the_driver_ran_after_a_failure_are_kept(tmp_path: Path) -> None:
    """To explain a failure it runs on to the failing step, without results; so often as not a span is full there."""
    for steps in range(4, 12):
        run = RecordedRun(steps_kept=4).run(steps)
        while (plan := run.scheduler.plan()) is not None:
            run.unresolved.append(plan)
        ahead = [plan for plan in run.unresolved if run.driver.can_run(plan)]
        assert ahead
        for plan in ahead:
            run.recorder.before(plan, run.driver)
            run.driver.run(plan)
            run.unresolved.popleft()
        recording = read(dumped(run, tmp_path))
        assert [plan.step for plan in recording.unresolved] == [plan.step for plan in (*ahead, *run.unresolved)]
        found = retrace(recording)
        assert (found.finding, found.reached) == (None, ahead[-1].step)


def test_failure_outside_the_log_is_found_at_its_step(tmp_path: Path) -> None:
    """The replay goes through where the engine stopped."""
    run = RecordedRun().run(10)
    while (plan := run.scheduler.plan()) is not None:
        run.unresolved.append(plan)
    steps = {4: "the replay goes on", run.unresolved[0].step: "the replay goes on", run.unresolved[-1].step + 1: "do not reach so far"}
    for step, words in steps.items():
        finding = retrace(read(dumped(run, tmp_path, error=ProvenanceError("KV of another prefix", step=step)))).finding
        assert finding is not None
        assert (finding.step, finding.lines[0].startswith("the engine stopped here with ProvenanceError")) == (step, True)
        assert words in finding.lines[0]


def test_changed_entry_is_seen_in_a_replay(tmp_path: Path) -> None:
    recording = read(dumped(RecordedRun().run(12), tmp_path))
    entries = list(recording.entries)
    entries[6] = dataclasses.replace(entries[6], replayed=0)
    finding = retrace(dataclasses.replace(recording, entries=tuple(entries))).finding
    assert finding is not None
    assert finding.step == entries[6].plan.step
    digests = np.append(entries[7].result.digests, np.uint64(1))
    more = dataclasses.replace(entries[7], result=dataclasses.replace(entries[7].result, digests=digests))
    finding = retrace(dataclasses.replace(recording, entries=(*recording.entries[:7], more))).finding
    assert finding is not None
    assert finding.lines[0] == "the result brought 3 digests, there are 2 ranks"


# Two recordings


def test_recordings_of_one_run_agree(tmp_path: Path) -> None:
    for with_tokens in (False, True):
        a, b = RecordedRun().run(20), RecordedRun().run(26)
        found = compare(
            read(dumped(a, tmp_path, with_tokens=with_tokens, incident="a")), read(dumped(b, tmp_path, with_tokens=with_tokens, incident="b"))
        )
        assert found.finding is None
        assert found.reached >= 19
        assert any("not compared" in note for note in found.notes) is not with_tokens


def test_first_step_at_which_two_recordings_differ_is_named(tmp_path: Path) -> None:
    a, b = RecordedRun().run(12), RecordedRun().run(9)
    next_plan = b.unresolved[0] if b.unresolved else b.scheduler.plan()
    assert next_plan is not None
    changed = dataclasses.replace(next_plan, rows=dataclasses.replace(next_plan.rows, counts=next_plan.rows.counts + 1))
    path = dump(b.recorder, tmp_path, incident="b", error=STALLED, unresolved=[changed])
    assert path is not None
    finding = compare(read(dumped(a, tmp_path, incident="a")), read(path)).finding
    assert finding is not None
    assert finding.step == 9
    assert "plan.rows.counts" in finding.lines[0]
    assert finding.slots


def test_tokens_of_two_recordings_are_compared_only_if_both_have_them(tmp_path: Path) -> None:
    run = RecordedRun().run(12)
    true, hashed = (read(dumped(run, tmp_path, with_tokens=with_tokens)) for with_tokens in (True, False))
    entry = next(entry for entry in true.entries if len(entry.result.tokens.values))
    tokens = dataclasses.replace(entry.result.tokens, values=entry.result.tokens.values + 1)
    other = dataclasses.replace(entry, result=dataclasses.replace(entry.result, tokens=tokens))
    changed = dataclasses.replace(true, entries=tuple(other if e is entry else e for e in true.entries))
    finding = compare(true, changed).finding
    assert finding is not None
    assert (finding.step, "tokens of slot" in finding.lines[0]) == (entry.plan.step, True)
    assert compare(hashed, changed).finding is None


def test_recordings_without_a_common_step_are_refused(tmp_path: Path) -> None:
    early, late = RecordedRun().run(4), RecordedRun(steps_kept=4).run(40)
    with pytest.raises(CallerError, match="no step in common"):
        compare(read(dumped(early, tmp_path, incident="a")), read(dumped(late, tmp_path, incident="b")))


# Privacy


def unpacked(path: Path) -> bytes:
    return zlib.decompress(path.read_bytes().partition(b"\n")[2])


def runs_of_three(prompts: list[list[int]]) -> list[bytes]:
    """Three ids in a row, as arrays hold them, of every prompt."""
    return [np.array(prompt[i : i + 3], "<i4").tobytes() for prompt in prompts for i in range(len(prompt) - 2)]


def test_token_ids_are_in_a_file_only_on_request(tmp_path: Path) -> None:
    run, error = diverged(12, 1, "seed", steps_kept=64)
    runs = runs_of_three(run.prompts)
    generated = [request.tokens[: request.known].tolist() for request in run.scheduler._running]
    with_tokens, without = (unpacked(dumped(run, tmp_path, error=error, with_tokens=kept, incident=f"{kept}")) for kept in (True, False))
    assert sum(part in with_tokens for part in runs) > 30
    assert not any(part in without for part in itertools.chain(runs, runs_of_three(generated)))
    for secret in (SALT, b"a secret grammar", b"a secret argument", b"a secret reason"):
        assert secret in with_tokens
        assert secret not in without


def test_snapshot_of_a_file_without_them_has_no_token_either(tmp_path: Path) -> None:
    run = RecordedRun(steps_kept=4).run(14)
    true, hashed = (read(dumped(run, tmp_path, with_tokens=kept)).start.table for kept in (True, False))
    for name, least in (("tokens", 20), ("drafts", 2)):
        a, b = getattr(true, name).values, getattr(hashed, name).values
        assert len(a) == len(b) >= least
        assert not (a == b).any()
    assert not any(set(a.stop_ids) & set(b.stop_ids) for a, b in zip(true.sides, hashed.sides, strict=True))
    assert not any(
        part in unpacked(tmp_path / "i1.lockstep") for part in runs_of_three([true.tokens.row(i).tolist() for i in range(len(true.tokens))])
    )


def words_of(recording: Recording) -> set[int]:
    """Every 64-bit word that is made of tokens: tags, side hashes, salts, digests."""
    words = {recording.start.digest}
    for entry in recording.entries:
        admitted = entry.plan.admissions.values
        for name in ("side_hash", "kv_salt"):
            words.update(admitted[name].tolist() if admitted else [])
        words.update([entry.digest, entry.replayed or 0, *entry.result.digests.tolist()])
    for sent in recording.columns:
        for name in ("layout.tags", "layout.block_tags", "layout.tail_tags", "layout.side_hash"):
            words.update(sent.columns[name].reshape(-1).tolist())
    return words - {0}


def test_nothing_made_of_tokens_by_a_known_rule_is_in_a_file_without_them(tmp_path: Path) -> None:
    """Whoever knows the rule could try token ids until the word comes out."""
    run, error = diverged(11, 1, "seed")
    true, hashed = (read(dumped(run, tmp_path, error=error, with_tokens=kept)) for kept in (True, False))
    assert len(words_of(true)) > 30
    assert words_of(true) & words_of(hashed) == set()


def test_two_files_of_one_run_have_different_hashes(tmp_path: Path) -> None:
    run = RecordedRun().run(12)
    one, other = (read(dumped(run, tmp_path)) for _ in range(2))
    a, b = (np.concatenate([entry.plan.admissions.tokens.values for entry in recording.entries]) for recording in (one, other))
    assert len(a) > 20
    assert not (a == b).any()


def test_message_of_an_error_keeps_places_and_loses_values(tmp_path: Path) -> None:
    run = RecordedRun().run(3)
    secret = LogError("slots [1 2] generation 7 at position 12: tokens [4711, 4712] tag 0x00000000deadbeef, temperature 0.7", step=3)
    path = dump(run.recorder, tmp_path, incident="x", error=secret)
    assert path is not None
    text = read(path).head.error_text
    assert text.startswith("slots [1 2] generation 7 at position 12: tokens [")
    assert "temperature 0.7" in text
    assert not {"4711", "4712", "0x00000000deadbeef"} & set(re.findall(r"\w+", text))
    path = dump(run.recorder, tmp_path, incident="y", error=STALLED)
    assert path is not None
    assert read(path).head.error_text == str(STALLED)


# Files


def test_file_and_folder_are_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = dumped(RecordedRun().run(3), tmp_path / "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["i1.lockstep"]


def test_oldest_recordings_make_room_and_the_newest_stays(tmp_path: Path) -> None:
    run = RecordedRun().run(12)
    probe = dumped(run, tmp_path, incident="probe")
    size = probe.stat().st_size
    probe.unlink()
    recorder = Recorder(rank_count=2, bytes_max=size * 5 // 2)
    recorder.begin(0, Replica(SlotTable(run.shape), Digest(0)))
    recorder._spans = run.recorder._spans
    (tmp_path / "kept.txt").write_bytes(b"x" * 10 * size)
    for age, name in enumerate("abcd"):
        path = dump(recorder, tmp_path, incident=name, error=STALLED)
        assert path is not None
        os.utime(path, ns=(age + 1, age + 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.lockstep", "d.lockstep", "kept.txt"]
    tiny = Recorder(rank_count=2, bytes_max=1)
    tiny.begin(0, Replica(SlotTable(run.shape), Digest(0)))
    assert dump(tiny, tmp_path, incident="e", error=STALLED) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.lockstep", "kept.txt"]


def test_incident_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    path = dumped(RecordedRun().run(3), tmp_path / "in", incident="../out/x")
    assert path.parent == tmp_path / "in"


def test_recording_that_cannot_be_written_is_logged_and_hides_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    run = RecordedRun().run(3)
    with caplog.at_level(logging.ERROR):
        assert dump(run.recorder, tmp_path / "file", incident="i9", error=STALLED) is None
    with pytest.raises(InternalError, match="nothing is recorded"):
        Recorder(rank_count=1).take(incident="i10", error=STALLED)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["incident i9"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    run, error = diverged(11, 1, "seed")
    for with_tokens in (False, True):
        path = dumped(run, tmp_path, error=error, with_tokens=with_tokens)
        assert to_bytes(read(path)) == path.read_bytes()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return dumped(RecordedRun().run(6), tmp_path_factory.mktemp("written")).read_bytes()


def refused(data: bytes, path: Path) -> str:
    path.write_bytes(data)
    with pytest.raises(CallerError) as caught:
        retrace(read(path))
    return str(caught.value)


def test_truncated_file_is_refused(written: bytes, tmp_path: Path) -> None:
    for length in [*range(0, len(written), 97), len(written) - 5, len(written) - 1]:
        message = refused(written[:length], tmp_path / "x.lockstep")
        assert "is damaged" in message or "is not a recording" in message or "has format" in message


def test_a_damaged_byte_is_noticed_or_changes_nothing(written: bytes, tmp_path: Path) -> None:
    """A few bits of a compressed stream are padding."""
    path, noticed, places = tmp_path / "x.lockstep", 0, range(0, len(written), 41)
    for at in places:
        path.write_bytes(written[:at] + bytes([written[at] ^ 4]) + written[at + 1 :])
        try:
            assert to_bytes(read(path)) == written
        except CallerError:
            noticed += 1
    assert noticed >= len(places) - 3


def test_damage_under_the_compression_is_noticed(written: bytes, tmp_path: Path) -> None:
    line, _, packed = written.partition(b"\n")
    body = zlib.decompress(packed)
    for at in range(0, len(body), 211):
        damaged = body[:at] + bytes([body[at] ^ 4]) + body[at + 1 :]
        assert "is damaged" in refused(line + b"\n" + zlib.compress(damaged), tmp_path / "x.lockstep")
    for cut in (1, 20, len(body) // 2):
        assert "is damaged" in refused(line + b"\n" + zlib.compress(body[:-cut]), tmp_path / "x.lockstep")


def test_file_that_lacks_a_frame_is_refused(written: bytes, tmp_path: Path) -> None:
    line, _, packed = written.partition(b"\n")
    body, frames, at = zlib.decompress(packed), [], 0
    while at < len(body):
        end = at + _FRAME.size + _FRAME.unpack_from(body, at)[2]
        frames.append(body[at:end])
        at = end
    assert len(frames) == 2 + 6 + 1
    for dropped in range(len(frames)):
        rest = b"".join(frame for i, frame in enumerate(frames) if i != dropped)
        assert "it should hold" in refused(line + b"\n" + zlib.compress(rest), tmp_path / "x.lockstep")


def test_other_files_are_refused_by_name(written: bytes, tmp_path: Path) -> None:
    assert "is not a recording" in refused(b"GGUF", tmp_path / "x")
    other = written.replace(f"recording {VERSION}\n".encode(), f"recording {VERSION + 1}\n".encode(), 1)
    assert f"has format {VERSION + 1}, this lockstep reads format {VERSION}" in refused(other, tmp_path / "x")
    assert "follow its end" in refused(written + b"more", tmp_path / "x")
    with pytest.raises(CallerError, match="No such file"):
        read(tmp_path / "none.lockstep")


def test_file_that_speaks_of_an_impossible_table_is_refused(tmp_path: Path) -> None:
    recording = read(dumped(RecordedRun(steps_kept=4).run(30), tmp_path))
    for change in ({"slot_count": 1 << 30, "length_max": 1 << 30}, {"slot_count": 1}):
        shape = dataclasses.replace(recording.head.shape, **change)
        refused(to_bytes(dataclasses.replace(recording, head=dataclasses.replace(recording.head, shape=shape))), tmp_path / "x")
