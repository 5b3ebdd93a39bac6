"""The error taxonomy: one base, families by cause (caller, system, sandbox, connection), one leaf per reaction.

The daemon and the SDK share this tree; the standard library is all that this file imports. The daemon raises the leaves
down to `StoreFull`, and `api/http/errors.py` maps them to status codes. `details` goes to the client unchanged, so
it never holds a host path, a traceback or a secret. Unmapped exceptions are bugs, not members of this tree.

A client gets an error of the server as an instance of both its leaf and `SandkastenAPIError`: `api_error` makes the
class from the leaf's `code`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, ClassVar


class SandkastenError(Exception):
    """Base of every error that the supervisor raises on purpose.

    `code` is the stable wire code; `retryable` says whether the same call may succeed later; `scope` is the extent of
    the failure: `task`, `session`, `node` or `cluster`. `acknowledged` is the number of bytes of input that the server
    had taken before, of an error of `Run.send`. `may_have_begun`: an earlier attempt of the call may have had its
    effect.
    """

    code: ClassVar[str] = "INTERNAL_ERROR"
    retryable: bool = False
    scope: ClassVar[str] = "task"
    acknowledged: int = 0
    may_have_begun: bool = False

    def __init__(self, message: str, /, **details: Any) -> None:  # details are JSON values
        super().__init__(message)
        self.message = message
        self.details: Mapping[str, Any] = {key: value for key, value in details.items() if value is not None}


# Caused by the caller -----------------------------------------------------------------------------------------------


class ClientError(SandkastenError):
    """The request can't be served in its present form."""


class InvalidRequest(ClientError):
    """Validation failed; `details` maps each bad field to its fault."""

    code = "INVALID_REQUEST"


class InvalidRule(ClientError):
    """A rule of the network is none, or names a group that the server does not have; `details.rule` is the rule."""

    code = "INVALID_RULE"


class InvalidImage(ClientError):
    """The image name is malformed, not allowed or not present, or the image has lost its shell."""

    code = "INVALID_IMAGE"


class InvalidReference(ClientError):
    """The reference names no image of a registry; the message says which part is at fault."""

    code = "INVALID_REFERENCE"


class LayerRefused(InvalidImage):
    """A layer of an image can't be unpacked; `details` has the `reason`, and the `member` that is at fault."""

    code = "LAYER_REFUSED"


class DigestMismatch(InvalidImage):
    """The content of an image is not what its digest or its size says."""

    code = "DIGEST_MISMATCH"


class ImageInUse(ClientError):
    """The image can't be deleted: sessions or pools have it."""

    code = "IMAGE_IN_USE"


class JobNotFound(ClientError):
    """There is no job of that id, or it is not kept any more."""

    code = "JOB_NOT_FOUND"


class Unauthorized(ClientError):
    """No key, or a wrong one."""

    code = "UNAUTHORIZED"


class Forbidden(ClientError):
    """The key is valid but lacks the access needed; `details` names both."""

    code = "FORBIDDEN"


class RouteNotFound(ClientError):
    """No such URL."""

    code = "NOT_FOUND"


class NotInstalled(ClientError):
    """The server lacks a part that is installed apart; `details.extra` names it."""

    code = "NOT_INSTALLED"


class NetworkNotSupported(ClientError):
    """The node's kernel can't give a session the network that was asked for."""

    code = "NETWORK_NOT_SUPPORTED"
    scope = "node"


class PreviewsOff(ClientError):
    """The node serves no previews; `details` has the setting that is missing."""

    code = "PREVIEWS_OFF"
    scope = "node"


class SecretsOff(ClientError):
    """The node keeps no secrets; `details.extra` names the part that is missing, if it is one."""

    code = "SECRETS_OFF"
    scope = "node"


class SecretNotFound(ClientError):
    """There is no secret of that name."""

    code = "SECRET_NOT_FOUND"


class PreviewNotFound(ClientError):
    """The session has no preview of that port."""

    code = "PREVIEW_NOT_FOUND"


