"""How the HTTP edge is set up. Knows limits and names; does not know the engine, the model or any flag's spelling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.core.params import LOGPROBS_MAX
from lockstep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """One frozen value, given to `create_app`.

    served_model_names: names that `model` may have in a request; answers carry the first.
    api_key: what `Authorization: Bearer ...` must say (printable ASCII); None asks for nothing. Health paths and /metrics are always open.
    max_logprobs: most alternatives a token that a request may ask for.
    allowed_origins: origins that browsers may call from (CORS); ("*",) is all, () is none.
    return_tokens_as_token_ids: the default of the request field of that name: logprobs name tokens as "token_id:17", which no two tokens share.
    body_bytes_max: longest request body, in bytes; a longer one is answered 413.
    sampling_defaults: names of `SamplingParams` to what a request has that does not say; of max_tokens, at most the window.
    requests_max: engine requests (choices times prompts) open at once over all clients; beyond it the answer is 503 with Retry-After.
    retry_after_s: what Retry-After says.
    shutdown_timeout_s: how long open answers may go on after a stop was asked for; then they end with an error.
    dev_mode: whoever may send requests may also pause the engine and reset its prefix cache.

    Raises ConfigError.
    """

    served_model_names: tuple[str, ...]
    api_key: str | None = None
    max_logprobs: int = LOGPROBS_MAX
    allowed_origins: tuple[str, ...] = ()
    return_tokens_as_token_ids: bool = False
    body_bytes_max: int = 32 << 20
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    requests_max: int = 1024
    retry_after_s: int = 1
    shutdown_timeout_s: float = 10.0
    dev_mode: bool = False

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError(f"served_model_names must hold at least one name and no empty one, got {self.served_model_names!r}")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key must be printable ASCII and not empty; leave it out to serve without a key")
        if not 0 <= self.max_logprobs <= LOGPROBS_MAX:
            raise ConfigError(f"max_logprobs must be from 0 to {LOGPROBS_MAX}, got {self.max_logprobs}")
        for name, low in (("body_bytes_max", 1), ("requests_max", 1), ("retry_after_s", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not (math.isfinite(self.shutdown_timeout_s) and self.shutdown_timeout_s >= 0):
            raise ConfigError(f"shutdown_timeout_s must be a finite number of seconds, 0 or more, got {self.shutdown_timeout_s}")
