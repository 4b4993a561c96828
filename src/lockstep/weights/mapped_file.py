"""A file as read-only bytes. Knows mmap and content hashes; does not know any format.

A file must not be cut short while it is mapped: the operating system ends a process that reads a page which is gone.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep.errors import CheckpointError

HASH_CHUNK_BYTES = 8 << 20
HASH_THREADS_MAX = 8


def map_file(path: Path) -> memoryview:
    """The bytes of `path`, mapped: nothing is read until it is looked at. The view keeps the mapping alive. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise CheckpointError(f"{path}: the file is empty; copy or download it again")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; check the path") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); check that it is a file and that this user may read it") from None


def content_hash(parts: Mapping[str, memoryview]) -> str:
    """64 hex digits that name the content of some labelled files: every byte, size and label counts, the order of the mapping does not.

    A tree of BLAKE2b hashes over chunks of 8 MiB, so that large files are hashed on several cores (about 1 GB/s a core, from memory).
    """
    chunks = [view[start : start + HASH_CHUNK_BYTES] for _, view in sorted(parts.items()) for start in range(0, len(view), HASH_CHUNK_BYTES)]
    with ThreadPoolExecutor(max_workers=min(HASH_THREADS_MAX, os.cpu_count() or 1)) as pool:
        digests = iter(list(pool.map(_chunk_digest, chunks)))
    root = hashlib.blake2b(digest_size=32, person=b"lockstep-files")
    for label, view in sorted(parts.items()):
        encoded = label.encode()
        root.update(len(encoded).to_bytes(8, "little") + encoded + len(view).to_bytes(8, "little"))
        for _ in range(0, len(view), HASH_CHUNK_BYTES):
            root.update(next(digests))
    return root.hexdigest()


def _chunk_digest(chunk: memoryview) -> bytes:
    return hashlib.blake2b(chunk, digest_size=32, person=b"lockstep-chunk").digest()
