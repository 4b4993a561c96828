"""Agreement with transformers on GSM8K questions, both in float32 on the embedded model: answers, logits, and how close each call was.

    python benchmarks/gsm8k_agreement.py [--questions 64] [--threads 2] [--csv FILE]

Prints a line a question and a summary; exit status 1 if an answer differs where transformers' choices are further apart than 1e-4, or a logit by
more than 5e-4. The test of the same claim is tests/weights/test_transformers_gsm8k.py, whose comparison this uses. Needs the test extra.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from agreement import Agreement, Transformers, compare, greedy_answers, our_program, questions  # noqa: E402

GAP_MAX = 1e-4
LOGIT_ERROR_MAX = 5e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=64, help="the first so many of the test set (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--csv", type=Path, help="write the lines here too, with machine and commit")
    arguments = parser.parse_args()
    theirs = Transformers(arguments.threads)
    answers = greedy_answers(questions(arguments.questions), threads=arguments.threads)
    found: list[Agreement] = []
    print("question  prompt  answer  first difference       gap  logit error  closest call")
    for one in compare(our_program(threads=arguments.threads), theirs, answers):
        found.append(one)
        first = "none" if one.first_difference is None else str(one.first_difference)
        counts = f"{one.question:8}  {one.prompt_tokens:6}  {one.answer_tokens:6}"
        print(f"{counts}  {first:>16}  {one.gap:8.1e}  {one.logit_error:11.2e}  {one.closest_call:12.2e}", flush=True)
    print(summary(found))
    if arguments.csv is not None:
        write_csv(arguments.csv, found)
    return 0 if all(agrees(one) for one in found) else 1


def agrees(one: Agreement) -> bool:
    return one.logit_error <= LOGIT_ERROR_MAX and (one.first_difference is None or one.gap < GAP_MAX)


def summary(found: list[Agreement]) -> str:
    identical = sum(one.first_difference is None for one in found)
    positions = sum(one.prompt_tokens + one.answer_tokens for one in found)
    return (
        f"{identical} of {len(found)} answers identical ({sum(one.answer_tokens for one in found)} tokens); "
        f"largest logit difference {max(one.logit_error for one in found):.2e} over all {positions} positions; "
        f"largest gap at a difference {max(one.gap for one in found):.1e}; closest call {min(one.closest_call for one in found):.1e}"
    )


def write_csv(path: Path, found: list[Agreement]) -> None:
    """One row a question; machine and commit are the same in all rows."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = [field.name for field in dataclasses.fields(Agreement)]
        writer.writerow(["machine", "commit", *names])
        writer.writerows([f"{platform.machine()} {platform.system()}", commit, *(getattr(one, name) for name in names)] for one in found)


if __name__ == "__main__":
    sys.exit(main())
