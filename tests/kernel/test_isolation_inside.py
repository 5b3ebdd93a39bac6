"""The view and the power of a program inside a sandbox: one sandbox, many attempts. All of them end inside."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsinit.kernel import syscalls
from nsinit.kernel.slots import INOTIFY_INSTANCES, INOTIFY_WATCHES
from nsinit.sandbox.builder_steps import MASKED
from tests.kernel.harness import ROOMY, Nsinit, Sandbox, data_directory, host_plan, running, wait_until

pytestmark = pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs the machine's python3 in /usr")

DEVICES = [
    *("fd", "full", "null", "ptmx", "pts", "random", "shm"),
    *("stderr", "stdin", "stdout", "tty", "urandom", "zero"),
]
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


@pytest.fixture
def sandbox(server: Nsinit) -> Iterator[Sandbox]:
    box = server.build(host_plan())
    yield box
    box.teardown()


def _python_calls(sandbox: Sandbox, body: str) -> str:
    """Run Python that may call `sys(name, *args)`, which returns the errno name or `ok`."""
    prelude = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def sys(name, *args):
    result = getattr(libc, name)(*args)
    return "ok" if result != -1 else errno.errorcode[ctypes.get_errno()]
"""
    return sandbox.python(prelude + body)


def test_every_namespace_is_its_own(sandbox: Sandbox) -> None:
    """No namespace that can be unshared is shared with the host."""
    inside = sandbox.run("readlink /proc/self/ns/{" + ",".join(NAMESPACES) + "}").out.split()
    outside = [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]
    assert len(inside) == len(NAMESPACES)
    assert not set(inside) & set(outside)


def test_only_the_user_namespace_of_the_session_is_within_reach(sandbox: Sandbox) -> None:
    """Mount, network and the other namespaces belong to the initial user namespace, so no power inside reaches them."""
    script = f"""
import fcntl, os
NS_GET_USERNS = 0xB701
for name in {[name for name in NAMESPACES if name != "user"]!r}:
    try:
        fcntl.ioctl(os.open(f"/proc/self/ns/{{name}}", os.O_RDONLY), NS_GET_USERNS)
        print(name, "is ours")
    except PermissionError:
        pass
"""
    assert sandbox.python(script) == ""


def test_ids_map_to_a_range_of_their_own(sandbox: Sandbox) -> None:
    """0..65535 inside are the session's 65536 host ids; the command runs as base + 1000."""
    base = sandbox.built.identity.base_uid
    assert sandbox.run("cat /proc/self/uid_map").out.split() == ["0", str(base), "65536"]
    assert sandbox.run("cat /proc/self/gid_map").out.split() == ["0", str(base), "65536"]
    sandbox.run("echo x > /tmp/mine")
    assert base % 65536 == 0
    assert os.stat(f"/proc/{sandbox.pid}/root/tmp/mine").st_uid == base + 1000


def test_what_the_kernel_counts_per_user_is_counted_for_the_session_alone(sandbox: Sandbox) -> None:
    """The user namespace belongs to the session's first id in the machine's namespace, and no longer to the machine's
    root."""
    with open(f"/proc/{sandbox.pid}/ns/user", "rb") as namespace:
        owner = array.array("I", [0])
        fcntl.ioctl(namespace, NS_GET_OWNER_UID, owner)
    assert owner[0] == sandbox.built.identity.base_uid


PR_GET_SECUREBITS = 27
NS_GET_OWNER_UID = 0xB704
"""linux/nsfs.h."""
LOCKED = 0b1110_1011
"""Each of the four pairs is locked (the odd bits). Set are: uid 0 means nothing, no ambient capability may be raised;
not set: changes of uid keep nothing, and capabilities are not kept."""


