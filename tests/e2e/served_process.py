"""`lockstep serve` as a process of its own, on a free port, watched from outside: its URL, its stages' processes, its health and its end.

Knows command lines, process ids and pages; does not know what is served.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import httpx2
import psutil

PATIENCE_S = 120.0
"""For what must happen but has no stated time, on a machine that does other work too."""

COMMAND = (sys.executable, "-m", "lockstep.cli.main")
_URL = re.compile(r"lockstep serves .* at (http://\S+)")


class Said:
    """The lines that a process writes, kept as they come, so that its pipe never fills up."""

    def __init__(self, pipe: IO[str]) -> None:
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        with self._changed:
            return "\n".join(self._lines)

    def wait_for(self, pattern: re.Pattern[str]) -> str:
        """The first group of the first line that matches. Fails if the process stops talking first."""

        def found() -> re.Match[str] | None:
            return next((match for line in self._lines if (match := pattern.search(line))), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or self._ended, PATIENCE_S)
            match = found()
        assert match is not None, f"no line matches {pattern.pattern!r} in:\n{self.text}"
        return match[1]

    def join(self) -> None:
        self._thread.join(PATIENCE_S)

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            with self._changed:
                self._lines.append(line.rstrip())
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class ServedProcess:
    """stages: the processes of its stages as they were at first, in their order."""

    process: subprocess.Popen[str]
    said: Said
    url: str
    stages: tuple[psutil.Process, ...]

    def stages_now(self) -> list[psutil.Process]:
        """The processes of its stages: those that are lost and not yet started again are missing."""
        return stage_processes(self.process.pid)

    def page(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and page at another path."""
        answer = httpx2.get(self.url + path, timeout=PATIENCE_S)
        return answer.status_code, answer.json()

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and page."""
        return self.page("/health")

    def seconds_until_health(self, condition: Callable[[int, dict[str, Any]], bool]) -> float:
        """How long it takes until /health satisfies the condition."""
        return self.seconds_until(lambda: condition(*self.health()))

    def seconds_until(self, condition: Callable[[], bool]) -> float:
        """How long it takes until the condition holds."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < PATIENCE_S, f"the last page was {self.health()}; the server said:\n{self.said.text}"
        return time.monotonic() - start


@contextmanager
def served(*flags: str, model: str = "smollm2") -> Iterator[ServedProcess]:
    """A server, by default with the embedded model, that takes requests; nothing of it is left afterwards, whatever happens."""
    with subprocess.Popen([*COMMAND, "serve", model, "--port", "0", *flags], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = Said(process.stderr)
        stages: Sequence[psutil.Process] = ()
        try:
            url = said.wait_for(_URL)
            stages = stage_processes(process.pid)
            yield ServedProcess(process, said, url, tuple(stages))
        finally:
            now = stage_processes(process.pid) if process.poll() is None else ()
            for left in (*stages, *now, process):
                if is_alive(left.pid):
                    left.kill()
            process.wait(PATIENCE_S)
            said.join()


def stage_processes(parent: int) -> list[psutil.Process]:
    """The stages that `parent` started, by index."""
    found: dict[int, psutil.Process] = {}
    for child in psutil.Process(parent).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = child.cmdline()
            if "lockstep.launch" in command:
                found[int(command[-2])] = child
    return [found[index] for index in sorted(found)]


def is_alive(pid: int) -> bool:
    """The process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_all_gone(processes: Sequence[psutil.Process]) -> None:
    """Process objects remember when their process started, so a reused id does not count as alive."""
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive, f"still there: {[(p.pid, p.cmdline()) for p in alive]}"
