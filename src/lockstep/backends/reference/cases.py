"""Input generators: for each op kind a small program around one call, with weights and steps drawn from a seed.

A case runs on any backend through its public face, so a kernel and the reference body can be given the very same work (`run_case`).
Widths are odd on purpose where the op allows it. Knows how to make inputs; does not know what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.ops.backend import Backend, DType, KVDType, Limits
from lockstep.ops.program import Program, ProgramBuilder
from lockstep.ops.step import F32, LogitEdits, SampleOutputs, SamplingInputs, StepInputs

_BLOCK_SIZE = 4
_BLOCK_COUNT = 64
_KINDS = ("silu", "gelu_tanh", "clamped_silu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseStep:
    """inputs and activations of one step."""

    inputs: StepInputs
    activations: Mapping[str, F32]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """weights: float32 [rows, columns] by name. watched: the buffers to compare after each step."""

    program: Program
    weights: Mapping[str, F32]
    steps: tuple[CaseStep, ...]
    watched: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    buffers: Mapping[str, F32]
    samples: SampleOutputs | None


def run_case(backend: Backend, case: OpCase, dtype: DType, threads: int = 1, *, kv_dtype: KVDType | None = None) -> tuple[StepOutcome, ...]:
    """Run all steps of a case on one executable; what the watched buffers hold after each, and what was sampled."""
    packed = {name: backend.pack(case.program.weights[name], values, dtype) for name, values in case.weights.items()}
    limits = Limits(tokens_max=64, rows_max=8, samples_max=64, block_size=_BLOCK_SIZE, block_counts=(_BLOCK_COUNT,), kv_dtype=kv_dtype)
    executable = backend.compile(case.program, packed, dtype, limits, threads)
    outcomes = []
    for step in case.steps:
        counts = {"T": len(step.inputs.token_ids), "S": len(step.inputs.sampling.index)}
        outputs = {name: np.zeros((counts["T"], case.program.buffers[name].width), np.float32) for name in case.program.outputs}
        samples = executable.run(step.inputs, step.activations, outputs)
        buffers = {name: executable.read_buffer(name, counts[case.program.buffers[name].axis]) for name in case.watched}
        outcomes.append(StepOutcome(buffers=buffers, samples=samples))
    return tuple(outcomes)


def difference(actual: F32, expected: NDArray[np.floating[Any]]) -> float:
    """The largest |actual - expected| / max(1, |expected|): what an op's tolerance bounds. Infinite where only one of the two is a number."""
    if actual.shape != expected.shape:
        return float("inf")
    error = np.abs(actual - expected) / np.maximum(1.0, np.abs(expected))
    return float(np.where(np.isnan(actual) & np.isnan(expected), 0.0, np.where(np.isnan(error), np.inf, error)).max(initial=0.0))


def embed_case(seed: int) -> OpCase:
    """Half of the seeds scale."""
    draw = np.random.default_rng(seed)
    rows, width = int(draw.integers(2, 300)), int(draw.integers(1, 100))
    builder = ProgramBuilder()
    y = builder.output(builder.buffer("y", "T", width))
    builder.call("embed", (), (y,), (builder.weight("table", rows, width, "embedding"),), scale=width**0.5 if seed % 2 else 1.0)
    steps = [_step(draw, lengths=(5, 1, 3), vocabulary=rows)]
    return _case(draw, builder, steps, ("y",))


def rms_norm_case(seed: int) -> OpCase:
    """Of four seeds one is plain, one norms heads inside wider rows, one adds 1 to its gain, and one does that and accumulates."""
    draw = np.random.default_rng(seed)
    width, variant = int(draw.integers(1, 700)), seed % 4
    groups, column, rest = (3, 5, 7) if variant == 1 else (0, 0, 0)
    builder = ProgramBuilder()
    total = column + max(1, groups) * width + rest
    x, y = builder.input(builder.buffer("x", "T", total)), builder.output(builder.buffer("y", "T", total))
    widths = {"x": total}
    if variant in (1, 3):
        widths[builder.input(y)] = total
    settings = {"offset": 1.0 if variant > 1 else 0.0, "accumulate": variant == 3, "column": column, "groups": groups}
    builder.call("rms_norm", (x,), (y,), (builder.weight("gain", 1, width, "vector"),), eps=1e-5, **settings)
    return _case(draw, builder, [_step(draw, lengths=(7, 2), widths=widths)], ("y",))


