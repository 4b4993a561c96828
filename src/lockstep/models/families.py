"""The door to `models`: a spec becomes the program of a stage and the sources of its weights. Knows which families there are, not what is in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lockstep.errors import ConfigError
from lockstep.models.blocks import WeightSource
from lockstep.models.deepseek import build_deepseek, deepseek_weight_sources
from lockstep.models.gemma import build_gemma, gemma_weight_sources
from lockstep.models.gpt_oss import gpt_oss_weight_sources
from lockstep.models.llama import build_llama, llama_weight_sources, mixtral_weight_sources, phi3_weight_sources, qwen_moe_weight_sources
from lockstep.models.spec import ModelSpec
from lockstep.ops.program import Program

__all__ = ["FAMILIES", "Family", "WeightSource", "build_program", "weight_sources"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """build: (spec, layers, *, embeds, samples) -> Program. sources: (spec, program) -> a source for each of the program's weights."""

    build: Callable[..., Program]
    sources: Callable[[ModelSpec, Program], Mapping[str, WeightSource]]


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(build=build_llama, sources=llama_weight_sources),
        "mixtral": Family(build=build_llama, sources=mixtral_weight_sources),
        "qwen_moe": Family(build=build_llama, sources=qwen_moe_weight_sources),
        "phi3": Family(build=build_llama, sources=phi3_weight_sources),
        "gpt_oss": Family(build=build_llama, sources=gpt_oss_weight_sources),
        "deepseek": Family(build=build_deepseek, sources=deepseek_weight_sources),
        "gemma": Family(build=build_gemma, sources=gemma_weight_sources),
    }
)


def build_program(spec: ModelSpec, layers: range, *, embeds: bool, samples: bool) -> Program:
    """The program of one stage.

    layers: the stage's layers by their number in the whole model, consecutive. embeds: it owns the embedding (first stage);
    samples: it owns final norm, head and sampling (last stage). Without `embeds` the program's input is buffer "hidden", float32 [T, hidden_size];
    without `samples` the same buffer is its output. Raises ConfigError for layers that the model does not have.
    """
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= spec.layer_count:
        raise ConfigError(f"a stage needs consecutive layers within 0..{spec.layer_count}, got {layers}")
    return FAMILIES[spec.family].build(spec, layers, embeds=embeds, samples=samples)


def weight_sources(spec: ModelSpec, program: Program) -> Mapping[str, WeightSource]:
    """Where each weight of a program that `build_program` made comes from, by the program's name for it."""
    return FAMILIES[spec.family].sources(spec, program)
