"""The op table of the reference: for each op kind its body, an input generator and how far another backend's numbers may be away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from lockstep.backends.reference import bodies, cases
from lockstep.backends.reference.bodies import Call
from lockstep.backends.reference.cases import OpCase
from lockstep.ops.backend import DType
from lockstep.ops.step import SampleOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class OpReference:
    """body: what the op means. generate: seed -> OpCase. tolerance: the largest `cases.difference` on generated inputs, a dtype;
    for `sample` that of the logprobs, tokens and top ids being equal."""

    body: Callable[[Call], Tensor | SampleOutputs]
    generate: Callable[[int], OpCase]
    tolerance: Mapping[DType, float]


def _within(float32: float, bfloat16: float) -> Mapping[DType, float]:
    return MappingProxyType({"float32": float32, "bfloat16": bfloat16})


# In bfloat16 attention may see a key that was rounded the other way, since rotated keys are equal only to float32 precision before rounding.
OP_REFERENCES: Mapping[str, OpReference] = MappingProxyType(
    {
        "embed": OpReference(body=bodies.embed, generate=cases.embed_case, tolerance=_within(0.0, 0.0)),
        "rms_norm": OpReference(body=bodies.rms_norm, generate=cases.rms_norm_case, tolerance=_within(1e-5, 1e-5)),
        "linear": OpReference(body=bodies.linear, generate=cases.linear_case, tolerance=_within(1e-5, 1e-5)),
        "head_linear": OpReference(body=bodies.head_linear, generate=cases.head_linear_case, tolerance=_within(1e-5, 1e-5)),
        "rope_write": OpReference(body=bodies.rope_write, generate=cases.rope_write_case, tolerance=_within(1e-5, 1e-5)),
        "latent_write": OpReference(body=bodies.latent_write, generate=cases.latent_write_case, tolerance=_within(1e-5, 1e-5)),
        "paged_attention": OpReference(body=bodies.paged_attention, generate=cases.paged_attention_case, tolerance=_within(1e-5, 5e-3)),
        "gated_activation": OpReference(body=bodies.gated_activation, generate=cases.gated_activation_case, tolerance=_within(1e-5, 1e-5)),
        "soft_cap": OpReference(body=bodies.soft_cap, generate=cases.soft_cap_case, tolerance=_within(1e-5, 1e-5)),
        "route": OpReference(body=bodies.route, generate=cases.route_case, tolerance=_within(1e-5, 1e-5)),
        "experts": OpReference(body=bodies.experts, generate=cases.experts_case, tolerance=_within(1e-5, 5e-3)),
        "select": OpReference(body=bodies.select, generate=cases.select_case, tolerance=_within(0.0, 0.0)),
        "sample": OpReference(body=bodies.sample, generate=cases.sample_case, tolerance=_within(1e-5, 1e-5)),
    }
)
