"""lm-eval on GSM8K through `lockstep serve`: the same score and the same answers however the engine is deployed.
usage: gsm8k_lm_eval.py [--questions N] [--max-tokens N] [--out CSV]      needs: pip install "lm_eval[api]"

Twice with the embedded model, greedy, no examples: one stage, synchronous, one question at a time; then three stages, asynchronous, all questions at
once in a KV pool so small that requests are preempted. The questions are the first of GSM8K's test set, kept in tests/data. A model this small gets
hardly any right; that all answers are the same is the point, and the script ends with status 1 if they are not.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
import httpx2
from serving import served

DATA = Path(__file__).parents[1] / "tests" / "data" / "gsm8k_first100.jsonl"
ALONE = ("-pp", "1", "--no-async-scheduling", "--max-num-seqs", "1")
SPREAD = ("-pp", "3", "--async-scheduling", "--max-num-seqs", "100", "--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "160")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """score: share of right answers. answers: as lm-eval got them, by question."""

    score: float
    answers: tuple[str, ...]
    preemptions: int
    seconds: float


def task(questions: int, max_tokens: int, folder: Path) -> dict[str, Any]:
    """GSM8K as lm-eval describes tasks, from a file."""
    kept = folder / "questions.jsonl"
    kept.write_text("".join(DATA.read_text(encoding="utf-8").splitlines(keepends=True)[:questions]), encoding="utf-8")
    return {
        "task": "gsm8k_here",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(kept)}, "cache_dir": str(folder)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer.split('####')[-1].strip()}}",
        "generation_kwargs": {"until": ["Question:"], "do_sample": False, "temperature": 0.0, "max_gen_toks": max_tokens},
        "filter_list": [
            {
                "name": "last-number",
                "filter": [{"function": "regex", "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)", "group_select": -1}, {"function": "take_first"}],
            }
        ],
        "metric_list": [
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True, "regexes_to_ignore": [",", "\\$", "\\.$"]}
        ],
    }


def evaluate(flags: Sequence[str], described: dict[str, Any], *, at_once: int) -> Evaluated:
    import lm_eval

    with served(*flags) as (url, _):
        began = time.monotonic()
        arguments = {
            "model": "smollm2",
            "base_url": f"{url}/v1/completions",
            "num_concurrent": at_once,
            "max_retries": 1,
            "tokenized_requests": False,
        }
        arguments |= {"tokenizer_backend": "none", "timeout": 3600}
        results = lm_eval.simple_evaluate(
            model="local-completions", model_args=",".join(f"{key}={value}" for key, value in arguments.items()), tasks=[described], log_samples=True
        )
        seconds = time.monotonic() - began
        page = httpx2.get(f"{url}/metrics", timeout=60).text
    preempted = re.search(r"^lockstep:num_preemptions_total\{?[^\n]*? ([0-9.e+]+)$", page, re.M)
    name = described["task"]
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return Evaluated(
        score=results["results"][name]["exact_match,last-number"],
        answers=tuple(sample["resps"][0][0] for sample in samples),
        preemptions=0 if preempted is None else int(float(preempted[1])),
        seconds=seconds,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        described = task(arguments.questions, arguments.max_tokens, Path(folder))
        alone = evaluate(ALONE, described, at_once=1)
        spread = evaluate(SPREAD, described, at_once=arguments.questions)
    differing = [i for i, (one, other) in enumerate(zip(alone.answers, spread.answers, strict=True)) if one != other]
    rows = [
        {
            "deployment": name,
            "questions": len(run.answers),
            "max_tokens": arguments.max_tokens,
            "exact_match": f"{run.score:.4f}",
            "preemptions": run.preemptions,
            "answers_differing": len(differing),
            "seconds": f"{run.seconds:.0f}",
        }
        for name, run in (("1 stage, synchronous, one at a time", alone), ("3 stages, asynchronous, all at once", spread))
    ]
    for row in rows:
        print(row)
    figures.append(arguments.out, rows)
    right = not differing and alone.score == spread.score and spread.preemptions > 0 and len(alone.answers) == arguments.questions
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
