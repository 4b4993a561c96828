"""`StageHandle`: one stage's process as its parent sees it. It knows command lines, signals and exit statuses; not what the stage does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from lockstep.runtime.messages import StageHello, StageReady


class StageHandle:
    """The process is started at once. It ends when `pipe`, whose other end only the parent holds, is closed.

    hello, ready: what it has said of itself, and of the present epoch. pid_descriptor: readable once it has ended; -1 when it is reaped.
    """

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str] | None) -> None:
        read, self._pipe = os.pipe()
        try:
            self.process = subprocess.Popen([*command, str(read)], stdin=subprocess.DEVNULL, pass_fds=(read,), env=environment)
        except BaseException:
            self.end_softly()
            raise
        finally:
            os.close(read)
        self.index = index
        self.pid_descriptor = -1
        try:
            self.pid_descriptor = os.pidfd_open(self.process.pid)
        except BaseException:
            self.kill()
            raise
        self.hello: StageHello | None = None
        self.ready: StageReady | None = None

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def end_softly(self) -> None:
        """Ask it to end."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def end(self, deadline: float) -> None:
        """Wait until `deadline` (of time.monotonic), then kill, which also ends a stopped process; reap it."""
        self.end_softly()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End it now, whatever it does; reap it. May be called twice."""
        self.end_softly()
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        if self.pid_descriptor >= 0:
            os.close(self.pid_descriptor)
            self.pid_descriptor = -1

    def describe_end(self) -> str:
        code = self.process.poll()
        if code is None:
            return "is alive"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
