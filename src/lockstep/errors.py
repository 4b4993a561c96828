"""Every error that Lockstep raises on purpose, by whose fault it is.

    LockstepError
    |-- CallerError            you asked for something that cannot be; HTTP 4xx
    |   |-- InvalidRequestError    one request's content: names the parameter
    |   |-- ConfigError            flags or constructor arguments that do not fit together
    |   |-- CheckpointError        a model file or folder that is missing, damaged or of an unknown kind
    |   `-- UnsupportedError       a thing that exists elsewhere and not here (yet)
    |-- PeerError              another process broke the protocol or went away
    |   |-- LinkError              a gap, repeat, disorder or bad checksum on a link
    |   |-- HandshakeError         two stages that must not work together
    |   |-- StageLostError         a stage died
    |   `-- StalledError           a stage is alive and makes no progress, or no longer answers
    |-- CapacityError          not now: retry later; HTTP 429 or 503
    |-- PluginError            code that this engine was told to load failed at a request
    `-- InternalError          our bug: a request or the engine is stopped
        |-- DivergenceError        two replicas of the log disagree
        |-- ProvenanceError        KV that attention was about to read is not this request's
        |-- LogError               a record that no correct driver would have written
        |-- LedgerError            a delivery that does not fit the ledger's account
        `-- PoisonError            a request during which the engine failed again and again

It knows nothing of HTTP beyond the status that fits a kind, and nothing of who raises what.
A message says what was expected, what came, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class LockstepError(Exception):
    """Root of the tree. `http_status` is the status that an HTTP edge should answer with; `code` is a short stable name. step: of the log, where
    that is known, else -1."""

    http_status: int = 500
    code: str = "internal_error"
    step: int = -1


class CallerError(LockstepError):
    """The caller asked for something that cannot be done."""

    http_status = 400
    code = "invalid_request_error"


class InvalidRequestError(CallerError):
    """One request is malformed. `param` names the parameter at fault, as the caller spells it, or is None."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConfigError(CallerError):
    """Settings that are out of range or do not fit together."""

    code = "config_error"


class CheckpointError(CallerError):
    """A model file or folder that is missing, damaged, truncated or of an unknown kind."""

    code = "checkpoint_error"


class UnsupportedError(CallerError):
    """A feature, flag, format or model family that Lockstep does not have."""

    code = "unsupported"


class PeerError(LockstepError):
    """Another process of the engine broke the protocol or went away."""

    http_status = 503
    code = "engine_unavailable"


class LinkError(PeerError):
    """A message was lost, repeated, reordered or damaged on a link between two processes."""

    code = "link_error"


class HandshakeError(PeerError):
    """Two stages hold different weights, dtypes, splits or numerics and must not work together."""

    code = "handshake_error"


class StageLostError(PeerError):
    """A stage's process has ended."""

    code = "stage_lost"


class StalledError(PeerError):
    """A stage has stopped answering, or a step makes no progress."""

    code = "stalled"


class CapacityError(LockstepError):
    """There is no room now; the same request may succeed later."""

    http_status = 503
    code = "overloaded"


class PluginError(LockstepError):
    """A plugin that the engine was started with failed at one request, which ends. Its author can tell why; the message says where."""

    code = "plugin_error"


class InternalError(LockstepError):
    """A mistake of Lockstep's own. It is never answered with wrong tokens.

    concerned: (slot, generation) of the requests whose state is wrong; request_ids: the same where they are known by
    name. Both are empty if it cannot be told.
    """

    def __init__(self, message: str, *, step: int = -1, concerned: Sequence[tuple[int, int]] = (), request_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.concerned = tuple(concerned)
        self.request_ids = tuple(request_ids)


class DivergenceError(InternalError):
    """Two replicas of the log disagree about step `step`."""

    code = "divergence"


class ProvenanceError(InternalError):
    """KV that attention was about to read was not computed from the request's own prefix."""

    code = "provenance"


class LogError(InternalError):
    """A log record that no correct driver or sampling rank would have written, or a table that no record could have made."""

    code = "log_error"


class LedgerError(InternalError):
    """What would be delivered does not fit the account that the delivery ledger keeps of each request."""

    code = "ledger"


class PoisonError(InternalError):
    """The engine failed again and again while this request was computed; it is ended so that the others go on."""

    code = "poison_request"
