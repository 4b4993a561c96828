"""Errors as OpenAI's API words them. Knows statuses and the error object; does not know which check found what.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from lockstep.errors import CallerError, InvalidRequestError, LockstepError

_OVER_HTTP: Mapping[str, str] = MappingProxyType({"extra_args": "vllm_xargs"})
"""Parameters that have another name here than in Python."""


class UnauthorizedError(CallerError):
    """The API key is missing or wrong."""

    http_status = 401
    code = "invalid_api_key"


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""

    http_status = 404
    code = "model_not_found"


class BodyTooLargeError(CallerError):
    """The request body is longer than the server takes."""

    http_status = 413
    code = "request_too_large"


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt and what it asks for, does not fit the model's window."""

    code = "context_length_exceeded"


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete: there is nobody to answer."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail


def status_of(error: Exception) -> int:
    """HTTP status that answers `error`; 500 for what is not of our tree."""
    return error.http_status if isinstance(error, LockstepError) else 500


def error_body(error: Exception) -> bytes:
    """The JSON error object for `error`. What is not of our tree is named only as an internal error: its text may hold what is not the caller's."""
    status = status_of(error)
    if not isinstance(error, LockstepError):
        return plain_error_body(status, "the server failed on this request; it has been logged", code="internal_error")
    param, message = getattr(error, "param", None), str(error)
    if isinstance(param, str) and param in _OVER_HTTP:
        message, param = message.replace(param, _OVER_HTTP[param], 1), _OVER_HTTP[param]
    return plain_error_body(status, message, param=param, code=error.code)


def plain_error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON error object for an HTTP status."""
    return msgspec.json.encode(ErrorBody(error=ErrorDetail(message=message, type=_type_of(status), param=param, code=code)))


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 404:
        return "not_found_error"
    if status in (429, 503):
        return "overloaded_error"
    return "invalid_request_error" if status < 500 else "internal_error"
