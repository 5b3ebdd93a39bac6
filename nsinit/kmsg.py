"""Whom the kernel's out-of-memory killer ended, as the kernel's log tells it.

Owns one descriptor of `/dev/kmsg`, opened at start (nsinit's mount namespace loses `/dev` afterwards) and read on from
where the last request stopped, so that a request costs what was logged meanwhile and not the whole log. Names in it are
chosen by hostile code: a record that is not exactly as the kernel writes it is no record. The kernel limits how often
it writes these (10 in 5 s for the machine), so a victim may stay unknown.
Sources: Documentation/ABI/testing/dev-kmsg; mm/oom_kill.c, dump_oom_victim; mem_cgroup_print_oom_context.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

from nsinit.scheduler import Wait
from nsinit.validate import is_session_id

PATH = "/dev/kmsg"
_RECORD_BYTES = 8192
"""No record is longer (CONSOLE_EXT_LOG_MAX)."""
_BATCH = 256
_MAX_BATCHES = 256
"""Records read without a pause (some 0.3 ms), and pauses: a log that grows faster than this is given up on."""
_MAX_SESSIONS = 1024
LAST_KILLS = 16
"""Kills of one session that are remembered."""
_PID_NAMESPACE = "/proc/self/ns/pid"
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the pid namespace whose numbers the log has (include/linux/proc_ns.h, PROC_PID_INIT_INO)."""
_PREFIX = b"oom-kill:"
_HEAD = re.compile(rb"\d{1,10},\d{1,20},(?P<usec>\d{1,18}),.*", re.DOTALL)
_RECORD = re.compile(
    rb"oom-kill:constraint=CONSTRAINT_\w+,.*?,task_memcg=(?P<memcg>/[^,]*),task=(?P<task>.*),pid=(?P<pid>\d{1,10}),uid=\d+",
    re.DOTALL,
)
"""The first `,task=` ends the cgroup's path, in which there is no comma; the name goes on to the last `,pid=`."""
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class Kill:
    """One process that the kernel killed for memory: its name, when, in seconds of the kernel log's clock, and its pid
    in the machine's initial pid namespace."""

    name: str
    at_s: float
    pid: int


@dataclass(slots=True)
class Kills:
    """What the log tells of one session: how many kills, and the last of them, the newest at the end."""

    count: int = 0
    last: deque[Kill] = field(default_factory=lambda: deque(maxlen=LAST_KILLS))

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(each.pid for each in self.last)


class KernelLog:
    """The kernel's log from now on; with `path` another file that behaves like it."""

    def __init__(self, path: str = PATH) -> None:
        self._kills: dict[str, Kills] = {}
        self.has_our_pids = os.stat(_PID_NAMESPACE).st_ino == _INITIAL_PID_NAMESPACE
        """Whether its pids are those that this process sees."""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # in a container it may not be there, or not for us
            self._fd = -1
            return
        os.lseek(self._fd, 0, os.SEEK_END)

    def close(self) -> None:
        """Close the log."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def find_kills(self, session_id: str) -> Generator[Wait, bool, Kills]:
        """Read what is new and return the session's kills."""
        for _ in range(_MAX_BATCHES):
            if not self._read_batch():
                break
            yield Wait(timeout_s=0)
        return self._kills.get(session_id, Kills())

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
        """Keep what one record of the log says, if it is of a kill."""
        parsed = parse_record(record)
        if parsed is None:
            return
        memcg, kill = parsed
        for session_id in filter(is_session_id, memcg.split("/")):
            kills = self._kills[session_id] = self._kills.pop(session_id, Kills())
            kills.count += 1
            kills.last.append(kill)
        while len(self._kills) > _MAX_SESSIONS:
            del self._kills[next(iter(self._kills))]


def parse_record(record: bytes) -> tuple[str, Kill] | None:
    """Return the victim's memory cgroup and the kill; None if the record, as read from the device, is of another kind.

    Never raises, whatever the bytes.
    """
    head, _, rest = record.partition(b";")
    text, _, _ = rest.partition(b"\n")  # lines after the first are the record's variables
    if not text.startswith(_PREFIX):
        return None
    when, match = _HEAD.fullmatch(head), _RECORD.fullmatch(text)
    if when is None or match is None:
        return None
    memcg = _unescape(match["memcg"]).decode("utf-8", "replace")
    return memcg, Kill(_printable(_unescape(match["task"])), int(when["usec"]) / 1e6, int(match["pid"]))


def age_s(kill: Kill) -> float:
    """Return how long ago a kill was.

    The log's clock is the processor's, never adjusted, and so is CLOCK_MONOTONIC_RAW; CLOCK_MONOTONIC, which follows
    the network's time, would be seconds off after a few days.
    """
    return max(0.0, time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - kill.at_s)


def _unescape(data: bytes) -> bytes:
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), data)


def _printable(name: bytes) -> str:
    return "".join(each if each.isprintable() else "\ufffd" for each in name.decode("utf-8", "replace"))
