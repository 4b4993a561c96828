"""Where recordings of failures go: the recorder with the folder, the limit and the privacy that a config asks for."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep.config import EngineConfig
from lockstep.core.records import Columns, StepPlan
from lockstep.errors import ConfigError, LockstepError
from lockstep.runtime.recorder import Recorder, file_name

_log = logging.getLogger("lockstep.recorder")


class RecordingFolder:
    """Satisfies `runtime.loop.Dumper`. Recordings are replayed and written by a thread of its own, one after the other, while the engine recovers."""

    def __init__(self, recorder: Recorder, folder: Path, *, with_tokens: bool) -> None:
        self.recorder = recorder
        self._folder = folder
        self._with_tokens = with_tokens
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="lockstep-recordings")

    def dump(self, *, incident: str, error: LockstepError, unresolved: Sequence[StepPlan], columns: Mapping[int, Columns]) -> Path | None:
        path = self._folder / file_name(incident)
        try:
            taken = self.recorder.take(incident=incident, error=error, unresolved=unresolved, columns=columns)
            self._writer.submit(self.recorder.save, taken, path, with_tokens=self._with_tokens)
        except Exception:
            _log.exception("incident %s: nothing is recorded in %s", incident, path)
            return None
        return path

    def close(self) -> None:
        """Returns when all is written."""
        self._writer.shutdown()


def check_folder(config: EngineConfig) -> Path | None:
    """Where recordings go, None if nothing is to be recorded. Raises ConfigError if the default folder is somebody else's, or there is none that can
    be written to."""
    if config.recorder_steps == 0:
        return None
    folder = Path(tempfile.gettempdir()) / f"lockstep-recordings-{os.getuid()}" if config.recorder_folder is None else Path(config.recorder_folder)
    try:
        folder.mkdir(mode=0o700, parents=config.recorder_folder is not None, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be a folder for recordings ({error.strerror}); name another with --recorder-folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} cannot be written to; name another folder for recordings with --recorder-folder")
    if config.recorder_folder is None:
        _check_owner(folder)
    return folder


def _check_owner(folder: Path) -> None:
    """The system's temporary folder is everybody's, so what lies there is looked at before anything goes into it."""
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} is not a folder of this user alone (mode 0700); remove it, or name another with --recorder-folder")


def make_recording_folder(config: EngineConfig, folder: Path | None, fingerprint: str) -> RecordingFolder | None:
    """folder: as `check_folder` returned it."""
    if folder is None:
        return None
    recorder = Recorder(
        rank_count=config.pipeline_parallel_size,
        fingerprint=fingerprint,
        steps_kept=config.recorder_steps,
        bytes_max=config.recorder_bytes_max,
    )
    return RecordingFolder(recorder, folder, with_tokens=config.record_tokens)
