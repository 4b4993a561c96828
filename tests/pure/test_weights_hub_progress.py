"""Progress of a download: a bar on a terminal, lines now and then elsewhere, nothing if it is not asked for; and how a download is ended."""

from __future__ import annotations

import io

import pytest

from lockstep.weights.hub_progress import LINE_EVERY_S, DownloadCancelledError, DownloadProgress, readable_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_elsewhere_there_is_a_first_line_one_now_and_then_and_a_last() -> None:
    stream, clock = io.StringIO(), Clock()
    with DownloadProgress("o/n", 4_000_000, shown=True, stream=stream, clock=clock) as progress:
        for second in range(25):
            clock.now = second * LINE_EVERY_S / 10
            progress.add(100_000)
    assert stream.getvalue().splitlines() == [
        "o/n: downloading 4.0 MB",
        "o/n: 1.1 MB of 4.0 MB",
        "o/n: 2.1 MB of 4.0 MB",
        "o/n: downloaded in 24.0 s",
    ]


def test_on_a_terminal_there_is_a_bar_that_ends_where_the_bytes_do() -> None:
    stream = Terminal()
    with DownloadProgress("o/n", 4000, shown=True, stream=stream) as progress:
        progress.add(1000)
        progress.add(3000)
    last = stream.getvalue().split("\r")[-1]
    assert last.startswith("o/n: 100%")
    assert "4.00k/4.00k" in last
    assert "downloading" not in stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_nothing_is_said_if_it_is_not_asked_for(stream: io.StringIO) -> None:
    with DownloadProgress("o/n", 10, shown=False, stream=stream) as progress:
        progress.add(10)
    assert (stream.getvalue(), progress.bytes_done) == ("", 10)


def test_a_failed_download_is_not_said_to_be_done() -> None:
    stream = io.StringIO()
    with pytest.raises(OSError), DownloadProgress("o/n", 10, shown=True, stream=stream):
        raise OSError
    assert stream.getvalue().splitlines() == ["o/n: downloading 10 B"]


def test_bars_of_files_count_together_and_network_bytes_do_not_count_twice() -> None:
    progress = DownloadProgress("o/n", 30, shown=False)
    bar_class = progress.bar_class()
    with bar_class(total=10, initial=4, unit="B", desc="a") as first, bar_class(total=20) as second:
        first.update(6)
        first.update_transfer(6)
        second.update(20)
        second.update(-20)  # the connection broke, and the file comes again from its start
        second.update(20)
    assert (first.n, second.n, progress.bytes_done) == (10, 20, 30)


def test_a_cancelled_download_ends_where_it_counts_next() -> None:
    progress = DownloadProgress("o/n", 30, shown=False)
    bar = progress.bar_class()(total=10)
    bar.update(1)
    progress.cancel()
    for count in (bar.update, bar.update_transfer):
        with pytest.raises(DownloadCancelledError):
            count(1)
    assert progress.bytes_done == 1


def test_sizes_are_readable() -> None:
    sizes = [0, 999, 1000, 123_456, 5_000_000, 2_500_000_000, 7_000_000_000_000]
    assert [readable_bytes(size) for size in sizes] == ["0 B", "999 B", "1.0 kB", "123.5 kB", "5.0 MB", "2.50 GB", "7000.00 GB"]
