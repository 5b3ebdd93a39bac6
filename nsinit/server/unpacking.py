"""The unpacking of layers: the life of the unpacker, a fresh program that jails itself (`tools/unpack.py`), since no
process with all privileges should read a byte of an archive.

An unpacker ends with nsinit, and when whoever asked for it hangs up. Sources: posix_spawn(3); pidfd_open(2).
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field, replace

from nsinit.kernel import syscalls
from nsinit.log import log
from nsinit.scheduler import Job, JobEvent, Scheduler, Wait
from nsinit.spawn import spawn_unpacker
from nsinit.steps import StepFailed, failure_of, passing
from nsinit.storage.layers import Draft, LayerDirectory
from nsinit.storage.paths import DIGEST_PREFIX
from nsinit.wire import verdict
from nsinit.wire.protocol import LayerUnpacked, UnpackLayer

MAX_JAILS = 2
"""Unpackers at once. Each has a processor to itself, and memory for the window of a decoder."""
_PIECE_BYTES = 64 * 1024
STAGE, DIGEST_STAGE = "unpack", "digest"


@dataclass(slots=True)
class Unpacking:
    """Unpacks archives into the layers of a store."""

    store: LayerDirectory
    scheduler: Scheduler
    _jails: set[int] = field(default_factory=set)
    """Pidfds of the unpackers at work."""
    _running: int = 0
    _queue: deque[JobEvent] = field(default_factory=deque)
    _is_ending: bool = False

    def unpack(self, request: UnpackLayer, fds: list[int]) -> Generator[Wait, bool, LayerUnpacked]:
        """Unpack an archive. `fds`: see `UnpackLayer`. Raises `StepFailed`, `OSError`; nothing is left then."""
        archive_fd, asker_fd = fds
        yield from self._admit()
        try:
            if request.digest and (found := self.store.find(request.digest)) is not None:
                return replace(found, seq=request.seq)
            draft = self.store.make_draft()
            try:
                unpacked = yield from self._fill(draft, request, archive_fd, asker_fd)
                digest = DIGEST_PREFIX + unpacked.digest
                if request.digest not in ("", digest):
                    raise StepFailed(DIGEST_STAGE, f"the content has the digest {digest}, not {request.digest}")
                passing(self.store.crash, "nsinit.layer.unpacked")
                yield from self.store.keep(draft, unpacked)
                is_new = not os.path.lexists(f"{self.store.layout.layers}/{draft.name}")
            finally:
                yield from self.store.discard(draft)
                draft.close()
        finally:
            self._leave()
        return LayerUnpacked(request.seq, digest, *unpacked.counts, len(unpacked.privileged), is_new)

    def finish(self) -> None:
        """End all unpackers, and begin no other."""
        self._is_ending = True
        for pidfd in self._jails:
            _kill(pidfd)

    def _fill(
        self, draft: Draft, request: UnpackLayer, archive_fd: int, asker_fd: int
    ) -> Generator[Wait, bool, verdict.Unpacked]:
        limits = request.max_entries, request.max_bytes, request.reserve_bytes
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                arguments = map(str, (os.getpid(), *limits))
                pid = spawn_unpacker(archive_fd, write_fd, draft.files_fd, *arguments)
            finally:
                os.close(write_fd)
            pidfd = os.pidfd_open(pid)
            self._jails.add(pidfd)
            if self._is_ending:
                _kill(pidfd)
            done = JobEvent()
            self.scheduler.spawn(_end_with_asker(os.dup(asker_fd), pidfd, done))
            said = b""
            # The end of this pipe is that of the jail, which has the other end, too.
            while (yield Wait(fd=read_fd)) and (piece := os.read(read_fd, _PIECE_BYTES)):
                said += piece[: verdict.MAX_VERDICT_BYTES + 1 - len(said)]
            yield Wait(fd=pidfd)
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
            self._jails.remove(pidfd)
            done.set()
            try:
                return verdict.read(said, max_entries=request.max_entries, max_bytes=request.max_bytes)
            except verdict.ArchiveRefused as error:
                raise StepFailed(STAGE, str(error), path=error.member) from error
            except OSError as error:
                raise failure_of(STAGE, error) from error
        finally:
            os.close(read_fd)

    def _admit(self) -> Generator[Wait, bool, None]:
        """Wait, in order of arrival, until fewer than `MAX_JAILS` archives are unpacked."""
        if self._running >= MAX_JAILS:
            turn = JobEvent()
            self._queue.append(turn)
            yield Wait(event=turn)
        else:
            self._running += 1

    def _leave(self) -> None:
        if self._queue:
            self._queue.popleft().set()
        else:
            self._running -= 1


def _end_with_asker(asker_fd: int, pidfd: int, done: JobEvent) -> Job:
    """Kill an unpacker when nobody waits for it any more, until `done`."""
    try:
        if not done.is_set:
            yield Wait(fd=asker_fd, event=done)
        if not done.is_set:
            log("info", "unpacking ended", reason="whoever asked for it is gone")
            _kill(pidfd)
            yield Wait(event=done)
    finally:
        os.close(asker_fd)
        os.close(pidfd)


def _kill(pidfd: int) -> None:
    """SIGKILL an unpacker; the jail goes with it."""
    try:
        syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass  # a zombie that was not reaped yet
