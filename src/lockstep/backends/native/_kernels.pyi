"""Types of the extension module that native/bindings.cpp builds."""

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from lockstep.ops.step import F32, I32, U64

Columns = tuple[I32, U64, I32, F32, I32, F32, F32, I32, I32]
Edits = tuple[I32, NDArray[np.uint32], I32, I32, F32, F32, F32]
Samples = tuple[I32, F32, I32, I32, F32]

class EngineError(Exception): ...

class DType(Enum):
    float32 = 0
    bfloat16 = 1
    int8 = 2

class Layout(Enum):
    panels = 0
    rows = 1
    vector = 2

class OpKind(Enum):
    embed = 0
    rms_norm = 1
    linear = 2
    head_linear = 3
    rope_write = 4
    latent_write = 5
    paged_attention = 6
    gated_activation = 7
    soft_cap = 8
    route = 9
    experts = 10
    select = 11
    sample = 12

class Activation(Enum):
    silu = 0
    gelu_tanh = 1
    clamped_silu = 2

class PackedWeight:
    @property
    def nbytes(self) -> int: ...

class WeightArena:
    def pack(self, values: F32, dtype: DType, layout: Layout) -> PackedWeight: ...

class OpCall:
    def __init__(
        self,
        *,
        kind: OpKind,
        input: int = -1,
        output: int = -1,
        weight: PackedWeight | None = None,
        bias: PackedWeight | None = None,
        accumulate: bool = False,
        number: float = 0.0,
        kv_layer: int = -1,
        heads: int = 0,
        scale: float = 1.0,
        offset: float = 0.0,
        column: int = 0,
        groups: int = 0,
        window: int = 0,
        soft_cap: float = 0.0,
        activation: Activation = ...,
        second: int = -1,
        expert_count: int = 0,
        top_k: int = 0,
        sigmoid: bool = False,
        renormalise: bool = False,
        groups_kept: int = 0,
        group_best: int = 0,
        passed: int = 0,
        gate_up_bias: PackedWeight | None = None,
        down_bias: PackedWeight | None = None,
    ) -> None: ...

class Executable:
    def __init__(
        self,
        *,
        instruction_set: str,
        dtype: DType,
        kv_dtype: DType,
        limits: tuple[int, int, int, int],
        block_counts: list[int],
        threads: int,
        buffers: list[tuple[bool, int]],
        kv_layers: list[tuple[int, int, int, int]],
        ops: list[OpCall],
    ) -> None: ...
    def run(
        self,
        token_ids: I32,
        positions: I32,
        row_starts: I32,
        block_tables: list[I32],
        sampling: Columns,
        edits: Edits | None,
        bound: list[tuple[int, F32]],
        samples: Samples,
    ) -> None: ...
    def read_buffer(self, buffer: int, out: F32) -> None: ...
    @property
    def kv_bytes(self) -> int: ...

def cpu_features() -> list[tuple[str, bool]]: ...
def instruction_sets() -> list[str]: ...
def numerics_probe(instruction_set: str) -> int: ...
def philox4x32(counter: tuple[int, int, int, int] | list[int], key: tuple[int, int] | list[int]) -> list[int]: ...
def elementwise(instruction_set: str, function: str, x: F32, out: F32) -> None: ...
def gumbel(instruction_set: str, ids: NDArray[np.uint32], seed: int, position: int, out: F32) -> None: ...
def log_of_unit(instruction_set: str, w: NDArray[np.uint32], out: F32) -> None: ...
