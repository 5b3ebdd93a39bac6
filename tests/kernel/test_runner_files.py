"""File requests: exact content, the user's rights, the kernel's idea of where a path leads, workers that serve one
connection and end with it, and nothing that hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.files import worker
from runner.wire.protocol import (
    CHUNK_BYTES,
    CopyFile,
    Done,
    FileEntry,
    FilePart,
    FilePut,
    GetFile,
    Hello,
    HelloReply,
    Kind,
    ListFiles,
    Listing,
    PutFile,
    ReadFile,
    SearchFiles,
    StatFile,
    WatchFiles,
)
from tests.kernel.runner_harness import UID, Client, Sandbox, code, needs_namespaces, open_sandbox
from tests.waiting import patience

pytestmark = needs_namespaces

WORKSPACE = "/mnt/workspace"
PATIENCE_S = 20.0


@pytest.fixture
def shell(sandbox: Sandbox) -> Client:
    """A connection for commands."""
    return sandbox.shell()


@pytest.fixture
def client(sandbox: Sandbox, shell: Client) -> Client:
    """A single connection, in a sandbox that is set up."""
    made = sandbox.connect()
    made.connect = None
    return made


def placed(answer: object) -> tuple[str, int]:
    assert isinstance(answer, FilePut), answer
    return answer.path, answer.size_bytes


def workers(sandbox: Sandbox) -> list[int]:
    """Return the pids of the children of PID 1 that are forks of it, which run no program."""
    init = sandbox.init_pid()
    program = os.readlink(f"/proc/{init}/exe")
    children = Path(f"/proc/{init}/task/{init}/children").read_text().split()
    return [int(each) for each in children if _program_of(each) == program]


def only_worker(sandbox: Sandbox) -> int:
    """Return the pid of the only worker, once the shell is no fork any more."""
    until(lambda: len(workers(sandbox)) == 1)
    return workers(sandbox)[0]


def _program_of(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except FileNotFoundError:
        return ""


def until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + patience(PATIENCE_S)
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


# Content --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)), b"\0" * CHUNK_BYTES, b"ab" * (CHUNK_BYTES + 1)])
def test_content_is_exact(client: Client, shell: Client, content: bytes) -> None:
    """Content that was written is read again, by a request and by a command."""
    path = f"{WORKSPACE}/dir/sub/file"
    assert placed(client.write_file("dir/sub/file", content)) == (path, len(content))
    part, got = client.read_file("dir/sub/file")
    assert (part.path, part.size_bytes, got) == (path, len(content), content)
    assert shell.stdout("cat dir/sub/file") == content


def test_new_files_belong_to_the_user(client: Client, shell: Client) -> None:
    """A new file is 0644, a new directory 0755, both the sandbox user's."""
    client.write_file("/tmp/d/f", b"")
    assert shell.stdout("stat -c '%a %u %g' /tmp/d /tmp/d/f") == b"755 %d %d\n644 %d %d\n" % (UID, 1000, UID, 1000)


def test_an_existing_file_keeps_its_mode(client: Client, shell: Client) -> None:
    """Replacing a file keeps permission bits and drops set-id bits."""
    shell.run("touch script plain; chmod 4755 script; chmod 600 plain")
    client.write_file("script", b"x")
    client.write_file("plain", b"x")
    assert shell.stdout("stat -c %a script plain") == b"755\n600\n"


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_replacing_is_atomic(client: Client, shell: Client, how: str) -> None:
    """A reader sees the old file or the new one. A client that leaves in between leaves the old one alone, and nothing
    beside it."""
    shell.run("printf old >f")
    client.request(PutFile("f"))
    client.send(Kind.DATA, b"new" * 100_000)
    if how == "cancel":
        client.send(Kind.CANCEL)
        with pytest.raises(ConnectionResetError):
            client.next_frame()
    else:
        client.sock.close()
    until(lambda: shell.stdout("cat f; ls -A") == b"oldf\n")


def test_a_part_is_a_part(client: Client) -> None:
    """Both ends are included, and the last bytes are had without knowing the size."""
    client.write_file("f", b"0123456789")
    for start, end, offset, content in ((0, 3, 0, b"0123"), (4, None, 4, b"456789"), (None, 2, 8, b"89")):
        part, got = client.read_file("f", start, end)
        assert (part.size_bytes, part.offset, got) == (10, offset, content)


