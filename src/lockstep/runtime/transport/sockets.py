"""ZeroMQ sockets as inboxes and outboxes: one PULL a process, one PUSH a receiver, over ipc in a folder of mode 0700.

Knows endpoints and frames; does not know what the messages mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from lockstep.errors import LinkError
from lockstep.runtime.transport.frames import MESSAGE_BYTES_MAX, LinkReader, LinkWriter

RECONNECT_MS = 10
PROCESS_SOURCE = 1_000_000
"""A stage's process has a link of its own to the driver, source PROCESS_SOURCE + stage: for what it says of itself, whatever the epoch."""


def endpoint(folder: Path, receiver: int) -> str:
    """The ipc endpoint of a receiver's inbox: stages 0, 1, ..., the driver -1. A process that takes another's place binds it anew."""
    return f"ipc://{folder}/{'driver' if receiver < 0 else f'stage-{receiver}'}"


class Inbox:
    """Everything that is sent to `receiver`, in whatever epoch. epoch: the one that begins it."""

    def __init__(self, context: zmq.Context[Any], folder: Path, receiver: int, *, epoch: int = 0, checks: bool = True) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        self.socket.bind(endpoint(folder, receiver))
        self.links = LinkReader(receiver, epoch=epoch, checks=checks)

    def receive(self) -> tuple[int, Any] | None:
        """The next (source, message) of the present epoch, or None if nothing has come. Body and tensors stay in ZeroMQ's memory; nothing is copied
        here. Raises LinkError."""
        if (due := self.links.take_due()) is not None:
            return due
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return None
            if (received := self.links.unpack([frames[0].bytes, *(frame.buffer for frame in frames[1:])])) is not None:
                return received

    def close(self) -> None:
        self.socket.close(0)


class Outbox:
    """The link from `source` to `receiver` within one epoch; a new epoch takes a new one, so that nothing is kept for a receiver that has gone."""

    def __init__(self, context: zmq.Context[Any], folder: Path, source: int, receiver: int, *, epoch: int = 0, checks: bool = True) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.connect(endpoint(folder, receiver))
        self._writer = LinkWriter(source, receiver, epoch=epoch, checks=checks)
        self._receiver = receiver

    @property
    def check_seconds(self) -> float:
        return self._writer.check_seconds

    def send(self, message: Any) -> None:
        """Never waits. Tensors are handed over without a copy: ZeroMQ holds a reference to their memory until it is sent."""
        parts = self._writer.pack(message)
        try:
            self._socket.send_multipart(parts, zmq.DONTWAIT, copy=len(parts) == 2)
        except zmq.Again:
            raise LinkError(f"the link to {self._receiver} takes no message; the receiver has gone") from None

    def close(self) -> None:
        """What has not left yet is dropped: the epoch it belongs to is over."""
        self._socket.close(0)
