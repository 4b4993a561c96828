"""Engine flags shared by the commands, as vLLM spells them, and how they become an `EngineConfig`.

vLLM's flags that are not here are `flag_parser`'s: refused with a reason, never ignored.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep.config import AUTO, EngineConfig
from lockstep.errors import ConfigError


def json_object(text: str) -> dict[str, Any]:
    """Raises ArgumentTypeError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def window_length(text: str) -> int | str:
    """A count, or what stands for the longest one."""
    return text if text == AUTO else count(text)


def count(text: str) -> int:
    """An integer as vLLM reads it: 8192, 8k (thousands), 8K (1024s), 1M, 1.5k. Raises ArgumentTypeError."""
    factors = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    factor = factors.get(text[-1:], 1)
    digits = text[:-1] if factor > 1 else text
    try:
        value = float(digits) * factor if factor > 1 else int(digits)
        if not math.isfinite(value):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number such as 8192, 8k or 1M, got {text!r}") from None
    if value != int(value):
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(value)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    d = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items()}
    model = parser.add_argument_group("model")
    add_model_flags(model)
    model.add_argument(
        "--dtype", default=d["dtype"], choices=("auto", "bfloat16", "float32"), help="of weights and KV; auto is bfloat16 (default: %(default)s)"
    )
    model.add_argument(
        "--kv-cache-dtype",
        default=d["kv_cache_dtype"],
        choices=("auto", "bfloat16", "float32", "int8", "int8_per_token_head"),
        help="of KV: auto is that of the weights; int8 has a scale a token and head (default: %(default)s)",
    )
    model.add_argument(
        "--max-model-len",
        type=window_length,
        help="window in tokens, prompt and output; 8k and 1M are understood, auto (-1): what KV memory holds of one request (default: the model's)",
    )
    parallel = parser.add_argument_group("stages")
    parallel.add_argument("--pipeline-parallel-size", "-pp", type=count, default=d["pipeline_parallel_size"], help="stages (default: %(default)s)")
    parallel.add_argument("--layer-split", help="layers a stage, such as 16,14 (default: by weight bytes, embedding and head counted)")
    parallel.add_argument(
        "--distributed-executor-backend",
        default=d["distributed_executor_backend"],
        choices=("auto", "mp", "local"),
        help="mp: a process a stage; local: all stages in this one; auto: mp for more than one stage (default: %(default)s)",
    )
    parallel.add_argument("--threads", type=count, help="compute threads a stage (default: its share of the cores)")
    cache = parser.add_argument_group("KV cache")
    cache.add_argument("--block-size", type=count, default=d["block_size"], help="positions a block (default: %(default)s)")
    cache.add_argument("--kv-cache-memory-bytes", type=count, help="KV memory of each stage, such as 2G (default: a part of what is free)")
    cache.add_argument("--num-gpu-blocks-override", type=count, help="blocks in the pool, whatever memory says")
    cache.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=d["enable_prefix_caching"], help="reuse KV of equal prefixes"
    )
    scheduling = parser.add_argument_group("scheduling")
    scheduling.add_argument("--max-num-seqs", type=count, default=d["max_num_seqs"], help="most requests at once (default: %(default)s)")
    scheduling.add_argument(
        "--max-num-batched-tokens", type=count, default=d["max_num_batched_tokens"], help="most tokens a step (default: %(default)s)"
    )
    scheduling.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction, default=d["async_scheduling"], help="plan ahead of results")
    scheduling.add_argument("--scheduling-policy", default=d["scheduling_policy"], choices=("fcfs", "priority"), help="(default: %(default)s)")
    scheduling.add_argument("--microbatches", type=count, help="plans that share the running requests (default: one a stage)")
    other = parser.add_argument_group("other")
    other.add_argument(
        "--generation-config",
        metavar="auto|vllm|FOLDER",
        default=d["generation_config"],
        help="whose generation_config.json gives requests their sampling defaults: the model's, nobody's, a folder's (default: %(default)s)",
    )
    other.add_argument("--override-generation-config", metavar="JSON", type=json_object, help="such defaults: '{\"temperature\": 0.5}'")
    other.add_argument(
        "--logits-processors",
        metavar="MODULE:CLASS",
        action="extend",
        nargs="+",
        default=[],
        help="classes that change logits for requests that ask for it, see docs/PLUGINS.md; may be given several times",
    )
    other.add_argument("--seed", type=count, help="draws the seeds of requests that bring none (default: from the operating system)")
    other.add_argument("--backend", default=d["backend"], choices=("native", "reference"), help="reference is plain torch (default: %(default)s)")
    other.add_argument("--config", metavar="FILE", help="YAML: flag names without dashes, and their values; flags given beside it override")
    other.add_argument("--queue-max", type=count, default=d["queue_max"], help="more waiting requests are refused as overload (default: %(default)s)")
    for name, meaning in (
        ("startup-timeout-s", "stages must be ready by then"),
        ("heartbeat-timeout-s", "a stage that is silent for longer is lost"),
        ("step-timeout-s", "a step without a result for longer is stalled"),
    ):
        other.add_argument(f"--{name}", type=float, default=d[name.replace("-", "_")], help=f"seconds; {meaning} (default: %(default)s)")
    other.add_argument("--instruction-set", help="of the native backend (default: the best this CPU has)")
    _add_failure_flags(parser.add_argument_group("failures"), d)


