"""Rotary settings as config.json says them, in the older form (`rope_theta`, `rope_scaling`) and in that of transformers 5 (`rope_parameters`,
with one mapping a layer type where layers differ). Does not know what becomes of a `Rope`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.models.config_fields import flag, integer, mapping, number, numbers
from lockstep.models.rope import LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling

FULL, SLIDING = "full_attention", "sliding_attention"
THETA_DEFAULT = 10000.0
_KINDS = "'default', 'linear', 'llama3', 'longrope' and 'yarn'"


def read_ropes(config: Mapping[str, Any], head_dim: int, *, partial: bool, local: bool) -> Mapping[str, Rope]:
    """The rope of each layer type, FULL and SLIDING. partial: a part of a head may be rotated. local: in the older form sliding layers have a base
    of their own, `rope_local_base_freq`, and no scaling. Raises UnsupportedError for a scaling that is not computed, CheckpointError for numbers
    that do not fit."""
    parameters = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
    base = _theta(config, "rope_theta", THETA_DEFAULT)
    local_base = _theta(config, "rope_local_base_freq", THETA_DEFAULT) if local else base
    if FULL in parameters or SLIDING in parameters:
        full = _rope(config, mapping(parameters, FULL), head_dim, partial=partial, base=base)
        return {FULL: full, SLIDING: _rope(config, mapping(parameters, SLIDING), head_dim, partial=partial, base=local_base)}
    full = _rope(config, parameters, head_dim, partial=partial, base=base)
    return {FULL: full, SLIDING: Rope(theta=local_base, width=full.width) if local else full}


def _rope(config: Mapping[str, Any], parameters: Mapping[str, Any], head_dim: int, *, partial: bool, base: float) -> Rope:
    theta = _theta(parameters, "rope_theta", base)
    width = _width(config, parameters, head_dim, partial=partial)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(theta=theta, width=width)
    if kind == "linear":
        return Rope(theta=theta, width=width, scaling=LinearScaling(factor=number(parameters, "factor", below=1e6)))
    if kind == "llama3":
        return Rope(theta=theta, width=width, scaling=_llama3(config, parameters))
    if kind in ("longrope", "su"):
        return Rope(theta=theta, width=width, scaling=_long(config, parameters, width))
    if kind == "yarn":
        return Rope(theta=theta, width=width, scaling=_yarn(config, parameters, theta))
    raise UnsupportedError(f"rotary scaling {kind!r} is not supported; supported are {_KINDS}")


def _theta(place: Mapping[str, Any], key: str, default: float) -> float:
    theta = number(place, key, default=default, below=1e12)
    if theta < 1.0:
        raise CheckpointError(f"{key} must be at least 1, got {theta:g}; check the model's config")
    return theta


def _width(config: Mapping[str, Any], parameters: Mapping[str, Any], head_dim: int, *, partial: bool) -> int:
    factor = number(parameters if "partial_rotary_factor" in parameters else config, "partial_rotary_factor", default=1.0, below=2.0)
    if factor != 1.0 and not partial:
        raise UnsupportedError("partial_rotary_factor other than 1 is not supported for this architecture, which rotates whole heads")
    width = int(head_dim * factor)
    if factor > 1.0 or width < 2 or width % 2:
        raise CheckpointError(
            f"partial_rotary_factor must leave an even part of a head to rotate, got {factor:g} of {head_dim}; check the model's config"
        )
    return width


def _original_window(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    """The config's own entry goes before that among the parameters, as in transformers."""
    place = config if config.get("original_max_position_embeddings") is not None else parameters
    return integer(place, "original_max_position_embeddings", default=integer(config, "max_position_embeddings"))


def _llama3(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=number(parameters, "factor", below=1e6),
        low_frequency_factor=number(parameters, "low_freq_factor", below=1e6),
        high_frequency_factor=number(parameters, "high_freq_factor", below=1e6),
        original_window=_original_window(config, parameters),
    )
    if scaling.high_frequency_factor <= scaling.low_frequency_factor:
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        raise CheckpointError(f"high_freq_factor must be above low_freq_factor, got {high:g} and {low:g}; check the model's config")
    return scaling


def _long(config: Mapping[str, Any], parameters: Mapping[str, Any], width: int) -> LongScaling:
    """The long factors wherever the model's window is wider than its original one, else the short ones: a choice that no request, batch or flag
    changes (docs/decisions, "dense families")."""
    window, original = integer(config, "max_position_embeddings"), _original_window(config, parameters)
    short, long = (numbers(parameters, key, count=width // 2, below=1e6) for key in ("short_factor", "long_factor"))
    stretch = number(parameters, "factor", below=1e6, default=window / original)
    if stretch > 1.0 and original < 2:
        raise CheckpointError(
            f"original_max_position_embeddings must be at least 2 where factor is above 1, got {original}; check the model's config"
        )
    advised = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1.0 else 1.0
    magnitude = number(parameters, "attention_factor", below=1e3, default=advised)
    return LongScaling(factors=long if window > original else short, magnitude=magnitude)


def _yarn(config: Mapping[str, Any], parameters: Mapping[str, Any], theta: float) -> YarnScaling:
    """Magnitudes as transformers has them: `attention_factor`, else from `mscale` and `mscale_all_dim` where both are there, else from the factor."""
    window, original = integer(config, "max_position_embeddings"), _original_window(config, parameters)
    factor = number(parameters, "factor", below=1e6, default=window / original)
    fast, slow = number(parameters, "beta_fast", below=1e6, default=32.0), number(parameters, "beta_slow", below=1e6, default=1.0)
    if fast < slow or theta <= 1.0:
        raise CheckpointError(
            f"beta_fast must be at least beta_slow and rope_theta above 1, got {fast:g}, {slow:g}, {theta:g}; check the model's config"
        )
    one, all_dim = (0.0 if not parameters.get(key) else number(parameters, key, below=1e3) for key in ("mscale", "mscale_all_dim"))
    advised = _yarn_magnitude(factor, one) / _yarn_magnitude(factor, all_dim) if one and all_dim else _yarn_magnitude(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_window=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=parameters.get("truncate") is None or flag(parameters, "truncate"),
        magnitude=number(parameters, "attention_factor", below=1e3, default=advised),
        score_factor=_yarn_magnitude(factor, all_dim) ** 2 if all_dim else 1.0,
    )


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
