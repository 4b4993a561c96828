"""`Backend` by C++ kernels: packs weights, compiles programs.

Knows how roles become layouts; does not know how a program is translated (`translation`) or a step is run (`executable`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lockstep.backends.native import _kernels
from lockstep.backends.native.executable import NativeExecutable
from lockstep.backends.native.processor import choose_instruction_set
from lockstep.backends.native.translation import translate
from lockstep.errors import ConfigError, InternalError
from lockstep.ops.backend import DType, Limits, PackedWeight
from lockstep.ops.program import Program, Weight

# Counts changes of arithmetic: raise it whenever any kernel's bits change, so that old and new servers do not claim one fingerprint.
NUMERICS_VERSION = 1
THREADS_MAX = 1024


class NativeBackend:
    """The default backend on CPUs.

    instruction_set: 'avx512_bf16', 'avx512', 'avx2', 'portable', or None for the best that runs here (`instruction_sets()`).
    Different sets give different bits, so `numerics` names the set; it also holds a hash of what the kernels make of fixed inputs, in case
    a processor or a compiler differs from another where it should not. Raises ConfigError for a set that this processor lacks.
    """

    name: str = "native"

    def __init__(self, *, instruction_set: str | None = None) -> None:
        self.instruction_set = choose_instruction_set(instruction_set)
        self._arena = _kernels.WeightArena()
        self.numerics: str = f"native-{NUMERICS_VERSION}/{self.instruction_set}/{_kernels.numerics_probe(self.instruction_set):08x}"

    def pack(self, weight: Weight, values: NDArray[np.float32], dtype: DType) -> PackedWeight:
        """values: float32 [rows, columns] (or [columns] for a vector). A matrix that is also an embedding is kept once. Vectors stay float32."""
        if weight.roles == ("vector",):
            values = values.reshape(1, -1)
        if values.shape != (weight.rows, weight.columns):
            raise InternalError(f"weight {weight.name!r} is {weight.rows}x{weight.columns}, got values of shape {values.shape}")
        layout = _layout_of(weight)
        return self._arena.pack(np.ascontiguousarray(values, dtype=np.float32), _dtype_of(dtype), layout)

    def compile(self, program: Program, weights: Mapping[str, PackedWeight], dtype: DType, limits: Limits, threads: int) -> NativeExecutable:
        """threads: in all, the calling one included. Raises InternalError if program, weights and limits do not fit together,
        ConfigError for threads out of range."""
        if not 1 <= threads <= THREADS_MAX:
            raise ConfigError(f"threads must be from 1 to {THREADS_MAX}, got {threads}")
        packed = {name: weight for name, weight in weights.items() if isinstance(weight, _kernels.PackedWeight)}
        translated = translate(program, packed)
        try:
            core = _kernels.Executable(
                instruction_set=self.instruction_set,
                dtype=_dtype_of(dtype),
                kv_dtype=_kernels.DType.int8 if limits.kv_dtype == "int8" else _dtype_of(limits.kv_dtype or dtype),
                limits=(limits.tokens_max, limits.rows_max, limits.samples_max, limits.block_size),
                block_counts=list(limits.block_counts),
                threads=threads,
                buffers=translated.buffers,
                kv_layers=translated.kv_layers,
                ops=translated.ops,
            )
        except _kernels.EngineError as error:
            raise InternalError(f"native backend: {error}") from None
        return NativeExecutable(core, program)


def _layout_of(weight: Weight) -> _kernels.Layout:
    if "vector" in weight.roles:
        if len(weight.roles) > 1:
            raise InternalError(f"weight {weight.name!r} has roles {weight.roles}; a vector is nothing else")
        return _kernels.Layout.vector
    return _kernels.Layout.panels if "matrix" in weight.roles else _kernels.Layout.rows


def _dtype_of(dtype: DType) -> _kernels.DType:
    if dtype == "float32":
        return _kernels.DType.float32
    if dtype == "bfloat16":
        return _kernels.DType.bfloat16
    raise ConfigError(f"the native backend computes in float32 or bfloat16, got {dtype!r}")
