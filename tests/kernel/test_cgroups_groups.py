"""Groups: a program's own cgroup inside a session's, made for the session's PID 1, which has no power over cgroups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsinit.cgroup.session import MAX_RUN_CGROUPS
from nsinit.wire.protocol import (
    Adopt,
    Adopted,
    Failed,
    FindOomKills,
    MakeRunCgroup,
    Ok,
    OomKills,
    Ready,
    RemoveRunCgroup,
    RunCgroupMade,
)
from runner.wire.protocol import BirthCgroup, ExecReply, RunProgram
from tests.kernel.harness import (
    ROOMY,
    Nsinit,
    Sandbox,
    data_directory,
    host_plan,
    new_id,
    new_node_id,
    running,
    wait_until,
)
from tests.kernel.processes import sleeper_in
from tests.waiting import patience

pytestmark = pytest.mark.cgroup_v2

SMALL = replace(ROOMY, memory_bytes=48 << 20)
ROOT = Path(__file__).resolve().parents[2]


def _session_directory(server: Nsinit, session_id: str) -> Path:
    assert isinstance(server.ready, Ready)
    return Path(server.ready.cgroup_dirs["unified"], session_id)


@contextmanager
def _group(server: Nsinit, session_id: str, name: str) -> Iterator[int]:
    """Make a group and hold its descriptor."""
    answer, fds = server.ask(MakeRunCgroup, session_id=session_id, name=name)
    assert isinstance(answer, RunCgroupMade), answer
    assert answer.membership == "clone"
    (fd,) = fds
    try:
        yield fd
    finally:
        os.close(fd)


def _refused(server: Nsinit, session_id: str, name: str) -> Failed:
    answer, fds = server.ask(MakeRunCgroup, session_id=session_id, name=name)
    assert isinstance(answer, Failed), answer
    assert fds == []
    return answer


def _remove(server: Nsinit, session_id: str, name: str, *, kill: bool = False) -> None:
    answer, _ = server.ask(RemoveRunCgroup, session_id=session_id, name=name, kill=kill)
    assert isinstance(answer, Ok), answer


def _probe(server: Nsinit, box: Sandbox, *fds: int) -> list[dict[str, Any]]:
    """Return what a powerless process in the place of `box`'s PID 1 could do with the descriptors."""
    arguments = [str(_session_directory(server, box.session_id)), str(box.pid), *map(str, fds)]
    command = [sys.executable, "-m", "tests.kernel.group_probe", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, pass_fds=fds, capture_output=True, text=True, timeout=patience(30), check=False
    )
    assert done.returncode == 0, done.stderr
    answer: list[dict[str, Any]] = json.loads(done.stdout)
    return answer


def test_a_powerless_init_starts_a_process_in_a_group(server: Nsinit) -> None:
    """The child is born in the group, which its cgroup namespace shows right below the root."""
    box = server.build(host_plan())
    with _group(server, box.session_id, "p-1") as fd:
        (result,) = _probe(server, box, fd)
    assert result["clone"] == "/p-1"
    _remove(server, box.session_id, "p-1")
    assert not (_session_directory(server, box.session_id) / "p-1").exists()
    box.teardown()


def _names_in(directory: Path) -> list[str]:
    pids = (directory / "cgroup.procs").read_text().split()
    return [Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids]


def test_pid_1_runs_a_program_in_a_group(server: Nsinit) -> None:
    """Processes that the program leaves running are in its run cgroup too, whatever session they moved to, and end with
    it.
    """
    box = server.build(host_plan())
    directory = _session_directory(server, box.session_id) / "p-1"
    with _group(server, box.session_id, "p-1") as fd:
        script = "grep ^0:: /proc/self/cgroup; setsid sh -c 'sleep 1000 & exit' >/dev/null 2>&1"
        program = RunProgram("r1", argv=("sh", "-c", script), group=BirthCgroup("p-1", "clone"))
        reply, out, err = box.request(program, fd)
    assert isinstance(reply, ExecReply), reply
    assert (out, err, reply.exit_code) == (b"0::/p-1\n", b"", 0)
    wait_until(lambda: _names_in(directory) == ["sleep"], "the job has become sleep")
    assert box.run("pidof sleep | wc -w").out == "1\n"
    _remove(server, box.session_id, "p-1", kill=True)
    assert not directory.exists()
    assert box.run("pidof sleep | wc -w").out == "0\n"
    box.teardown()


