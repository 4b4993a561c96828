"""Other weights for a running engine: what must be equal, and one stage's part of them, loaded beside its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lockstep.errors import CheckpointError, LockstepError
from lockstep.launch.model import ResolvedModel
from lockstep.models.spec import spec_from_config
from lockstep.ops.backend import PackedWeight
from lockstep.weights import Checkpoint, open_checkpoint

Packed = Mapping[str, PackedWeight]
_CONTENT = 16
"""Digits of a content's hash."""


def open_alike(path: Path, model: ResolvedModel) -> Checkpoint:
    """Another checkpoint of the same model: its config makes the same spec, its tensors have the same names and shapes. Reads headers only. Raises
    CheckpointError that names the first difference."""
    checkpoint = open_checkpoint(path)
    spec = spec_from_config(checkpoint.config)
    if spec != model.spec:
        differing = [name for name in model.spec.__dataclass_fields__ if getattr(spec, name) != getattr(model.spec, name)]
        raise CheckpointError(f"{path}: {', '.join(differing)} differ from the engine's; update_weights takes a checkpoint of the same model")
    own, other = ({name: held.shape(name) for name in held.names()} for held in (model.checkpoint, checkpoint))
    for name in sorted(own.keys() | other.keys()):
        if own.get(name) != other.get(name):
            told = [shape or "nothing" for shape in (own.get(name), other.get(name))]
            raise CheckpointError(f"{path}: tensor {name!r} is {told[1]}, the engine's is {told[0]}; it takes one of the same model")
    return checkpoint


def named(checkpoint: Checkpoint) -> str:
    """What stages are told: the content and where it is."""
    return f"{checkpoint.fingerprint()[:_CONTENT]}:{checkpoint.path.resolve()}"


def open_named(weights: str, model: ResolvedModel) -> Checkpoint:
    """The checkpoint that `named` named. Raises CheckpointError if something else has been written there since: stages would not compute with the
    same."""
    checkpoint = open_alike(Path(weights[_CONTENT + 1 :]), model)
    if named(checkpoint) != weights:
        raise CheckpointError(f"{checkpoint.path}: has other content than when it was named; write each set of weights under a name of its own")
    return checkpoint


class WeightsShelf:
    """Satisfies `runtime.stage.WeightsShelf`. load: a stage's weights out of the checkpoint of that name, or with an empty one out of the first."""

    def __init__(self, load: Callable[[str], Packed]) -> None:
        self._load = load
        self._pending: dict[str, Future[Packed]] = {}
        self._kept: dict[str, Packed] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lockstep-weights")

    def prepare(self, weights: str) -> None:
        self._kept.clear()
        if weights not in self._pending:
            self._pending[weights] = self._thread.submit(self._load, weights)

    @property
    def is_preparing(self) -> bool:
        return bool(self._pending)

    def take_prepared(self) -> list[tuple[str, str]]:
        ended = [name for name, future in self._pending.items() if future.done()]
        return [(name, self._take(name)) for name in ended]

    def _take(self, weights: str) -> str:
        try:
            self._kept = {weights: self._pending.pop(weights).result()}
        except LockstepError as error:
            return str(error)
        except Exception as error:  # no memory, or a file that goes away: the engine goes on with what it has
            return f"{type(error).__name__}: {error}"
        return ""

    def forget(self) -> None:
        """What was prepared is computed with already."""
        self._kept.clear()

    def of(self, weights: str) -> Packed:
        """Those that were prepared, once; or loaded now, by a stage that was started again."""
        kept = self._kept.pop(weights, None)
        return self._load(weights) if kept is None else kept
