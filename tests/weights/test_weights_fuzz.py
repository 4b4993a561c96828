"""5,000 damaged headers, each from its number: every one is refused with an error of ours that names the file, or read as a right one of other
content. Nothing else: no other exception, no crash, no hang, no memory beyond what a small model takes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from header_damage import DAMAGES, MUST_FAIL
from tiny_model import HEAD_DIM, folder_tensors, gguf_tensors, write_folder, write_gguf

COUNTS = {"gguf": 3000, "safetensors": 2000}
Type = gguf.GGMLQuantizationType


def intact(kind: str, folder: Path) -> tuple[Path, Path]:
    """A small model, and what is opened to read it: for GGUF with tensors in every group of formats."""
    if kind == "safetensors":
        opened = write_folder(folder / "model", folder_tensors(1))
        return opened, opened / "model.safetensors"
    tensors, generator = gguf_tensors(1, hidden=256), np.random.default_rng(1)
    formats = {"blk.0.attn_q.weight": Type.Q4_K, "blk.0.ffn_up.weight": Type.Q6_K, "blk.1.attn_v.weight": Type.Q2_K, "token_embd.weight": Type.IQ4_NL}
    raw = {}
    for name, number_format in formats.items():
        values, nbytes = gguf.GGML_QUANT_SIZES[number_format]
        raw[name] = (number_format, generator.integers(0, 256, (len(tensors[name]), 256 // values * nbytes), np.uint8))
    tensors["rope_freqs.weight"] = np.ones(HEAD_DIM // 2, np.float32)
    settings = {"general.alignment": 32, "split.no": 0, "split.count": 1, "llama.attention.key_length": HEAD_DIM, "llama.expert_count": 0}
    path = write_gguf(folder / "m.gguf", tensors, matrix_type=Type.Q5_0, raw=raw, extra=settings)
    return path, path


@pytest.mark.parametrize("kind", list(COUNTS))
def test_damaged_headers_are_refused_or_read_and_nothing_else_happens(tmp_path: Path, kind: str) -> None:
    opened, file = intact(kind, tmp_path)
    command = [sys.executable, str(Path(__file__).with_name("read_damaged.py")), kind, str(opened), str(file), "0", str(COUNTS[kind])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"ended at damage {len(outcomes)}: {done.stderr[-2000:]}"
    assert len(outcomes) == COUNTS[kind]
    assert sum(COUNTS.values()) == 5000
    seen = Counter((line["damage"], line["outcome"]) for line in outcomes)
    for number, line in enumerate(outcomes):
        assert line["outcome"] in ("read", "CheckpointError", "UnsupportedError"), (number, line)
        if line["outcome"] == "read":
            assert line["damage"] not in MUST_FAIL, (number, line)
        else:
            assert str(file) in line["message"] or str(opened) in line["message"], (number, line)
            assert len(line["message"]) < 2000, (number, line)
    assert {damage for damage, _ in seen} == set(DAMAGES[kind])
    for damage in DAMAGES[kind]:
        assert seen[damage, "CheckpointError"] > 0, seen
    assert {damage for damage, outcome in seen if outcome == "read"} >= {"flipped bit", "extents" if kind == "safetensors" else "settings"}
    assert kind == "safetensors" or seen["types", "UnsupportedError"] > 0
