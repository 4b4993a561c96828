"""A real, small engine for the server's tests: it plays scripts and keeps a ledger. Knows the client protocol; computes nothing.

Also a byte-level tokenizer of 258 ids (bytes, then two special tokens) and a server on a free port, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lockstep.core.outputs import FinishReason, TokenEvent, TokenLogprobs
from lockstep.core.params import SamplingParams
from lockstep.errors import LockstepError
from lockstep.server.app import create_app
from lockstep.server.protocol import EngineStatus
from lockstep.server.serving import serve
from lockstep.server.settings import ServerSettings
from lockstep.text.from_folder import tokenizer_from_folder
from lockstep.text.tokenizer import Tokenizer

BYTE_COUNT = 256
START, END = 256, 257
WINDOW = 64
PATIENCE_S = 10.0
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}{{ suffix or '' }}"
)


class Hold:
    """A script's step that waits until the request is aborted or its iterator closed."""


# An asyncio.Event is waited for; set it in the server's loop (`RunningServer.call`).
Step = TokenEvent | Hold | LockstepError | asyncio.Event


@dataclass(frozen=True, kw_only=True)
class Submission:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    choice: int
    priority: int


@dataclass
class ScriptedEngine:
    """`script` gives the steps of a submission; an error is raised as the engine would before anything runs. The ledger is guarded by `changed`."""

    script: Callable[[Submission], Sequence[Step]]
    max_model_len: int = WINDOW
    fingerprint: str = "fp-scripted"
    state: EngineStatus = field(default_factory=lambda: EngineStatus(alive=True))
    submissions: list[Submission] = field(default_factory=list)
    aborted: list[tuple[str, int]] = field(default_factory=list)
    live: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)
    yielded_count: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def status(self) -> EngineStatus:
        return self.state

    async def check(self, params: SamplingParams) -> None:
        return

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *, choice: int = 0, priority: int = 0
    ) -> AsyncIterator[TokenEvent]:
        submission = Submission(request_id=request_id, prompt=tuple(prompt_token_ids), params=params, choice=choice, priority=priority)
        key = (request_id, choice)
        ended = asyncio.Event()
        with self.changed:
            assert key not in self.live, f"{key} is already running"
            self.submissions.append(submission)
            self.live[key] = ended
            self.changed.notify_all()
        try:
            for step in self.script(submission):
                if isinstance(step, LockstepError):
                    raise step
                if isinstance(step, Hold):
                    await ended.wait()
                if isinstance(step, asyncio.Event):
                    await step.wait()
                if ended.is_set():
                    yield TokenEvent(request_id=request_id, index=0, finish_reason=FinishReason.ABORT)
                    return
                if isinstance(step, TokenEvent):
                    await asyncio.sleep(0)
                    with self.changed:
                        self.yielded_count += 1
                        self.changed.notify_all()
                    yield replace(step, request_id=request_id)
        finally:
            with self.changed:
                del self.live[key]
                self.changed.notify_all()

    def abort(self, request_id: str, *, choice: int = 0) -> None:
        with self.changed:
            self.aborted.append((request_id, choice))
            if (request_id, choice) in self.live:
                self.live[request_id, choice].set()
            self.changed.notify_all()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Block this thread until `holds()`; fails after PATIENCE_S."""
        with self.changed:
            assert self.changed.wait_for(holds, PATIENCE_S), f"live {list(self.live)}, aborted {self.aborted}, submissions {len(self.submissions)}"


def events_of(
    tokens: bytes | Sequence[int],
    *,
    finish: FinishReason | None = FinishReason.LENGTH,
    size: int = 1,
    stop_token: int | None = None,
    logprobs: int | None = None,
    cached_tokens: int = 0,
) -> list[TokenEvent]:
    """`tokens` as events of `size` tokens; the last one carries `finish`. Token i has log probability -(i + 1) / 4."""
    ids = tuple(tokens)
    events = []
    for begin in range(0, len(ids), size):
        part = ids[begin : begin + size]
        entries: tuple[TokenLogprobs, ...] = ()
        if logprobs is not None:
            entries = tuple(
                TokenLogprobs(
                    token_logprob=-(begin + i + 1) / 4,
                    top_ids=tuple((token + k) % BYTE_COUNT for k in range(logprobs)),
                    top_logprobs=tuple(-(begin + i + 1) / 4 - k for k in range(logprobs)),
                )
                for i, token in enumerate(part)
            )
        last = begin + size >= len(ids)
        events.append(
            TokenEvent(
                request_id="",
                index=begin,
                token_ids=part,
                logprobs=entries,
                finish_reason=finish if last else None,
                stop_token=stop_token if last else None,
                cached_tokens=cached_tokens if begin == 0 else 0,
            )
        )
    return events


def say(text: str | bytes) -> Callable[[Submission], list[TokenEvent]]:
    """A script: the bytes of `text`, cut to max_tokens, one an event."""
    raw = text.encode() if isinstance(text, str) else text

    def script(submission: Submission) -> list[TokenEvent]:
        assert submission.params.max_tokens is not None
        return events_of(raw[: submission.params.max_tokens], logprobs=submission.params.logprobs)

    return script


def byte_tokenizer(folder: Path) -> Tokenizer:
    """Token id = byte for 0..255; 256 and 257 are <|im_start|> and <|im_end|> (the end token)."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {character: byte for byte, character in _byte_characters().items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer_from_folder(folder)


def _byte_characters() -> dict[int, str]:
    """The printable stand-ins of bytes in byte-level vocabularies (GPT-2's): itself if printable Latin-1, else counted up from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(BYTE_COUNT) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(BYTE_COUNT + i) for i, byte in enumerate(rest)}


@dataclass(frozen=True)
class RunningServer:
    """Where a served application is; `stop` asks it to end, `join` waits for that, `call` runs a function in its loop."""

    url: str
    app: Any
    stop: Callable[[], None]
    join: Callable[[], None]
    call: Callable[[Callable[[], object]], None]


@contextmanager
def running_server(engine: ScriptedEngine, tokenizer: Tokenizer, settings: ServerSettings, **serving: Any) -> Iterator[RunningServer]:
    """Serve `engine` from a thread. On leaving, nothing may be live in the engine and no task left in the loop."""
    app = create_app(engine, tokenizer, settings)
    listening: queue.Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()
    left: list[str] = []

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        options = {"port": 0, "shutdown_timeout_s": settings.shutdown_timeout_s, **serving}
        await serve(app, stop=stop, on_listening=lambda url: listening.put((url, loop, stop)), **options)
        left.extend(str(task) for task in asyncio.all_tasks() if task is not asyncio.current_task())

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    url, loop, stop = listening.get(timeout=PATIENCE_S)

    def call(function: Callable[[], object]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(function)

    def ask_to_stop() -> None:
        call(stop.set)

    def join() -> None:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not stop"

    try:
        yield RunningServer(url=url, app=app, stop=ask_to_stop, join=join, call=call)
    finally:
        ask_to_stop()
        join()
    assert not engine.live
    assert app.state.admission.open_count == 0
    assert not left
