"""Output of a run as it comes: server-sent events that are resumed where a connection broke off."""

# Made from sandkasten/sdk/streams.py by tests/sdk/twin.py, not to be edited.
from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from sandkasten import errors
from sandkasten.sdk.types import Event, JobInfo, RunEnd, StreamName
from sandkasten.sdk.wire import EventDecoder, HttpCall, ServerEvent, reading, run_end
from sandkasten.sync.transport import SILENCE_S, Endpoint, HttpStream, Lost, Silent, StreamRecovery, Transport

T = TypeVar("T")

FIRST_S = 20.0
"""Time without a byte after which a stream is lost: the server sends one within 15 s. Without the first, a proxy holds
the answer back."""
WAIT_S = 10
"""Time after which the part of a stream ends in which nothing has happened: less than proxies wait for an answer."""
_SOON_S = 1.0
"""Time before which such a part does not end, if the server knows of it."""


@dataclass(slots=True)
class Piece:
    """Piece of output. `timestamp` is in Unix milliseconds."""

    stream: StreamName
    data: bytes
    seq: int
    timestamp: int


class ResumedEvents:
    """Server-sent events of one call, over as many connections as it takes.

    After a lost connection `call` is sent again as it is, with the id of the last event that came, until no event has
    come for the client's timeout. So `call` must do no harm when it is repeated; one that is not `repeat` is sent once.

    A stream of which nothing comes in time is asked for in parts, whose answers end with the first events: so it passes
    a proxy that sends an answer on when it has ended. `may_poll` is False where the server knows of no parts.
    """

    def __init__(self, transport: Transport, call: HttpCall, *, may_poll: bool = True) -> None:
        self._transport = transport
        self._request = call
        self._request.may_poll = may_poll and call.repeat
        self._reply: HttpStream | None = None
        self._opened_at = 0.0
        self._has_come = False
        self._decoder = EventDecoder()
        self._events: deque[ServerEvent] = deque()
        self._recovery = StreamRecovery(transport.timeout)
        self.headers: Mapping[str, str] = {}
        self.last_id = call.headers.get("last-event-id", "")

    @property
    def _is_in_parts(self) -> bool:
        return self._request.may_poll and self._transport.holds_answers

    def open(self) -> None:
        """Connect, if there is no connection. Errors as of `Transport.send`."""
        if self._reply is None:
            if self.last_id:
                self._request.headers["last-event-id"] = self.last_id
            if self._is_in_parts:
                self._request.headers["prefer"] = f"wait={WAIT_S}"
            may_be_held = self._request.may_poll and not self._transport.holds_answers
            self._request.silence_s = FIRST_S if may_be_held else SILENCE_S
            self._decoder, self._opened_at, self._has_come = EventDecoder(), time.monotonic(), False
            try:
                self._reply = self._transport.open(self._request)
            except Silent:
                if not may_be_held:
                    raise
                self._transport.holds_answers = True
                self.open()
                return
            self.headers = self._reply.headers

    def next(self) -> ServerEvent:
        """Return the next event. A cancelled call loses none.

        Raises:
            ConnectionFailed: the connection was lost for longer than the client's timeout.
            Uncertain: the connection was lost, and the call must not be repeated.
            Others as of `Transport.send`.
        """
        while not self._events:
            self.open()
            assert self._reply is not None
            try:
                data = self._reply.read()
                self._events.extend(self._decoder.feed(data))
            except Lost as error:
                self._recover(error)
                continue
            except BaseException:
                self.close()
                raise
            if data:
                self._has_come = True
            elif self._is_in_parts and (self._has_come or time.monotonic() - self._opened_at > _SOON_S):
                self.close()
                self._recovery.progress()
            else:
                self._recover(Lost("the server ended the stream", was_sent=True))
        self._recovery.progress()
        event = self._events.popleft()
        if event.id:
            self.last_id = event.id
        return event

    def take(self, read: Callable[[ServerEvent], T]) -> T:
        """Return what `read` makes of the next event.

        Raises:
            SandkastenStreamError: the event is an error.
            ConnectionFailed: the event is none of the protocol, or as of `next`.
        """
        try:
            event = self.next()
            if event.name == "error":
                raise errors.api_error(event.data, None, streamed=True)
            with reading():
                return read(event)
        except errors.SandkastenError:
            self.close()
            raise

    def _recover(self, error: Lost) -> None:
        self.close()
        if isinstance(error, Silent) and not self._has_come and not self._is_in_parts and self._request.may_poll:
            self._transport.holds_answers = True  # by a proxy that sent the head of the answer on
            return
        if not self._request.repeat:
            raise errors.Uncertain(f"{error}; the command has no id, and may have run") from error
        self._recovery.wait(error)

    def close(self) -> None:
        """Close the connection; a further `next` opens another."""
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.close()


