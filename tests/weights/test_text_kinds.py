"""Tokenizers of every kind, trained here, against transformers and SentencePiece on 2,000 texts of every script.

Where transformers reads a GGUF file otherwise than the file says (see lockstep.text.from_gguf), its tokenizer is given what the file says, and
another test shows how far it agrees without that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from every_script import texts
from tokenizers import AddedToken, normalizers
from trained_tokenizers import (
    byte_level,
    byte_level_gguf,
    corpus,
    independent_cut,
    processor_of,
    save_folder,
    sentencepiece_gguf,
    train_sentencepiece,
)
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from lockstep.text import TextStream, Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from lockstep.text.cuts import cut_named
from lockstep.weights.gguf_file import open_gguf

TEXTS = texts(2000)
# With special and user-defined tokens in them, at every place that they may have.
SPECIAL_TEXTS = [
    f"{before}{token}{after}"
    for token in ("<s>", "</s>", "<|end|>", "<think>", "añad ido", "<|end|></s>")
    for before in ("", "a", "a ", "\n")
    for after in ("", "b", " b", "  b", "\n\nb", "é", "<think> c")
]
ALL_TEXTS = [*TEXTS, *SPECIAL_TEXTS]
KNOWN_CUTS = ("llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "dbrx", "smaug-bpe", "gpt-2")
OTHER_CUTS = ("smollm", "deepseek-v3", "deepseek-coder")
PREFIXED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
Pair = tuple[Tokenizer, Any]


def from_gguf(path: Path) -> Pair:
    """Ours, and what transformers makes of the same file."""
    return tokenizer_from_gguf(open_gguf(path).metadata), PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


def byte_level_pair(folder: Path, cut: str) -> Pair:
    """transformers' is of the folder that the tokenizer was saved in."""
    ours = tokenizer_from_gguf(open_gguf(byte_level_gguf(folder / "v.gguf", cut)).metadata)
    return ours, PreTrainedTokenizerFast.from_pretrained(save_folder(folder / "hf", byte_level(cut)))


@cache
def llama_model(prefixes_space: bool) -> bytes:
    return train_sentencepiece("bpe", add_dummy_prefix=prefixes_space, user_defined_symbols=[])


def llama_pair(folder: Path) -> Pair:
    """A space before a text and after special tokens, as the file asks for."""
    ours, theirs = from_gguf(sentencepiece_gguf(folder / "v.gguf", llama_model(True)))
    theirs.backend_tokenizer.normalizer, theirs.backend_tokenizer.pre_tokenizer = PREFIXED, None
    return ours, theirs


def unprefixed_pair(folder: Path) -> Pair:
    """transformers does not read the key that says so, but its class has the setting."""
    path = sentencepiece_gguf(folder / "v.gguf", llama_model(False), add_space_prefix=False)
    ours, read = from_gguf(path)
    model = read.backend_tokenizer.model
    theirs = LlamaTokenizer.from_pretrained(path.parent, gguf_file=path.name, add_prefix_space=False)
    theirs.backend_tokenizer.model = model
    plain = LlamaTokenizer(add_prefix_space=False).backend_tokenizer
    theirs.backend_tokenizer.pre_tokenizer, theirs.backend_tokenizer.decoder = plain.pre_tokenizer, plain.decoder
    return ours, theirs


def gemma_pair(folder: Path) -> Pair:
    return from_gguf(gemma_gguf(folder))


def gemma_gguf(folder: Path) -> Path:
    model = train_sentencepiece(
        "bpe", add_dummy_prefix=False, user_defined_symbols=["\n", "\n\n", "<think>"], bos_piece="<bos>", eos_piece="<eos>", pad_id=3,
        control_symbols=["<|end|>", "<mask>"],
    )  # fmt: skip
    return sentencepiece_gguf(folder / "v.gguf", model, architecture="gemma2", add_space_prefix=False)


