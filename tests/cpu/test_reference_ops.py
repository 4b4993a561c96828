"""Each op of the reference against a formulation that shares no code with it: numpy in float64, or one loop too many."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lockstep.backends.reference.backend import ReferenceBackend
from lockstep.backends.reference.cases import CaseStep, OpCase, difference, run_case
from lockstep.backends.reference.table import OP_REFERENCES
from lockstep.errors import InternalError
from lockstep.ops.backend import DType, KVDType
from lockstep.ops.vocabulary import OPS

F64 = NDArray[np.float64]
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
SEEDS = range(8)


def rounded(values: NDArray[np.float32], dtype: DType) -> F64:
    """To bfloat16 by adding to the bits, so that not even the rounding is shared."""
    if dtype == "bfloat16":
        word = values.astype(np.float32).view(np.uint32)
        values = ((word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return values.astype(np.float64)


def scaled(values: F64) -> F64:
    """Each vector as 127 steps either way of its largest: what int8 KV keeps."""
    step = np.abs(values.astype(np.float32)).max(-1, keepdims=True) / np.float32(127)
    return np.rint(values.astype(np.float32) / step) * step.astype(np.float64)


def run(case: OpCase, dtype: DType, kv_dtype: KVDType | None = None) -> list[NDArray[np.float32]]:
    (name,) = case.watched
    return [outcome.buffers[name] for outcome in run_case(ReferenceBackend(), case, dtype, kv_dtype=kv_dtype)]


def close(kind: str, dtype: DType, actual: NDArray[np.float32], expected: F64) -> None:
    assert difference(actual, expected) <= OP_REFERENCES[kind].tolerance[dtype]


def test_every_op_of_the_vocabulary_has_a_reference_and_every_case_calls_its_op() -> None:
    assert set(OP_REFERENCES) == set(OPS)
    for kind, reference in OP_REFERENCES.items():
        assert kind in {op.kind for op in reference.generate(0).program.ops}


@pytest.mark.parametrize("kind", OP_REFERENCES)
def test_a_case_is_a_function_of_its_seed(kind: str) -> None:
    one, same, other = (run_case(ReferenceBackend(), OP_REFERENCES[kind].generate(seed), "float32") for seed in (3, 3, 4))
    for left, right in zip(one, same, strict=True):
        assert all(np.array_equal(left.buffers[name], right.buffers[name]) for name in left.buffers)
        assert left.samples is None or np.array_equal(left.samples.tokens, right.samples.tokens)
    seen = [[*outcome[0].buffers.values()] or [outcome[0].samples.tokens] for outcome in (one, other)]
    assert not np.array_equal(seen[0][0], seen[1][0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_embed_reads_the_rows_of_the_ids_and_scales_them(seed: int, dtype: DType) -> None:
    case = OP_REFERENCES["embed"].generate(seed)
    table = rounded(case.weights["table"], dtype).astype(np.float32) * np.float32(case.program.ops[0].attributes["scale"])
    close("embed", dtype, run(case, dtype)[0], np.stack([table[token] for token in case.steps[0].inputs.token_ids.tolist()]).astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_rms_norm_divides_by_the_root_mean_square_and_keeps_its_gain_in_float32(seed: int, dtype: DType) -> None:
    case = OP_REFERENCES["rms_norm"].generate(seed)
    settings, gain = case.program.ops[0].attributes, case.weights["gain"][0].astype(np.float64)
    x = case.steps[0].activations["x"].astype(np.float64)
    expected = case.steps[0].activations.get("y", np.zeros(x.shape)).astype(np.float64)
    for group in range(max(1, int(settings["groups"]))):
        columns = slice(int(settings["column"]) + group * len(gain), int(settings["column"]) + (group + 1) * len(gain))
        part = x[:, columns]
        normed = part / np.sqrt((part**2).mean(1, keepdims=True) + 1e-5) * (gain + settings["offset"])
        expected[:, columns] = normed + expected[:, columns] if settings["accumulate"] else normed
    close("rms_norm", dtype, run(case, dtype)[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_linear_multiplies_rounded_rows_adds_bias_and_accumulates(seed: int, dtype: DType) -> None:
    case = OP_REFERENCES["linear"].generate(seed)
    activations = case.steps[0].activations
    expected = rounded(activations["x"], dtype) @ rounded(case.weights["matrix"], dtype).T
    if "bias" in case.weights:
        expected = expected + case.weights["bias"]
    if "y" in activations:
        expected = expected + activations["y"]
    close("linear", dtype, run(case, dtype)[0], expected)


def rotated(x: F64, position: int, frequencies: NDArray[np.float32], magnitude: float) -> F64:
    """Rotation as multiplication by a complex number of length `magnitude`; x [heads, head_dim]."""
    half = len(frequencies)
    angle = (np.float32(position) * frequencies).astype(np.float64)
    turned = (x[:, :half] + 1j * x[:, half : 2 * half]) * np.exp(1j * angle) * magnitude
    return np.concatenate([turned.real, turned.imag, x[:, 2 * half :]], -1)


def attention_by_hand(case: OpCase, dtype: DType | Literal["int8"]) -> tuple[list[F64], list[F64]]:
    """(rotated queries, attended values) a step, with each row's keys and values in plain lists and no blocks."""
    sizes, settings = case.program.ops[0].attributes, case.program.ops[1].attributes
    window, cap, latent = int(settings["window"]), float(settings["soft_cap"]), case.program.kv_layers[0].latent
    kept = scaled if dtype == "int8" else lambda x: rounded(x.astype(np.float32), dtype)
    heads, kv_heads, head_dim = (int(sizes[name]) for name in ("heads", "kv_heads", "head_dim"))
    keys: dict[int, list[F64]] = {}
    values: dict[int, list[F64]] = {}
    queries_of_steps, attended_of_steps = [], []
    for step in case.steps:
        queries, attended = [], []
        for row, (start, stop) in enumerate(zip(step.inputs.row_starts[:-1], step.inputs.row_starts[1:], strict=True)):
            for token in range(start, stop):
                position = int(step.inputs.positions[token])
                parts = ("queries", "keys") if latent else ("qkv",)
                qkv = np.concatenate([step.activations[part][token] for part in parts]).astype(np.float64).reshape(-1, head_dim)
                q, k, v = qkv[:heads], qkv[heads : heads + kv_heads], qkv[heads + kv_heads :]
                q, k = (rotated(x, position, case.weights["frequencies"][0], float(sizes["magnitude"])) for x in (q, k))
                keys.setdefault(row, []).append(kept(k))
                values.setdefault(row, []).append(keys[row][-1][:, head_dim - latent :] if latent else kept(v))
                assert len(keys[row]) == position + 1
                queries.append(q.reshape(-1))
                out = []
                for head in range(heads):
                    scores = np.array([q[head] @ key[head // (heads // kv_heads)] for key in keys[row]]) * head_dim**-0.5
                    scores = cap * np.tanh(scores / cap) if cap else scores
                    scores[: max(0, position + 1 - window) if window else 0] = -np.inf
                    weights = np.exp(scores - scores.max())
                    total = weights.sum() + (np.exp(case.weights["sinks"][0, head] - scores.max()) if "sinks" in case.weights else 0.0)
                    out.append(weights / total @ np.stack([value[head // (heads // kv_heads)] for value in values[row]]))
                attended.append(np.concatenate(out))
        queries_of_steps.append(np.stack(queries))
        attended_of_steps.append(np.stack(attended))
    return queries_of_steps, attended_of_steps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_rope_turns_queries_by_their_position(seed: int, dtype: DType) -> None:
    case = OP_REFERENCES["rope_write"].generate(seed)
    for actual, expected in zip(run(case, dtype), attention_by_hand(case, dtype)[0], strict=True):
        close("rope_write", dtype, actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_attention_reads_through_scattered_blocks_what_chunks_before_it_wrote(seed: int, dtype: DType) -> None:
    case = OP_REFERENCES["paged_attention"].generate(seed)
    for actual, expected in zip(run(case, dtype), attention_by_hand(case, dtype)[1], strict=True):
        close("paged_attention", dtype, actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_latent_write_turns_queries_by_their_position(seed: int, dtype: DType) -> None:
    case = OP_REFERENCES["latent_write"].generate(seed)
    for actual, expected in zip(run(case, dtype), attention_by_hand(case, dtype)[0], strict=True):
        close("latent_write", dtype, actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_head_linear_multiplies_each_head_by_its_own_rows_and_passes_what_comes_first(seed: int, dtype: DType) -> None:
    case = OP_REFERENCES["head_linear"].generate(seed)
    heads, passed = (int(case.program.ops[0].attributes[name]) for name in ("heads", "passed"))
    x = case.steps[0].activations["x"]
    matrices = rounded(case.weights["matrix"], dtype).reshape(heads, -1, case.weights["matrix"].shape[1])
    expected = [
        np.concatenate([head[:passed], matrix @ rounded(head[passed:], dtype)])
        for row in x
        for head, matrix in zip(row.reshape(heads, -1), matrices, strict=True)
    ]
    close("head_linear", dtype, run(case, dtype)[0], np.stack(expected).reshape(len(x), -1))


@pytest.mark.parametrize("seed", SEEDS)
def test_attention_on_int8_reads_integers_times_the_scale_of_their_position_and_head(seed: int) -> None:
    """At most a few values lie so near to half a step that their rotation's last bit decides."""
    case = OP_REFERENCES["paged_attention"].generate(seed)
    plain = run(case, "float32")
    for actual, exact, other in zip(run(case, "float32", "int8"), attention_by_hand(case, "int8")[1], plain, strict=True):
        assert np.quantile(np.abs(actual - exact), 0.95) <= 1e-4
        assert 1e-4 < difference(actual, other) < 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_gated_activation_is_a_function_of_the_gate_times_up(seed: int) -> None:
    case = OP_REFERENCES["gated_activation"].generate(seed)
    gate, up = np.split(case.steps[0].activations["x"].astype(np.float64), 2, axis=1)
    silu = gate / (1 + np.exp(-gate))
    gelu = gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2
    cut = np.minimum(gate, 7.0)
    assert gate.max() > 7.0
    assert np.abs(up).max() > 7.0
    expected = {"silu": up * silu, "gelu_tanh": up * gelu, "clamped_silu": (np.clip(up, -7.0, 7.0) + 1) * cut / (1 + np.exp(-1.702 * cut))}
    close("gated_activation", "float32", run(case, "float32")[0], expected[str(case.program.ops[0].attributes["kind"])])


@pytest.mark.parametrize("seed", SEEDS)
def test_soft_cap_bounds_by_tanh(seed: int) -> None:
    case = OP_REFERENCES["soft_cap"].generate(seed)
    cap, x = case.program.ops[0].attributes["cap"], case.steps[0].activations["x"].astype(np.float64)
    assert np.abs(x).max() > cap / 2
    close("soft_cap", "float32", run(case, "float32")[0], cap * np.tanh(x / cap))


@pytest.mark.parametrize("seed", [0, 1, 2], ids=["silu", "gelu_tanh", "clamped_silu"])
def test_gated_activation_of_extreme_gates_is_finite(seed: int) -> None:
    case = OP_REFERENCES["gated_activation"].generate(seed)
    x = case.steps[0].activations["x"].copy()
    x[:, : x.shape[1] // 2] = np.linspace(-300, 300, x[:, : x.shape[1] // 2].size).reshape(len(x), -1)
    assert np.isfinite(run(replace(case, steps=(replace(case.steps[0], activations={"x": x}),)), "float32")[0]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_select_takes_rows_in_the_sampled_order(seed: int) -> None:
    case = OP_REFERENCES["select"].generate(seed)
    step = case.steps[0]
    close("select", "float32", run(case, "float32")[0], step.activations["x"].astype(np.float64)[step.inputs.sampling.index])


def changed(step: CaseStep, **changes: object) -> CaseStep:
    return replace(step, inputs=replace(step.inputs, **changes))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("embed", {"token_ids": np.full(9, 100000, np.int32)}, "token_ids must be in"),
        ("embed", {"token_ids": np.full(9, -1, np.int32)}, "token_ids must be in"),
        ("paged_attention", {"block_tables": (np.full((3, 20), 64, np.int32),)}, "block table 0 of row 0 must be in"),
        ("paged_attention", {"block_tables": (np.full((3, 20), -1, np.int32),)}, "block table 0 of row 0 must be in"),
        ("paged_attention", {"block_tables": (np.zeros((3, 2), np.int32),)}, "which needs 4 blocks"),
        ("paged_attention", {"block_tables": ()}, "needs 1 block tables"),
        ("paged_attention", {"positions": np.zeros(44, np.int32)}, "consecutive positions"),
        ("paged_attention", {"row_starts": np.array([0, 13, 14, 43], np.int32)}, "row_starts must ascend from 0 to 44"),
        ("paged_attention", {"row_starts": np.array([0, 14, 13, 44], np.int32)}, "row_starts must ascend from 0 to 44"),
        ("embed", {"token_ids": np.zeros(65, np.int32)}, "0 to 64 tokens, got 65"),
    ],
)
def test_a_step_that_would_leave_its_arrays_is_refused(kind: str, changes: dict[str, object], message: str) -> None:
    case = OP_REFERENCES[kind].generate(0)
    with pytest.raises(InternalError, match=message):
        run_case(ReferenceBackend(), replace(case, steps=(changed(case.steps[0], **changes),)), "float32")


def test_a_sampled_index_outside_the_step_is_refused() -> None:
    case = OP_REFERENCES["select"].generate(0)
    sampling = replace(case.steps[0].inputs.sampling, index=np.full(11, 11, np.int32))
    with pytest.raises(InternalError, match=r"sampling.index must be in 0..10"):
        run_case(ReferenceBackend(), replace(case, steps=(changed(case.steps[0], sampling=sampling),)), "float32")


def test_activations_of_another_width_are_refused() -> None:
    case = OP_REFERENCES["rms_norm"].generate(0)
    step = replace(case.steps[0], activations={"x": case.steps[0].activations["x"][:, :-1].copy()})
    with pytest.raises(InternalError, match="activations 'x' must be C-contiguous float32"):
        run_case(ReferenceBackend(), replace(case, steps=(step,)), "float32")


def test_attention_over_a_position_that_was_never_written_is_not_a_number() -> None:
    """The pool starts as NaN, so that a read of what no one wrote cannot pass for a value."""
    case = OP_REFERENCES["paged_attention"].generate(0)
    (outcome,) = run_case(ReferenceBackend(), replace(case, steps=case.steps[1:2]), "float32")
    assert np.isnan(outcome.buffers["y"]).all()


def test_attention_never_reads_what_lies_outside_its_window() -> None:
    """A window of one position: a step in the middle needs nothing of what came before it."""
    case = OP_REFERENCES["paged_attention"].generate(1)
    assert case.program.ops[1].attributes["window"] == 1
    whole = run_case(ReferenceBackend(), case, "float32")[1]
    (alone,) = run_case(ReferenceBackend(), replace(case, steps=case.steps[1:2]), "float32")
    assert np.array_equal(alone.buffers["y"], whole.buffers["y"])


def test_a_step_leaves_the_thread_count_of_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    run_case(ReferenceBackend(), OP_REFERENCES["embed"].generate(0), "float32", threads=before + 1)
    assert torch.get_num_threads() == before
