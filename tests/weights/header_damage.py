"""Ways to damage the header of a GGUF or safetensors file. Knows how the headers are laid out, by a walk of its own; does not use our readers.

A damage is a function of the intact file and a generator. Those in MUST_FAIL make a file that no reader may accept; after the others a file may
still be a right one, of other content.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Damage = Callable[[bytes, np.random.Generator], bytes]
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
NOT_UTF8 = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8\x88\x80\x80", b"\x80", b"\xe2\x82")
HOSTILE = (
    0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 64, 255, 256, 4095, 65535, 65536, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40,
    1 << 59, 1 << 60, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 33, (1 << 64) - 32, (1 << 64) - 8, (1 << 64) - 1,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Field:
    """kind: what the bytes at start .. start + size mean."""

    kind: str
    start: int
    size: int


class GgufWalk:
    """The fields of an intact GGUF header, in the file's order. `end`: bytes of the header."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.end = 4
        self.fields: list[Field] = []
        self._take("version", 4)
        tensors, entries = self._take("tensor_count", 8), self._take("metadata_count", 8)
        for _ in range(entries):
            self._text("key")
            self._value(self._take("value_type", 4))
        for _ in range(tensors):
            self._text("name")
            for _ in range(self._take("dimension_count", 4)):
                self._take("extent", 8)
            self._take("tensor_type", 4)
            self._take("offset", 8)

    def of(self, *kinds: str) -> list[Field]:
        return [field for field in self.fields if field.kind in kinds]

    def _take(self, kind: str, size: int) -> int:
        self.fields.append(Field(kind, self.end, size))
        self.end += size
        return int.from_bytes(self._raw[self.end - size : self.end], "little")

    def _text(self, kind: str) -> None:
        self._take(kind, self._take(f"{kind}_length", 8))

    def _value(self, value_type: int) -> None:
        if value_type == STRING:
            self._text("string")
        elif value_type == ARRAY:
            item_type, count = self._take("array_type", 4), self._take("array_count", 8)
            for _ in range(count):
                self._value(item_type)
        else:
            self._take("scalar", SCALAR_BYTES[value_type])


def _any(items: Sequence[Any], generator: np.random.Generator) -> Any:
    return items[int(generator.integers(len(items)))]


def _integer(raw: bytes, generator: np.random.Generator, near: int) -> int:
    """An integer that a reader may trip over: a hostile one, one near the right one, or one near the file's size."""
    nearby = near + int(generator.integers(-3, 4)) * _any((1, 8, 32), generator)
    at_the_end = len(raw) + int(generator.integers(-40, 41))
    return _any((_any(HOSTILE, generator), _any(HOSTILE, generator), nearby, at_the_end), generator)


def _replace(raw: bytes, field: Field, content: bytes) -> bytes:
    return raw[: field.start] + content + raw[field.start + field.size :]


def _integers(*kinds: str) -> Damage:
    """Another integer in one field of these kinds."""

    def damage(raw: bytes, generator: np.random.Generator) -> bytes:
        field = _any(GgufWalk(raw).of(*kinds), generator)
        value = _integer(raw, generator, int.from_bytes(raw[field.start : field.start + field.size], "little"))
        return _replace(raw, field, (value % (1 << 8 * field.size)).to_bytes(field.size, "little"))

    return damage


def _header_end(raw: bytes) -> int:
    return GgufWalk(raw).end if raw[:4] == b"GGUF" else 8 + struct.unpack("<Q", raw[:8])[0]


def flipped_bytes(raw: bytes, generator: np.random.Generator) -> bytes:
    damaged = bytearray(raw)
    for place in generator.integers(0, _header_end(raw), generator.integers(2, 5)):
        damaged[place] = _any((0, 1, 0x7F, 0x80, 0xFF, damaged[place] ^ (1 << int(generator.integers(8)))), generator)
    return bytes(damaged)


def flipped_bit(raw: bytes, generator: np.random.Generator) -> bytes:
    place = int(generator.integers(0, _header_end(raw)))
    return raw[:place] + bytes([raw[place] ^ (1 << int(generator.integers(8)))]) + raw[place + 1 :]


def spliced(raw: bytes, generator: np.random.Generator) -> bytes:
    """Some bytes of the header taken out, or put in twice."""
    start, other = sorted(int(place) for place in generator.integers(0, _header_end(raw), 2))
    other = min(other, start + 64)
    return raw[:start] + raw[other:] if generator.integers(2) else raw[:other] + raw[start:]


