"""A link gives every message once, whole and in order, or says at once that it does not."""

from __future__ import annotations

import numpy as np
import pytest
from core_loop import Row, make_plan

from lockstep.errors import LinkError
from lockstep.runtime.messages import Activations, Heartbeat
from lockstep.runtime.transport import frames
from lockstep.runtime.transport.frames import LinkReader, LinkWriter

SOURCE, DESTINATION = 1, 2


def beat(step: int) -> Heartbeat:
    return Heartbeat(stage=SOURCE, step=step, waits_for="")


def activations(rows: int = 3) -> Activations:
    tensors = {"hidden": np.arange(rows * 4, dtype=np.float32).reshape(rows, 4), "residual": np.ones((rows, 2), np.float32)}
    return Activations(epoch=0, step=5, digests=np.array([1, 2], np.uint64), tensors=tensors)


def test_messages_arrive_in_order_with_their_source() -> None:
    writer, reader = LinkWriter(SOURCE, DESTINATION), LinkReader(DESTINATION)
    for step in range(5):
        assert reader.unpack(writer.pack(beat(step))) == (SOURCE, beat(step))


def test_links_are_numbered_each_on_its_own() -> None:
    reader = LinkReader(DESTINATION)
    first, second = LinkWriter(0, DESTINATION), LinkWriter(1, DESTINATION)
    for step in range(3):
        assert reader.unpack(first.pack(beat(step)))[0] == 0
    assert reader.unpack(second.pack(beat(0)))[0] == 1


@pytest.mark.parametrize(
    ("order", "accepted"),
    [([0, 2], 1), ([1], 0), ([0, 0], 1), ([0, 1, 1], 2), ([1, 0], 0), ([0, 2, 1], 1), ([0, 1, 3], 2)],
    ids=["a gap", "a lost first", "a repeat", "a late repeat", "disorder", "a swap", "a late gap"],
)
def test_gap_repeat_and_disorder_are_errors_at_once(order: list[int], accepted: int) -> None:
    writer, reader = LinkWriter(SOURCE, DESTINATION), LinkReader(DESTINATION)
    packed = [writer.pack(beat(step)) for step in range(4)]
    for place in order[:accepted]:
        reader.unpack(packed[place])
    with pytest.raises(LinkError, match=f"message {accepted} comes next, got message {order[accepted]}"):
        reader.unpack(packed[order[accepted]])


def test_message_for_another_is_an_error() -> None:
    with pytest.raises(LinkError, match="arrived at 3"):
        LinkReader(3).unpack(LinkWriter(SOURCE, DESTINATION).pack(beat(0)))


@pytest.mark.parametrize("kind", ["plan", "activations"])
def test_any_flipped_bit_in_header_body_or_tensor_is_an_error(kind: str) -> None:
    message = make_plan(0, 0, rows=[Row(0, 1, 1, 0, True)]) if kind == "plan" else activations()
    good = [bytes(part) for part in LinkWriter(SOURCE, DESTINATION).pack(message)]
    assert len(good) == (2 if kind == "plan" else 5)
    LinkReader(DESTINATION).unpack(good)
    for index, part in enumerate(good):
        for byte in range(len(part)):
            damaged = bytearray(part)
            damaged[byte] ^= 1 << (byte % 8)
            with pytest.raises(LinkError):
                LinkReader(DESTINATION).unpack([*good[:index], bytes(damaged), *good[index + 1 :]])


@pytest.mark.parametrize("bit", range(8))
def test_every_bit_of_the_header_counts(bit: int) -> None:
    header, *parts = (bytes(part) for part in LinkWriter(SOURCE, DESTINATION).pack(beat(0)))
    for byte in range(len(header)):
        damaged = bytearray(header)
        damaged[byte] ^= 1 << bit
        with pytest.raises(LinkError):
            LinkReader(DESTINATION).unpack([bytes(damaged), *parts])


def test_lost_added_swapped_and_short_parts_are_errors() -> None:
    header, *parts = (bytes(part) for part in LinkWriter(SOURCE, DESTINATION).pack(activations()))
    wrong = {
        "all lost": [header],
        "last lost": [header, *parts[:-1]],
        "one added": [header, *parts, b""],
        "swapped": [header, *parts[::-1]],
        "short part": [header, *parts[:-1], parts[-1][:-4]],
        "short header": [header[:-1], *parts],
    }
    for received in wrong.values():
        with pytest.raises(LinkError):
            LinkReader(DESTINATION).unpack(received)


def test_damaged_message_does_not_count_as_received() -> None:
    writer, reader = LinkWriter(SOURCE, DESTINATION), LinkReader(DESTINATION)
    header, body = writer.pack(beat(0))
    with pytest.raises(LinkError):
        reader.unpack([header, bytes(body)[:-1]])
    assert reader.unpack([header, body]) == (SOURCE, beat(0))


def test_tensors_travel_as_they_lie_in_memory_and_are_frozen_from_then_on() -> None:
    """C1-02, C1-19: no copy that could be reused too early, and no write into what is being sent."""
    message = activations()
    parts = LinkWriter(SOURCE, DESTINATION).pack(message)
    for tensor, part in zip(message.tensors.values(), parts[-2:], strict=True):
        assert np.shares_memory(np.frombuffer(part, np.uint8), tensor)
        with pytest.raises(ValueError, match="read-only"):
            tensor[0, 0] = 1.0


def test_received_tensors_share_the_frame_s_memory_and_cannot_be_written() -> None:
    message = activations()
    received_frames = [bytes(part) for part in LinkWriter(SOURCE, DESTINATION).pack(message)]
    _, received = LinkReader(DESTINATION).unpack(received_frames)
    for name, frame in zip(message.tensors, received_frames[-2:], strict=True):
        assert np.array_equal(received.tensors[name], message.tensors[name])
        assert received.tensors[name].shape == message.tensors[name].shape
        assert np.shares_memory(np.frombuffer(frame, np.uint8), received.tensors[name])
        assert not received.tensors[name].flags.writeable


def test_write_into_a_buffer_behind_the_link_s_back_is_seen() -> None:
    """The checksum is taken when the message is handed over; what the receiver gets is that, or an error."""
    whole = np.zeros(12, np.float32)
    message = Activations(epoch=0, step=0, digests=np.zeros(1, np.uint64), tensors={"hidden": whole[:8].reshape(2, 4)})
    parts = LinkWriter(SOURCE, DESTINATION).pack(message)
    whole[3] = 1.0
    with pytest.raises(LinkError, match="damaged"):
        LinkReader(DESTINATION).unpack(parts)


def test_step_without_rows_carries_empty_tensors() -> None:
    for message in (activations(rows=0), Activations(epoch=0, step=0, digests=np.zeros(1, np.uint64), tensors={})):
        _, received = LinkReader(DESTINATION).unpack([bytes(part) for part in LinkWriter(SOURCE, DESTINATION).pack(message)])
        assert {name: tensor.shape for name, tensor in received.tensors.items()} == {name: tensor.shape for name, tensor in message.tensors.items()}


def test_message_over_the_limit_is_refused_by_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MESSAGE_BYTES_MAX", 100)
    writer = LinkWriter(SOURCE, DESTINATION)
    with pytest.raises(LinkError, match="over the limit of 100"):
        writer.pack(activations(rows=50))
