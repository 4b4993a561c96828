"""What must hold of a step before its arrays address memory. Knows shapes and ranges; a breach is a mistake of ours: InternalError."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import InternalError
from lockstep.ops.backend import Limits
from lockstep.ops.program import Program
from lockstep.ops.step import F32, LogitEdits, StepInputs


def check_step(program: Program, limits: Limits, inputs: StepInputs) -> None:
    """Counts within the limits, rows of consecutive positions, a valid block for every position, token ids and sampled indices in range."""
    tokens, rows, samples = len(inputs.token_ids), len(inputs.row_starts) - 1, len(inputs.sampling.index)
    for name, count, most in (("tokens", tokens, limits.tokens_max), ("rows", rows, limits.rows_max), ("samples", samples, limits.samples_max)):
        if not 0 <= count <= most:
            raise InternalError(f"a step may have 0 to {most} {name}, got {count}")
    if inputs.positions.shape != (tokens,):
        raise InternalError(f"positions must have shape {(tokens,)}, got {inputs.positions.shape}")
    starts = inputs.row_starts
    if starts[0] != 0 or starts[-1] != tokens or (np.diff(starts) < 0).any():
        raise InternalError(f"row_starts must ascend from 0 to {tokens}, got {starts.tolist()}")
    for op in program.ops:
        if op.kind == "embed":
            _check_range("token_ids", inputs.token_ids, program.weights[op.weights[0]].rows)
    _check_positions(program, limits, inputs)
    _check_sampling(inputs, tokens, samples)


def check_arrays(program: Program, what: str, names: tuple[str, ...], arrays: Mapping[str, F32], tokens: int) -> None:
    """Activations or outputs: exactly the program's, float32, C-contiguous, [tokens, width]."""
    if set(arrays) != set(names):
        raise InternalError(f"{what} must be {sorted(names)}, got {sorted(arrays)}")
    for name, array in arrays.items():
        wanted = (tokens, program.buffers[name].width)
        if array.shape != wanted or array.dtype != np.float32 or not array.flags.c_contiguous:
            raise InternalError(f"{what} {name!r} must be C-contiguous float32 {wanted}, got {array.dtype} {array.shape}")


def _windows(program: Program, groups: int) -> list[int | None]:
    """Of each KV group the widest window of those who read it, 0: all; None: no layer is of the group."""
    windows: list[int | None] = [None] * groups
    for layer in program.kv_layers:
        windows[layer.group] = 1
    for op in program.ops:
        if op.kind == "paged_attention":
            group, window = program.kv_layers[int(op.attributes["kv_layer"])].group, int(op.attributes["window"])
            windows[group] = 0 if window == 0 or windows[group] == 0 else max(window, windows[group] or 0)
    return windows


def _check_positions(program: Program, limits: Limits, inputs: StepInputs) -> None:
    rows = len(inputs.row_starts) - 1
    if len(inputs.block_tables) != len(limits.block_counts):
        raise InternalError(f"a step needs {len(limits.block_counts)} block tables, got {len(inputs.block_tables)}")
    windows = _windows(program, len(limits.block_counts))
    for group, (table, count) in enumerate(zip(inputs.block_tables, limits.block_counts, strict=True)):
        if table.ndim != 2 or table.shape[0] != rows:
            raise InternalError(f"block table {group} must have {rows} rows, got shape {table.shape}")
        for row in range(rows):
            positions = inputs.positions[inputs.row_starts[row] : inputs.row_starts[row + 1]]
            if not len(positions):
                continue
            if positions[0] < 0 or (np.diff(positions) != 1).any():
                raise InternalError(f"row {row} must have consecutive positions from 0 up, got {positions.tolist()}")
            used = int(positions[-1]) // limits.block_size + 1
            if used > table.shape[1]:
                raise InternalError(
                    f"row {row} reaches position {positions[-1]}, which needs {used} blocks; block table {group} has {table.shape[1]}"
                )
            window = windows[group]
            if window is not None:
                first = max(0, int(positions[0]) + 1 - window) // limits.block_size if window else 0
                _check_range(f"block table {group} of row {row}", table[row, first:used], count)


def _check_sampling(inputs: StepInputs, tokens: int, samples: int) -> None:
    sampling = inputs.sampling
    for name in ("seeds", "positions", "temperatures", "top_ks", "top_ps", "min_ps", "logprob_counts"):
        if getattr(sampling, name).shape != (samples,):
            raise InternalError(f"sampling.{name} must have shape {(samples,)}, got {getattr(sampling, name).shape}")
    _check_range("sampling.index", sampling.index, tokens)
    if sampling.targets is not None and sampling.targets.shape != (samples,):
        raise InternalError(f"sampling.targets must have shape {(samples,)}, got {sampling.targets.shape}")
    if sampling.edits is not None:
        _check_edits(sampling.edits, samples)


def _check_edits(edits: LogitEdits, samples: int) -> None:
    """All but the width of the vocabulary, which the op knows."""
    if edits.mask_rows.shape != (samples,) or edits.starts.shape != (samples + 1,) or (np.diff(edits.starts) < 0).any():
        raise InternalError(f"logit edits of {samples} samples have mask_rows {edits.mask_rows.shape} and starts {edits.starts.tolist()[:8]}")
    for name in ("ids", "biases", "penalties", "subtracts"):
        if getattr(edits, name).shape != (int(edits.starts[-1]),):
            raise InternalError(f"edits.{name} must have {edits.starts[-1]} entries, got {getattr(edits, name).shape}")
    _check_range("edits.mask_rows", edits.mask_rows[edits.mask_rows != -1], len(edits.masks))
    if not (edits.penalties > 0).all():
        raise InternalError(f"edits.penalties must be above 0, got {edits.penalties.min()}")


def _check_range(what: str, values: NDArray[np.int32], count: int) -> None:
    wrong = values[(values < 0) | (values >= count)]
    if len(wrong):
        raise InternalError(f"{what} must be in 0..{count - 1}, got {wrong[:8].tolist()}")
