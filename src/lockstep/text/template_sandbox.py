"""The sandbox that chat templates run in: Jinja with the names that transformers gives them, and with limits. Knows Jinja; does not know messages.

A template is a program that came with a model. It cannot reach Python (Jinja's sandbox sees to that), and it cannot run on or fill the memory: every
turn of a loop, call, filter, operator and output is a step, and every string, list and mapping that it makes counts by its length (template_limits).
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from lockstep.text.template_limits import INDENT_MAX, ITEM_LENGTH, TemplateLimitError, check_filter, check_method, check_operator, meter, whole

_PASSED_BY_JINJA = (jinja2.Environment, jinja2.runtime.Context, jinja2.nodes.EvalContext)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Counts what a template does. Compiled templates call `tick`, `joined` and `literal`, which `_Counting` puts into their syntax tree."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        meter().step()
        check_operator(meter(), operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        used = meter()
        used.step()
        if getattr(__obj, "__name__", "") == "join":
            args = tuple(map(whole, args))
        check_method(used, __obj, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, list):
            used.make(ITEM_LENGTH * len(result))
        elif isinstance(result, dict):
            used.make_of(result)
        return result

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **kwargs)

    @staticmethod
    def tick() -> str:
        return ""

    @staticmethod
    def joined(*parts: Any) -> str:
        meter().make_of(parts)
        return "".join(map(str, parts))

    @staticmethod
    def literal(value: Any) -> Any:
        meter().make_of(value)
        return value


class _Counting(jinja2.visitor.NodeTransformer):
    """Makes each turn of a loop a call, and each concatenation and each list, tuple or dict that is written out one too."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_call("tick", [])).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes)

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _call("literal", [node]) if node.items else node

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _call("literal", [node]) if node.items else node

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _call("literal", [node]) if node.ctx == "load" and node.items else node


def _call(method: str, arguments: list[jinja2.nodes.Expr]) -> jinja2.nodes.Call:
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(method), arguments, [], None, None)


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's part for training; here it is just its content. A block of its own, as in
    transformers: names that are set in it are not set after it."""

    tags = {"generation"}  # noqa: RUF012  (jinja reads the attribute)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """namespace() without names that begin with an underscore, by which Python's own could be reached."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # namespace(self=...) is allowed
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_public(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def environment() -> jinja2.sandbox.SandboxedEnvironment:
    """An environment whose templates must be compiled and rendered inside `metered`."""
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, finalize=_finalize, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"])
    made.filters["tojson"] = _to_json
    made.filters = {name: _counted(name, function) for name, function in made.filters.items()}
    del made.globals["lipsum"]  # random text without end
    made.globals["namespace"] = _Namespace
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # with the marks by which Jinja knows what to pass
    def counted(*args: Any, **kwargs: Any) -> Any:
        meter().step()
        if name == "join":
            args = tuple(map(whole, args))
        check_filter(meter(), name, [value for value in (*args, *kwargs.values()) if not isinstance(value, _PASSED_BY_JINJA)])
        return function(*args, **kwargs)

    return counted


def _finalize(value: Any) -> Any:
    """Of every {{ ... }}, also in macros and blocks, whose text may be written out again."""
    used = meter()
    used.step()
    used.make_of(value)
    return value


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes HTML, which models have not seen."""
    if (isinstance(indent, int) and indent > INDENT_MAX) or (isinstance(indent, str) and len(indent) > INDENT_MAX):
        raise TemplateLimitError(f"it indents JSON by more than {INDENT_MAX} characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.datetime.now().strftime(date_format)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not hold a name that begins with an underscore, got {name!r}")
