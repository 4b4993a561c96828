"""A command on a terminal of its own: what it shows, and keys that are pressed. Knows pseudo-terminals; does not know what runs there."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PATIENCE_S = 120.0
AGAIN_S = 3.0

PASTE, PASTED = "\x1b[200~", "\x1b[201~"
"""What a terminal sends around a text that is pasted, where it was asked to (TERM=xterm)."""

CTRL_A, CTRL_C, CTRL_D, ENTER, UP = "\x01", "\x03", "\x04", "\r", "\x1b[A"


def _on_its_terminal() -> None:
    """So that Ctrl-C is a signal to it, also where whoever runs the tests ignores that signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """process: the command, which leads a session whose terminal this is."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._shown = b""
        self._read_to = 0
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def shown(self) -> str:
        """All that was shown, line ends as they are in files."""
        with self._changed:
            return self._shown.decode(errors="replace").replace("\r\n", "\n")

    def press(self, *keys: str) -> None:
        """Keys to the terminal; what it shows from here on is new."""
        with self._changed:
            self._read_to = len(self._shown)
        data = "".join(keys).encode()
        while data:
            data = data[os.write(self._master, data) :]

    def interrupt(self, text: str) -> None:
        """Press Ctrl-C until `text` is shown: Python's readline sleeps on where the signal comes just before it begins to wait for a key."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.press(CTRL_C)
            with self._changed:
                if self._changed.wait_for(lambda: text.encode() in self._shown[self._read_to :], AGAIN_S):
                    return
        raise AssertionError(f"Ctrl-C does not show {text!r}:\n{self.shown}")

    def wait_for(self, text: str) -> str:
        """What is new on the terminal, once `text` is in it. Fails if the command ends first."""

        def new() -> str:
            return self._shown[self._read_to :].decode(errors="replace").replace("\r\n", "\n")

        with self._changed:
            self._changed.wait_for(lambda: text in new() or self._ended, PATIENCE_S)
            found = new()
        assert text in found, f"{text!r} is not in what the terminal shows:\n{self.shown}"
        return found

    def wait(self) -> int:
        """The exit status."""
        status = self.process.wait(PATIENCE_S)
        self._thread.join(PATIENCE_S)
        return status

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 4096)
            except OSError:  # nobody holds the other side any more
                data = b""
            with self._changed:
                self._shown += data
                self._ended = not data
                self._changed.notify_all()
            if not data:
                return


@contextmanager
def on_terminal(command: Sequence[str], *, kind: str = "dumb") -> Iterator[Terminal]:
    """Nothing of the command is left afterwards. kind: of terminal; a dumb one gets no escape sequences."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 500, 0, 0))
    environment = {**os.environ, "TERM": kind, "INPUTRC": os.devnull}
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
        preexec_fn=_on_its_terminal,
    )
    os.close(slave)
    terminal = Terminal(process, master)
    try:
        yield terminal
    finally:
        if process.poll() is None:
            process.kill()
        terminal.wait()
        os.close(master)
