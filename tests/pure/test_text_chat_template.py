"""Chat templates: what they may use, and what they may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import train, write_folder

from lockstep.errors import CheckpointError, InvalidRequestError
from lockstep.text import tokenizer_from_folder
from lockstep.text.chat_template import ChatTemplates

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: Any = HELLO, **variables: Any) -> str:
    return ChatTemplates({"default": source}, {"bos_token": "<s>"}).render(messages, variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Hello"),
        ("{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n", "Hello\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hello!"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt is defined }}", "TrueTrueFalse"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_templates_have_the_names_and_filters_they_rely_on(source: str, expected: str) -> None:
    assert render(source) == expected


def test_variables_reach_the_template_and_may_replace_special_tokens() -> None:
    assert render("{{ bos_token }}{{ thinking }}", bos_token="B", thinking="on") == "Bon"


def test_keys_without_a_value_are_as_if_not_sent() -> None:
    source = "{{ messages[0].content is defined }}"
    assert render(source, [{"role": "assistant", "content": None}]) == "False"


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[9].content.x }}", "has no element 9|undefined"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{% for i in range(10000000) %}{% endfor %}", "too big"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
    ],
)
def test_a_template_that_fails_is_an_error_with_its_own_words(source: str, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", ["text", ["text"], [None]])
def test_messages_that_are_no_objects_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="list of objects"):
        render("x", messages)


def test_a_request_with_tools_takes_the_template_for_tools() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "with {{ tools | length }}"}, {})
    assert templates.render(HELLO, {}) == "plain"
    assert templates.render(HELLO, {"tools": [{}]}) == "with 1"
    assert templates.default == "plain"


def test_every_place_for_a_folders_template_is_read(tmp_path: Path) -> None:
    backend = train("byte-level")
    for name, settings, files in (
        ("a", {"chat_template": "T {{ eos_token }}", "eos_token": "</s>"}, {}),
        ("b", {"chat_template": [{"name": "default", "template": "T {{ eos_token }}"}], "eos_token": "</s>"}, {}),
        ("c", {"chat_template": "old", "eos_token": "</s>"}, {"chat_template.jinja": "T {{ eos_token }}"}),
        ("d", {"chat_template": "old", "eos_token": "</s>"}, {"chat_template.json": json.dumps({"chat_template": "T {{ eos_token }}"})}),
    ):
        folder = write_folder(tmp_path / name, backend, settings)
        for file, content in files.items():
            (folder / file).write_text(content)
        tokenizer = tokenizer_from_folder(folder)
        assert tokenizer.chat_template == "T {{ eos_token }}", name
        assert tokenizer.render_chat(HELLO) == "T </s>", name
    with pytest.raises(CheckpointError, match="chat_template must be"):
        tokenizer_from_folder(write_folder(tmp_path / "e", backend, {"chat_template": [3]}))


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(write_folder(tmp_path, train("byte-level"), {}))
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.render_chat(HELLO)


def test_the_generation_prompt_is_asked_for_by_default(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, train("byte-level"), {"chat_template": "{{ add_generation_prompt }}"})
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.render_chat(HELLO) == "True"
    assert tokenizer.render_chat(HELLO, add_generation_prompt=False) == "False"
