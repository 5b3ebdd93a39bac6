"""Records of the kernel's log: exactly those that the kernel writes are taken, and no byte of a process's name is
believed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsinit.server.kmsg import LAST_KILLS, KernelLog, Kill, Kills, parse_kill, parse_record

SESSION = "2da48b602c3f6c219d156df3"
MEMCG = f"/jobs/17/sandkasten-9d156df3/{SESSION}"


def _record(task: str, *, memcg: str = MEMCG, extra: str = "", head: str = "6,812,10952224750,-") -> bytes:
    where = f"nodemask=(null){extra},cpuset=/,mems_allowed=0,oom_memcg={memcg},task_memcg={memcg}"
    return f"{head};oom-kill:constraint=CONSTRAINT_MEMCG,{where},task={task},pid=20123,uid=525288\n".encode()


def test_a_memory_cgroups_kill_is_read() -> None:
    """Cgroup, name and time."""
    assert parse_record(_record("python3")) == (MEMCG, Kill("python3", 10952.22475, 20123))


def test_a_kill_for_the_whole_machine_is_read_too() -> None:
    """The kernel says `global_oom` then, and still which cgroup the victim was in."""
    text = f"oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg={MEMCG}"
    parsed = parse_record(f"6,1,2000000,-,caller=T7;{text},task=hog,pid=1,uid=0\n SUBSYSTEM=x\n".encode())
    assert parsed == (MEMCG, Kill("hog", 2.0, 1))


@pytest.mark.parametrize(
    ("logged", "name"),
    [
        ("a,task=b", "a,task=b"),
        ("x,pid=1,uid=0", "x,pid=1,uid=0"),
        (",task_memcg=/e", ",task_memcg=/e"),
        (r"\x5cx41", r"\x41"),
        (r"\xc3\xa4\x0a\x1b[2J", "ä\ufffd\ufffd[2J"),
        (r"\xff\xfe", "\ufffd\ufffd"),
        (r"\xe2\x80\xae", "\ufffd"),
        ("", ""),
    ],
)
def test_a_name_is_data_whatever_it_says(logged: str, name: str) -> None:
    """A name can't pass for another field, and no unprintable character is left in it."""
    parsed = parse_record(_record(logged))
    assert parsed is not None
    assert (parsed[0], parsed[1].name) == (MEMCG, name)


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b";",
        b"6,1,2,-;cgroup: fork rejected by pids controller in /x\n",
        b"6,1,2,-;oom-kill:\n",
        b"6,1,2,-;oom-kill:constr\n",
        b"6,1,2;" + _record("x").partition(b";")[2],
        b"6,1," + b"9" * 5000 + b",-;" + _record("x").partition(b";")[2],
        b"12,1,2,-;python3: oom-kill:constraint=CONSTRAINT_MEMCG,a,task_memcg=/x,task=a,pid=1,uid=1\n",
        _record("x").replace(b",pid=20123", b""),
    ],
)
def test_what_is_no_such_record_says_nothing(record: bytes) -> None:
    """Cut, foreign or half-forged ones."""
    assert parse_record(record) is None


@given(st.binary(max_size=300))
def test_no_bytes_raise(data: bytes) -> None:
    """Alone, and after the words that get a record looked at."""
    parse_record(data)
    parse_record(b"6,1,2,-;oom-kill:constraint=CONSTRAINT_NONE,a,task_memcg=/" + data)
    parse_record(_record("x").replace(b"task=x", b"task=" + data))
    parse_kill(data)
    parse_kill(_victim("x").replace(b"(x)", b"(" + data + b")"))
    parse_kill(_victim("x") + data)


def test_every_kill_of_a_session_is_counted_and_the_last_are_known(tmp_path: Path) -> None:
    """By pid; those of other sessions are none of it, and of a session that was killed in without end the memory stays
    small."""
    path = tmp_path / "kmsg"
    path.write_bytes(b"")
    log = KernelLog(str(path))
    other = MEMCG.replace(SESSION, SESSION[::-1])
    records = [_record("x").replace(b"pid=20123", b"pid=%d" % pid) for pid in range(1, LAST_KILLS + 3)]
    for record in (*records, _record("y", memcg=other)):
        log.take(record)
    found = _kills(log, SESSION)
    log.close()
    assert found.count == LAST_KILLS + 2
    assert found.pids == tuple(range(3, LAST_KILLS + 3))


def _victim(task: str, *, pid: int = 20123, uid: int = 525288, usec: int = 10952224750, end: str = "") -> bytes:
    sizes = f"total-vm:56104kB, anon-rss:44672kB, file-rss:5352kB, shmem-rss:0kB, UID:{uid} pgtables:148kB"
    text = f"Memory cgroup out of memory: Killed process {pid} ({task}) {sizes} oom_score_adj:1000{end}"
    return f"3,812,{usec},-;{text}\n".encode()


def _kills(log: KernelLog, session_id: str, base: int | None = None) -> Kills:
    with pytest.raises(StopIteration) as end:
        next(log.find_oom_kills(session_id, base))
    found = end.value.value
    assert isinstance(found, Kills)
    return found


def test_the_record_that_every_victim_has_is_read() -> None:
    """User id, name, time and pid; a name can't pass for the rest of it."""
    assert parse_kill(_victim("python3")) == (525288, Kill("python3", 10952.22475, 20123))
    assert parse_kill(_victim(r"x) total-vm:\x0a")) == (525288, Kill("x) total-vm:\ufffd", 10952.22475, 20123))
    assert parse_kill(_victim("python3", end=" and more")) is None
    assert parse_kill(_record("python3")) is None
    assert parse_kill(b"3,812,x,-;" + _victim("a").partition(b";")[2]) is None


def test_a_victim_without_a_cgroup_is_known_by_its_user_id(tmp_path: Path) -> None:
    """Once, and for the session that has the ids now: not for a neighbour, nor for whom the ids are given to later."""
    path = tmp_path / "kmsg"
    path.write_bytes(b"")
    log, base, other = KernelLog(str(path)), 524288, SESSION[::-1]
    log.take(_record("named"))
    log.take(_victim("named"))
    log.take(_victim("unnamed", pid=7, usec=10952_300000))
    log.take(_victim("neighbour", pid=8, uid=base + 65536, usec=10952_400000))
    assert _kills(log, SESSION).pids == (20123,)
    found = _kills(log, SESSION, base)
    assert (found.count, [each.name for each in found.last]) == (2, ["named", "unnamed"])
    assert _kills(log, SESSION, base).count == 2
    assert [each.name for each in _kills(log, other, base + 65536).last] == ["neighbour"]
    assert _kills(log, "0" * 24, base).count == 0
    log.close()


def test_without_a_log_no_victim_is_known() -> None:
    """As in a container that has no /dev/kmsg."""
    log = KernelLog("/nonexistent/kmsg")
    found = _kills(log, SESSION)
    assert (found.count, found.pids) == (0, ())
    log.close()
