"""What PID 1 of a new sandbox is asked first, and what its answer means to whoever made the session.

Pure: `greeting.py` asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.wire import protocol
from sandkasten.actors.session.setup import Creation
from sandkasten.model.errors import InvalidImage, InvalidRequest, RunnerProtocolError, SandboxError, SandkastenError

_VERSIONS = range(protocol.OLDEST_VERSION, protocol.PROTOCOL_VERSION + 1)
"""What PID 1 may speak: that of a sandbox is as old as the sandbox."""


def first_request(creation: Creation, graces: protocol.Graces) -> protocol.Setup:
    """Return what PID 1 of the new sandbox is asked first."""
    options = creation.resolved.options
    rules = options.filesystem
    return protocol.Setup(
        env=dict(creation.env),
        shell=creation.resolved.shell,
        graces=graces,
        user=options.user,
        files=None if rules is None else protocol.FileRules(_listed(rules.readable), _listed(rules.writable)),
    )


def accepted(answer: object) -> protocol.HelloReply:
    """Return the answer if it is what it should be.

    Raises:
        SandboxError: it speaks another version, or was never set up: then nobody was told of the session.
        InvalidRequest, InvalidImage: it refused what the session's creator asked for.
        RunnerProtocolError: it is no answer to that.
    """
    match answer:
        case protocol.HelloReply(shell="", version=version) if version in _VERSIONS:
            raise SandboxError("the daemon stopped before the session was set up")
        case protocol.HelloReply(version=version) if version in _VERSIONS:
            return answer
        case protocol.HelloReply():
            raise SandboxError(f"the sandbox's init speaks protocol {answer.version}")
        case protocol.Error():
            raise _refused(answer)
        case _:
            raise RunnerProtocolError(f"{type(answer).__name__} to the first request")


def _refused(error: protocol.Error) -> SandkastenError:
    """Return what it means to the creator that PID 1 refused that."""
    match error.code:
        case "NO_SUCH_USER":
            return InvalidRequest(error.message, user="can't be used")
        case "BAD_REQUEST":
            return InvalidRequest(error.message, env="can't be set")
        case "INVALID_PATH":
            return InvalidRequest(error.message, filesystem="can't be kept here")
        case "NO_SHELL":
            return InvalidImage(error.message)
        case _:
            return SandboxError(f"the sandbox could not start: {error.message}")


def _listed(paths: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if paths is None else tuple(paths)