def linear_case(seed: int) -> OpCase:
    """Half of the seeds accumulate, and half have a bias."""
    draw = np.random.default_rng(seed)
    columns, rows = int(draw.integers(1, 500)), int(draw.integers(1, 300))
    builder = ProgramBuilder()
    x, y = builder.input(builder.buffer("x", "T", columns)), builder.output(builder.buffer("y", "T", rows))
    weights = [builder.weight("matrix", rows, columns, "matrix")]
    if seed // 2 % 2:
        weights.append(builder.weight("bias", 1, rows, "vector"))
    widths = {"x": columns}
    if seed % 2:
        widths[builder.input("y")] = rows
    builder.call("linear", (x,), (y,), tuple(weights), accumulate=bool(seed % 2))
    return _case(draw, builder, [_step(draw, lengths=(int(draw.integers(1, 40)), 1), widths=widths)], ("y",))


def head_linear_case(seed: int) -> OpCase:
    """Half of the seeds pass some values of each head."""
    draw = np.random.default_rng(seed)
    heads, columns, rows, passed = int(draw.integers(1, 5)), int(draw.integers(1, 200)), 64 * int(draw.integers(1, 3)), 6 if seed % 2 else 0
    builder = ProgramBuilder()
    x = builder.input(builder.buffer("x", "T", heads * (passed + columns)))
    y = builder.output(builder.buffer("y", "T", heads * (passed + rows)))
    builder.call("head_linear", (x,), (y,), (builder.weight("matrix", heads * rows, columns, "matrix"),), heads=heads, passed=passed)
    widths = {"x": heads * (passed + columns)}
    return _case(draw, builder, [_step(draw, lengths=(int(draw.integers(1, 40)), 1), widths=widths)], ("y",))


def rope_write_case(seed: int) -> OpCase:
    return _attention_case(seed, watched=("q",))


def latent_write_case(seed: int) -> OpCase:
    return _attention_case(seed, watched=("q",), latent=True)


def paged_attention_case(seed: int) -> OpCase:
    return _attention_case(seed, watched=("y",), latent=seed % 5 == 4)


def gated_activation_case(seed: int) -> OpCase:
    draw = np.random.default_rng(seed)
    width = int(draw.integers(1, 200))
    builder = ProgramBuilder()
    x, y = builder.input(builder.buffer("x", "T", 2 * width)), builder.output(builder.buffer("y", "T", width))
    builder.call("gated_activation", (x,), (y,), kind=_KINDS[seed % 3])
    return _case(draw, builder, [_step(draw, lengths=(9,), widths={"x": 2 * width}, scale=4.0)], ("y",))


def soft_cap_case(seed: int) -> OpCase:
    draw = np.random.default_rng(seed)
    width = int(draw.integers(1, 200))
    builder = ProgramBuilder()
    x, y = builder.input(builder.buffer("x", "T", width)), builder.output(builder.buffer("y", "T", width))
    builder.call("soft_cap", (x,), (y,), cap=float(draw.uniform(0.5, 40.0)))
    return _case(draw, builder, [_step(draw, lengths=(9,), widths={"x": width}, scale=10.0)], ("y",))


