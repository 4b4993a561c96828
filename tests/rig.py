"""The rig of most tests: a toy Llama with random weights, cut into stages, run on any backend over a sequence in any chunks.

Knows configs, weights by Hugging Face's names, programs and executables. Names no backend and does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.models.families import WeightSource, build_program, weight_sources
from lockstep.models.spec import ModelSpec, spec_from_config
from lockstep.ops.backend import Backend, DType, Executable, KVDType, Limits
from lockstep.ops.program import Program
from lockstep.ops.step import F32, I32, SampleOutputs, SamplingInputs, StepInputs

GREEDY: Mapping[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "logprob_count": -1}


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A toy Llama in config.json's names: 4 layers, hidden 64, 4 heads over 2 KV heads, vocabulary 300, window 512, head not tied."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config | changes


def tiny_weights(spec: ModelSpec, seed: int = 0) -> dict[str, F32]:
    """Random weights by Hugging Face's names, scaled so that every layer changes the residual stream by about its own size and
    that changing any one prompt token changes the greedy continuation (`test_models_llama` says so)."""
    program = build_program(spec, range(spec.layer_count), embeds=True, samples=True)
    draw = np.random.default_rng(seed)
    tensors: dict[str, F32] = {}
    for name, source in weight_sources(spec, program).items():
        if source.computed is not None:
            continue
        weight = program.weights[name]
        if source.arranged is not None:
            for part in source.parts:
                if part not in tensors:
                    shape = source.arranged.shape
                    tensors[part] = _random_tensor(draw, part, 1, 1, is_vector="bias" in part, shape=shape)
            continue
        for part, rows in zip(source.parts, _part_rows(spec, name, weight.rows, weight.columns, len(source.parts)), strict=True):
            tensors[part] = _random_tensor(draw, part, rows, weight.columns, is_vector=weight.roles == ("vector",))
    return tensors


def _part_rows(spec: ModelSpec, name: str, rows: int, columns: int, parts: int) -> list[int]:
    """How the fused weight's rows (a bias vector's entries) are shared by its parts."""
    if parts == 1:
        return [rows if rows > 1 or ".shared.router" in name else columns]
    if ".experts." in name or ".shared." in name:
        return [rows // parts] * parts
    if parts == 2:
        return [(columns if rows == 1 else rows) // 2] * 2
    return [head_count * spec.head_dim for head_count in (spec.head_count, spec.kv_head_count, spec.kv_head_count)]


def _random_tensor(draw: np.random.Generator, part: str, rows: int, columns: int, *, is_vector: bool, shape: tuple[int, ...] | None = None) -> F32:
    """shape: of the tensor where it is not [rows, columns]; a stack of matrices [experts, inputs, outputs] if it has three axes."""
    if part.endswith("norm.weight"):
        return (1.0 + 0.1 * draw.standard_normal(rows)).astype(np.float32)
    if is_vector:
        return (0.3 * draw.standard_normal(shape or rows)).astype(np.float32)
    shape = shape or (rows, columns)
    columns = shape[1]
    # Queries and keys sharper than the rest, so that attention picks positions and does not average them all.
    gain = 2.0 if any(name in part for name in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj")) else 1.5
    scale = 1.0 if "embed_tokens" in part else gain * columns**-0.5
    return (scale * draw.standard_normal(shape)).astype(np.float32)


def program_weights(spec: ModelSpec, program: Program, tensors: Mapping[str, F32]) -> dict[str, F32]:
    """The program's weights, float32 [rows, columns], put together from a checkpoint's tensors."""
    sources: Mapping[str, WeightSource] = weight_sources(spec, program)
    weights: dict[str, F32] = {}
    for name, source in sources.items():
        values = source.computed if source.computed is not None else np.concatenate([tensors[part] for part in source.parts])
        values = values if source.arranged is None else source.arranged.arrange(values)
        weight = program.weights[name]
        weights[name] = np.ascontiguousarray(values.reshape(weight.rows, weight.columns), np.float32)
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The executables of all stages of one model, first to last, with what they were built for."""

    spec: ModelSpec
    executables: tuple[Executable, ...]
    programs: tuple[Program, ...]
    limits: Limits


