"""The system call filter from inside real sessions: what is refused, what dies, and that nothing gets round it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from nsinit.kernel.seccomp.profiles import FLOOR, STRICT_REFUSED
from nsinit.kernel.seccomp.table import NUMBERS
from nsinit.wire.protocol import Ok, Prepare
from runner.wire.protocol import ExecReply, RunProgram, TerminalSize
from sandkasten.app import open_supervisor
from sandkasten.config import Config, ConfigError, SecuritySettings
from sandkasten.errors import BuildFailed, InvalidRequest
from sandkasten.model import ExecSpec, SessionSpec
from tests.kernel.harness import Nsinit, Sandbox, data_directory, host_plan, running

pytestmark = pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs the machine's python3 in /usr")

SYS = NUMBERS["x86_64"]
HAS_GDB = Path("/usr/bin/gdb").exists()
CALLS = """
import ctypes, errno, json, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.argtypes = [ctypes.c_long] * 7
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(number, *(*args, *[0] * 6)[:6])
    return "ok" if result != -1 else errno.errorcode.get(ctypes.get_errno(), "?")
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Nsinit]:
    with data_directory() as data_dir, running(data_dir) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def sandbox(server: Nsinit) -> Sandbox:
    box = server.build(host_plan())
    box.run("true")  # the session's shell is up
    return box


def calls(sandbox: Sandbox, body: str) -> dict[str, str]:
    """Run Python that fills `said`; return that."""
    answer: dict[str, str] = json.loads(sandbox.python(f"{CALLS}\nsaid = {{}}\n{body}\nprint(json.dumps(said))"))
    return answer


def test_every_refused_call_is_refused_in_a_real_session(sandbox: Sandbox) -> None:
    """Mounts, namespaces, modules, keys, bpf, tracing, io_uring and the rest fail before the kernel looks at them."""
    names = sorted(name for name in (*FLOOR[0].names, *STRICT_REFUSED) if name in SYS)
    said = calls(sandbox, f"for name, number in {[(name, SYS[name]) for name in names]!r}: said[name] = call(number)")
    assert said == dict.fromkeys(names, "EPERM")
    assert len(names) > 60


def test_arguments_are_looked_at_as_the_kernel_uses_them(sandbox: Sandbox) -> None:
    """The dangerous ioctls, namespaces by clone, foreign protocols, personalities and core limits, high bits or not."""
    said = calls(
        sandbox,
        f"""
HIGH = 1 << 32
leader, follower = os.openpty()
letter = ctypes.create_string_buffer(b"x")
address = ctypes.addressof(letter)
for high in (0, HIGH):
    for request in (0x5412, 0x541C, 0x5423):
        said[f"ioctl {{request:#x}} {{bool(high)}}"] = call({SYS["ioctl"]}, follower, high | request, address)
    for bit in (17, 25, 26, 27, 28, 29, 30):
        said[f"clone {{bit}} {{bool(high)}}"] = call({SYS["clone"]}, high | 1 << bit | signal.SIGCHLD)
    for socket in ((2, 1, 132), (2, 5, 33), (2, 1, 262), (16, 3, 12), (17, 3, 0), (38, 5, 0), (40, 1, 0), (31, 3, 1)):
        said[f"socket {{socket}} {{bool(high)}}"] = call({SYS["socket"]}, *(high | each for each in socket))
    said[f"personality {{bool(high)}}"] = call({SYS["personality"]}, high | 0x40000)
""",
    )
    assert set(said.values()) == {"EPERM"}
    assert len(said) == 2 * (3 + 7 + 8 + 1)
    said = calls(
        sandbox,
        f"""
import resource, socket, termios
leader, follower = os.openpty()
termios.tcgetattr(follower)
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
        socket.socket(family, kind).close()
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
said["personality"] = call({SYS["personality"]}, 0xFFFFFFFF)
before = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
said["core"] = str(before == resource.getrlimit(resource.RLIMIT_CORE) == (1, 1))
""",
    )
    assert said == {"personality": "ok", "core": "True"}


