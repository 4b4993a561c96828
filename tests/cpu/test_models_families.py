"""Every family's logits are transformers': whole, in chunks and token by token, at one and at three stages, on both backends.

Run with -s to see the table of largest differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from family_models import FAMILY_MODELS, TOKENS, FamilyModel, sequence
from lockstep.backends.native import NativeBackend, instruction_sets
from lockstep.backends.reference.backend import ReferenceBackend
from lockstep.models.rope import LongScaling, YarnScaling, inverse_frequencies
from lockstep.models.spec import Experts, LayerAttention, ModelSpec
from lockstep.ops.backend import Backend
from lockstep.ops.step import F32
from rig import build_stages, logits_of

LOGIT_ERROR_MAX = 5e-4
WHOLE, CHUNKED, DECODE = [TOKENS], [7, 1, 20, 4, 33, 55], [31, *[1] * (TOKENS - 31)]
CHUNKED_DECODE = [7, 1, 20, 4, 33, 31, *[1] * 24]
BACKENDS: dict[str, Callable[[], Backend]] = {
    **{f"native {name}": lambda name=name: NativeBackend(instruction_set=name) for name in instruction_sets()},  # type: ignore[misc]
    "reference": ReferenceBackend,
}
by_name = pytest.mark.parametrize("model", FAMILY_MODELS, ids=lambda model: model.name)


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, str, float, str]]]:
    """Rows of (family, backend, largest difference, windows crossed), printed when all is done."""
    rows: list[tuple[str, str, float, str]] = []
    yield rows
    print(f"\n{'family':42}{'backend':22}{'largest difference':>20}{'tokens':>8}  positions past a window's edge")
    for family, backend, largest, crossed in rows:
        print(f"{family:42}{backend:22}{largest:20.2e}{TOKENS:8}  {crossed}")


@pytest.fixture(scope="module")
def theirs() -> Callable[[FamilyModel], F32]:
    """transformers' logits of the sequence, float32 [TOKENS, V], once a model."""
    known: dict[str, F32] = {}

    def logits(model: FamilyModel) -> F32:
        if model.name not in known:
            with torch.inference_mode():
                known[model.name] = model.transformers_model()(torch.tensor([sequence(model.spec.vocab_size)])).logits[0].numpy()
        return known[model.name]

    return logits


def crossed(spec: ModelSpec) -> str:
    edges = sorted({layer.sliding_window for layer in spec.layers if layer.sliding_window})
    return ", ".join(f"{edge}: {TOKENS - edge}" for edge in edges) or "-"


@by_name
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_transformers_in_any_chunks(
    model: FamilyModel, backend: str, theirs: Callable[[FamilyModel], F32], table: list[tuple[str, str, float, str]]
) -> None:
    expected, spec, tokens = theirs(model), model.spec, sequence(model.spec.vocab_size)
    assert np.abs(expected).max() > 1, "weights too small to tell anything"
    weights, middle = model.weights(), spec.layer_count - 1
    # The reference takes its time over each token, so it goes over the sequence twice and not six times.
    one_stage, three_stages = ([WHOLE], [CHUNKED_DECODE]) if backend == "reference" else ([WHOLE, CHUNKED, DECODE], [WHOLE, CHUNKED, DECODE])
    results = []
    for split, ways in ((None, one_stage), ([range(1), range(1, middle), range(middle, spec.layer_count)], three_stages)):
        stages = build_stages(BACKENDS[backend](), spec, weights, split, threads=2 if split else 1, block_size=4 if split else 16)
        results += [logits_of(stages, tokens, chunks) for chunks in ways]
    largest = max(float(np.abs(result - expected).max()) for result in results)
    table.append((model.name, backend, largest, crossed(spec)))
    assert largest <= LOGIT_ERROR_MAX
    assert all(np.array_equal(result, results[0]) for result in results), "bits depend on chunks, stages, threads or block size"


def with_layers(spec: ModelSpec, change: Callable[[LayerAttention], LayerAttention]) -> ModelSpec:
    return replace(spec, layers=tuple(change(layer) for layer in spec.layers))


def with_experts(spec: ModelSpec, change: Callable[[Experts], Experts]) -> ModelSpec:
    return replace(spec, experts=None if spec.experts is None else change(spec.experts))


def other_magnitude(layer: LayerAttention) -> LayerAttention:
    scaling = layer.rope.scaling
    return (
        replace(layer, rope=replace(layer.rope, scaling=replace(scaling, magnitude=1.0)))
        if isinstance(scaling, (LongScaling, YarnScaling))
        else layer
    )


