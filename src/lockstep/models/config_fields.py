"""Typed look-ups in a config.json, with ranges. Knows how a missing or absurd value is refused; does not know what any key means.

All raise CheckpointError that names the key, what was expected and what came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lockstep.errors import CheckpointError

SIZE_MAX = 1 << 28
LAYERS_MAX = 1 << 16
"""More than any model has: a damaged config must not make a spec that fills the memory."""


def integer(config: Mapping[str, Any], key: str, *, default: int | None = None, least: int = 1, most: int = SIZE_MAX) -> int:
    """From `least` to `most`. default: for a key that is absent or null; None refuses that."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CheckpointError(f"{key} must be an integer from {least} to {most}, got {value!r}; check the model's config")
    return value


def number(config: Mapping[str, Any], key: str, *, below: float, default: float | None = None) -> float:
    """Above 0 and below `below`. default: for a key that is absent or null; None refuses that."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 < value < below:
        raise CheckpointError(f"{key} must be a number above 0 and below {below:g}, got {value!r}; check the model's config")
    return float(value)


def numbers(config: Mapping[str, Any], key: str, *, count: int, below: float) -> tuple[float, ...]:
    """A list of `count` numbers above 0 and below `below`."""
    values = config.get(key)
    if not isinstance(values, (list, tuple)) or len(values) != count:
        found = f"{len(values)} values" if isinstance(values, (list, tuple)) else repr(values)
        raise CheckpointError(f"{key} must be a list of {count} numbers, got {found}; check the model's config")
    return tuple(number({key: value}, key, below=below) for value in values)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """True or false; absent or null is false."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{key} must be true or false, got {value!r}; check the model's config")
    return bool(value)


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; absent or null is an empty one."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"{key} must be a mapping, got {value!r}; check the model's config")
    return value or {}


def token_ids(config: Mapping[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    """One id or a list of them, each below vocab_size; absent or null is none."""
    value = config.get(key)
    values = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
            raise CheckpointError(f"{key} must hold ids from 0 to {vocab_size - 1}, got {value!r}; check the model's config")
    return values
