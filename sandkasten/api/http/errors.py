"""Errors as HTTP answers: the table from the classes of `sandkasten/errors.py` to status codes, and the error body.

An exception without a row is a bug: the client gets 500 INTERNAL_ERROR and the log a traceback. An answer with that
code tells the client no internals; the log has them under the request's id.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import attrs
import trio

from sandkasten import errors, logcontext
from sandkasten.api.http.json import Body, encode_json
from sandkasten.errors import SandkastenError

log = logging.getLogger(__name__)

_VALUES_PER_CHECKPOINT = 64

STATUS: dict[type[SandkastenError], int] = {
    errors.InvalidRequest: 400,
    errors.InvalidRule: 400,
    errors.InvalidImage: 400,
    errors.PathOutside: 400,
    errors.InvalidReference: 400,
    errors.Unauthorized: 401,
    errors.PermissionDenied: 403,
    errors.Forbidden: 403,
    errors.RouteNotFound: 404,
    errors.SessionNotFound: 404,
    errors.ExecNotFound: 404,
    errors.ShellNotFound: 404,
    errors.TerminalNotFound: 404,
    errors.PreviewNotFound: 404,
    errors.FileNotFound: 404,
    errors.WorkspaceNotFound: 404,
    errors.SecretNotFound: 404,
    errors.JobNotFound: 404,
    errors.MethodNotAllowed: 405,
    errors.IsADirectory: 409,
    errors.NotAFile: 409,
    errors.NotADirectory: 409,
    errors.NotEmpty: 409,
    errors.WorkspaceBusy: 409,
    errors.SessionPaused: 409,
    errors.ShellBusy: 409,
    errors.ShellFailed: 409,
    errors.WorkInterrupted: 409,
    errors.Conflict: 409,
    errors.Ambiguous: 409,
    errors.LimitInUse: 409,
    errors.ImageInUse: 409,
    errors.ExecIdsExhausted: 409,
    errors.ExecEnded: 409,
    errors.SessionExpired: 410,
    errors.ExecGone: 410,
    errors.CursorGone: 410,
    errors.PreconditionFailed: 412,
    errors.TooLarge: 413,
    errors.RangeNotSatisfiable: 416,
    errors.LayerRefused: 422,
    errors.QuotaExceeded: 429,
    errors.BuildFailed: 500,
    errors.RunnerLost: 500,
    errors.RunnerProtocolError: 500,
    errors.StoreFailed: 500,
    errors.LauncherGone: 500,
    errors.NotInstalled: 501,
    errors.NetworkNotSupported: 501,
    errors.PreviewsOff: 501,
    errors.SecretsOff: 501,
    errors.RegistryRefused: 502,
    errors.RegistryUnauthorized: 502,
    errors.DigestMismatch: 502,
    errors.Capacity: 503,
    errors.ActorGone: 503,
    errors.NsinitLost: 503,
    errors.BuildInterrupted: 503,
    errors.EgressUnavailable: 503,
    errors.Overloaded: 503,
    errors.ShuttingDown: 503,
    errors.Draining: 503,
    errors.CommandTimeout: 504,
    errors.DiskFull: 507,
    errors.DiskReserve: 507,
    errors.StoreFull: 507,
}

MAX_HEADERS = 100
INTERNAL_CODE = SandkastenError.code
INTERNAL_MESSAGE = "the daemon failed to serve this request; its log says why under this request id"

Headers = tuple[tuple[str, str], ...]


@attrs.frozen
class Answer:
    """A whole answer with a JSON body."""

    status: int
    body: bytes
    headers: Headers = ()


@attrs.frozen(kw_only=True)
class ErrorBody(Body):
    """The body of every answer that is an error."""

    error_code: str
    message: str
    details: Mapping[str, Any] | None = None  # JSON values
    retryable: bool
    request_id: str | None


def json_answer(value: object, *, status: int = 200, headers: Headers = ()) -> Answer:
    """Return an answer with `value`, an instance of a body class or a JSON value, as its content."""
    return Answer(status, encode_json(value), headers)


async def json_list_answer(values: Iterable[object], *, headers: Headers = ()) -> Answer:
    """Return `values` as the JSON answer of a list, which may have thousands; other tasks have turns meanwhile."""
    parts = []
    taken = iter(values)
    while batch := list(islice(taken, _VALUES_PER_CHECKPOINT)):
        parts.append(encode_json(batch)[1:-1])
        await trio.lowlevel.checkpoint()
    return Answer(200, b"[" + b",".join(parts) + b"]", headers)


def error_body(error: Exception) -> ErrorBody:
    """Return the public part of an error and log the rest, so call this once per error."""
    request_id = logcontext.origin.get().request_id
    if isinstance(error, SandkastenError) and type(error) in STATUS and error.code != INTERNAL_CODE:
        return ErrorBody(
            error_code=error.code,
            message=error.message,
            details=dict(error.details) or None,
            retryable=error.retryable,
            request_id=request_id,
        )
    is_retryable = False
    if not isinstance(error, SandkastenError) or type(error) not in STATUS:
        log.error("unexpected error: %s", error, exc_info=error)
    else:
        log.error("%s: %s", type(error).__name__, error, extra=_internals(error))
        is_retryable = error.retryable
    return ErrorBody(error_code=INTERNAL_CODE, message=INTERNAL_MESSAGE, retryable=is_retryable, request_id=request_id)


def error_answer(error: Exception) -> Answer:
    """Return the answer for any exception."""
    status = STATUS.get(type(error), 500) if isinstance(error, SandkastenError) else 500
    headers: Headers = ()
    if isinstance(error, errors.Capacity | errors.QuotaExceeded):
        headers = (*headers, ("retry-after", str(error.retry_after_s)))
    if isinstance(error, errors.MethodNotAllowed):
        headers = (*headers, ("allow", str(error.details.get("allow", ""))))
    if isinstance(error, errors.RangeNotSatisfiable):
        headers = (*headers, ("content-range", f"bytes */{error.details.get('size', 0)}"))
    if isinstance(error, errors.Unauthorized):
        headers = (*headers, ("www-authenticate", "Bearer"))
    return json_answer(error_body(error), status=status, headers=headers)


def head_too_large(max_bytes: int) -> errors.TooLarge:
    """Return the error of a request whose target and headers are over the limit."""
    return errors.TooLarge("the request's head is too large", max_head_bytes=max_bytes, max_headers=MAX_HEADERS)


def _internals(error: SandkastenError) -> Mapping[str, object]:
    if isinstance(error, errors.BuildFailed):
        return {"stage": error.stage, "path": error.path, "errno": error.errno}
    return {}