class MethodNotAllowed(ClientError):
    """The URL exists, the method does not."""

    code = "METHOD_NOT_ALLOWED"


class SessionNotFound(ClientError):
    """No session of that id ever existed here."""

    code = "SESSION_NOT_FOUND"


class SessionExpired(ClientError):
    """The session ended; `details` carries `status`, `reason` and `end_reason`."""

    code = "SESSION_EXPIRED"
    scope = "session"


class SessionPaused(ClientError):
    """The session is paused, and requests like this one do not resume it."""

    code = "SESSION_PAUSED"
    scope = "session"


class ExecNotFound(ClientError):
    """No run of that id was ever started in this session."""

    code = "EXEC_NOT_FOUND"


class ExecGone(ClientError):
    """The run, or the requested part of its output, is not kept any more."""

    code = "EXEC_GONE"


class ExecEnded(ClientError):
    """The run has ended and takes no input, signal or size any more."""

    code = "EXEC_ENDED"


class ShellNotFound(ClientError):
    """The session has no shell of that name."""

    code = "SHELL_NOT_FOUND"


class TerminalNotFound(ClientError):
    """The session has no terminal of that id."""

    code = "TERMINAL_NOT_FOUND"


class CursorGone(ClientError):
    """The events after the cursor are not kept any more; `details` has the oldest cursor that is."""

    code = "CURSOR_GONE"


class FileNotFound(ClientError):
    """There is no such file, directory or upload."""

    code = "FILE_NOT_FOUND"


class IsADirectory(ClientError):
    """The path is a directory."""

    code = "IS_DIRECTORY"


class NotAFile(ClientError):
    """The path is a FIFO, a socket or a device."""

    code = "NOT_A_FILE"


class PermissionDenied(ClientError):
    """The user of the sandbox may not do that to the path; of a WebSocket: the page's origin is not allowed."""

    code = "PERMISSION_DENIED"


class NotADirectory(ClientError):
    """The path, or a part of it that must be one, is no directory."""

    code = "NOT_A_DIRECTORY"


class NotEmpty(ClientError):
    """The directory has entries."""

    code = "NOT_EMPTY"


class WorkspaceNotFound(ClientError):
    """There is no workspace of that id."""

    code = "WORKSPACE_NOT_FOUND"


class WorkspaceBusy(ClientError):
    """Another use of the workspace excludes this one; `details` names the sessions."""

    code = "WORKSPACE_BUSY"


class PathOutside(ClientError):
    """The path, resolved inside the sandbox, is under none of the allowed roots."""

    code = "PATH_OUTSIDE"


class TooLarge(ClientError):
    """Over a limit; `details` names the limit."""

    code = "TOO_LARGE"


class ShellBusy(ClientError):
    """The shell's bounded queue is full."""

    code = "SHELL_BUSY"
    retryable = True
    scope = "session"


class Conflict(ClientError):
    """An idempotency key or exec id was used again with another body, or a name is taken."""

    code = "CONFLICT"


class PreconditionFailed(ClientError):
    """A file is of another version than the request is for; `details.etag` is the present one, empty for no file."""

    code = "PRECONDITION_FAILED"


class Ambiguous(ClientError):
    """A text that is to be edited is there more than once; `details.lines` are the places."""

    code = "AMBIGUOUS"


class RangeNotSatisfiable(ClientError):
    """The part of a file begins behind its end; `details.size` is the file's."""

    code = "RANGE_NOT_SATISFIABLE"


class ExecIdsExhausted(ClientError):
    """The session takes no new id from a client: it has no room to remember one, or lost the used ones."""

    code = "EXEC_IDS_EXHAUSTED"
    scope = "session"


class LimitInUse(ClientError):
    """A session uses more than the new limit allows, so its limits stay as they are."""

    code = "LIMIT_IN_USE"
    retryable = True
    scope = "session"


# Not now ----------------------------------------------------------------------------------------------------------


class Unavailable(SandkastenError):
    """The request is valid; the system can't serve it now."""

    retryable = True