def test_a_groups_descriptor_leads_nowhere_else(server: Nsinit) -> None:
    """A run cgroup's descriptor gives no way up and nothing to write or make, though PID 1 owns `cgroup.procs`."""
    box = server.build(host_plan())
    with _group(server, box.session_id, "p-1") as fd:
        (result,) = _probe(server, box, fd)
    refused, not_its_own = "Read-only file system", "Permission denied"
    assert result["open"] == {
        "above is itself": True,
        "cgroup.procs": refused,
        "../cgroup.procs": refused,
        "cgroup.type": not_its_own,
        "cgroup.kill": not_its_own,
        "mkdir": refused,
    }
    box.teardown()


def test_a_group_of_another_session_is_out_of_reach(server: Nsinit) -> None:
    """The kernel refuses to start a process in another session's run cgroup, even by its descriptor."""
    mine, other = server.build(host_plan()), server.build(host_plan())
    with _group(server, mine.session_id, "p-1") as own_fd, _group(server, other.session_id, "p-1") as foreign_fd:
        own, foreign = _probe(server, mine, own_fd, foreign_fd)
    assert (own["clone"], foreign["clone"]) == ("/p-1", "PermissionError")
    mine.teardown()
    other.teardown()


def test_only_the_two_files_change_hands(server: Nsinit) -> None:
    """PID 1 owns `cgroup.procs` of its session and of a run cgroup and nothing else; before the first run cgroup,
    nothing.
    """
    box = server.build(host_plan())
    directory = _session_directory(server, box.session_id)

    def owned() -> set[str]:
        return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.stat().st_uid}

    assert owned() == set()
    with _group(server, box.session_id, "g"):
        assert owned() == {"cgroup.procs", "g/cgroup.procs"}
    assert (directory / "g/cgroup.procs").stat().st_uid == box.built.identity.base_uid + 65535
    box.teardown()


@pytest.mark.parametrize(
    "name", ["", "a" * 33, "A", "a.b", "..", ".", "a/b", "../x", "a\n", "ä", "a b", "cgroup.procs"]
)
def test_a_name_that_is_no_plain_one_is_refused(server: Nsinit, name: str) -> None:
    """A run cgroup's name with characters other than a-z, 0-9 and `-` is refused, and no path is made of it."""
    session_id = server.build(host_plan()).session_id
    assert _refused(server, session_id, name).stage == "validate"
    answer, _ = server.ask(RemoveRunCgroup, session_id=session_id, name=name)
    assert isinstance(answer, Failed)
    assert [each.name for each in _session_directory(server, session_id).iterdir() if each.is_dir()] == []


def test_a_group_is_refused_twice_and_in_a_session_that_is_not_there(server: Nsinit) -> None:
    """The reasons are told apart by errno."""
    box = server.build(host_plan())
    with _group(server, box.session_id, "twice"):
        assert os.strerror(_refused(server, box.session_id, "twice").errno) == "File exists"
    assert os.strerror(_refused(server, new_id(), "x").errno) == "No such process"
    box.teardown()


def test_groups_of_one_session_are_bounded(server: Nsinit) -> None:
    """One too many is refused; when one went there is room again; the teardown takes all of them."""
    box = server.build(host_plan())
    for number in range(MAX_RUN_CGROUPS):
        with _group(server, box.session_id, f"p-{number}"):
            pass
    assert os.strerror(_refused(server, box.session_id, "one-more").errno) == "Resource temporarily unavailable"
    _remove(server, box.session_id, "p-7")
    with _group(server, box.session_id, "one-more"):
        pass
    assert box.teardown().leftovers == ()
    assert server.traces(box.session_id) == []


def test_removing_a_group_kills_what_is_in_it_and_nothing_else(server: Nsinit) -> None:
    """A neighbour in another group and the session's own processes live on; a second removal is no error."""
    box = server.build(host_plan())
    directory = _session_directory(server, box.session_id)
    for name in ("a", "b"):
        with _group(server, box.session_id, name):
            pass
    with sleeper_in(directory / "a") as inside, sleeper_in(directory / "b") as neighbour:
        _remove(server, box.session_id, "a", kill=True)
        assert inside.wait(patience(10)) == -9
        assert neighbour.poll() is None
        assert not (directory / "a").exists()
        _remove(server, box.session_id, "a", kill=True)
    assert box.run("echo lives").out == "lives\n"
    box.teardown()


def test_a_group_that_is_not_empty_stays_unless_killing_was_asked_for(server: Nsinit) -> None:
    """Members of the run cgroup notice nothing."""
    box = server.build(host_plan())
    directory = _session_directory(server, box.session_id) / "a"
    with _group(server, box.session_id, "a"), sleeper_in(directory) as member:
        answer, _ = server.ask(RemoveRunCgroup, session_id=box.session_id, name="a")
        assert isinstance(answer, Failed)
        assert os.strerror(answer.errno) == "Device or resource busy"
        assert directory.exists()
        assert member.poll() is None
    _remove(server, box.session_id, "a")
    assert not directory.exists()
    box.teardown()


