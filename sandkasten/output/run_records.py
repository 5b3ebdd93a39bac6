"""What is written down of a run so that the next daemon knows it: values, their JSON, and sealed tickets. Pure.

A ticket is the facts of a run, given to PID 1 with the run and sealed with a key that no sandbox knows. PID 1 may lose
it and may repeat it, but can't make one: so an id that a daemon never gave out is told apart from one that it gave out
and had no time to write down.

Sources: hashlib (BLAKE2 keyed mode is a message authentication code, RFC 7693 2.9).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, get_args

import attrs

from sandkasten.model import EXEC_ID, SHELL_NAME, Cause, ExecEnd, ExecKind, TerminalSize, Usage

Input = Literal["none", "given", "open"]
"""Standard input: there is none; it came with the request; or callers send it."""

_SEAL_BYTES: Final = 16
_MAX_COMMAND_CHARS: Final = 1024


class BadRecord(Exception):
    """It is not what was written."""


@attrs.frozen
class RunFacts:
    """What is known of a run before it begins. `shell` None: a program; `readings`: the session's counters then."""

    exec_id: str
    kind: ExecKind
    shell: str | None
    digest: bytes
    command: str
    created_at: datetime
    timeout_ms: int | None
    is_detached: bool
    keep_alive: bool
    is_interactive: bool
    size: TerminalSize | None
    input: Input
    group: str | None
    readings: tuple[int, ...]


@attrs.frozen
class RunState:
    """What became of it. The totals are those at its end."""

    started_at: datetime | None = None
    pid: int | None = None
    end: ExecEnd | None = None
    ended_at: datetime | None = None
    last_sequence: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    last_line: str = ""


def facts_to_json(facts: RunFacts) -> bytes:
    """Return facts as they lie in a ticket and in a file."""
    values = {
        "id": facts.exec_id,
        "kind": facts.kind.value,
        "shell": facts.shell,
        "digest": facts.digest.hex(),
        "command": facts.command,
        "created": facts.created_at.timestamp(),
        "timeout": facts.timeout_ms,
        "detached": facts.is_detached,
        "alive": facts.keep_alive,
        "interactive": facts.is_interactive,
        "size": None if facts.size is None else [facts.size.cols, facts.size.rows],
        "input": facts.input,
        "group": facts.group,
        "readings": facts.readings,
    }
    return json.dumps(values, separators=(",", ":")).encode()


def facts_from_json(data: bytes) -> RunFacts:
    """Return the facts in `data`. Raises `BadRecord`."""
    try:
        return _facts(json.loads(data))
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError, AttributeError) as error:
        raise BadRecord(f"no facts of a run: {error!r}") from None


def _facts(values: Mapping[str, Any]) -> RunFacts:  # JSON values
    exec_id, shell, size, read = values["id"], values["shell"], values["size"], values["input"]
    if not EXEC_ID.match(exec_id) or not (shell is None or SHELL_NAME.match(shell)) or read not in get_args(Input):
        raise ValueError("an id, a shell or an input that none could have")
    return RunFacts(
        exec_id=exec_id,
        kind=ExecKind(values["kind"]),
        shell=shell,
        digest=bytes.fromhex(values["digest"]),
        command=str(values["command"])[:_MAX_COMMAND_CHARS],
        created_at=_moment(values["created"]),
        timeout_ms=None if values["timeout"] is None else int(values["timeout"]),
        is_detached=bool(values["detached"]),
        keep_alive=bool(values["alive"]),
        is_interactive=bool(values["interactive"]),
        size=None if size is None else TerminalSize(int(size[0]), int(size[1])),
        input=read,
        group=None if values["group"] is None else str(values["group"]),
        readings=tuple(int(each) for each in values["readings"]),
    )


def state_to_json(state: RunState) -> bytes:
    """Return a state as it lies in a file."""
    end = None if state.end is None else {**attrs.asdict(state.end), "cause": state.end.cause.value}
    values = {
        **{name: getattr(state, name) for name in ("pid", "last_sequence", "stdout_bytes", "stderr_bytes")},
        "last_line": state.last_line,
        "started_at": state.started_at and state.started_at.timestamp(),
        "ended_at": state.ended_at and state.ended_at.timestamp(),
        "end": end,
    }
    return json.dumps(values, separators=(",", ":")).encode()


def state_from_json(data: bytes) -> RunState:
    """Return the state in `data`. Raises `BadRecord`."""
    try:
        values = json.loads(data)
        for name in ("started_at", "ended_at"):
            values[name] = None if values[name] is None else _moment(values[name])
        end = values["end"]
        if end is not None:
            values["end"] = ExecEnd(**{**end, "cause": Cause(end["cause"]), "usage": Usage(**end["usage"])})
        return RunState(**values)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError, AttributeError) as error:
        raise BadRecord(f"no state of a run: {error!r}") from None


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


class Seal:
    """Makes and reads the tickets of one session."""

    def __init__(self, key: bytes, session_id: str) -> None:
        self._hash = hashlib.blake2b(session_id.encode(), key=key, digest_size=_SEAL_BYTES)

    def ticket(self, facts: bytes) -> str:
        """Return facts, as JSON, under the seal."""
        return self._mark(facts) + facts.decode()

    def read(self, ticket: str) -> RunFacts:
        """Return the facts in a ticket of ours. Raises `BadRecord`."""
        try:
            mark, facts = ticket[: 2 * _SEAL_BYTES], ticket[2 * _SEAL_BYTES :].encode()
        except UnicodeEncodeError:
            raise BadRecord("a ticket that is no text") from None
        if not hmac.compare_digest(mark.encode("utf-8", "replace"), self._mark(facts).encode()):
            raise BadRecord("a ticket that is not ours")
        return facts_from_json(facts)

    def _mark(self, facts: bytes) -> str:
        mark = self._hash.copy()
        mark.update(facts)
        return mark.hexdigest()
