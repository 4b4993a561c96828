"""Who may import whom: DESIGN.md's table as data, held against every import in the source, lazy ones too."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from source_tree import Import, Module, imports, modules, parse


@dataclass(frozen=True, slots=True)
class Allowance:
    """ours: packages ('core') or single modules ('core.params'); a package's own modules are always allowed. third_party: top-level names."""

    ours: tuple[str, ...] = ()
    third_party: tuple[str, ...] = ()


TABLE: dict[str, Allowance] = {
    "": Allowance(("llm", "async_llm", "core.params", "sampling.logits_processor")),
    "errors": Allowance(),
    "vllm_settings": Allowance(("errors",)),
    "config": Allowance(("errors",)),
    "core": Allowance(("errors", "config"), ("numpy",)),
    "sim": Allowance(("core", "ops.step", "sampling", "errors", "config", "runtime"), ("numpy",)),
    "ops": Allowance(("errors",), ("numpy",)),
    "backends": Allowance(("ops", "errors"), ("numpy",)),
    "models": Allowance(("ops", "errors"), ("numpy",)),
    "weights": Allowance(("models.spec", "ops", "errors"), ("numpy", "safetensors", "gguf", "huggingface_hub", "tqdm")),
    "sampling": Allowance(("ops", "core.params", "core.shaping", "errors"), ("numpy", "llguidance")),
    "spec": Allowance(("models", "sampling", "ops", "core", "errors"), ("numpy",)),
    "disagg": Allowance(("core", "errors"), ("numpy", "zmq")),
    "telemetry": Allowance(("core", "errors"), ("prometheus_client", "opentelemetry")),
    "runtime": Allowance(
        ("core", "ops", "models", "weights", "sampling", "spec", "disagg", "telemetry", "config", "errors"),
        ("numpy", "zmq", "msgspec"),
    ),
    "text": Allowance(("errors",), ("tokenizers", "jinja2")),
    "server": Allowance(("core.params", "core.outputs", "text", "telemetry", "config", "errors"), ("starlette", "uvicorn", "msgspec")),
    "launch": Allowance(
        ("backends", "config", "core", "errors", "models", "ops", "runtime", "sampling", "server", "spec", "telemetry", "text", "weights", "disagg"),
        ("numpy", "psutil"),
    ),
    "verify": Allowance(("launch", "runtime", "models", "text", "core", "config", "errors"), ("numpy",)),
    "llm": Allowance(("launch", "runtime", "text", "core", "vllm_settings", "config", "errors")),
    "async_llm": Allowance(("llm", "launch", "runtime", "text", "core", "config", "errors")),
    "cli": Allowance(
        (
            *("launch", "llm", "async_llm", "vllm_settings", "verify", "sim", "server.settings"),
            *("core.params", "runtime.recording", "runtime.retrace", "config", "errors"),
        ),
        ("yaml", "rich", "uvloop"),
    ),
}
"""The package itself is ''. `launch` is the composition root."""

TORCH_ONLY_IN = ("backends.reference", "backends.triton")

ALL_MODULES = modules()
NAMES = frozenset(module.name for module in ALL_MODULES)


def _within(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def refusal(module: Module, found: Import) -> str | None:
    """Why this import breaks the table, or None."""
    allowance, top = TABLE[module.part], found.target.split(".")[0]
    where = f"{module.path}:{found.line} imports {found.target}"
    if top == "lockstep":
        target = found.target.removeprefix("lockstep").lstrip(".")
        if target == "" or target.split(".")[0] == module.part or _within(target, allowance.ours):
            return None
        return f"{where}; {module.part or 'lockstep/__init__'} may import {allowance.ours}"
    if top in sys.stdlib_module_names or top in allowance.third_party:
        return None
    if top == "torch" and _within(module.name, TORCH_ONLY_IN):
        return None
    return f"{where}; {module.part or 'lockstep/__init__'} may use {allowance.third_party}"


def refusals(module: Module) -> list[str]:
    return [reason for found in imports(module, NAMES) if (reason := refusal(module, found)) is not None]


@pytest.mark.parametrize("part", sorted({module.part for module in ALL_MODULES}))
def test_imports_point_downwards_only(part: str) -> None:
    assert part in TABLE, f"{part} is a new package; say in the table what it may import"
    assert [reason for module in ALL_MODULES if module.part == part for reason in refusals(module)] == []


def test_only_the_root_module_takes_names_from_the_root() -> None:
    """`from lockstep import LLM` inside the package would load everything by the back door; `__version__` is the one name that is free."""
    wrong = []
    for module in ALL_MODULES:
        for line in module.text.splitlines():
            if line.strip().startswith("from lockstep import ") and module.name:
                taken = {name.strip() for name in line.split(" import ")[1].split(",")}
                if taken - {"__version__"} - NAMES:
                    wrong.append(f"{module.path}: {line.strip()}")
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "text", "refused"),
    [
        ("core/pool.py", "def f():\n    import torch", True),
        ("core/pool.py", "from lockstep.runtime import driver", True),
        ("core/pool.py", "from ..runtime.driver import Driver", True),
        ("core/pool.py", "from . import table", False),
        ("core/pool.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lockstep.runtime import driver", False),
        ("core/pool.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import zmq", True),
        ("runtime/engine.py", "class A:\n    def f(self):\n        from lockstep.launch import engine", True),
        ("runtime/engine.py", "import lockstep.backends.native", True),
        ("server/app.py", "from lockstep.runtime.client import AsyncClient", True),
        ("server/app.py", "from lockstep.core.scheduler import Scheduler", True),
        ("server/app.py", "from lockstep.core.params import SamplingParams", False),
        ("backends/native/backend.py", "import torch", True),
        ("backends/reference/backend.py", "import torch.nn.functional", False),
        ("models/llama.py", "from lockstep.backends.native import NativeBackend", True),
        ("__init__.py", "def f():\n    from lockstep import llm", False),
        ("__init__.py", "def f():\n    from lockstep import launch", True),
    ],
)
def test_the_check_sees_lazy_relative_and_hidden_imports(path: str, text: str, refused: bool) -> None:
    assert bool(refusals(parse(Path(path), text))) is refused