class EventFeed:
    """Output of a run, read from an event stream of chunks in base64."""

    def __init__(self, transport: Transport, request: HttpCall, exec_id: str) -> None:
        self._events = ResumedEvents(transport, request)
        self.exec_id = exec_id

    def open(self) -> None:
        """Begin or join the run. Errors as of `Transport.send`."""
        self._events.open()
        self.exec_id = self._events.headers.get("x-exec-id", self.exec_id)

    def next(self) -> Piece | RunEnd:
        """Return the next piece of output, or the end. A cancelled call loses no output.

        Raises:
            SandkastenStreamError: the server ends the stream with an error.
            Others as of `ResumedEvents.next`.
        """
        while True:
            found = self._events.take(_of_run)
            if isinstance(found, RunEnd):
                self.close()
            if found is not None:
                return found

    def close(self, *, cancel: bool = False) -> None:
        """Leave the run, which goes on; `cancel` makes no difference, since the server waits for no reader then."""
        self._events.close()


def _of_run(event: ServerEvent) -> Piece | RunEnd | None:
    if event.name == "chunk":
        value: Mapping[str, Any] = event.value
        seq = int(event.id.partition("~")[0].partition(".")[0] or 0)
        return Piece(value["stream"], base64.b64decode(value["chunk"]), seq, value["timestamp"])
    return run_end(event.value) if event.name == "done" else None


class JobEvents:
    """A job as it goes on: `for job in events`, up to its end. A lost connection is followed by another."""

    def __init__(self, place: Endpoint) -> None:
        """Internal: use `SandboxClient.follow_job`."""
        self._stream = ResumedEvents(place.transport, place.call("GET", "/events"))
        self._has_ended = False

    def __iter__(self) -> Iterator[JobInfo]:
        return self

    def __next__(self) -> JobInfo:
        """Return the job after its next change. Raises `JobNotFound`, and others as of a call."""
        if self._has_ended:
            raise StopIteration
        job = self._stream.take(lambda found: JobInfo.take(found.value))
        if job.has_ended:
            self._has_ended = True
            self.close()
        return job

    def close(self) -> None:
        """Close the connection; the job goes on."""
        self._stream.close()


class Events:
    """Events of the journal as they happen: `for event in events`. A lost connection is followed by another.

    The loop goes on for ever. Without `follow` it ends with the last event that had happened when the loop began.
    `with` closes the connection at the end of the block. A later reader goes on from `cursor`: the position
    behind the last event that was handed out, or behind later events of other types.
    """

    def __init__(self, place: Endpoint, cursor: str | None, types: Sequence[str], *, follow: bool = True) -> None:
        """Internal: use `SandboxClient.events` or `Session.watch_events`."""
        query = {"cursor": cursor, "types": ",".join(types) or None}
        self._stream = ResumedEvents(place.transport, place.call("GET", query=query))
        self._now = None if follow else ResumedEvents(place.transport, place.call("GET"))
        self._until: str | None = None
        self._cursor = cursor

    @property
    def cursor(self) -> str | None:
        """The position to go on from; None before anything came."""
        return self._stream.last_id or self._cursor

    def __enter__(self) -> Self:
        self._stream.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        """Return the next event. A cancelled call loses none.

        Raises:
            CursorGone: the events after the cursor are not kept any more; `details.oldest_cursor` is the oldest.
        """
        if self._now is not None and self._until is None:
            self._until = (self._now.next()).id  # a stream begins with its position
            self._now.close()
        while self._until is None or (self.cursor or "") < self._until:
            if (event := self._stream.take(self._read)) is not None:
                return event
        raise StopIteration

    def _read(self, found: ServerEvent) -> Event | None:
        is_wanted = found.data and (self._until is None or found.id <= self._until)
        return Event.take(found.value) if is_wanted else None

    def close(self) -> None:
        """Close the connection; a further event opens another."""
        self._stream.close()
