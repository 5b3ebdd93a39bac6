"""Every error has a status, and the wire codes are those of the published contract."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest

from sandkasten import errors
from sandkasten.api.http.errors import INTERNAL_CODE, STATUS, error_answer
from sandkasten.errors import SandkastenError

PUBLISHED = {
    "INVALID_REQUEST": 400,
    "INVALID_IMAGE": 400,
    "INVALID_RULE": 400,
    "INVALID_REFERENCE": 400,
    "UNAUTHORIZED": 401,
    "NOT_FOUND": 404,
    "METHOD_NOT_ALLOWED": 405,
    "NOT_INSTALLED": 501,
    "NETWORK_NOT_SUPPORTED": 501,
    "PREVIEWS_OFF": 501,
    "SECRETS_OFF": 501,
    "SESSION_NOT_FOUND": 404,
    "SESSION_EXPIRED": 410,
    "COMMAND_TIMEOUT": 504,
    "EXEC_NOT_FOUND": 404,
    "EXEC_ENDED": 409,
    "EXEC_GONE": 410,
    "SHELL_NOT_FOUND": 404,
    "TERMINAL_NOT_FOUND": 404,
    "PREVIEW_NOT_FOUND": 404,
    "SECRET_NOT_FOUND": 404,
    "JOB_NOT_FOUND": 404,
    "CURSOR_GONE": 410,
    "FILE_NOT_FOUND": 404,
    "IS_DIRECTORY": 409,
    "NOT_A_FILE": 409,
    "NOT_A_DIRECTORY": 409,
    "NOT_EMPTY": 409,
    "WORKSPACE_NOT_FOUND": 404,
    "WORKSPACE_BUSY": 409,
    "PERMISSION_DENIED": 403,
    "FORBIDDEN": 403,
    "PATH_OUTSIDE": 400,
    "SESSION_PAUSED": 409,
    "SHELL_BUSY": 409,
    "SHELL_FAILED": 409,
    "WORK_INTERRUPTED": 409,
    "CONFLICT": 409,
    "AMBIGUOUS": 409,
    "LIMIT_IN_USE": 409,
    "IMAGE_IN_USE": 409,
    "EXEC_IDS_EXHAUSTED": 409,
    "PRECONDITION_FAILED": 412,
    "TOO_LARGE": 413,
    "RANGE_NOT_SATISFIABLE": 416,
    "LAYER_REFUSED": 422,
    "QUOTA_EXCEEDED": 429,
    "REGISTRY_REFUSED": 502,
    "REGISTRY_UNAUTHORIZED": 502,
    "DIGEST_MISMATCH": 502,
    "CAPACITY": 503,
    "EGRESS_UNAVAILABLE": 503,
    "DISK_FULL": 507,
    "INTERNAL_ERROR": 500,
}


def subclasses(cls: type[SandkastenError]) -> Iterator[type[SandkastenError]]:
    """Yield every class below `cls` that this package defines."""
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
            yield from subclasses(child)


OF_CLIENTS = {
    *(errors.SandkastenAPIError, errors.SandkastenStreamError, errors.ConnectionFailed, errors.DeadlineExceeded),
    *(errors.Uncertain, errors.CommandFailed),
}
"""Errors that no server raises."""

LEAVES = [
    cls for cls in subclasses(SandkastenError) if not list(subclasses(cls)) and not issubclass(cls, tuple(OF_CLIENTS))
]
CONCRETE = [*LEAVES, errors.Capacity, errors.InvalidImage, errors.StoreFailed]


@pytest.mark.parametrize("cls", CONCRETE)
def test_every_leaf_has_a_row(cls: type[SandkastenError]) -> None:
    """Nothing that can be raised on purpose becomes an accidental 500."""
    assert cls in STATUS


def test_every_row_is_a_class_that_can_be_raised() -> None:
    """A row for a family would hide a missing one."""
    assert set(STATUS) == set(CONCRETE)


@pytest.mark.parametrize("cls", STATUS)
def test_a_code_has_one_status(cls: type[SandkastenError]) -> None:
    """The published table, row by row."""
    assert STATUS[cls] == PUBLISHED[cls.code]


@pytest.mark.parametrize("code", sorted(PUBLISHED.keys() - {INTERNAL_CODE}))
def test_a_code_of_an_answer_is_its_leaf_again(code: str) -> None:
    """`except` of a leaf holds in process and over HTTP, and so does that of the published class."""
    answer = error_answer(errors.leaf_of(code)("what failed", field="bad"))  # type: ignore[misc]  # a code is there
    again = errors.api_error(answer.body.decode(), answer.status)
    assert isinstance(again, errors.SandkastenAPIError)
    assert isinstance(again, errors.leaf_of(code) or ())
    assert (again.code, again.status_code, again.message) == (code, PUBLISHED[code], "what failed")
    assert again.details == {"field": "bad"}


def test_every_published_code_exists() -> None:
    """None was renamed away."""
    assert {cls.code for cls in STATUS} | {SandkastenError.code} == set(PUBLISHED)


@pytest.mark.parametrize("cls", [cls for cls in STATUS if cls.code == INTERNAL_CODE])
def test_internal_errors_show_nothing(cls: type[SandkastenError]) -> None:
    """Neither message nor details; whether to retry may be told."""
    if cls is errors.BuildFailed:
        error: SandkastenError = errors.BuildFailed("mount of /secret failed", stage="mounts", path="/secret", errno=2)
    else:
        error = cls("broken: /secret", path="/secret")
    answer = error_answer(error)
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert orjson.loads(answer.body)["retryable"] is cls.retryable


@pytest.mark.parametrize("cls", [cls for cls in STATUS if cls.code != INTERNAL_CODE])
def test_other_errors_show_message_and_details(cls: type[SandkastenError]) -> None:
    """The body has the five keys of the contract, and survives text that is not Unicode."""
    body = orjson.loads(error_answer(cls("what failed", field="bad \udcff")).body)
    assert body == {
        "error_code": cls.code,
        "message": "what failed",
        "details": {"field": "bad \ufffd"},
        "retryable": cls.retryable,
        "request_id": None,
    }