def cut_short(raw: bytes, generator: np.random.Generator) -> bytes:
    """Anywhere in the header, or so far before the end that padding is not all that is lost."""
    return raw[: int(_any((generator.integers(0, _header_end(raw)), generator.integers(0, len(raw) - 40)), generator))]


def gguf_scalars(raw: bytes, generator: np.random.Generator) -> bytes:
    """Other settings: one to three of them, hostile integers or any bits."""
    damaged = raw
    for field in (_any(GgufWalk(raw).of("scalar"), generator) for _ in range(generator.integers(1, 4))):
        hostile = (_any(HOSTILE, generator) % (1 << 8 * field.size)).to_bytes(field.size, "little")
        damaged = _replace(damaged, field, _any((hostile, generator.bytes(field.size)), generator))
    return damaged


def gguf_bad_text(raw: bytes, generator: np.random.Generator) -> bytes:
    field = _any([field for field in GgufWalk(raw).of("key", "name", "string") if field.size], generator)
    bad = _any([text for text in NOT_UTF8 if len(text) <= field.size] or [b"\xff"], generator)
    place = int(generator.integers(0, field.size - len(bad) + 1))
    return raw[: field.start + place] + bad + raw[field.start + place + len(bad) :]


def gguf_double_names(raw: bytes, generator: np.random.Generator) -> bytes:
    walk = GgufWalk(raw)
    fields = walk.of(_any(("key", "name"), generator))
    first = _any(fields, generator)
    second = _any([field for field in fields if field is not first], generator)
    length = Field("length", second.start - 8, 8 + second.size)
    return _replace(raw, length, raw[first.start - 8 : first.start + first.size])


def gguf_overlap(raw: bytes, generator: np.random.Generator) -> bytes:
    """One tensor begins where another does."""
    offsets = GgufWalk(raw).of("offset")
    first = _any(offsets, generator)
    second = _any([field for field in offsets if field is not first], generator)
    return _replace(raw, second, raw[first.start : first.start + 8])


def gguf_nesting(raw: bytes, generator: np.random.Generator) -> bytes:
    """A value becomes an array of arrays, up to 20,000 deep."""
    field = _any(GgufWalk(raw).of("value_type"), generator)
    depth = int(_any((1, 2, 100, 20_000), generator))
    return _replace(raw, field, struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, int(_any((1, 1, 1 << 20), generator))) * depth)


GGUF_DAMAGES: Mapping[str, Damage] = {
    "flipped bit": flipped_bit,
    "flipped bytes": flipped_bytes,
    "spliced": spliced,
    "cut short": cut_short,
    "counts": _integers("tensor_count", "metadata_count", "array_count", "dimension_count"),
    "lengths": _integers("key_length", "name_length", "string_length"),
    "extents": _integers("extent"),
    "offsets": _integers("offset"),
    "types": _integers("value_type", "array_type", "tensor_type", "version"),
    "settings": gguf_scalars,
    "bad UTF-8": gguf_bad_text,
    "double names": gguf_double_names,
    "overlap": gguf_overlap,
    "nesting": gguf_nesting,
}


def _header(raw: bytes) -> tuple[dict[str, dict[str, Any]], bytes]:
    end = _header_end(raw)
    return json.loads(raw[8:end]), raw[end:]


def _file(header: str | bytes, data: bytes) -> bytes:
    encoded = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(encoded)) + encoded + data


def _entries(change: Callable[[dict[str, dict[str, Any]], str, bytes, np.random.Generator], None]) -> Damage:
    """Another header: `change` gets all entries and the name of one."""

    def damage(raw: bytes, generator: np.random.Generator) -> bytes:
        header, data = _header(raw)
        change(header, _any(list(header), generator), raw, generator)
        return _file(json.dumps(header), data)

    return damage


