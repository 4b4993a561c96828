"""Which stage holds which layers, and what a stage's weights and KV take in memory. Knows sizes; does not know devices or processes.

layers    0 1 2 3 4 5 6 7 8 9
stages   [  0  )[   1   )[ 2 )      contiguous, half-open, at least one layer each
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from lockstep.errors import ConfigError
from lockstep.models.families import build_program
from lockstep.models.spec import ModelSpec
from lockstep.ops.backend import DType, KVDType
from lockstep.ops.program import KVLayer, Program


def weight_bytes(program: Program, dtype: DType) -> int:
    """Bytes of a program's weights: matrices and embeddings in `dtype`, vectors in float32; a tied table counts once."""
    return sum(weight.rows * weight.columns * (4 if weight.roles == ("vector",) else item_bytes(dtype)) for weight in program.weights.values())


def layer_weight_bytes(spec: ModelSpec, dtype: DType, layer: int = 0) -> int:
    """Bytes of one layer's weights, without the rotary frequencies that layers share. Layers of a model weigh the same, but where some have experts
    and others do not."""
    body, frequencies = build_program(spec, range(layer, layer + 1), embeds=False, samples=False), 4 * (spec.layers[layer].rope.width // 2)
    return weight_bytes(body, dtype) - frequencies


def split_layers(spec: ModelSpec, stage_count: int, dtype: DType) -> tuple[range, ...]:
    """The split whose largest stage has the fewest weight bytes, the embedding counted on the first stage, final norm and head on the last.

    Each stage starts with one layer; every further layer goes to the stage that is the smallest with it, the earlier one on a tie. That is optimal
    where all layers weigh the same (a second table of rotary frequencies, some hundred bytes, is not counted).
    Raises ConfigError if there are fewer layers than stages.
    """
    _check_stage_count(stage_count, spec.layer_count)
    if 0 < len(spec.expert_layers) < spec.layer_count:
        return _split_unequal(spec, stage_count, dtype)
    layer = layer_weight_bytes(spec, dtype)
    held = [_stage_bytes(spec, stage, stage_count, dtype) for stage in range(stage_count)]
    counts = [1] * stage_count
    for _ in range(spec.layer_count - stage_count):
        smallest = held.index(min(held))
        counts[smallest] += 1
        held[smallest] += layer
    return _ranges(counts)


def _split_unequal(spec: ModelSpec, stage_count: int, dtype: DType) -> tuple[range, ...]:
    """The same where layers weigh differently: by the largest stage that must be allowed, found by halving; each stage takes what it can hold."""
    kinds = {
        has: layer_weight_bytes(spec, dtype, next(i for i in range(spec.layer_count) if (i in spec.expert_layers) == has)) for has in (True, False)
    }
    weights = [kinds[layer in spec.expert_layers] for layer in range(spec.layer_count)]
    own = [_stage_bytes(spec, stage, stage_count, dtype) - weights[0] for stage in range(stage_count)]
    low, high = max(weights), sum(weights) + sum(own)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _filled(weights, own, middle) is not None else (middle + 1, high)
    counts = _filled(weights, own, low)
    assert counts is not None, (weights, own)
    return _ranges(counts)


def _filled(weights: list[int], own: list[int], most: int) -> list[int] | None:
    """Layers a stage if no stage may weigh more than `most`, at least one each; None if they do not fit so."""
    counts, layer = [], 0
    for stage, held in enumerate(own):
        count = 0
        while layer < len(weights) - (len(own) - stage - 1) and held + weights[layer] <= most:
            held, layer, count = held + weights[layer], layer + 1, count + 1
        if not count:
            return None
        counts.append(count)
    return counts if layer == len(weights) else None


def parse_split(text: str, layer_count: int) -> tuple[range, ...]:
    """An explicit split, "10,12,8": layers a stage, in order. Raises ConfigError if it is malformed or does not add up to the model's layers."""
    fields = [field.strip() for field in text.split(",")]
    if not all(field.isascii() and field.isdigit() and int(field) > 0 for field in fields):
        raise ConfigError(f"a layer split must be positive integers separated by commas, such as '10,12,8', got {text!r}")
    counts = [int(field) for field in fields]
    _check_stage_count(len(counts), layer_count)
    if sum(counts) != layer_count:
        raise ConfigError(f"the layer split {text!r} adds up to {sum(counts)} layers, the model has {layer_count}; change one to match the other")
    return _ranges(counts)


def kv_bytes_per_block(program: Program, dtype: KVDType, block_size: int, group_count: int) -> tuple[int, ...]:
    """Bytes that one block of `block_size` positions takes in a stage's KV pools, one a group: keys and values of all its layers of the group, in
    int8 with a scale a head."""

    def position(layer: KVLayer) -> int:
        return layer.width + 4 * layer.width // layer.head_dim if dtype == "int8" else layer.width * item_bytes(dtype)

    layers = [[layer for layer in program.kv_layers if layer.group == group] for group in range(group_count)]
    return tuple(sum(map(position, own)) * block_size for own in layers)


def item_bytes(dtype: DType) -> int:
    return 2 if dtype == "bfloat16" else 4


def _stage_bytes(spec: ModelSpec, stage: int, stage_count: int, dtype: DType) -> int:
    """Weight bytes of a stage that holds one layer."""
    return weight_bytes(build_program(spec, range(1), embeds=stage == 0, samples=stage == stage_count - 1), dtype)


def _check_stage_count(stage_count: int, layer_count: int) -> None:
    if stage_count < 1:
        raise ConfigError(f"the number of pipeline stages must be at least 1, got {stage_count}")
    if stage_count > layer_count:
        raise ConfigError(f"{stage_count} pipeline stages need at least {stage_count} layers, the model has {layer_count}; use fewer stages")


def _ranges(counts: list[int]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))
