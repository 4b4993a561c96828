"""`lockstep`: picks the command, and turns errors into one line and an exit status.

Exit status: 0 done; 1 the thing asked for failed (an engine stopped, `verify` found a mismatch, a prompt of a file got no answer); 2 the caller's
mistake; 3 `replay` found a difference; 130 interrupted; 141 nobody reads the output any more; 143 told to end.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence

from lockstep import __version__
from lockstep.cli import chat, download, generate, replay, serve, sim, verify
from lockstep.cli.flag_parser import FlagParser
from lockstep.cli.flags import expand_config_file, model_in_place
from lockstep.errors import CallerError, LockstepError

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        parsed = make_parser().parse_args(model_in_place(expand_config_file(given)))
        command: Command = parsed.run
        return command(parsed)
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2 if isinstance(error, CallerError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter fails once more when it flushes
        return 141


def make_parser() -> argparse.ArgumentParser:
    """Of all commands; what it parses has the command's `run`."""
    parser = FlagParser(prog="lockstep", description="LLM inference and serving that gives the same request the same tokens, however it is deployed.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (serve, chat, generate, download, verify, replay, sim):
        module.add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
