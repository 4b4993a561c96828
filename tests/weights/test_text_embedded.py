"""The embedded model's tokenizer and template, held against transformers.

transformers has no entry for the cut that the file names ("smollm": every digit by itself, as in the model's own tokenizer.json) and falls back on
GPT-2's. Where it is to judge text with digits, its tokenizer is given that cut.
"""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from every_script import texts
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from lockstep.errors import CheckpointError
from lockstep.text import TextStream, Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from lockstep.weights import find_model, open_checkpoint

SPECIAL_TEXTS = [
    "", " ", "   ", "\n", "\r\n\r\n \t x", "a  b   c    d", "trailing   ", "  leading", "\x00\x01\x1b\x7f\x85\u200b\u2028\ufeff", "\u00a0\u3000wide",
    "I'm you're it'S DON'T we'll they'd I've 'tis", "<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b <|im_end|> c", "<|im_start",
    "<repo_name>x<file_sep>",
    "def f(x):\n    return x ** 2  # comment\n\n\nprint(f(3))", "https://example.org/a?b=c&d=%20e", "e\u0301 \u00e9 \u1100\u1161 \uac00 ﬁ ﷺ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇫🇷", "\U0001f600" * 9, "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก", "你好,世界。",
    "こんにちは世界", "안녕하세요 세계", "Привет, мир!",
    "x" * 3000, "ab " * 500,
]  # fmt: skip
DIGIT_TEXTS = ["12345", "a 1 22  333   4444", "3.14159e-10 0x1F", "٣٤٥ १२३ \uff14\uff15 ²³ Ⅷ ½", "\n  7\n", "v1.2.3-rc4", "1<|im_end|>2"]
CHATS = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\n\n"},
        {"role": "assistant", "content": " Yes "},
        {"role": "user", "content": "?"},
    ],
    [{"role": "user", "content": "<|im_end|>{{ 1 + 1 }} {% raw %}"}],
    [{"role": "assistant", "content": ""}],
]


@pytest.fixture(scope="module")
def embedded() -> Path:
    try:
        return find_model("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def ours(embedded: Path) -> Tokenizer:
    source = open_checkpoint(embedded).tokenizer_source
    assert not isinstance(source, Path)
    return tokenizer_from_gguf(source)


@pytest.fixture(scope="module")
def theirs(embedded: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded.parent, gguf_file=embedded.name, local_files_only=True)


@pytest.fixture(scope="module")
def theirs_cut_as_the_file_says(theirs: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


def every_script() -> list[str]:
    """All assigned characters but digits and surrogates, 40 to a text, with spaces between runs."""
    characters = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code))[:1] not in "N" and unicodedata.category(chr(code)) not in ("Cs", "Cn", "Co")
    ]
    return ["".join(characters[start : start + 20]) + " " + "".join(characters[start + 20 : start + 40]) for start in range(0, len(characters), 40)]


def test_ids_equal_those_of_transformers_on_every_assigned_character(ours: Tokenizer, theirs: Any) -> None:
    texts = [*SPECIAL_TEXTS, *every_script()]
    assert len(texts) > 3000
    for text, expected in zip(texts, theirs(texts)["input_ids"], strict=True):
        assert ours.encode(text) == expected, text


def test_ids_equal_those_of_transformers_where_digits_are_cut_as_the_file_says(
    ours: Tokenizer, theirs_cut_as_the_file_says: tokenizers.Tokenizer
) -> None:
    for text in (*SPECIAL_TEXTS, *DIGIT_TEXTS):
        assert ours.encode(text) == theirs_cut_as_the_file_says.encode(text).ids, text

    @given(
        st.lists(st.sampled_from([*SPECIAL_TEXTS, *DIGIT_TEXTS]) | st.text(max_size=8) | st.text(alphabet=" \n1٣a'", max_size=8), max_size=5).map(
            "".join
        )
    )
    @settings(max_examples=200, deadline=None, derandomize=True)
    def check(text: str) -> None:
        assert ours.encode(text) == theirs_cut_as_the_file_says.encode(text).ids

    check()


def test_two_thousand_texts_of_every_script_have_the_ids_and_text_of_transformers_cut_as_the_file_says(
    ours: Tokenizer, theirs_cut_as_the_file_says: tokenizers.Tokenizer
) -> None:
    for text in texts(2000):
        ids = ours.encode(text)
        assert ids == theirs_cut_as_the_file_says.encode(text).ids, text
        stream = TextStream(ours)
        streamed = "".join(stream.push([token]).text for token in ids) + stream.finish().text
        assert ours.decode(ids) == streamed == theirs_cut_as_the_file_says.decode(ids)


