"""Models by Hugging Face name: from the cache, or downloaded into it. Knows huggingface_hub and its cache; does not know what is in a file.

Imported only where a model is named so: huggingface_hub takes a while to load. Everything of one start is of one commit: a branch is looked up once.
What is downloaded is hashed and held against the hash that the hub named, before anything reads it.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import shutil
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.hf_api import RepoFile

from lockstep import __version__
from lockstep.errors import CheckpointError
from lockstep.models.spec import spec_from_config
from lockstep.weights.folder import INDEX_NAME, read_json_object, read_weight_map
from lockstep.weights.hub_errors import FAILURES, HTTP_ERROR, endpoint_of, explained
from lockstep.weights.hub_files import choose_gguf, is_folder_model, listed, refuse_pickle, small_files, whole_weights
from lockstep.weights.hub_names import HubName, HubOptions
from lockstep.weights.hub_progress import DownloadProgress, readable_bytes
from lockstep.weights.quantised import scheme_of

FILES_AT_ONCE = 4
HASH_CHUNK_BYTES = 4 << 20

_log = logging.getLogger("lockstep.weights")


def fetch(name: HubName, options: HubOptions, *, tokenizer_only: bool = False) -> Path:
    """The local folder or .gguf file (the first part of a split one) behind a name; whatever of it the cache lacks is downloaded first, and nothing
    else. tokenizer_only: no weights and no config, unless the name's variant is a GGUF model.

    Raises CheckpointError that says what to do: for what the hub does not have or does not give, what the cache lacks while offline, a full disk, a
    damaged download; UnsupportedError, before the weights are downloaded, for a model that is not supported.
    """
    cache = (options.cache_folder or Path(constants.HF_HUB_CACHE)).expanduser().resolve()
    try:
        return _place(_Snapshot(name, options, cache), name, tokenizer_only=tokenizer_only)
    except FAILURES as error:
        raise explained(error, name.repository, options, cache) from error


def _place(snapshot: _Snapshot, name: HubName, *, tokenizer_only: bool) -> Path:
    names = snapshot.names
    if name.variant is not None:
        refuse_pickle(name.variant, snapshot.label)
    if name.variant is None and tokenizer_only and (small := small_files(names, tokenizer_only=True)):
        return snapshot.get(small, shown=False)
    if name.variant is None and is_folder_model(names):
        folder = snapshot.get(small_files(names), shown=False)
        config = read_json_object(folder / "config.json")
        scheme_of(config)
        spec_from_config(config)
        indexed = INDEX_NAME in names
        weights = sorted({*read_weight_map(folder / INDEX_NAME).values()}) if indexed else [whole_weights(names, snapshot.label)]
        return snapshot.get(weights)
    files = choose_gguf(names, name, snapshot.label)
    return snapshot.get(files) / files[0]


class _Snapshot:
    """One commit of a repository: its files, as the hub lists them, and those of them that are in the cache."""

    def __init__(self, name: HubName, options: HubOptions, cache: Path) -> None:
        self._repository = name.repository
        self._options = options
        self._cache = cache
        self._api = huggingface_hub.HfApi(endpoint=options.endpoint, token=options.token, library_name="lockstep", library_version=__version__)
        self._revision = self._api.resolve_revision(name.repository, revision=options.revision, cache_dir=cache)
        self._commit = self._revision.resolved
        self._folder = cache / f"models--{name.repository.replace('/', '--')}" / "snapshots" / self._commit
        self.label = f"model {name.repository!r} at {self._commit[:12]}"
        self._sizes = self._list()
        _log.info("%s: commit %s of revision %s, from %s", name, self._commit, self._revision, endpoint_of(options))

    @property
    def names(self) -> Collection[str]:
        return self._sizes.keys()

    def get(self, names: Sequence[str], *, shown: bool = True) -> Path:
        """The snapshot's folder, once these files are in it. shown: with progress, if the options ask for it; small files are not worth it."""
        absent = [name for name in names if name not in self._sizes]
        if absent:
            raise CheckpointError(f"{self.label}: the index names {listed(absent)}, which the repository does not have; it is incomplete")
        missing = [name for name in names if not self._is_whole(name)]
        if missing and huggingface_hub.is_offline_mode():
            raise CheckpointError(
                f"{self.label}: HF_HUB_OFFLINE is set and the cache {self._cache} does not hold {listed(missing)} whole; unset it to download once, "
                "or name a local folder or .gguf file"
            )
        if missing:
            self._download_all(missing, shown=shown and self._options.progress)
            self._keep_listing(names)
        return self._folder

    def _list(self) -> dict[str, int | None]:
        """Name -> size of every file of the commit; the sizes are unknown, and files that were not downloaded are missing, where neither the hub nor
        a listing that was kept can tell."""
        try:
            kept = huggingface_hub.get_cached_repo_tree(self._repository, revision=self._revision, cache_dir=self._cache)
            return {file.path: file.size for file in kept}
        except CachedRepoTreeNotFoundError:
            pass
        try:
            found = self._api.list_repo_tree(self._repository, recursive=True, revision=self._commit)
            return {file.path: file.size for file in found if isinstance(file, RepoFile)}
        except (HTTP_ERROR, OSError) as error:
            answer = getattr(error, "response", None)
            refused = answer is not None and answer.status_code < 500  # then it counts, whatever is in the cache
            if refused or not self._folder.is_dir():
                raise
        return {file.relative_to(self._folder).as_posix(): None for file in self._folder.rglob("*") if file.is_file()}

    def _is_whole(self, name: str) -> bool:
        path, size = self._folder / name, self._sizes[name]
        return path.is_file() and (size is None or path.stat().st_size == size)

    def _download_all(self, names: Sequence[str], *, shown: bool) -> None:
        for name in names:
            _discard(self._folder / name)  # of another size than the hub says: damaged since
        needed = sum(self._sizes[name] or 0 for name in names)
        self._cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._cache).free
        if needed > free:
            raise CheckpointError(
                f"{self.label}: needs {readable_bytes(needed)}, the disk of the cache {self._cache} has {readable_bytes(free)} free; make room "
                "there, or name another folder with --download-dir (or HF_HOME)"
            )
        label = f"{self._repository} at {self._commit[:12]}"
        with (
            DownloadProgress(label, needed, shown=shown) as progress,
            ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="lockstep-download") as pool,
        ):
            running = [pool.submit(self._download, name, progress) for name in names]
            try:
                for done in as_completed(running):
                    done.result()
            except BaseException:
                progress.cancel()
                for other in running:
                    other.cancel()
                raise

    def _download(self, name: str, progress: DownloadProgress) -> None:
        """One file. huggingface_hub goes on where a connection broke; what it puts in the cache has the size that the hub named."""
        path = Path(
            huggingface_hub.hf_hub_download(
                self._repository,
                name,
                revision=self._commit,
                cache_dir=self._cache,
                endpoint=self._options.endpoint,
                token=self._options.token,
                library_name="lockstep",
                library_version=__version__,
                tqdm_class=_as_tqdm(progress),
            )
        )
        if not has_named_content(path):
            _discard(path)
            raise CheckpointError(
                f"{self.label}: {name} does not have the content that {endpoint_of(self._options)} named: the download was damaged; start again, "
                "and check proxies and mirrors if it stays so"
            )

    def _keep_listing(self, names: Sequence[str]) -> None:
        """Has huggingface_hub keep the commit's listing beside the files, so that a later start without a network knows what belongs to it."""
        huggingface_hub.snapshot_download(
            self._repository,
            revision=self._revision,
            allow_patterns=[glob.escape(name) for name in names],
            cache_dir=self._cache,
            endpoint=self._options.endpoint,
            token=self._options.token,
            library_name="lockstep",
            library_version=__version__,
            tqdm_class=_as_tqdm(DownloadProgress("", 0, shown=False)),
        )


def _as_tqdm(progress: DownloadProgress) -> Any:
    """huggingface_hub asks for a subclass of tqdm, or what is like one."""
    return progress.bar_class()


def has_named_content(path: Path) -> bool:
    """A file of the cache is a link to its content, which is named by the hub's ETag: a SHA-256 of the content for large files, for others a git
    object's SHA-1. False if that is not the hash of the content; True where nothing can be told (no link, an ETag of another kind)."""
    if not path.is_symlink():
        return True
    named = Path(os.readlink(path)).name.lower()
    if not all(letter in "0123456789abcdef" for letter in named):
        return True
    if len(named) == 64:
        return _digest(path, hashlib.sha256()) == named
    if len(named) == 40:  # some mirrors name the plain SHA-1
        size = path.stat().st_size
        return named in (_digest(path, hashlib.sha1(b"blob %d\0" % size)), _digest(path, hashlib.sha1()))
    return True


def _digest(path: Path, state: Any) -> str:
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            state.update(chunk)
    return str(state.hexdigest())


def _discard(path: Path) -> None:
    """Takes a file out of the cache, content and link."""
    if path.is_symlink():
        (path.parent / os.readlink(path)).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
