"""Rows of figures with the machine and the commit they are of, appended to a CSV under `results/`."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def append(path: Path | None, rows: Sequence[Mapping[str, object]]) -> None:
    """path: None writes nothing. A file with other columns stays as it is, and the rows go into one beside it."""
    if path is None or not rows:
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    of = {"cores": os.cpu_count(), "machine": platform.machine(), "cpu": _cpu(), "commit": commit}
    columns = [*rows[0], *of]
    is_new = not path.exists()
    if not is_new and path.read_text().partition("\n")[0].split(",") != columns:
        path = path.with_name(f"{path.stem}-{commit}.csv")
        print(f"the file has other columns; the rows go into {path}")
        is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if is_new:
            writer.writeheader()
        writer.writerows({**row, **of} for row in rows)


def _cpu() -> str:
    """Model name as the operating system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