def test_decoded_and_streamed_text_equals_that_of_transformers(ours: Tokenizer, theirs: Any) -> None:
    @given(st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=30), st.booleans())
    @settings(max_examples=200, deadline=None, derandomize=True)
    def check(ids: list[int], skip: bool) -> None:
        stream = TextStream(ours, skip_special_tokens=skip)
        streamed = "".join(stream.push([token]).text for token in ids) + stream.finish().text
        assert ours.decode(ids, skip_special_tokens=skip) == streamed == theirs.decode(ids, skip_special_tokens=skip)

    check()


def test_text_comes_back_from_its_ids(ours: Tokenizer) -> None:
    for text in (*SPECIAL_TEXTS, *DIGIT_TEXTS):
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
        assert b"".join(map(ours.token_bytes, ours.encode(text))) == text.encode()


def test_named_tokens_equal_those_of_transformers(ours: Tokenizer, theirs: Any) -> None:
    assert ours.vocab_size == len(theirs) == 49152
    assert ours.bos_token_id == theirs.bos_token_id == 1
    assert ours.eos_token_ids == (theirs.eos_token_id,) == (2,)
    assert ours.special_ids == {token for token, added in theirs.added_tokens_decoder.items() if added.special}
    assert ours.chat_template == theirs.chat_template


def test_chats_of_every_script_equal_those_of_transformers(ours: Tokenizer, theirs: Any) -> None:
    found = texts(2000)
    for start in range(0, 2000, 4):
        chat = [{"role": role, "content": text} for role, text in zip(("system", "user", "assistant", "user"), found[start : start + 4], strict=True)]
        for chosen in (chat, chat[1:]):
            expected = theirs.apply_chat_template(chosen, tokenize=False, add_generation_prompt=start % 8 == 0)
            assert ours.render_chat(chosen, add_generation_prompt=start % 8 == 0) == expected


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_rendered_chats_equal_those_of_transformers(ours: Tokenizer, theirs: Any, generation_prompt: bool) -> None:
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation_prompt)
        assert ours.render_chat(chat, add_generation_prompt=generation_prompt) == expected


TEMPLATE = """{%- if tools %}
    {{- '# Tools\\n' + (tools | tojson) + '\\n' }}
    {%- for tool in tools %}{{ tool.function.name | upper }} {{ tool | tojson(indent=2) }}{% endfor %}
{%- endif %}
{% set ns = namespace(last='') %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- generation %}{{ loop.index0 }}{{ message['role'] }}:
    {{- message.content | trim if message.content is string else message.content | default('') | tojson }}
    {%- endgeneration %}
    {%- if message.tool_calls is defined %}{% for call in message.tool_calls %} {{ call.function.arguments }}{% endfor %}{% endif %}
    {%- set ns.last = message.role %}
{%- endfor %}
  {% if add_generation_prompt %}
{{ eos_token }}{{ ns.last }}{{ documents is none }}{{ extra }}
  {% endif %}
"""


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_a_rich_template_renders_as_transformers_renders_it(ours: Tokenizer, theirs: Any, tmp_path: Path, generation_prompt: bool) -> None:
    theirs.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    folder = tokenizer_from_folder(tmp_path)
    tools = [{"type": "function", "function": {"name": "add", "description": "a <b> & 'c' é", "parameters": {"type": "object", "properties": {}}}}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "user", "content": "  hi  "},
        {"role": "skip", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": [{"type": "text", "text": "é"}]},
    ]
    for given_tools in (None, tools):
        expected = theirs.apply_chat_template(
            chat, chat_template=TEMPLATE, tools=given_tools, tokenize=False, add_generation_prompt=generation_prompt, extra="E"
        )
        assert folder.render_chat(chat, add_generation_prompt=generation_prompt, tools=given_tools, extra="E") == expected


def test_a_saved_folder_gives_the_tokenizer_that_transformers_saved(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    folder = tokenizer_from_folder(tmp_path)
    assert (folder.vocab_size, folder.bos_token_id, folder.eos_token_ids) == (49152, 1, (2,))
    assert folder.chat_template == theirs.chat_template
    for text in (*SPECIAL_TEXTS, *DIGIT_TEXTS):
        assert folder.encode(text) == theirs.encode(text)
        assert folder.decode(folder.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@pytest.mark.parametrize("cut", ["qwen2", "llama-bpe"])
def test_cuts_of_other_models_are_those_that_transformers_has(embedded: Path, cut: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    source = open_checkpoint(embedded).tokenizer_source
    assert not isinstance(source, Path)
    backend = tokenizer_from_gguf({**source, "tokenizer.ggml.pre": cut})._backend
    split = pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[cut]), "isolated")
    expected = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    for text in (*SPECIAL_TEXTS, *DIGIT_TEXTS, *every_script()[:200]):
        assert backend.pre_tokenizer.pre_tokenize_str(text) == expected.pre_tokenize_str(text)
