"""`ProcessorSet`: an engine's logits processors. Says which of them a request asks, and asks them; what they answer is checked before it is used.

Knows processors by name and arguments as JSON; does not know where they come from, nor requests, steps or slots.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import InvalidRequestError, PluginError
from lockstep.ops.step import F32, I32, U32
from lockstep.sampling.logits_processor import BIAS_MOST, LogitsEdit, LogitsProcessor

_NO_IDS, _NO_VALUES = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedEdit:
    """mask: as `LogitEdits` has them, None where every id may come. ids: an id may be there several times; biases: one each."""

    mask: U32 | None
    ids: I32
    biases: F32


class ProcessorSet:
    """processors: by name, in the order in which they are asked; no two take the same argument."""

    def __init__(self, processors: Mapping[str, LogitsProcessor], vocab_size: int) -> None:
        self._processors = dict(processors)
        self._vocab_size = vocab_size

    def arguments_of(self, extra_args: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
        """(name, its arguments as JSON) of each processor that a request with these asks. Raises InvalidRequestError if there is one that none takes,
        or that one refuses; PluginError if one fails."""
        given = extra_args or {}
        taken = {name for processor in self._processors.values() for name in processor.arguments}
        unknown = [name for name in given if name not in taken]
        if unknown:
            raise InvalidRequestError(f"extra_args: no logits processor takes {', '.join(map(repr, unknown))}; {self._loaded()}", param="extra_args")
        asked = []
        for name, processor in self._processors.items():
            own = {argument: given[argument] for argument in sorted(processor.arguments) if argument in given}
            if own:
                asked.append((name, json.dumps(own, allow_nan=False, separators=(",", ":"))))
                _validate(name, processor, asked[-1][1])
        return tuple(asked)

    def _loaded(self) -> str:
        named = [f"{name} (takes {', '.join(processor.arguments)})" for name, processor in self._processors.items()]
        return f"loaded are {'; '.join(named)}" if named else "none is loaded; start the engine with --logits-processors MODULE:CLASS"

    def edit(self, asked: Sequence[tuple[str, str]], prompt: I32, output: I32) -> CheckedEdit:
        """What they change together at the position behind prompt and output. asked: as `arguments_of` returned it. Raises PluginError."""
        mask: NDArray[np.bool_] | None = None
        ids, biases = [_NO_IDS], [_NO_VALUES]
        for name, arguments in asked:
            processor = self._processors.get(name)
            if processor is None:
                raise PluginError(f"logits processor {name} is not loaded in the process that samples")
            try:
                found = processor.edit(json.loads(arguments), _read_only(prompt), _read_only(output))
                mask = _narrowed(mask, found, self._vocab_size)
                if found is not None and len(found.biases):
                    ids.append(_ids("biases", list(found.biases), self._vocab_size))
                    biases.append(_biases(found.biases))
            except (Exception, SystemExit) as error:  # whatever a plugin does is its request's end, and nobody else's
                raise PluginError(_words(name, error)) from error
        packed = None if mask is None else _packed(mask)
        return CheckedEdit(mask=packed, ids=np.concatenate(ids), biases=np.concatenate(biases))


def _validate(name: str, processor: LogitsProcessor, arguments: str) -> None:
    try:
        processor.validate(json.loads(arguments))
    except ValueError as error:
        raise InvalidRequestError(f"extra_args: {name} refuses {arguments:.200}: {_text(error)}", param="extra_args") from None
    except (Exception, SystemExit) as error:
        raise PluginError(_words(name, error)) from error


def _words(name: str, error: BaseException) -> str:
    """Says also where it failed, if that was not here."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" ({PurePath(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"logits processor {name} failed with {type(error).__name__}: {_text(error)}{where}"


def _text(error: BaseException) -> str:
    """What it says, in letters that can be sent."""
    try:
        return str(error)[:300].encode(errors="backslashreplace").decode()
    except Exception:
        return "it cannot say why"


def _narrowed(mask: NDArray[np.bool_] | None, found: LogitsEdit | None, vocab_size: int) -> NDArray[np.bool_] | None:
    """mask: ids that may come, None for all. Raises TypeError or ValueError for an edit that is none."""
    if found is None:
        return mask
    if not isinstance(found, LogitsEdit) or not isinstance(found.biases, Mapping):
        raise TypeError(f"edit() must return a LogitsEdit with a mapping of biases, or None, got {found!r:.100}")
    if found.allowed is not None:
        allowed = _allowed(found.allowed, vocab_size)
        mask = allowed if mask is None else mask & allowed
    forbidden = _ids("forbidden", found.forbidden, vocab_size)
    if len(forbidden):
        mask = np.ones(vocab_size, np.bool_) if mask is None else mask
        mask[forbidden] = False
    return mask


def _allowed(given: Collection[int] | NDArray[Any], vocab_size: int) -> NDArray[np.bool_]:
    """A mask of its own. Raises TypeError or ValueError."""
    if isinstance(given, np.ndarray) and given.dtype == np.bool_:
        if given.shape != (vocab_size,):
            raise ValueError(f"allowed as a boolean array must have the shape ({vocab_size},), got {given.shape}")
        return given.copy()
    mask = np.zeros(vocab_size, np.bool_)
    mask[_ids("allowed", given, vocab_size)] = True
    return mask


def _ids(name: str, given: Collection[int] | NDArray[np.integer[Any]], vocab_size: int) -> I32:
    """Raises TypeError or ValueError."""
    ids = np.asarray(sorted(given) if isinstance(given, (set, frozenset)) else given)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise TypeError(f"{name} must be token ids, integers, got {given!r:.100}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"{name} must be token ids from 0 to {vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}")
    return ids.astype(np.int32)


def _biases(given: Mapping[int, float]) -> F32:
    """Raises TypeError or ValueError."""
    values = np.asarray(list(given.values()))
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise TypeError(f"biases must be numbers, got {given!r:.100}")
    if not (np.abs(values.astype(np.float64)) <= BIAS_MOST).all():
        raise ValueError(f"biases must be finite and from {-BIAS_MOST:g} to {BIAS_MOST:g}, got {given!r:.100}; to forbid an id name it in forbidden")
    return values.astype(np.float32)


def _packed(mask: NDArray[np.bool_]) -> U32:
    words = np.zeros(-(-len(mask) // 32) * 4, np.uint8)
    packed = np.packbits(mask, bitorder="little")
    words[: len(packed)] = packed
    found: U32 = words.view(np.uint32)
    return found


def _read_only(ids: I32) -> I32:
    """A view of its own, so that nobody can make the engine's array writable by it."""
    view = ids.view()
    view.flags.writeable = False
    return view
