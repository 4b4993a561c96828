"""The composition root: the only package that may import every layer. Turns an `EngineConfig` into a running engine.

model      opens a checkpoint, reads its spec, decides dtype, window and split
generation sampling defaults that a model recommends
processors finds logits processors by name
stages     builds one stage: backend, program, packed weights, KV, executor
engine     puts driver, scheduler and stages together, in this process or in several
__main__   the entry of a stage's process
"""

from lockstep.launch.engine import RunningEngine, launch_engine, update_weights
from lockstep.launch.generation import sampling_defaults
from lockstep.launch.model import ResolvedModel, load_tokenizer, local_config, resolve_model

__all__ = [
    "ResolvedModel",
    "RunningEngine",
    "launch_engine",
    "load_tokenizer",
    "local_config",
    "resolve_model",
    "sampling_defaults",
    "update_weights",
]
