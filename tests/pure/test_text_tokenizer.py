"""Tokenizers from folders and from GGUF fields, on small vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny_tokenizers import KINDS, LINES, tiny, train, write_folder
from tokenizers import decoders, processors

from lockstep.errors import CheckpointError, InvalidRequestError, UnsupportedError
from lockstep.text import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_those_of_the_library(kind: str) -> None:
    tokenizer, backend = tiny(kind)
    assert tokenizer.vocab_size == backend.get_vocab_size()
    for line in (*LINES, "", "a</s>b <tool>", "\x00\x7f\u200d"):
        ids = tokenizer.encode(line)
        assert ids == backend.encode(line).ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_join_to_the_bytes_of_the_text(kind: str) -> None:
    tokenizer, _ = tiny(kind)
    for line in LINES:
        ids = tokenizer.encode(line, add_special_tokens=False)
        spelled = b"".join(map(tokenizer.token_bytes, ids))
        assert spelled.removeprefix(b" ") == tokenizer.decode(ids).removeprefix(" ").encode()


def test_a_token_that_is_part_of_a_character_has_exact_bytes_and_replacement_text() -> None:
    tokenizer, _ = tiny("byte-level")
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= by_bytes.keys()
    assert tokenizer.token_text(by_bytes[b"\xf0"]) == "\ufffd"
    assert tokenizer.token_text(by_bytes[b" the"]) == " the"
    assert tokenizer.token_bytes(1) == b"</s>"


@pytest.mark.parametrize("token_id", [-1, 10_000, 1 << 32, 1 << 70])
def test_an_id_outside_the_vocabulary_has_no_bytes_and_no_text(token_id: int) -> None:
    tokenizer, _ = tiny("byte-level")
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.token_text(token_id) == tokenizer.decode([token_id]) == ""


def test_text_with_a_lone_surrogate_is_the_callers_fault() -> None:
    tokenizer, _ = tiny("byte-level")
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_special_tokens_of_a_folder_are_named_in_either_file_and_either_form(tmp_path: Path) -> None:
    backend = train("byte-level")
    for settings in ({"bos_token": "<s>", "eos_token": "</s>"}, {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>", "lstrip": False}}):
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            folder = write_folder(tmp_path / f"{name}-{len(json.dumps(settings))}", backend, {})
            (folder / name).write_text(json.dumps(settings))
            tokenizer = tokenizer_from_folder(folder)
            assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (0, (1,), {0, 1})


def test_a_named_special_token_outside_the_vocabulary_does_not_become_an_id(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, train("byte-level"), {"eos_token": "<nowhere>"})
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.vocab_size == tiny("byte-level")[0].vocab_size


def test_a_folders_truncation_and_padding_do_not_change_prompts(tmp_path: Path) -> None:
    backend = train("byte-level")
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    ids = tokenizer_from_folder(write_folder(tmp_path, backend, {})).encode(LINES[0])
    assert ids == tiny("byte-level")[0].encode(LINES[0])
    assert 4 < len(ids) < 100


def test_a_beginning_token_is_added_only_where_asked_for(tmp_path: Path) -> None:
    backend = train("byte-level")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = tokenizer_from_folder(write_folder(tmp_path, backend, {}))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [0, *plain]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({}, [0]), ({"add_bos_token": True}, [0]), ({"add_bos_token": False}, []), ({"add_eos_token": True}, [1]), ({"add_bos_token": None}, [0])],
)
def test_the_folders_settings_say_what_goes_around_a_text(tmp_path: Path, flags: dict[str, object], expected: list[int]) -> None:
    backend = train("byte-level")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = tokenizer_from_folder(write_folder(tmp_path, backend, {"bos_token": "<s>", "eos_token": "</s>", **flags}))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert [token for token in tokenizer.encode("the") if token not in plain] == expected


def test_added_tokens_that_only_the_folders_settings_list_are_tokens(tmp_path: Path) -> None:
    backend = train("byte-level")
    count, word = backend.get_vocab_size(), backend.encode("the").tokens[0]
    listed = {
        str(count): {"content": "<new>", "special": True, "rstrip": True},
        str(count + 1): {"content": "<plain>", "special": False},
        str(backend.token_to_id(word)): {"content": word, "special": True},
        "0": {"content": "<s>", "special": True},
    }
    tokenizer = tokenizer_from_folder(write_folder(tmp_path, backend, {"added_tokens_decoder": listed}))
    assert tokenizer.vocab_size == count + 2
    assert tokenizer.encode("<new>  <plain>") == [count, count + 1]
    assert {count, backend.token_to_id(word)} <= tokenizer.special_ids
    assert count + 1 not in tokenizer.special_ids


@pytest.mark.parametrize(
    ("listed", "match"),
    [
        ({"7": {"content": "</s>"}}, "gives '</s>' the id 7, the vocabulary 1"),
        ({"9999": {"content": "<new>"}}, "the id 9999"),
        ({"x": {"content": "<new>"}}, "must hold tokens"),
        ({"7": "<new>"}, "must hold tokens"),
        ([1], "must be an object"),
    ],
)
def test_added_tokens_that_do_not_fit_the_vocabulary_are_refused(tmp_path: Path, listed: object, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        tokenizer_from_folder(write_folder(tmp_path, train("byte-level"), {"added_tokens_decoder": listed}))


def test_every_template_that_a_gguf_file_names_can_be_chosen() -> None:
    fields = gguf_fields(chat_template="D", chat_templates=["tool_use", "rag"], **{"chat_template.tool_use": "T", "chat_template.rag": "R"})
    tokenizer = tokenizer_from_gguf(fields)
    hello = [{"role": "user", "content": "x"}]
    assert [tokenizer.render_chat(hello, **asked) for asked in ({}, {"tools": [{}]}, {"chat_template": "rag"})] == ["D", "T", "R"]
    assert tokenizer_from_gguf(gguf_fields()).chat_template is None


def test_a_token_that_the_file_names_is_special_whatever_its_type() -> None:
    types = gguf_fields()["tokenizer.ggml.token_type"]
    tokenizer = tokenizer_from_gguf(gguf_fields(**{"ggml.token_type": [1, *types[1:]], "ggml.padding_token_id": 5}))
    assert tokenizer.special_ids == {0, 1, 5}


def test_folders_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
    for content, match in (("{", "not JSON"), ("[]", "not a JSON object"), ('{"model": 3}', "cannot read it")):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError, match=match):
            tokenizer_from_folder(tmp_path)
    backend = train("byte-level")
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedError, match="WordPiece"):
        tokenizer_from_folder(write_folder(tmp_path, backend, {}))


def gguf_fields(**changes: Any) -> dict[str, Any]:
    """What a GGUF file of the tiny byte-level vocabulary would hold."""
    described = json.loads(train("byte-level").to_str())
    tokens = sorted(described["model"]["vocab"], key=described["model"]["vocab"].get)
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, "<tool>"],
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2), 4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in described["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return fields | {f"tokenizer.{key}": value for key, value in changes.items()}


def test_gguf_fields_give_the_tokenizer_that_they_came_from() -> None:
    tokenizer, (_, backend) = tokenizer_from_gguf(gguf_fields()), tiny("byte-level")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (0, (1,), {0, 1})
    for line in (*LINES, "a</s>b <tool>"):
        assert tokenizer.encode(line) == backend.encode(line).ids


def test_gguf_flags_add_the_tokens_around_a_text() -> None:
    plain = tokenizer_from_gguf(gguf_fields()).encode("the")
    both = tokenizer_from_gguf(gguf_fields(**{"ggml.add_bos_token": True, "ggml.add_eos_token": True}))
    assert both.encode("the") == [0, *plain, 1]
    assert both.encode("the", add_special_tokens=False) == plain


def test_the_end_of_turn_is_an_end_too() -> None:
    assert tokenizer_from_gguf(gguf_fields(**{"ggml.eot_token_id": 7, "ggml.eom_token_id": 1})).eos_token_ids == (1, 7)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """A text as it is cut before any merge."""
    backend: tokenizers.Tokenizer = tokenizer._backend
    return [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("cut", "text", "expected"),
    [
        ("gpt-2", "a 123  4", ["a", "Ġ123", "Ġ", "Ġ4"]),
        ("smollm", "a 123  4", ["a", "Ġ", "1", "2", "3", "ĠĠ", "4"]),
        ("qwen2", "a 123  4", ["a", "Ġ", "1", "2", "3", "Ġ", "Ġ", "4"]),
        ("llama-bpe", "a 1234  5", ["a", "Ġ", "123", "4", "Ġ", "Ġ", "5"]),
        ("llama-bpe", "It'S x", ["It", "'S", "Ġx"]),
        ("qwen35", "e\u0301a", ["eÌģa"]),
        ("tekken", "DeepSeek's 12", ["Deep", "Seek", "'s", "Ġ", "1", "2"]),
        ("gpt-4o", "DeepSeek's 1234", ["Deep", "Seek's", "Ġ", "123", "4"]),
        ("deepseek-llm", "aB_c 12 日本\n\n", ["aB", "_", "c", "Ġ", "12", "Ġ", "æĹ¥æľ¬", "Ċ", "Ċ"]),
        ("deepseek-coder", "aB_c 12 日本\n\n", ["aB", "_", "c", "Ġ", "1", "2", "Ġ", "æĹ¥æľ¬", "Ċ", "Ċ"]),
        ("deepseek-v3", "(aB)_c 1234 日本\n\n", ["(aB", ")_", "c", "Ġ", "123", "4", "Ġ", "æĹ¥æľ¬", "ĊĊ"]),
        ("falcon", "a`b 12345", ["a", "`", "b", "Ġ", "123", "45"]),
        ("default", "a`b $12345", ["a", "`", "b", "Ġ", "$", "123", "45"]),
        ("bailingmoe", "It'S a\n\n12", ["It", "'S", "Ġa", "ĊĊ", "1", "2"]),
    ],
)
def test_every_cut_splits_digits_and_spaces_in_its_own_way(cut: str, text: str, expected: list[str]) -> None:
    assert pieces(tokenizer_from_gguf(gguf_fields(**{"ggml.pre": cut})), text) == expected


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"ggml.model": "bert"}, UnsupportedError, "kind 'bert'.*'llama'"),
        ({"ggml.model": None}, UnsupportedError, "kind None"),
        ({"ggml.pre": "kimi-k2"}, UnsupportedError, "'kimi-k2'.*smollm"),
        ({"ggml.pre": None}, UnsupportedError, "None"),
        ({"ggml.tokens": None}, CheckpointError, "tokens is missing"),
        ({"ggml.tokens": ["a", "a"]}, CheckpointError, "twice"),
        ({"ggml.merges": ["a b c"]}, CheckpointError, "does not make a token"),
        ({"ggml.merges": ["nothing here"]}, CheckpointError, "does not make a token"),
        ({"ggml.token_type": [1]}, CheckpointError, "1 entries"),
        ({"ggml.eos_token_id": 99999}, CheckpointError, "99999"),
        ({"ggml.add_bos_token": 3}, CheckpointError, "add_bos_token is 3"),
    ],
)
def test_gguf_fields_that_do_not_fit_are_refused(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tokenizer_from_gguf(gguf_fields(**changes))
