"""Root inside a session: allowed and refused actions, each tried by every name that could give more power."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nsinit.kernel.capabilities import ROOT_CAPABILITIES, RUNNER_CAPABILITIES
from nsinit.kernel.slots import SANDBOX_ID, SQUASHED_ID
from runner.wire.protocol import ChangeOwner, Done, Error, Exec, ExecReply, GetFile, OpenShell, RunProgram, Setup
from tests.kernel.harness import Nsinit, Result, Sandbox, data_directory, host_plan, running

pytestmark = pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs the machine's python3 in /usr")

REFUSED = {"EPERM", "EACCES", "ENOSYS", "EROFS", "ENOENT", "ESRCH", "EINVAL", "EAFNOSUPPORT", "EPROTONOSUPPORT"}
"""Errors by which the kernel refuses an action; any of them will do, as long as the action had no effect."""

PRELUDE = """
import ctypes, errno, os, platform, signal, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
def sys(name, *args):
    result = getattr(libc, name)(*args)
    return "done" if result != -1 else errno.errorcode[ctypes.get_errno()]
def nr(number, *args):
    return sys("syscall", ctypes.c_long(number), *args)
def attempt(work):
    try:
        work()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
def tell(**answers):
    for name, answer in answers.items():
        print(name, answer)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Nsinit]:
    with data_directory() as data_dir, running(data_dir) as nsinit:
        yield nsinit


@pytest.fixture(scope="module")
def sandbox(server: Nsinit) -> Iterator[Sandbox]:
    """One session whose commands may be root, for all attempts."""
    box = server.build(host_plan(root_inside=True))
    yield box
    box.teardown()


@pytest.fixture(scope="module")
def unfiltered(server: Nsinit) -> Iterator[Sandbox]:
    """The same without a system call filter: processes can take PID 1's uid."""
    box = server.build(host_plan(root_inside=True, seccomp="off"))
    yield box
    box.teardown()


def as_root(box: Sandbox, *argv: str, user: str = "root") -> Result:
    """Run a program as another user than the session's."""
    reply, out, err = box.request(RunProgram("r", argv, user=user))
    assert isinstance(reply, ExecReply), reply
    return Result(reply.exit_code, out.decode(errors="replace"), err.decode(errors="replace"))


def answers(box: Sandbox, script: str) -> dict[str, str]:
    """Run Python as root; return what it told."""
    result = as_root(box, "python3", "-c", PRELUDE + script)
    assert result.code == 0, result
    return dict(line.split(" ", 1) for line in result.out.splitlines())


