"""`Scenario`: everything that makes one simulated run, explicit and as data. Two runs of one scenario are equal, bit for bit.

Times are virtual seconds; a piece of a stage's work takes about 0.01. It knows no engine; `draw` makes scenarios from seeds, `simulation` runs them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lockstep.core.scheduler import PROMPT_LOGPROBS_A_STEP

DRAFTERS = ("none", "perfect", "good", "random", "wrong", "right-then-wrong")
"""How well a request's drafter guesses. right-then-wrong: two right ones, then a wrong one."""

ENGINE_PHASES = ("idle", "prefill", "decode", "importing", "recovering")
"""What an engine is doing: the last of these that fits. decode: some request has tokens to decode; importing: some KV is on its way."""

REQUEST_PHASES = ("waiting", "prefill", "importing", "decode", "in flight", "finishing", "between", "recovering")
"""Where a request is. in flight: a row of it is in a plan whose result has not come. finishing: the sampler has ended it and the driver has not
heard. between: the prefill engine is done with it and the decode engine has not got it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """block_count: of the pool whose group sees all; window_blocks: of each other. work_s: mean time of one piece of work, a stage. transfers of KV:
    import_timeout_s, lease_s."""

    stage_count: int
    asynchronous: bool
    block_size: int
    block_count: int
    slot_count: int
    token_budget: int
    microbatch_count: int
    prefix_caching: bool
    priorities: bool
    drafts_max: int
    work_s: tuple[float, ...]
    prompt_logprobs_max: int = PROMPT_LOGPROBS_A_STEP
    window_blocks: int = 0
    import_timeout_s: float = 0.3
    lease_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The client gives up at `at`, or from then on as soon as the request is in `phase` ('' for at once).
    again_after: it submits the same request under the same id so much later; -1 for never."""

    at: float
    phase: str = ""
    again_after: float = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. sibling_of: id of the first of n choices for one prompt. direct: goes to the last engine, past the prefill engine."""

    name: str
    prompt: tuple[int, ...]
    tokens_max: int
    seed: int
    at: float
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    sibling_of: str = ""
    prompt_logprobs: bool = False
    direct: bool = False
    drafter: str = "none"
    abort: Abort | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """From `at` on, as soon as engine `engine` is in `phase` ('' for at once), `kind` happens to it (`faults.KINDS`). request: that it is about.
    target, other: a stage, the two ends of a link (-1 the driver), ...: what the kind makes of them. A crash with other=1 waits until every request
    has got past where the last one found it."""

    kind: str
    at: float
    engine: int = 0
    phase: str = ""
    target: int = 0
    other: int = 0
    request: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """engines: one, or a prefill engine and a decode engine. windows: of the model's KV groups, how many positions a token sees, 0 for all. framed:
    messages cross links as bytes. link_s, jitter: a message takes from link_s to (1 + jitter) times that."""

    seed: int
    engines: tuple[EngineShape, ...]
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...] = ()
    link_s: float = 0.002
    jitter: float = 1.0
    framed: bool = False
    windows: tuple[int, ...] = (0,)

    def block_counts(self, engine: EngineShape) -> tuple[int, ...]:
        return tuple(engine.window_blocks if window else engine.block_count for window in self.windows)

    @property
    def length_max(self) -> int:
        return max((len(ask.prompt) + ask.tokens_max for ask in self.asks), default=1)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_json(data: dict[str, Any]) -> Scenario:
        """The reverse of `as_json`."""
        return Scenario(
            **{
                **data,
                "engines": tuple(EngineShape(**{**engine, "work_s": tuple(engine["work_s"])}) for engine in data["engines"]),
                "asks": tuple(_ask(ask) for ask in data["asks"]),
                "faults": tuple(Fault(**fault) for fault in data["faults"]),
                "windows": tuple(data.get("windows", (0,))),
            }
        )


def _ask(data: dict[str, Any]) -> Ask:
    abort = data["abort"]
    return Ask(
        **{
            **data,
            "prompt": tuple(data["prompt"]),
            "stop_ids": tuple(data["stop_ids"]),
            "abort": None if abort is None else Abort(**abort),
        }
    )
