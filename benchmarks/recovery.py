"""Stages killed or stopped under streaming requests: are all tokens right, and how long until the next one?
usage: recovery.py [--stages N] [--streams N] [--rounds N] [--signal KILL|STOP] [--seed N] [--out CSV]

`lockstep serve` with the embedded model in processes of its own. First an undisturbed run of all streams (even ones greedy, odd ones sampled).
Then in each round the same streams, and one stage (each in turn) gets the signal twice in a row: at a random token, and again up to two seconds
later, which may be in the middle of the recovery. Seconds are from a signal to the next token of a stream, as its client reads it; what was on its
way already (the first tenth of a second) does not count. Figures are of this machine at this moment: run it when nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import figures
import httpx2
import psutil
from serving import PATIENCE_S, served

ON_ITS_WAY_S = 0.1
SECOND_WITHIN_S = 2.0


@dataclass(slots=True)
class Run:
    """What clients read: tokens of each stream, and when they came."""

    tokens: list[list[str]]
    times: list[list[float]]
    errors: list[str] = field(default_factory=list)
    signals: list[float] = field(default_factory=list)
    count: int = 0


def stage_process(server: int, index: int, former: psutil.Process | None) -> psutil.Process:
    """The stage's process; waits for the one that takes the place of `former`."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for child in psutil.Process(server).children():
            try:
                command = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            if "lockstep.launch" in command and command[-2] == str(index) and child != former:
                return child
        time.sleep(0.005)
    raise SystemExit(f"stage {index} is not started again")


async def read_stream(client: httpx2.AsyncClient, run: Run, index: int, length: int) -> None:
    body = {
        "model": "smollm2",
        "prompt": f"Story number {index}: once upon a time",
        "max_tokens": length,
        "temperature": 0.9 if index % 2 else 0.0,
        "seed": index,
        "stream": True,
        "logprobs": 0,
        "ignore_eos": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                run.errors.append(f"stream {index}: {event['error']['message']}")
                return
            now = time.monotonic()
            for token in (event["choices"][0]["logprobs"] or {}).get("tokens") or []:
                run.tokens[index].append(token)
                run.times[index].append(now)
                run.count += 1


async def strike(run: Run, server: int, stage: int, number: signal.Signals, moments: tuple[int, float]) -> None:
    """Two signals to a stage: once so many tokens have come, and so many seconds later."""
    while run.count < moments[0]:
        await asyncio.sleep(0.002)
    process = None
    for delay_s in (0.0, moments[1]):
        await asyncio.sleep(delay_s)
        process = await asyncio.to_thread(stage_process, server, stage, process)
        process.send_signal(number)
        run.signals.append(time.monotonic())


async def run_streams(url: str, streams: int, length: int, fault: tuple[int, int, signal.Signals, tuple[int, float]] | None = None) -> Run:
    run = Run(tokens=[[] for _ in range(streams)], times=[[] for _ in range(streams)])
    limits = httpx2.Limits(max_connections=streams)
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
        work = [read_stream(client, run, index, length) for index in range(streams)]
        if fault is not None:
            work.append(strike(run, *fault))
        await asyncio.gather(*work)
    return run


def next_token_s(run: Run) -> Iterator[list[float]]:
    """For each signal, the seconds until the next token of each stream that had not ended."""
    for sent in run.signals:
        later = [next((at - sent for at in times if at > sent + ON_ITS_WAY_S), None) for times in run.times]
        if found := [seconds for seconds in later if seconds is not None]:
            yield found


def summary(values: Sequence[float]) -> dict[str, float]:
    """NaN without values, so that every row has the same columns."""
    return {"median": round(statistics.median(values), 3), "max": round(max(values), 3)} if values else {"median": math.nan, "max": math.nan}


def measure(url: str, server: int, arguments: argparse.Namespace) -> dict[str, object]:
    number, rng = signal.Signals[f"SIG{arguments.signal}"], random.Random(arguments.seed)
    expected = asyncio.run(run_streams(url, arguments.streams, arguments.length))
    assert not expected.errors, expected.errors
    mismatches, signals, errors = 0, 0, []
    any_s: list[float] = []
    each_s: list[float] = []
    for index in range(arguments.rounds):
        moments = (rng.randrange(1, arguments.streams * arguments.length // 2), rng.uniform(0.0, SECOND_WITHIN_S))
        run = asyncio.run(run_streams(url, arguments.streams, arguments.length, (server, index % arguments.stages, number, moments)))
        wrong = sum(ours != theirs for ours, theirs in zip(run.tokens, expected.tokens, strict=True))
        for seconds in next_token_s(run):
            any_s.append(min(seconds))
            each_s += seconds
        mismatches, signals, errors = mismatches + wrong, signals + len(run.signals), errors + run.errors
        print(
            f"round {index}: stage {index % arguments.stages}, {len(run.signals)} signals, {wrong} wrong, {len(run.errors)} errors", file=sys.stderr
        )
    health = httpx2.get(url + "/health", timeout=PATIENCE_S).json()
    return {
        "signal": number.name,
        "stages": arguments.stages,
        "streams": arguments.streams,
        "tokens_each": arguments.length,
        "rounds": arguments.rounds,
        "seed": arguments.seed,
        "signals": signals,
        "signals_under_streams": len(any_s),
        "restarts": health["restarts"],
        "mismatches": mismatches,
        "errors": errors,
        "next_token_of_any_s": summary(any_s),
        "next_token_of_each_s": summary(each_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="tokens a stream (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append to this CSV")
    arguments = parser.parse_args()
    flags = ("-pp", str(arguments.stages), "--max-num-seqs", str(arguments.streams), "--max-restarts", "1000000", "--return-tokens-as-token-ids")
    with served(*flags) as (url, server):
        found = measure(url, server, arguments)
    print(json.dumps(found, indent=2))
    figures.append(arguments.out, [_flat(found)])
    return 1 if found["mismatches"] or found["errors"] else 0


def _flat(found: dict[str, object]) -> dict[str, object]:
    """One cell a figure; of errors, how many."""
    row: dict[str, object] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            row |= {f"{name}_{part}": figure for part, figure in value.items()}
        else:
            row[name] = len(value) if isinstance(value, list) else value
    return row


if __name__ == "__main__":
    sys.exit(main())