def status(text: str) -> dict[str, str]:
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def sets(found: dict[str, str]) -> tuple[int, ...]:
    return tuple(int(found[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb"))


# Power of root --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["root", "0", "0:0"])
def test_root_has_seven_capabilities_and_no_way_to_more(sandbox: Sandbox, user: str) -> None:
    """Root has exactly these seven capabilities; the bounding set is empty, no_new_privs is on, and uid 0 in itself
    gives none.
    """
    found = status(as_root(sandbox, "cat", "/proc/self/status", user=user).out)
    assert sets(found) == (*[ROOT_CAPABILITIES] * 3, 0, ROOT_CAPABILITIES)
    assert (found["Uid"].split(), found["Groups"], found["NoNewPrivs"]) == (["0"] * 4, "", "1")
    told = answers(sandbox, "tell(bits=libc.prctl(27, 0, 0, 0, 0), set=sys('prctl', 28, 0, 0, 0, 0))")
    assert (int(told["bits"]) & 0b11, told["set"]) == (0b11, "EPERM")


def test_the_sandbox_user_has_none_in_the_same_session(sandbox: Sandbox) -> None:
    """The sandbox user has no capability, not even an inheritable one, in a shell or beside it."""
    for found in (
        status(sandbox.run("cat /proc/self/status").out),
        status(as_root(sandbox, "cat", "/proc/self/status", user="1000").out),
    ):
        assert sets(found) == (0, 0, 0, 0, 0)


def test_pid_1_can_hand_them_on_and_not_use_them(sandbox: Sandbox) -> None:
    """PID 1's effective capabilities are its usual four, so that no file request gets past permissions."""
    found = status(Path(f"/proc/{sandbox.pid}/status").read_text())
    assert sets(found) == (ROOT_CAPABILITIES, ROOT_CAPABILITIES | RUNNER_CAPABILITIES, RUNNER_CAPABILITIES, 0, 0)
    as_root(sandbox, "sh", "-c", "umask 077; echo secret > /workspace/../tmp/of-root")
    reply, *_ = sandbox.request(GetFile("/tmp/of-root"))
    assert isinstance(reply, Error)
    assert reply.code == "PERMISSION_DENIED"


def test_a_session_without_root_has_nothing_of_it(server: Nsinit) -> None:
    """In a session without root PID 1 itself lacks the capabilities, and a request for root is refused."""
    box = server.build(host_plan())
    assert sets(status(Path(f"/proc/{box.pid}/status").read_text())) == (
        0,
        RUNNER_CAPABILITIES,
        RUNNER_CAPABILITIES,
        0,
        0,
    )
    for request in (RunProgram("r", ("id",), user="root"), OpenShell("r", user="0:0")):
        reply, *_ = box.request(request)
        assert isinstance(reply, Error)
        assert (reply.code, "without root" in reply.message) == ("NO_SUCH_USER", True)
    box.teardown()


def test_whoever_root_becomes_has_nothing_left(sandbox: Sandbox) -> None:
    """Capabilities go with the last uid 0 and do not come back, whether by setuid(2), keepcaps or a setuid file."""
    script = """
print("keepcaps", sys("prctl", 8, 1, 0, 0, 0))
os.setresgid(1000, 1000, 1000); os.setresuid(1000, 1000, 1000)
print("back", attempt(lambda: os.setuid(0)))
print("chown", attempt(lambda: os.chown("/etc", 1000, 1000)))
os.sys.stdout.flush()
os.execvp("sh", ["sh", "-c", "grep -E 'Cap(Prm|Eff|Amb)' /proc/self/status | sed 's/:./ /'"])
"""
    told = answers(sandbox, script)
    assert [told[name] for name in ("keepcaps", "back", "chown")] == ["EPERM"] * 3
    assert {each.strip() for name, each in told.items() if name.startswith("Cap")} <= {"", "0" * 16}


def test_a_setuid_file_of_roots_and_a_file_capability_are_inert(sandbox: Sandbox) -> None:
    """Every mount is nosuid; and root can't write file capabilities in the first place."""
    as_root(sandbox, "sh", "-c", "cp /usr/bin/id /tmp/id-of-root && chmod 6755 /tmp/id-of-root")
    assert sandbox.run("/tmp/id-of-root -u").out == "1000\n"
    value = "struct.pack('<IIIII', 0x02000001, 0xffffffff, 0, 0, 0)"
    told = answers(sandbox, f"tell(a=attempt(lambda: os.setxattr('/tmp/id-of-root', 'security.capability', {value})))")
    assert told == {"a": "EPERM"}


# Refused actions -----------------------------------------------------------------------------------------------------


def test_root_changes_no_mount_namespace_or_machine(sandbox: Sandbox) -> None:
    """mount and umount by both interfaces, pivot_root, chroot, unshare, setns, names, modules, bpf, clock, reboot."""
    script = """
tell(mount=sys("mount", b"x", b"/mnt", b"tmpfs", 0, None), bind=sys("mount", b"/", b"/tmp", b"", 4096, None),
     proc=sys("mount", b"x", b"/proc", b"", 32 | 4096, None), dev=sys("mount", b"x", b"/dev", b"", 32 | 4096, None),
     umount=sys("umount2", b"/proc/keys", 0), detach=sys("umount2", b"/tmp", 2),
     fsopen=nr(430, b"tmpfs", 0), open_tree=nr(428, -100, b"/", 1), mount_setattr=nr(442, -100, b"/", 0, None, 0),
     pivot=sys("pivot_root", b"/tmp", b"/tmp"), chroot=sys("chroot", b"/tmp"),
     name=sys("sethostname", b"evil", 4), domain=sys("setdomainname", b"evil", 4),
     module=sys("init_module", b"x", 1, b""), unload=sys("delete_module", b"x", 0),
     clock=sys("clock_settime", 0, (ctypes.c_long * 2)(1, 1)), reboot=sys("reboot", 0x89ABCDEF),
     swap=sys("swapon", b"/tmp/x", 0), acct=sys("acct", b"/tmp/x"), dmesg=sys("klogctl", 3, b" " * 99, 99),
     quota=sys("quotactl", 0x80000200, b"/", 0, None), handle=nr(304, 3, b"x", 0))
if platform.machine() == "x86_64":
    tell(bpf=nr(321, 5, b"\\0" * 128, 128), perf=nr(298, b"\\0" * 128, 0, -1, -1, 0), iopl=nr(172, 3),
         ioperm=nr(173, 0x80, 1, 1), kexec=nr(246, 0, 0, None, 0), userfault=nr(323, 0), uring=nr(425, 8, b"\\0" * 120))
for kind in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80):
    print(f"unshare-{kind:#x}", sys("unshare", kind))
for name in os.listdir("/proc/self/ns"):
    print("setns-" + name, sys("setns", os.open("/proc/self/ns/" + name, os.O_RDONLY), 0))
"""
    told = answers(sandbox, script)
    assert len(told) > 35
    assert {name: answer for name, answer in told.items() if answer not in REFUSED} == {}
    assert sandbox.run("hostname").out == f"sk-{sandbox.session_id[:8]}\n"


def test_root_makes_no_device_and_opens_none(sandbox: Sandbox) -> None:
    """mknod is for plain files, FIFOs and sockets; /dev can't be added to, and no disk or memory is in it."""
    script = """
import stat
for name, kind, device in (("mem", stat.S_IFCHR, (1, 1)), ("sda", stat.S_IFBLK, (8, 0))):
    for place in ("/tmp/", "/root/", "/dev/", "/workspace/"):
        print(place + name, attempt(lambda: os.mknod(place + name, kind | 0o666, os.makedev(*device))))
for name in ("mem", "kmem", "port", "kmsg", "sda", "vda", "fuse", "kvm", "net/tun", "loop0", "loop-control", "console"):
    print("open-" + name, attempt(lambda: os.open("/dev/" + name, os.O_RDONLY)))
tell(chmod=attempt(lambda: os.chmod("/dev/null", 0o600)), remove=attempt(lambda: os.unlink("/dev/null")))
"""
    told = answers(sandbox, script)
    assert {name: answer for name, answer in told.items() if answer not in REFUSED} == {}


def test_root_changes_no_setting_of_the_kernel(sandbox: Sandbox) -> None:
    """/proc/sys is read-only, what reaches the host is masked, and `/sys` has cgroups and processors of the session."""
    script = """
for path in ("sys/kernel/hostname", "sys/kernel/core_pattern", "sys/vm/overcommit_memory", "sys/net/ipv4/ip_forward",
             "sys/kernel/yama/ptrace_scope", "sys/user/max_user_namespaces", "sys/fs/binfmt_misc/register",
             "irq/default_smp_affinity", "self/uid_map", "self/setgroups"):
    print(path, attempt(lambda: os.write(os.open("/proc/" + path, os.O_WRONLY), b"1")))
def shown(path):
    try:
        return len(open("/proc/" + path).read())
    except OSError:
        return 0
tell(kallsyms=shown("kallsyms"), keys=shown("keys"), modules=shown("modules"), sysfs=sorted(os.listdir("/sys")))
tell(kinds=" ".join(sorted({line.split(" - ")[1].split()[0] for line in open("/proc/self/mountinfo")})))
"""
    told = answers(sandbox, script)
    assert told.pop("sysfs") == "['devices', 'fs']"
    empty = ("kallsyms", "keys", "modules")
    assert [told.pop(name) for name in empty] == ["0"] * len(empty)
    assert set(told.pop("kinds").split()) - {"cgroup", "cgroup2"} == {"overlay", "proc", "tmpfs", "devpts"}
    assert {name: answer for name, answer in told.items() if answer not in REFUSED} == {}


def test_root_has_no_power_over_the_network(sandbox: Sandbox) -> None:
    """No raw or packet socket, no route, address or link by netlink, no nftables, no tunnel."""
    script = """
def made(*kind): return attempt(lambda: socket.socket(*kind).close())
def asked(kind, flags, body):
    def ask():
        route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); route.settimeout(5)
        route.send(struct.pack("=IHHII", 16 + len(body), kind, flags | 5, 1, 0) + body)
        reply = route.recv(4096)
        code = -struct.unpack_from("=i", reply, 16)[0]
        if code: raise OSError(code, "")
    return attempt(ask)
tell(raw=made(socket.AF_INET, socket.SOCK_RAW, 1), raw6=made(socket.AF_INET6, socket.SOCK_RAW, 58),
     packet=made(socket.AF_PACKET, socket.SOCK_RAW, 0), nft=made(socket.AF_NETLINK, socket.SOCK_RAW, 12),
     vsock=made(40, socket.SOCK_STREAM), alg=made(38, socket.SOCK_SEQPACKET),
     address=asked(20, 0x600, struct.pack("=BBBBI", 2, 8, 0, 0, 1) + struct.pack("=HH4s", 8, 2, b"\\x0a\\0\\0\\1")),
     route=asked(24, 0x600, struct.pack("=8BI", 2, 0, 0, 0, 254, 3, 0, 1, 0) + struct.pack("=HHI", 8, 4, 1)),
     link=asked(16, 0x600, struct.pack("=BBHiII", 0, 0, 0, 1, 0, 1)))
"""
    told = answers(sandbox, script)
    assert {name: answer for name, answer in told.items() if answer not in REFUSED} == {}


def test_root_does_not_become_pid_1_s_uid(sandbox: Sandbox) -> None:
    """No call gives a process PID 1's uid, so PID 1 keeps its limits, its priority and its processors."""
    script = """
pid1, other = 65535, 1000
tell(setuid=sys("setuid", pid1), setreuid=sys("setreuid", pid1, other), effective=sys("setreuid", -1, pid1),
     setresuid=sys("setresuid", pid1, 0, 0), saved=sys("setresuid", 0, 0, pid1), seteuid=sys("seteuid", pid1))
libc.setfsuid(pid1)
tell(setfsuid=libc.setfsuid(-1))
room = struct.pack("=QQ", 0, 0)
tell(prlimit=sys("prlimit", 1, 7, room, None), nice=sys("setpriority", 0, 1, 19),
     affinity=sys("sched_setaffinity", 1, 8, room), allowed=sys("setresuid", other, other, other))
"""
    told = answers(sandbox, script)
    assert told.pop("allowed") == "done"
    assert told.pop("setfsuid") == "0"
    assert {name: answer for name, answer in told.items() if answer != "EPERM"} == {}
    assert sandbox.run("echo alive").out == "alive\n"


def test_root_neither_sees_nor_traces_nor_ends_pid_1(sandbox: Sandbox, unfiltered: Sandbox) -> None:
    """PID 1 is out of reach of root, and without a filter of its own uid and gid, also with its group as a
    supplementary one."""
    script = """
room = ctypes.create_string_buffer(8)
def tries(who):
    tell(**{who + "-seen": attempt(lambda: os.stat("/proc/1")),
            who + "-listed": "done" if "1" in os.listdir("/proc") else "ENOENT",
            who + "-mem": attempt(lambda: open("/proc/1/mem", "rb")),
            who + "-root": attempt(lambda: os.listdir("/proc/1/root")),
            who + "-attach": sys("ptrace", 16, 1, 0, 0), who + "-seize": sys("ptrace", 0x4206, 1, 0, 0),
            who + "-read": sys("process_vm_readv", 1, (ctypes.c_size_t * 2)(ctypes.addressof(room), 8), 1,
                               (ctypes.c_size_t * 2)(0x400000, 8), 1, 0),
            who + "-fd": nr(438, os.pidfd_open(1), 0, 0)})
    for number in range(1, 65):
        attempt(lambda: os.kill(1, number))
tries("root")
for ids in ((65535, 0, 0), (65535, 65535, 65535)):
    pid = os.fork()
    if pid == 0:
        os.setgroups([65535]); os.setresgid(65535, 65535, 65535); os.setresuid(*ids)
        tries("-".join(map(str, ids)))
        os.sys.stdout.flush(); os._exit(0)
    os.waitpid(pid, 0)
"""
    root_only = script.partition("for ids")[0]
    for box, lines, count in ((sandbox, root_only, 8), (unfiltered, script, 24)):
        told = answers(box, lines)
        assert len(told) == count
        assert {name: answer for name, answer in told.items() if answer not in REFUSED} == {}
        assert box.run("echo alive").out == "alive\n"


def test_root_finds_no_fork_of_pid_1_that_can_be_read(unfiltered: Sandbox) -> None:
    """While programs are started, a process with PID 1's uid and root's capabilities can't read a fork of PID 1 before
    its execve.
    """
    script = """
import glob, sys as system, time
os.setgroups([65535]); os.setresgid(65535, 65535, 65535); os.setresuid(65535, 0, 0)
deadline, own = time.monotonic() + 1.5, os.getpid()
while time.monotonic() < deadline:
    newest = int(open("/proc/loadavg").read().split()[4])
    for pid in range(max(2, newest - 1), newest + 3):
        if pid != own:
            try:
                maps = open(f"/proc/{pid}/maps").read()
            except OSError:
                continue
            if "nsinit" in maps or "libffi" in maps: print("read", pid); system.exit()
print("read none")
"""
    unfiltered.run("(for i in $(seq 1 400); do /bin/true; done) & true")
    found = as_root(unfiltered, "python3", "-c", f"{PRELUDE}\nimport subprocess\n{script}")
    assert found.out == "read none\n", found


def test_a_link_of_roots_does_not_lead_pid_1_to_its_own_files(server: Nsinit) -> None:
    """Root may rearrange the runner's directory: then a shell fails, and nothing of PID 1's memory map comes out."""
    box = server.build(host_plan(root_inside=True))
    box.request(OpenShell("attacked"))
    as_root(box, "sh", "-c", "for each in /run/sandkasten/*/; do ln -s /proc/self/maps ${each}cmd; done")
    reply, out, err = box.request(Exec("v", "echo hello", timeout_ms=5000, shell="attacked"))
    assert b"r-xp" not in out + err
    assert isinstance(reply, Error)
    as_root(box, "sh", "-c", "rm -f /run/sandkasten/*/cmd")
    assert box.run("echo again").out == "again\n"
    box.teardown()


def test_root_reaches_no_other_session(server: Nsinit) -> None:
    """Root of one session neither kills processes of another session, by killing all it can, nor finds a name of its
    files.
    """
    attacker, other = (server.build(host_plan(root_inside=True)) for _ in range(2))
    assert other.run("echo mine > /tmp/mine; echo ok").out == "ok\n"
    assert answers(attacker, "tell(file=attempt(lambda: os.stat('/tmp/mine')))") == {"file": "ENOENT"}
    as_root(attacker, "sh", "-c", "kill -KILL -1")
    assert other.run("cat /tmp/mine").out == "mine\n"
    assert attacker.run("echo alive").out == "alive\n"
    for box in (attacker, other):
        box.teardown()


# Files of root --------------------------------------------------------------------------------------------------------


def test_files_belong_to_ids_of_the_session(sandbox: Sandbox) -> None:
    """chown reaches every id inside and none outside; on the disk root's files are the session's, not the machine's."""
    script = """
open("/tmp/owned", "w").close()
tell(inside=attempt(lambda: os.chown("/tmp/owned", 4321, 65534)),
     beyond=attempt(lambda: os.chown("/tmp/owned", 65536, 0)),
     far=attempt(lambda: os.fchown(os.open("/tmp/owned", os.O_RDONLY), 2**31, -1)))
"""
    assert answers(sandbox, script) == {"inside": "done", "beyond": "EINVAL", "far": "EINVAL"}
    seen = os.stat(f"/proc/{sandbox.pid}/root/tmp/owned")
    base = sandbox.built.identity.base_uid
    assert (seen.st_uid, seen.st_gid) == (base + 4321, base + 65534)


def test_a_file_request_of_root_gives_files_away(server: Nsinit) -> None:
    """The owner or the group alone, of one file or of all below; a link there stays, and what it leads to, too."""
    box = server.build(host_plan(root_inside=True))
    as_root(box, "sh", "-c", "mkdir -p /tmp/t/d; touch /tmp/t/d/f /tmp/out; ln -s /tmp/out /tmp/t/d/link")
    names = ("t", "t/d", "t/d/f", "t/d/link", "out")
    base = box.built.identity.base_uid
    for request, owners in (
        (ChangeOwner("/tmp/t/d/f", owner=1000), "0:0 0:0 1000:0 0:0 0:0"),
        (ChangeOwner("/tmp/t/d/f", group=7), "0:0 0:0 1000:7 0:0 0:0"),
        (ChangeOwner("/tmp/t", 5, 6, recursive=True), "5:6 5:6 5:6 0:0 0:0"),
        (ChangeOwner("/tmp/t/d/link", 8), "5:6 5:6 5:6 0:0 8:0"),
    ):
        reply, *_ = box.request(replace(request, user="root"))
        assert isinstance(reply, Done), reply
        found = [os.lstat(f"/proc/{box.pid}/root/tmp/{name}") for name in names]
        assert " ".join(f"{each.st_uid - base}:{each.st_gid - base}" for each in found) == owners
    box.teardown()


def test_files_of_roots_in_a_workspace_are_squashed(server: Nsinit) -> None:
    """On the disk, where a workspace outlives its session, no file belongs to the machine's root, setuid or not."""
    directory = server.data_dir / "workspaces" / "squashed"
    directory.mkdir(parents=True)
    os.chown(directory, SANDBOX_ID, SANDBOX_ID)
    box = server.build(host_plan(root_inside=True, workspace_id="squashed"))
    script = """
cd /workspace && cp /bin/true tool && chmod 6755 tool && touch given && chown 1000:1000 given
chown 5000 tool; echo $?; mknod fifo p; stat -c %u:%g tool given
"""
    result = as_root(box, "sh", "-c", script)
    assert result.out.split() == ["1", "0:0", "1000:1000"], result
    owners = {path.name: (path.lstat().st_uid, path.lstat().st_gid) for path in directory.iterdir()}
    assert owners == {
        "tool": (SQUASHED_ID, SQUASHED_ID),
        "fifo": (SQUASHED_ID, SQUASHED_ID),
        "given": (SANDBOX_ID, SANDBOX_ID),
    }
    box.teardown()


def test_a_session_of_roots_is_roots_throughout(server: Nsinit) -> None:
    """Shell, directory and file requests: what the session's user writes, the session's user reads."""
    box = server.build(host_plan(root_inside=True), setup=Setup(user="root"))
    assert box.run("id -u; echo $HOME $USER; umask 077; echo kept > /tmp/own; cd /root && pwd").out.split() == [
        *("0", "/root", "root", "/root"),
    ]
    assert box.run("pwd").out == "/root\n"
    reply, *_ = box.request(GetFile("/tmp/own"))
    assert type(reply).__name__ == "Done"
    box.teardown()