WRONG: dict[str, Callable[[ModelSpec], ModelSpec]] = {
    "window one wider": lambda spec: with_layers(spec, lambda a: replace(a, sliding_window=a.sliding_window and a.sliding_window + 1)),
    "window one narrower": lambda spec: with_layers(spec, lambda a: replace(a, sliding_window=a.sliding_window and a.sliding_window - 1)),
    "no window": lambda spec: with_layers(spec, lambda a: replace(a, sliding_window=0)),
    "other layers slide": lambda spec: replace(spec, layers=(*spec.layers[1:], spec.layers[0])),
    "one rope for all": lambda spec: with_layers(spec, lambda a: replace(a, rope=spec.ropes[-1])),
    "no rope scaling": lambda spec: with_layers(spec, lambda a: replace(a, rope=replace(a.rope, scaling=None))),
    "no magnitude": lambda spec: with_layers(spec, other_magnitude),
    "no attention cap": lambda spec: replace(spec, attention_soft_cap=0.0),
    "no head cap": lambda spec: replace(spec, logit_soft_cap=0.0),
    "no offset": lambda spec: replace(spec, norm_offset=0.0),
    "other query scale": lambda spec: replace(spec, attention_scale=spec.head_dim**-0.5),
    "no embedding scale": lambda spec: replace(spec, embedding_scale=1.0),
    "silu for gelu": lambda spec: replace(spec, activation="silu"),
    "one expert fewer": lambda spec: with_experts(spec, lambda e: replace(e, top_k=e.top_k - 1)),
    "other weights of experts": lambda spec: with_experts(spec, lambda e: replace(e, renormalise=not e.renormalise)),
    "no shared expert": lambda spec: with_experts(spec, lambda e: replace(e, shared_ffn_size=0, shared_gate=False)),
    "other scale of experts": lambda spec: with_experts(spec, lambda e: replace(e, scale=1.0)),
    "no groups of experts": lambda spec: with_experts(spec, lambda e: replace(e, groups=1, groups_kept=1, group_best=1)),
    "other worth of groups": lambda spec: with_experts(spec, lambda e: replace(e, group_best=3 - e.group_best) if e.groups > 1 else e),
    "no bias on the choice of experts": lambda spec: with_experts(spec, lambda e: replace(e, choice_bias=False)),
    "softmax for sigmoid": lambda spec: with_experts(spec, lambda e: replace(e, scoring="softmax")),
    "no biases of experts": lambda spec: with_experts(spec, lambda e: replace(e, biased=False)),
    "no sinks": lambda spec: replace(spec, sinks=False),
    "silu for its clamped form": lambda spec: replace(spec, activation="silu"),
    "pairs of neighbours as halves": lambda spec: replace(spec, latent=spec.latent and replace(spec.latent, interleaved=False)),
    "query scale of the plain form": lambda spec: replace(
        spec, attention_scale=(spec.latent.plain_width + spec.latent.rope_width) ** -0.5 if spec.latent else spec.attention_scale
    ),
    "no head norms": lambda spec: replace(spec, head_norms=False),
}


@by_name
def test_every_setting_of_a_family_is_seen_in_its_logits(model: FamilyModel, theirs: Callable[[FamilyModel], F32]) -> None:
    """The comparison with transformers would notice each setting, were it read or computed wrongly."""
    expected, spec, tokens = theirs(model), model.spec, sequence(model.spec.vocab_size)
    tried = 0
    for name, change in WRONG.items():
        wrong = change(spec)
        if wrong == spec:
            continue
        tried += 1
        stages = build_stages(NativeBackend(), wrong, model.weights())
        assert np.abs(logits_of(stages, tokens) - expected).max() > 20 * LOGIT_ERROR_MAX, name
    assert tried or model.name == "qwen2"


@pytest.mark.parametrize(
    "model", [model for model in FAMILY_MODELS if model.name.startswith(("phi", "llama", "gpt", "deepseek v3"))], ids=lambda model: model.name
)
def test_frequencies_are_transformers_bit_for_bit(model: FamilyModel) -> None:
    rotary = model.transformers_model().model.rotary_emb
    with torch.inference_mode():
        cos, _ = rotary(torch.zeros(1), torch.arange(TOKENS)[None])  # chooses LongRoPE's factors by the length
    (rope,) = model.spec.ropes
    assert np.array_equal(inverse_frequencies(rope), rotary.inv_freq.numpy())
    assert float(cos[0, 0, 0]) == np.float32(rope.magnitude)


def test_gemma_3_s_frequencies_are_transformers_for_each_kind_of_layer() -> None:
    model = next(model for model in FAMILY_MODELS if model.name == "gemma 3")
    rotary = model.transformers_model().model.rotary_emb
    near, far = model.spec.ropes
    assert np.array_equal(inverse_frequencies(near), rotary.sliding_attention_inv_freq.numpy())
    assert np.array_equal(inverse_frequencies(far), rotary.full_attention_inv_freq.numpy())
