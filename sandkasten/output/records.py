"""Records of runs, for the next daemon: values, their JSON, sealed tickets, and the set of used ids. Pure.

- `RunFacts`: everything known of a run before it begins. The facts never change.
- `RunState`: everything that became of a run so far, its end included.
- A ticket is the facts of a run under a seal, given to PID 1 together with the run. The key of the seal is known to no
  sandbox. PID 1 may lose a ticket and may repeat it, but can't make one: so an id that a daemon never gave out differs
  from an id that a daemon gave out and had no time to write down.
- `UsedIds`: digests of the ids that clients chose for runs that are not kept any more.
- `Span`: which pieces, and which bytes of both streams, lie together in a file.

Sources: hashlib (BLAKE2 keyed mode is a message authentication code, RFC 7693 2.9), bisect, array.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, get_args

import attrs

from sandkasten.model import EXEC_ID, SHELL_NAME, Cause, ExecEnd, ExecKind, TerminalSize, Usage

Input = Literal["none", "given", "open"]
"""Standard input of a run: none, given with the request, or sent by callers."""

_SEAL_BYTES: Final = 16
_MAX_COMMAND_CHARS: Final = 1024
_DIGEST_BYTES: Final = 8
_BUCKET_SHIFT: Final = 52
"""The first 12 bits of a digest choose one of 4096 small sorted arrays: to insert a digest moves few others."""


class BadRecord(Exception):
    """Bytes that are not what was written."""


@attrs.frozen
class RunFacts:
    """A run before it begins. `shell` is None for a program; `readings` are the session's counters at that moment."""

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
    """The progress of a run. The totals are of all output up to now."""

    started_at: datetime | None = None
    pid: int | None = None
    end: ExecEnd | None = None
    ended_at: datetime | None = None
    last_sequence: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    last_line: str = ""


def facts_to_json(facts: RunFacts) -> bytes:
    """Return facts as JSON, for tickets and files."""
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
    """Return a state as JSON, for files."""
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
    """Maker and reader of the tickets of one session."""

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


@attrs.frozen
class Span:
    """Consecutive pieces: the number of the first, the number behind the last, and the same of each stream's bytes."""

    first_sequence: int
    next_sequence: int
    stdout_start: int
    stdout_end: int
    stderr_start: int
    stderr_end: int

    _FORMAT = struct.Struct("<QQQQQQ")
    SIZE_BYTES = _FORMAT.size

    def encode(self) -> bytes:
        return self._FORMAT.pack(*attrs.astuple(self))

    @classmethod
    def decode(cls, data: bytes) -> Span:
        """Return the span at the beginning of `data`. Raises `struct.error`."""
        return cls(*cls._FORMAT.unpack_from(data))

    @property
    def size_bytes(self) -> int:
        """Number of bytes of output in the pieces."""
        return self.stdout_end - self.stdout_start + self.stderr_end - self.stderr_start

    def precedes(self, other: Span) -> bool:
        """Whether `other` follows without a gap."""
        ours = (self.next_sequence, self.stdout_end, self.stderr_end)
        return ours == (other.first_sequence, other.stdout_start, other.stderr_start)


class UsedIds:
    """A set of ids, as digests of 64 bits; nothing is ever taken out.

    With a million digests, one new id in 18 million million is taken for a used one; a used id is always known. The set
    takes 8 to 10 bytes for each of many ids, up to 200 while there are few.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, array[int]] = {}
        self._count = 0
        self.is_whole = True
        """Whether no used id is missing. Without that, nobody knows whether an id was used."""

    def __len__(self) -> int:
        return self._count

    def __contains__(self, exec_id: str) -> bool:
        return self._find(digest_of(exec_id)) is None

    def add(self, exec_id: str) -> None:
        digest = digest_of(exec_id)
        place = self._find(digest)
        if place is not None:
            self._buckets.setdefault(digest >> _BUCKET_SHIFT, array("Q")).insert(place, digest)
            self._count += 1

    def encode(self) -> bytes:
        """Return all digests, for `merge`."""
        return b"".join(bucket.tobytes() for bucket in self._buckets.values())

    def merge(self, data: bytes) -> None:
        """Add the digests that `encode` returned. Raises `ValueError`: `data` has no whole number of digests."""
        found = array("Q")
        found.frombytes(data)
        self._add_all(found)

    def _add_all(self, digests: Iterable[int]) -> None:
        """Add many digests; much cheaper than one by one."""
        new: defaultdict[int, list[int]] = defaultdict(list)
        for digest in digests:
            new[digest >> _BUCKET_SHIFT].append(digest)
        for number, bucket in new.items():
            known = self._buckets.get(number, ())
            merged = array("Q", sorted({*known, *bucket}))
            self._buckets[number] = merged
            self._count += len(merged) - len(known)

    def _find(self, digest: int) -> int | None:
        """Return where in its bucket a digest belongs, None if the digest is there."""
        bucket = self._buckets.get(digest >> _BUCKET_SHIFT, ())
        place = bisect_left(bucket, digest)
        return None if place < len(bucket) and bucket[place] == digest else place


def digest_of(exec_id: str) -> int:
    """Return what is remembered of an id."""
    return int.from_bytes(hashlib.blake2b(exec_id.encode(), digest_size=_DIGEST_BYTES).digest(), "little")
