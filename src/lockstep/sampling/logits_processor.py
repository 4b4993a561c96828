"""`LogitsProcessor`: what a plugin is that changes logits. Knows what one takes and gives; loads none, and knows no requests, steps or slots.

A processor is a pure function of its arguments, the prompt and the output so far. The engine asks it at any position, in any order, as often as it
likes, in any process: that is what lets an answer be preempted, drafted, or started again elsewhere, with the same tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lockstep.ops.step import I32

BIAS_MOST = 1e6
"""Of a bias, either way: several of them still leave a logit finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """vocab_size: ids are from 0 to below it. eos_token_ids: those that end an answer."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsEdit:
    """What is changed before one token is chosen. biases: id -> added to its logit, within BIAS_MOST either way. forbidden: ids that do not come.
    allowed: the only ids that may, or a boolean array [vocab_size] that is true for them; None for all."""

    biases: Mapping[int, float] = field(default_factory=dict)
    forbidden: Collection[int] | NDArray[np.integer[Any]] = ()
    allowed: Collection[int] | NDArray[np.integer[Any]] | NDArray[np.bool_] | None = None


class LogitsProcessor(ABC):
    """One is made in every process of the engine, once. It asks for nothing that another process, or the same one later, would answer differently: no
    state of its own that changes, no clock, no randomness.

    arguments: names in a request's `extra_args` that it takes; it is asked for the requests that have at least one of them. version: part of the
    engine's fingerprint, as is the file that the class is in: raise it when something else that the edits depend on changes.
    """

    arguments: ClassVar[tuple[str, ...]]
    version: ClassVar[str]

    def __init__(self, model: ModelFacts) -> None:
        self.model = model

    @abstractmethod
    def validate(self, arguments: Mapping[str, Any]) -> None:
        """arguments: those of `arguments` that a request has. Raises ValueError that says what is wrong with them, and the request is refused. Called
        before a request is admitted, in the process that takes requests, which waits for it."""

    @abstractmethod
    def edit(self, arguments: Mapping[str, Any], prompt_token_ids: I32, output_token_ids: I32) -> LogitsEdit | None:
        """What is changed for the token behind prompt and output; None for nothing. arguments: that were validated, each time a copy. Arrays are
        read-only. The step waits for it, and so does everybody in it."""
