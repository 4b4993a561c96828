"""A `Program` as the C++ engine takes it: buffers by index, op calls as records. Knows both vocabularies; computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.backends.native import _kernels
from lockstep.errors import InternalError, UnsupportedError
from lockstep.ops.program import Op, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """buffers: (one row a sample, width). kv_layers: (kv_heads, head_dim, group)."""

    buffers: list[tuple[bool, int]]
    kv_layers: list[tuple[int, int, int]]
    ops: list[_kernels.OpCall]


def translate(program: Program, weights: Mapping[str, _kernels.PackedWeight]) -> Translated:
    """Raises InternalError for a weight that was not packed by this backend, UnsupportedError for an op or variant that the engine lacks."""
    index = {name: i for i, name in enumerate(program.buffers)}
    return Translated(
        buffers=[(buffer.axis == "S", buffer.width) for buffer in program.buffers.values()],
        kv_layers=[(layer.kv_heads, layer.head_dim, layer.group) for layer in program.kv_layers],
        ops=[_translate_op(program, op, index, weights) for op in program.ops],
    )


def _translate_op(program: Program, op: Op, index: Mapping[str, int], weights: Mapping[str, _kernels.PackedWeight]) -> _kernels.OpCall:
    kind = getattr(_kernels.OpKind, op.kind, None)
    if kind is None:
        raise UnsupportedError(f"the native backend has no op {op.kind!r}")
    for name in op.weights:
        if name not in weights:
            raise InternalError(f"{op.kind}: weight {name!r} was not packed by the native backend")
    attributes = op.attributes
    if op.kind == "gated_activation" and attributes["kind"] != "silu":
        raise UnsupportedError(f"gated_activation of kind {attributes['kind']!r}; the native backend has 'silu'")
    if op.kind in ("rope_write", "paged_attention"):
        layer = program.kv_layers[int(attributes["kv_layer"])]
        if (attributes["kv_heads"], attributes["head_dim"]) != (layer.kv_heads, layer.head_dim):
            raise InternalError(f"{op.kind}: attributes {dict(attributes)} do not fit KV layer {layer}")
    number = attributes["eps"] if op.kind == "rms_norm" else attributes["scale"] if op.kind == "paged_attention" else 0.0
    return _kernels.OpCall(
        kind=kind,
        input=index[op.inputs[0]] if op.inputs else -1,
        output=index[op.outputs[0]] if op.outputs else -1,
        weight=weights[op.weights[0]] if op.weights else None,
        bias=weights[op.weights[1]] if len(op.weights) > 1 else None,
        accumulate=bool(attributes["accumulate"]) if op.kind == "linear" else False,
        number=float(number),
        kv_layer=int(attributes["kv_layer"]) if "kv_layer" in attributes else -1,
        heads=int(attributes["heads"]) if "heads" in attributes else 0,
    )
