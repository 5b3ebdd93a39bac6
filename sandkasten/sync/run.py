"""A run: a command, a background process or the program of a terminal, which goes on while its caller does more."""

# Made from sandkasten/sdk/run.py by tests/sdk/twin.py, not to be edited.
from __future__ import annotations

import base64
import logging
import math
import re
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, Self

from sandkasten import errors
from sandkasten.sdk.types import Output, OutputPart, RunEnd, RunInfo, StreamName, Waited
from sandkasten.sdk.wire import Decoder, given, part
from sandkasten.sync import waiting
from sandkasten.sync.channels import Feed, RunLink
from sandkasten.sync.streams import Piece
from sandkasten.sync.transport import Endpoint

log = logging.getLogger("sandkasten.sdk")

CANCEL_S = 2.0
"""Time that is given to the cancellation of a run whose caller has given up."""
SEND_BYTES = 256 * 1024
_PART_BYTES = 4 * 1024 * 1024
_WAIT_MS = 60_000


class Run:
    """A run of a session.

    `with session.start(...) as run:` begins the run and, if it has not ended by then, cancels it at the end of
    the block, unless it is to be `detach`ed. `for output in run:` reads its output; a reader that is slow holds
    up the run once a mebibyte waits. Every method may be used on a run that another program began
    (`session.run(exec_id)`).
    """

    def __init__(
        self,
        link: RunLink,
        exec_id: str,
        *,
        begin: dict[str, Any] | None,
        has_own_id: bool = False,
        raw: bool,
        detach: bool,
    ) -> None:
        """Internal: use `Session.start`, `Session.process` or `Session.run`."""
        self._link = link
        self._chosen_id = exec_id
        self._begin = begin
        self._has_own_id = has_own_id
        self._raw = raw
        self._detach = detach
        self._decoder = Decoder(raw=raw)
        self._feed: Feed | None = None
        self._rest: Iterator[Output] = iter(())
        self._end: RunEnd | None = None
        self._is_refused = False

    @property
    def id(self) -> str:
        """The id of the run, by which it can be found again."""
        return self._chosen_id if self._feed is None else self._feed.exec_id

    @property
    def _endpoint(self) -> Endpoint:
        return self._link.session.below(f"/execs/{part(self.id)}")

    @property
    def end(self) -> RunEnd | None:
        """The end of the run, once this object has seen it: after `wait`, or after the last piece of output."""
        return self._end

    def detach(self) -> None:
        """Let the run go on when the block is left, although it has not ended."""
        self._detach = True

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._end is not None or self._is_refused:
            return
        self.close(cancel=not self._detach)
        if not self._detach:
            give_up(self._link.session, self.id)

    def close(self, *, cancel: bool = False) -> None:
        """Stop reading; the run goes on, unless it is to `cancel`. A later read goes on where this one stopped."""
        if self._feed is not None:
            with waiting.shield(CANCEL_S):
                self._feed.close(cancel=cancel)

    def _open(self) -> Feed:
        if self._feed is None:
            begin, self._begin = self._begin, None
            try:
                self._feed = self._link.open(self._chosen_id, begin, has_own_id=self._has_own_id)
            except BaseException as error:
                if begin is not None and may_go_on(error):
                    give_up(self._link.session, self._chosen_id)
                raise
        return self._feed

    def __iter__(self) -> Iterator[Output]:
        return self

    def __next__(self) -> Output:
        """Return the next piece of output. A cancelled call loses none."""
        while True:
            if (rest := next(self._rest, None)) is not None:
                return rest
            if (piece := self._next_piece()) is None:
                raise StopIteration
            if (output := self._decoder.feed(piece.stream, piece.data, piece.seq)) is not None:
                return output

    def _next_piece(self) -> Piece | None:
        if self._end is not None:
            return None
        try:
            feed = self._open()
            piece = feed.next()
        except errors.SandkastenAPIError:
            self._is_refused = True  # it has ended, or never began
            raise
        if not isinstance(piece, RunEnd):
            return piece
        self._end, self._rest = piece, self._decoder.rest()
        return None

    def wait(self) -> RunEnd:
        """Return the end of the run. Output that was not read by then is dropped; `output` reads it again.

        Raises:
            ConnectionFailed: the connection was lost for longer than the client's timeout.
            SandkastenAPIError: the run is not kept any more, or its session has ended.
        """
        while self._next_piece() is not None:
            pass
        assert self._end is not None
        return self._end

    def wait_for(
        self,
        *,
        port: int | None = None,
        pattern: str | re.Pattern[str] | None = None,
        exit: bool = False,
        timeout_ms: int | None = 60_000,
    ) -> Waited:
        """Wait until something listens on a port of the session, a line of output matches, or the run ends.

        Exactly one of the three is to be given; `pattern` is in the syntax of RE2. The wait ends with the run, or after
        `timeout_ms`, None for never; `happened` of the result tells which. It reads no output of this object.
        """
        text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
        condition = given(port=port, pattern=text, for_="exit" if exit else None)
        until = math.inf if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while True:
            now_ms = max(math.ceil(min((until - time.monotonic()) * 1000, _WAIT_MS)), 1)
            body = condition | {"timeout_ms": now_ms}
            answer = self._endpoint.ask("POST", "/wait", body, patience_s=now_ms / 1000)
            waited = Waited.take(answer, run=RunInfo.take(answer["run"]))
            if waited.happened or waited.run.state == "ended" or time.monotonic() >= until:
                return waited

    def info(self) -> RunInfo:
        """Return what the server knows of the run."""
        return RunInfo.take(self._endpoint.ask("GET"))

    def output(self, *, offset: int = 0, limit: int | None = None, stream: StreamName | None = None) -> OutputPart:
        """Return a part of the run's kept output, of both streams in order of arrival or of one; never waits.

        `offset` and `limit` count bytes; without `limit` a part has up to 1 MiB, at most it may have 4 MiB.
        """
        query = given(offset=offset, limit=limit, stream=stream)
        headers = {"accept": "application/octet-stream"}
        request = self._endpoint.call("GET", "/output", query=query, headers=headers)
        answer = self._endpoint.transport.send(request)
        numbers = {name: int(answer.headers[f"x-{name.replace('_', '-')}"]) for name in _OFFSETS}
        return OutputPart(answer.body, **numbers, is_final=answer.headers["x-is-final"] == "true")

    def kept_output(self, stream: StreamName | None = None, *, max_bytes: int | None = None) -> bytes:
        """Return all kept output of the run, or its first `max_bytes`; never waits. See `output`.

        The output of a result is cut at the server's limit (`truncated`); what is kept has more of it.
        """
        found = bytearray()
        offset = 0
        while max_bytes is None or len(found) < max_bytes:
            limit = _PART_BYTES if max_bytes is None else min(_PART_BYTES, max_bytes - len(found))
            part = self.output(offset=offset, limit=limit, stream=stream)
            found += part.data
            offset = part.next_offset
            if part.is_final or not part.data:
                break
        return bytes(found)

    def send(self, data: str | bytes) -> None:
        """Send input to the run, which was started with `stdin=True`, or is a process; returns once the run took it.

        A run may read late, so the client's timeout does not count.

        Raises:
            Uncertain: the connection was lost; `acknowledged` bytes were taken before, and perhaps more.
            SandkastenError: the input was refused, or not sent; exactly `acknowledged` bytes were taken before.
        """
        content = data.encode() if isinstance(data, str) else data
        for start in range(0, len(content), SEND_BYTES):
            text = base64.b64encode(content[start : start + SEND_BYTES]).decode("ascii")
            try:
                self._order("stdin", {"content_base64": text})
            except errors.SandkastenError as error:
                error.acknowledged = start
                raise

    def close_input(self) -> None:
        """End the input of the run."""
        self._order("stdin", {"close": True})

    def signal(self, signal: int | str) -> None:
        """Send a signal, by number or name (`INT`, `SIGINT`). Errors as of `send`."""
        self._order("signal", {"signal": signal})

    def resize(self, cols: int, rows: int) -> None:
        """Give the run's terminal another size in character cells."""
        self._endpoint.ask("POST", "/resize", {"cols": cols, "rows": rows})

    def cancel(self, *, now: bool = False) -> RunInfo:
        """End the run with all that it started, and return it ended; `now` kills without asking first."""
        return RunInfo.take(self._endpoint.ask("POST", "/cancel", {"now": now}))

    def _order(self, name: Literal["stdin", "signal"], body: dict[str, Any]) -> None:
        patience_s = None if name == "stdin" else 0.0
        self._endpoint.ask("POST", f"/{name}", body, repeat=False, patience_s=patience_s)


_CANCEL_WAITS_S = (0.05, 0.15, 0.3)
"""Waits for a run that is to be cancelled and is not there yet: its request may still be on the way."""


def may_go_on(error: BaseException) -> bool:
    """Return whether what a failed call was to begin may go on: a call that was only refused has begun nothing."""
    return not isinstance(error, errors.SandkastenAPIError) or error.may_have_begun


def give_up(session: Endpoint, exec_id: str) -> None:
    """Cancel a run whose caller does not want it any more, within a bounded time and whatever happens."""
    order = session.call("POST", f"/execs/{part(exec_id)}/cancel", {"now": False})
    with waiting.shield(CANCEL_S):
        for wait_s in (*_CANCEL_WAITS_S, None):
            try:
                session.transport.send(order, within_s=CANCEL_S)
            except errors.ExecNotFound:
                if wait_s is not None:
                    waiting.sleep(wait_s)
                    continue
            except errors.SandkastenError as error:
                log.info("run %s was not cancelled: %s", exec_id, error)
            return


_OFFSETS = ("offset", "next_offset", "first_offset", "total_bytes")
