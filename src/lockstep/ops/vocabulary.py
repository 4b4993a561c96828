"""The op set. Each entry says what an op reads, writes and is told; its meaning in one paragraph.

The executable meaning is the plain-torch body of the same name in `backends/reference`; a kernel is an answer to it.
All activations are float32. `dtype` below is the program-wide weight and KV dtype, float32 or bfloat16; rounding to bfloat16 is to nearest even.
Every op is row-invariant: a row of an output is bit for bit a function of the same row of the inputs, the weights and (attention) that request's KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Attribute = int | float | str | bool


@dataclass(frozen=True, slots=True)
class OpSpec:
    """inputs, outputs: roles of buffers, in order. weights: roles of weights, in order, of which the last `optional_weights` may be left out.
    attributes: those that a call must give. defaults: those that it may leave out, with the value that leaves the op at its plainest."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]
    attributes: tuple[str, ...]
    meaning: str
    optional_weights: int = 0
    defaults: Mapping[str, Attribute] = field(default_factory=dict)


OPS: dict[str, OpSpec] = {
    "embed": OpSpec(
        (),
        ("y",),
        ("table",),
        (),
        "y[T, H] = table[token_ids[T]] widened to float32, times scale (rounded to float32; 1 leaves the bits). Reads the step's token_ids. "
        "Ids outside [0, V) are an error before anything is written.",
        defaults={"scale": 1.0},
    ),
    "rms_norm": OpSpec(
        ("x",),
        ("y",),
        ("gain",),
        ("eps",),
        "y = x / sqrt(mean(x * x, last axis) + eps) * (gain + offset), added to what y held if accumulate. With groups above 0 only "
        "x's columns [column, column + groups * G) are normed, as `groups` vectors as wide as the gain, G, each by itself (heads, inside a buffer "
        "that holds more), and the other columns of y keep what they held. x and y may be one buffer unless it accumulates. "
        "The gain is kept in float32 whatever the dtype.",
        defaults={"offset": 0.0, "accumulate": False, "column": 0, "groups": 0},
    ),
    "linear": OpSpec(
        ("x",),
        ("y",),
        ("matrix", "bias"),
        ("accumulate",),
        "y[*, N] = round(x)[*, K] @ matrix[N, K].T (+ bias[N]), sums in float32, added to what y held if accumulate. "
        "round() is to the matrix's dtype: none for float32, to bfloat16 for bfloat16. The bias is kept in float32. x and y never share memory.",
        optional_weights=1,
    ),
    "head_linear": OpSpec(
        ("x",),
        ("y",),
        ("matrix",),
        ("heads",),
        "x[T, heads * (P + K)] -> y[T, heads * (P + N)], P = passed: of each head's values the first P pass as they are, the others are multiplied "
        "by the head's own N rows of matrix[heads * N, K], as `linear` does. N is a multiple of 64. x and y never share memory.",
        defaults={"passed": 0},
    ),
    "rope_write": OpSpec(
        ("qkv",),
        ("q",),
        ("inverse_frequencies",),
        ("kv_layer", "heads", "kv_heads", "head_dim"),
        "qkv[T, (heads + 2 * kv_heads) * head_dim] holds queries, keys, values one after the other. Of each query and key the first 2 * F values, "
        "F the width of inverse_frequencies (at most head_dim / 2), are rotated by their token's position, half-split pairs (i, i + F): "
        "angle = position * inverse_frequencies[i] (float32 product, i in [0, F)), cos and sin times magnitude (one float32 product); "
        "(a, b) -> (a cos - b sin, b cos + a sin); the rest stays as it is. Rotated queries go to q[T, heads * head_dim]; rotated keys and plain "
        "values are rounded to the KV dtype (int8: scale = the vector's largest |x| / 127, each head of each position by itself; x / scale to "
        "nearest even, within 127 either way; read as integer * scale in float32; what is not finite is read as not a number) and written at the "
        "token's position through its row's block table. inverse_frequencies is a vector weight computed by the model, not read from a file.",
        defaults={"magnitude": 1.0},
    ),
    "latent_write": OpSpec(
        ("queries", "keys"),
        ("q",),
        ("inverse_frequencies",),
        ("kv_layer", "heads", "kv_heads", "head_dim"),
        "`rope_write` for a KV layer whose values are the last elements of its keys: queries[T, heads * head_dim] and keys[T, kv_heads * head_dim] "
        "are rotated and written in the same way, and no values beside them.",
        defaults={"magnitude": 1.0},
    ),
    "paged_attention": OpSpec(
        ("q",),
        ("y",),
        ("sinks",),
        ("kv_layer", "heads", "kv_heads", "head_dim", "scale"),
        "Causal attention with grouped heads (query head h reads KV head h // (heads / kv_heads)): for a token at position p, over "
        "positions 0..p of its row, of which with a window above 0 only the last `window` count (p itself is one of them), "
        "y = softmax(cap(scale * q . k)) @ v, everything in float32 on KV widened from its dtype; cap(s) is s, or with a soft_cap above 0 "
        "soft_cap * tanh(s / soft_cap). Keys are walked in tiles at fixed absolute positions, "
        "the same whatever the chunk, batch, block size or thread count. What lies outside the window is never read. A latent KV layer's v is the "
        "last elements of its k, and y[T, heads * latent]. sinks[heads]: each head's score of one more key that every token sees, without a value.",
        optional_weights=1,
        defaults={"window": 0, "soft_cap": 0.0},
    ),
    "gated_activation": OpSpec(
        ("gate_up",),
        ("y",),
        (),
        ("kind",),
        "gate_up[T, 2 * F] holds gate then up. kind 'silu': y[T, F] = gate / (1 + exp(-gate)) * up. kind 'gelu_tanh': "
        "y = gate * (1 + tanh(z)) / 2 * up, z = sqrt(2 / pi) * (gate + 0.044715 * gate ** 3). kind 'clamped_silu': gate = min(gate, 7) and up in "
        "-7 .. 7, then y = gate / (1 + exp(-1.702 * gate)) * (up + 1).",
    ),
    "soft_cap": OpSpec(
        ("x",),
        ("y",),
        (),
        ("cap",),
        "y = cap * tanh(x / cap), element by element; cap above 0. x and y may be one buffer.",
    ),
    "route": OpSpec(
        ("logits",),
        ("routing",),
        ("bias",),
        ("expert_count", "top_k", "scoring", "renormalise"),
        "Which top_k of E = expert_count experts each token goes to, and with what weight, from logits[T, E]. Scores are softmax(logits) or "
        "sigmoid(logits), by `scoring`; experts are chosen by score plus bias[E] if there is one. The experts are `groups` groups of consecutive "
        "ones; only the groups_kept groups stay whose best group_best experts have the largest sum, added from the best down. Of the experts that "
        "stay the best top_k are chosen; the lower index wins a tie, of groups and of experts. Weights are the scores of those chosen, without "
        "bias, divided by their sum in ascending order of expert if renormalise, times scale. routing[T, 2 * top_k]: the chosen experts, ascending, "
        "as floats; then their weights.",
        optional_weights=1,
        defaults={"scale": 1.0, "groups": 1, "groups_kept": 1, "group_best": 1},
    ),
    "experts": OpSpec(
        ("x", "routing"),
        ("y",),
        ("gate_up", "down", "gate_up_bias", "down_bias"),
        ("expert_count", "top_k", "kind", "accumulate"),
        "y[T, H] = sum over a token's experts e of w * down[e] @ gated_activation(gate_up[e] @ round(x)), in ascending order of e, each term rounded "
        "and then added to what stands there: 0, or with accumulate what y held. Experts and weights w are routing's, as `route` writes it. "
        "gate_up holds the experts' matrices [2 * F, H] one below the other, down those of [H, F]; the biases, both or none, go with their rows; "
        "products, rounding and activation are those of `linear` and `gated_activation`. 2 * F and H are multiples of 64. An id outside [0, "
        "expert_count), or ids that do not ascend, are an error. x and y never share memory.",
        optional_weights=2,
    ),
    "select": OpSpec(
        ("x",),
        ("y",),
        (),
        (),
        "y[S, H] = x[sample_index[S]]: the rows whose next token is sampled.",
    ),
    "sample": OpSpec(
        ("logits",),
        (),
        (),
        (),
        "For each of the S positions chooses a token from logits[S, V] by the step's sampling columns, see `step.StepInputs`; "
        "writes the step's outputs. First the logits are changed by the step's edits, see `step.LogitEdits`; none may be left without a finite one. "
        "temperature 0: the largest logit, lowest id on a tie. Otherwise l = logits / temperature (one float32 "
        "multiplication by the float32 reciprocal); "
        "p = softmax(l); keep ids with p >= min_p * max(p); of these the top_k largest l; of these, in descending order of l (ties: lower "
        "id first), the shortest prefix "
        "whose probability, renormalised over what top_k kept, reaches top_p; then argmax over kept ids of l + gumbel(seed, position, id). "
        "gumbel = -log(-log(u)), u = ((x >> 8) + 0.5) * 2**-24 computed exactly (it needs 25 bits: in float32 the largest would round to "
        "1) with x the first word of Philox4x32-10, "
        "key (seed low, seed high), counter (position, id, stream 0, 0). "
        "A position with a target chooses nothing: its token is the target. "
        "logprobs: log_softmax of the logits as they came, without edits, at the token and, best first, at the top ids; the token's rank among them.",
    ),
}
