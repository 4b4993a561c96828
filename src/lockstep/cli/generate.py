"""`lockstep generate MODEL --prompt ...` or `--prompts-file IN.jsonl`: answer prompts once, without a server.

A file of prompts has a JSON object a line: "prompt" (text), "messages" (a conversation) or "prompt_token_ids", and what the line wants of its own:
"id", sampling parameters by their names in the API, "priority", "chat_template_kwargs". Flags are the defaults of all lines. Each line of the output
file answers one, in the order of the input: "id", "text", "token_ids", "finish_reason", "usage", "error". A line that cannot be answered gets its
error and does not stop the others; then the exit status is 1. A run that was interrupted or killed goes on with --resume.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from lockstep.cli import batch
from lockstep.cli.flags import add_engine_flags, engine_config
from lockstep.cli.sampling_flags import add_sampling_flags, sampling_params
from lockstep.errors import ConfigError, InvalidRequestError
from lockstep.llm import LLM, output_json


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate", help="answer prompts once, without a server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_flags(parser)
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompt", "-p", action="append", help="a prompt; may be given several times (default: standard input)")
    prompts.add_argument("--chat", action="store_true", help="put each prompt through the model's chat template as a user message")
    prompts.add_argument("--json", action="store_true", help="one JSON object a prompt, with token ids")
    prompts.add_argument("--prompts-file", metavar="IN.jsonl", help="a JSON object a line, see above; - is standard input")
    prompts.add_argument("--output-file", metavar="OUT.jsonl", type=Path, help="answers to --prompts-file (default: standard output)")
    prompts.add_argument("--resume", action="store_true", help="go on with an --output-file that holds the answers to the first lines")
    prompts.add_argument("--n", type=int, default=1, help="choices a prompt (default: %(default)s)")
    add_sampling_flags(parser, max_tokens=128)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    sampling_params(arguments)  # what is out of range is refused before anything is loaded
    if arguments.prompts_file is not None:
        return _run_file(arguments)
    for flag in ("output_file", "resume"):
        if getattr(arguments, flag):
            raise ConfigError(f"--{flag.replace('_', '-')} goes with --prompts-file")
    prompts = arguments.prompt or [sys.stdin.read()]
    if not all(prompts):
        raise InvalidRequestError("a prompt is empty; give --prompt TEXT, or text on standard input", param="prompt")
    config = engine_config(arguments)
    settings = {name: getattr(config, name) for name in config.__dataclass_fields__ if name != "model"}
    with LLM(config.model, **settings) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        params = sampling_params(arguments, llm.get_default_sampling_params())
        outputs = llm.chat(chats, params) if arguments.chat else llm.generate(prompts, params)
        for output in outputs:
            print(output_json(output) if arguments.json else "\n".join(choice.text for choice in output.outputs))
    return 0


def _run_file(arguments: argparse.Namespace) -> int:
    for flag in ("prompt", "json"):
        if getattr(arguments, flag):
            raise ConfigError(f"--{flag} does not go with --prompts-file, whose lines are prompts and whose answers are JSON")
    if arguments.resume and arguments.output_file is None:
        raise ConfigError("--resume needs the --output-file that it goes on with")
    settings = batch.BatchSettings(
        source=None if arguments.prompts_file == "-" else Path(arguments.prompts_file),
        target=arguments.output_file,
        resume=arguments.resume,
        chat=arguments.chat,
        params=partial(sampling_params, arguments),
    )
    return batch.run(engine_config(arguments), settings)
