"""Reads the kernel's log for processes that the out-of-memory killer ended.

Owns one descriptor of `/dev/kmsg`, opened at start (nsinit's mount namespace loses `/dev` afterwards). Each request
reads on from where the last one stopped, so it costs the lines logged meanwhile and not the whole log. Names in the log
are chosen by hostile code: a record that is not exactly as the kernel writes it is no record.

The kernel writes two records. One names the cgroup of the killed process, but at most ten of those in five seconds, for
the whole machine. The other is written for every kill and has the user id: the ids of a session are its own until they
are given back, and before that its kills are looked for here. So no clock is needed to attribute a kill.
Sources: Documentation/ABI/testing/dev-kmsg; mm/oom_kill.c, dump_oom_victim, __oom_kill_process (user id: Linux 5.5).
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

from nsinit.kernel.slots import SIZE
from nsinit.scheduler import Wait
from nsinit.wire.validate import is_session_id

PATH = "/dev/kmsg"
_RECORD_BYTES = 8192
"""No record is longer (CONSOLE_EXT_LOG_MAX)."""
_BATCH = 256
_MAX_BATCHES = 256
"""Records read without a pause (some 0.3 ms), and pauses: a log that grows faster than this is given up on."""
_MAX_SESSIONS = 1024
_MAX_UNPLACED = 4096
LAST_KILLS = 16
"""Kills of one session that are remembered."""
_PID_NAMESPACE = "/proc/self/ns/pid"
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the pid namespace whose numbers the log has (include/linux/proc_ns.h, PROC_PID_INIT_INO)."""
_PREFIX, _OF_KILL = b"oom-kill:", b": Killed process "
_HEAD = re.compile(rb"\d{1,10},\d{1,20},(?P<usec>\d{1,18}),.*", re.DOTALL)
_RECORD = re.compile(
    rb"oom-kill:constraint=CONSTRAINT_\w+,.*?,task_memcg=(?P<memcg>/[^,]*),task=(?P<task>.*),pid=(?P<pid>\d{1,10}),uid=\d+",
    re.DOTALL,
)
"""The first `,task=` ends the cgroup's path, in which there is no comma; the name goes on to the last `,pid=`."""
_KILLED = re.compile(
    rb"[ -~]{0,80}: Killed process (?P<pid>\d{1,10}) \((?P<task>.*)\) total-vm:\d+kB, anon-rss:\d+kB, file-rss:\d+kB, "
    rb"shmem-rss:\d+kB, UID:(?P<uid>\d{1,10}) pgtables:\d+kB oom_score_adj:-?\d+",
    re.DOTALL,
)
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class Kill:
    """A process that the kernel killed for memory: its name, the time in seconds of the kernel log's clock, and its pid
    in the machine's initial pid namespace."""

    name: str
    at_s: float
    pid: int


@dataclass(slots=True)
class Kills:
    """The kills of one session: their number, and the last of them, the newest at the end."""

    count: int = 0
    last: deque[Kill] = field(default_factory=lambda: deque(maxlen=LAST_KILLS))

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(each.pid for each in self.last)


