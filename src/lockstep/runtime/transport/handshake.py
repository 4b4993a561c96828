"""What stages must have in common to work together, and how a stage's error reaches the driver. It knows messages only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lockstep.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    HandshakeError,
    InternalError,
    LinkError,
    LockstepError,
    LogError,
    ProvenanceError,
    UnsupportedError,
)
from lockstep.runtime.messages import StageFailure, StageHello


def check_fit(hellos: Sequence[StageHello]) -> None:
    """Of all stages, in their order. Raises HandshakeError naming what differs."""
    for hello in hellos[1:]:
        _check_agreement(hellos[0], hello)
    bounds = [hello.layers for hello in hellos]
    if any(a[1] != b[0] for a, b in itertools.pairwise(bounds)):
        raise HandshakeError(f"the stages' layers do not follow one another: {bounds}")


def check_same(before: StageHello, now: StageHello) -> None:
    """A stage that was started again holds what it held. Raises HandshakeError naming what differs."""
    _check_agreement(before, now)
    if (before.layers, before.kv_block_bytes) != (now.layers, now.kv_block_bytes):
        raise HandshakeError(f"stage {now.stage} was started again with layers {now.layers}, before it had {before.layers}")


def _check_agreement(first: StageHello, second: StageHello) -> None:
    for name in sorted(set(first.agreement) | set(second.agreement)):
        ours, theirs = first.agreement.get(name), second.agreement.get(name)
        if ours != theirs:
            raise HandshakeError(
                f"stages {first.stage} and {second.stage} do not fit together: {name} is {ours!r} on stage {first.stage} and {theirs!r} on stage "
                f"{second.stage}"
            )


def as_error(failure: StageFailure) -> LockstepError:
    """The stage's error as the driver raises it."""
    text = f"stage {failure.stage}: {failure.message}"
    for internal in (DivergenceError, ProvenanceError, LogError):
        if failure.code == internal.code:
            return internal(text, step=failure.step, concerned=failure.concerned)
    for kind in (LinkError, CheckpointError, ConfigError, UnsupportedError):
        if failure.code == kind.code:
            other = kind(text)
            other.step = failure.step
            return other
    return InternalError(text, step=failure.step, concerned=failure.concerned)
