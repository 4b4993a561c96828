"""Models by Hugging Face name, against a hub on loopback: what is fetched, what is kept, and what is said when something is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from tiny_model import gguf_tensors, write_gguf

from fake_hub import FakeHub, Repository, fake_hub
from lockstep.errors import CheckpointError, ConfigError, UnsupportedError
from lockstep.weights import HubOptions, find_model, open_checkpoint
from lockstep.weights.hub_errors import explained
from tiny_llama import write_tiny_llama

NAME = "tiny/llama"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
READ = ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", *SHARDS]
BESIDE = {"README.md": b"# Tiny", "pytorch_model.bin": b"pickle" * 1000, "consolidated.safetensors": b"x" * 5000, "original/params.json": b"{}"}

Find = Callable[..., Path]


@pytest.fixture(autouse=True)
def _nothing_leaves_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No token of this user, no cache of this user, and no request to the public hub."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "default-cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield
    huggingface_hub.close_session()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def find(hub: FakeHub, tmp_path: Path) -> Find:
    def find(name: str, *, tokenizer_only: bool = False, **options: Any) -> Path:
        return find_model(name, HubOptions(**{"endpoint": hub.url, "cache_folder": tmp_path / "cache", **options}), tokenizer_only=tokenizer_only)

    return find


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "folder")


@pytest.fixture
def llama(hub: FakeHub, folder: Path) -> Repository:
    repository = hub.repository(NAME)
    repository.commit_folder(folder, **BESIDE)
    return repository


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_folder_is_fetched_as_it_is_and_nothing_beside_what_is_read(hub: FakeHub, llama: Repository, find: Find, folder: Path) -> None:
    found = find(NAME)
    assert sorted(path.relative_to(found).as_posix() for path in found.rglob("*")) == sorted(READ)
    assert all((found / name).read_bytes() == (folder / name).read_bytes() for name in READ)
    assert {*hub.bodies()} == {*READ}
    assert open_checkpoint(found).fingerprint() == open_checkpoint(folder).fingerprint()


def test_a_second_start_fetches_nothing_and_asks_once_for_the_commit(hub: FakeHub, llama: Repository, find: Find) -> None:
    first = find(NAME)
    hub.requests.clear()
    assert find(NAME) == first
    assert [(request.method, request.path) for request in hub.requests] == [("GET", f"/api/models/{NAME}")]


def test_a_branch_that_moves_is_followed_by_the_next_start_and_a_commit_is_not(
    hub: FakeHub, llama: Repository, find: Find, folder: Path, tmp_path: Path
) -> None:
    old = llama.refs["main"]
    first = find(NAME)
    new = llama.commit_folder(write_tiny_llama(tmp_path / "retrained", seed=1))
    second = find(NAME)
    assert (first.name, second.name) == (old, new)
    assert open_checkpoint(first).fingerprint() == open_checkpoint(folder).fingerprint() != open_checkpoint(second).fingerprint()
    assert find(NAME, revision=old) == first


def test_everything_of_one_start_is_of_one_commit(
    hub: FakeHub, llama: Repository, find: Find, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch moves while its files are fetched."""
    other = write_tiny_llama(tmp_path / "retrained", seed=1, shards=1)
    listing = huggingface_hub.HfApi.list_repo_tree

    def move_then_list(api: Any, *given: Any, **more: Any) -> Any:
        if len(llama.commits) == 1:
            llama.commit_folder(other)
        return listing(api, *given, **more)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", move_then_list)
    assert open_checkpoint(find(NAME)).fingerprint() == open_checkpoint(folder).fingerprint()
    assert len(llama.commits) == 2


def test_branches_and_commits_are_revisions(hub: FakeHub, llama: Repository, find: Find, tmp_path: Path) -> None:
    commit = llama.commit_folder(write_tiny_llama(tmp_path / "other", seed=2), branch="refs/pr/3")
    assert find(NAME, revision="refs/pr/3").name == find(NAME, revision=commit).name == commit != find(NAME).name


