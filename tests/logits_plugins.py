"""Logits processors that tests load: three that are useful in their way, and one that fails as it is told to."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep import LogitsEdit, LogitsProcessor

Ids = NDArray[np.int32]


class NoRepeat(LogitsProcessor):
    """no_repeat_last: none of the last so many tokens, the prompt's among them, comes again."""

    arguments = ("no_repeat_last",)
    version = "1"

    def validate(self, arguments: Mapping[str, Any]) -> None:
        last = arguments["no_repeat_last"]
        if type(last) is not int or not 1 <= last <= 1000:
            raise ValueError(f"no_repeat_last must be an integer from 1 to 1000, got {last!r}")

    def edit(self, arguments: Mapping[str, Any], prompt_token_ids: Ids, output_token_ids: Ids) -> LogitsEdit:
        return LogitsEdit(forbidden=np.concatenate([prompt_token_ids, output_token_ids])[-arguments["no_repeat_last"] :])


class Forced(LogitsProcessor):
    """forced_ids: the output is these tokens, and then ends."""

    arguments = ("forced_ids",)
    version = "1"

    def validate(self, arguments: Mapping[str, Any]) -> None:
        if not isinstance(arguments["forced_ids"], list) or not all(type(token) is int for token in arguments["forced_ids"]):
            raise ValueError("forced_ids must be token ids")

    def edit(self, arguments: Mapping[str, Any], prompt_token_ids: Ids, output_token_ids: Ids) -> LogitsEdit:
        left = arguments["forced_ids"][len(output_token_ids) :]
        return LogitsEdit(allowed=left[:1] or self.model.eos_token_ids)


class Drift(LogitsProcessor):
    """drift: bias of an id that the tokens before it decide, so that one wrong token anywhere changes all that follow. drift_half: only ids of the
    parity of the output's length come, "even" ones first or "odd" ones."""

    arguments = ("drift", "drift_half")
    version = "2"

    def validate(self, arguments: Mapping[str, Any]) -> None:
        if not 0 <= arguments.get("drift", 0) <= 100:
            raise ValueError("drift must be from 0 to 100")

    def edit(self, arguments: Mapping[str, Any], prompt_token_ids: Ids, output_token_ids: Ids) -> LogitsEdit:
        mixed = (31 * int(prompt_token_ids.sum()) + 7 * int(output_token_ids.sum()) + len(output_token_ids)) % self.model.vocab_size
        allowed = None
        if "drift_half" in arguments:
            odd = (len(output_token_ids) + (arguments["drift_half"] == "odd")) % 2
            allowed = np.arange(self.model.vocab_size) % 2 == odd
        return LogitsEdit(biases={mixed: arguments.get("drift", 0)}, allowed=allowed)


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Faulty(LogitsProcessor):
    """fault: what it does wrong once the output has `fault_after` tokens, or in validate."""

    arguments = ("fault", "fault_after")
    version = "1"

    def validate(self, arguments: Mapping[str, Any]) -> None:
        if arguments["fault"] == "validate":
            raise KeyError("validate")
        if arguments["fault"] == "validate unsendable":
            raise ValueError("\ud800")

    def edit(self, arguments: Mapping[str, Any], prompt_token_ids: Ids, output_token_ids: Ids) -> Any:
        if len(output_token_ids) < arguments.get("fault_after", 0):
            return None
        vocab_size = self.model.vocab_size
        fault = arguments["fault"]
        if fault == "raises":
            raise RuntimeError("as it was told")
        if fault == "unsendable":
            raise ValueError("\ud800")
        if fault == "speechless":
            raise SpeechlessError
        if fault == "exits":
            sys.exit(3)
        if fault == "writes":
            output_token_ids[:] = 0
        arguments["fault"] = ["changed", "in place"]
        return {
            "none of the kind": {"biases": {}},
            "above": LogitsEdit(forbidden=[vocab_size]),
            "below": LogitsEdit(allowed=[-1]),
            "fractions": LogitsEdit(allowed=[1.5]),
            "texts": LogitsEdit(biases={1: "much"}),
            "nan": LogitsEdit(biases={1: float("nan")}),
            "infinite": LogitsEdit(biases={1: float("inf")}),
            "short mask": LogitsEdit(allowed=np.ones(3, np.bool_)),
            "nested": LogitsEdit(forbidden=[[1], [2]]),
            "nothing": LogitsEdit(allowed=[]),
        }.get(fault)


NOT_A_CLASS = NoRepeat.edit


class Underived:
    arguments = ("x",)
    version = "1"


class Unversioned(NoRepeat):
    version = ""


class Nameless(NoRepeat):
    arguments = ()


class Rival(Drift):
    """Takes what another one takes."""


class Unmakeable(NoRepeat):
    arguments = ("unmakeable",)

    def __init__(self, model: Any) -> None:
        raise OSError("its file is not there")
