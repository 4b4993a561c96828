"""`lockstep generate MODEL --prompt ...`: answer prompts once, without a server."""

from __future__ import annotations

import argparse
import sys

from lockstep.cli.flags import add_engine_flags, count, engine_config
from lockstep.core.params import SamplingParams
from lockstep.errors import InvalidRequestError
from lockstep.llm import LLM, output_json


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("generate", help="answer prompts once, without a server", description=__doc__)
    add_engine_flags(parser)
    sampling = parser.add_argument_group("generation")
    sampling.add_argument("--prompt", "-p", action="append", help="a prompt; may be given several times (default: standard input)")
    sampling.add_argument("--chat", action="store_true", help="put each prompt through the model's chat template as a user message")
    sampling.add_argument("--max-tokens", type=count, default=128, help="(default: %(default)s)")
    sampling.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--top-k", type=int, default=0, help="0 keeps all (default: %(default)s)")
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--n", type=int, default=1, help="choices a prompt (default: %(default)s)")
    sampling.add_argument("--sampling-seed", type=int, help="seed of the requests (default: from --seed, or the operating system)")
    sampling.add_argument("--stop", action="append", default=[], help="a string that ends the answer; may be given several times")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    sampling.add_argument("--json", action="store_true", help="one JSON object a prompt, with token ids")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    params = SamplingParams(
        n=arguments.n,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.sampling_seed,
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
    )
    prompts = arguments.prompt or [sys.stdin.read()]
    if not all(prompts):
        raise InvalidRequestError("a prompt is empty; give --prompt TEXT, or text on standard input", param="prompt")
    config = engine_config(arguments)
    settings = {name: getattr(config, name) for name in config.__dataclass_fields__ if name != "model"}
    with LLM(config.model, **settings) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(chats, params) if arguments.chat else llm.generate(prompts, params)
        for output in outputs:
            print(output_json(output) if arguments.json else "\n".join(choice.text for choice in output.outputs))
    return 0
