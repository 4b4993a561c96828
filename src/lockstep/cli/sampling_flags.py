"""Flags of the commands that generate, and how they become `SamplingParams`. Knows flags; ranges are `SamplingParams`' own."""

from __future__ import annotations

import argparse
from dataclasses import replace

from lockstep.cli.flags import count, json_object
from lockstep.core.params import SamplingParams


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """max_tokens: the default; None is up to the model's window."""
    sampling = parser.add_argument_group("generation")
    most = "%(default)s" if max_tokens is not None else "as many as the model's window has room for"
    sampling.add_argument("--max-tokens", type=count, default=max_tokens, help=f"most tokens of an answer (default: {most})")
    sampling.add_argument("--temperature", type=float, help="0 is greedy (default: the model's, or 1)")
    sampling.add_argument("--top-p", type=float, help="(default: the model's, or 1, which keeps all)")
    sampling.add_argument("--top-k", type=int, help="0 keeps all (default: the model's, or 0)")
    sampling.add_argument("--min-p", type=float, help="(default: the model's, or 0, which keeps all)")
    sampling.add_argument("--repetition-penalty", type=float, help="of tokens of prompt and answer; above 1 discourages (default: the model's, or 1)")
    sampling.add_argument("--presence-penalty", type=float, help="of tokens of the answer (default: 0)")
    sampling.add_argument("--frequency-penalty", type=float, help="of tokens of the answer, each time they came (default: 0)")
    sampling.add_argument("--min-tokens", type=count, help="no end before so many tokens (default: 0)")
    sampling.add_argument("--sampling-seed", type=int, help="seed of the requests (default: from --seed, or the operating system)")
    sampling.add_argument("--stop", action="append", default=[], help="a string that ends the answer; may be given several times")
    sampling.add_argument(
        "--structured-outputs",
        type=json_object,
        metavar="JSON",
        help='what answers must look like: {"json": SCHEMA}, {"regex": "..."}, {"choice": [...]}, {"grammar": "..."} or {"json_object": true}',
    )
    sampling.add_argument("--extra-args", type=json_object, metavar="JSON", help="arguments of --logits-processors, by name")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


def sampling_params(arguments: argparse.Namespace, defaults: SamplingParams = SamplingParams()) -> SamplingParams:
    """What was asked for, and the defaults (the model's, once they are known) for the rest. Raises InvalidRequestError naming the parameter that is
    out of range."""
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
    names = ("structured_outputs", "extra_args", "n", "temperature", "top_p", "top_k", "min_p", *penalties, "max_tokens", "stop", "ignore_eos")
    asked = {name: getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None}
    return replace(defaults, **{"max_tokens": None, "seed": arguments.sampling_seed} | asked)
