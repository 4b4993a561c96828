"""Hugging Face names, and which files of a repository a name stands for."""

from __future__ import annotations

import pytest

from lockstep.errors import CheckpointError
from lockstep.weights.hub_files import choose_gguf, gguf_models, is_folder_model, refuse_pickle, small_files, whole_weights
from lockstep.weights.hub_names import HubName, HubOptions, parse_hub_name

LABEL = "model 'o/n'"
REPOSITORY = [
    "README.md",
    "config.json",
    "Tiny-1B-Q4_K_M.gguf",
    "Tiny-1B-Q4_K_S.gguf",
    "Tiny-1B-IQ4_XS.gguf",
    "tiny.q8_0.gguf",
    "Tiny-1B-BF16-00001-of-00002.gguf",
    "Tiny-1B-BF16-00002-of-00002.gguf",
    "UD-Q2_K_XL/Tiny-1B-UD-Q2_K_XL.gguf",
    "Q6_K/part-00001-of-00001.gguf",
    "mmproj-Tiny-F16.gguf",
    "imatrix_tiny.gguf",
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubName("org/name")),
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("a_b/c.d_e", HubName("a_b/c.d_e")),
        ("org/name:Q4_K_M", HubName("org/name", "Q4_K_M")),
        ("org/name:x-Q4_K_M.gguf", HubName("org/name", "x-Q4_K_M.gguf")),
        ("org/name:sub/x.gguf", HubName("org/name", "sub/x.gguf")),
        ("org/name/x.gguf", HubName("org/name", "x.gguf")),
        ("org/name/sub/x.gguf", HubName("org/name", "sub/x.gguf")),
        *((text, None) for text in ("name", "", "/", "org/", "/name", "org/name/other", "/org/name", "./org/name", "~/name", "org/name:")),
        *((text, None) for text in ("org/na--me", "org/na..me", "../name", "org/-name", "org/name.", "örg/name", "org/na me", "org/name:a b")),
        *((text, None) for text in ("folder/x.gguf", "folder/x.safetensors", "folder/x.bin", "org/name.git", "org/name:../x.gguf", "a/b/../x.gguf")),
        ("o/" + "n" * 94, HubName("o/" + "n" * 94)),
        ("o/" + "n" * 95, None),
    ],
)
def test_only_the_forms_of_a_hub_name_are_taken_as_one(text: str, expected: HubName | None) -> None:
    assert parse_hub_name(text) == expected


def test_token_is_not_shown() -> None:
    assert "hf_secret" not in repr(HubOptions(token="hf_secret"))


@pytest.mark.parametrize(
    ("variant", "files"),
    [
        ("Q4_K_M", ["Tiny-1B-Q4_K_M.gguf"]),
        ("q4_k_m", ["Tiny-1B-Q4_K_M.gguf"]),
        ("Q8_0", ["tiny.q8_0.gguf"]),
        ("BF16", ["Tiny-1B-BF16-00001-of-00002.gguf", "Tiny-1B-BF16-00002-of-00002.gguf"]),
        ("Q2_K_XL", ["UD-Q2_K_XL/Tiny-1B-UD-Q2_K_XL.gguf"]),
        ("UD-Q2_K_XL", ["UD-Q2_K_XL/Tiny-1B-UD-Q2_K_XL.gguf"]),
        ("Q6_K", ["Q6_K/part-00001-of-00001.gguf"]),
        ("Tiny-1B-IQ4_XS.gguf", ["Tiny-1B-IQ4_XS.gguf"]),
        ("UD-Q2_K_XL/Tiny-1B-UD-Q2_K_XL.gguf", ["UD-Q2_K_XL/Tiny-1B-UD-Q2_K_XL.gguf"]),
        ("Tiny-1B-BF16-00001-of-00002.gguf", ["Tiny-1B-BF16-00001-of-00002.gguf", "Tiny-1B-BF16-00002-of-00002.gguf"]),
    ],
)
def test_a_format_or_a_file_names_one_model_with_all_its_parts(variant: str, files: list[str]) -> None:
    assert choose_gguf(REPOSITORY, HubName("o/n", variant), LABEL) == files


