"""Small tokenizers of every kind, trained here, as a Hugging Face folder and as a GGUF file. Knows the libraries that make them and how files of
each are laid out; does not use our readers."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
import tokenizers
from every_script import texts
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

SPECIAL = ("<s>", "</s>", "<|end|>")
USER_TOKENS = ("<think>", "añad ido")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|end|>{{ m.role }}\n{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|end|>bot\n{% endif %}"
)
DATA = Path(__file__).parents[1] / "data" / "gsm8k_first100.jsonl"
# As the models' own tokenizer.json spell them, where transformers has no table.
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)


@cache
def corpus() -> tuple[str, ...]:
    problems = [json.loads(line) for line in DATA.read_text().splitlines()]
    return (*(str(problem["question"]) for problem in problems), *texts(600, seed=7))


def independent_cut(name: str) -> pre_tokenizers.PreTokenizer:
    """A cut as transformers or the tokenizers library has it."""
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in GGUF_PRE_TOKENIZER_SPLITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated"), spelling])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    if name == "gpt-2":
        return words
    if name == "smollm":
        return pre_tokenizers.Sequence([digits, words])
    splits = {"deepseek-v3": DEEPSEEK_V3, "deepseek-coder": DEEPSEEK_CODER}[name]
    cuts = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    return pre_tokenizers.Sequence([*cuts, *([digits] if name == "deepseek-coder" else []), spelling])


@cache
def byte_level(cut: str) -> tokenizers.Tokenizer:
    """BOS before a text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = independent_cut(cut)
    backend.decoder = decoders.ByteLevel()
    if cut in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in USER_TOKENS])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def save_folder(path: Path, backend: tokenizers.Tokenizer) -> Path:
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    made.save_pretrained(path)
    return path


def byte_level_gguf(path: Path, cut: str) -> Path:
    backend = byte_level(cut)
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    kinds = [3 if token in SPECIAL else 4 if token in USER_TOKENS else 1 for token in tokens]
    merges = json.loads(backend.to_str())["model"]["merges"]
    extra = {"tokenizer.ggml.pre": cut, "tokenizer.ggml.merges": [" ".join(merge) for merge in merges]}
    return write_gguf(path, "gpt2", tokens, kinds, extra, bos=0, eos=1)


def train_sentencepiece(kind: str, **settings: Any) -> bytes:
    """kind: "bpe" or "unigram". A SentencePiece file; every setting that is not given is that of Llama's."""
    written = io.BytesIO()
    usual = {
        "vocab_size": 1600, "byte_fallback": True, "character_coverage": 0.98, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "control_symbols": ["<|end|>"], "allow_whitespace_only_pieces": True, "minloglevel": 2, "num_threads": 1, "hard_vocab_limit": False,
    }  # fmt: skip
    lines = [line for line in (*corpus()[:64] * 4, *corpus()[64:200]) if "\0" not in line and line.strip()]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=written, model_type=kind, **(usual | settings))
    return written.getvalue()


def processor_of(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def sentencepiece_gguf(path: Path, model: bytes, *, kind: str = "llama", architecture: str = "llama", **extra: object) -> Path:
    """Of "gemma2" as converters write it: pieces of several spaces with spaces, as the maker's own, and scores that say nothing of merges."""
    processor = processor_of(model)
    tokens, kinds, scores = [], [], []
    for index in range(processor.get_piece_size()):
        piece = processor.id_to_piece(index)
        control, unknown, byte, unused = (getattr(processor, f"is_{name}")(index) for name in ("control", "unknown", "byte", "unused"))
        kinds.append(2 if unknown else 3 if control else 6 if byte else 5 if unused else 4 if piece in USER_TOKENS else 1)
        tokens.append(piece)
        scores.append(0.0 if architecture == "gemma2" else processor.get_score(index))
        if architecture == "gemma2" and len(piece) > 1 and not piece.strip("▁"):
            tokens[-1], kinds[-1] = " " * len(piece), 4
    fields = {"tokenizer.ggml.scores": scores, **{f"tokenizer.ggml.{key}": value for key, value in extra.items()}}
    ids = {"bos": processor.bos_id(), "eos": processor.eos_id(), "unknown": processor.unk_id()}
    return write_gguf(path, kind, tokens, kinds, fields, architecture=architecture, **ids)


def write_gguf(
    path: Path, kind: str, tokens: Sequence[str], kinds: Sequence[int], extra: Mapping[str, Any], *, architecture: str = "llama", **ids: int
) -> Path:
    """A GGUF file of a vocabulary alone; BOS is put before a text."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, index in ids.items():
        if index >= 0:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_chat_template(TEMPLATE)
    for key, value in extra.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