def test_large_files_do_not_starve_others(sandbox: Sandbox, shell: Client) -> None:
    """A connection that never reads its file holds up nobody."""
    stalled, other = sandbox.connect(), sandbox.connect()
    shell.run("head -c 30000000 /dev/zero >big")
    stalled.request(GetFile("big"))
    assert shell.stdout("echo fine") == b"fine\n"
    assert len(other.read_file("big")[1]) == 30_000_000


# Paths ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("missing", "FILE_NOT_FOUND"),
        ("file/below", "FILE_NOT_FOUND"),
        ("dir", "IS_DIRECTORY"),
        (".", "IS_DIRECTORY"),
        ("fifo", "NOT_A_FILE"),
        ("socket", "NOT_A_FILE"),
        ("secret", "PERMISSION_DENIED"),
        ("closed/file", "PERMISSION_DENIED"),
        ("/etc/shadow", "PERMISSION_DENIED"),
        ("/dev/zero", "NOT_A_FILE"),
        ("/proc/self/status", "NOT_A_FILE"),
        ("../../proc/self/status", "NOT_A_FILE"),
        ("/proc/self/root/mnt/workspace/file", "PATH_OUTSIDE"),
        ("/run/sandkasten", "IS_DIRECTORY"),
        ("out", "NOT_A_FILE"),
        ("loop", "PATH_OUTSIDE"),
        ("dangling", "FILE_NOT_FOUND"),
        ("", "INVALID_PATH"),
        ("a\0b", "INVALID_PATH"),
        ("\ud800", "INVALID_PATH"),
        ("x" * 256, "INVALID_PATH"),
        ("y/" * 3000, "INVALID_PATH"),
    ],
)
def test_what_cannot_be_read_has_its_code(client: Client, shell: Client, path: str, expected: str) -> None:
    """Each reason has its own code, nothing blocks, and the connection goes on."""
    shell.run(
        "echo x >file; mkdir dir closed; mkfifo fifo; echo x >secret; chmod 0 secret; echo x >closed/file;"
        "chmod 0 closed; ln -s /proc/version out; ln -s loop loop; ln -s nowhere dangling;"
        "/usr/bin/python3 -Sc 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'"
    )
    assert code(client.read_file(path)[0]) == expected
    assert client.read_file("file")[1] == b"x\n"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("dir", "IS_DIRECTORY"),
        ("new/", "IS_DIRECTORY"),
        ("dir/..", "IS_DIRECTORY"),
        ("fifo", "NOT_A_FILE"),
        ("/dev/null", "NOT_A_FILE"),
        ("file/below", "FILE_NOT_FOUND"),
        ("readonly", "PERMISSION_DENIED"),
        ("closed/new", "PERMISSION_DENIED"),
        ("/etc/new", "PERMISSION_DENIED"),
        ("/new", "PERMISSION_DENIED"),
        ("../new/file", "PERMISSION_DENIED"),
        ("/run/sandkasten/1/cmd", "PERMISSION_DENIED"),
        ("outdir/new", "PERMISSION_DENIED"),
        ("outfile", "PERMISSION_DENIED"),
        ("kernel/new", "NOT_A_FILE"),
        ("/proc/sys/kernel/hostname", "NOT_A_FILE"),
        ("loop", "PATH_OUTSIDE"),
        ("dangling/new", "FILE_NOT_FOUND"),
        ("", "INVALID_PATH"),
        ("a\0b", "INVALID_PATH"),
    ],
)
def test_what_cannot_be_written_has_its_code(client: Client, shell: Client, path: str, expected: str) -> None:
    """Each reason has its own code, nothing is left behind, and the connection goes on."""
    shell.run(
        "echo x >file; mkdir dir closed; mkfifo fifo; echo x >readonly; chmod 444 readonly; chmod 555 closed;"
        "ln -s /etc outdir; ln -s /etc/new outfile; ln -s loop loop; ln -s nowhere dangling; ln -s /proc kernel"
    )
    before = shell.stdout("find . /tmp | sort; cat readonly")
    assert code(client.write_file(path, b"data")) == expected
    assert shell.stdout("find . /tmp | sort; cat readonly") == before