def route_case(seed: int) -> OpCase:
    """By softmax and by sigmoid; of four seeds one chooses by score plus bias, one keeps groups by their best, one by their best two."""
    draw = np.random.default_rng(seed)
    count, top_k, variant = 12, int(draw.integers(1, 5)), seed % 4
    builder = ProgramBuilder()
    x, y = builder.input(builder.buffer("x", "T", count)), builder.output(builder.buffer("y", "T", 2 * top_k))
    weights = (builder.weight("bias", 1, count, "vector"),) if variant in (1, 3) else ()
    groups = {"groups": 4, "groups_kept": 2, "group_best": variant - 1} if variant > 1 else {}
    builder.call(
        "route",
        (x,),
        (y,),
        weights,
        expert_count=count,
        top_k=top_k,
        scoring="sigmoid" if seed % 2 else "softmax",
        renormalise=bool(seed // 4 % 2),
        scale=2.5 if seed // 8 % 2 else 1.0,
        **groups,
    )
    return _case(draw, builder, [_step(draw, lengths=(9, 1), widths={"x": count}, scale=2.0)], ("y",))


def experts_case(seed: int) -> OpCase:
    """Behind a router of its own, since ids must be ids. Half of the seeds accumulate; two of five have biases."""
    draw = np.random.default_rng(seed)
    count, top_k, width, ffn = int(draw.integers(2, 9)), int(draw.integers(1, 3)), 64, 32 * int(draw.integers(1, 4))
    builder = ProgramBuilder()
    x, logits = builder.input(builder.buffer("x", "T", width)), builder.input(builder.buffer("logits", "T", count))
    routing, y = builder.buffer("routing", "T", 2 * top_k), builder.output(builder.buffer("y", "T", width))
    widths = {"x": width, "logits": count}
    if seed % 2:
        widths[builder.input(y)] = width
    builder.call("route", (logits,), (routing,), expert_count=count, top_k=top_k, scoring="softmax", renormalise=True)
    matrices: tuple[str, ...] = (builder.weight("gate_up", count * 2 * ffn, width, "matrix"), builder.weight("down", count * width, ffn, "matrix"))
    if seed % 5 < 2:
        matrices += (
            builder.weight("gate_up_bias", 1, count * 2 * ffn, "vector"),
            builder.weight("down_bias", 1, count * width, "vector"),
        )
    settings: dict[str, str | bool] = {"kind": _KINDS[seed // 2 % 3], "accumulate": bool(seed % 2)}
    builder.call("experts", (x, routing), (y,), matrices, expert_count=count, top_k=top_k, **settings)
    return _case(draw, builder, [_step(draw, lengths=(int(draw.integers(1, 30)), 1), widths=widths)], ("y",))


def select_case(seed: int) -> OpCase:
    draw = np.random.default_rng(seed)
    width = int(draw.integers(1, 100))
    builder = ProgramBuilder()
    x, y = builder.input(builder.buffer("x", "T", width)), builder.buffer("y", "S", width)
    builder.output(x)
    builder.call("select", (x,), (y,))
    return _case(draw, builder, [_step(draw, lengths=(4, 1, 6), widths={"x": width})], ("y",))


def sample_case(seed: int) -> OpCase:
    """Logits come in by `select`. Positions with every filter alone and together, greedy, with and without logprobs."""
    draw = np.random.default_rng(seed)
    vocabulary = int(draw.integers(30, 3000))
    builder = ProgramBuilder()
    x, logits = builder.input(builder.buffer("x", "T", vocabulary)), builder.buffer("logits", "S", vocabulary)
    builder.call("select", (x,), (logits,))
    builder.call("sample", (logits,))
    plain = _step(draw, lengths=(16, 16), widths={"x": vocabulary}, scale=3.0)
    step = _step(draw, lengths=(16, 16), widths={"x": vocabulary}, scale=3.0)
    sampling = replace(step.inputs.sampling, edits=_edits(draw, 32, vocabulary))
    return _case(draw, builder, [plain, replace(step, inputs=replace(step.inputs, sampling=sampling))], ())


def _edits(draw: np.random.Generator, samples: int, vocabulary: int) -> LogitEdits:
    """By turns nothing, a mask, entries, both. Some ids have several entries, some are taken away; some masks leave a few ids, down to one."""
    masks = (draw.integers(0, 1 << 32, (3, -(-vocabulary // 32)), dtype=np.uint64)).astype(np.uint32)
    masks[1] = 0
    masks[1, 0] = 0b1011
    masks[2] = 0
    masks[2, (vocabulary - 1) // 32] = 1 << (vocabulary - 1) % 32
    turn = np.arange(samples) % 4
    counts = np.where(turn >= 2, draw.integers(1, 3 * vocabulary, samples), 0)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    entries = int(starts[-1])
    ids = draw.integers(0, vocabulary, entries)
    biases = draw.choice(np.array([0.0, 2.5, -3.0, -np.inf], np.float32), entries, p=(0.5, 0.3, 0.19, 0.01))
    biases[ids < 4] = 1.0
    biases[ids == vocabulary - 1] = 1.0
    return LogitEdits(
        mask_rows=np.where(turn % 2 == 1, np.arange(samples) // 4 % 3, -1).astype(np.int32),
        masks=masks,
        starts=starts,
        ids=ids.astype(np.int32),
        biases=biases,
        penalties=draw.choice(np.array([1.0, 1.3, 0.8], np.float32), entries),
        subtracts=draw.choice(np.array([0.0, 0.75, -0.5], np.float32), entries),
    )


def _attention_case(seed: int, watched: tuple[str, ...], *, latent: bool = False) -> OpCase:
    """rope_write or latent_write and paged_attention together, since only the pair can be seen from outside: a prefill, then chunks and single tokens
    after it. Seeds take turns in having a window, a soft cap, sinks, and heads of which a part is rotated, by a cosine and sine with a magnitude."""
    draw = np.random.default_rng(seed)
    kv_heads, group, head_dim = int(draw.integers(1, 4)), int(draw.integers(1, 4)), 2 * int(draw.integers(1, 40))
    heads = kv_heads * group
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    builder = ProgramBuilder()
    value_dim = head_dim // 2 + 1 if latent else head_dim
    widths = {"queries": heads * head_dim, "keys": kv_heads * head_dim} if latent else {"qkv": (heads + 2 * kv_heads) * head_dim}
    given = tuple(builder.input(builder.buffer(name, "T", width)) for name, width in widths.items())
    q, y = builder.buffer("q", "T", heads * head_dim), builder.output(builder.buffer("y", "T", heads * value_dim))
    sizes["kv_layer"] = builder.kv_layer(kv_heads, head_dim, latent=value_dim if latent else 0)
    half = (head_dim // 2 + 1) // 2 if seed % 4 > 1 else head_dim // 2
    window, soft_cap, magnitude = (0, 1, 9, 33)[seed % 4], 2.0 if seed % 3 else 0.0, 1.25 if seed % 4 > 1 else 1.0
    write = "latent_write" if latent else "rope_write"
    builder.call(write, given, (q,), (builder.weight("frequencies", 1, half, "vector"),), **sizes, magnitude=magnitude)
    sinks = (builder.weight("sinks", 1, heads, "vector"),) if seed % 5 > 2 else ()
    builder.call("paged_attention", (q,), (y,), sinks, **sizes, scale=head_dim**-0.5, window=window, soft_cap=soft_cap)
    tables = draw.permutation(_BLOCK_COUNT)[:60].reshape(3, 20).astype(np.int32)
    steps: list[CaseStep] = []
    starts: tuple[int, ...] = (0, 0, 0)
    for lengths in ((13, 1, 30), (1, 1, 1), (6, 40, 2)):
        steps.append(_step(draw, lengths=lengths, starts=starts, tables=tables, widths=widths))
        starts = tuple(start + length for start, length in zip(starts, lengths, strict=True))
    return _case(draw, builder, steps, watched, frequencies=10000.0 ** -np.linspace(0, 1, half, endpoint=False)[None])


def _case(
    draw: np.random.Generator,
    builder: ProgramBuilder,
    steps: list[CaseStep],
    watched: tuple[str, ...],
    frequencies: NDArray[np.float64] | None = None,
) -> OpCase:
    program = builder.build()
    weights: dict[str, F32] = {}
    for name, weight in program.weights.items():
        scale = 1.0 if weight.roles == ("vector",) else weight.columns**-0.5
        weights[name] = (draw.standard_normal((weight.rows, weight.columns)) * scale).astype(np.float32)
    if frequencies is not None:
        weights["frequencies"] = frequencies.astype(np.float32)
    return OpCase(program=program, weights=weights, steps=tuple(steps), watched=watched)


def _step(
    draw: np.random.Generator,
    *,
    lengths: tuple[int, ...],
    starts: tuple[int, ...] | None = None,
    tables: NDArray[np.int32] | None = None,
    widths: Mapping[str, int] | None = None,
    vocabulary: int = 1,
    scale: float = 1.0,
) -> CaseStep:
    """Rows of the given lengths that begin at `starts` (else at 0), with activations of the given widths."""
    starts = starts or tuple(0 for _ in lengths)
    count = sum(lengths)
    positions = np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
    if tables is None:
        tables = draw.permutation(_BLOCK_COUNT)[: len(lengths) * 12].reshape(len(lengths), 12).astype(np.int32)
    inputs = StepInputs(
        token_ids=draw.integers(0, vocabulary, count).astype(np.int32),
        positions=positions.astype(np.int32),
        row_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        block_tables=(tables,),
        sampling=_sampling(draw, count),
    )
    activations = {name: (draw.standard_normal((count, width)) * scale).astype(np.float32) for name, width in (widths or {}).items()}
    return CaseStep(inputs=inputs, activations=activations)


def _sampling(draw: np.random.Generator, tokens: int) -> SamplingInputs:
    """Every token's position is sampled, in a shuffled order; columns cycle through all settings."""

    def pick(values: tuple[float, ...], period: int) -> F32:
        return np.array(values, np.float32)[np.arange(tokens) // period % len(values)]

    return SamplingInputs(
        index=draw.permutation(tokens).astype(np.int32),
        seeds=draw.integers(0, 1 << 64, tokens, dtype=np.uint64),
        positions=draw.integers(0, 5000, tokens).astype(np.int32),
        temperatures=pick((0.0, 0.7, 1.0, 1.5), 1),
        top_ks=pick((0, 5, 40), 4).astype(np.int32),
        top_ps=pick((1.0, 0.9, 0.3), 3),
        min_ps=pick((0.0, 0.05), 5),
        logprob_counts=pick((-1, 0, 3), 2).astype(np.int32),
    )
