"""Messages to bytes and back: msgpack with arrays as (dtype, shape, bytes), checked against the message's declared types when decoded.

Large tensors of activations travel beside the body, untouched (`frames`). Nothing is ever unpickled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from lockstep.core.records import StepPlan, StepResult
from lockstep.errors import LinkError
from lockstep.runtime.messages import (
    Activations,
    ColumnsRequest,
    GrammarReport,
    GrammarRequest,
    Heartbeat,
    ImportReport,
    KVPart,
    KVPull,
    StageFailure,
    StageHello,
    StageReady,
    StageStart,
    StepColumns,
    WeightsReport,
    WeightsRequest,
)

VERSION = 6
"""Of the wire format; part of the handshake."""

MESSAGES: tuple[type[Any], ...] = (
    StepPlan,
    StepResult,
    Activations,
    StageHello,
    StageStart,
    StageReady,
    Heartbeat,
    StageFailure,
    ColumnsRequest,
    StepColumns,
    KVPull,
    KVPart,
    ImportReport,
    GrammarRequest,
    GrammarReport,
    WeightsRequest,
    WeightsReport,
)
"""A message's kind on the wire is its place here."""

KIND_OF: dict[type[Any], int] = {message: kind for kind, message in enumerate(MESSAGES)}

DTYPES = frozenset({"<i4", "<i8", "<u8", "<f4", "|u1"})


def array_parts(array: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...], memoryview]:
    if array.dtype.str not in DTYPES:
        raise TypeError(f"arrays of {array.dtype} are not sent; known are {sorted(DTYPES)}")
    return array.dtype.str, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def array_from_parts(dtype: str, shape: tuple[int, ...], data: Any) -> np.ndarray[Any, Any]:
    """A read-only array over `data`. Raises ValueError if the parts do not fit together."""
    if dtype not in DTYPES:
        raise ValueError(f"array of dtype {dtype!r}; known are {sorted(DTYPES)}")
    array = np.frombuffer(data, dtype)
    array.flags.writeable = False
    return array.reshape(shape)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return array_parts(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _decode_array(wanted: Any, value: Any) -> Any:
    if (get_origin(wanted) or wanted) is not np.ndarray:
        raise ValueError(f"{wanted} cannot be received")
    dtype, shape, data = value
    array = array_from_parts(dtype, tuple(shape), data)
    declared = _declared_dtype(wanted)
    if declared is not None and array.dtype != declared:
        raise ValueError(f"an array of {array.dtype} where {declared} is declared")
    return array


@functools.cache
def _declared_dtype(wanted: Any) -> np.dtype[Any] | None:
    """Of an annotation NDArray[T]; None where T is left open."""
    scalar = next(iter(get_args(get_args(wanted)[1])), None)
    return np.dtype(scalar) if isinstance(scalar, type) and issubclass(scalar, np.generic) else None


class Codec:
    """Encoders and decoders for every kind of message. Not shared between threads. messages: the kinds; each has its place there for a number."""

    def __init__(self, messages: Sequence[type[Any]] = MESSAGES) -> None:
        self._messages = tuple(messages)
        self._kinds = {message: kind for kind, message in enumerate(messages)}
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
        self._decoders = [msgspec.msgpack.Decoder(message, dec_hook=_decode_array) for message in messages]

    def encode(self, message: Any) -> tuple[int, bytes]:
        """(kind, body)."""
        return self._kinds[type(message)], self._encoder.encode(message)

    def decode(self, kind: int, body: Any) -> Any:
        if not 0 <= kind < len(self._messages):
            raise LinkError(f"message of kind {kind}; known are 0..{len(self._messages) - 1}. The processes run different versions of lockstep")
        try:
            return self._decoders[kind].decode(body)
        except (msgspec.DecodeError, ValueError, TypeError, AssertionError) as error:
            raise LinkError(f"a {self._messages[kind].__name__} does not decode: {error}") from error
