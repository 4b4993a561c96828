"""Lines of a prompts file: what each asks for, what is refused, and that memory holds one line at a time."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from lockstep.cli import prompts_file
from lockstep.cli.prompts_file import RawLine, named, read_lines, read_request
from lockstep.core.params import SamplingParams
from lockstep.errors import InvalidRequestError

DEFAULTS = SamplingParams(temperature=0.5, max_tokens=7, stop=["\n"])


def lines(data: bytes) -> list[RawLine]:
    return list(read_lines(io.BytesIO(data)))


def line(fields: Any) -> RawLine:
    data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return RawLine(index=4, number=5, digest="", end=0, data=data)


def asked(fields: Any, *, chat: bool = False) -> prompts_file.LineRequest:
    return read_request(line(fields), DEFAULTS, chat=chat)


def test_blank_lines_are_none_and_the_last_needs_no_end() -> None:
    found = lines(b'\n{"a": 1}\r\n   \n\t\n{"a": 1}\n{"b": 2}')
    assert [(one.index, one.number) for one in found] == [(0, 2), (1, 5), (2, 6)]
    assert found[0].digest == found[1].digest != found[2].digest
    assert found[-1].end == len(b'\n{"a": 1}\r\n   \n\t\n{"a": 1}\n{"b": 2}')


def test_overlong_line_is_one_line_that_no_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_file, "LINE_BYTES_MAX", 16)
    found = lines(b'{"a": 1}\n' + b"x" * 50 + b'\n{"b": 2}\n' + b"y" * 40)
    assert [(one.number, one.data) for one in found] == [(1, b'{"a": 1}\n'), (2, None), (3, b'{"b": 2}\n'), (4, None)]
    assert lines(b"x" * 50 + b"\n")[0].digest == found[1].digest != lines(b"x" * 51 + b"\n")[0].digest
    with pytest.raises(InvalidRequestError, match=r"line 2 is longer than 16 bytes"):
        read_request(found[1], DEFAULTS, chat=False)


def test_line_takes_what_it_leaves_out_from_the_flags() -> None:
    request = asked({"prompt": "a", "temperature": 0, "seed": 3, "top_k": None})
    assert request.params == SamplingParams(temperature=0, seed=3, max_tokens=7, stop=["\n"])
    assert (request.prompt, request.messages, request.id, request.priority) == ("a", None, 4, 0)


def test_three_kinds_of_prompt() -> None:
    messages = [{"role": "user", "content": "a"}]
    assert asked({"prompt": "a"}, chat=True).messages == messages
    assert asked({"messages": messages, "id": "x"}).messages == messages
    assert asked({"prompt_token_ids": [1, 2], "id": 7}).prompt == {"prompt_token_ids": [1, 2]}
    assert asked({"prompt_token_ids": [1, 2]}, chat=True).prompt == {"prompt_token_ids": [1, 2]}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        (b"{", "line 5 must be a JSON object"),
        (b"[1]", "got a JSON list"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' is there twice"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b"[" * 100_000, "line 5 must be a JSON object"),
        ({}, "needs one of prompt, messages, prompt_token_ids, got none"),
        ({"prompt": "a", "messages": []}, "got prompt and messages"),
        ({"prompt": 5}, "prompt must be text"),
        ({"messages": []}, "at least one object"),
        ({"messages": ["a"]}, "messages must be"),
        ({"prompt_token_ids": [1.0]}, "integers"),
        ({"prompt_token_ids": [True]}, "integers"),
        ({"prompt": "a", "temprature": 1}, "'temprature' is not a field of a line; did you mean temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "priority": 1.5}, "priority"),
        ({"prompt": "a", "id": [1]}, "id must be"),
        ({"prompt": "a", "tools": []}, "tools goes with messages"),
        ({"messages": [{}], "chat_template_kwargs": []}, "chat_template_kwargs goes with messages"),
    ],
)
def test_bad_line_is_refused_by_its_field(fields: Any, found: str) -> None:
    with pytest.raises(InvalidRequestError, match=found):
        asked(fields)


def test_refused_line_keeps_its_name() -> None:
    assert named(line({"id": "x", "prompt": 5})) == "x"
    assert named(line(b"{")) == named(line({"id": [1]})) == named(line([1])) == 4
