"""`lockstep verify MODEL`: prove the promise on this machine with this model. Exit status 1 on any mismatch, or if a way to run did not do what its
name says."""

from __future__ import annotations

import argparse
import sys
import time

from lockstep.cli.flags import add_engine_flags, engine_config
from lockstep.errors import ConfigError
from lockstep.verify.cells import full_cells, quick_cells
from lockstep.verify.matrix import Matrix
from lockstep.verify.report import as_json, table

VARIED = (
    "pipeline_parallel_size",
    "layer_split",
    "distributed_executor_backend",
    "max_num_batched_tokens",
    "num_gpu_blocks_override",
    "threads",
    "microbatches",
    "block_size",
    "max_num_seqs",
    "max_model_len",
    "async_scheduling",
    "enable_prefix_caching",
)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("verify", help="run requests in many ways and compare tokens and log probabilities bit for bit", description=__doc__)
    add_engine_flags(parser)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="fewer ways to run, about a minute on the embedded model")
    extent.add_argument("--full", action="store_true", help="all ways to run: every pair of settings, and some triples (the default)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    for name in VARIED:
        if getattr(config, name) != type(config).__dataclass_fields__[name].default:
            raise ConfigError(f"verify chooses {name} for each way to run; leave --{name.replace('_', '-')} out")
    start = time.monotonic()

    def progress(name: str, mismatches: int, missed: list[str]) -> None:
        verdict = "ok" if not mismatches and not missed else f"{mismatches} mismatches, {len(missed)} counters missed"
        print(f"{time.monotonic() - start:7.1f} s  {verdict:<8} {name}", file=sys.stderr, flush=True)

    report = Matrix(config, quick=arguments.quick, progress=progress).run(quick_cells() if arguments.quick else full_cells())
    print(as_json(report) if arguments.json else table(report))
    return 1 if report.failed else 0