class CommandTimeout(Unavailable):
    """A blocking command ran out of time; `details` carries its partial result."""

    code = "COMMAND_TIMEOUT"
    retryable = False


class Capacity(Unavailable):
    """The node can't admit the request now; `retry_after_s`, the header Retry-After, is advice."""

    code = "CAPACITY"
    scope = "node"

    def __init__(self, message: str, /, *, retry_after_s: int = 1, **details: Any) -> None:  # details are JSON values
        super().__init__(message, **details)
        self.retry_after_s = retry_after_s


class Overloaded(Capacity):
    """A bounded queue inside the daemon is full."""


class ShuttingDown(Capacity):
    """The daemon is stopping."""


class Draining(Capacity):
    """The node admits no new sessions by order of the operator; live sessions go on."""


class NsinitLost(Capacity):
    """nsinit died or does not answer; running sandboxes go on, and another nsinit is started."""


class BuildInterrupted(Capacity):
    """A process that took part in making or changing a sandbox died or was too slow.

    The request was not at fault and may succeed. Nothing is left of a create.
    """


class EgressUnavailable(Capacity):
    """The process that carries the connections of sessions can't be started, or does not answer."""

    code = "EGRESS_UNAVAILABLE"


class ActorGone(Capacity):
    """The actor ended before it answered, or is being restarted."""


class RegistryRefused(Unavailable):
    """The registry can't be reached, or refused; `details` has its status and error codes, never its text."""

    code = "REGISTRY_REFUSED"


class RegistryUnauthorized(Unavailable):
    """The registry wants other credentials for that."""

    code = "REGISTRY_UNAUTHORIZED"
    retryable = False


class QuotaExceeded(Unavailable):
    """The key has used up a quota or a rate; `details` names the limit, `retry_after_s`, the header Retry-After, is
    advice."""

    code = "QUOTA_EXCEEDED"

    def __init__(self, message: str, /, *, retry_after_s: int = 1, **details: Any) -> None:  # details are JSON values
        super().__init__(message, **details)
        self.retry_after_s = retry_after_s


class DiskFull(Unavailable):
    """There is no room for that in the session or the workspace."""

    code = "DISK_FULL"
    retryable = False


class DiskReserve(Unavailable):
    """The machine's disk is too full for a new session; `details` has the free amount and the reserve."""

    code = "DISK_FULL"
    scope = "node"


# Caused by the sandbox ----------------------------------------------------------------------------------------------


class SandboxError(SandkastenError):
    """A failure below the daemon."""

    code = "INTERNAL_ERROR"
    scope = "session"


class BuildFailed(SandboxError):
    """nsinit could not build the sandbox, and has removed its parts.

    `stage`, `path` and `errno` are for the log, not for the client.
    """

    def __init__(self, message: str, /, *, stage: str, path: str = "", errno: int = 0) -> None:
        super().__init__(message)
        self.stage, self.path, self.errno = stage, path, errno


class LauncherGone(SandboxError):
    """nsinit and its launcher died. No other process can start an nsinit, so the daemon ends."""

    scope = "node"


class RunnerLost(SandboxError):
    """The connection to PID 1 ended in the middle of a request."""


class ShellFailed(SandboxError):
    """A shell can't be started, or takes no commands, because of the session's settings or content."""

    code = "SHELL_FAILED"


class WorkInterrupted(SandboxError):
    """The process inside that worked on files was ended, or does nothing more: a command of the session did that, or
    memory ran out. Whether the work had an effect is not known.
    """

    code = "WORK_INTERRUPTED"


class RunnerProtocolError(SandboxError):
    """PID 1 sent bytes that are no message of the contract; the sandbox is treated as hostile."""


class StoreFailed(SandboxError):
    """The database refused a write."""

    scope = "node"


class StoreFull(StoreFailed):
    """The disk of the database is full: no write succeeds until there is room, and live sessions go on."""

    code = "DISK_FULL"
    retryable = True


