"""What a backend must offer. A backend is passed to whoever runs programs; no module names one (only `launch` does).

It lives here rather than with its user because both `runtime` and `launch` hold backends, and `ops` is what they share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.ops.program import Program, Weight
from lockstep.ops.step import F32, SampleOutputs, StepInputs

DType = Literal["float32", "bfloat16"]
KVDType = Literal["float32", "bfloat16", "int8"]
"""int8: each position's key and value, head by head, as integers and one float32 scale: see the op `rope_write`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest step and the KV pool. tokens_max bounds T, rows_max bounds R, samples_max bounds S.
    block_counts: blocks in the pool, one a KV group. kv_dtype: None for the program's own dtype."""

    tokens_max: int
    rows_max: int
    samples_max: int
    block_size: int
    block_counts: tuple[int, ...]
    kv_dtype: KVDType | None = None


class PackedWeight(Protocol):
    """A weight in the backend's own layout. Immutable, and shared freely by several executables."""

    @property
    def nbytes(self) -> int: ...


class Executable(Protocol):
    """One stage's program with its own KV cache and work buffers. Not thread-safe: one step at a time."""

    def run(self, inputs: StepInputs, activations: Mapping[str, F32], outputs: Mapping[str, F32]) -> SampleOutputs | None:
        """Run one step. activations: the program's inputs, C-contiguous float32 [T, width]. outputs: the program's outputs, same form, written in
        place.
        Returns samples if the program samples, else None. Checks ids, block tables and offsets before it touches memory: InternalError."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        ...

    def read_buffer(self, name: str, rows: int) -> F32:
        """A copy of the first `rows` rows of a work buffer as the last step left it (tests compare logits with it)."""
        ...


class Backend(Protocol):
    """name: 'native', 'reference', ... numerics: names everything that decides the bits (instruction set, kernel version); part of the
    fingerprint."""

    name: str
    numerics: str

    def pack(self, weight: Weight, values: NDArray[np.float32], dtype: DType) -> PackedWeight:
        """values: float32 of shape [rows, columns] (a vector: [1, N])."""
        ...

    def compile(self, program: Program, weights: Mapping[str, PackedWeight], dtype: DType, limits: Limits, threads: int) -> Executable:
        """Bind a program to packed weights and allocate KV and work buffers."""
        ...
