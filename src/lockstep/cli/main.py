"""`lockstep`: picks the command, and turns errors into one line and an exit status.

Exit status: 0 done; 1 the thing asked for failed (an engine stopped, `verify` found a mismatch); 2 the caller's mistake;
3 `replay` found a difference; 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from lockstep import __version__
from lockstep.cli import download, generate, replay, serve, sim, verify
from lockstep.cli.flags import expand_config_file, model_in_place, refuse_unsupported
from lockstep.errors import CallerError, LockstepError

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        expanded = model_in_place(expand_config_file(given))
        refuse_unsupported(expanded)
        parsed = _parser().parse_args(expanded)
        command: Command = parsed.run
        return command(parsed)
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2 if isinstance(error, CallerError) else 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep", description="LLM inference and serving that gives the same request the same tokens, however it is deployed."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (serve, generate, download, verify, replay, sim):
        module.add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