def test_pools_of_the_whole_machine_are_out_of_reach(sandbox: Sandbox) -> None:
    """Contexts of asynchronous I/O do not exist, there are no huge pages, and syncfs(2) asks no file system; plain
    mappings there are."""
    said = calls(
        sandbox,
        f"""
import mmap
context = ctypes.create_string_buffer(8)
said["syncfs"] = call({SYS["syncfs"]}, -1)
said["io_setup"] = call({SYS["io_setup"]}, 1, ctypes.addressof(context))
for name, huge in (("huge", True), ("plain", False)):
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x40000 if huge else 0)
    said[f"mmap {{name}}"] = call({SYS["mmap"]}, 0, 1 << 21, mmap.PROT_READ, flags, -1, 0)
    said[f"memfd_create {{name}}"] = call({SYS["memfd_create"]}, ctypes.addressof(context), 4 if huge else 1)
    said[f"shmget {{name}}"] = call({SYS["shmget"]}, 0, 1 << 21, 0o600 | (0o4000 if huge else 0))
""",
    )
    calls_made = ("mmap", "memfd_create", "shmget")
    assert (said.pop("io_setup"), said.pop("syncfs")) == ("ENOSYS", "ok")
    assert {said[f"{name} huge"] for name in calls_made} == {"ENOMEM"}
    assert {said[f"{name} plain"] for name in calls_made} == {"ok"}


def _status(text: str) -> dict[str, str]:
    return dict(line.split(":\t") for line in text.splitlines() if line.startswith(("Seccomp", "NoNewPrivs")))


PLACES = {
    "program": {"argv": ("/usr/bin/python3", "/tmp/look.py")},
    "stateless": {"command": "python3 /tmp/look.py"},
    "terminal": {"argv": ("/usr/bin/python3", "/tmp/look.py"), "terminal": TerminalSize(80, 24)},
    "another user": {"argv": ("/usr/bin/python3", "/tmp/look.py"), "user": "1234"},
}


@pytest.mark.parametrize("place", ["shell", "descendant", *PLACES])
def test_commands_everywhere_are_under_both_filters(sandbox: Sandbox, place: str) -> None:
    """In shells, in programs beside them, in terminals and below all of them: two filters, and no clone3."""
    script = f"{CALLS}\nprint(call({SYS['clone3']}), open('/proc/self/status').read())"
    sandbox.run(f"cat > /tmp/look.py <<'END_OF_FILE'\n{script}\nEND_OF_FILE")
    if place in PLACES:
        reply, out, _ = sandbox.request(RunProgram(place.replace(" ", "-"), **PLACES[place]))  # type: ignore[arg-type]
        assert isinstance(reply, ExecReply), reply
        seen = out.decode().replace("\r", "")
    else:
        seen = sandbox.run(f"{'setsid -w ' if place == 'descendant' else ''}python3 /tmp/look.py").out
    assert seen.split()[0] == "ENOSYS"
    assert _status(seen) == {"NoNewPrivs": "1", "Seccomp": "2", "Seccomp_filters": "2"}


def test_a_shell_that_replaces_another_is_under_both_filters(server: Nsinit) -> None:
    """A shell that replaces a killed one is under both filters as well."""
    box = server.build(host_plan())
    assert box.run("kill -9 $$").code == 137
    assert _status(box.run("cat /proc/self/status").out)["Seccomp_filters"] == "2"
    box.teardown()


def test_pid_1_is_under_the_filter_itself(sandbox: Sandbox) -> None:
    """One filter and no_new_privs: what takes PID 1 over has no more of the kernel than a command."""
    status = _status(Path(f"/proc/{sandbox.pid}/status").read_text())
    assert status == {"NoNewPrivs": "1", "Seccomp": "2", "Seccomp_filters": "1"}


def test_no_filter_means_none(server: Nsinit) -> None:
    """With `off` neither PID 1 nor commands have a filter; the other layers still refuse."""
    box = server.build(host_plan(seccomp="off"))
    assert _status(Path(f"/proc/{box.pid}/status").read_text())["Seccomp"] == "0"
    assert _status(box.run("cat /proc/self/status").out)["Seccomp"] == "0"
    assert box.run("unshare -U true").code != 0
    box.teardown()