def phi3_pair(folder: Path) -> Pair:
    """With the marks of Phi-3's own tokenizer.json on the tokens of a chat, which transformers does not give those of a GGUF file."""
    ours, theirs = from_gguf(sentencepiece_gguf(folder / "v.gguf", llama_model(True), architecture="phi3"))
    theirs.add_tokens([AddedToken(token, rstrip=True, normalized=False, special=True) for token in ("</s>", "<|end|>")], special_tokens=True)
    return ours, theirs


def folder_pair(kind: str, **settings: Any) -> Callable[[Path], Pair]:
    """A folder with SentencePiece's file alone."""

    def pair(folder: Path) -> Pair:
        (folder / "tokenizer.model").write_bytes(train_sentencepiece(kind, **settings))
        (folder / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}")
        return tokenizer_from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)

    return pair


def t5_pair(folder: Path) -> Pair:
    """transformers' is of SentencePiece's own file: it does not read a GGUF file's character map."""
    model = unigram_model()
    from sentencepiece import sentencepiece_model_pb2

    content = sentencepiece_model_pb2.ModelProto.FromString(model)
    path = sentencepiece_gguf(
        folder / "v.gguf", model, kind="t5", add_eos_token=False, remove_extra_whitespaces=True,
        precompiled_charsmap=content.normalizer_spec.precompiled_charsmap,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder, add_bos_token=True)
    return tokenizer_from_gguf(open_gguf(path).metadata), theirs


@cache
def unigram_model() -> bytes:
    return train_sentencepiece("unigram", normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True, byte_fallback=True)


PAIRS: dict[str, Callable[[Path], Pair]] = {
    **{f"byte level: {cut}": lambda folder, cut=cut: byte_level_pair(folder, cut) for cut in (*KNOWN_CUTS, *OTHER_CUTS)},  # type: ignore[misc]
    "llama": llama_pair,
    "llama without a space before": unprefixed_pair,
    "gemma": gemma_pair,
    "phi3": phi3_pair,
    "t5": t5_pair,
    "tokenizer.model, BPE": folder_pair("bpe", user_defined_symbols=["<think>"]),
    "tokenizer.model, unigrams": folder_pair("unigram", normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True),
}
_MADE: dict[str, Pair] = {}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    name = str(request.param)
    if name not in _MADE:
        _MADE[name] = PAIRS[name](tmp_path)
    return _MADE[name]


def test_ids_equal_those_of_transformers_on_every_script(pair: Pair) -> None:
    ours, theirs = pair
    for text, expected in zip(ALL_TEXTS, theirs(ALL_TEXTS)["input_ids"], strict=True):
        assert ours.encode(text) == expected, text


def test_decoded_and_streamed_text_equals_that_of_transformers(pair: Pair) -> None:
    ours, theirs = pair
    draw = random.Random(3)
    bytes_ = [token for token in range(ours.vocab_size) if ours.token_bytes(token) and ours.token_bytes(token)[0] >= 0x80]
    runs = [ours.encode(text) for text in ALL_TEXTS]
    runs += [draw.choices(range(ours.vocab_size), k=12) for _ in range(500)]
    runs += [draw.choices(bytes_, k=6) for _ in range(500)]  # mostly no UTF-8
    assert ours.vocab_size == len(theirs)
    for index, ids in enumerate(runs):
        skip = index % 2 == 0
        stream = TextStream(ours, skip_special_tokens=skip)
        streamed = "".join(stream.push([token]).text for token in ids) + stream.finish().text
        assert ours.decode(ids, skip_special_tokens=skip) == streamed == theirs.decode(ids, skip_special_tokens=skip), ids


def test_chats_equal_those_of_transformers(pair: Pair) -> None:
    ours, theirs = pair
    theirs.chat_template = ours.chat_template
    assert ours.bos_token_id == theirs.bos_token_id
    for first, second in zip(TEXTS[:300:2], TEXTS[1:300:2], strict=True):
        chat = [{"role": "user", "content": first}, {"role": "bot", "content": second}, {"role": "user", "content": "<|end|>" + first}]
        for wanted in (True, False):
            expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=wanted)
            rendered = ours.render_chat(chat, add_generation_prompt=wanted)
            assert rendered == expected
            ids = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, add_generation_prompt=wanted)
            assert ours.encode(rendered, add_special_tokens=False) == ids


