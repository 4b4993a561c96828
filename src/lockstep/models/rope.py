"""Rotary embeddings: what they are told, and their frequencies, the one weight that is computed and not read from a checkpoint.

Knows numbers; does not know configs, layers or ops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor`: positions pressed into the window that the model was trained at."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's stretching of the rotary frequencies. original_window: the window that the model was first trained at, in tokens."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LongScaling:
    """LongRoPE: each frequency divided by a factor of its own, cosines and sines times `magnitude`. factors: one a frequency."""

    factors: tuple[float, ...]
    magnitude: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN: frequencies of waves that turn fewer than beta_slow times within original_window are divided by factor, those of more than beta_fast
    turns kept, those between blended by their place; magnitude: of cosines and sines. truncate: the blend begins and ends at whole places.
    score_factor: what DeepSeek multiplies attention's scale by."""

    factor: float
    original_window: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    magnitude: float
    score_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """theta: the base. width: values of a head that turn, even; the rest pass. scaling: None for the plain form."""

    theta: float
    width: int
    scaling: LinearScaling | Llama3Scaling | LongScaling | YarnScaling | None = None

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return self.scaling.magnitude if isinstance(self.scaling, (LongScaling, YarnScaling)) else 1.0


def inverse_frequencies(rope: Rope) -> NDArray[np.float32]:
    """float32 [width / 2]: theta ** (-2 i / width), stretched where there is a scaling.

    The power is computed in float64 and rounded once, so that every machine gets the same bits; then come single float32 operations.
    Sources: Su et al. 2021, "RoFormer", section 3.2.2; for LongRoPE Ding et al. 2024, arXiv 2402.13753;
    for YaRN Peng et al. 2023, arXiv 2309.00071, section 3.2.
    """
    exponents = np.arange(0, rope.width, 2, dtype=np.float32) / np.float32(rope.width)
    powers = np.power(np.float64(np.float32(rope.theta)), exponents.astype(np.float64)).astype(np.float32)
    if isinstance(rope.scaling, LongScaling):
        powers = np.array(rope.scaling.factors, np.float32) * powers
    frequencies = np.float32(1.0) / powers
    if isinstance(rope.scaling, YarnScaling):
        return _blended(frequencies, np.float32(1.0) / (np.float32(rope.scaling.factor) * powers), rope, rope.scaling)
    if isinstance(rope.scaling, LinearScaling):
        return (frequencies / np.float32(rope.scaling.factor)).astype(np.float32)
    return _stretched(frequencies, rope.scaling) if isinstance(rope.scaling, Llama3Scaling) else frequencies


def _blended(kept: NDArray[np.float32], divided: NDArray[np.float32], rope: Rope, yarn: YarnScaling) -> NDArray[np.float32]:
    """From `kept` to `divided` along a ramp over the frequencies' places."""

    def place(turns: float) -> float:
        return rope.width * math.log(yarn.original_window / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = place(yarn.beta_fast), place(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, rope.width - 1.0)
    steps = (np.arange(rope.width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low if high != low else 0.001)
    keep = np.float32(1.0) - np.clip(steps, np.float32(0.0), np.float32(1.0))
    blended: NDArray[np.float32] = divided * (np.float32(1.0) - keep) + kept * keep
    return blended


def _stretched(frequencies: NDArray[np.float32], scaling: Llama3Scaling) -> NDArray[np.float32]:
    """Llama 3's scaling: frequencies with long waves are divided by the factor, those with short ones kept, those between blended.

    Division by an array is written as multiplication by its reciprocal, since that is the rounding of the models as published.
    Source: Llama 3.1's reference code and model card.
    """
    one, factor, window = np.float32(1.0), np.float32(scaling.factor), np.float32(scaling.original_window)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wavelengths = (one / frequencies) * np.float32(2 * math.pi)
    is_long = wavelengths > np.float32(scaling.original_window / low)
    is_short = wavelengths < np.float32(scaling.original_window / high)
    divided = np.where(is_long, frequencies / factor, frequencies)
    keep = ((one / wavelengths) * window - np.float32(low)) / np.float32(high - low)
    blended = (one - keep) * divided / factor + keep * divided
    return np.where(is_long | is_short, divided, blended).astype(np.float32)
