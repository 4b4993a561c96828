"""Grammars of one model: the vocabulary they are over, and a process that tries each before the engine has to.

A grammar of a caller's can take as much time and memory as it likes to compile. So it is compiled first in a process that has limits and nothing to
lose; what passes is compiled again where it is used, and does there what it did here.
"""

from __future__ import annotations

import dataclasses
import json
import select
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress

from lockstep.config import EngineConfig
from lockstep.errors import PeerError
from lockstep.launch.model import ResolvedModel, load_tokenizer, stage_config
from lockstep.sampling.grammar import Vocabulary

COMPILE_CPU_S = 2
"""Seconds of a processor that a grammar may take to compile."""

COMPILE_WALL_S = 60.0
START_S = 60.0
MEMORY_BYTES = 1 << 30
"""Address space that the process may add to what it has with interpreter and vocabulary loaded."""

REMEMBERED = 1024


def vocabulary_of(config: EngineConfig, model: ResolvedModel) -> Vocabulary:
    tokenizer = load_tokenizer(config, model)
    special = tokenizer.special_ids

    def spelled(token: int) -> bytes:
        return (tokenizer.token_piece(token) or "").encode() if token in special else tokenizer.token_bytes(token)

    return Vocabulary(
        tokens=[spelled(token) for token in range(model.spec.vocab_size)],
        special_ids=sorted(special),
        end_ids=model.eos_ids,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


class GrammarChecker:
    """Says why a grammar does not compile. Any thread may ask; the process starts with the first question, and again after it had to be killed."""

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        self._settings = json.dumps(dataclasses.asdict(stage_config(config, model)))
        self._asking = threading.Lock()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[str, str] = OrderedDict()

    def __call__(self, source: str) -> str:
        """Nothing if it compiles within the limits. Raises PeerError if the process does not come up."""
        known = self._recall(source)
        if known is not None:
            return known
        with self._asking:
            known = self._recall(source)
            return self._remember(source, self._ask(source)) if known is None else known

    def _recall(self, source: str) -> str | None:
        """Without waiting for another grammar that is being tried."""
        with self._lock:
            return self._known.get(source)

    def _remember(self, source: str, answer: str) -> str:
        with self._lock:
            self._known[source] = answer
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return answer

    def _ask(self, source: str) -> str:
        process = self._process if self._process is not None and self._process.poll() is None else self._start()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(source).encode() + b"\n")
            process.stdin.flush()
        answer = self._read(process, COMPILE_WALL_S)
        if answer is not None:
            return answer
        self.close()
        return f"it takes more than {COMPILE_CPU_S} s of a processor or {MEMORY_BYTES >> 20} MiB; make it simpler"

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "lockstep.launch.grammar_process", self._settings]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        if self._read(self._process, START_S) is None:
            self.close()
            raise PeerError("the process that tries grammars did not come up; structured outputs cannot be served")
        return self._process

    @staticmethod
    def _read(process: subprocess.Popen[bytes], timeout_s: float) -> str | None:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        line = process.stdout.readline() if ready else b""
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
