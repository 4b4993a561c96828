"""How far a long run of the command line has come: a bar on a terminal, a plain line now and then elsewhere. Knows terminals; not what is counted."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TextIO

BAR_EACH_S = 0.1
LINE_EACH_S = 10.0
BAR_WIDTH = 30


class Progress:
    """stream: where it is shown. clock: in seconds, monotonic."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._shown_at = clock() if not self._is_terminal else float("-inf")
        self._bar_length = 0

    def show(self, words: str, share: float | None) -> None:
        """words: what has been done so far. share: of all there is, 0 to 1, if that is known. Most calls show nothing."""
        now = self._clock()
        if now - self._shown_at < (BAR_EACH_S if self._is_terminal else LINE_EACH_S):
            return
        self._shown_at = now
        if self._is_terminal:
            self._write_bar(self._with_bar(words, share))
        else:
            self._stream.write((words if share is None else f"{words}, {share:.0%} of the file") + "\n")
            self._stream.flush()

    def end(self, words: str) -> None:
        """The last line, shown always."""
        if self._is_terminal:
            self._write_bar("")
        self._stream.write(("\r" if self._is_terminal else "") + words + "\n")
        self._stream.flush()

    def _with_bar(self, words: str, share: float | None) -> str:
        if share is None:
            return words
        filled = round(BAR_WIDTH * min(max(share, 0.0), 1.0))
        return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {share:4.0%}  {words}"

    def _write_bar(self, text: str) -> None:
        """Over the former one, cut to the terminal's width: a bar that wraps could not be written over."""
        text = text[: max(1, shutil.get_terminal_size().columns - 1)]
        self._stream.write("\r" + text.ljust(self._bar_length))
        self._stream.flush()
        self._bar_length = len(text)
