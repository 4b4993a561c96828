"""Every block format is widened bit for bit as the gguf package widens it: any bytes, any scale, every single bit of a block."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tiny_model import gguf_tensors, write_gguf

from lockstep.weights import open_checkpoint
from lockstep.weights.formats import FORMATS
from lockstep.weights.number_format import PIECE_VALUES

Type = gguf.GGMLQuantizationType
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

# Where the float16 numbers of a block lie, in bytes from its start: the scale, then the minimum where there is one.
FLOAT16_AT = {
    Type.Q8_0: (0,), Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2), Type.IQ4_NL: (0,),
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,),
}  # fmt: skip
BLOCK_TYPES = pytest.mark.parametrize("kind", list(FLOAT16_AT), ids=lambda kind: kind.name)
SUPER_BLOCKS = [kind for kind in FLOAT16_AT if gguf.GGML_QUANT_SIZES[kind][0] == 256]


def random_blocks(kind: gguf.GGMLQuantizationType, count: int, generator: np.random.Generator) -> U8:
    return generator.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)


def put_floats(kind: gguf.GGMLQuantizationType, blocks: U8, *floats: NDArray[np.float16]) -> U8:
    """`blocks` with these numbers as scale, and as minimum where the format has one."""
    for place, values in zip(FLOAT16_AT[kind], floats, strict=False):
        blocks[:, place : place + 2] = np.broadcast_to(values, len(blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks


def check_same_bits(kind: gguf.GGMLQuantizationType, blocks: U8) -> F32:
    """What is no number may be any of them: which one the processor makes of two is not part of a format."""
    ours = FORMATS[kind.name].widen(blocks.reshape(-1))
    with np.errstate(all="ignore"):
        theirs = dequantize(blocks, kind).reshape(-1)
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    numbers = ~np.isnan(theirs)
    assert np.array_equal(~np.isnan(ours), numbers)
    assert np.array_equal(ours.view(np.uint32)[numbers], theirs.view(np.uint32)[numbers])
    return ours


def test_the_formats_are_those_that_the_list_names_with_the_package_sizes() -> None:
    assert set(FORMATS) == {"F32", "F16", "BF16", *(kind.name for kind in FLOAT16_AT)}
    for name, number_format in FORMATS.items():
        assert (number_format.block_values, number_format.block_bytes) == gguf.GGML_QUANT_SIZES[Type[name]]


@BLOCK_TYPES
def test_random_bytes_are_widened_as_the_package_does_over_whole_and_cut_pieces(kind: gguf.GGMLQuantizationType) -> None:
    generator = np.random.default_rng(1)
    whole = PIECE_VALUES // gguf.GGML_QUANT_SIZES[kind][0]
    for count in (1, 7, whole - 1, whole, whole + 1, 3 * whole + 5):
        check_same_bits(kind, random_blocks(kind, count, generator))
    assert FORMATS[kind.name].widen(np.empty(0, np.uint8)).shape == (0,)


@BLOCK_TYPES
def test_every_float16_as_scale_and_as_minimum_is_widened_as_the_package_does(kind: gguf.GGMLQuantizationType) -> None:
    """65,536 scales; the minimum walks through them in another order. Among them both zeros, the smallest, the largest, infinities and no-numbers."""
    generator = np.random.default_rng(2)
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    blocks = put_floats(kind, random_blocks(kind, len(every), generator), every, generator.permutation(every))
    ours = check_same_bits(kind, blocks)
    assert {np.isnan(ours).any(), np.isinf(ours).any(), (ours == 0).any()} == {np.True_}


@BLOCK_TYPES
def test_every_byte_value_in_every_place_is_widened_as_the_package_does(kind: gguf.GGMLQuantizationType) -> None:
    same = np.repeat(np.arange(256, dtype=np.uint8)[:, None], gguf.GGML_QUANT_SIZES[kind][1], axis=1)
    check_same_bits(kind, put_floats(kind, same, np.float16(0.37), np.float16(-1.9)))


@BLOCK_TYPES
def test_every_single_bit_of_a_block_counts_as_in_the_package(kind: gguf.GGMLQuantizationType) -> None:
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    block = put_floats(kind, random_blocks(kind, 1, np.random.default_rng(3)), np.float16(0.37), np.float16(-1.9))
    flipped = block ^ np.packbits(np.eye(8 * block_bytes, dtype=np.uint8), axis=1)
    rows = check_same_bits(kind, flipped).reshape(8 * block_bytes, -1)
    unchanged = (rows == check_same_bits(kind, block)).all(axis=1)
    assert not unchanged.any()


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1], ids=lambda kind: kind.name)
def test_values_that_the_package_quantised_come_back_near_and_equal_to_what_it_gives_back(kind: gguf.GGMLQuantizationType) -> None:
    values = np.random.default_rng(4).standard_normal((64, 256)).astype(np.float32) * np.logspace(-3, 3, 64, dtype=np.float32)[:, None]
    blocks = quantize(values, kind).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    error = np.abs(check_same_bits(kind, blocks).reshape(values.shape) - values).max(axis=1)
    assert (error <= np.abs(values).max(axis=1) / (100 if kind is Type.Q8_0 else 7)).all()


@pytest.mark.parametrize("kind", [*SUPER_BLOCKS, Type.IQ4_NL], ids=lambda kind: kind.name)
def test_a_file_of_blocks_is_read_in_the_model_s_order_of_rows(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    generator = np.random.default_rng(5)
    tensors = gguf_tensors(1, hidden=256)
    rows = {name: len(tensors[name]) for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_up.weight")}
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = {
        name: (kind, put_floats(kind, random_blocks(kind, count * 256 // values, generator), np.float16(0.01), np.float16(0.02)).reshape(count, -1))
        for name, count in rows.items()
    }
    assert raw["token_embd.weight"][1].shape == (40, 256 // values * nbytes)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, raw=raw))
    expected = {name: dequantize(stored, kind) for name, (_, stored) in raw.items()}
    assert np.array_equal(checkpoint.read("model.embed_tokens.weight"), expected["token_embd.weight"])
    assert np.array_equal(checkpoint.read("model.layers.1.mlp.up_proj.weight"), expected["blk.1.ffn_up.weight"])
    by_halves = expected["blk.0.attn_q.weight"].reshape(-1, 8, 2, 256).swapaxes(1, 2).reshape(-1, 256)
    assert np.array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.weight"), by_halves)