@pytest.mark.parametrize(
    ("variant", "found"),
    [
        ("Q4_K", r"no GGUF model in 'Q4_K'.*Tiny-1B-Q4_K_M\.gguf, Tiny-1B-Q4_K_S\.gguf"),
        ("4_XS", "no GGUF model in '4_XS'"),
        ("F16", "no GGUF model in 'F16'"),
        ("absent.gguf", r"has no file 'absent\.gguf'; there are .*tiny\.q8_0\.gguf"),
        (None, r"holds 7 GGUF models; name one, such as o/n:[\w-]+; there are .*Tiny-1B-BF16-00001-of-00002\.gguf"),
    ],
)
def test_what_names_no_model_is_refused_with_a_list(variant: str | None, found: str) -> None:
    with pytest.raises(CheckpointError, match=found) as caught:
        choose_gguf(REPOSITORY, HubName("o/n", variant), LABEL)
    assert "mmproj" not in str(caught.value)


def test_a_format_of_two_models_is_refused_with_both() -> None:
    with pytest.raises(CheckpointError, match=r"2 GGUF models in 'Q8_0'.*there are a-Q8_0\.gguf, b-Q8_0\.gguf$"):
        choose_gguf(["a-Q8_0.gguf", "b-Q8_0.gguf", "c-Q4_0.gguf"], HubName("o/n", "Q8_0"), LABEL)


def test_the_suggested_spelling_is_one_that_works() -> None:
    for names in (
        ["m-Q4_K_M.gguf", "m-Q8_0.gguf"],
        ["m.bf16.gguf", "m.q4_0.gguf"],
        ["first.gguf", "second.gguf"],
        ["a/m-IQ4_XS.gguf", "b.gguf"],
        ["a-Q8_0.gguf", "b-Q8_0.gguf"],
    ):
        with pytest.raises(CheckpointError) as caught:
            choose_gguf(names, HubName("o/n"), LABEL)
        suggested = parse_hub_name(str(caught.value).split("such as ")[1].split(";")[0])
        assert suggested is not None
        assert len(choose_gguf(names, suggested, LABEL)) == 1


def test_the_only_model_needs_no_name_and_a_missing_part_is_named() -> None:
    assert choose_gguf(["x.gguf", "mmproj-x.gguf", "README.md"], HubName("o/n"), LABEL) == ["x.gguf"]
    with pytest.raises(CheckpointError, match=r"split into 3 files, of which x-00002-of-00003\.gguf are missing"):
        choose_gguf(["x-00001-of-00003.gguf", "x-00003-of-00003.gguf"], HubName("o/n"), LABEL)
    assert [*gguf_models(REPOSITORY)] == sorted(gguf_models(REPOSITORY))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "x.pth", "sub/y.ckpt"])
def test_pickle_is_refused_by_name_and_says_what_is_read_instead(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"pickle.*safetensors"):
        choose_gguf(["config.json", name], HubName("o/n"), LABEL)
    with pytest.raises(CheckpointError, match=r"pickle.*safetensors"):
        refuse_pickle(name, LABEL)
    assert not is_folder_model(["config.json", name])


def test_only_files_that_are_read_are_chosen() -> None:
    names = ["README.md", "config.json", "tokenizer.json", "tokenizer.model", "pytorch_model.bin", "chat_template.jinja", "original/params.json"]
    names += ["additional_chat_templates/rag.jinja", "model.safetensors.index.json", "consolidated.safetensors", "onnx/config.json"]
    chosen = ["additional_chat_templates/rag.jinja", "chat_template.jinja", "config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert small_files(names) == [*chosen, "tokenizer.model"]
    assert small_files(names, tokenizer_only=True) == [
        "additional_chat_templates/rag.jinja",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer.model",
    ]


def test_weights_without_an_index_are_one_file() -> None:
    assert whole_weights(["model.safetensors", "consolidated.safetensors"], LABEL) == "model.safetensors"
    assert whole_weights(["other.safetensors", "sub/model.safetensors"], LABEL) == "other.safetensors"
    with pytest.raises(CheckpointError, match=r"found a\.safetensors, b\.safetensors"):
        whole_weights(["a.safetensors", "b.safetensors"], LABEL)
