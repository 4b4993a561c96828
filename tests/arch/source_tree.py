"""Reads the source of `lockstep` as syntax trees. Knows files, modules and imports; does not import what it reads, and judges nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "lockstep"


@dataclass(frozen=True, slots=True)
class Module:
    """name: dotted, without the leading 'lockstep' ('' is the package itself). is_package: the file is an __init__."""

    name: str
    is_package: bool
    path: Path
    text: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The package or top-level module that it belongs to: 'core', 'errors', '' for lockstep/__init__."""
        return self.name.split(".")[0]


@dataclass(frozen=True, slots=True)
class Import:
    """target: the dotted module, ours with its 'lockstep' in front. line: where it stands. lazy: inside a function or method."""

    target: str
    line: int
    lazy: bool


def modules() -> list[Module]:
    """Every module of the package, by name."""
    return [parse(path.relative_to(SOURCE), path.read_text()) for path in sorted(SOURCE.rglob("*.py"))]


def parse(path: Path, text: str) -> Module:
    """path: relative to the package."""
    parts = path.with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return Module(".".join(parts[:-1] if is_package else parts), is_package, path, text, ast.parse(text))


def imports(module: Module, module_names: frozenset[str]) -> Iterator[Import]:
    """Every import that may run, wherever it stands; those for type checkers alone are left out.
    module_names: of all modules, as in `Module.name`, to tell `from lockstep.core import table` from `from lockstep.core.types import I32`."""
    for node, lazy in _import_nodes(module.tree, lazy=False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
            continue
        base = _base(module, node)
        for alias in node.names:
            submodule = f"{base}.{alias.name}"
            yield Import(submodule if submodule.removeprefix("lockstep.") in module_names else base, node.lineno, lazy)


def _base(module: Module, node: ast.ImportFrom) -> str:
    """The absolute module that `from ... import` names."""
    if node.level == 0:
        return node.module or ""
    package = ("lockstep", *(part for part in module.name.split(".") if part))
    up = node.level - (1 if module.is_package else 0)
    return ".".join((*package[: len(package) - up], *((node.module,) if node.module else ())))


def _import_nodes(node: ast.AST, *, lazy: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements at and below a node, and whether a function stands around them."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node, lazy
        return
    below: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        below = list(node.orelse)
    lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in below:
        yield from _import_nodes(child, lazy=lazy)
