"""Errors as E2B's clients read them: by status and, of a sandbox that is gone, by words.

"No room now" is 429, which both of its clients repeat; they take 503 as final. Every body is JSON.
"""

from __future__ import annotations

from sandkasten.api.http.errors import Answer, error_answer, error_body, json_answer
from sandkasten.model import errors

GONE = (errors.SessionNotFound, errors.SessionExpired, errors.SessionPaused)
BREAKS = (*GONE, errors.RunnerLost)
"""Errors that break a stream which has begun: its client then asks whether the sandbox lives."""


class SandboxGone(Exception):
    """The sandbox is gone or paused, or does not answer though it is there (`is_alive`). Answered as by what stands
    before a sandbox."""

    def __init__(self, sandbox_id: str, *, is_alive: bool = False) -> None:
        super().__init__(sandbox_id)
        self.sandbox_id, self.is_alive = sandbox_id, is_alive


def message_of(error: Exception) -> str:
    """Return the text of an error for a client, with the bad fields that its details name; log the rest."""
    body = error_body(error)
    problems = [f"{name} {problem}" for name, problem in (body.details or {}).items() if isinstance(problem, str)]
    return f"{body.message}: {', '.join(problems)}" if problems else body.message


def spell_error(error: Exception) -> Answer:
    """Return the answer for any error."""
    if isinstance(error, SandboxGone):
        words = "The sandbox is running but port is not open" if error.is_alive else "The sandbox was not found"
        return json_answer({"sandboxId": error.sandbox_id[:64], "message": words, "code": 502}, status=502)
    answer = error_answer(error)
    status, headers = answer.status, answer.headers
    if isinstance(error, errors.SessionExpired | errors.InvalidImage):
        status = 404
    elif status == 503:
        status = 429
        headers = (*(each for each in headers if each[0] != "retry-after"), ("retry-after", "1"))
    return json_answer({"code": status, "message": message_of(error)}, status=status, headers=headers)