def test_a_prepared_pool_sandbox_gets_the_filter_of_its_plan(server: Nsinit) -> None:
    """A pool sandbox is prepared before its session is known; the filter comes with the plan, at the build."""
    for profile, answer in (("debug", "ok"), ("strict", "EPERM"), ("mvp", "EPERM")):
        plan = host_plan(seccomp=profile)
        assert isinstance(server.ask(Prepare, session_id=plan.session_id, limits=plan.limits)[0], Ok)
        box = server.build(plan)
        said = calls(box, f"said['traceme'] = call({SYS['ptrace']}, 0); said['mount'] = call({SYS['mount']})")
        assert said == {"traceme": answer, "mount": "EPERM"}
        box.teardown()


def test_a_profile_nobody_knows_builds_nothing(server: Nsinit) -> None:
    """A profile without a filter is refused; no other filter is used instead."""
    for name in ("nobody", "", "../strict", "STRICT"):
        plan = host_plan(seccomp=name)
        assert "seccomp profile" in server.refused(plan).message
        assert server.traces(plan.session_id) == []


def test_a_call_of_the_other_architecture_kills(sandbox: Sandbox) -> None:
    """`int 0x80` speaks i386, where the numbers mean other calls: the process dies of SIGSYS."""
    script = """
import ctypes, mmap, os, signal
code = b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3"  # mov eax, 20 (getpid); int 0x80; ret
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
pid = os.fork()
if not pid:
    call()
    os._exit(0)
print(os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSYS)
"""
    assert sandbox.python(script) == "True"
    assert sandbox.run("echo lives").out == "lives\n"


def test_x32_calls_are_refused(sandbox: Sandbox) -> None:
    """The bit that makes an x32 call of a number makes it EPERM, whatever the number."""
    said = calls(sandbox, "for number in (0, 39, 101, 165, 520, 547): said[number] = call(0x40000000 | number)")
    assert set(said.values()) == {"EPERM"}


async def test_a_session_may_ask_for_the_filter_it_debugs_under(config: Config) -> None:
    """`debug` where it is allowed: strace traces, gdb reads memory; what is not allowed is refused."""
    allowing = attrs.evolve(config, security=SecuritySettings(seccomp_allowed=("debug",)))
    async with open_supervisor(allowing) as supervisor:
        session = await supervisor.create(SessionSpec(seccomp="debug"))
        assert session.options.seccomp == "debug"
        result = await supervisor.exec(
            session.id, ExecSpec("strace -f -o /tmp/trace sh -c 'unshare -U true'; grep EPERM /tmp/trace")
        )
        assert b"unshare(" in result.stdout, result
        gdb = "sleep 60 & gdb -q -batch -nx -p $! -ex 'info proc' -ex 'p $pc' 2>&1; kill $!"
        if HAS_GDB:
            result = await supervisor.exec(session.id, ExecSpec(gdb))
            assert b"process " in result.stdout, result
            assert b"$1 = " in result.stdout, result
        plain = await supervisor.create(SessionSpec())
        assert (await supervisor.get(plain.id)).options.seccomp == "strict"
        result = await supervisor.exec(plain.id, ExecSpec("strace true"))
        assert result.end.exit_code != 0
        assert b"Operation not permitted" in result.stderr
        with pytest.raises(InvalidRequest):
            await supervisor.create(SessionSpec(seccomp="off"))


async def test_an_operators_own_filter_is_in_force(config: Config, tmp_path: Path) -> None:
    """A file of the operator's is what sessions live under, when it is the default, and a bad one is told at start."""
    rules = [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95}]
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules[:0]}))
    security = SecuritySettings(seccomp="own", seccomp_profiles=tmp_path)
    async with open_supervisor(attrs.evolve(config, security=security)) as supervisor:
        session = await supervisor.create(SessionSpec())
        assert session.options.seccomp == "own"
        result = await supervisor.exec(
            session.id, ExecSpec("grep Seccomp: /proc/self/status; unshare -U true || echo held")
        )
        assert result.stdout == b"Seccomp:\t2\nheld\n"
    own.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules}))
    with pytest.raises((BaseExceptionGroup, ConfigError, BuildFailed)) as refused:
        async with open_supervisor(attrs.evolve(config, security=security)):
            pass
    assert "needs" in str(refused.value) + str(getattr(refused.value, "exceptions", ""))