def test_commands_have_no_capability_and_can_gain_none(sandbox: Sandbox) -> None:
    """Every set is empty, the bounding set included, no_new_privs is on and the securebits are locked."""
    status = dict(
        line.split(":\t", 1) for line in sandbox.run("cat /proc/self/status").out.splitlines() if ":\t" in line
    )
    assert {status[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert status["Groups"].split() in ([], ["1000"])
    assert int(sandbox.python(f"import ctypes; print(ctypes.CDLL(None).prctl({PR_GET_SECUREBITS},0,0,0,0))")) == LOCKED


LAST_STEP = """
import runpy, sys
sys.argv[:] = [sys.argv[-1]]
sys.path.append(sys.argv[0].rpartition("/")[0])
from nsinit.sandbox import build

def tell(init):
    try:
        import this
    except ImportError as error:
        raise OSError(38, f"refused: {type(error).__name__}")
    raise OSError(38, "imported")

names = [name for name, _ in build.POWER_STEPS]
place = names.index("landlock")
build.POWER_STEPS = (*build.POWER_STEPS[:place], ("probe", tell), *build.POWER_STEPS[place:])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""An nsinit with one step more, in which PID 1 tries to import what the standard library has."""


def test_pid_1_can_import_nothing() -> None:
    """In a real sandbox, once imports are locked, a module that was not loaded is refused, whatever the image holds."""
    wrapper = (sys.executable, "-I", "-S", "-B", "-c", LAST_STEP)
    with data_directory() as data_dir, running(data_dir, wrapper=wrapper) as server:
        failed = server.refused(host_plan())
    assert failed.stage == "probe"
    assert "refused: ModuleNotFoundError" in failed.message


def test_pid_1_keeps_four_capabilities_and_no_more(sandbox: Sandbox) -> None:
    """The runner can change ids, signal commands and read their counters; its bounding set is empty too."""
    status = Path(f"/proc/{sandbox.pid}/status").read_text()
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    kill_setgid_setuid_ptrace = f"{1 << 5 | 1 << 6 | 1 << 7 | 1 << 19:016x}"
    assert (values["CapPrm"], values["CapEff"]) == (kill_setgid_setuid_ptrace, kill_setgid_setuid_ptrace)
    assert {values["CapBnd"], values["CapInh"], values["CapAmb"]} == {"0" * 16}
    assert values["Uid"].split() == [str(sandbox.built.identity.base_uid + 65535)] * 4


def test_mounts_and_names_can_not_be_changed(sandbox: Sandbox) -> None:
    """mount, umount, remount, pivot_root, sethostname, mknod and chroot are all refused."""
    answers = _python_calls(
        sandbox,
        """
MS_REMOUNT, MS_BIND, S_IFCHR = 32, 4096, 0o020000
print(sys("mount", b"x", b"/tmp", b"tmpfs", 0, None), sys("umount2", b"/proc/keys", 0), sys("umount2", b"/tmp", 2),
      sys("mount", b"x", b"/dev", b"", MS_REMOUNT | MS_BIND, None), sys("mount", b"/", b"/tmp", b"", MS_BIND, None),
      sys("sethostname", b"evil", 4), sys("chroot", b"/tmp"),
      sys("mknod", b"/tmp/sda", S_IFCHR | 0o666, os.makedev(8, 0)))
""",
    )
    assert answers.split() == ["EPERM"] * 8
    assert sandbox.run("hostname").out == f"sk-{sandbox.session_id[:8]}\n"


def test_no_namespace_can_be_made_or_entered(sandbox: Sandbox) -> None:
    """unshare of every kind fails, the user namespace included, and so does entering the one of PID 1's."""
    answers = _python_calls(
        sandbox,
        """
kinds = dict(mnt=0x20000, cgroup=0x2000000, uts=0x4000000, ipc=0x8000000, user=0x10000000, pid=0x20000000,
             net=0x40000000)
print({sys("unshare", flag) for flag in kinds.values()},
      {sys("setns", os.open(f"/proc/self/ns/{name}", 0), 0) for name in kinds})
""",
    )
    unshared, entered = answers.split("} {")
    assert "ok" not in unshared + entered
    assert set(unshared.strip("{}").replace("'", "").split(", ")) <= {"EPERM", "ENOSPC"}


def test_pid_1_is_out_of_sight_and_out_of_reach(sandbox: Sandbox) -> None:
    """Commands find no /proc/1, and can neither trace, signal nor inspect the runner."""
    answers = _python_calls(
        sandbox,
        """
PTRACE_ATTACH, PIDFD_OPEN, PIDFD_GETFD = 16, 434, 438
print(os.path.exists("/proc/1"), "1" in os.listdir("/proc"), sys("ptrace", PTRACE_ATTACH, 1, 0, 0), sys("kill", 1, 9),
      sys("syscall", PIDFD_GETFD, libc.syscall(PIDFD_OPEN, 1, 0), 3, 0), sys("setpriority", 0, 1, 5))
""",
    )
    assert answers.split() == ["False", "False", "EPERM", "EPERM", "EPERM", "EPERM"]


def test_signals_do_not_leave_the_sandbox(sandbox: Sandbox) -> None:
    """`kill -9 -1` ends the commands at most; the session answers the next one."""
    sandbox.run("kill -9 -1")
    assert sandbox.run("echo alive").out == "alive\n"
    os.kill(sandbox.owner.pid, 0)


def test_ps_shows_own_processes_only(sandbox: Sandbox) -> None:
    """/proc lists what belongs to the sandbox user, nothing of the host and not PID 1."""
    listed = sandbox.python("import os; print(*[p for p in os.listdir('/proc') if p.isdigit()])").split()
    assert listed
    assert max(map(int, listed)) < 100
    assert "1" not in listed


def test_commands_inherit_no_descriptor(sandbox: Sandbox) -> None:
    """A command finds 0, 1, 2 open, and the directory it lists them with; no name in there is a host path."""
    lines = sandbox.run("ls -l /proc/self/fd").out.splitlines()[1:]
    targets = {line.split()[-3]: line.split()[-1] for line in lines}
    assert set(targets) == {"0", "1", "2", "3"}
    assert targets["0"] == "/dev/null"
    assert all(target.startswith(("/dev/", "/run/sandkasten/", "/proc/", "pipe:")) for target in targets.values())


def test_pid_1_holds_nothing_of_the_host(sandbox: Sandbox) -> None:
    """The runner's descriptors are its own sockets, pipes and files inside, the directories of its shells, its `/proc`,
    and one with copies of the image's shells, out of which no name leads; no log pipe, no cgroup."""
    base = f"/proc/{sandbox.pid}/fd"
    targets = {fd: os.readlink(f"{base}/{fd}") for fd in os.listdir(base)}
    copies = [fd for fd, target in targets.items() if target == "/"]
    assert [set(os.listdir(f"{base}/{fd}/..")) <= {"bash", "busybox", "dash", "sh"} for fd in copies] == [True]
    del targets[copies[0]]
    allowed = ("/dev/null", "socket:", "pipe:", "anon_inode:", "/run/sandkasten/", "/proc")
    assert [target for target in targets.values() if not target.startswith(allowed)] == []
    of_the_host = {os.stat(path).st_dev for path in ("/", "/proc", "/dev", "/sys/fs/cgroup")}
    files = [fd for fd, target in targets.items() if target.startswith("/")]
    assert not {os.stat(f"{base}/{fd}").st_dev for fd in files} & of_the_host
    directories = [fd for fd in files if stat.S_ISDIR(os.stat(f"{base}/{fd}").st_mode)]
    assert all(targets[fd].startswith("/run/sandkasten/") or targets[fd] == "/proc" for fd in directories)
    log_pipe = os.readlink(f"/proc/{sandbox.owner.pid}/fd/2")
    assert log_pipe not in targets.values()


def test_kernel_files_are_masked_and_settings_read_only(sandbox: Sandbox) -> None:
    """Files that tell about the host are empty or unreadable, and no file below /proc/sys can be written."""
    here = [name for name in MASKED if os.path.lexists(f"/proc/{name}")]
    assert len(here) > len(MASKED) // 2  # no kernel has all of them
    mounted = {line.split()[1] for line in sandbox.run("cat /proc/self/mounts").out.splitlines()}
    assert {f"/proc/{name}" for name in here} <= mounted
    assert sandbox.run(f"cd /proc; for f in {' '.join(here)}; do test -d $f && ls -A $f || cat $f; done").out == ""
    for name in ("kernel/hostname", "net/ipv4/ip_forward", "vm/drop_caches"):
        assert sandbox.run(f"echo 1 > /proc/sys/{name}").code != 0
    options = {line.split()[1]: line.split()[3] for line in sandbox.run("cat /proc/self/mounts").out.splitlines()}
    assert all(options[f"/proc/{name}"].startswith("ro,") for name in ("sys", "irq", "bus"))


def test_counters_of_the_machine_are_replaced(sandbox: Sandbox) -> None:
    """Work on the machine changes no counter that a session sees, and the boot has a name of its own there."""
    shown = "cd /proc; cat stat vmstat sys/kernel/random/boot_id"
    before = sandbox.run(shown).out
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        pass
    assert sandbox.run(shown).out == before
    assert Path("/proc/sys/kernel/random/boot_id").read_text() not in before
    kept = [line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")]
    assert kept[0] in before.splitlines()
    assert sandbox.run("echo 1 > /proc/stat").code != 0


def test_programs_that_read_the_counters_work(sandbox: Sandbox) -> None:
    """The replaced files serve the programs that need them: as many processors as there are, and a plausible boot."""
    count = min(len(os.sched_getaffinity(0)), ROOMY.cpu_quota_us // ROOMY.cpu_period_us)
    assert sandbox.run("nproc").out == f"{count}\n"
    for command in ("uptime", "top -bn1", "vmstat", "ps -eo pid,lstart"):
        done = sandbox.run(f"command -v {command.split()[0]} > /dev/null || exit 0; {command}")
        assert (done.code, done.err) == (0, ""), command
    assert str(time.localtime().tm_year) in sandbox.run("sh -c 'ps -o lstart= -p $$'").out
    if shutil.which("node"):
        said = sandbox.run("node -p 'os.cpus().length + \" \" + os.cpus().every(each => each.times.idle > 0)'").out
        assert said == f"{count} true\n"


def test_dev_holds_the_harmless_devices_only(sandbox: Sandbox) -> None:
    """Six character devices, terminals and shared memory; all of it works and none of it can be added to."""
    listed = sandbox.run("ls /dev").out.split()
    assert listed == DEVICES
    assert (
        sandbox.run("head -c 4 /dev/zero | wc -c && echo x > /dev/null && head -c 3 /dev/urandom | wc -c").out
        == "4\n3\n"
    )
    assert sandbox.python("import os, pty; m, s = pty.openpty(); os.write(s, b'hi'); print(os.read(m, 9))") == "b'hi'"
    assert sandbox.run("touch /dev/x").code != 0
    assert sandbox.run("echo x > /dev/shm/f && cat /dev/shm/f").out == "x\n"


def test_no_host_path_shows_anywhere(sandbox: Sandbox) -> None:
    """The mount table names neither the data directory nor a disk of the host."""
    table = sandbox.run("cat /proc/self/mountinfo /proc/self/mounts").out
    assert str(sandbox.owner.data_dir) not in table
    assert "sandkasten-kernel" not in table
    kinds = {line.split(" - ")[1].split()[0] for line in table.splitlines() if " - " in line}
    assert kinds - {"cgroup", "cgroup2"} == {"overlay", "proc", "tmpfs", "devpts"}
    assert {line.split()[3] for line in table.splitlines() if " - cgroup" in line} == {"/"}


def test_nothing_of_the_hosts_files_is_inside(sandbox: Sandbox) -> None:
    """/root, /home, /var and /etc are the image's; only /usr is the machine's, and a write there stays inside."""
    assert sandbox.run("ls -A /root /var | grep -v :; cd /sys; ls").out.split() == ["devices", "fs"]
    assert sandbox.run("ls /home").out == "sandbox\n"
    assert sandbox.run("ls /etc/shadow /etc/ssh /etc/sudoers").code != 0
    assert sorted(sandbox.run("ls /usr").out.split()) == sorted(os.listdir("/usr"))


def test_setuid_files_are_inert(sandbox: Sandbox) -> None:
    """Every mount is nosuid, and a setuid program of /usr gives no other uid."""
    options = [line.split()[3] for line in sandbox.run("cat /proc/self/mounts").out.splitlines()]
    assert all("nosuid" in each.split(",") for each in options)
    sandbox.run("cp /usr/bin/id /tmp/id && chmod 6755 /tmp/id")
    assert sandbox.run("/tmp/id -u").out == "1000\n"


def test_the_network_is_loopback_alone(sandbox: Sandbox) -> None:
    """`lo` is up and there is nothing else; no address outside can be reached."""
    script = """
import errno, os, socket, threading
print(*[name for _, name in socket.if_nameindex()])
server = socket.create_server(("127.0.0.1", 80))
client = socket.create_connection(("127.0.0.1", 80))
client.sendall(b"hello"); print(server.accept()[0].recv(5).decode())
try:
    socket.create_connection(("192.0.2.1", 80), 2)
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    assert sandbox.python(script).split() == ["lo", "hello", "ENETUNREACH"]


def test_the_sandbox_user_owns_home_and_workspace(sandbox: Sandbox) -> None:
    """The documented places are there, with the documented owners, modes and names."""
    shown = sandbox.run("stat -c '%u:%g %a %n' /workspace /home/sandbox /tmp /run /run/sandkasten /").out
    assert shown.splitlines() == [
        *("1000:1000 755 /workspace", "1000:1000 755 /home/sandbox", "0:0 1777 /tmp", "0:0 755 /run"),
        *("65535:65535 711 /run/sandkasten", "0:0 755 /"),
    ]
    assert sandbox.run("cat /etc/hostname").out == f"sk-{sandbox.session_id[:8]}\n"
    assert sandbox.run("id -un; id -gn; getent hosts localhost").out.split()[:2] == ["sandbox", "sandbox"]
    assert sandbox.run("ls /run/sandkasten").code != 0


def test_the_cgroup_namespace_hides_the_hosts_tree(sandbox: Sandbox) -> None:
    """Every controller that limits the session shows it at the root."""
    lines = sandbox.run("cat /proc/self/cgroup").out.splitlines()
    assert {line.split(":")[2] for line in lines} == {"/"}


def test_limits_of_processes_are_the_documented_ones(sandbox: Sandbox) -> None:
    """No core dump ever reaches the host's handler, and files, locked memory and queues are bounded."""
    names = ("CORE", "MEMLOCK", "MSGQUEUE", "SIGPENDING")
    script = f"import resource as r; print([r.getrlimit(getattr(r, 'RLIMIT_' + name)) for name in {names}])"
    assert sandbox.python(script) == "[(1, 1), (8388608, 8388608), (819200, 819200), (4096, 4096)]"
    assert sandbox.run("ulimit -Sn; ulimit -Ss").out == "1024\n8192\n"
    assert int(sandbox.run("ulimit -Hn").out) <= 65536


def test_the_network_lets_everybody_listen_and_nobody_ping_and_has_no_ipv6(sandbox: Sandbox) -> None:
    """Low ports need no privilege inside, and ICMP sockets are nobody's; settings are the session's own."""
    names = "ipv4/ip_unprivileged_port_start ipv6/conf/all/disable_ipv6"
    assert sandbox.run(f"cd /proc/sys/net; cat {names}").out.split() == ["0", "1"]
    ping = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)"
    assert "PermissionError" in sandbox.run(f"python3 -c '{ping}'").err


KINDS = {"user": 1 << 28, "mnt": 1 << 17, "pid": 1 << 29, "net": 1 << 30, "ipc": 1 << 27, "uts": 1 << 26}
KINDS |= {"cgroup": 1 << 25, "time": 1 << 7}


def test_without_a_filter_no_namespace_of_any_kind_can_be_made(server: Nsinit) -> None:
    """The limits of the session's own user namespace are 0 for all kinds, and can't be raised from inside."""
    box = server.build(host_plan(seccomp="off"))
    script = f"""
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
for kind, flag in {KINDS}.items():
    path = f"/proc/sys/user/max_{{kind}}_namespaces"
    answers = [open(path).read().strip(), "writable" if os.access(path, os.W_OK) else "fixed"]
    for flags in (flag, flag | {KINDS["user"]}):
        answers.append("made" if libc.unshare(flags) == 0 else errno.errorcode[ctypes.get_errno()])
    print(kind, *answers)
"""
    answers = dict(line.split(" ", 1) for line in box.python(script).splitlines())
    box.teardown()
    assert answers == {"user": "0 fixed ENOSPC ENOSPC"} | dict.fromkeys(KINDS.keys() - {"user"}, "0 fixed EPERM ENOSPC")


def test_inotify_of_one_session_is_bounded_and_none_of_anothers(server: Nsinit) -> None:
    """A user that takes all there is leaves all of theirs to a neighbour and to the machine's root."""
    attacker, other = (server.build(host_plan()) for _ in range(2))
    take = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
held = 0
while held < 500 and libc.inotify_init1(0) >= 0:
    held += 1
print(held, ctypes.get_errno(), flush=True)
if os.path.exists("/tmp/stay"):
    time.sleep(600)
"""
    attacker.run(f"cat > /tmp/take.py <<'end'\n{take}end\n")
    attacker.run("touch /tmp/stay; python3 /tmp/take.py > /tmp/taken &")
    wait_until(lambda: attacker.run("cat /tmp/taken").out.endswith("\n"), "the attacker has all it gets")
    assert attacker.run("cat /tmp/taken").out == f"{INOTIFY_INSTANCES} {errno.EMFILE}\n"
    assert other.python(take).strip() == f"{INOTIFY_INSTANCES} {errno.EMFILE}"
    os.close(syscalls.inotify_init())
    limits = other.run("cat /proc/sys/user/max_inotify_instances /proc/sys/user/max_inotify_watches").out.split()
    assert limits == [str(INOTIFY_INSTANCES), str(INOTIFY_WATCHES)]
    assert other.python("import os; print(os.access('/proc/sys/user/max_inotify_watches', os.W_OK))").strip() == "False"
    for box in (attacker, other):
        box.teardown()
