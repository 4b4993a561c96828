"""Flags of the commands that generate, and how they become `SamplingParams`. Knows flags; ranges are `SamplingParams`' own."""

from __future__ import annotations

import argparse

from lockstep.cli.flags import count
from lockstep.core.params import SamplingParams


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """max_tokens: the default; None is up to the model's window."""
    sampling = parser.add_argument_group("generation")
    most = "%(default)s" if max_tokens is not None else "as many as the model's window has room for"
    sampling.add_argument("--max-tokens", type=count, default=max_tokens, help=f"most tokens of an answer (default: {most})")
    sampling.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s, keeps all)")
    sampling.add_argument("--top-k", type=int, default=0, help="0 keeps all (default: %(default)s)")
    sampling.add_argument("--min-p", type=float, default=0.0, help="(default: %(default)s, keeps all)")
    sampling.add_argument("--sampling-seed", type=int, help="seed of the requests (default: from --seed, or the operating system)")
    sampling.add_argument("--stop", action="append", default=[], help="a string that ends the answer; may be given several times")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Raises InvalidRequestError naming the parameter that is out of range."""
    return SamplingParams(
        n=getattr(arguments, "n", 1),
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.sampling_seed,
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
    )