class KernelLog:
    """The kernel's log from now on. `path`: the device, or a file that behaves like it."""

    def __init__(self, path: str = PATH) -> None:
        self._kills: dict[str, Kills] = {}
        self._unplaced: deque[tuple[int, Kill]] = deque(maxlen=_MAX_UNPLACED)
        """Kills of which no record names a cgroup (yet), with their user ids."""
        self._placed_pid = 0
        """The pid in the last record, if that record named a cgroup: the other record of the same kill follows."""
        self.has_our_pids = os.stat(_PID_NAMESPACE).st_ino == _INITIAL_PID_NAMESPACE
        """Whether pids in the log are those that this process sees."""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # in a container it may not be there, or not for us
            self._fd = -1
            return
        os.lseek(self._fd, 0, os.SEEK_END)

    def close(self) -> None:
        """Close the descriptor of `/dev/kmsg`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def find_oom_kills(self, session_id: str, base: int | None = None) -> Generator[Wait, bool, Kills]:
        """Read new records and return the session's kills. `base`: its user ids, if it has them now; without them only
        records that name its cgroup, and earlier attributions, count."""
        for _ in range(_MAX_BATCHES):
            if not self._read_batch():
                break
            yield Wait(timeout_s=0)
        if base is not None:
            self._place(session_id, base)
        return self._kills.get(session_id, Kills())

    def add(self, session_id: str, name: str, pid: int) -> None:
        """Count a kill that nsinit itself does for memory now, as it will not be in the log."""
        self._keep(session_id, Kill(name, time.monotonic(), pid))

    def _place(self, session_id: str, base: int) -> None:
        """Attribute the kills that had a session's ids to the session."""
        unplaced, self._unplaced = self._unplaced, deque(maxlen=_MAX_UNPLACED)
        for uid, kill in unplaced:
            if base <= uid < base + SIZE:
                self._keep(session_id, kill)
            else:
                self._unplaced.append((uid, kill))

    def _read_batch(self) -> bool:
        """Read some records; False when there are no more."""
        for _ in range(_BATCH):
            try:
                record = os.read(self._fd, _RECORD_BYTES) if self._fd >= 0 else b""
            except OSError as error:
                if error.errno == errno.EPIPE:  # records were overwritten before they were read; go on with the oldest
                    continue
                return False
            if not record:
                return False
            self.take(record)
        return True

    def take(self, record: bytes) -> None:
        """Take one record of the log, and keep it if it is of a kill."""
        if (parsed := parse_record(record)) is not None:
            memcg, kill = parsed
            self._placed_pid = kill.pid
            for session_id in filter(is_session_id, memcg.split("/")):
                self._keep(session_id, kill)
        elif (killed := parse_kill(record)) is not None:
            if killed[1].pid != self._placed_pid:
                self._unplaced.append(killed)
            self._placed_pid = 0

    def _keep(self, session_id: str, kill: Kill) -> None:
        kills = self._kills[session_id] = self._kills.pop(session_id, Kills())
        kills.count += 1
        kills.last = deque(sorted((*kills.last, kill), key=lambda each: each.at_s), maxlen=LAST_KILLS)
        while len(self._kills) > _MAX_SESSIONS:
            del self._kills[next(iter(self._kills))]


def parse_record(record: bytes) -> tuple[str, Kill] | None:
    """Return the memory cgroup and the kill of a record as read from the device; None if the record is of another kind.

    Never raises, whatever the bytes.
    """
    head, text = _split(record)
    if not text.startswith(_PREFIX):
        return None
    match = _RECORD.fullmatch(text)
    kill = _kill(head, match)
    return None if match is None or kill is None else (_unescape(match["memcg"]).decode("utf-8", "replace"), kill)


def parse_kill(record: bytes) -> tuple[int, Kill] | None:
    """Return the user id and the kill of the record that there is for every kill; None if the record is of another
    kind.

    Never raises, whatever the bytes.
    """
    head, text = _split(record)
    if _OF_KILL not in text:
        return None
    match = _KILLED.fullmatch(text)
    kill = _kill(head, match)
    return None if match is None or kill is None else (int(match["uid"]), kill)


def _split(record: bytes) -> tuple[bytes, bytes]:
    head, _, rest = record.partition(b";")
    text, _, _ = rest.partition(b"\n")  # lines after the first are the record's variables
    return head, text


def _kill(head: bytes, match: re.Match[bytes] | None) -> Kill | None:
    when = _HEAD.fullmatch(head)
    if when is None or match is None:
        return None
    return Kill(_printable(_unescape(match["task"])), int(when["usec"]) / 1e6, int(match["pid"]))


def age_s(kill: Kill) -> float:
    """Return the least age of a kill in seconds.

    No program can read the log's clock. On a physical machine it follows CLOCK_MONOTONIC_RAW, while CLOCK_MONOTONIC
    follows network time; in a virtual machine it may be the other way round. The wrong one is off by seconds after a
    few days, so the smaller age counts: a kill that just happened must not be taken for an old one.
    """
    now_s = min(time.clock_gettime(clock) for clock in (time.CLOCK_MONOTONIC_RAW, time.CLOCK_MONOTONIC))
    return max(0.0, now_s - kill.at_s)


def _unescape(data: bytes) -> bytes:
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), data)


def _printable(name: bytes) -> str:
    return "".join(each if each.isprintable() else "\ufffd" for each in name.decode("utf-8", "replace"))
