"""Answers a file of prompts: a window of lines that moves over the file, answered all at once and written in order.

Knows the order of answers, what ends a run and what a run says of itself; reading is `prompts_file`'s, writing `answers_file`'s. Memory holds the
window alone: a line is taken when the first unwritten one is less than a window before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.async_llm import AsyncLLM
from lockstep.cli.answers_file import AnswersFile
from lockstep.cli.progress import Progress
from lockstep.cli.prompts_file import RawLine, named, read_lines, read_request
from lockstep.config import EngineConfig
from lockstep.core.params import SamplingParams
from lockstep.errors import ConfigError, InternalError, InvalidRequestError, LockstepError, PeerError
from lockstep.llm import CompletionOutput, Logprob, Prompt, RequestOutput

SEED_BITS = 53
"""Of a seed that is drawn for a line: a record names it, and readers of JSON may hold numbers as float64."""

WINDOW_PER_SLOT = 2
"""Lines in the window for each request that may run at once: enough to keep the engine full while the first unwritten line is still at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """source: None is standard input. target: None is standard output. chat: text prompts are messages of a user. params(model's
    defaults): of lines that say nothing else."""

    source: Path | None
    target: Path | None
    resume: bool
    chat: bool
    params: Callable[[SamplingParams], SamplingParams]


def run(config: EngineConfig, settings: BatchSettings) -> int:
    """Answer the file; returns the exit status: 0, 1 if a line got an error, 128 and the number of a signal that ended it."""
    with contextlib.ExitStack() as closing:
        stream, size = _open_source(settings.source)
        if size is not None:  # a pipe is left to the end of the process: closing it would wait for the thread that reads it
            closing.callback(stream.close)
        if settings.source is not None and settings.target is not None and settings.target.exists() and settings.source.samefile(settings.target):
            raise ConfigError(f"--output-file {settings.target} is the --prompts-file; name another")
        answers = AnswersFile(settings.target, resume=settings.resume)
        closing.callback(answers.close)
        options = {name: getattr(config, name) for name in config.__dataclass_fields__ if name != "model"}
        llm = AsyncLLM(config.model, **options)
        closing.callback(llm.shutdown)
        return asyncio.run(_Batch(llm, settings, answers, size).run(read_lines(stream)))


def _open_source(source: Path | None) -> tuple[BinaryIO, int | None]:
    """The stream and its size, if it has one. Standard input gets a reader of its own: the interpreter's may not be in use when it ends."""
    if source is None:
        return open(0, "rb", closefd=False), None
    try:
        return source.open("rb"), source.stat().st_size if source.is_file() else None
    except OSError as error:
        raise ConfigError(f"--prompts-file {source}: {error.strerror}") from None