@pytest.mark.parametrize("cut", [*KNOWN_CUTS, *OTHER_CUTS])
def test_every_cut_divides_texts_as_the_libraries_have_it(cut: str) -> None:
    """Before any merge, which may hide a cut at a wrong place."""
    ours, theirs = cut_named(cut).pre_tokenizer(), independent_cut(cut)
    for text in (*TEXTS, *corpus()[:64]):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


@pytest.mark.parametrize("cut", KNOWN_CUTS)
def test_gguf_files_of_cuts_that_transformers_knows_are_read_as_it_reads_them(cut: str, tmp_path: Path) -> None:
    ours, theirs = from_gguf(byte_level_gguf(tmp_path / "v.gguf", cut))
    theirs.backend_tokenizer.normalizer = byte_level(cut).normalizer  # NFC, which it leaves out for a GGUF file
    known = [text for text in ALL_TEXTS if "añad ido" not in text]  # it takes a user's token with a space in it for text
    for text, expected in zip(known, theirs(known)["input_ids"], strict=True):
        assert ours.encode(text) == expected, text


def test_a_saved_folder_gives_the_ids_of_the_gguf_file(tmp_path: Path) -> None:
    for cut in (*KNOWN_CUTS, *OTHER_CUTS):
        ours = tokenizer_from_gguf(open_gguf(byte_level_gguf(tmp_path / f"{cut}.gguf", cut)).metadata)
        folder = tokenizer_from_folder(save_folder(tmp_path / cut, byte_level(cut)))
        assert (folder.special_ids, folder.bos_token_id, folder.eos_token_ids) == (ours.special_ids, ours.bos_token_id, ours.eos_token_ids)
        assert [folder.encode(text) for text in ALL_TEXTS] == [ours.encode(text) for text in ALL_TEXTS]


def test_transformers_reads_a_llama_file_alike_but_for_spaces_at_the_beginning(tmp_path: Path) -> None:
    ours, theirs = from_gguf(sentencepiece_gguf(tmp_path / "v.gguf", llama_model(True)))
    alike = [text for text in TEXTS if not text.startswith((" ", "▁"))]
    assert len(alike) > 1200
    for text, expected in zip(alike, theirs(alike)["input_ids"], strict=True):
        assert ours.encode(text) == expected, text


@pytest.mark.parametrize("prefixes_space", [True, False])
def test_a_llama_file_is_read_as_sentencepiece_encodes(prefixes_space: bool, tmp_path: Path) -> None:
    model = llama_model(prefixes_space)
    ours = tokenizer_from_gguf(open_gguf(sentencepiece_gguf(tmp_path / "v.gguf", model, add_space_prefix=prefixes_space)).metadata)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == processor_of_cached(model).encode(text), text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_folder_with_sentencepieces_file_alone_is_read_as_sentencepiece_encodes(kind: str, tmp_path: Path) -> None:
    """But for unigrams where two divisions are equally likely: runs of one character. There ours are those of transformers."""
    for number, settings in enumerate(({"user_defined_symbols": ["<think>", "ab"]}, {"remove_extra_whitespaces": True}, {"byte_fallback": False})):
        model = train_sentencepiece(kind, **settings)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(model)
        ours = tokenizer_from_folder(folder)
        processor = processor_of(model)
        ties = 0
        for text in (*TEXTS, "<think> ab<think>cab", "ab"):
            ids, expected = ours.encode(text, add_special_tokens=False), processor.encode(text)
            if kind == "unigram" and ids != expected:
                assert sorted(ids) == sorted(expected), text
                ties += 1
                continue
            assert ids == expected, text
        assert ties < 20


@cache
def processor_of_cached(model: bytes) -> Any:
    return processor_of(model)
