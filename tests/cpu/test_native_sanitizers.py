"""The C++ engine's own tests under the address and undefined-behaviour sanitizers, on every instruction set of this machine: steps whose ids, tables,
positions, offsets and counts are out of range are refused before memory is touched.

Built anew in a folder of its own, since nothing else of the project is compiled so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_S, RUN_S = 900, 300


def command(*words: str | Path, timeout: float) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tools() -> tuple[str, str]:
    """CMake and Ninja of this environment."""
    folder = str(Path(sys.executable).parent)
    found = [shutil.which(name, path=folder) or shutil.which(name) for name in ("cmake", "ninja")]
    assert all(found), "cmake and ninja are installed by `make setup`"
    return str(found[0]), str(found[1])


def test_nothing_out_of_range_reaches_memory(tools: tuple[str, str], tmp_path: Path) -> None:
    cmake, ninja = tools
    settings = {"LOCKSTEP_SANITIZE": "address,undefined", "LOCKSTEP_PYTHON": "OFF", "LOCKSTEP_NATIVE_TESTS": "ON", "CMAKE_MAKE_PROGRAM": ninja}
    command(cmake, "-S", ROOT, "-B", tmp_path, "-G", "Ninja", *(f"-D{name}={value}" for name, value in settings.items()), timeout=BUILD_S)
    command(ninja, "-C", tmp_path, "engine_test", timeout=BUILD_S)
    assert "ok" in command(tmp_path / "native" / "tests" / "engine_test", timeout=RUN_S)
