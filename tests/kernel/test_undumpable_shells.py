"""Shells that are not dumpable: nobody inside looks into them, PID 1 does, and they are the image's own programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.wire.protocol import Setup
from tests.kernel.harness import Nsinit, Sandbox, data_directory, host_plan, running, wait_until
from tests.kernel.runner_harness import SHELLS

pytestmark = pytest.mark.kernel

DOORS = """
import ctypes, errno, os
libc, pid, held = ctypes.CDLL(None, use_errno=True), os.getppid(), []
def say(name, refused):
    if not refused:
        held.append(name)
for name in ("mem", "environ", "maps", "smaps", "io", "stack", "auxv", "syscall", "clear_refs", f"task/{pid}/mem"):
    try:
        open(f"/proc/{pid}/{name}", "wb" if name == "clear_refs" else "rb").close()
        held.append(name)
    except OSError:
        pass
for call, names in ((os.listdir, ("fd", "fdinfo", "map_files", "ns")), (os.readlink, ("exe", "cwd", "root", "fd/1"))):
    for name in names:
        try:
            call(f"/proc/{pid}/{name}")
            held.append(name)
        except OSError:
            pass
buffer = ctypes.create_string_buffer(8)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
libc.syscall.argtypes = [ctypes.c_long] * 7
address = ctypes.addressof(vector)
def attach():
    answer = libc.syscall(101, 16, pid, 0, 0, 0, 0)
    if answer == 0:
        os.waitpid(pid, 0x40000000)
        libc.syscall(101, 17, pid, 0, 0, 0, 0)
    return answer
for name, answer in {
    "attach": attach(),
    "seize": libc.syscall(101, 0x4206, pid, 0, 0, 0, 0),
    "process_vm_readv": libc.syscall(310, pid, address, 1, address, 1, 0),
    "process_vm_writev": libc.syscall(311, pid, address, 1, address, 1, 0),
    "pidfd_getfd": libc.syscall(438, os.pidfd_open(pid), 1, 0, 0, 0, 0),
    "kcmp": libc.syscall(312, pid, os.getpid(), 0, 1, 1, 0),
}.items():
    say(name, answer == -1)
print(*held)
"""
"""Tries each way into the parent, which is the shell; prints those that are open. A shell that is attached to stops:
it goes on when it is let go, and would stand still if its tracer just ended.
"""


@pytest.fixture(scope="module")
def nsinit_with_root() -> Iterator[Nsinit]:
    with data_directory() as data_dir, running(data_dir) as nsinit:
        yield nsinit


@pytest.fixture
def server(nsinit_with_root: Nsinit) -> Iterator[Nsinit]:
    yield nsinit_with_root
    nsinit_with_root.remove_sandboxes()


def _shell_pid(box: Sandbox) -> int:
    """Return the pid of the shell as it is seen here."""
    return int(Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text().split()[0])


def _mode(box: Sandbox) -> int:
    """Return the mode of the file that the shell was executed from."""
    return os.stat(f"/proc/{_shell_pid(box)}/exe").st_mode & 0o777


@pytest.mark.parametrize("user", [None, "root"])
@pytest.mark.parametrize("shell", SHELLS)
def test_no_process_of_the_same_user_looks_into_a_shell(server: Nsinit, shell: str, user: str | None) -> None:
    """With no filter at all, so that the kernel's own answer is seen. A program that the shell starts is open, once it
    runs, and so is a shell that a command starts."""
    box = server.build(host_plan(root_inside=True, seccomp="off"), Setup(shell=shell, user=user))
    assert box.run("echo $HOME").code == 0
    assert _mode(box) == 0o111
    assert box.python(DOORS) == ""
    opened = box.run(f"bash <<'END'\npython3 - <<'END_OF_SCRIPT'\n{DOORS}\nEND_OF_SCRIPT\n:\nEND")
    assert (opened.code, opened.out.split()[:2]) == (0, ["mem", "environ"])
    assert box.run("/bin/sleep 60 & until cat /proc/$!/comm; do :; done; kill $!").out == "sleep\n"


@pytest.mark.parametrize("user", [None, "root"])
def test_pid_1_still_reads_and_sets_what_it_needs(server: Nsinit, user: str | None) -> None:
    """The score for the out-of-memory killer; the directory of a shell."""
    box = server.build(host_plan(root_inside=True), Setup(shell="bash", user=user))
    assert box.run(":").code == 0
    wait_until(lambda: Path(f"/proc/{_shell_pid(box)}/oom_score_adj").read_text() == "500\n", "it is offered")
    assert box.run("enable -n pwd; cd /tmp").code == 0
    assert box.run("/bin/pwd").out == "/tmp\n"


def test_the_sessions_of_an_image_share_the_pages_of_its_shell(server: Nsinit) -> None:
    """One copy for all, which no mount table shows, and which is nobody's to read or change."""
    boxes = [server.build(host_plan()) for _ in range(2)]
    for box in boxes:
        assert box.run("grep -c shells /proc/self/mountinfo; ls /run/sandkasten/shells").out == "0\n"
    copies = {os.stat(f"/proc/{_shell_pid(box)}/exe")[1:3] for box in boxes}
    assert len(copies) == 1
    assert os.stat("/bin/bash")[1:3] not in copies
    assert {each.stat().st_uid for each in (server.data_dir / "images/host/shells").iterdir()} == {0}


def test_a_shell_that_the_session_has_changed_is_the_sessions(server: Nsinit) -> None:
    """A package manager inside replaces the shell: the next process is the new one, and dumpable. When the machine's
    shell changes, so does the copy."""
    box = server.build(host_plan(root_inside=True), Setup(shell="bash", user="root"))
    assert (
        box.run("cp /bin/bash /tmp/b && echo >> /tmp/b && cp /tmp/b /bin/bash.new && mv /bin/bash.new /bin/bash").code
        == 0
    )
    assert _mode(box) == 0o111
    box.run("exit 3")
    assert box.run("echo works").out == "works\n"
    assert _mode(box) == 0o755
    copy = server.data_dir / "images/host/shells/bash"
    os.utime(copy, (1, 1))
    assert server.build(host_plan()).run("echo new").out == "new\n"
    assert int(copy.stat().st_mtime) == int(os.stat("/bin/bash").st_mtime)
