"""A `Program` as the C++ engine takes it: buffers by index, op calls as records. Knows both vocabularies; computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lockstep.backends.native import _kernels
from lockstep.errors import InternalError, UnsupportedError
from lockstep.ops.program import Op, Program
from lockstep.ops.vocabulary import Attribute

# The attribute that an op's record holds as `number`, and as `scale`.
_NUMBER: Mapping[str, str] = MappingProxyType({"rms_norm": "eps", "paged_attention": "scale", "soft_cap": "cap"})
_SCALE: Mapping[str, str] = MappingProxyType({"embed": "scale", "rope_write": "magnitude", "latent_write": "magnitude", "route": "scale"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """buffers: (one row a sample, width). kv_layers: (kv_heads, head_dim, group, latent)."""

    buffers: list[tuple[bool, int]]
    kv_layers: list[tuple[int, int, int, int]]
    ops: list[_kernels.OpCall]


def translate(program: Program, weights: Mapping[str, _kernels.PackedWeight]) -> Translated:
    """Raises InternalError for a weight that was not packed by this backend, UnsupportedError for an op or variant that the engine lacks."""
    index = {name: i for i, name in enumerate(program.buffers)}
    return Translated(
        buffers=[(buffer.axis == "S", buffer.width) for buffer in program.buffers.values()],
        kv_layers=[(layer.kv_heads, layer.head_dim, layer.group, layer.latent) for layer in program.kv_layers],
        ops=[_translate_op(program, op, index, weights) for op in program.ops],
    )


def _translate_op(program: Program, op: Op, index: Mapping[str, int], weights: Mapping[str, _kernels.PackedWeight]) -> _kernels.OpCall:
    kind = getattr(_kernels.OpKind, op.kind, None)
    if kind is None:
        raise UnsupportedError(f"the native backend has no op {op.kind!r}")
    for name in op.weights:
        if name not in weights:
            raise InternalError(f"{op.kind}: weight {name!r} was not packed by the native backend")
    attributes, given = op.attributes, [*(weights[name] for name in op.weights), None, None, None, None]
    if "kv_layer" in attributes:
        layer = program.kv_layers[int(attributes["kv_layer"])]
        if (attributes["kv_heads"], attributes["head_dim"]) != (layer.kv_heads, layer.head_dim):
            raise InternalError(f"{op.kind}: attributes {dict(attributes)} do not fit KV layer {layer}")
    return _kernels.OpCall(
        kind=kind,
        input=index[op.inputs[0]] if op.inputs else -1,
        output=index[op.outputs[0]] if op.outputs else -1,
        weight=given[0],
        bias=given[1],
        gate_up_bias=given[2],
        down_bias=given[3],
        accumulate=bool(attributes.get("accumulate", False)),
        number=float(attributes[_NUMBER[op.kind]]) if op.kind in _NUMBER else 0.0,
        kv_layer=int(attributes.get("kv_layer", -1)),
        heads=int(attributes.get("heads", 0)),
        scale=float(attributes[_SCALE[op.kind]]) if op.kind in _SCALE else 1.0,
        offset=float(attributes.get("offset", 0.0)),
        column=int(attributes.get("column", 0)),
        groups=int(attributes.get("groups", 0)),
        window=int(attributes.get("window", 0)),
        soft_cap=float(attributes.get("soft_cap", 0.0)),
        activation=_activation(attributes["kind"]) if op.kind in ("gated_activation", "experts") else _kernels.Activation.silu,
        second=index[op.inputs[1]] if len(op.inputs) > 1 else -1,
        passed=int(attributes.get("passed", 0)),
        expert_count=int(attributes.get("expert_count", 0)),
        top_k=int(attributes.get("top_k", 0)),
        sigmoid=_scoring(attributes["scoring"]) if op.kind == "route" else False,
        renormalise=bool(attributes.get("renormalise", False)),
        groups_kept=int(attributes.get("groups_kept", 0)),
        group_best=int(attributes.get("group_best", 0)),
    )


def _scoring(name: Attribute) -> bool:
    """Whether it is the sigmoid."""
    if name not in ("softmax", "sigmoid"):
        raise UnsupportedError(f"route by {name!r}; the native backend has softmax and sigmoid")
    return name == "sigmoid"


def _activation(kind: Attribute) -> _kernels.Activation:
    activation = getattr(_kernels.Activation, str(kind), None)
    if activation is None:
        raise UnsupportedError(f"activation of kind {kind!r}; the native backend has {[known.name for known in _kernels.Activation]}")
    assert isinstance(activation, _kernels.Activation), kind
    return activation
