"""Split GGUF files: the parts together are the model that the whole file is, and what is not one model's parts is refused by name."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_model import gguf_tensors, write_gguf

from lockstep.config import EngineConfig
from lockstep.errors import CheckpointError, UnsupportedError
from lockstep.launch.model import load_tokenizer, resolve_model
from lockstep.weights import find_model, open_checkpoint

TENSOR_COUNT = 20


def parts_of(first: Path) -> list[Path]:
    return sorted(first.parent.glob("*.gguf"))


def split(folder: Path, *, seed: int = 1, tensors_a_part: int = 8, extra: dict[str, object] | None = None) -> Path:
    """The first of the parts of a tiny model (three of them), alone in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_gguf(folder / "m.gguf", gguf_tensors(seed), tensors_a_part=tensors_a_part, extra=extra)


def rewrite(source: Path, target: Path, *, tensors_a_part: int) -> Path:
    """All metadata and tensors of a GGUF file, written again in parts by the gguf package. Returns the first part."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()), split_max_tensors=tensors_a_part)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.format_shard_names(target)[0]


@pytest.mark.parametrize(("tensors_a_part", "bare", "count"), [(8, False, 3), (1, False, 20), (19, False, 2), (8, True, 4), (0, True, 2)])
def test_parts_give_what_the_whole_file_gives(tmp_path: Path, tensors_a_part: int, bare: bool, count: int) -> None:
    tensors = gguf_tensors(1)
    assert len(tensors) == TENSOR_COUNT
    whole = open_checkpoint(write_gguf(tmp_path / "whole.gguf", tensors))
    (tmp_path / "parts").mkdir()
    first = write_gguf(tmp_path / "parts" / "m.gguf", tensors, tensors_a_part=tensors_a_part, first_part_is_bare=bare)
    assert first.name == f"m-00001-of-{count:05}.gguf"
    assert len(parts_of(first)) == count
    (tmp_path / "parts" / "README.md").write_text("what else a folder of parts may hold")
    for place in (first, first.parent, find_model(first), find_model(str(first.parent))):
        checkpoint = open_checkpoint(place)
        assert checkpoint.path == first
        assert checkpoint.config == whole.config
        assert checkpoint.names() == whole.names()
        for name in whole.names():
            assert checkpoint.shape(name) == whole.shape(name)
            assert np.array_equal(checkpoint.read(name), whole.read(name)), name
        source = checkpoint.tokenizer_source
        assert not isinstance(source, Path)
        assert source["tokenizer.ggml.tokens"] == whole.tokenizer_source["tokenizer.ggml.tokens"]


def test_the_embedded_model_in_parts_is_the_embedded_model(tmp_path: Path) -> None:
    try:
        embedded = find_model("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    first = rewrite(embedded, tmp_path / "s.gguf", tensors_a_part=100)
    assert [path.name for path in parts_of(first)] == [f"s-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    whole, parts = open_checkpoint(embedded), open_checkpoint(tmp_path)
    assert parts.names() == whole.names()
    assert parts.config == whole.config
    assert parts.generation_config == whole.generation_config
    for name in whole.names():
        assert np.array_equal(parts.read(name), whole.read(name)), name
    named, by_folder = (EngineConfig(model=model) for model in ("smollm2", str(tmp_path)))
    tokenizers = [
        load_tokenizer(config, resolve_model(config)) for config in (named, by_folder, EngineConfig(model="smollm2", tokenizer=str(tmp_path)))
    ]
    assert len({tuple(tokenizer.encode("Split files, 3 of them.")) for tokenizer in tokenizers}) == 1


def test_fingerprint_covers_every_part_and_their_order_but_no_names(tmp_path: Path) -> None:
    first = split(tmp_path / "a")
    fingerprint = open_checkpoint(first).fingerprint()
    copies = tmp_path / "b"
    copies.mkdir()
    for path in parts_of(first):
        shutil.copy(path, copies / path.name.replace("m-", "other-name-"))
    assert open_checkpoint(copies).fingerprint() == fingerprint
    seen = {fingerprint, open_checkpoint(write_gguf(tmp_path / "whole.gguf", gguf_tensors(1))).fingerprint()}
    for path in parts_of(first):
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        seen.add(open_checkpoint(first).fingerprint())
        path.write_bytes(raw)
    assert len(seen) == 5
    assert open_checkpoint(first).fingerprint() == fingerprint


def part(first: Path, number: int) -> Path:
    return parts_of(first)[number - 1]


def drop(number: int) -> Callable[[Path], None]:
    return lambda first: part(first, number).unlink()


def copy_over(source: int, target: int) -> Callable[[Path], None]:
    return lambda first: shutil.copy(part(first, source), part(first, target)) and None


def swap(one: int, other: int) -> Callable[[Path], None]:
    def change(first: Path) -> None:
        raw = part(first, one).read_bytes()
        shutil.copy(part(first, other), part(first, one))
        part(first, other).write_bytes(raw)

    return change


def cut(number: int) -> Callable[[Path], None]:
    return lambda first: part(first, number).write_bytes(part(first, number).read_bytes()[:-2000]) and None


def take_from(number: int, **other: object) -> Callable[[Path], None]:
    """Part `number` of another split model in the place of this one's."""
    return lambda first: shutil.copy(part(split(first.parent / "other", **other), number), part(first, number)) and None


