"""One compiled program: binds the caller's arrays to its buffers and runs a step as one call into C++.

Knows which buffers may live in the caller's memory; does not know what the ops do.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lockstep.backends.native import _kernels
from lockstep.errors import InternalError
from lockstep.ops.program import Program
from lockstep.ops.step import F32, LogitEdits, SampleOutputs, SamplingInputs, StepInputs


class NativeExecutable:
    """Satisfies `ops.backend.Executable`. Holds the last step's activation arrays, so that read_buffer can still look at them."""

    def __init__(self, core: _kernels.Executable, program: Program) -> None:
        self._core = core
        self._program = program
        self._index = {name: i for i, name in enumerate(program.buffers)}
        self._written = {name for op in program.ops for name in op.outputs}
        self._bound: dict[str, F32] = {}

    def run(self, inputs: StepInputs, activations: Mapping[str, F32], outputs: Mapping[str, F32]) -> SampleOutputs | None:
        """As `ops.backend.Executable.run`. The arrays in `activations` are never written; a step that raises leaves the KV of its own tokens
        undefined and everything else usable."""
        self._bound = self._bind(activations, outputs)
        sampling = inputs.sampling
        samples = _empty_samples(sampling)
        try:
            self._core.run(
                token_ids=inputs.token_ids,
                positions=inputs.positions,
                row_starts=inputs.row_starts,
                block_tables=list(inputs.block_tables),
                sampling=_columns(sampling),
                edits=_edits(sampling.edits),
                bound=[(self._index[name], array) for name, array in self._bound.items()],
                samples=(samples.tokens, samples.logprobs, samples.ranks, samples.top_ids, samples.top_logprobs),
            )
        except _kernels.EngineError as error:
            raise InternalError(f"native step: {error}") from None
        except TypeError:
            got = _describe(inputs, self._bound)
            raise InternalError(f"native step: expected C-contiguous arrays of the dtypes in ops.step, got {got}") from None
        return samples if self._program.samples else None

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool, touched or not."""
        return self._core.kv_bytes

    def read_buffer(self, name: str, rows: int) -> F32:
        """The first `rows` rows of buffer `name` after the last step, copied."""
        buffer = self._program.buffers.get(name)
        if buffer is None:
            raise InternalError(f"no buffer {name!r}; there are {sorted(self._program.buffers)}")
        bound = self._bound.get(name)
        if bound is not None:
            return bound[:rows].copy()
        out = np.empty((rows, buffer.width), dtype=np.float32)
        try:
            self._core.read_buffer(self._index[name], out)
        except _kernels.EngineError as error:
            raise InternalError(f"buffer {name!r}: {error}") from None
        return out

    def _bind(self, activations: Mapping[str, F32], outputs: Mapping[str, F32]) -> dict[str, F32]:
        """An output is computed in the caller's array; an input is read from it, or, where an op writes that buffer, from a copy."""
        bound: dict[str, F32] = {}
        for name in self._program.outputs:
            if name not in outputs:
                raise InternalError(f"the program writes {self._program.outputs}; no output array for {name!r}")
            if not outputs[name].flags.writeable:
                raise InternalError(f"the output array for {name!r} is read-only")
            bound[name] = outputs[name]
        for name in self._program.inputs:
            if name not in activations:
                raise InternalError(f"the program reads {self._program.inputs}; no activations for {name!r}")
            given = activations[name]
            if name in bound:
                if bound[name].shape != given.shape:
                    raise InternalError(f"{name!r} is input and output: shapes {given.shape} and {bound[name].shape} differ")
                if bound[name] is not given:
                    bound[name][...] = given
            else:
                bound[name] = given.copy() if name in self._written else given
        return bound


def _empty_samples(sampling: SamplingInputs) -> SampleOutputs:
    count = len(sampling.index)
    top_count = max(0, int(sampling.logprob_counts.max())) if count else 0
    return SampleOutputs(
        tokens=np.full(count, -1, dtype=np.int32),
        logprobs=np.full(count, np.nan, dtype=np.float32),
        ranks=np.full(count, -1, dtype=np.int32),
        top_ids=np.full((count, top_count), -1, dtype=np.int32),
        top_logprobs=np.full((count, top_count), np.nan, dtype=np.float32),
    )


def _columns(sampling: SamplingInputs) -> _kernels.Columns:
    return (
        sampling.index,
        sampling.seeds,
        sampling.positions,
        sampling.temperatures,
        sampling.top_ks,
        sampling.top_ps,
        sampling.min_ps,
        sampling.logprob_counts,
        np.full(len(sampling.index), -1, dtype=np.int32) if sampling.targets is None else sampling.targets,
    )


def _edits(edits: LogitEdits | None) -> _kernels.Edits | None:
    if edits is None:
        return None
    return (edits.mask_rows, edits.masks, edits.starts, edits.ids, edits.biases, edits.penalties, edits.subtracts)


def _describe(inputs: StepInputs, bound: Mapping[str, F32]) -> str:
    sampling = inputs.sampling
    arrays = {name: getattr(inputs, name) for name in ("token_ids", "positions", "row_starts")}
    arrays |= {f"block_tables[{i}]": table for i, table in enumerate(inputs.block_tables)}
    arrays |= {
        f"sampling.{name}": getattr(sampling, name)
        for name in sampling.__dataclass_fields__
        if getattr(sampling, name) is not None and name != "edits"
    }
    if sampling.edits is not None:
        arrays |= {f"edits.{name}": getattr(sampling.edits, name) for name in sampling.edits.__dataclass_fields__}
    arrays |= bound
    return ", ".join(f"{name} {array.dtype}{list(array.shape)}{'' if array.flags.c_contiguous else ' strided'}" for name, array in arrays.items())