def build_stages(
    backend: Backend,
    spec: ModelSpec,
    tensors: Mapping[str, F32],
    split: Sequence[range] | None = None,
    *,
    dtype: DType = "float32",
    threads: int = 1,
    tokens_max: int = 128,
    rows_max: int = 8,
    block_size: int = 4,
    block_count: int = 128,
    kv_dtype: KVDType | None = None,
) -> Stages:
    """One executable a range of `split` (default: one stage with all layers). As many positions may be sampled as there are tokens."""
    ranges = tuple(split or (range(spec.layer_count),))
    limits = Limits(
        tokens_max=tokens_max,
        rows_max=rows_max,
        samples_max=tokens_max,
        block_size=block_size,
        block_counts=(block_count,) * len(spec.kv_windows),
        kv_dtype=kv_dtype,
    )
    executables, programs = [], []
    for index, layers in enumerate(ranges):
        program = build_program(spec, layers, embeds=index == 0, samples=index == len(ranges) - 1)
        values = program_weights(spec, program, tensors)
        packed = {name: backend.pack(program.weights[name], values[name], dtype) for name in program.weights}
        executables.append(backend.compile(program, packed, dtype, limits, threads))
        programs.append(program)
    return Stages(spec=spec, executables=tuple(executables), programs=tuple(programs), limits=limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a step: tokens at consecutive positions from `start`, in the request's blocks; sampling: changes to GREEDY."""

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    sampling: Mapping[str, Any] | None = None


def run_step(stages: Stages, rows: Sequence[Row]) -> tuple[F32, SampleOutputs]:
    """Run one step through all stages, every position sampled. Returns logits float32 [T, V] and the samples of all T positions."""
    inputs = step_inputs(rows, stages.spec.kv_windows, stages.limits.block_size)
    tokens = len(inputs.token_ids)
    activations: dict[str, F32] = {}
    samples = None
    for executable, program in zip(stages.executables, stages.programs, strict=True):
        outputs = {name: np.empty((tokens, program.buffers[name].width), np.float32) for name in program.outputs}
        samples = executable.run(inputs, activations, outputs)
        activations = outputs
    assert samples is not None, "the last stage samples"
    return stages.executables[-1].read_buffer("logits", tokens), samples


def step_inputs(rows: Sequence[Row], windows: Sequence[int] = (0,), block_size: int = 1) -> StepInputs:
    """The step's arrays for these rows, every position sampled. A request has the same blocks in every KV group; what lies behind a group's window is
    left out of its table."""
    lengths = [len(row.token_ids) for row in rows]
    width = max((len(row.blocks) for row in rows), default=0)
    table = np.full((len(rows), width), -1, np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row.blocks)] = row.blocks
    tables = [table.copy() for _ in windows]
    for behind, window in zip(tables, windows, strict=True):
        for index, row in enumerate(rows):
            behind[index, : max(0, row.start + 1 - window) // block_size if window else 0] = -1
    positions = [row.start + offset for row in rows for offset in range(len(row.token_ids))]
    settings = [{**GREEDY, **(row.sampling or {})} for row, length in zip(rows, lengths, strict=True) for _ in range(length)]
    return StepInputs(
        token_ids=_int32([token for row in rows for token in row.token_ids]),
        positions=_int32(positions),
        row_starts=_int32([0, *np.cumsum(lengths).tolist()]),
        block_tables=tuple(tables),
        sampling=SamplingInputs(
            index=np.arange(len(positions), dtype=np.int32),
            seeds=np.array([setting["seed"] for setting in settings], np.uint64),
            positions=_int32([position + 1 for position in positions]),
            temperatures=np.array([setting["temperature"] for setting in settings], np.float32),
            top_ks=_int32([setting["top_k"] for setting in settings]),
            top_ps=np.array([setting["top_p"] for setting in settings], np.float32),
            min_ps=np.array([setting["min_p"] for setting in settings], np.float32),
            logprob_counts=_int32([setting["logprob_count"] for setting in settings]),
        ),
    )


def logits_of(stages: Stages, token_ids: Sequence[int], chunks: Sequence[int] | None = None, *, blocks: Sequence[int] | None = None) -> F32:
    """Logits float32 [len(token_ids), V] of one sequence alone, computed in chunks of the given lengths (default: one)."""
    chunks = chunks or [len(token_ids)]
    assert sum(chunks) == len(token_ids), f"chunks {chunks} must add up to {len(token_ids)} tokens"
    blocks = blocks if blocks is not None else range(-(-len(token_ids) // stages.limits.block_size))
    parts, start = [], 0
    for length in chunks:
        logits, _ = run_step(stages, [Row(token_ids=token_ids[start : start + length], start=start, blocks=blocks)])
        parts.append(logits)
        start += length
    return np.concatenate(parts)


def greedy_continuation(stages: Stages, prompt: Sequence[int], count: int) -> list[int]:
    """The `count` greedy tokens after a prompt, one request alone: the oracle of most sameness tests."""
    tokens, blocks = list(prompt), range(-(-(len(prompt) + count) // stages.limits.block_size))
    _, samples = run_step(stages, [Row(token_ids=tokens, start=0, blocks=blocks)])
    tokens.append(int(samples.tokens[-1]))
    for _ in range(count - 1):
        _, samples = run_step(stages, [Row(token_ids=tokens[-1:], start=len(tokens) - 1, blocks=blocks)])
        tokens.append(int(samples.tokens[-1]))
    return tokens[len(prompt) :]


def tiny_spec(**changes: Any) -> ModelSpec:
    """`tiny_config` as a spec."""
    return spec_from_config(tiny_config(**changes))


def _int32(values: Sequence[int]) -> I32:
    return np.array(values, np.int32)
