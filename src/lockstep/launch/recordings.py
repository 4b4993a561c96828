"""Where recordings of failures go: the recorder with the folder, the limit and the privacy that a config asks for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import EngineConfig
from lockstep.core.records import Columns, StepPlan
from lockstep.errors import ConfigError, LockstepError
from lockstep.runtime.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingFolder:
    """Satisfies `runtime.loop.Dumper`."""

    recorder: Recorder
    folder: Path
    with_tokens: bool

    def dump(self, *, incident: str, error: LockstepError, unresolved: Sequence[StepPlan], columns: Mapping[int, Columns]) -> Path | None:
        return self.recorder.dump(self.folder, incident=incident, error=error, unresolved=unresolved, columns=columns, with_tokens=self.with_tokens)


def make_recording_folder(config: EngineConfig, fingerprint: str) -> RecordingFolder | None:
    """None if nothing is to be recorded. Raises ConfigError if the default folder is somebody else's."""
    if config.recorder_steps == 0:
        return None
    recorder = Recorder(
        rank_count=config.pipeline_parallel_size,
        fingerprint=fingerprint,
        steps_kept=config.recorder_steps,
        bytes_max=config.recorder_bytes_max,
    )
    folder = _own_folder() if config.recorder_folder is None else Path(config.recorder_folder)
    return RecordingFolder(recorder=recorder, folder=folder, with_tokens=config.record_tokens)


def _own_folder() -> Path:
    """This user's under the system's temporary folder, which everybody may write to, so it is looked at before anything goes there."""
    folder = Path(tempfile.gettempdir()) / f"lockstep-recordings-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} is not a folder of this user alone (mode 0700); remove it, or name another with --recorder-folder")
    return folder
