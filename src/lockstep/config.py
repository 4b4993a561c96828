"""`EngineConfig`: every setting of an engine, in one frozen object, validated once. Names and defaults are vLLM's where the thing exists there.

Knows ranges and relations between settings; does not know the model (that is checked by `launch` once its config is read), environment or flags.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal

from lockstep.errors import ConfigError

Executor = Literal["auto", "local", "mp"]

_KV_DTYPES: Mapping[str, Literal["float32", "bfloat16", "int8"]] = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float32": "float32",
    "fp32": "float32",
    "int8": "int8",
    "int8_per_token_head": "int8",
}

AUTO = "auto"
"""As max_model_len: the longest window that KV memory holds. -1 says the same, and is what becomes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """model: "smollm2" (the embedded default), a .gguf file, a Hugging Face folder or a Hugging Face name: ORG/NAME, ORG/NAME:Q4_K_M,
    ORG/NAME:FILE.gguf. tokenizer: another folder, .gguf or name to take it from.
    revision, tokenizer_revision: branch, tag or commit of a Hugging Face name; None is the default branch, and for a tokenizer of the model's own
    repository the model's revision. download_dir: cache of downloads, None is huggingface_hub's own. hf_token: of a Hugging Face account; True asks
    for the stored one, None sends HF_TOKEN or the stored one if there is any. use_tqdm_on_load: downloads show their progress on standard error.
    dtype: of weights, and of KV unless kv_cache_dtype names another; "auto" is bfloat16. kv_cache_dtype: "int8" keeps a scale a token and head.
    max_model_len: window in tokens, None for the model's own, AUTO (or -1) for as much of that as KV memory holds of one request.

    pipeline_parallel_size: stages. layer_split: layers a stage, "16,14"; None splits by weight bytes.
    distributed_executor_backend: "mp" runs each stage in a process, "local" all in this one; "auto" is local for one stage, else mp.
    threads: compute threads a stage; None shares the machine's cores among the stages.

    block_size: positions a KV block. kv_cache_memory_bytes: KV memory of each stage; None takes part of what is free.
    num_gpu_blocks_override: blocks in the pool, whatever memory says. enable_prefix_caching: reuse KV of equal prefixes.

    max_num_seqs: most requests at once. max_num_batched_tokens: most tokens a step. async_scheduling: plan steps before earlier results are in.
    scheduling_policy: "fcfs" or "priority" (lower first). microbatches: plans that share the running requests; None is one a stage.
    queue_max: most requests that may wait; more are refused as overload.

    seed: draws the seeds of requests that bring none; None takes them from the operating system.
    generation_config: where sampling defaults come from: "auto" is the model's generation_config.json, "vllm" none, else a folder with such a file.
    override_generation_config: defaults that go before those, by that file's names.
    logits_processors: classes that change logits for requests that ask for it, by name, "module:Class", or themselves: a class becomes its name,
    by which every stage finds it again.
    backend: "native" or "reference" (torch). instruction_set: of the native backend; None picks the best this CPU has.
    heartbeat_timeout_s: a stage that is silent for longer is lost. step_timeout_s: a step without a result for longer is stalled.
    startup_timeout_s: stages must be ready by then.
    max_restarts: failures within ten minutes, or in a row without a token, that the engine recovers from; one more ends it, so 0 is no recovery.
    restart_backoff_s: wait before the second restart without a token in between, doubled each time.
    runtime_checks: digests, checksums, provenance and the delivery ledger; False is for benchmarks of their cost only.

    recorder_folder: where a failure's recording goes; None is a folder of this user under the system's temporary one. recorder_bytes_max: of all
    recordings there. recorder_steps: steps that a recording reaches back at least; 0 records nothing. record_tokens: recordings hold token ids;
    otherwise keyed hashes of them.

    Raises ConfigError naming the setting.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    hf_token: str | bool | None = field(default=None, repr=False)
    use_tqdm_on_load: bool = True
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | str | None = None
    pipeline_parallel_size: int = 1
    layer_split: str | None = None
    distributed_executor_backend: str = "auto"
    threads: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    async_scheduling: bool = True
    scheduling_policy: str = "fcfs"
    microbatches: int | None = None
    queue_max: int = 100_000
    seed: int | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    logits_processors: Sequence[str | type] | None = ()
    backend: str = "native"
    instruction_set: str | None = None
    heartbeat_timeout_s: float = 5.0
    step_timeout_s: float = 300.0
    startup_timeout_s: float = 600.0
    max_restarts: int = 10
    restart_backoff_s: float = 0.1
    runtime_checks: bool = True
    recorder_folder: str | None = None
    recorder_bytes_max: int = 256 << 20
    recorder_steps: int = 256
    record_tokens: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be the name or path of a model, got {self.model!r}")
        for name in ("tokenizer", "revision", "tokenizer_revision", "download_dir"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name} must be a text that is not empty, or left out, got {value!r}")
        if not isinstance(self.hf_token, (str, bool, type(None))) or self.hf_token == "":
            found = "an empty text" if self.hf_token == "" else type(self.hf_token).__name__
            raise ConfigError(f"hf_token must be a token, true or left out, got {found}")
        _choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float", "bf16", "fp32"))
        _choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", *_KV_DTYPES))
        _choice("distributed_executor_backend", self.distributed_executor_backend, ("auto", "local", "mp"))
        _choice("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _choice("backend", self.backend, ("native", "reference"))
        for name, low, high in (
            ("pipeline_parallel_size", 1, 256),
            ("block_size", 1, 1024),
            ("max_num_seqs", 1, 65536),
            ("max_num_batched_tokens", 1, 1 << 20),
            ("queue_max", 1, 1 << 31),
            ("max_restarts", 0, 1 << 31),
            ("recorder_bytes_max", 0, 1 << 50),
            ("recorder_steps", 0, 1 << 20),
        ):
            _integer(name, getattr(self, name), low, high)
        for name, low, high in (
            ("threads", 1, 1024),
            ("kv_cache_memory_bytes", 1, 1 << 50),
            ("num_gpu_blocks_override", 1, 1 << 30),
            ("microbatches", 1, 512),
            ("seed", 0, (1 << 64) - 1),
        ):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low, high)
        if self.max_model_len == AUTO:
            object.__setattr__(self, "max_model_len", -1)
        if self.max_model_len not in (None, -1):
            _integer("max_model_len", self.max_model_len, 2, 1 << 26, beside=f", {AUTO!r} or -1")
        for name in ("enable_prefix_caching", "async_scheduling", "runtime_checks", "record_tokens", "use_tqdm_on_load"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ConfigError(f"generation_config must be auto, vllm or a folder, got {self.generation_config!r}")
        if not isinstance(self.override_generation_config, (Mapping, NoneType)):
            raise ConfigError(f"override_generation_config must be a mapping of names to numbers, got {self.override_generation_config!r:.100}")
        object.__setattr__(self, "logits_processors", _class_names(self.logits_processors))
        for name in ("heartbeat_timeout_s", "step_timeout_s", "startup_timeout_s", "restart_backoff_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value < 1e7:
                raise ConfigError(f"{name} must be a positive number of seconds, got {value!r}")
        if self.microbatches is not None and self.microbatches < self.pipeline_parallel_size:
            raise ConfigError(f"microbatches must be at least the number of stages, {self.pipeline_parallel_size}, got {self.microbatches}")
        if self.distributed_executor_backend == "mp" and self.pipeline_parallel_size == 1 and self.layer_split is not None:
            raise ConfigError("layer_split is for more than one stage; set pipeline_parallel_size")

    @property
    def storage_dtype(self) -> Literal["float32", "bfloat16"]:
        return "float32" if self.dtype in ("float32", "float", "fp32") else "bfloat16"

    @property
    def kv_dtype(self) -> Literal["float32", "bfloat16", "int8"]:
        return _KV_DTYPES.get(self.kv_cache_dtype, self.storage_dtype)

    @property
    def in_processes(self) -> bool:
        """Each stage has a process of its own."""
        return self.distributed_executor_backend == "mp" or (self.distributed_executor_backend == "auto" and self.pipeline_parallel_size > 1)

    @property
    def microbatch_count(self) -> int:
        return self.microbatches or self.pipeline_parallel_size


def _class_names(given: object) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise ConfigError(f"logits_processors must be a list of classes or of their names, module:Class, got {given!r:.100}")
    names = tuple(_class_name(item) for item in given)
    if len(set(names)) < len(names):
        raise ConfigError(f"logits_processors must be different classes, got {', '.join(names)}")
    return names


def _class_name(given: object) -> str:
    if isinstance(given, str):
        module, colon, name = given.partition(":")
        if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
            raise ConfigError(f"logits_processors must be named module:Class, got {given!r:.100}")
        return given
    if not isinstance(given, type):
        raise ConfigError(f"logits_processors must be classes that can be imported, got {given!r:.100}; write it as a class in a module of its own")
    found: object = sys.modules.get(given.__module__)
    for part in given.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not given or given.__module__ == "__main__":
        raise ConfigError(
            f"logits_processors: {given.__module__}:{given.__qualname__} cannot be imported by that name, as each stage's process has to; "
            "define the class at the top of a module of its own"
        )
    return f"{given.__module__}:{given.__qualname__}"


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _integer(name: str, value: object, low: int, high: int, *, beside: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}{beside}, got {value!r}")