def set_number(number: int, key: str, value: int) -> Callable[[Path], None]:
    """Other bytes for an integer of the metadata: uint16, or int32 for the count of tensors."""

    def change(first: Path) -> None:
        raw = bytearray(part(first, number).read_bytes())
        struct.pack_into("<i" if key == "split.tensors.count" else "<H", raw, raw.index(key.encode()) + len(key) + 4, value)
        part(first, number).write_bytes(raw)

    return change


def all_say(tensor_count: int) -> Callable[[Path], None]:
    def change(first: Path) -> None:
        for number in (1, 2, 3):
            set_number(number, "split.tensors.count", tensor_count)(first)

    return change


def rename(number: int, old: str, new: str) -> Callable[[Path], None]:
    assert len(old) == len(new)
    return lambda first: part(first, number).write_bytes(part(first, number).read_bytes().replace(old.encode(), new.encode(), 1)) and None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (drop(2), r"1 are missing beside it: m-00002-of-00003\.gguf"),
        (drop(3), r"1 are missing beside it: m-00003-of-00003\.gguf"),
        (copy_over(2, 3), r"m-00003-of-00003\.gguf: says that it is part 2, but its name says part 3"),
        (copy_over(1, 2), r"m-00002-of-00003\.gguf: says that it is part 1, but its name says part 2"),
        (copy_over(3, 1), r"m-00001-of-00003\.gguf: .*general\.architecture|m-00001-of-00003\.gguf: says that it is part 3"),
        (swap(2, 3), r"m-00002-of-00003\.gguf: says that it is part 3"),
        (cut(2), r"m-00002-of-00003\.gguf: .*cut short"),
        (take_from(2, tensors_a_part=5), r"m-00002-of-00003\.gguf: has split\.count 4, .* has 3"),
        (take_from(2, tensors_a_part=9), r"m-00003-of-00003\.gguf: has tensor .*, which m-00002-of-00003\.gguf has too"),
        (set_number(2, "split.no", 7), r"m-00002-of-00003\.gguf: says that it is part 8"),
        (set_number(2, "split.count", 1), r"m-00002-of-00003\.gguf: has split\.count 1"),
        (set_number(3, "split.tensors.count", 21), r"m-00003-of-00003\.gguf: has split\.tensors\.count 21"),
        (all_say(19), r"m-00001-of-00003\.gguf: says that the parts hold 19 tensors together, they hold 20"),
        (all_say(21), r"m-00001-of-00003\.gguf: says that the parts hold 21 tensors together, they hold 20"),
        (set_number(1, "split.no", 1), r"m-00001-of-00003\.gguf: says that it is part 2"),
        (set_number(1, "split.count", 4), r"named as one of 3 parts, but says that it is one of 4"),
        (set_number(1, "split.count", 1), r"named as one of 3 parts, but says that it is one of 1"),
        (set_number(3, "split.tensors.count", -1), r"split\.tensors\.count is -1"),
        (rename(2, "split.no", "split.on"), r"m-00002-of-00003\.gguf: split\.no is missing"),
        (
            rename(3, "blk.1.ffn_up.weight", "blk.0.ffn_up.weight"),
            r"has tensor 'blk\.0\.ffn_up\.weight', which m-0000.-of-00003\.gguf has too",
        ),
    ],
)
def test_what_is_not_one_model_in_its_order_is_refused_by_the_part(tmp_path: Path, change: Callable[[Path], None], match: str) -> None:
    first = split(tmp_path / "m")
    open_checkpoint(first)
    change(first)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(first)


