"""`AnswersFile`: the file of answers to a file of prompts. A line is there as a whole or, after a crash, torn at the end, where it is cut off again.

Knows lines, locks and what a record must say of the line it answers; does not know engines. One process writes a file at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.cli.prompts_file import RawLine
from lockstep.errors import CapacityError, ConfigError

BEGIN = b'{"index": '
"""How each record begins, so that a torn one is told from what is not ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An answer that is there already."""

    line: RawLine
    failed: bool
    token_count: int


class AnswersFile:
    """path: None is standard output. Raises ConfigError: it has answers and `resume` was not asked for, another process writes it, it cannot be
    opened."""

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        self._path = path
        self._descriptor = 1 if path is None else _open(path, resume=resume)

    @property
    def name(self) -> str:
        return "standard output" if self._path is None else str(self._path)

    def resume(self, lines: Iterator[RawLine], settings: str) -> Iterator[Kept]:
        """The answers that are there, each held against the line that it must answer; afterwards the file ends with the last of them, and `lines`
        stands behind it. settings: digest of all that answers depend on beside their lines. Raises ConfigError for what does not fit, before
        anything is changed."""
        assert self._path is not None, "standard output has no past"
        with self._path.open("rb") as stream:
            kept_bytes = 0
            for count, record in enumerate(_records(stream, self.name)):
                line = next(lines, None)
                if line is None:
                    raise ConfigError(f"{self.name} has more answers than the prompts file has lines, {count}; the file was changed")
                self._check(record, line, settings, count)
                kept_bytes = stream.tell()
                yield Kept(line=line, failed=record.get("error") is not None, token_count=(record.get("usage") or {}).get("completion_tokens", 0))
        os.ftruncate(self._descriptor, kept_bytes)
        os.lseek(self._descriptor, 0, os.SEEK_END)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one answer; it outlives this process from here on. Raises CapacityError if there is no room for it."""
        try:
            data = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # an id with half a surrogate pair
            data = json.dumps(record).encode() + b"\n"
        assert data.startswith(BEGIN), data[:80]
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise CapacityError(f"cannot write {self.name}: {error.strerror}; what is written so far can be resumed with --resume") from error

    def close(self) -> None:
        if self._path is not None:
            os.close(self._descriptor)

    def _check(self, record: Mapping[str, Any], line: RawLine, settings: str, count: int) -> None:
        if record.get("index") != count:
            raise ConfigError(
                f"{self.name}: line {count + 1} has index {record.get('index')!r:.80}, expected {count}; remove the file or name another"
            )
        if record.get("input") != line.digest:
            raise ConfigError(
                f"line {line.number} of the prompts file is not the one that line {count + 1} of {self.name} answers: the prompts were changed; "
                "restore them, or name another --output-file"
            )
        if record.get("settings") != settings:
            raise ConfigError(
                f"{self.name} was made with another model, dtype, kind of CPU or flags of generation; use the same, or name another --output-file"
            )


def _open(path: Path, *, resume: bool) -> int:
    try:
        descriptor = os.open(path, (os.O_RDWR if resume else os.O_WRONLY) | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"--output-file {path}: {error.strerror}") from None
    found = os.fstat(descriptor)
    try:
        if stat.S_ISREG(found.st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif resume:
            raise ConfigError(f"--resume needs a file, and --output-file {path} is none")
        if found.st_size and not resume:
            raise ConfigError(f"--output-file {path} holds something; --resume goes on with it, or name another file")
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"--output-file {path} is being written by another process; wait for it, or name another file") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _records(stream: BinaryIO, name: str) -> Iterator[dict[str, Any]]:
    """The whole lines of a file of answers. Raises ConfigError for a line that is none, a torn last one excepted."""
    number = 0
    for line in stream:
        number += 1
        if not line.endswith(b"\n"):
            if not (line.startswith(BEGIN) or BEGIN.startswith(line)):
                break
            return
        try:
            record = json.loads(line) if line.startswith(BEGIN) else None
        except ValueError:
            record = None
        if not isinstance(record, dict):
            break
        yield record
    else:
        return
    raise ConfigError(f"{name}: line {number} is not an answer that this command wrote; remove the file or name another --output-file")