def add_model_flags(model: argparse._ArgumentGroup) -> None:
    """Which model, and how a hub is asked for it."""
    model.add_argument(
        "model",
        metavar="MODEL",
        help="'smollm2' (the embedded default), a .gguf file, a Hugging Face folder, or a Hugging Face name: ORG/NAME, or ORG/NAME:Q4_K_M and "
        "ORG/NAME:FILE.gguf for GGUF; may also be given as --model MODEL; "
        "huggingface_hub's variables HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT and HF_HUB_OFFLINE count",
    )
    model.add_argument("--tokenizer", help="take the tokenizer from this folder, .gguf file or Hugging Face name (default: the model's)")
    model.add_argument("--revision", help="branch, tag or commit of a Hugging Face name (default: the repository's default branch)")
    model.add_argument("--tokenizer-revision", help="the same for the tokenizer (default: the model's, where it is of the same repository)")
    model.add_argument("--download-dir", help="where downloads are kept (default: $HF_HUB_CACHE, or 'hub' in $HF_HOME)")
    model.add_argument(
        "--hf-token",
        nargs="?",
        const=True,
        help="token of a Hugging Face account; without a value the stored one, which then must be there (default: $HF_TOKEN, or the stored one)",
    )
    model.add_argument("--use-tqdm-on-load", action=argparse.BooleanOptionalAction, default=True, help="show the progress of downloads")


def _add_failure_flags(failures: argparse._ArgumentGroup, d: Mapping[str, Any]) -> None:
    failures.add_argument(
        "--max-restarts",
        type=count,
        default=d["max_restarts"],
        help="failures within ten minutes, or in a row without a token, that the engine recovers from; one more ends it, 0 recovers from none "
        "(default: %(default)s)",
    )
    failures.add_argument(
        "--restart-backoff-s",
        type=float,
        default=d["restart_backoff_s"],
        help="seconds before the second restart in a row, doubled each time (default: %(default)s)",
    )
    failures.add_argument("--recorder-folder", help="recordings of failures go there (default: a folder of yours under the temporary one)")
    failures.add_argument("--recorder-bytes-max", type=count, default=d["recorder_bytes_max"], help="of all recordings (default: %(default)s)")
    failures.add_argument(
        "--recorder-steps", type=count, default=d["recorder_steps"], help="steps that a recording goes back; 0 records nothing (default: %(default)s)"
    )
    failures.add_argument("--record-tokens", action="store_true", help="recordings hold token ids, not only keyed hashes of them")
    failures.add_argument("--disable-runtime-checks", dest="runtime_checks", action="store_false", help="for benchmarks of what the checks cost only")


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """With --json nothing is said of progress."""
    names = set(EngineConfig.__dataclass_fields__)
    settings = {name: value for name, value in vars(arguments).items() if name in names}
    return EngineConfig(**settings | ({"use_tqdm_on_load": False} if getattr(arguments, "json", False) else {}))


def model_in_place(arguments: list[str]) -> list[str]:
    """Puts the value of `--model`, as vLLM also takes it, right after the command, where it belongs."""
    arguments = [part for argument in arguments for part in (argument.split("=", 1) if argument.startswith("--model=") else [argument])]
    if "--model" not in arguments[1:]:
        return arguments
    at = arguments.index("--model")
    if at + 1 == len(arguments):
        raise ConfigError("--model needs the name or path of a model")
    return [arguments[0], arguments[at + 1], *arguments[1:at], *arguments[at + 2 :]]


def expand_config_file(arguments: list[str]) -> list[str]:
    """Replace `--config FILE` (YAML: flag names without dashes, and their values) by the flags it stands for. Flags given beside it override, and
    so does a model that follows the command."""
    arguments = [part for argument in arguments for part in (argument.split("=", 1) if argument.startswith("--config=") else [argument])]
    if "--config" not in arguments:
        return arguments
    at = arguments.index("--config")
    if at + 1 == len(arguments):
        raise ConfigError("--config needs a file")
    settings = _read_settings(Path(arguments[at + 1]))
    command, *rest = [*arguments[:at], *arguments[at + 2 :]] or [""]
    given: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None or any(argument.split("=", 1)[0] == flag for argument in rest):
            continue
        if name == "model":
            given[:0] = [] if rest and not rest[0].startswith("-") else [str(value)]
        elif isinstance(value, bool):
            given.append(flag if value else f"--no-{flag[2:]}")
        else:
            given.extend(f"{flag}={item}" for item in (value if isinstance(value, list) else [value]))
    return [command, *rest[:1], *given, *rest[1:]] if rest and not rest[0].startswith("-") else [command, *given, *rest]


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise ConfigError(f"--config {path} must hold settings, one 'name: value' a line, got {settings!r:.80}")
    return settings
