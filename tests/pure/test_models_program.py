"""The shape of a stage's program: who embeds, who samples, what the weights are called and come from."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models.families import build_program, weight_sources
from lockstep.models.rope import inverse_frequencies
from lockstep.ops.program import Program
from rig import tiny_spec


def kinds(program: Program) -> list[str]:
    return [op.kind for op in program.ops]


LAYER = ["rms_norm", "linear", "rope_write", "paged_attention", "linear", "rms_norm", "linear", "gated_activation", "linear"]


def test_only_the_first_stage_embeds_and_only_the_last_samples() -> None:
    spec = tiny_spec()
    first, middle, last = (build_program(spec, range(i, i + 1), embeds=i == 0, samples=i == 2) for i in range(3))
    assert kinds(first) == ["embed", *LAYER]
    assert kinds(middle) == LAYER
    assert kinds(last) == [*LAYER, "select", "rms_norm", "linear", "sample"]
    assert [(p.inputs, p.outputs, p.samples) for p in (first, middle, last)] == [
        ((), ("hidden",), False),
        (("hidden",), ("hidden",), False),
        (("hidden",), (), True),
    ]


def test_norm_and_head_run_on_sampled_rows_only() -> None:
    program = build_program(tiny_spec(), range(4), embeds=True, samples=True)
    select = kinds(program).index("select")
    for op in program.ops[select:]:
        assert all(program.buffers[name].axis == "S" for name in op.outputs)


def test_weight_names_carry_the_layer_s_number_in_the_whole_model() -> None:
    spec = tiny_spec(num_hidden_layers=9)
    program = build_program(spec, range(7, 9), embeds=False, samples=False)
    layered = {name.split(".")[1] for name in program.weights if name.startswith("layers.")}
    assert layered == {"7", "8"}
    assert weight_sources(spec, program)["layers.7.attention.qkv"].parts == tuple(f"model.layers.7.self_attn.{p}_proj.weight" for p in "qkv")
    assert len(program.kv_layers) == 2


def test_every_checkpoint_tensor_of_a_model_is_used_exactly_once() -> None:
    spec = tiny_spec(attention_bias=True, mlp_bias=True)
    stages = [build_program(spec, range(i, i + 2), embeds=i == 0, samples=i == 2) for i in (0, 2)]
    parts = [part for program in stages for source in weight_sources(spec, program).values() for part in source.parts]
    projections = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for layer in range(4):
        expected |= {f"model.layers.{layer}.{name}.{kind}" for name in projections for kind in ("weight", "bias")}
        expected |= {f"model.layers.{layer}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")}
    assert len(parts) == len(set(parts))
    assert set(parts) == expected


def test_a_tied_head_is_the_embedding_in_a_second_role() -> None:
    spec = tiny_spec(tie_word_embeddings=True)
    whole = build_program(spec, range(4), embeds=True, samples=True)
    assert whole.weights["embedding"].roles == ("embedding", "matrix")
    last = build_program(spec, range(3, 4), embeds=False, samples=True)
    assert last.weights["embedding"].roles == ("matrix",)
    assert weight_sources(spec, last)["embedding"].parts == ("model.embed_tokens.weight",)
    assert "head" not in whole.weights


def test_frequencies_are_computed_and_shared_by_all_layers() -> None:
    spec = tiny_spec()
    source = weight_sources(spec, build_program(spec, range(4), embeds=True, samples=True))["rope.inverse_frequencies"]
    assert source.parts == ()
    assert source.computed is not None
    assert np.array_equal(source.computed, inverse_frequencies(spec.ropes[0])[None, :])


@pytest.mark.parametrize("layers", [range(0), range(3, 5), range(-1, 2), range(0, 4, 2)])
def test_layers_that_the_model_does_not_have_are_refused(layers: range) -> None:
    with pytest.raises(ConfigError, match="consecutive layers within"):
        build_program(tiny_spec(), layers, embeds=True, samples=True)
