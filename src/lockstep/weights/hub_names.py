"""Names of models on a Hugging Face hub, and how a hub is asked. Knows spellings only; does not know what a repository holds, files or networks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

# As the hub spells them: ASCII letters, digits, "_", "-" and "." inside; no "--" and no "..", at most 96 characters.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_VARIANT = re.compile(r"[^\s:\\]+")
REPOSITORY_LENGTH_MAX = 96
# What ends so is meant as a file, not as a repository.
FILE_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json", ".git")


@dataclass(frozen=True, slots=True)
class HubName:
    """repository: "ORG/NAME". variant: one of its GGUF models, by its number format ("Q4_K_M") or file ("x-Q4_K_M.gguf"); None if none is named."""

    repository: str
    variant: str | None = None

    def __str__(self) -> str:
        return self.repository if self.variant is None else f"{self.repository}:{self.variant}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """How a hub is asked.

    revision: a branch, tag or commit; None is the default branch. cache_folder: where downloads are kept, in huggingface_hub's layout; None is that
    library's own place (HF_HUB_CACHE, HF_HOME). token: of an account; True asks for the stored one, False sends none, None sends HF_TOKEN or the
    stored one if there is any. endpoint: the hub's address; None is HF_ENDPOINT or the public one. progress: what is downloaded is shown on standard
    error.
    """

    revision: str | None = None
    cache_folder: Path | None = None
    token: str | bool | None = field(default=None, repr=False)
    endpoint: str | None = None
    progress: bool = False


def parse_hub_name(text: str) -> HubName | None:
    """The forms ORG/NAME, ORG/NAME:VARIANT (as llama.cpp and vLLM write a number format, or with a file's name) and ORG/NAME/FILE.gguf (as vLLM
    writes a file). None for anything else."""
    repository, colon, variant = text.partition(":")
    if not colon and text.lower().endswith(".gguf") and text.count("/") >= 2:
        organisation, name, variant = text.split("/", 2)
        repository, colon = f"{organisation}/{name}", "/"
    if not _is_repository(repository) or (colon and (not _VARIANT.fullmatch(variant) or ".." in variant.split("/"))):
        return None
    return HubName(repository, variant or None)


def _is_repository(text: str) -> bool:
    return (
        len(text) <= REPOSITORY_LENGTH_MAX
        and _REPOSITORY.fullmatch(text) is not None
        and "--" not in text
        and ".." not in text
        and not text.lower().endswith(FILE_SUFFIXES)
    )
