"""One model in several GGUF files, as llama.cpp splits them: "name-00001-of-00003.gguf" and its siblings. Knows how parts name and number
themselves; does not know what a model is.

The first part has the model's metadata; every part has split.no (from 0 on), split.count and split.tensors.count (tensors of all parts together).
A part of another model with the same split and the same tensors cannot be told by its header: that is what the fingerprint is for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.weights.gguf_file import GgufFile, GgufTensor, Metadata, open_gguf

PART_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_NUMBER, _COUNT, _TENSOR_COUNT = "split.no", "split.count", "split.tensors.count"
NAMES_SHOWN_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufParts:
    """The files of one model as if they were one; there is at least one. tensors: of all files, in the files' order."""

    files: tuple[GgufFile, ...]
    tensors: Mapping[str, GgufTensor]

    @property
    def path(self) -> Path:
        """The first file's, by which the model is named."""
        return self.files[0].path

    @property
    def metadata(self) -> Metadata:
        return self.files[0].metadata

    def contents(self) -> dict[str, memoryview]:
        """All bytes of the files, under labels that give their order and nothing of their names."""
        if len(self.files) == 1:
            return {"gguf": self.files[0].data}
        return {f"gguf {index + 1:05} of {len(self.files):05}": file.data for index, file in enumerate(self.files)}


def first_part_in(folder: Path) -> Path | None:
    """The first part of the split model that `folder` holds; None if it holds another kind of model, or none.

    Raises CheckpointError if there are parts of a split model and other GGUF files beside them, which leaves open what is meant.
    """
    names = sorted(file.name for file in folder.glob("*.gguf"))
    parts = [part for name in names if (part := PART_NAME.fullmatch(name)) is not None]
    if not parts or (folder / "config.json").exists():
        return None
    if len(parts) != len(names) or len({(part["prefix"], part["count"]) for part in parts}) != 1:
        raise CheckpointError(
            f"{folder}: expected just the parts of one split GGUF model, found {_listed(names)}; name the model's first file instead of the folder"
        )
    paths = _part_paths(folder / names[0])
    _check_presence(paths)
    return paths[0]


def open_parts(path: Path) -> GgufParts:
    """The headers of the GGUF file `path`, and of its siblings if it is the first part of a split model.

    Raises CheckpointError if a part is missing, is another one than its name says, or does not fit the first; and what `open_gguf` raises.
    """
    first = open_gguf(path)
    count = _integer(first, _COUNT, 1)
    named = PART_NAME.fullmatch(path.name)
    if count <= 1 and (named is None or int(named["count"]) <= 1):
        return GgufParts(files=(first,), tensors=first.tensors)
    if named is None:
        _fail(
            path, f"is part {_integer(first, _NUMBER) + 1} of {count} of a model; its name must end in -00001-of-{count:05}.gguf, as its siblings' do"
        )
    if int(named["count"]) != count:
        _fail(path, f"is named as one of {int(named['count'])} parts, but says that it is one of {count}; give the file its own name back")
    paths = _part_paths(path)
    if path != paths[0]:
        raise CheckpointError(f"{path}: is part {int(named['number'])} of {count}; name the first one: {paths[0]}")
    _check_presence(paths)
    return _join([first, *map(open_gguf, paths[1:])])


def _join(files: list[GgufFile]) -> GgufParts:
    """Checks each part against its place and the first part. Raises CheckpointError or UnsupportedError."""
    first = files[0]
    tensors: dict[str, GgufTensor] = {}
    holder: dict[str, str] = {}
    for index, file in enumerate(files):
        number = _integer(file, _NUMBER)
        if number != index:
            _fail(file.path, f"says that it is part {number + 1}, but its name says part {index + 1}; parts were renamed or copied over each other")
        for key in (_COUNT, _TENSOR_COUNT):
            if _integer(file, key) != _integer(first, key):
                _fail(file.path, f"has {key} {_integer(file, key)}, {first.path.name} has {_integer(first, key)}; they are of two different splits")
        for key in file.metadata:
            if key != _NUMBER and key in first.metadata and not _same(file.metadata[key], first.metadata[key]):
                _fail(file.path, f"has another {key} than {first.path.name}; they are of two different models")
        if file.alignment != first.alignment:
            raise UnsupportedError(
                f"{file.path}: its alignment is {file.alignment}, that of {first.path.name} is {first.alignment}; parts with different alignments "
                f"are not supported: join them (llama-gguf-split --merge)"
            )
        for name, tensor in file.tensors.items():
            if name in tensors:
                _fail(file.path, f"has tensor {name!r}, which {holder[name]} has too; a part is of another model or split")
            tensors[name], holder[name] = tensor, file.path.name
    expected = _integer(first, _TENSOR_COUNT)
    if len(tensors) != expected:
        _fail(first.path, f"says that the parts hold {expected} tensors together, they hold {len(tensors)}; a part is of another model or split")
    return GgufParts(files=tuple(files), tensors=tensors)


def _part_paths(path: Path) -> list[Path]:
    """All parts' paths by the name of one of them, in order; `path` must be named as a part."""
    named = PART_NAME.fullmatch(path.name)
    assert named is not None, path
    count = int(named["count"])
    return [path.with_name(f"{named['prefix']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def _check_presence(paths: list[Path]) -> None:
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(f"{paths[0]}: of its {len(paths)} parts {len(missing)} are missing beside it: {_listed(missing)}; download them too")


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or not 0 <= value < 1 << 31:
        found = "is missing" if value is None else f"is {value!r:.200}"
        _fail(file.path, f"{key} {found}; a count was expected")
    return value


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(np.array_equal(one, other))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else "")


def _fail(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"{path}: {what}; copy or download the files again")
