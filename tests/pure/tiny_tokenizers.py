"""Small tokenizers of each spelling, trained on a few lines. Knows the `tokenizers` library; each comes as our Tokenizer and as the library's."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from lockstep.text import Tokenizer, tokenizer_from_folder

LINES = [
    "the cat sat on the mat",
    "stop! the END of the story.",
    "naïve café über 안녕하세요 😀👩‍👩‍👧 今日は",
    "<tool>call</tool> a=1, b=22\n\n  indented",
] * 3
SPECIAL = ["<s>", "</s>"]
KINDS = ("byte-level", "byte-fallback", "byte-fallback-strip", "metaspace", "metaspace-never")


def write_folder(path: Path, backend: tokenizers.Tokenizer, settings: dict[str, object]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def train(kind: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=kind.startswith("byte-fallback"), unk_token=None))
    if kind == "byte-level":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=340, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    else:
        never = kind in ("byte-fallback", "metaspace-never")
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never" if never else "always")
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if kind.startswith("byte-fallback") else []
        trainer = trainers.BpeTrainer(vocab_size=len(bytes_) + 150, special_tokens=[*SPECIAL, *bytes_], limit_alphabet=40, show_progress=False)
        if kind.startswith("metaspace"):
            backend.decoder = decoders.Metaspace(prepend_scheme="never" if never else "always")
        else:
            strip = [decoders.Strip(" ", 1, 0)] if kind.endswith("strip") else []
            backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.train_from_iterator(LINES, trainer)
    if kind.startswith("byte-fallback"):  # the trainer knows byte pieces as special tokens only; a model has them as plain pieces
        described = json.loads(backend.to_str())
        described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in SPECIAL]
        backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False), AddedToken("añ ad", special=False, normalized=False)])
    return backend


@cache
def tiny(kind: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    backend = train(kind)
    with TemporaryDirectory() as folder:
        return tokenizer_from_folder(write_folder(Path(folder), backend, {"bos_token": "<s>", "eos_token": "</s>"})), backend