def test_any_path_that_the_user_may_reach_is_served(client: Client, shell: Client) -> None:
    """Not only below the workspace: the image's files are read, and the user's are written wherever they are."""
    assert client.read_file("/etc/passwd")[1] == Path("/etc/passwd").read_bytes()
    assert client.read_file("../../etc/passwd")[1] == Path("/etc/passwd").read_bytes()
    assert placed(client.write_file("/dev/shm/own", b"x")) == ("/dev/shm/own", 1)
    assert shell.stdout("cat /dev/shm/own; rm /dev/shm/own") == b"x"


def test_links_are_followed(client: Client, shell: Client) -> None:
    """Reading and writing through a link reaches its target, which is what the answer names; the link stays."""
    shell.run("mkdir real; echo old >real/file; ln -s real/file link; ln -s /tmp dir; ln -s /tmp/later later")
    assert placed(client.write_file("link", b"new"))[0] == f"{WORKSPACE}/real/file"
    assert placed(client.write_file("dir/f", b"tmp"))[0] == "/tmp/f"
    assert placed(client.write_file("later", b"made"))[0] == "/tmp/later"
    assert shell.stdout("cat real/file /tmp/f /tmp/later; test -L link && test -L later && echo links") == (
        b"newtmpmadelinks\n"
    )
    part, content = client.read_file("link")
    assert (part.path, content) == (f"{WORKSPACE}/real/file", b"new")


def test_a_full_disk_is_told_and_cleaned_up(client: Client, shell: Client) -> None:
    """Running out of space is DISK_FULL, the partial file goes, and the old one stays."""
    shell.run("head -c 10 /dev/zero >/home/sandbox/f")
    assert code(client.write_file("/home/sandbox/f", b"x" * (4 << 20))) == "DISK_FULL"
    assert shell.stdout("stat -c %s /home/sandbox/f; ls -A /home/sandbox") == b"10\nf\n"


def test_names_that_are_no_utf8_work(client: Client) -> None:
    """File names are bytes; in messages they are surrogate-escaped."""
    name = b"x\xff\n".decode("utf-8", "surrogateescape")
    assert placed(client.write_file(name, b"1"))[0] == f"{WORKSPACE}/{name}"
    assert client.read_file(name)[1] == b"1"


def test_a_running_program_can_be_replaced(client: Client, shell: Client) -> None:
    """A file that is being executed is replaced, not refused."""
    shell.run("cp /bin/sleep prog; ./prog 1234 &")
    assert placed(client.write_file("prog", b"new"))[0] == f"{WORKSPACE}/prog"


# Workers --------------------------------------------------------------------------------------------------------------


def test_one_worker_serves_a_connection(sandbox: Sandbox, client: Client) -> None:
    """All requests of a connection are served by one process, also those whose content was not taken."""
    client.write_file("f", b"x")
    pid = only_worker(sandbox)
    for _ in range(3):
        assert isinstance(client.ask(StatFile("f")), FileEntry)
        assert client.read_file("f")[1] == b"x"
        assert code(client.write_file("/etc/new", b"x" * 1_000_000)) == "PERMISSION_DENIED"
        assert isinstance(client.ask(ListFiles(".")), Listing)
    assert workers(sandbox) == [pid]


def test_a_worker_that_is_asked_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """PID 1 has the connection back then, for requests of any kind."""
    monkeypatch.setattr(worker, "IDLE_S", 1.0)
    with open_sandbox() as sandbox:
        shell, client = sandbox.shell(), sandbox.connect()
        for _ in range(2):
            assert client.read_file("/etc/hostname")[1] == shell.stdout("cat /etc/hostname")
            until(lambda: not workers(sandbox))
            assert isinstance(client.ask(Hello()), HelloReply)


@pytest.mark.parametrize("request_", [SearchFiles("/", "x" * 50), WatchFiles(".", recursive=True), GetFile("big")])
def test_a_worker_ends_with_its_client(sandbox: Sandbox, shell: Client, request_: object) -> None:
    """The end comes whether it looks for a text, waits for changes, or waits for a client that does not read."""
    shell.run("head -c 30000000 /dev/zero >big")
    client = sandbox.connect()
    client.request(request_)
    until(lambda: bool(workers(sandbox)))
    client.sock.close()
    until(lambda: not workers(sandbox))