# Seen by clients alone ----------------------------------------------------------------------------------------------


class SandkastenAPIError(SandkastenError):
    """Answer of a server that is an error.

    `api_error` makes one that is an instance of the leaf as well; this class alone stands for an answer whose code is
    unknown here. `status_code` is the HTTP status, None for an error within a stream; `response_body` the body as it
    came; `request_id` names the request in the server's log; `retry_after_s` is the server's advice, if any.
    """

    def __init__(
        self,
        message: str,
        status_code: int | None = None,
        response_body: str | None = None,
        *,
        details: Mapping[str, Any] | None = None,  # JSON values
        retryable: bool = False,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        SandkastenError.__init__(self, message)
        self.details = dict(details or {})
        self.status_code = status_code
        self.response_body = response_body
        self.retryable = retryable
        self.request_id = request_id
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts of which a copy is made: the class itself is made at run time."""
        streamed = isinstance(self, SandkastenStreamError)
        return _remade, (self.code, self.status_code, self.message, streamed, vars(self))


class SandkastenStreamError(SandkastenError):
    """A stream of output ended with an error; one that the server sent is an instance of its leaf as well."""


class ConnectionFailed(SandkastenError):
    """No server answers, or the connection was lost and the request was not or could not be repeated."""

    retryable = True


class DeadlineExceeded(SandkastenError, TimeoutError):
    """The call's own time is over. A run that the call had begun was cancelled."""

    retryable = True


class Uncertain(SandkastenError):
    """The connection was lost before the answer to a request that is not repeated: its effect is unknown."""


class CommandFailed(SandkastenError):
    """A command did not succeed; raised by `check()` of a result. `result` is that result."""

    def __init__(self, message: str, /, result: Any = None) -> None:  # the SDK's ExecResult or RunEnd
        super().__init__(message)
        self.result = result


@functools.cache
def leaf_of(code: str) -> type[SandkastenError] | None:
    """Return the class that a wire code stands for: the first one that defines the code; None for an unknown one."""
    if code == SandkastenError.code:
        return None
    open_classes = [SandkastenError]
    while open_classes:
        for cls in (children := open_classes.pop(0).__subclasses__()):
            if cls.__module__ == __name__ and vars(cls).get("code") == code:
                return cls
        open_classes += children
    return None


@functools.cache
def _class_of(code: str, *, streamed: bool) -> type[SandkastenAPIError]:
    leaf = leaf_of(code)
    bases = (SandkastenAPIError, *([SandkastenStreamError] if streamed else []), *([leaf] if leaf else []))
    if len(bases) == 1:
        return SandkastenAPIError
    name = (leaf or SandkastenStreamError).__name__
    return type(name, bases, {"__module__": __name__, "__doc__": (leaf or SandkastenStreamError).__doc__, "code": code})


def api_error(
    body: str, status_code: int | None, *, retry_after_s: float | None = None, streamed: bool = False
) -> SandkastenAPIError:
    """Return the error that a server's answer stands for.

    `body` is the JSON of the error; anything else (a proxy's page) gives a `SandkastenAPIError` without a leaf.
    `streamed` makes the error a `SandkastenStreamError`, too.
    """
    try:
        value = json.loads(body)
        code, message = str(value["error_code"]), str(value["message"])
    except (ValueError, TypeError, KeyError):
        value, code = {}, SandkastenError.code
        message = f"the server answered {status_code} without an error of Sandkasten: {body[:200]!r}"
    details = value.get("details")
    return _class_of(code, streamed=streamed)(
        message,
        status_code,
        body,
        details=details if isinstance(details, dict) else None,
        retryable=value.get("retryable") is True,
        request_id=value.get("request_id"),
        retry_after_s=retry_after_s,
    )


def _remade(
    code: str, status_code: int | None, message: str, streamed: bool, state: dict[str, Any]
) -> SandkastenAPIError:
    error = _class_of(code, streamed=streamed)(message, status_code)
    vars(error).update(state)
    return error
