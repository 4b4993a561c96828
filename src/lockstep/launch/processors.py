"""Logits processors by name: finds the classes, makes one of each, and says which they are. Knows modules and files; not what processors do.

Every process of the engine loads them itself. What they are goes into the fingerprint and into the handshake, so that processes which found different
ones under one name do not work together.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.config import EngineConfig
from lockstep.errors import ConfigError, HandshakeError
from lockstep.launch.model import ResolvedModel
from lockstep.sampling.logits_processor import LogitsProcessor, ModelFacts
from lockstep.sampling.processor_set import ProcessorSet

AGREEMENT = "logits_processors"
"""Their name in the handshake."""


class LoadedProcessors:
    """The processors that a config names. Raises ConfigError, naming the class, for one that cannot be imported or is none."""

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        facts = ModelFacts(vocab_size=model.spec.vocab_size, eos_token_ids=model.eos_ids)
        classes = {name: _class(name) for name in map(str, config.logits_processors or ())}
        _check_owners(classes)
        self.identity = "; ".join(f"{name} {found.version} {_source_hash(name, found)}" for name, found in classes.items())
        self.processors = ProcessorSet({name: _made(name, found, facts) for name, found in classes.items()}, facts.vocab_size)

    @property
    def suffix(self) -> str:
        """Of the fingerprint: a hash of names, versions and source files; nothing where there are none."""
        return f"-lp{hashlib.blake2b(self.identity.encode(), digest_size=6).hexdigest()}" if self.identity else ""

    def check(self, agreement: Mapping[str, str]) -> None:
        """A stage's, which has loaded them too. Raises HandshakeError."""
        if agreement[AGREEMENT] != self.identity:
            raise HandshakeError(
                f"the stages found other logits processors than this process: {agreement[AGREEMENT]!r} there, {self.identity!r} here; a stage looks "
                "in PYTHONPATH and among installed packages, not in the current folder"
            )


def _class(name: str) -> type[LogitsProcessor]:
    module_name, _, qualified = name.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"logits_processors: {module_name} cannot be imported: {type(error).__name__}: {error!s:.300}; every process of the engine imports it: "
            "install it, or put its folder into PYTHONPATH"
        ) from error
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise ConfigError(f"logits_processors: {name} must be a class derived from lockstep.LogitsProcessor, got {found!r:.100}")
    arguments, version = getattr(found, "arguments", None), getattr(found, "version", None)
    if not isinstance(arguments, tuple) or not arguments or not all(isinstance(argument, str) and argument for argument in arguments):
        raise ConfigError(f"logits_processors: {name}.arguments must be a tuple of at least one name that requests may give, got {arguments!r:.100}")
    if not isinstance(version, str) or not version:
        raise ConfigError(f"logits_processors: {name}.version must be a text that is not empty, got {version!r:.100}")
    return found


def _check_owners(classes: Mapping[str, type[LogitsProcessor]]) -> None:
    owners: dict[str, str] = {}
    for name, found in classes.items():
        for argument in found.arguments:
            if owners.setdefault(argument, name) != name:
                raise ConfigError(f"logits_processors: {owners[argument]} and {name} both take the argument {argument!r}; load one of them")


def _source_hash(name: str, found: type[LogitsProcessor]) -> str:
    file = getattr(sys.modules.get(found.__module__), "__file__", None)
    try:
        data = Path(file or "").read_bytes()
    except OSError as error:
        raise ConfigError(f"logits_processors: {name} must come from a file that can be read, got {file!r}: {error.strerror}") from None
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _made(name: str, found: type[LogitsProcessor], facts: ModelFacts) -> LogitsProcessor:
    try:
        return found(facts)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"logits_processors: {name} cannot be made: {type(error).__name__}: {error!s:.300}") from error
