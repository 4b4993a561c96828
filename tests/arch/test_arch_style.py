"""House rules that a reader can check by eye and a test can check every time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import Module, modules, parse

LINES_MAX = 500
ANNOTATED = ("core", "ops", "runtime")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
VAGUE_FILES = frozenset(("utils", "util", "common", "misc", "base", "helpers"))
VAGUE_CLASS = re.compile(r"(Manager|Handler|Mixin|Helper|Utils)$")
ENVIRONMENT = re.compile(r"\bos\.(environ|getenv)\b")

ALL_MODULES = modules()


def unannotated(module: Module) -> Iterator[str]:
    """Public functions and methods with a parameter or a result that has no type."""
    classes = [node for node in module.tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    owners: list[ast.Module | ast.ClassDef] = [module.tree, *classes]
    for owner in owners:
        for node in owner.body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (node.name.startswith("_") and not node.name.startswith("__")):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *filter(None, (node.args.vararg, node.args.kwarg))]
            static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
            bound = 1 if isinstance(owner, ast.ClassDef) and not static else 0
            bare = [argument.arg for argument in given[bound:] if argument.annotation is None]
            if bare or node.returns is None:
                yield f"{module.path}:{node.lineno} {node.name}: {bare or 'result'}"


@pytest.mark.parametrize("module", ALL_MODULES, ids=lambda module: module.name or "lockstep")
def test_module_keeps_the_house_rules(module: Module) -> None:
    lines = module.text.splitlines()
    assert len(lines) <= LINES_MAX, f"{module.path} has {len(lines)} lines; look for two ideas in it"
    assert ast.get_docstring(module.tree) or not module.text.strip(), f"{module.path} does not say what it knows"
    assert [f"{module.path}:{i + 1} {line.strip()}" for i, line in enumerate(lines) if UNFINISHED.search(line)] == []
    assert module.path.stem not in VAGUE_FILES
    classes = [node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    assert [name for name in classes if VAGUE_CLASS.search(name)] == []
    assert [node.lineno for node in ast.walk(module.tree) if isinstance(node, ast.Global)] == [], f"{module.path} writes its own module's names"
    if module.part != "cli":
        assert not ENVIRONMENT.search(module.text), f"{module.path} reads the environment; only cli may"


@pytest.mark.parametrize("module", [m for m in ALL_MODULES if m.part in ANNOTATED], ids=lambda module: module.name)
def test_public_functions_are_annotated(module: Module) -> None:
    assert list(unannotated(module)) == []


def test_typical_file_is_short() -> None:
    lengths = sorted(len(module.text.splitlines()) for module in ALL_MODULES if module.text.strip())
    assert lengths[len(lengths) // 2] < 150, f"the median file has {lengths[len(lengths) // 2]} lines"


@pytest.mark.parametrize(
    "text",
    [
        "def f(x) -> int:\n    return x",
        "def f(x: int):\n    return x",
        "class A:\n    def f(self, x) -> None: ...",
        "class A:\n    @staticmethod\n    def f(x) -> None: ...",
    ],
)
def test_the_check_sees_missing_annotations(text: str) -> None:
    assert list(unannotated(parse(Path("core/example.py"), text)))
