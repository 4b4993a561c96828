"""Runs the matrix: the plain way first, the proof that the requests would notice, then every cell against the plain answers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from lockstep.config import EngineConfig
from lockstep.core.outputs import FinishReason
from lockstep.core.request import EngineRequest
from lockstep.core.stats import SchedulerStats
from lockstep.errors import ConfigError, InternalError, PeerError
from lockstep.launch import RunningEngine, launch_engine, load_tokenizer, resolve_model
from lockstep.launch.stages import PackedWeights, make_backend
from lockstep.runtime.requests import RequestFactory, RequestLimits, SeedSource
from lockstep.text import TextStream
from lockstep.verify.cells import Cell
from lockstep.verify.counters import Counters, missed_deployment, missed_scheduling, read_counters
from lockstep.verify.dry_run import DryEngine, choose_pool
from lockstep.verify.script import AnyEngine, Script
from lockstep.verify.texts import TEXT
from lockstep.verify.workload import (
    NEIGHBOUR_COUNT,
    REQUEST_COUNT,
    WINDOW,
    Answer,
    Ask,
    Workload,
    changed_prompts,
    first_asks,
    shortened,
    truncated,
    with_ends,
)

WINDOW_LEAST = 128
STAGES_MAX = 4
BLOCK_SIZE = 4
"""Of every cell: small, so that requests often need another block and pools can be tight."""

WANTED_OF_REQUESTS = (
    "ended_by_length",
    "ended_by_stop_token",
    "ended_by_end_token",
    "ended_by_stop_string",
    "held_open_by_min_tokens",
    "prompts_over_64",
    "changed_prompts",
)
"""Each must be above 0, or the requests prove too little."""

PLAIN_SETTINGS: Mapping[str, Any] = {
    "pipeline_parallel_size": 1,
    "layer_split": None,
    "distributed_executor_backend": "local",
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "microbatches": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The first difference of one answer. position: index in the output. what: tokens, logprobs, prompt logprobs or finish."""

    cell: str
    request: str
    position: int
    what: str
    expected: str
    got: str


@dataclass(slots=True)
class Report:
    fingerprint: str = ""
    requests: int = 0
    tokens: int = 0
    cells: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    counters: dict[str, Counters] = field(default_factory=dict)
    missed: dict[str, list[str]] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return bool(self.mismatches or self.missed)


Progress = Callable[[str, int, list[str]], None]
"""(name, mismatches, missed counters) of a finished cell or check."""


