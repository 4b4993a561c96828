"""What went wrong with a hub, as a CheckpointError that says what to do. Knows the errors of huggingface_hub; does not know what was being done."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
    XetDownloadError,
)

from lockstep.errors import CheckpointError
from lockstep.weights.hub_names import HubOptions

HTTP_ERROR: type[Exception] = next(base for base in HfHubHTTPError.__bases__ if base is not OSError)
"""The root of the HTTP library's errors: httpx below huggingface_hub 2, httpx2 from there on."""

FAILURES: tuple[type[Exception], ...] = (HTTP_ERROR, OSError, RevisionResolutionError, XetDownloadError, EntryNotFoundError, json.JSONDecodeError)
"""Whatever a call of huggingface_hub raises that is not a mistake of ours. JSONDecodeError: what answered is no hub."""

_WRAPPERS = (RevisionResolutionError, LocalEntryNotFoundError)


def explained(error: Exception, repository: str, options: HubOptions, cache: Path) -> CheckpointError:
    """error: one of FAILURES. The token is never part of a message."""
    while isinstance(error, _WRAPPERS) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return CheckpointError(f"model {repository!r}: {_reason(error, repository, options, cache)}")


def _reason(error: Exception, repository: str, options: HubOptions, cache: Path) -> str:
    endpoint = endpoint_of(options)
    if isinstance(error, OfflineModeIsEnabled) or (isinstance(error, _WRAPPERS) and huggingface_hub.is_offline_mode()):
        what = f"revision {options.revision!r} of it" if options.revision else "it"
        return f"HF_HUB_OFFLINE is set and the cache {cache} does not hold {what}; unset it to download once, or name a local folder or .gguf file"
    if isinstance(error, HfHubHTTPError):
        return _http_reason(error, repository, options, endpoint)
    if isinstance(error, (FileMetadataError, json.JSONDecodeError)):
        return f"{endpoint} does not answer as a hub does ({_first_line(error)}); check HF_ENDPOINT and the proxy settings"
    if isinstance(error, LocalTokenNotFoundError):
        return "the stored token was asked for and there is none; log in with `hf auth login`, or give the token itself with --hf-token or HF_TOKEN"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of the cache {cache} is full; make room there, or name another folder with --download-dir (or HF_HOME)"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return f"the cache {cache} cannot be written to ({error}); name another folder with --download-dir (or HF_HOME)"
    if isinstance(error, OSError) and "Consistency check failed" in str(error):
        return f"a download from {endpoint} was damaged ({_first_line(error)}); start again: files that came whole are kept"
    if isinstance(error, HTTP_ERROR):
        return (
            f"no connection to {endpoint} ({type(error).__name__}: {_first_line(error)}), and the cache {cache} does not hold all of it; check the "
            "network, proxies and HF_ENDPOINT, or name a local folder or .gguf file"
        )
    return f"{endpoint} could not deliver it ({type(error).__name__}: {_first_line(error)}); start again: files that came whole are kept"


def _http_reason(error: HfHubHTTPError, repository: str, options: HubOptions, endpoint: str) -> str:
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        remedy = "the account of this token has no access yet" if _has_token(options) else "no token was sent"
        where = f"{endpoint}/{repository}"
        return f"is gated ({status}), and {remedy}; ask for access at {where}, then give a token of that account with --hf-token or HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"has no revision {options.revision!r} ({status}); {_revisions(repository, options)}"
    if isinstance(error, DisabledRepoError):
        return f"is disabled at {endpoint} ({status}); use another model"
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        remedy = "the token that was sent has no access" if _has_token(options) else "give a token with --hf-token or HF_TOKEN"
        return (
            f"{endpoint} has no such model ({status}), and there is no folder or file of this name here; check the name; if it is private, {remedy}"
        )
    if status == 401:
        return f"{endpoint} refused the token (401); make a new one, or leave --hf-token and HF_TOKEN out for a public model"
    if status == 403:
        return f"{endpoint} forbids access to it (403: {_first_line(error)}); use a token that may read it, with --hf-token or HF_TOKEN"
    if status == 429:
        return f"{endpoint} asks for fewer requests (429); wait a few minutes, or give a token with --hf-token or HF_TOKEN for a higher limit"
    return f"{endpoint} failed ({status}: {_first_line(error)}); try again later; HF_HUB_OFFLINE=1 uses what the cache holds"


def endpoint_of(options: HubOptions) -> str:
    return options.endpoint or str(constants.ENDPOINT)


def _has_token(options: HubOptions) -> bool:
    return bool(options.token) or (options.token is None and huggingface_hub.get_token() is not None)


def _revisions(repository: str, options: HubOptions) -> str:
    """What could have been meant. Asks the hub once more; says so where that fails."""
    try:
        found = huggingface_hub.HfApi(endpoint=options.endpoint, token=options.token).list_repo_refs(repository)
    except FAILURES:
        return "name a branch, tag or commit that it has"
    names = [ref.name for ref in (*found.branches, *found.tags)]
    return f"there are {', '.join(sorted(names)[:40])}, and every commit by its hash" if names else "it has no revisions"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"
