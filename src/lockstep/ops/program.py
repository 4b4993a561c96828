"""A model as data: a list of op calls on named buffers, for the layers that one stage holds.

Knows names and shapes; does not know how any op is computed, where weights come from, or what a request is.

Axes, used in every shape below:
    T  tokens computed in this step, all rows one after the other
    R  rows (one a request) in this step
    S  positions to sample in this step
    H, K, N, V, ...  widths, fixed by the model
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import InternalError
from lockstep.ops.vocabulary import OPS, Attribute

Axis = Literal["T", "S"]
WeightRole = Literal["matrix", "vector", "embedding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A float32 activation array of shape [axis, width]."""

    name: str
    axis: Axis
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A weight that the program reads. rows x columns as the checkpoint stores it: [N, K] for y = x @ w.T, [V, H] for an embedding,
    [1, N] for a vector. A matrix may also be used as an embedding and the other way round (tied embeddings): `roles` says which."""

    name: str
    rows: int
    columns: int
    roles: tuple[WeightRole, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayer:
    """One layer's KV cache as attention sees it. group: the KV group whose block table addresses it (0 = full attention). latent: above 0, a value
    is the last so many elements of its key and takes no room of its own (multi-head latent attention)."""

    kv_heads: int
    head_dim: int
    group: int = 0
    latent: int = 0

    @property
    def width(self) -> int:
        """Elements that one position takes."""
        return self.kv_heads * self.head_dim * (1 if self.latent else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One call. The meaning of `kind` and its attributes is in `vocabulary.OPS`."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    attributes: Mapping[str, Attribute] = ()  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Everything a backend needs to run one stage.

    inputs: buffers that the caller fills before the step (the activations of the stage before); empty on the first stage.
    outputs: buffers that the caller reads after it (the activations for the stage after); empty on the last stage, which samples.
    samples: True if the last op is `sample`.
    """

    buffers: Mapping[str, Buffer]
    weights: Mapping[str, Weight]
    kv_layers: tuple[KVLayer, ...]
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    samples: bool


class ProgramBuilder:
    """Collects op calls and checks each against the vocabulary as it comes. A mistake is ours: InternalError."""

    def __init__(self) -> None:
        self._buffers: dict[str, Buffer] = {}
        self._weights: dict[str, Weight] = {}
        self._kv_layers: list[KVLayer] = []
        self._ops: list[Op] = []
        self._inputs: list[str] = []
        self._outputs: list[str] = []

    def buffer(self, name: str, axis: Axis, width: int) -> str:
        """Declare an activation buffer; declaring it twice alike is fine. Returns the name."""
        buffer = Buffer(name=name, axis=axis, width=width)
        if self._buffers.setdefault(name, buffer) != buffer:
            raise InternalError(f"buffer {name!r} declared as {self._buffers[name]} and as {buffer}")
        return name

    def weight(self, name: str, rows: int, columns: int, role: WeightRole) -> str:
        """Declare a weight, or one more role of a declared one. Returns the name."""
        old = self._weights.get(name)
        roles = (role,) if old is None else old.roles if role in old.roles else (*old.roles, role)
        if old is not None and (old.rows, old.columns) != (rows, columns):
            raise InternalError(f"weight {name!r} declared as {old.rows}x{old.columns} and as {rows}x{columns}")
        self._weights[name] = Weight(name=name, rows=rows, columns=columns, roles=roles)
        return name

    def kv_layer(self, kv_heads: int, head_dim: int, group: int = 0, latent: int = 0) -> int:
        """Add a KV cache layer; returns its index among this stage's layers."""
        self._kv_layers.append(KVLayer(kv_heads=kv_heads, head_dim=head_dim, group=group, latent=latent))
        return len(self._kv_layers) - 1

    def input(self, name: str) -> str:
        self._inputs.append(name)
        return name

    def output(self, name: str) -> str:
        self._outputs.append(name)
        return name

    def call(
        self,
        kind: str,
        /,
        inputs: tuple[str, ...] = (),
        outputs: tuple[str, ...] = (),
        weights: tuple[str, ...] = (),
        **attributes: Attribute,
    ) -> None:
        """Append one op call, checked: counts of inputs, outputs and weights, names declared, attributes the op's.
        Those left out get their defaults."""
        spec = OPS.get(kind)
        if spec is None:
            raise InternalError(f"no op {kind!r}; there are {sorted(OPS)}")
        for what, given, wanted in (("inputs", inputs, spec.inputs), ("outputs", outputs, spec.outputs)):
            if len(given) != len(wanted):
                raise InternalError(f"{kind}: {what} are {wanted}, got {given}")
            for name in given:
                if name not in self._buffers:
                    raise InternalError(f"{kind}: buffer {name!r} is not declared")
        if not len(spec.weights) - spec.optional_weights <= len(weights) <= len(spec.weights):
            raise InternalError(f"{kind}: weights are {spec.weights}, got {weights}")
        for name in weights:
            if name not in self._weights:
                raise InternalError(f"{kind}: weight {name!r} is not declared")
        if not set(spec.attributes) <= set(attributes) <= {*spec.attributes, *spec.defaults}:
            raise InternalError(f"{kind}: attributes are {sorted(spec.attributes)}, may be {sorted(spec.defaults)}, got {sorted(attributes)}")
        self._ops.append(Op(kind=kind, inputs=inputs, outputs=outputs, weights=weights, attributes={**spec.defaults, **attributes}))

    def build(self) -> Program:
        return Program(
            buffers=dict(self._buffers),
            weights=dict(self._weights),
            kv_layers=tuple(self._kv_layers),
            ops=tuple(self._ops),
            inputs=tuple(self._inputs),
            outputs=tuple(self._outputs),
            samples=bool(self._ops) and self._ops[-1].kind == "sample",
        )
