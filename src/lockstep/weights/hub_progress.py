"""How far a download is, on standard error: a bar on a terminal, a line now and then elsewhere. Knows bytes and time; not what they are of."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm

LINE_EVERY_S = 10.0
"""Off a terminal there is at most one line in so many seconds, besides the first and the last."""


class DownloadCancelledError(Exception):
    """Raised in a thread that downloads, to end it."""


class DownloadProgress:
    """Counts the bytes of files that arrive in several threads. label: what is downloaded. bytes_total: of all. shown: else it only counts."""

    def __init__(
        self, label: str, bytes_total: int, *, shown: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bytes_done = 0
        self._label = label
        self._bytes_total = bytes_total
        self._stream = stream or sys.stderr
        self._clock = clock
        self._lock = threading.Lock()
        self._cancelled = False
        self._start_s = self._line_s = clock()
        terminal = shown and self._stream.isatty()
        self._bar = tqdm(total=bytes_total, desc=label, unit="B", unit_scale=True, file=self._stream) if terminal else None
        self._lines = shown and not terminal
        if self._lines:
            self._say(f"downloading {readable_bytes(bytes_total)}")

    def add(self, count: int) -> None:
        """count: bytes more; fewer if some have to come again. Raises DownloadCancelledError after `cancel`."""
        with self._lock:
            if self._cancelled:
                raise DownloadCancelledError
            self.bytes_done += count
            if self._bar is not None:
                self._bar.update(count)
            elif self._lines and self._clock() - self._line_s >= LINE_EVERY_S:
                self._line_s = self._clock()
                self._say(f"{readable_bytes(self.bytes_done)} of {readable_bytes(self._bytes_total)}")

    def cancel(self) -> None:
        """Ends every thread that goes on counting."""
        with self._lock:
            self._cancelled = True

    def bar_class(self) -> type[FileBar]:
        """What huggingface_hub makes for each file in the place of a bar of its own: a class, since that is what it asks for."""
        return type("CountingFileBar", (FileBar,), {"progress": self})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._lines and error is None:
            self._say(f"downloaded in {self._clock() - self._start_s:.1f} s")

    def _say(self, what: str) -> None:
        print(f"{self._label}: {what}", file=self._stream, flush=True)


class FileBar:
    """One file's part of a progress, with what huggingface_hub calls of a tqdm bar. total: bytes of the file, n: of those that arrived."""

    progress: DownloadProgress

    def __init__(self, *_: Any, total: int | None = None, initial: int = 0, **__: Any) -> None:
        self.total = total
        self.n = 0
        self.update(initial)

    def update(self, n: float | None = 1) -> None:
        self.n += int(n or 0)
        self.progress.add(int(n or 0))

    def update_transfer(self, n: float | None = 1) -> None:
        """Bytes on the network, where they differ from those of the file; not shown, but a cancelled download ends here too."""
        self.progress.add(0)

    def set_postfix_str(self, *_: Any, **__: Any) -> None: ...

    def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None: ...

    def set_description_str(self, *_: Any, **__: Any) -> None: ...

    def set_description(self, *_: Any, **__: Any) -> None: ...

    def refresh(self, *_: Any, **__: Any) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def readable_bytes(count: int) -> str:
    """As 12 B, 3.4 kB or 5.67 GB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{count} B" if unit == "B" else f"{size:.{2 if unit == 'GB' else 1}f} {unit}"
        size /= 1000
    raise AssertionError(count)
