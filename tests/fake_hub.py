"""A Hugging Face hub on loopback: repositories as folders of bytes, served as the real one serves them, with the faults that real ones have.

Knows the hub's HTTP interface as huggingface_hub speaks it: model info, tree, refs, `resolve` with ETag and X-Repo-Commit, large files behind a
redirect to a storage host that takes ranges. Does not know models, and uses none of our code.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 4096
"""Files from this size on are stored as large files: by SHA-256, behind a redirect."""


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    """commits: files by hash. refs: hash by branch or tag. private: seen with one of `tokens`. gated: seen by all, its files only with a token."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    tokens: set[str] = field(default_factory=set)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """A new commit with these files and no others; the branch points to it."""
        named = repr([(name, git_sha1(content)) for name, content in sorted(files.items())] + [len(self.commits)])
        made = hashlib.sha1(named.encode()).hexdigest()
        self.commits[made], self.refs[branch] = dict(files), made
        return made

    def commit_folder(self, folder: Path, branch: str = "main", **more: bytes) -> str:
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return self.commit({**files, **more}, branch)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    token: str | None
    range: str | None


@dataclass
class FakeHub:
    """url: of the hub. accounts: tokens that are known; any other is refused. requests: what was asked, in order.

    Faults, by a file's name: cut: the connection ends after so many bytes of an answer, once a number in the list. changed: the bytes that come in
    place of the file's own. statuses: path prefix -> status of every answer to it, which is a page for people. sizes: the size that is named instead
    of the real one.
    """

    url: str = ""
    storage_url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    accounts: set[str] = field(default_factory=set)
    requests: list[Request] = field(default_factory=list)
    cut: dict[str, list[int]] = field(default_factory=dict)
    changed: dict[str, bytes] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def repository(self, name: str, **settings: Any) -> Repository:
        return self.repositories.setdefault(name, Repository(**settings))

    def bodies(self) -> list[str]:
        """Names of the files whose content was asked for, in order."""
        return [request.path.rsplit("/", 1)[-1] for request in self.requests if request.method == "GET" and "/api/" not in request.path]


@dataclass
class _Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None


def _refusal(status: int, code: str, message: str = "") -> _Answer:
    return _Answer(status, {"X-Error-Code": code, "X-Error-Message": message}, json.dumps({"error": message or code}).encode())


def _as_json(value: object) -> _Answer:
    return _Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _answer(hub: FakeHub, request: Request) -> _Answer:
    for prefix, status in hub.statuses.items():
        if request.path.startswith(prefix):
            return _Answer(status, {}, b"<html></html>")
    if request.path.startswith("/storage/"):
        _, _, sha256, file = request.path.split("/", 3)
        return _content(hub, request, unquote(file), _stored(hub, sha256), accept_range=True)
    if request.token is not None and request.token not in hub.accounts:
        return _Answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"{}")
    match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|refs))?(?:/([^/?]+))?(?:\?.*)?", request.path)
    if match:
        return _listing(hub, request, match[1], match[2] or "revision", unquote(match[3] or "main"))
    match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", request.path)
    if match:
        return _resolve(hub, request, match[1], unquote(match[2]), unquote(match[3]))
    return _refusal(404, "RepoNotFound")


def _visible(hub: FakeHub, request: Request, name: str) -> Repository | None:
    found = hub.repositories.get(name)
    return None if found is None or (found.private and request.token not in found.tokens) else found


def _listing(hub: FakeHub, request: Request, name: str, kind: str, revision: str) -> _Answer:
    repository = _visible(hub, request, name)
    if repository is None:
        return _refusal(401 if request.token is None else 404, "RepoNotFound", "Repository not found")
    if kind == "refs":
        branches = [{"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": commit} for ref, commit in repository.refs.items()]
        return _as_json({"branches": branches, "tags": [], "converts": []})
    commit = repository.refs.get(revision, revision)
    if commit not in repository.commits:
        return _refusal(404, "RevisionNotFound", "Invalid rev id")
    files = repository.commits[commit]
    if kind == "revision":
        return _as_json({"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files], "private": repository.private})
    return _as_json([_entry(file, content, hub.sizes.get(file, len(content))) for file, content in files.items()])


def _entry(file: str, content: bytes, size: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": file, "size": size, "oid": git_sha1(content)}
    if len(content) >= LARGE_BYTES:
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 130}
    return entry


def _resolve(hub: FakeHub, request: Request, name: str, revision: str, file: str) -> _Answer:
    repository = _visible(hub, request, name)
    if repository is None:
        return _refusal(401 if request.token is None else 404, "RepoNotFound")
    if repository.gated and request.token not in repository.tokens:
        return _refusal(401 if request.token is None else 403, "GatedRepo", f"Access to model {name} is restricted")
    commit = repository.refs.get(revision, revision)
    if commit not in repository.commits:
        return _refusal(404, "RevisionNotFound")
    if file not in repository.commits[commit]:
        return _refusal(404, "EntryNotFound")
    content = repository.commits[commit][file]
    headers = {"X-Repo-Commit": commit}
    if len(content) < LARGE_BYTES:
        answer = _content(hub, request, file, content, accept_range=False)
        answer.headers |= {**headers, "ETag": f'"{git_sha1(content)}"'}
        return answer
    sha256 = hashlib.sha256(content).hexdigest()
    headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(hub.sizes.get(file, len(content)))}
    return _Answer(302, {**headers, "Location": f"{hub.storage_url}/storage/{sha256}/{file}"})


def _stored(hub: FakeHub, sha256: str) -> bytes:
    contents = (content for repository in hub.repositories.values() for files in repository.commits.values() for content in files.values())
    return next(content for content in contents if hashlib.sha256(content).hexdigest() == sha256)


def _content(hub: FakeHub, request: Request, file: str, content: bytes, *, accept_range: bool) -> _Answer:
    content = hub.changed.get(file, content)
    headers, status, whole = {"Accept-Ranges": "bytes"}, 200, len(content)
    if accept_range and request.range is not None:
        start = int(request.range.removeprefix("bytes=").split("-")[0])
        content, status = content[start:], 206
        headers["Content-Range"] = f"bytes {start}-{whole - 1}/{whole}"
    cuts = hub.cut.get(file, []) if request.method == "GET" else []
    return _Answer(status, headers, content, cut=cuts.pop(0) if cuts else None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def _serve(self) -> None:
        split = urlsplit(self.path)
        token = self.headers.get("Authorization")
        asked = Request(self.command, split.path, token.removeprefix("Bearer ") if token else None, self.headers.get("Range"))
        self.hub.requests.append(asked)
        answer = _answer(self.hub, asked)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if answer.cut is not None and answer.cut < len(answer.body):
            self.wfile.write(answer.body[: answer.cut])
            self.close_connection = True
            return
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that answers until the block ends. Its storage is another origin (localhost, not 127.0.0.1), as on the real one."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.storage_url = f"http://localhost:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
