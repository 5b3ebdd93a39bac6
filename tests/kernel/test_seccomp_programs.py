"""Real programs under the default filter, and a sweep over every system call number: neither may find the filter's
edge where it hurts. One session; what the machine lacks is skipped by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import pytest

from nsinit.wire.protocol import Limits
from tests.kernel.harness import Sandbox, data_directory, host_plan, running

pytestmark = pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs the machine's python3 in /usr")

PYTHON = r"""
import asyncio, multiprocessing, socket, sqlite3, ssl, subprocess, threading

def square(number):
    return number * number

async def talk():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    data = await reader.read()
    writer.close()
    server.close()
    process = await asyncio.create_subprocess_exec("true")
    return data, await process.wait()

if __name__ == "__main__":
    found = []
    threads = [threading.Thread(target=lambda: found.append(subprocess.check_output(["echo", "x"]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with multiprocessing.Pool(3) as pool:
        squares = pool.map(square, range(10))
    ssl.create_default_context()
    print(len(found), sum(squares), *asyncio.run(talk()))
"""
WHEEL = r"""
import zipfile
with zipfile.ZipFile("tiny-1-py3-none-any.whl", "w") as wheel:
    info = "tiny-1.dist-info"
    wheel.writestr("tiny.py", "answer = 42\n")
    wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
    wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(f"{info}/RECORD", f"tiny.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
"""
C_THREAD = r"""
#include <pthread.h>
#include <stdio.h>
void *say(void *text) { puts(text); return 0; }
int main() { pthread_t made; pthread_create(&made, 0, say, "from a thread"); return pthread_join(made, 0); }
"""
JAVA_THREAD = r"""
public class Main {
    public static void main(String[] arguments) throws Exception {
        Thread thread = new Thread(() -> System.out.println(6 * 7));
        thread.start();
        thread.join();
    }
}
"""
NODE = r"""
const { Worker } = require("worker_threads"), { execSync } = require("child_process");
new Worker("require('worker_threads').parentPort.postMessage(41 + 1)", { eval: true })
    .on("message", (answer) => console.log(answer, execSync("echo child").toString().trim(),
        require("crypto").randomBytes(4).length));
"""


def here(name: str, text: str) -> str:
    """Return a command that writes a file."""
    return f"cat > {name} <<'END_OF_FILE'\n{text}\nEND_OF_FILE\n"


def _first(*patterns: str) -> str:
    """Return the first program there is, or the name of what is missing."""
    return next(
        (path for pattern in patterns for path in sorted(glob(pattern)) if os.access(path, os.X_OK)), patterns[0]
    )


JAVA = _first("/usr/lib/jvm/*/bin/java")
GO_BUILT = _first("/usr/lib/go*/bin/go", "/usr/local/go/bin/go", "/usr/local/bin/terraform", "/usr/bin/docker")
POSTGRES = _first("/usr/lib/postgresql/*/bin/initdb", "/usr/local/bin/initdb")

PROGRAMS = {
    "python": ("/usr/bin/python3", here("main.py", PYTHON) + "python3 main.py", "8 285 b'' 0"),
    "node": ("/usr/bin/node", here("main.js", NODE) + "node main.js", "42 child 4"),
    "gcc": ("/usr/bin/gcc", here("main.c", C_THREAD) + "gcc -O1 -pthread main.c && ./a.out", "from a thread"),
    "java": (JAVA, here("Main.java", JAVA_THREAD) + f"{JAVA} -Xmx64m -XX:TieredStopAtLevel=1 Main.java", "42"),
    "go": (GO_BUILT, f"{GO_BUILT} version >/dev/null && echo runs", "runs"),
    "git": (
        "/usr/bin/git",
        "git init -q one && cd one && git config user.email a@example.org && git config user.name a && "
        "echo x > file && git add file && git commit -qm first && git gc -q && cd .. && git clone -q one two && "
        "git -C two log --format=%s",
        "first",
    ),
    "pip": (
        "/usr/lib/python3/dist-packages/pip/__main__.py",
        f"python3 - <<'END'\n{WHEEL}\nEND\n"
        "python3 -m pip install -q --no-index --no-cache-dir --target there tiny-1-py3-none-any.whl && "
        "PYTHONPATH=there python3 -c 'import tiny; print(tiny.answer)'",
        "42",
    ),
    "npm": (
        "/usr/bin/npm",
        'mkdir one two && echo \'{"name":"one","version":"1.0.0"}\' > one/package.json && '
        'echo \'module.exports = 5\' > one/index.js && echo \'{"name":"two","version":"1.0.0"}\' > two/package.json && '
        "cd two && npm install --silent --offline --no-audit --no-fund ../one && node -p 'require(\"one\")'",
        "5",
    ),
    "postgres": (
        POSTGRES,
        f"PATH={Path(POSTGRES).parent}:$PATH; initdb -D data -A trust -N > log 2>&1 || cat log; "
        "pg_ctl -D data -w -o '-k /tmp -c listen_addresses=127.0.0.1' -l log start > /dev/null || cat log; "
        "for host in /tmp 127.0.0.1; do psql -h $host -Atc 'select sum(i) from generate_series(1, 100) i' postgres; "
        "done; "
        "pg_ctl -D data -m fast stop > /dev/null",
        "5050\n5050",
    ),
    "sqlite": (
        "/usr/bin/sqlite3",
        "sqlite3 file 'pragma journal_mode=wal; create table t (a); insert into t values (7); select * from t'",
        "wal\n7",
    ),
    "tmux": (
        "/usr/bin/tmux",
        "tmux -f /dev/null new -d 'echo in tmux > said; tmux wait -S said; sleep 60'; tmux wait said; "
        "tmux kill-server; cat said",
        "in tmux",
    ),
}

SWEEP = r"""
import ctypes, os, select, signal, sys
libc = ctypes.CDLL(None)
libc.syscall.argtypes = [ctypes.c_long] * 7
junk = ctypes.create_string_buffer(b"junk", 65536)
address = ctypes.addressof(junk)
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, signal.SIG_IGN)  # a child that a junk call started may end with any signal

def attempt(number, value):
    pid = os.fork()
    if not pid:
        for each in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(each, signal.SIG_DFL)
        libc.syscall(number, *[value] * 6)
        os._exit(0)
    return os.pidfd_open(pid)

def finish(children):
    for pidfd in children:
        if not select.select([pidfd], [], [], 0.05)[0]:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        try:
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        except ChildProcessError:
            pass
        os.close(pidfd)

tried, children = 0, []
for value in (1, -1, address):
    for number in range(601):
        children.append(attempt(number, value))
        tried += 1
        if len(children) == 24:
            finish(children)
            children = []
finish(children)
print(tried)
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with data_directory() as data_dir, running(data_dir) as server:
        for path in glob("/etc/java-*"):  # the machine's Java reads its settings there
            shutil.copytree(path, data_dir / "images/host/rootfs" / path.lstrip("/"), symlinks=True)
        box = server.build(host_plan(limits=Limits(memory_bytes=1 << 30, pids=400, cpu_quota_us=200_000)))
        box.run("true")  # the session's shell is up
        yield box


@pytest.mark.parametrize("name", PROGRAMS)
def test_real_programs_run_under_strict(sandbox: Sandbox, name: str) -> None:
    """Threads, processes, sockets, shared memory, databases, compilers and package managers need nothing refused."""
    needed, command, said = PROGRAMS[name]
    if not os.path.exists(needed):
        pytest.skip(f"{needed} is not on this machine")
    assert sandbox.run("grep Seccomp: /proc/self/status").out == "Seccomp:\t2\n"
    result = sandbox.run(f"mkdir /workspace/{name} && (cd /workspace/{name}\n{command}\n)", timeout_ms=60_000)
    assert result.out.strip() == said, result
    assert result.code == 0


def test_no_system_call_number_hurts_init(sandbox: Sandbox) -> None:
    """Every number up to 600 with ones, minus ones and pointers: PID 1 lives, and the session answers as before."""
    result = sandbox.run(
        f"mkdir -p /tmp/sweep && cd /tmp/sweep && python3 -I - <<'END'\n{SWEEP}\nEND", timeout_ms=60_000
    )
    assert result.out == "1803\n", result
    assert sandbox.run("cd /; echo lives; kill -9 -1").code != 0
    assert sandbox.run("echo $((6 * 7)); cat /proc/sys/kernel/hostname").out.startswith("42\nsk-")
    os.kill(sandbox.pid, 0)
