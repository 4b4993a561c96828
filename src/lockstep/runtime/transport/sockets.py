"""ZeroMQ sockets as inboxes and outboxes: one PULL a process, one PUSH a receiver, over ipc in a folder of mode 0700.

Knows endpoints and frames; does not know what the messages mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from lockstep.errors import LinkError
from lockstep.runtime.transport.frames import MESSAGE_BYTES_MAX, LinkReader, LinkWriter

LINGER_MS = 1000
RECONNECT_MS = 10


def endpoint(folder: Path, receiver: int) -> str:
    """The ipc endpoint of a receiver's inbox: stages 0, 1, ..., the driver -1."""
    return f"ipc://{folder}/{'driver' if receiver < 0 else f'stage-{receiver}'}"


class Inbox:
    """Everything that is sent to `receiver`."""

    def __init__(self, context: zmq.Context[Any], folder: Path, receiver: int) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        self.socket.bind(endpoint(folder, receiver))
        self._reader = LinkReader(receiver)

    def receive(self) -> tuple[int, Any] | None:
        """The next (source, message), or None if nothing has come. Body and tensors stay in ZeroMQ's memory; nothing is copied here."""
        try:
            frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        return self._reader.unpack([frames[0].bytes, *(frame.buffer for frame in frames[1:])])

    def close(self) -> None:
        self.socket.close(0)


class Outbox:
    """The link from `source` to `receiver`."""

    def __init__(self, context: zmq.Context[Any], folder: Path, source: int, receiver: int) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.connect(endpoint(folder, receiver))
        self._writer = LinkWriter(source, receiver)
        self._receiver = receiver

    def send(self, message: Any) -> None:
        """Never waits. Tensors are handed over without a copy: ZeroMQ holds a reference to their memory until it is sent."""
        parts = self._writer.pack(message)
        try:
            self._socket.send_multipart(parts, zmq.DONTWAIT, copy=len(parts) == 2)
        except zmq.Again:
            raise LinkError(f"the link to {self._receiver} takes no message; the receiver has gone") from None

    def close(self) -> None:
        self._socket.close()
