"""gpt-oss: Llama's order, with attention sinks, alternating windows, and experts with biases and a clamped activation.

Knows Hugging Face's tensor names and how they lie there: experts' matrices as [experts, inputs, outputs], gate and up in turns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lockstep.models.blocks import Arranged, Parts, WeightSource, named_sources
from lockstep.models.llama import LAYER_PARTS, MODEL_PARTS
from lockstep.models.spec import ModelSpec
from lockstep.ops.program import Program

GPT_OSS_LAYER_PARTS: Parts = {
    **LAYER_PARTS,
    "attention.sinks": ("self_attn.sinks",),
    "ffn.experts.router": ("mlp.router.weight",),
    "ffn.experts.router_bias": ("mlp.router.bias",),
    "ffn.experts.gate_up": ("mlp.experts.gate_up_proj",),
    "ffn.experts.gate_up_bias": ("mlp.experts.gate_up_proj_bias",),
    "ffn.experts.down": ("mlp.experts.down_proj",),
    "ffn.experts.down_bias": ("mlp.experts.down_proj_bias",),
}


def gpt_oss_weight_sources(spec: ModelSpec, program: Program) -> Mapping[str, WeightSource]:
    """One source for each weight of the program, by the program's name for it."""
    mixture = spec.experts
    assert mixture is not None, spec
    count, width, hidden = mixture.count, mixture.ffn_size, spec.hidden_size
    arrangements = {
        "ffn.experts.gate_up": Arranged(shape=(count, hidden, 2 * width), arrange=lambda tensor: _gates_first(tensor.swapaxes(1, 2))),
        "ffn.experts.gate_up_bias": Arranged(shape=(count, 2 * width), arrange=_gates_first),
        "ffn.experts.down": Arranged(shape=(count, width, hidden), arrange=lambda tensor: tensor.swapaxes(1, 2)),
        "ffn.experts.down_bias": Arranged(shape=(count, hidden), arrange=lambda tensor: tensor),
    }
    return named_sources(spec, program, MODEL_PARTS, GPT_OSS_LAYER_PARTS, arrangements)


def _gates_first(tensor: NDArray[np.float32]) -> NDArray[np.float32]:
    """[experts, 2 * width, ...] with gate and up in turns to all gates, then all ups."""
    return np.concatenate([tensor[:, ::2], tensor[:, 1::2]], axis=1)
