"""Which files of a repository make up a model. Knows file names and what our readers read; does not know hubs, networks or what is in a file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from lockstep.errors import CheckpointError
from lockstep.weights.folder import IDENTITY_FILES, INDEX_NAME
from lockstep.weights.hub_names import HubName

# Formats that are loaded by running what is in them.
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# GGUF files that are no language model: the image side of one, and statistics that quantisers use.
_BESIDE_MODELS = re.compile(r"(^|[-._/])(mmproj|imatrix)([-._/]|$)", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_TEMPLATE = re.compile(r"additional_chat_templates/[^/]+\.jinja")
# How a quantiser names a number format: Q4_K_M, IQ4_XS, UD-Q4_K_XL, BF16, MXFP4, ...
_FORMAT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d+(?:_[0-9A-Z]+)*|TQ\d_\d|B?F16|F32|MXFP4(?:_MOE)?))(?=$|[-./])", re.IGNORECASE)
LISTED_MAX = 40


def is_folder_model(names: Collection[str]) -> bool:
    """The repository holds a model as config.json and safetensors."""
    return "config.json" in names and any("/" not in name and name.endswith(".safetensors") for name in names)


def small_files(names: Collection[str], *, tokenizer_only: bool = False) -> list[str]:
    """What a folder's readers read beside the weights; the index of the weights' files is among them. tokenizer_only: no configs and no index."""
    wanted = {*IDENTITY_FILES} - {"config.json", "generation_config.json"} if tokenizer_only else {*IDENTITY_FILES, INDEX_NAME}
    return sorted(name for name in names if name in wanted or _TEMPLATE.fullmatch(name))


def whole_weights(names: Collection[str], label: str) -> str:
    """The safetensors file of a repository without an index. label: names the repository in the error. Raises CheckpointError."""
    files = sorted(name for name in names if "/" not in name and name.endswith(".safetensors"))
    if "model.safetensors" in files:
        return "model.safetensors"
    if len(files) == 1:
        return files[0]
    raise CheckpointError(f"{label}: expected model.safetensors or {INDEX_NAME}, found {listed(files)}; the repository is incomplete or no model")


def gguf_models(names: Collection[str]) -> dict[str, list[str]]:
    """The repository's GGUF models: name without ".gguf" and part number -> its files, one or all parts in order."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _BESIDE_MODELS.search(name):
            models.setdefault(_PART.sub("", name[: -len(".gguf")]), []).append(name)
    return models


def choose_gguf(names: Collection[str], hub_name: HubName, label: str) -> list[str]:
    """The files of the one model that the variant names, or of the only one if it names none; several are parts of a split file, in order.
    Raises CheckpointError that lists what there is where that is no model or more than one, or where a part is missing."""
    models, variant = gguf_models(names), hub_name.variant
    if variant is None:
        found = [*models]
        if len(found) > 1:
            suggested = f"{hub_name.repository}:{_spelling(found[0], models)}"
            raise CheckpointError(f"{label}: holds {len(found)} GGUF models; name one, such as {suggested}; there are {_first_files(models)}")
        if not found:
            raise CheckpointError(f"{label}: {_what_instead(names)}")
    elif variant.lower().endswith(".gguf"):
        if variant not in names:
            raise CheckpointError(f"{label}: has no file {variant!r}; there are {_first_files(models)}")
        if not _PART.search(variant[: -len(".gguf")]):
            return [variant]
        found = [_PART.sub("", variant[: -len(".gguf")])]
    else:
        found = matching(variant, models)
        if len(found) != 1:
            which = {name: models[name] for name in found} or models
            how_many = f"{len(found)} GGUF models" if found else "no GGUF model"
            raise CheckpointError(f"{label}: has {how_many} in {variant!r}; name one by its file; there are {_first_files(which)}")
    return _all_parts(models[found[0]], label)


def refuse_pickle(name: str, label: str) -> None:
    """Raises CheckpointError if the named file is in a format that runs code when it is loaded."""
    if name.lower().endswith(PICKLE_SUFFIXES):
        raise CheckpointError(f"{label}: {name} is a pickle, which can run code when it is loaded; {_SAFE_FORMS}")


def matching(variant: str, models: Collection[str]) -> list[str]:
    """Models whose name holds the number format as a word, in any case of letters: at the end if there are such, else anywhere."""
    word = re.escape(variant)
    for pattern in (rf"(^|[-._/]){word}$", rf"(^|[-._/]){word}(?=[-./])"):
        found = sorted(name for name in models if re.search(pattern, name, re.IGNORECASE))
        if found:
            return found
    return []


def listed(names: Sequence[str]) -> str:
    """Names as a user may read them; the rest of a long list is counted."""
    rest = f" and {len(names) - LISTED_MAX} more" if len(names) > LISTED_MAX else ""
    return ", ".join(sorted(names)[:LISTED_MAX]) + rest


_SAFE_FORMS = "Lockstep reads safetensors and GGUF: use a revision or repository that has them, or convert the files"


def _what_instead(names: Collection[str]) -> str:
    """Why a repository is no model for us."""
    pickles = sorted(name for name in names if name.lower().endswith(PICKLE_SUFFIXES))
    if pickles:
        return f"holds its weights as pickle only ({listed(pickles)}), which can run code when it is loaded; {_SAFE_FORMS}"
    return f"expected config.json with *.safetensors, or a .gguf file; found {listed([*names]) or 'nothing'}; name a repository that holds a model"


def _spelling(model: str, models: Mapping[str, Sequence[str]]) -> str:
    """How a user may write one of the models: by its number format where that tells it from the others, else by its file."""
    formats = [name for name in _FORMAT.findall(model) if matching(name, models) == [model]]
    return str(formats[-1]) if formats else models[model][0]


def _first_files(models: Mapping[str, Sequence[str]]) -> str:
    """The models by the files that a user may name."""
    return listed([files[0] for files in models.values()]) or "no GGUF files"


def _all_parts(files: list[str], label: str) -> list[str]:
    match = _PART.search(files[0][: -len(".gguf")])
    if match is None:
        return files
    stem, count = files[0][: match.start()], int(match[2])
    wanted = [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = sorted({*wanted} - {*files})
    if missing:
        raise CheckpointError(f"{label}: {stem} is split into {count} files, of which {listed(missing)} are missing; the repository is incomplete")
    return wanted