def test_a_worker_that_is_killed_costs_its_connection_alone(sandbox: Sandbox, shell: Client, client: Client) -> None:
    """A command of the same user may kill it; PID 1 goes on, and serves the next one."""
    client.request(PutFile("f"))
    client.send(Kind.DATA, b"half")
    until(lambda: bool(workers(sandbox)))
    shell.run("kill -9 -1")
    with pytest.raises(ConnectionResetError):
        client.next_frame()
    other = sandbox.connect()
    assert code(other.read_file("f")[0]) == "FILE_NOT_FOUND"
    assert placed(other.write_file("f", b"whole"))[1] == 5


def test_a_worker_that_is_stopped_goes_on(sandbox: Sandbox, client: Client) -> None:
    """A command of its user holds up no request with signals, whatever that waits for, and not the end of one."""
    client.request(PutFile("f"))
    client.send(Kind.DATA, b"con")
    pid = only_worker(sandbox)
    for number in (signal.SIGSTOP, signal.SIGTSTP):
        os.kill(pid, number)
        client.send(Kind.DATA, b"t")
    os.kill(pid, signal.SIGSTOP)
    client.send(Kind.END)
    assert placed(client.next_message()) == (f"{WORKSPACE}/f", 5)
    os.kill(pid, signal.SIGSTOP)
    assert client.read_file("f")[1] == b"contt"
    os.kill(pid, signal.SIGSTOP)
    client.sock.close()
    until(lambda: not workers(sandbox))


def test_a_worker_undoes_what_its_client_has_left(sandbox: Sandbox, shell: Client, client: Client) -> None:
    """Half a copy is removed again, before the worker ends."""
    shell.run("mkdir tree; seq -f tree/%g 40000 | xargs touch")
    client.request(CopyFile("tree", "copy"))
    until(lambda: b".sandkasten-" in shell.stdout("ls -A"))
    client.sock.close()
    until(lambda: not workers(sandbox))
    assert shell.stdout("ls -A") == b"tree\n"


def test_workers_are_bounded(sandbox: Sandbox, shell: Client) -> None:
    """Workers that wait for the next request count; one more is refused, and its connection goes on."""
    clients = [sandbox.connect() for _ in range(worker.MAX_WORKERS)]
    for each in clients:
        assert isinstance(each.read_file("/etc/hostname")[0], FilePart)
    further = sandbox.connect()
    assert code(further.read_file("/etc/hostname")[0]) == "TOO_MANY"
    clients.pop().sock.close()
    until(lambda: isinstance(further.read_file("/etc/hostname")[0], FilePart))


@pytest.mark.parametrize("request_", [Hello(), StatFile("f", user="root"), WatchFiles(".")])
def test_a_workers_connection_takes_requests_of_its_user_for_files(client: Client, request_: object) -> None:
    """Another one costs the connection."""
    client.read_file("/etc/hostname")
    client.request(request_)
    with pytest.raises(ConnectionResetError):
        client.next_frame()


def test_requests_of_an_older_version_are_refused(client: Client) -> None:
    """The connection goes on."""
    assert code(client.ask(ReadFile("f", 1))) == "BAD_REQUEST"
    assert isinstance(client.ask(Hello()), HelloReply)


def test_a_worker_can_not_be_looked_into(sandbox: Sandbox, shell: Client, client: Client) -> None:
    """Commands of its user can open neither its memory nor its connection to the daemon."""
    client.read_file("/etc/hostname")
    pid = only_worker(sandbox)
    inside = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1]
    program = f"ls /proc/{inside}/fd; cat /proc/{inside}/mem; cat /proc/{inside}/environ; true"
    outcome = shell.run(program)
    assert outcome.stdout == b""
    assert outcome.stderr.count(b"ermission denied") == 3


def test_pid_1_keeps_its_own_rights(client: Client, shell: Client) -> None:
    """After file requests PID 1 still may do its own work: the next command's files are made and its end is seen."""
    for _ in range(3):
        assert isinstance(client.write_file("f", b"x"), FilePut)
        client.read_file("/etc/shadow")
        assert shell.stdout("cat f") == b"x"
    assert not isinstance(client.ask(StatFile("f")), Done)
