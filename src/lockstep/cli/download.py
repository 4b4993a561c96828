"""`lockstep download MODEL`: put what `serve MODEL` needs into the cache, and print where it is."""

from __future__ import annotations

import argparse
import json

from lockstep.cli.flags import add_model_flags, engine_config
from lockstep.launch import local_config


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("download", help="download a model by its Hugging Face name, to start offline later", description=__doc__)
    add_model_flags(parser.add_argument_group("model"))
    parser.add_argument("--json", action="store_true", help="print one JSON object with the paths, and show no progress")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    local = local_config(engine_config(arguments))
    if arguments.json:
        print(json.dumps({"model": local.model, "tokenizer": local.tokenizer}))
    else:
        print(*filter(None, (local.model, local.tokenizer)), sep="\n")
    return 0