class Matrix:
    """config: the model and what cells do not vary (dtype, backend, block size)."""

    def __init__(self, config: EngineConfig, *, quick: bool, progress: Progress = lambda name, mismatches, missed: None) -> None:
        self._config = dataclasses.replace(config, block_size=BLOCK_SIZE)
        self._quick = quick
        self._progress = progress
        self.report = Report()
        self._model = resolve_model(dataclasses.replace(config, **PLAIN_SETTINGS))
        self._window = min(WINDOW, self._model.window)
        if self._window < WINDOW_LEAST:
            raise ConfigError(
                f"verify needs a window of at least {WINDOW_LEAST} tokens, so that prompts outgrow a step; the model has {self._window}"
            )
        if self._model.spec.layer_count < STAGES_MAX:
            raise ConfigError(f"verify runs up to {STAGES_MAX} stages, the model has {self._model.spec.layer_count} layers")
        self._tokenizer = load_tokenizer(config, self._model)
        self._weights = PackedWeights(make_backend(config), self._model)
        self._answers: dict[str, Answer] = {}
        self._workload = Workload(asks=(), neighbours=(), eos_ids=())

    def run(self, cells: Sequence[Cell]) -> Report:
        self.prepare()
        for cell in cells:
            self.run_cell(cell)
        return self.report

    def prepare(self) -> None:
        """The plain answers, and the proof that the requests would notice."""
        self._plain()
        self._prove_sensitivity()

    # The plain way

    def _plain(self) -> None:
        """One stage, one request at a time, synchronous, no cache, no chunks. A first pass finds where answers can be made to end."""
        asks = first_asks(self._tokenizer.encode(TEXT), self._model.spec.vocab_size, self._window)
        with_lengths = self._run_plain("plain, to length", asks, ())
        self._workload = with_ends(asks, with_lengths, self._model.eos_ids, self._window, self._tokenizer.decode)
        self._answers = self._run_plain("plain", self._workload.asks, self._workload.eos_ids)
        for ask in self._workload.asks:
            expected = truncated(ask, with_lengths[ask.name], self._workload.eos_ids, self._tokenizer.decode)
            got = self._answers[ask.name].tokens
            if expected not in (None, got):
                self._mismatch("plain", ask.name, 0, "tokens", expected, got)
        self.report.requests = len(self._workload.asks)

    def _run_plain(self, name: str, asks: Sequence[Ask], eos_ids: tuple[int, ...]) -> dict[str, Answer]:
        config = self._cell_config({**PLAIN_SETTINGS, "max_num_batched_tokens": self._window})
        running = launch_engine(config, model=self._model, weights=self._weights)
        try:
            script = Script(running.engine, self._requests(running, asks, eos_ids), at_once=1, texts=self._texts(asks))
            answers = _by_ask(script.run())
            stats, seen = running.engine.driver.scheduler.stats, running.cluster.describe()
            counters = read_counters(stats, open_max=script.open_max, description=seen, ended_by_text=script.ended_by_text)
        finally:
            running.close()
        wanted = {
            "requests_at_once_max": 1,
            "prefix_hits": 0,
            "preemptions": 0,
            "chunks": 0,
            "steps_with_unknown_result": 0,
            "transport": "in-process",
        }
        missed = [f"wanted {key} == {value}, found {counters[key]}" for key, value in wanted.items() if counters[key] != value]
        self._note(name, counters, missed)
        self.report.fingerprint = running.fingerprint
        return answers

    # The requests would notice

    def _prove_sensitivity(self) -> None:
        """Each finding that fails is a missed counter: a matrix of requests that notice nothing proves nothing."""
        asks, answers = self._workload.asks, self._answers
        finishes = [answers[ask.name].finish for ask in asks]
        stops = sum(answers[a.name].tokens[-1] in a.params.stop_token_ids for a in asks)
        ends = sum(not a.params.ignore_eos and answers[a.name].tokens[-1] in self._workload.eos_ids for a in asks)
        sampled = [(entry.top_ids[0], token) for a in asks if a.params.temperature > 0 for entry, token in _entries(answers[a.name])]
        held = [a for a in asks if a.params.min_tokens]
        early = sum(token in a.params.stop_token_ids for a in held for token in answers[a.name].tokens[: a.params.min_tokens])
        texts = sum(bool(a.params.stop) and answers[a.name].finish is FinishReason.STOP for a in asks)
        differ = sum(best != token for best, token in sampled)
        changed = changed_prompts(asks, self._model.spec.vocab_size, quick=self._quick)
        same = self._unnoticed(changed)
        counters: Counters = {
            "ended_by_length": finishes.count(FinishReason.LENGTH),
            "ended_by_stop_token": stops,
            "ended_by_end_token": ends,
            "ended_by_stop_string": texts,
            "held_open_by_min_tokens": len(held),
            "stops_before_min_tokens": early,
            "sampled_tokens": len(sampled),
            "sampled_tokens_not_greedy": differ,
            "prompts_over_64": sum(len(a.prompt) > 64 for a in asks),
            "changed_prompts": len(changed),
            "changed_prompts_unnoticed": len(same),
        }
        missed = [f"wanted {key} > 0, found 0" for key in WANTED_OF_REQUESTS if not counters[key]]
        if early:
            missed.append(f"wanted no stop token before min_tokens, found {early}")
        if 3 * differ < len(sampled):
            missed.append(f"wanted a third of {len(sampled)} sampled tokens to differ from greedy, found {differ}")
        if same:
            missed.append(f"wanted every changed prompt token to change the answer, it did not for {same[:5]}")
        self._note("sensitivity", counters, missed)

    def _unnoticed(self, changed: Sequence[tuple[str, Ask]]) -> list[str]:
        """Changed prompts whose answer begins with the very bits of the original's."""
        config = self._cell_config({**PLAIN_SETTINGS, "max_num_batched_tokens": 4 * self._window})
        running = launch_engine(config, model=self._model, weights=self._weights)
        try:
            answers = _by_ask(Script(running.engine, self._requests(running, [a for _, a in changed], self._workload.eos_ids), at_once=32).run())
        finally:
            running.close()
        return [
            ask.name
            for original, ask in changed
            if all(a == b for a, b in zip(_entries(answers[ask.name]), _entries(self._answers[original]), strict=False))
        ]

    # Cells

    def run_cell(self, cell: Cell) -> None:
        """One cell against the plain answers. An engine that stops itself in it is a finding, not the end of the matrix."""
        self.report.cells += 1
        try:
            self._run_cell(cell)
        except (PeerError, InternalError) as error:
            self._note(cell.name, {}, [f"the engine stopped: {error}"])

    def _run_cell(self, cell: Cell) -> None:
        config = self._config_of(cell)
        workload = self._workload
        asks = list(workload.asks)
        if cell["order"] == "shuffled":
            random.Random(7).shuffle(asks)
        names = [a.name for a in asks]
        if cell["preemption"] == "forced":
            config = self._with_forcing_pool(cell, config, asks)
        running = launch_engine(config, model=resolve_model(config, self._model.checkpoint), weights=self._weights)
        try:
            if cell["cache"] == "warm":
                self._warm(running.engine, running.factory)
            before = dataclasses.replace(running.engine.driver.scheduler.stats)
            script = self._script(running.engine, running.factory, cell, asks)
            answers = _by_ask(script.run())
            running.close()
            stats = _since(running.engine.driver.scheduler.stats, before)
            seen = running.cluster.describe()
            counters = read_counters(stats, open_max=script.open_max, description=seen, ended_by_text=script.ended_by_text)
            counters["order"] = names
            missed = self._missed(cell, config, counters) + missed_deployment(cell, counters, layers=running.model.splits)
            missed += [f"wanted an idle engine, found: {line}" for line in running.engine.driver.scheduler.audit()]
        finally:
            running.close()
        if (names != [a.name for a in workload.asks]) != (cell["order"] == "shuffled"):
            missed.append(f"wanted order {cell['order']}, found {names}")
        if running.fingerprint != self.report.fingerprint:
            missed.append(f"wanted fingerprint {self.report.fingerprint}, found {running.fingerprint}")
        mismatches = self._compare(cell.name, answers)
        self._note(cell.name, counters, missed, mismatches)

    def _config_of(self, cell: Cell) -> EngineConfig:
        layer_count = self._model.spec.layer_count
        uneven = cell["stages"] == "uneven"
        stages = 2 if uneven else int(cell["stages"])
        return self._cell_config(
            {
                "pipeline_parallel_size": stages,
                "layer_split": _uneven_split(layer_count) if uneven else None,
                "distributed_executor_backend": "mp" if cell.processes else "local",
                "async_scheduling": cell["async"] == "on",
                "max_num_batched_tokens": self._prompt_max if cell["budget"] == "whole" else int(cell["budget"]),
                "enable_prefix_caching": cell["cache"] != "off",
                "threads": int(cell["threads"]),
                "microbatches": None,
            }
        )

    def _cell_config(self, settings: Mapping[str, Any]) -> EngineConfig:
        slots = REQUEST_COUNT + NEIGHBOUR_COUNT
        blocks = 2 * slots * -(-self._window // self._config.block_size)
        shape: dict[str, Any] = {"max_model_len": self._window, "max_num_seqs": slots, "num_gpu_blocks_override": blocks}
        # A failure is a finding; an engine that recovers from it would hide it.
        return dataclasses.replace(self._config, max_restarts=0, **shape, **settings)

    def _script(self, engine: AnyEngine, factory: RequestFactory, cell: Cell, asks: Sequence[Ask]) -> Script:
        workload = self._workload
        build = _builder(factory, workload.eos_ids)
        neighbours = [build(a) for a in workload.neighbours] if cell["aborts"] == "neighbours" else []
        late = frozenset(f"{a.name}#0" for a in asks if a.late)
        at_once = len(asks) if cell["at_once"] == "all" else int(cell["at_once"])
        return Script(engine, [build(a) for a in asks], at_once=at_once, late=late, neighbours=neighbours, texts=self._texts(asks))

    def _texts(self, asks: Sequence[Ask]) -> dict[str, TextStream]:
        return {f"{ask.name}#0": TextStream(self._tokenizer, stop=ask.params.stop) for ask in asks if ask.params.stop}

    def _with_forcing_pool(self, cell: Cell, config: EngineConfig, asks: Sequence[Ask]) -> EngineConfig:
        limits = RequestLimits(window=self._window, vocab_size=self._model.spec.vocab_size, eos_ids=())
        factory = RequestFactory(limits, SeedSource(0))
        requests = [_builder(factory, self._workload.eos_ids)(a) for a in asks]
        tokens_of = {r.seed: (len(a.prompt), self._answers[a.name].tokens) for r, a in zip(requests, asks, strict=True)}

        def misses(engine: DryEngine) -> int:
            if cell["cache"] == "warm":
                self._warm(engine, factory)
            before = dataclasses.replace(engine.scheduler.stats)
            script = self._script(engine, factory, cell, asks)
            script.run()
            stats = _since(engine.scheduler.stats, before)
            counters = read_counters(stats, open_max=0, description={}, ended_by_text=script.ended_by_text)
            return len(self._missed(cell, config, counters))

        # A pool must hold one request of the window, so that the tightest pools need the smallest window that all requests fit in.
        window = max(len(a.prompt) + (a.params.max_tokens or 0) for a in (*self._workload.asks, *self._workload.neighbours))
        return choose_pool(dataclasses.replace(config, max_model_len=window), window, self._model.spec.kv_windows, requests, tokens_of, misses)

    def _missed(self, cell: Cell, config: EngineConfig, counters: Counters) -> list[str]:
        budget = config.max_num_batched_tokens
        return missed_scheduling(cell, counters, request_count=len(self._workload.asks), budget=budget, prompt_max=self._prompt_max)

    @property
    def _prompt_max(self) -> int:
        return max(len(a.prompt) for a in self._workload.asks)

    def _warm(self, engine: AnyEngine, factory: RequestFactory) -> None:
        """Fill the prefix cache: every prompt once, one token each, one after the other."""
        build = _builder(factory, ())
        warm = [dataclasses.replace(a, name=f"{a.name}/warm", params=shortened(a.params, 1)) for a in self._workload.asks]
        Script(engine, [build(a) for a in warm], at_once=1).run()

    def _requests(self, running: RunningEngine, asks: Sequence[Ask], eos_ids: tuple[int, ...]) -> list[EngineRequest]:
        return [_builder(running.factory, eos_ids)(ask) for ask in asks]

    # Findings

    def _compare(self, cell: str, answers: Mapping[str, Answer]) -> int:
        before = len(self.report.mismatches)
        for name, expected in self._answers.items():
            got = answers.get(name)
            self.report.tokens += 0 if got is None else len(got.tokens)
            if got is None:
                self._mismatch(cell, name, 0, "answer", "one", "none")
                continue
            told = [(a, b) for a, b in zip_longest(expected.prompt_logprobs, got.prompt_logprobs) if a != b]
            if told:
                self._mismatch(cell, name, 0, "prompt logprobs", *told[0])
            pairs = list(zip(_entries(expected), _entries(got), strict=False))
            position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if position is not None:
                (want_entry, want), (got_entry, token) = pairs[position]
                tokens = want != token
                self._mismatch(
                    cell, name, position, "tokens" if tokens else "logprobs", want if tokens else want_entry, token if tokens else got_entry
                )
            elif len(expected.tokens) != len(got.tokens) or expected.finish != got.finish:
                self._mismatch(
                    cell, name, len(pairs), "finish", f"{expected.finish} after {len(expected.tokens)}", f"{got.finish} after {len(got.tokens)}"
                )
        return len(self.report.mismatches) - before

    def _mismatch(self, cell: str, request: str, position: int, what: str, expected: object, got: object) -> None:
        self.report.mismatches.append(Mismatch(cell=cell, request=request, position=position, what=what, expected=str(expected), got=str(got)))

    def _note(self, name: str, counters: Counters, missed: list[str], mismatches: int = 0) -> None:
        self.report.counters[name] = counters
        if missed:
            self.report.missed[name] = missed
        self._progress(name, mismatches, missed)


def _uneven_split(layer_count: int) -> str:
    first = max(1, layer_count // 4)
    return f"{first},{layer_count - first}"


def _builder(factory: RequestFactory, eos_ids: tuple[int, ...]) -> Callable[[Ask], EngineRequest]:
    """The factory with this workload's end tokens."""
    own = RequestFactory(dataclasses.replace(factory.limits, eos_ids=eos_ids), SeedSource(0))
    return lambda ask: own.build(ask.name, ask.prompt, ask.params)


def _by_ask(answers: Mapping[str, Answer]) -> dict[str, Answer]:
    return {name.rsplit("#", 1)[0]: answer for name, answer in answers.items()}


def _entries(answer: Answer) -> list[tuple[Any, int]]:
    return list(zip(answer.logprobs, answer.tokens, strict=True))


def _since(stats: SchedulerStats, before: SchedulerStats) -> SchedulerStats:
    """Counts since `before`; maxima as they are."""
    changes = {}
    for item in dataclasses.fields(SchedulerStats):
        now, then = getattr(stats, item.name), getattr(before, item.name)
        changes[item.name] = now if item.name.endswith("_max") else now - then
    return SchedulerStats(**changes)
