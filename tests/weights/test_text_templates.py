"""Chat templates against transformers' apply_chat_template, byte for byte: what templates use, and what a caller may ask."""

from __future__ import annotations

import enum
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from every_script import texts
from trained_tokenizers import byte_level, save_folder
from transformers import PreTrainedTokenizerFast

from lockstep.errors import InvalidRequestError
from lockstep.text import Tokenizer, tokenizer_from_folder

CHATML = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] | trim %}
{%- else %}{% set loop_messages = messages %}{% set system = none %}{% endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- if message['role'] == 'user' %}{% set head = ('<<SYS>>' ~ system ~ '<</SYS>>') if loop.first and system else '' %}
    {{- bos_token ~ '[INST] ' ~ head ~ message['content'].strip() ~ ' [/INST]' }}
    {%- else %}{{ ' ' + message['content'] + eos_token }}{% endif %}
{%- endfor %}"""
TOOLS = """{%- macro type_of(schema) -%}{{ schema.type if schema.type is string else schema.type | join('|') }}{%- endmacro %}
{%- if tools is defined and tools %}{{ '# Tools\\n' }}
{%- for tool in tools %}{{ loop.index ~ '. ' ~ tool.function.name }}(
{%- for name, schema in tool.function.parameters.properties | dictsort %}{{ name }}: {{ type_of(schema) }}{% if not loop.last %}, {% endif %}
{%- endfor %})
{{ tool | tojson }}
{{ tool | tojson(indent=4) }}{{ tool.function | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}
{% endfor %}{%- endif %}
{%- if documents %}{% for document in documents %}
{{- '[' ~ (document['title'] | default('untitled') | upper) ~ '] ' ~ document['text'] }}{% endfor %}{% endif %}
{%- set ns = namespace(last='', count=0) %}
{%- for message in messages if message.role != 'hidden' %}
    {%- if message.role == 'stop' %}{% break %}{% elif message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.last = message.role %}{% set ns.count = ns.count + 1 %}
    {%- generation %}{% set inner = 'set inside' %}{{ message.role }}: {% if message.content is string %}{{ message.content }}
    {%- elif message.content is sequence %}
    {%- for part in message.content %}{{ part.text if part.type == 'text' else '<' + part.type + '>' }}{% endfor %}
    {%- endif %}{% endgeneration %}{{ inner | default('not seen') }}
    {%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}|{{ message.thinking }}</think>{% endif %}
    {%- for call in message.tool_calls | default([]) %}{% set given = call.function.arguments %}
    {{- call.function.name }}{{ given | tojson if given is mapping else given }}{% endfor %}
{{ 'name' in message }}
  {% if 'tool_call_id' in message %}
  #{{ message.tool_call_id }}
  {% endif %}
{%- endfor %}{{ ns.last }}{{ ns.count }}{{ messages | map(attribute='role') | unique | list }}
{{- extra is defined and extra }}{{ enable_thinking | default(true) }}
{%- if add_generation_prompt %}
bot:{% endif %}"""
ADD = {
    "type": "function",
    "function": {
        "name": "add", "description": "a <b> & 'c' é 你 \u2028 😀",
        "parameters": {"type": "object", "properties": {"b": {"type": ["number", "null"]}, "a": {"type": "number", "minimum": 0.5}}},
    },
}  # fmt: skip
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None, "é": '<>&"'}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.  "},
    {"role": "hidden", "content": "x"},
    {"role": "user", "content": "  hi\n\n"},
    {"role": "skip", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "so"},
    {"role": "tool", "content": "3", "tool_call_id": "1", "name": None},
    {"role": "user", "content": [{"type": "text", "text": "é"}, {"type": "image"}, {"type": "text", "text": "<|im_end|>"}]},
    {"role": "assistant", "content": "yes ", "thinking": "a", "reasoning_content": "b"},
    {"role": "stop", "content": "never"},
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(save_folder(tmp_path_factory.mktemp("hf"), byte_level("gpt-2")))


@pytest.fixture(scope="module")
def ours(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("ours")
    theirs.save_pretrained(folder)
    return tokenizer_from_folder(folder)


def both(ours: Tokenizer, theirs: Any, chat: Any, **asked: Any) -> tuple[str, str]:
    return ours.render_chat(chat, **{"add_generation_prompt": False, **asked}), theirs.apply_chat_template(chat, tokenize=False, **asked)


@pytest.mark.parametrize("tools", [None, [], [ADD], [ADD, ADD]])
@pytest.mark.parametrize("documents", [None, [], [{"title": "été", "text": "x"}, {"text": "y"}]])
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_tools_documents_and_loops_render_alike(ours: Tokenizer, theirs: Any, tools: Any, documents: Any, generation_prompt: bool) -> None:
    for extra in ({}, {"extra": "E", "enable_thinking": False}, {"bos_token": "B", "extra": {"a": [1, 2.5, None, True]}}):
        asked = {"tools": tools, "documents": documents, "add_generation_prompt": generation_prompt, "chat_template": TOOLS, **extra}
        rendered, expected = both(ours, theirs, CHAT, **asked)
        assert rendered == expected


def test_two_thousand_messages_of_every_script_render_alike(ours: Tokenizer, theirs: Any) -> None:
    found = texts(2000, seed=11)
    for template in (CHATML, LLAMA, TOOLS):
        for start in range(0, 2000, 5):
            chat = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(found[start : start + 5])]
            rendered, expected = both(ours, theirs, chat, chat_template=template, add_generation_prompt=start % 2 == 0)
            assert rendered == expected
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        ours.render_chat([{"role": "user", "content": "a"}] * 2, chat_template=LLAMA)


@pytest.mark.parametrize("template", [CHATML, LLAMA, TOOLS, "{% for m in messages %}{{ m.content | trim }}.\n{% endfor %}"])
def test_a_continued_message_ends_where_it_ends_in_transformers(ours: Tokenizer, theirs: Any, template: str) -> None:
    for text in ("So far", "so far ", " so ", "a\n", "CONTINUE", "é", *texts(200, seed=4)):
        if not text.strip():
            continue
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
        rendered, expected = both(ours, theirs, chat, chat_template=template, continue_final_message=True)
        assert rendered == expected
        assert rendered.rstrip().endswith(text.strip())


def test_a_continued_part_or_field_ends_where_it_ends_in_transformers(ours: Tokenizer, theirs: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, {"type": "image"}]
    for message, field in (
        ({"content": parts}, True), ({"content": "c", "reasoning_content": "because "}, "reasoning_content"), ({"reasoning": "because"}, "reasoning"),
        ({"content": "c", "reasoning_content": "x", "thinking": "y"}, "thinking"),
    ):  # fmt: skip
        rendered, expected = both(ours, theirs, [{"role": "assistant", **message}], chat_template=TOOLS, continue_final_message=field)
        assert rendered == expected
    assert parts[1]["text"] == "two", "the caller's messages are not touched"


@pytest.mark.parametrize(
    ("chat", "asked", "match"),
    [
        (CHAT[:1], {"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        (CHAT[:1], {"continue_final_message": "reasoning"}, "no 'reasoning'"),
        ([{"role": "a", "note": "x"}], {"continue_final_message": "note"}, "does not read"),
        ([{"role": "a", "content": [{"type": "image"}]}], {"continue_final_message": True}, "no text to continue"),
        (CHAT[:1], {"continue_final_message": True, "chat_template": "content is left out"}, "cannot be continued"),
        ([], {}, "at least one message"),
        (CHAT[:1], {"tools": ["add"]}, "tools must be a list of objects"),
        (CHAT[:1], {"documents": {"title": "x"}}, "documents must be a list of objects"),
    ],
)
def test_what_transformers_refuses_is_refused_with_a_reason(ours: Tokenizer, theirs: Any, chat: Any, asked: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        theirs.apply_chat_template(chat, tokenize=False, **{"chat_template": TOOLS, **asked})
    with pytest.raises(InvalidRequestError, match=match):
        ours.render_chat(chat, **{"chat_template": TOOLS, "add_generation_prompt": False, **asked})


def test_the_date_is_todays(ours: Tokenizer, theirs: Any) -> None:
    asked = {"chat_template": "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}", "add_generation_prompt": False}
    before, expected = both(ours, theirs, CHAT[:1], **asked)
    after, _ = both(ours, theirs, CHAT[:1], **asked)
    assert expected in (before, after)  # at midnight they may differ


def test_named_templates_are_chosen_as_transformers_chooses(tmp_path: Path, theirs: Any) -> None:
    named = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}", "rag": "R{{ documents | length }}"}
    copy = PreTrainedTokenizerFast.from_pretrained(theirs.name_or_path)
    copy.chat_template = named
    copy.save_pretrained(tmp_path)
    assert (tmp_path / "additional_chat_templates").is_dir()
    ours, read = tokenizer_from_folder(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for asked in ({}, {"tools": [ADD]}, {"tools": []}, {"chat_template": "rag", "documents": [{}]}, {"chat_template": "x{{ messages[0].role }}"}):
        rendered, expected = both(ours, read, CHAT[:1], **asked)
        assert rendered == expected


def test_values_are_as_json_would_have_them(ours: Tokenizer, theirs: Any) -> None:
    class Shade(enum.StrEnum):
        RED = "red"

    class Level(enum.IntEnum):
        LOW = 1

    template = "{{ messages[0].content }}{{ x }}{{ y }}{{ z }}{{ w }}"
    chat = [OrderedDict(role="user", content=Shade.RED)]
    rendered, expected = both(ours, theirs, chat, chat_template=template, x=Level.LOW, y=(1, [Shade.RED]), z=object(), w=1.5)
    assert rendered == expected == "red1(1, ['red'])<object>1.5"
