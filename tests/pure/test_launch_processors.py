"""Logits processors by name: what a config takes for one, what is refused and how, and what tells one from another."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import logits_plugins
from lockstep.config import EngineConfig
from lockstep.errors import ConfigError, HandshakeError
from lockstep.launch.processors import AGREEMENT, LoadedProcessors

MODEL: Any = SimpleNamespace(spec=SimpleNamespace(vocab_size=70), eos_ids=(9,))


def loaded(*names: str) -> LoadedProcessors:
    return LoadedProcessors(EngineConfig(model="m", logits_processors=names), MODEL)


def test_a_class_becomes_its_name_and_survives_the_way_to_a_stage() -> None:
    config = EngineConfig(model="m", logits_processors=[logits_plugins.NoRepeat, "logits_plugins:Drift"])
    assert config.logits_processors == ("logits_plugins:NoRepeat", "logits_plugins:Drift")
    assert EngineConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert EngineConfig(model="m", logits_processors=None).logits_processors == ()


def test_what_has_no_name_to_be_imported_by_is_refused() -> None:
    class Local(logits_plugins.NoRepeat):
        pass

    in_main = type("InMain", (logits_plugins.NoRepeat,), {"__module__": "__main__", "__qualname__": "InMain"})
    for given, words in (
        ([Local], "cannot be imported by that name, as each stage's process has to"),
        ([in_main], "__main__:InMain cannot be imported by that name"),
        ([lambda ids, logits: logits], "must be classes that can be imported, got <function"),
        ([logits_plugins.NoRepeat.edit], "must be classes that can be imported"),
        (["logits_plugins"], "must be named module:Class, got 'logits_plugins'"),
        (["logits_plugins:"], "must be named module:Class"),
        (["a b:C"], "must be named module:Class"),
        ("logits_plugins:NoRepeat", "must be a list of classes"),
        (["logits_plugins:Drift", logits_plugins.Drift], "must be different classes"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineConfig(model="m", logits_processors=given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["no_such_module:X"], r"no_such_module cannot be imported: ModuleNotFoundError.*PYTHONPATH"),
        (["logits_plugins:Nowhere"], r"logits_plugins:Nowhere must be a class derived from lockstep.LogitsProcessor, got None"),
        (["logits_plugins:NOT_A_CLASS"], "must be a class derived from"),
        (["logits_plugins:Underived"], "must be a class derived from"),
        (["logits_plugins:Unversioned"], "Unversioned.version must be a text"),
        (["logits_plugins:Nameless"], "Nameless.arguments must be a tuple of at least one name"),
        (["logits_plugins:Drift", "logits_plugins:Rival"], r"logits_plugins:Drift and logits_plugins:Rival both take the argument 'drift'"),
        (["logits_plugins:Unmakeable"], "Unmakeable cannot be made: OSError: its file is not there"),
    ],
)
def test_what_cannot_be_loaded_is_named(names: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loaded(*names)


def test_a_module_that_fails_or_exits_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, text, words in (("raising_plugin", "1 / 0", "ZeroDivisionError"), ("exiting_plugin", "raise SystemExit(5)", "SystemExit: 5")):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(ConfigError, match=f"{name} cannot be imported: {words}"):
            loaded(f"{name}:X")


def test_identity_has_name_version_source_and_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = "from logits_plugins import Drift\nclass P(Drift):\n    version = '1'\nclass Q(P):\n    arguments = ('q',)\n"
    found = []
    for changed, names in (
        (text, ["P"]),
        (text.replace("'1'", "'2'"), ["P"]),
        (text + "# another\n", ["P"]),
        (text, ["Q"]),
        (text, ["P", "Q"]),
        (text, ["Q", "P"]),
        (text, ["P"]),
    ):
        (tmp_path / "changing_plugin.py").write_text(changed)
        monkeypatch.delitem(sys.modules, "changing_plugin", raising=False)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        found.append(loaded(*(f"changing_plugin:{name}" for name in names)))
    monkeypatch.delitem(sys.modules, "changing_plugin")
    assert found[0].identity.startswith("changing_plugin:P 1 ")
    assert found[0].suffix == found[-1].suffix != ""
    assert len({one.suffix for one in found[:-1]}) == len(found) - 1
    assert loaded().suffix == ""
    found[0].check({AGREEMENT: found[-1].identity})
    with pytest.raises(HandshakeError, match="found other logits processors than this process: 'changing_plugin:P 2 "):
        found[0].check({AGREEMENT: found[1].identity})