def test_offline_uses_the_cache_and_sends_nothing(hub: FakeHub, llama: Repository, find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(NAME)
    go_offline(monkeypatch)
    hub.requests.clear()
    assert find(NAME) == find(NAME, revision="main") == find(NAME, revision=found.name) == found
    assert hub.requests == []


def test_offline_says_what_the_cache_lacks(hub: FakeHub, llama: Repository, find: Find, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = find(NAME)
    go_offline(monkeypatch)
    for name, revision in (("tiny/other", None), (NAME, "v2"), (NAME, "0" * 40)):
        with pytest.raises(CheckpointError, match=rf"HF_HUB_OFFLINE is set and the cache {tmp_path / 'cache'} does not hold .*unset it"):
            find(name, revision=revision)
    (found / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"HF_HUB_OFFLINE is set.*does not hold {SHARDS[1]}"):
        find(NAME)


def test_offline_reads_a_cache_that_other_tools_filled(
    hub: FakeHub, llama: Repository, find: Find, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They keep no listing of the repository."""
    for name in READ:
        huggingface_hub.hf_hub_download(NAME, name, endpoint=hub.url, cache_dir=tmp_path / "cache")
    go_offline(monkeypatch)
    assert open_checkpoint(find(NAME)).names()


def test_a_hub_that_does_not_answer_leaves_what_the_cache_holds(hub: FakeHub, llama: Repository, find: Find) -> None:
    found = find(NAME)
    hub.statuses["/api/"] = 503
    assert find(NAME) == find(NAME, endpoint="http://127.0.0.1:1") == found
    hub.statuses["/api/"] = 404
    with pytest.raises(CheckpointError, match="no such model"):
        find(NAME)
    with pytest.raises(CheckpointError, match=r"no connection to http://127\.0\.0\.1:1 .*check the network"):
        find("tiny/other", endpoint="http://127.0.0.1:1")


def test_gguf_models_are_fetched_by_format_file_and_part(hub: FakeHub, find: Find, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny-F32.gguf", gguf_tensors(1))
    parts = {f"big-Q8_0-0000{i}-of-00002.gguf": f"part {i}".encode() for i in (1, 2)}
    hub.repository("tiny/gguf").commit({"tiny-F32.gguf": whole.read_bytes(), **parts, "README.md": b"", "config.json": b"{}"})
    for name in ("tiny/gguf:F32", "tiny/gguf:tiny-F32.gguf", "tiny/gguf/tiny-F32.gguf"):
        found = find(name)
        assert found.name == "tiny-F32.gguf"
        assert open_checkpoint(found).fingerprint() == open_checkpoint(whole).fingerprint()
    assert hub.bodies() == ["tiny-F32.gguf"]  # once for all three
    first = find("tiny/gguf:Q8_0")
    assert [(first.parent / name).read_bytes() for name in sorted(parts)] == [*parts.values()]
    assert first.name == min(parts)
    with pytest.raises(CheckpointError, match=r"2 GGUF models.*tiny-F32\.gguf"):
        find("tiny/gguf")


def test_a_tokenizer_is_fetched_without_weights(hub: FakeHub, llama: Repository, find: Find) -> None:
    found = find(NAME, tokenizer_only=True)
    assert sorted(path.name for path in found.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert {*hub.bodies()} == {"tokenizer.json", "tokenizer_config.json"}


def test_a_model_that_is_not_supported_is_refused_before_its_weights_come(hub: FakeHub, llama: Repository, find: Find, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["OtherForCausalLM"]}
    llama.commit_folder(folder, **{"config.json": json.dumps(config).encode()})
    with pytest.raises(UnsupportedError, match="OtherForCausalLM"):
        find(NAME)
    assert not [name for name in hub.bodies() if name.endswith(".safetensors")]


def test_weights_in_pickle_are_refused_and_not_fetched(hub: FakeHub, find: Find) -> None:
    hub.repository("tiny/pickle").commit({"config.json": b"{}", "pytorch_model.bin": b"pickle" * 1000})
    for name in ("tiny/pickle", "tiny/pickle:pytorch_model.bin"):
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*can run code.*safetensors"):
            find(name)
    assert hub.bodies() == []


def test_an_index_that_names_what_is_not_there_is_refused(hub: FakeHub, llama: Repository, find: Find, folder: Path) -> None:
    (folder / SHARDS[1]).unlink()
    llama.commit_folder(folder)
    with pytest.raises(CheckpointError, match=rf"the index names {SHARDS[1]}, which the repository does not have"):
        find(NAME)


def test_a_broken_connection_is_taken_up_where_it_ended(
    hub: FakeHub, llama: Repository, find: Find, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what came of a whole chunk is kept
    hub.cut[SHARDS[0]] = [3000]
    assert open_checkpoint(find(NAME)).fingerprint() == open_checkpoint(folder).fingerprint()
    asked = [request.range for request in hub.requests if request.path.endswith(SHARDS[0]) and request.path.startswith("/storage/")]
    assert asked == [None, "bytes=3000-"]


def test_a_start_that_failed_midway_fetches_only_the_rest_the_next_time(hub: FakeHub, llama: Repository, find: Find, folder: Path) -> None:
    hub.statuses[f"/storage/{hashlib.sha256((folder / SHARDS[1]).read_bytes()).hexdigest()}"] = 503
    with pytest.raises(CheckpointError, match=r"failed \(503.*try again later"):
        find(NAME)
    hub.statuses.clear()
    before = len(hub.bodies())
    assert open_checkpoint(find(NAME)).fingerprint() == open_checkpoint(folder).fingerprint()
    assert {SHARDS[1]} <= {*hub.bodies()[before:]} <= {*SHARDS}


@pytest.mark.parametrize("name", [SHARDS[1], "config.json"])
def test_content_that_is_not_what_the_hub_named_is_refused_and_not_kept(hub: FakeHub, llama: Repository, find: Find, folder: Path, name: str) -> None:
    right = (folder / name).read_bytes()
    hub.changed = {name: right[:-1] + bytes([right[-1] ^ 1])}
    with pytest.raises(CheckpointError, match=rf"{name} does not have the content that {hub.url} named.*start again"):
        find(NAME)
    hub.changed = {}
    assert open_checkpoint(find(NAME)).fingerprint() == open_checkpoint(folder).fingerprint()


def test_content_of_another_size_is_refused(hub: FakeHub, llama: Repository, find: Find) -> None:
    hub.changed = {SHARDS[0]: b"short" * 1000}
    with pytest.raises(CheckpointError, match=r"was damaged.*start again"):
        find(NAME)


def test_a_file_of_the_cache_that_lost_its_end_is_fetched_again(
    hub: FakeHub, llama: Repository, find: Find, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find(NAME)
    os.truncate(found / SHARDS[0], 100)
    with monkeypatch.context() as patch:
        go_offline(patch)
        with pytest.raises(CheckpointError, match=rf"does not hold {SHARDS[0]} whole"):
            find(NAME)
    assert open_checkpoint(find(NAME)).fingerprint() == open_checkpoint(folder).fingerprint()


def test_private_models_need_a_token_with_access(hub: FakeHub, folder: Path, find: Find) -> None:
    hub.repository(NAME, private=True, tokens={"hf_member"}).commit_folder(folder)
    hub.accounts |= {"hf_member", "hf_stranger"}
    with pytest.raises(CheckpointError, match=r"no such model \(401\).*if it is private, give a token with --hf-token or HF_TOKEN"):
        find(NAME, token=False)
    with pytest.raises(CheckpointError, match=r"no such model \(404\).*the token that was sent has no access"):
        find(NAME, token="hf_stranger")
    with pytest.raises(CheckpointError, match=r"refused the token \(401\)") as caught:
        find(NAME, token="hf_wrong")
    assert "hf_wrong" not in str(caught.value)
    assert find(NAME, token="hf_member").is_dir()


def test_a_stored_token_that_is_not_there_is_asked_for(hub: FakeHub, llama: Repository, find: Find) -> None:
    with pytest.raises(CheckpointError, match=r"stored token was asked for and there is none; log in"):
        find(NAME, token=True)
    assert hub.requests == []


def test_gated_models_say_where_to_ask_for_access(hub: FakeHub, folder: Path, find: Find) -> None:
    hub.repository(NAME, gated=True, tokens={"hf_member"}).commit_folder(folder)
    hub.accounts |= {"hf_member", "hf_stranger"}
    with pytest.raises(CheckpointError, match=rf"is gated \(401\), and no token was sent; ask for access at {hub.url}/{NAME}"):
        find(NAME)
    with pytest.raises(CheckpointError, match=r"is gated \(403\), and the account of this token has no access yet"):
        find(NAME, token="hf_stranger")
    assert find(NAME, token="hf_member").is_dir()


def test_the_token_goes_to_the_hub_and_not_to_its_storage(hub: FakeHub, llama: Repository, find: Find) -> None:
    hub.accounts.add("hf_member")
    find(NAME, token="hf_member")
    sent = {request.path.startswith("/storage/"): request.token for request in hub.requests}
    assert sent == {False: "hf_member", True: None}


@pytest.mark.parametrize(
    ("status", "found"),
    [
        (403, r"forbids access to it \(403"),
        (404, r"no such model \(404\).*no folder or file of this name here"),
        (500, r"failed \(500.*try again later"),
    ],
)
def test_other_answers_of_a_hub_are_errors_that_say_what_to_do(hub: FakeHub, find: Find, status: int, found: str) -> None:
    hub.statuses["/api/"] = status
    with pytest.raises(CheckpointError, match=found):
        find(NAME)


def test_an_unknown_revision_lists_those_there_are(hub: FakeHub, llama: Repository, find: Find) -> None:
    llama.refs["v1.0"] = llama.refs["main"]
    for revision in ("v2.0", "0" * 40):
        with pytest.raises(CheckpointError, match=rf"has no revision '{revision}' \(404\); there are main, v1\.0, and every commit"):
            find(NAME, revision=revision)


def test_an_address_that_is_no_hub_is_named(hub: FakeHub, find: Find) -> None:
    hub.statuses["/api/"] = 200
    with pytest.raises(CheckpointError, match=rf"{hub.url} does not answer as a hub does.*check HF_ENDPOINT"):
        find(NAME)


def test_what_does_not_fit_the_disk_is_refused_before_it_is_fetched(hub: FakeHub, llama: Repository, find: Find, tmp_path: Path) -> None:
    hub.sizes[SHARDS[0]] = 1 << 60
    with pytest.raises(CheckpointError, match=rf"needs 1152921504\.\d+ GB, the disk of the cache {tmp_path / 'cache'} has .* free.*--download-dir"):
        find(NAME)
    assert not [name for name in hub.bodies() if name.endswith(".safetensors")]


def test_a_full_disk_and_a_folder_that_cannot_be_written_name_the_cache(find: Find, llama: Repository, tmp_path: Path) -> None:
    options, cache = HubOptions(), Path("/some/cache")
    assert "the disk of the cache /some/cache is full" in str(explained(OSError(28, "No space left on device"), NAME, options, cache))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=rf"the cache {tmp_path / 'file'} cannot be written to.*--download-dir"):
        find(NAME, cache_folder=tmp_path / "file")


def test_a_path_is_never_looked_for_on_a_hub(hub: FakeHub, llama: Repository, find: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert find(NAME) == Path(NAME)
    with pytest.raises(ConfigError, match=r"revision 'v1' is of a Hugging Face name, 'tiny/llama' is here"):
        find(NAME, revision="v1")
    with pytest.raises(CheckpointError, match=r"expected a folder.*\.gguf file.*smollm2.*Hugging Face name"):
        find("no-such-model")
    assert hub.requests == []


def test_progress_is_told_on_standard_error_and_only_if_asked_for(
    llama: Repository, find: Find, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find(NAME, cache_folder=tmp_path / "silent")
    assert capsys.readouterr() == ("", "")
    find(NAME, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(": ")[1].split()[0] for line in err.splitlines()] == ["downloading", "downloaded"]
    assert all(line.startswith(f"{NAME} at {llama.refs['main'][:12]}: ") for line in err.splitlines())
    find(NAME, progress=True)
    assert capsys.readouterr() == ("", "")


def test_local_models_do_not_load_the_hub_library() -> None:
    import subprocess

    code = "import sys, lockstep.cli.main, lockstep.launch.serving; from lockstep.weights import find_model; find_model('.')\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print([n for n in ('huggingface_hub', 'tqdm', 'torch') if n in sys.modules])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
