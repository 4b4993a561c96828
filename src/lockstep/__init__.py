"""Lockstep: LLM inference and serving in which the same request gets the same tokens, however the engine is deployed.

from lockstep import LLM, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.async_llm import AsyncLLM, AsyncLLMEngine
    from lockstep.core.params import SamplingParams, StructuredOutputsParams
    from lockstep.llm import LLM, CompletionOutput, Logprob, RequestOutput
    from lockstep.sampling.logits_processor import LogitsEdit, LogitsProcessor, ModelFacts

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "LogitsEdit",
    "LogitsProcessor",
    "Logprob",
    "ModelFacts",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loaded when first asked for, so that a stage's process or `lockstep --help` does not pay for it."""
    if name in ("SamplingParams", "StructuredOutputsParams"):
        from lockstep.core import params

        return getattr(params, name)
    if name in ("LogitsEdit", "LogitsProcessor", "ModelFacts"):
        from lockstep.sampling import logits_processor

        return getattr(logits_processor, name)
    if name.startswith("AsyncLLM") and name in __all__:
        from lockstep import async_llm

        return getattr(async_llm, name)
    if name in __all__:
        from lockstep import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