class _Batch:
    """One run. size: of the prompts file in bytes, if it is known."""

    def __init__(self, llm: AsyncLLM, settings: BatchSettings, answers: AnswersFile, size: int | None) -> None:
        self._llm = llm
        self._settings = settings
        self._answers = answers
        self._size = size
        self._params = settings.params(llm.get_default_sampling_params())
        self._digest = _settings_digest(llm, settings.chat, self._params)
        self._window = max(1, min(WINDOW_PER_SLOT * llm.config.max_num_seqs, llm.config.queue_max // self._params.n))
        self._progress = Progress(sys.stderr)
        self._done = self._kept = self._failed = self._tokens = 0
        self._began = time.monotonic()

    async def run(self, lines: Iterator[RawLine]) -> int:
        if self._settings.resume:
            for kept in self._answers.resume(lines, self._digest):
                self._count(failed=kept.failed)
            self._kept = self._done
        stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with _signals(stopped):
            try:
                await self._answer_all(lines, stopped)
            finally:
                self._progress.end(self._summary(ended=stopped.done()))
        if stopped.done():
            return 128 + stopped.result()
        return 1 if self._failed else 0

    async def _answer_all(self, lines: Iterator[RawLine], stopped: asyncio.Future[int]) -> None:
        """Until the file is answered or the run is stopped; what is then still at work is aborted and left for a resumed run."""
        feed = _LineFeed(lines)
        pending: deque[tuple[RawLine, asyncio.Task[dict[str, Any]]]] = deque()
        coming: asyncio.Task[RawLine | None] | None = asyncio.create_task(feed.get())
        try:
            while coming is not None or pending:
                waited: set[asyncio.Future[Any]] = {stopped, *(task for _, task in list(pending)[:1])}
                if coming is not None and len(pending) < self._window:
                    waited.add(coming)
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                self._write_done(pending)
                if stopped.done():
                    return
                while coming is not None and coming.done() and len(pending) < self._window:
                    line = coming.result()
                    if line is not None:
                        pending.append((line, asyncio.create_task(self._record(line))))
                    coming = None if line is None else asyncio.create_task(feed.get())
        finally:
            left = [task for _, task in pending] + ([coming] if coming is not None else [])
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _write_done(self, pending: deque[tuple[RawLine, asyncio.Task[dict[str, Any]]]]) -> None:
        while pending and pending[0][1].done():
            line, task = pending.popleft()
            record = task.result()
            self._answers.append(record)
            self._tokens += (record["usage"] or {}).get("completion_tokens", 0)
            self._count(failed=record["error"] is not None)
            self._progress.show(self._counts(), None if not self._size else line.end / self._size)

    async def _record(self, line: RawLine) -> dict[str, Any]:
        """The record of one line, an error's too. Raises what has stopped the engine: that is no line's."""
        head: dict[str, Any] = {"index": line.index, "id": line.index, "input": line.digest, "settings": self._digest}
        try:
            request = read_request(line, self._params, chat=self._settings.chat)
            head["id"] = request.id
            params = self._seeded(request.params, line.index)
            prompt: Prompt | None = request.prompt
            if prompt is None:
                prompt = self._llm.chat_prompt(request.messages or [], tools=request.tools, chat_template_kwargs=request.chat_template_kwargs)
            output = await self._llm.complete(prompt, params, f"line-{line.number}", priority=request.priority)
            return {**head, **_answered(output, params)}
        except LockstepError as error:
            if isinstance(error, (InternalError, PeerError)) and not self._llm.is_running:
                raise
            return {**head, "id": named(line), **_refused(error)}

    def _seeded(self, params: SamplingParams, index: int) -> SamplingParams:
        """A line that samples without a seed gets one from the engine's and its place in the file, so that it does not depend on where a run was
        interrupted; from the operating system if the engine has none."""
        if params.seed is not None or params.temperature == 0:
            return params
        engine_seed = self._llm.config.seed
        if engine_seed is None:
            return dataclasses.replace(params, seed=secrets.randbits(SEED_BITS))
        drawn = hashlib.blake2b(f"{engine_seed} {index}".encode(), digest_size=8).digest()
        return dataclasses.replace(params, seed=int.from_bytes(drawn, "little") >> (64 - SEED_BITS))

    def _count(self, *, failed: bool) -> None:
        self._done += 1
        self._failed += failed

    def _counts(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        kept = f", {self._kept} of them before" if self._kept else ""
        failed = f", {self._failed} with an error" if self._failed else ""
        return f"{self._done} answered{kept}{failed}, {self._tokens / seconds:.1f} tokens/s"

    def _summary(self, *, ended: bool) -> str:
        if not ended:
            return self._counts()
        return f"interrupted: {self._counts()}" + ("; the same command with --resume goes on" if self._settings.target is not None else "")


class _LineFeed:
    """Lines read ahead by a thread, so that a slow pipe holds up nothing. The thread is a daemon: nobody waits for a pipe at the end."""

    AHEAD = 16

    def __init__(self, lines: Iterator[RawLine]) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[RawLine | OSError | None] = asyncio.Queue()
        self._room = threading.Semaphore(self.AHEAD)
        threading.Thread(target=self._read, args=(lines,), name="lockstep-lines", daemon=True).start()

    async def get(self) -> RawLine | None:
        """The next line, None at the end. Raises ConfigError if the file cannot be read."""
        item = await self._queue.get()
        self._room.release()
        if isinstance(item, OSError):
            raise ConfigError(f"the prompts file cannot be read: {item.strerror}")
        return item

    def _read(self, lines: Iterator[RawLine]) -> None:
        last: OSError | None = None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks for lines any more
            try:
                for line in lines:
                    self._room.acquire()
                    self._loop.call_soon_threadsafe(self._queue.put_nowait, line)
            except OSError as error:
                last = error
            self._loop.call_soon_threadsafe(self._queue.put_nowait, last)


@contextlib.contextmanager
def _signals(stopped: asyncio.Future[int]) -> Iterator[None]:
    """SIGINT and SIGTERM set `stopped`; a second one changes nothing, the run is ending already."""
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if not stopped.done():
            stopped.set_result(number)

    caught = (signal.SIGINT, signal.SIGTERM)
    for number in caught:
        loop.add_signal_handler(number, stop, int(number))
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


def _settings_digest(llm: AsyncLLM, chat: bool, params: SamplingParams) -> str:
    """Of all that answers depend on beside their lines."""
    told = {"fingerprint": llm.fingerprint, "chat": chat, "seed": llm.config.seed, "params": dataclasses.asdict(params)}
    told |= {"max_model_len": llm.max_model_len, "tokenizer": llm.config.tokenizer, "tokenizer_revision": llm.config.tokenizer_revision}
    return hashlib.blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _answered(output: RequestOutput, params: SamplingParams) -> dict[str, Any]:
    """usage counts all choices. seed: of the first choice; the next ones have the next ones. choices: where there are several."""
    first, prompt = output.outputs[0], len(output.prompt_token_ids)
    generated = sum(len(choice.token_ids) for choice in output.outputs)
    record = {
        **_choice(first, params.logprobs or 0),
        "seed": params.seed if params.temperature else None,
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
        "error": None,
    }
    if output.prompt_logprobs is not None:
        told = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        record["prompt_logprobs"] = [None, *(_entry(token, entry or {}, params.prompt_logprobs or 0) for token, entry in told)]
    if len(output.outputs) > 1:
        record["choices"] = [{"index": choice.index, **_choice(choice, params.logprobs or 0)} for choice in output.outputs]
    return record


def _choice(choice: CompletionOutput, alternatives: int) -> dict[str, Any]:
    told: dict[str, Any] = {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.logprobs is not None:
        told["logprobs"] = [_entry(token, entry, alternatives) for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    return told


def _entry(token: int, entry: Mapping[int, Logprob], alternatives: int) -> dict[str, Any]:
    best = itertools.islice(entry.items(), alternatives)
    return {"logprob": entry[token].logprob, "rank": entry[token].rank, "top": {str(i): one.logprob for i, one in best}}


def _refused(error: LockstepError) -> dict[str, Any]:
    told = {"code": error.code, "message": str(error), "param": error.param if isinstance(error, InvalidRequestError) else None}
    return {"text": None, "token_ids": None, "finish_reason": "error", "stop_reason": None, "seed": None, "usage": None, "error": told}
