"""The rotary frequencies of a model: the one weight that is computed and not read from a checkpoint. Knows numbers, not ops."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lockstep.models.spec import ModelSpec, RopeScaling


def inverse_frequencies(spec: ModelSpec) -> NDArray[np.float32]:
    """float32 [head_dim / 2]: theta ** (-2 i / head_dim), stretched where the spec has a scaling.

    The power is computed in float64 and rounded once, so that every machine gets the same bits; then come single float32 operations.
    Source: Su et al. 2021, "RoFormer", section 3.2.2.
    """
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    powers = np.power(np.float64(np.float32(spec.rope_theta)), exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1.0) / powers
    return frequencies if spec.rope_scaling is None else _stretched(frequencies, spec.rope_scaling)


def _stretched(frequencies: NDArray[np.float32], scaling: RopeScaling) -> NDArray[np.float32]:
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
