"""The reference backend: runs a program op by op with the bodies of `bodies`. Knows programs and buffers; the numbers are made elsewhere.

It is simple first. It is also row-invariant in float32 on CPUs, at any row and thread count, so that `lockstep verify` may run on it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.backends.reference.bodies import TORCH_DTYPE, Call, KVPool, Matrix, Step
from lockstep.backends.reference.checks import check_arrays, check_step
from lockstep.backends.reference.invariant import padded_matrix
from lockstep.backends.reference.table import OP_REFERENCES
from lockstep.errors import InternalError
from lockstep.ops.backend import DType, Limits, PackedWeight
from lockstep.ops.program import KVLayer, Program, Weight
from lockstep.ops.step import F32, SampleOutputs, StepInputs

NUMERICS_VERSION = 2


class ReferenceBackend:
    """Plain torch on `device`."""

    name = "reference"

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        kind = torch.backends.cpu.get_cpu_capability() if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        self.numerics = f"reference-{NUMERICS_VERSION} torch-{torch.__version__} {self.device.type} {kind}"

    def pack(self, weight: Weight, values: NDArray[np.float32], dtype: DType) -> Matrix:
        """values: float32 [rows, columns]. Vectors stay float32; the rest is rounded to dtype."""
        if values.shape != (weight.rows, weight.columns) or values.dtype != np.float32:
            raise InternalError(f"weight {weight.name!r} must be float32 {(weight.rows, weight.columns)}, got {values.dtype} {values.shape}")
        is_vector = "vector" in weight.roles
        tensor = torch.from_numpy(np.array(values, order="C", copy=True)).to(self.device)
        if is_vector:
            return Matrix(rows=weight.rows, columns=weight.columns, dtype="float32", padded=tensor)
        return Matrix(rows=weight.rows, columns=weight.columns, dtype=dtype, padded=padded_matrix(tensor.to(TORCH_DTYPE[dtype]).float()))

    def compile(self, program: Program, weights: Mapping[str, PackedWeight], dtype: DType, limits: Limits, threads: int) -> ReferenceExecutable:
        """Bind weights by the program's names for them and allocate the KV pool; threads: torch's, while a step runs."""
        bound: dict[str, Matrix] = {}
        for name in program.weights:
            weight = weights.get(name)
            if not isinstance(weight, Matrix):
                raise InternalError(f"weight {name!r} must be packed by this backend, got {type(weight).__name__}")
            bound[name] = weight
        return ReferenceExecutable(program, bound, dtype, limits, threads, self.device)


class ReferenceExecutable:
    """One stage's program with its KV pool and buffers. One step at a time."""

    def __init__(self, program: Program, weights: Mapping[str, Matrix], dtype: DType, limits: Limits, threads: int, device: torch.device) -> None:
        self._program, self._weights, self._limits, self._threads, self._device = program, weights, limits, threads, device
        rows = {"T": limits.tokens_max, "S": limits.samples_max}
        self._buffers = {name: torch.zeros((rows[buffer.axis], buffer.width), device=device) for name, buffer in program.buffers.items()}
        self._pools = tuple(_kv_pool(layer, dtype, limits, device) for layer in program.kv_layers)

    @property
    def kv_bytes(self) -> int:
        return sum((1 if pool.latent else 2) * _bytes(pool) for pool in self._pools)

    def read_buffer(self, name: str, rows: int) -> F32:
        if name not in self._buffers or not 0 <= rows <= len(self._buffers[name]):
            raise InternalError(f"no buffer {name!r} with {rows} rows; there are { ({n: len(b) for n, b in self._buffers.items()}) }")
        return self._buffers[name][:rows].cpu().numpy().copy()

    def run(self, inputs: StepInputs, activations: Mapping[str, F32], outputs: Mapping[str, F32]) -> SampleOutputs | None:
        """See `ops.backend.Executable.run`."""
        tokens = len(inputs.token_ids)
        check_step(self._program, self._limits, inputs)
        check_arrays(self._program, "activations", self._program.inputs, activations, tokens)
        check_arrays(self._program, "outputs", self._program.outputs, outputs, tokens)
        threads_before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                return self._run(inputs, activations, outputs)
        finally:
            torch.set_num_threads(threads_before)

    def _run(self, inputs: StepInputs, activations: Mapping[str, F32], outputs: Mapping[str, F32]) -> SampleOutputs | None:
        counts = {"T": len(inputs.token_ids), "S": len(inputs.sampling.index)}
        views = {name: self._buffers[name][: counts[buffer.axis]] for name, buffer in self._program.buffers.items()}
        for name, array in activations.items():
            views[name].copy_(torch.from_numpy(array.copy()))
        step, samples = self._step(inputs), None
        for op in self._program.ops:
            call = Call(
                inputs=tuple(views[name] for name in op.inputs),
                held=views[op.outputs[0]] if op.outputs else None,
                weights=tuple(self._weights[name] for name in op.weights),
                attributes=op.attributes,
                step=step,
            )
            result = OP_REFERENCES[op.kind].body(call)
            if isinstance(result, Tensor):
                views[op.outputs[0]].copy_(result)
            else:
                samples = result
        for name, array in outputs.items():
            array[:] = views[name].cpu().numpy()
        return samples

    def _step(self, inputs: StepInputs) -> Step:
        row_of_token = np.repeat(np.arange(len(inputs.row_starts) - 1), np.diff(inputs.row_starts))
        size = self._limits.block_size
        kv_index = (
            np.repeat(table.astype(np.int64) * size, size, axis=1) + np.tile(np.arange(size), table.shape[1]) for table in inputs.block_tables
        )
        return Step(
            token_ids=torch.from_numpy(inputs.token_ids.astype(np.int64)).to(self._device),
            positions=torch.from_numpy(inputs.positions.astype(np.int64)).to(self._device),
            row_of_token=torch.from_numpy(row_of_token.astype(np.int64)).to(self._device),
            kv_index=tuple(torch.from_numpy(index).to(self._device) for index in kv_index),
            sampling=inputs.sampling,
            pools=self._pools,
        )


def _bytes(pool: KVPool) -> int:
    """Of the keys, as a backend that packs them would keep them."""
    return pool.keys.numel() + 4 * pool.keys.shape[0] * pool.keys.shape[1] if pool.int8 else pool.keys.numel() * pool.keys.element_size()


def _kv_pool(layer: KVLayer, dtype: DType, limits: Limits, device: torch.device) -> KVPool:
    """Not a number until written: attention over an unwritten position shows at once."""
    shape = (limits.block_counts[layer.group] * limits.block_size, layer.kv_heads, layer.head_dim)
    kept = limits.kv_dtype or dtype
    keys = torch.full(shape, torch.nan, dtype=torch.float32 if kept == "int8" else TORCH_DTYPE[kept], device=device)
    values = keys[..., -layer.latent :] if layer.latent else torch.full_like(keys, torch.nan)
    return KVPool(keys=keys, values=values, group=layer.group, latent=bool(layer.latent), int8=kept == "int8")
