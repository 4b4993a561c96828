"""The process that tries grammars: `python -m lockstep.launch.grammar_process CONFIG`. Started by `GrammarChecker`, not by people.

A grammar comes in as a JSON string a line; why it does not compile goes out the same way. It ends when nobody can ask any more, or by its limits.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from lockstep.config import EngineConfig
from lockstep.launch.grammars import COMPILE_CPU_S, MEMORY_BYTES, vocabulary_of
from lockstep.launch.model import resolve_model
from lockstep.sampling.grammar import Grammars


def main(settings: str) -> None:
    config = EngineConfig(**json.loads(settings))
    grammars = Grammars(vocabulary_of(config, resolve_model(config)))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say("")
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)
        try:
            grammars.compile(json.loads(line))
            answer = ""
        except ValueError as error:
            answer = str(error) or "no reason is known"
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(answer)


def _say(text: str) -> None:
    sys.stdout.buffer.write(json.dumps(text).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
