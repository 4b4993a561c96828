"""Chat templates are held to limits on steps and on what they make."""

from __future__ import annotations

import threading

import pytest

from lockstep.errors import InvalidRequestError
from lockstep.text.chat_template import ChatTemplates
from lockstep.text.template_limits import TemplateLimits

SMALL = TemplateLimits(source_max=2000, steps_max=2000, length_max=100_000)


def render(source: str, content: str = "Hello", limits: TemplateLimits = SMALL) -> str:
    return ChatTemplates({"default": source}, {}, limits).render([{"role": "user", "content": content}], {})


DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(40) %}BODY{% endfor %}{{ ns.x | length }}"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f(x) %}{% if x > 0 %}{{ f(x - 1) }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "steps"),
        ("{% for i in range(500) %}{{ messages[0].content * 99 }}{% endfor %}", "characters"),
        (DOUBLING.replace("BODY", "{% set ns.x = ns.x ~ ns.x %}"), "characters"),
        (DOUBLING.replace("BODY", "{% set ns.x = ns.x + ns.x %}"), "characters"),
        (DOUBLING.replace("BODY", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"), "characters"),
        (DOUBLING.replace("BODY", "{% set ns.x = [ns.x, ns.x] %}"), "characters"),
        (DOUBLING.replace("BODY", "{% set ns.x = (ns.x, ns.x) %}"), "characters"),
        (DOUBLING.replace("BODY", "{% set ns.x = {'a': ns.x, 'b': ns.x} %}"), "characters"),
        (DOUBLING.replace("BODY", "{% set ns.x = dict(a=ns.x, b=ns.x) %}"), "characters"),
        (DOUBLING.replace("BODY", "{% set ns.x = ns.x | replace('b', 'bb') | replace('a', 'aa') %}"), "characters"),
        (DOUBLING.replace("BODY", "{% set ns.x = ns.x.replace('b', 'bb').replace('a', 'aa') %}"), "characters"),
        (DOUBLING.replace("BODY", "{% set ns.x = [ns.x, ns.x] | join %}"), "characters"),
        (DOUBLING.replace("BODY", "{% set ns.x = ''.join([ns.x, ns.x]) %}"), "characters"),
        (DOUBLING.replace("BODY", "{% set ns.x = '%s%s' % (ns.x, ns.x) %}"), "characters"),
        (DOUBLING.replace("BODY", "{% set ns.x = '{0}{0}'.format(ns.x) %}{% set ns.x = ns.x ~ ns.x %}"), "characters"),
        ("{{ 'x' * 1000000000 }}", "characters"),
        ("{{ 1000000000 * ['x'] }}", "characters"),
        ("{{ 9 ** 100000 }}", "bits"),
        ("{{ (9 ** 1000) * (9 ** 1000) }}", "bits"),
        ("{{ 'x'.ljust(1000000000) }}", "characters"),
        ("{{ 'x' | center(1000000000) }}", "characters"),
        ("{{ 'a\nb' | indent(900000000) }}", "characters"),
        ("{{ '\t'.expandtabs(1000000000) }}", "characters"),
        ("{{ '%1000000000s' % 'x' }}", "characters"),
        ("{{ '%*d' % (1000000000, 1) }}", "characters"),
        ("{{ '%1000000000s' | format('x') }}", "characters"),
        ("{{ '{:1000000000}'.format('x') }}", "characters"),
        ("{{ '{:{}}'.format('x', 1000000000) }}", "characters"),
        ("{{ range(1000) | map('string') | join('x' * 1000) }}", "characters"),
        ("{{ ('x' * 1000).join(range(1000) | map('string')) }}", "characters"),
        ("{{ range(100000) | list }}", "characters"),
        ("{{ [1] | tojson(indent=1000000000) }}", "indents"),
        ("{{ [1] | slice(1000000000) | list }}", "characters"),
        ("{{ 'a'.translate({97: 'b'}) }}", "translate"),
        ("{{ lipsum(100000) }}", "undefined"),
        ("{# " + "x" * 3000 + " #}", "3006 characters"),
    ],
)
def test_a_template_without_end_is_refused(source: str, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        render(source)


def test_a_template_within_its_limits_renders_whatever_it_uses() -> None:
    source = "{% for i in range(300) %}{{ ('%03d' % i) ~ ' '.ljust(2) }}{% endfor %}"
    assert render(source) == "".join(f"{i:03d}  " for i in range(300))


def test_limits_are_of_one_rendering_and_hold_in_other_threads() -> None:
    templates = ChatTemplates({"default": "{% for i in range(1500) %}{% endfor %}{{ messages[0].content }}"}, {}, SMALL)
    found: list[str] = []

    def work() -> None:
        for _ in range(5):
            found.append(templates.render([{"role": "user", "content": "x"}], {}))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["x"] * 20


def test_steps_count_what_the_messages_make_it_do() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    templates = ChatTemplates({"default": source}, {}, SMALL)
    assert templates.render([{"content": "a"}] * 500, {}) == "a" * 500
    with pytest.raises(InvalidRequestError, match="more than 2000 steps"):
        templates.render([{"content": "a"}] * 2000, {})


def test_the_clock_is_the_last_resort() -> None:
    with pytest.raises(InvalidRequestError, match="more than 0 seconds"):
        render("{% for i in range(9) %}{% endfor %}", limits=TemplateLimits(seconds_max=0))


def test_a_long_conversation_is_well_within_the_usual_limits() -> None:
    source = "{% for m in messages %}{% if 'x' in m.content %}{{ '<' ~ m['role'] ~ '>' + m.content | trim }}{% endif %}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 1000}] * 5000
    assert len(ChatTemplates({"default": source}, {}).render(messages, {})) == 5000 * 1006


@pytest.mark.parametrize("source", ["{% set ns = namespace(_a=1) %}", "{% set ns = namespace() %}{% set ns._a = 1 %}", "{{ ''.__class__.x }}"])
def test_names_with_underscores_lead_nowhere(source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"underscore|unsafe"):
        render(source)
