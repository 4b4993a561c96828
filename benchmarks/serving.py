"""`lockstep serve` with the embedded model in processes of its own, on a free port, for as long as a benchmark needs it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 300.0


@contextmanager
def served(*flags: str) -> Iterator[tuple[str, int]]:
    """(URL, process id), with a window of 1024 tokens."""
    command = [sys.executable, "-m", "lockstep.cli.main", "serve", "smollm2", "--port", "0", "--max-model-len", "1k", *flags]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"lockstep serves .* at (http://\S+)", line):
                break
        else:
            raise SystemExit("the server did not start")
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        try:
            yield found[1], process.pid
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
            reader.join()
