"""Damaged files: an error of ours that says so, or a correct read; never another exception, never memory beyond the file's own size."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_model import HEAD_DIM, HIDDEN, folder_tensors, gguf_tensors, write_folder, write_gguf

from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.weights import open_checkpoint
from lockstep.weights.formats import FORMATS


def read_everything(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        assert checkpoint.read(name).shape == checkpoint.shape(name)
    source = checkpoint.tokenizer_source
    if not isinstance(source, Path):
        assert len(list(source.values())) == len(source)


def outcome(path: Path) -> str:
    """'read' or the name of the error; anything but our two errors fails the test that calls."""
    tracemalloc.reset_peak()
    message, result = str(path), "read"
    try:
        read_everything(path)
    except (CheckpointError, UnsupportedError) as error:
        message, result = str(error), type(error).__name__
    assert str(path) in message
    assert tracemalloc.get_traced_memory()[1] < 20e6
    return result


@pytest.fixture(params=["gguf", "safetensors"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, int]:
    """What to open, the file to damage, and the bytes of its header."""
    if request.param == "gguf":
        path = write_gguf(tmp_path / "m.gguf", gguf_tensors(1), matrix_type=gguf.GGMLQuantizationType.Q8_0)
        return path, path, int(gguf.GGUFReader(path).data_offset)
    folder = write_folder(tmp_path / "model", folder_tensors(1))
    file = folder / "model.safetensors"
    return folder, file, 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]


@pytest.fixture(autouse=True)
def traced() -> object:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_a_file_cut_short_anywhere_is_refused(target: tuple[Path, Path, int]) -> None:
    path, file, header_bytes = target
    raw = file.read_bytes()
    cuts = sorted({*range(0, header_bytes, 7), *range(header_bytes - 3, header_bytes + 3), *range(header_bytes, len(raw) - 40, 991), len(raw) - 40})
    for cut in cuts:
        file.write_bytes(raw[:cut])
        assert outcome(path) == "CheckpointError", cut
    file.write_bytes(raw)
    assert outcome(path) == "read"


def gguf_header(tensors: int, entries: int, body: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + body


def entry(key: str, value_type: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", value_type) + value


def tensor_entry(name: str, dimensions: list[int], type_id: int, offset: int) -> bytes:
    shape = struct.pack(f"<{len(dimensions)}Q", *dimensions)
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dimensions)) + shape + struct.pack("<IQ", type_id, offset)


HUGE = (1 << 64) - 1


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "empty"),
        (b"GGML" + bytes(60), "not a GGUF file"),
        (gguf_header(0, HUGE, bytes(64)), "metadata entries"),
        (gguf_header(HUGE, 0, bytes(64)), "tensors, more than"),
        (gguf_header(0, 1, entry("k", 9, struct.pack("<IQ", 8, HUGE)) + bytes(32)), "items in metadata key 'k'"),
        (gguf_header(0, 1, entry("k", 9, struct.pack("<IQ", 6, 1 << 61)) + bytes(32)), "items in metadata key 'k'"),
        (gguf_header(0, 1, entry("k", 9, struct.pack("<IQ", 9, 1)) + bytes(32)), "nested"),
        (gguf_header(0, 1, entry("k", 8, struct.pack("<Q", HUGE)) + bytes(32)), "cut short"),
        (gguf_header(0, 1, entry("k", 99, bytes(8))), "unknown value type 99"),
        (gguf_header(0, 2, entry("k", 4, bytes(4)) * 2), "'k' twice"),
        (gguf_header(0, 1, entry("general.alignment", 4, struct.pack("<I", 0))), "alignment"),
        (gguf_header(1, 0, tensor_entry("t", [1 << 63, 1 << 63], 0, 0) + bytes(64)), "cut short"),
        (gguf_header(1, 0, tensor_entry("t", [0], 0, 0) + bytes(64)), "whole blocks"),
        (gguf_header(1, 0, tensor_entry("t", [33], 8, 0) + bytes(64)), "whole blocks"),
        (gguf_header(1, 0, tensor_entry("t", [1], 77, 0) + bytes(64)), "unknown type id 77"),
        (gguf_header(1, 0, tensor_entry("t", [1], 0, 3) + bytes(64)), "multiple of the alignment"),
        (gguf_header(1, 0, tensor_entry("t", [1] * 5, 0, 0) + bytes(64)), "5 dimensions"),
        (gguf_header(2, 0, tensor_entry("t", [1], 0, 0) * 2 + bytes(128)), "'t' twice"),
        (gguf_header(2, 0, tensor_entry("s", [16], 0, 0) + tensor_entry("t", [1], 0, 32) + bytes(128)), "over each other"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_absurd_gguf_header_is_refused_by_name(tmp_path: Path, raw: bytes, match: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda kind: kind.name)
def test_a_row_that_is_no_whole_blocks_is_refused_and_a_format_that_we_lack_is_named(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    block, path = gguf.GGML_QUANT_SIZES[kind][0], tmp_path / "m.gguf"
    shapes = [[block // 2], [block + 1], [1, block], [block - 1, 2 * block]] if block > 1 else [[0]]
    for shape in shapes:
        path.write_bytes(gguf_header(1, 0, tensor_entry("t", shape, kind, 0) + bytes(block * block * 8)))
        lacking = kind.name not in FORMATS
        message = (
            f"tensor 't' has type {kind.name}, .* supported are F32, " if lacking else f"'t' of type {kind.name} .* whole blocks of {block} values"
        )
        with pytest.raises(UnsupportedError if lacking else CheckpointError, match=message):
            open_checkpoint(path)


def put_setting(path: Path, key: str, value: bytes) -> None:
    """Other bytes for a metadata value, which lies behind its key and type."""
    raw = path.read_bytes()
    place = raw.index(key.encode()) + len(key) + 4
    path.write_bytes(raw[:place] + value + raw[place + len(value) :])


def test_heads_that_leave_no_values_a_head_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(1))
    put_setting(path, "llama.attention.head_count", struct.pack("<I", HIDDEN + 1))
    path.write_bytes(path.read_bytes().replace(b"rope.dimension_count", b"rope.dimension_other"))
    with pytest.raises(CheckpointError, match=f"{HIDDEN + 1} heads in a hidden size of {HIDDEN}"):
        open_checkpoint(path)


@pytest.mark.parametrize("factor", [np.nan, np.inf, 0.0, -1.0, 0.5])
def test_rotary_factors_that_are_no_factors_are_refused(tmp_path: Path, factor: float) -> None:
    tensors = gguf_tensors(1) | {"rope_freqs.weight": np.full(HEAD_DIM // 2, factor, np.float32)}
    with pytest.raises(UnsupportedError, match="rotary factors"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))


def test_a_huge_head_beside_few_rotary_factors_costs_no_memory(tmp_path: Path) -> None:
    tensors = gguf_tensors(1) | {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tensors, extra={"llama.attention.key_length": 1 << 24})
    put_setting(path, "llama.rope.dimension_count", struct.pack("<I", 1 << 24))
    assert outcome(path) == "UnsupportedError"


@pytest.mark.parametrize("number", [1e300, -1.0, float("nan"), float("inf"), 0.0, 5e-324])
def test_a_setting_beyond_float32_is_refused(tmp_path: Path, number: float) -> None:
    # The package writes this key as float32: a float64 takes its place, and bytes at the end make up for data that may have moved.
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(1))
    key, raw = b"llama.rope.freq_base", path.read_bytes()
    place = raw.index(key) + len(key)
    path.write_bytes(raw[:place] + struct.pack("<Id", 12, number) + raw[place + 8 :] + bytes(64))
    with pytest.raises(CheckpointError, match=r"llama\.rope\.freq_base is .*; a number from"):
        open_checkpoint(path)


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_other_versions_and_byte_orders_of_gguf_are_unsupported(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_header(0, 0, b"", version))
    with pytest.raises(UnsupportedError, match=r"version|big-endian"):
        open_checkpoint(path)


def safetensors(header: str, data_bytes: int, encoding: str = "utf-8") -> bytes:
    encoded = header.encode(encoding, "surrogatepass")
    return struct.pack("<Q", len(encoded)) + encoded + bytes(data_bytes)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"1234", "cut short"),
        (struct.pack("<Q", 1 << 63) + bytes(64), "claims a header"),
        (safetensors("[" * 100_000, 0), "not JSON"),
        (safetensors("[]", 0), "not a JSON object"),
        (safetensors('{"x": 3}', 0), "dtype, shape and data_offsets"),
        (safetensors('{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', 4), "needs 8 bytes"),
        (safetensors('{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}', 4), "lists of integers"),
        (safetensors('{"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}', 4), "unknown type"),
        (safetensors('{"x": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', 4), "unknown type"),
        (safetensors('{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', 8), "gaps"),
        (safetensors('{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', 8), "tensors end"),
        (safetensors('{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "x": 1}', 4), "twice"),
        (safetensors('{"x": {"dtype": "F32", "shape": [0, 4611686018427387904], "data_offsets": [0, 0]}}', 0), "larger than any memory"),
        (safetensors('{"x\ud800": 3}', 0), "UTF-8"),
        (safetensors("{}", 0, "utf-16"), "UTF-8"),
        (safetensors('{"x": {"dtype": "F32", "shape": [9007199254740993], "data_offsets": [0, 36028797018963972]}}', 4), "tensors end"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_absurd_safetensors_header_is_refused_by_name(tmp_path: Path, raw: bytes, match: str) -> None:
    write_folder(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"a": "\udcff"}'])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, content: str) -> None:
    write_folder(tmp_path, folder_tensors(1))
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)
