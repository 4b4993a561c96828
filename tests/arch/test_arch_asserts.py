"""The core checks itself: at least four checks a hundred lines of code, over the whole of it. A check is an assert or a call of an `_expect...`."""

from __future__ import annotations

import ast
import io
import tokenize

import pytest
from source_tree import Module, modules

CHECKS_LEAST = 4.0
"""Per 100 code lines."""

CORE = [module for module in modules() if module.part == "core"]
LAYOUT_TOKENS = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_line_count(module: Module) -> int:
    """Lines that are not blank, comment or a string that stands alone (docstrings)."""
    strings = [node for node in ast.walk(module.tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    outside = {line for node in strings if isinstance(node.value.value, str) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in LAYOUT_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - outside)


def check_count(module: Module) -> int:
    """Assert statements and calls of the table's checks."""
    called = [node.func for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    names = [function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "") for function in called]
    return sum(isinstance(node, ast.Assert) for node in ast.walk(module.tree)) + sum(name.startswith("_expect") for name in names)


def test_core_checks_itself(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {module.name: code_line_count(module) for module in CORE}
    checks = {module.name: check_count(module) for module in CORE}
    figure = 100 * sum(checks.values()) / sum(lines.values())
    with capsys.disabled():
        print(f"\ncore: {sum(checks.values())} checks in {sum(lines.values())} code lines, {figure:.1f} per 100")
    assert figure >= CHECKS_LEAST, {name: (checks[name], lines[name]) for name in lines}


def test_lines_and_checks_are_counted_as_said() -> None:
    head = '"""One.\n\nTwo."""\n\nimport os  # a comment\n# another\n\n'
    text = head + 'def f(x):\n    """Three."""\n    assert x, (\n        x,\n    )\n    f._expect(x)\n'
    module = Module("core.example", False, CORE[0].path, text, ast.parse(text))
    assert (code_line_count(module), check_count(module)) == (6, 2)