def _other_extents(header: dict[str, dict[str, Any]], name: str, raw: bytes, generator: np.random.Generator) -> None:
    entry = header[name]
    for _ in range(generator.integers(1, 3)):
        shape = entry["shape"]
        if generator.integers(4):
            shape[int(generator.integers(len(shape)))] = _integer(raw, generator, 64) * _any((1, 1, 1, -1), generator)
        else:
            shape.extend([_any(HOSTILE, generator)] * int(generator.integers(1, 40)))
    if generator.integers(3) == 0:
        # A tensor of nothing that claims to be huge: its bytes go to the next one, as if the header had been made so.
        header[f"{name}.empty"] = {"dtype": "F32", "shape": [0, *shape], "data_offsets": [entry["data_offsets"][0]] * 2}
        entry["shape"] = [(entry["data_offsets"][1] - entry["data_offsets"][0]) // 4]


def _other_offsets(header: dict[str, dict[str, Any]], name: str, raw: bytes, generator: np.random.Generator) -> None:
    offsets = header[name]["data_offsets"]
    place = int(generator.integers(2))
    offsets[place] = _integer(raw, generator, offsets[place]) * _any((1, 1, 1, -1), generator)


def _overlap(header: dict[str, dict[str, Any]], name: str, raw: bytes, generator: np.random.Generator) -> None:
    other = _any([key for key in header if key != name], generator)
    start, size = header[other]["data_offsets"][0], header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
    header[name]["data_offsets"] = [start, start + size]


def _other_types(header: dict[str, dict[str, Any]], name: str, raw: bytes, generator: np.random.Generator) -> None:
    kinds = ("F16", "BF16", "F64", "U8", "F8_E4M3", "BOOL", "C64", "F4", "", "f32", 3, None, ["F32"], {"F32": 1}, 1e300, True)
    key = _any(("dtype", "dtype", "shape", "data_offsets"), generator)
    header[name][key] = _any(kinds, generator)
    if generator.integers(4) == 0:
        del header[name][key]
    if generator.integers(8) == 0:
        header[name] = _any(kinds, generator)


def safetensors_length(raw: bytes, generator: np.random.Generator) -> bytes:
    near = struct.unpack("<Q", raw[:8])[0]
    return struct.pack("<Q", _integer(raw, generator, near) % (1 << 64)) + raw[8:]


def safetensors_double_names(raw: bytes, generator: np.random.Generator) -> bytes:
    header, data = _header(raw)
    name = _any(list(header), generator)
    again = json.dumps({name: _any((header[name], header[_any(list(header), generator)]), generator)})
    return _file(json.dumps(header)[:-1] + ", " + again[1:], data)


def safetensors_bad_text(raw: bytes, generator: np.random.Generator) -> bytes:
    header, data = _header(raw)
    name = _any(list(header), generator).encode()
    encoded = json.dumps(header).encode()
    place = encoded.index(name) + int(generator.integers(len(name)))
    return _file(encoded[:place] + _any(NOT_UTF8, generator) + encoded[place:], data)


def safetensors_nesting(raw: bytes, generator: np.random.Generator) -> bytes:
    header, data = _header(raw)
    depth = int(_any((2, 100, 5000, 100_000), generator))
    opening, closing = _any((("[", "]"), ('{"a":', "}")), generator)
    nested = opening * depth + "1" + closing * depth * int(generator.integers(2))
    name = _any(list(header), generator)
    key = _any(("dtype", "shape", "data_offsets"), generator)
    text = json.dumps(header)
    value = json.dumps(header[name][key])
    start = text.index(value, text.index(json.dumps(name)))
    return _file(text[:start] + nested + text[start + len(value) :], data)


def safetensors_numbers(raw: bytes, generator: np.random.Generator) -> bytes:
    """Numbers as JSON can say them and sizes cannot be."""
    header, data = _header(raw)
    text, name = json.dumps(header), _any(list(header), generator)
    start = text.index("[", text.index(json.dumps(name)) + len(name)) + 1
    numbers = ("1e400", "-0", "0.5", "64.0", "NaN", "Infinity", "-1", "1" * 5000, "9" * 400, "1E2", "01", "0x10", '"64"', "true", "null")
    end = min(place for place in (text.find(",", start), text.find("]", start)) if place > 0)
    return _file(text[:start] + _any(numbers, generator) + text[end:], data)


SAFETENSORS_DAMAGES: Mapping[str, Damage] = {
    "flipped bit": flipped_bit,
    "flipped bytes": flipped_bytes,
    "spliced": spliced,
    "cut short": cut_short,
    "header length": safetensors_length,
    "extents": _entries(_other_extents),
    "offsets": _entries(_other_offsets),
    "types": _entries(_other_types),
    "bad UTF-8": safetensors_bad_text,
    "double names": safetensors_double_names,
    "overlap": _entries(_overlap),
    "nesting": safetensors_nesting,
    "numbers": safetensors_numbers,
}
MUST_FAIL = frozenset(("cut short", "bad UTF-8", "double names", "overlap", "nesting"))
DAMAGES: Mapping[str, Mapping[str, Damage]] = {"gguf": GGUF_DAMAGES, "safetensors": SAFETENSORS_DAMAGES}