def replace_second(first: Path, *, architecture: str = "llama", name: str | None = None, alignment: int | None = None) -> None:
    """Part 2 of the tiny model written as a file of its own, with more metadata than the writer of parts gives one."""
    writer = gguf.GGUFWriter(part(first, 2), architecture)
    for key, value in (("split.no", 1), ("split.count", 3)):
        writer.add_uint16(key, value)
    writer.add_int32("split.tensors.count", TENSOR_COUNT)
    if name is not None:
        writer.add_name(name)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for stored, values in list(gguf_tensors(1).items())[8:16]:
        writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_metadata_of_a_later_part_must_be_the_first_part_s_where_both_have_it(tmp_path: Path) -> None:
    first = split(tmp_path, extra={"general.name": "one"})
    values = open_checkpoint(first).read("model.layers.0.mlp.down_proj.weight").copy()  # the file under it is written again
    replace_second(first, name="one")
    assert np.array_equal(open_checkpoint(first).read("model.layers.0.mlp.down_proj.weight"), values)
    for other in ({"name": "two"}, {"architecture": "qwen2"}):
        replace_second(first, **other)
        with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: has another general\.\w+ than m-00001-of-00003\.gguf"):
            open_checkpoint(first)


def test_parts_with_different_alignments_are_refused_because_writers_disagree_on_which_counts(tmp_path: Path) -> None:
    first = split(tmp_path)
    replace_second(first, alignment=64)
    with pytest.raises(UnsupportedError, match=r"m-00002-of-00003\.gguf: its alignment is 64, that of m-00001-of-00003\.gguf is 32"):
        open_checkpoint(first)


def test_a_later_part_is_no_name_for_the_model_and_the_first_is_named(tmp_path: Path) -> None:
    first = split(tmp_path)
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf: is part 3 of 3; name the first one: .*m-00001-of-00003\.gguf"):
        open_checkpoint(part(first, 3))


def test_a_name_that_does_not_say_which_part_a_file_is_or_says_it_of_a_whole_file_is_refused(tmp_path: Path) -> None:
    first = split(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"is part 2 of 3 of a model; its name must end in -00001-of-00003\.gguf"):
        open_checkpoint(part(first, 2).rename(tmp_path / "second.gguf"))
    whole = write_gguf(tmp_path / "w.gguf", gguf_tensors(1))
    with pytest.raises(CheckpointError, match=r"named as one of 2 parts, but says that it is one of 1"):
        open_checkpoint(whole.rename(tmp_path / "w-00001-of-00002.gguf"))
    alone = (tmp_path / "w-00001-of-00002.gguf").rename(tmp_path / "w-00001-of-00001.gguf")
    assert len(open_checkpoint(alone).names()) == TENSOR_COUNT


@pytest.mark.parametrize("value", ["3", 3.0, [3, 3], 1 << 31])
def test_a_count_of_parts_that_is_no_count_is_refused(tmp_path: Path, value: object) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(1), extra={"split.count": value})
    with pytest.raises(CheckpointError, match=r"split\.count is .*; a count was expected"):
        open_checkpoint(path)


def test_a_folder_with_more_than_the_parts_of_one_model_leaves_the_model_open(tmp_path: Path) -> None:
    first = split(tmp_path)
    whole = write_gguf(tmp_path / "whole.gguf", gguf_tensors(1))
    for ask in (open_checkpoint, find_model):
        with pytest.raises(CheckpointError, match=r"just the parts of one split GGUF model, found m-00001-of-00003\.gguf, .*whole\.gguf"):
            ask(tmp_path)
    assert open_checkpoint(first).names() == open_checkpoint(whole).names()
    whole.unlink()
    part(first, 1).unlink()
    for ask in (open_checkpoint, find_model):
        with pytest.raises(CheckpointError, match=r"1 are missing beside it: m-00001-of-00003\.gguf"):
            ask(tmp_path)


def test_parts_of_two_splits_in_one_folder_are_told_apart_by_the_named_file(tmp_path: Path) -> None:
    by_eight, by_five = split(tmp_path), split(tmp_path, tensors_a_part=5, seed=2)
    with pytest.raises(CheckpointError, match="name the model's first file"):
        open_checkpoint(tmp_path)
    one, other = (open_checkpoint(first).read("model.layers.1.mlp.up_proj.weight") for first in (by_eight, by_five))
    assert not np.array_equal(one, other)


def test_a_hugging_face_folder_stays_one_beside_parts(tmp_path: Path) -> None:
    split(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)
