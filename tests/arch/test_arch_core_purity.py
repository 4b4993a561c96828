"""`core` is pure: no clock, thread, logging, randomness or IO, and no order that depends on addresses or on a process's hash seed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import Module, imports, modules, parse

FORBIDDEN_MODULES = frozenset(
    [
        "time",
        "datetime",
        "threading",
        "multiprocessing",
        "asyncio",
        "logging",
        "random",
        "secrets",
        "uuid",
        "socket",
        "os",
        "io",
        "subprocess",
        "pathlib",
        "sys",
        "tempfile",
        "shutil",
    ]
)
FORBIDDEN_CALLS = frozenset(("id", "hash", "open", "print", "input", "eval", "exec"))
SETS = ("set", "frozenset")

CORE = [module for module in modules() if module.part == "core"]
NAMES = frozenset(module.name for module in modules())


def impurities(module: Module) -> Iterator[str]:
    """What in this module depends on anything but its arguments."""
    for found in imports(module, NAMES):
        if found.target.split(".")[0] in FORBIDDEN_MODULES or found.target.startswith("numpy.random"):
            yield f"{module.path}:{found.line} imports {found.target}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield f"{module.path}:{node.lineno} calls {node.func.id}()"
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.random", "numpy.random"):
            yield f"{module.path}:{node.lineno} uses {ast.unparse(node)}"
        if isinstance(node, (ast.For, ast.comprehension)) and _is_set(node.iter):
            yield f"{module.path}:{node.iter.lineno} iterates over a set: {ast.unparse(node.iter)}"
        if isinstance(node, ast.Call) and _takes_order_from(node):
            yield f"{module.path}:{node.lineno} orders by a set: {ast.unparse(node)}"
        if isinstance(node, ast.Global):
            yield f"{module.path}:{node.lineno} writes the module's own names {node.names}"


def _is_set(node: ast.expr) -> bool:
    """A set display or comprehension, set(...), or an operation on one."""
    if isinstance(node, ast.BinOp):
        return _is_set(node.left) or _is_set(node.right)
    if isinstance(node, ast.Call):
        function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        return isinstance(function, ast.Name) and function.id in SETS
    return isinstance(node, (ast.Set, ast.SetComp))


def _takes_order_from(node: ast.Call) -> bool:
    """list(set), tuple(set), enumerate(set), iter(set), np.array(list of a set): the order of a set becomes the order of a sequence."""
    return (
        isinstance(node.func, ast.Name)
        and node.func.id in ("list", "tuple", "enumerate", "iter", "zip", "map")
        and any(_is_set(arg) for arg in node.args)
    )


def test_core_has_modules() -> None:
    assert {"core.table", "core.scheduler", "core.digest"} <= {module.name for module in CORE}


@pytest.mark.parametrize("module", CORE, ids=lambda module: module.name)
def test_core_depends_on_its_arguments_alone(module: Module) -> None:
    assert list(impurities(module)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "def f():\n    from random import randrange",
        "import os.path",
        "import numpy as np\nx = np.random.default_rng()",
        "from numpy.random import default_rng",
        "def f(x):\n    return id(x)",
        "def f(x):\n    return hash(x)",
        "for x in {1, 2}:\n    pass",
        "def f(y):\n    return [x for x in set(y)]",
        "def f(y):\n    return {x: 1 for x in frozenset[int](y) | {3}}",
        "def f(y):\n    return list({x for x in y})",
        "print(1)",
        "n = 0\ndef f():\n    global n\n    n = 1",
    ],
)
def test_the_check_sees_each_kind_of_impurity(text: str) -> None:
    assert list(impurities(parse(Path("core/example.py"), text)))


@pytest.mark.parametrize("text", ["x = sorted({2, 1})", "def f(y):\n    return 3 in set(y)", "import numpy as np\nimport hashlib\nimport heapq"])
def test_the_check_lets_pure_code_pass(text: str) -> None:
    assert list(impurities(parse(Path("core/example.py"), text))) == []