def test_a_teardown_takes_members_of_groups_too(server: Nsinit) -> None:
    """A process in a run cgroup that left PID 1's reach is still the session's: a teardown kills it and removes its
    cgroup.
    """
    box = server.build(host_plan())
    directory = _session_directory(server, box.session_id)
    with (
        _group(server, box.session_id, "a"),
        _group(server, box.session_id, "empty"),
        sleeper_in(directory / "a") as member,
    ):
        assert box.teardown().leftovers == ()
        assert member.wait(patience(10)) == -9
    assert server.traces(box.session_id) == []


def test_groups_outlive_nsinit() -> None:
    """After a crash the next one finds session and groups, makes and removes more of them, and takes all down."""
    node_id = new_node_id()
    with data_directory() as data_dir, running(data_dir, node_id) as server:
        box = server.build(host_plan())
        directory = _session_directory(server, box.session_id)
        with (
            _group(server, box.session_id, "old"),
            _group(server, box.session_id, "older"),
            sleeper_in(directory / "old"),
        ):
            server.kill()
            with running(data_dir, node_id) as successor:
                answer, fds = successor.ask(Adopt, session_id=box.session_id)
                assert isinstance(answer, Adopted), answer
                for fd in fds:
                    os.close(fd)
                assert answer.identity == box.built.identity
                with _group(successor, box.session_id, "new") as fd:
                    assert _probe(successor, box, fd)[0]["clone"] == "/new"
                _remove(successor, box.session_id, "older")
                assert sorted(each.name for each in directory.iterdir() if each.is_dir()) == ["new", "old"]
                box.release()
                assert successor.teardown(box.session_id).leftovers == ()
                assert successor.traces(box.session_id) == []


def test_a_session_of_which_only_groups_are_left_is_found_and_removed(server: Nsinit) -> None:
    """A crash in the middle of a teardown: PID 1 is dead, the groups are there."""
    box = server.build(host_plan())
    with _group(server, box.session_id, "a"):
        pass
    box.release()
    os.kill(box.pid, 9)
    wait_until(lambda: box.pid not in server.processes(), "PID 1 is gone")
    assert server.scan()[box.session_id].has_cgroup
    assert server.teardown(box.session_id).leftovers == ()
    assert server.scan() == {}


KILLS = 12
HOGS = f"""
import os
for number in range({KILLS}):
    pid = os.fork()
    if pid == 0:
        open('/proc/self/comm', 'w').write('hog-%d' % number)
        held = bytearray(400 << 20)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


def test_killed_processes_are_named_when_the_kernel_says_less_of_each(server: Nsinit) -> None:
    """After ten kills in five seconds the kernel's log no longer names the victim's cgroup, only its user id, which
    stands for the session as long as the session has it. Kills before that are known for good and never told to the
    next session with that id.
    """
    box, other = server.build(host_plan(limits=SMALL)), server.build(host_plan())
    assert box.run(f'python3 -c "{HOGS}"').out == "9\n" * KILLS
    box.teardown()
    kills, _ = server.ask(FindOomKills, session_id=box.session_id)
    assert isinstance(kills, OomKills)
    assert kills.name == f"hog-{KILLS - 1}"
    assert kills.kills >= KILLS or not kills.pids  # one more where the kernel finds a second process
    assert server.ask(FindOomKills, session_id=other.session_id)[0].name == ""
    other.teardown()


def test_the_victim_of_the_oom_killer_is_named(server: Nsinit) -> None:
    """A victim is told by its own name for itself and by its session, however much the name looks like the log's own
    words.
    """
    box, other = server.build(host_plan(limits=SMALL)), server.build(host_plan())
    script = "open('/proc/self/comm', 'w').write('x,task=y,pid=1'); held = [bytearray(1 << 20) for _ in range(400)]"
    assert box.run(f'python3 -c "{script}"').code == 137
    kills, _ = server.ask(FindOomKills, session_id=box.session_id)
    assert isinstance(kills, OomKills)
    assert kills.name == "x,task=y,pid=1"
    assert 0 <= kills.age_s < 5
    assert server.ask(FindOomKills, session_id=box.session_id)[0].name == kills.name
    assert server.ask(FindOomKills, session_id=other.session_id)[0].name == ""
    box.teardown()
    other.teardown()
