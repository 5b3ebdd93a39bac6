"""File requests: exact content, the user's rights, the kernel's idea of where a path leads, and nothing that hangs."""

from __future__ import annotations

import pytest

from runner.wire.protocol import CHUNK_BYTES, Done, FileInfo, Kind, WriteFile
from tests.kernel.runner_harness import UID, Client, Sandbox, code, needs_namespaces

pytestmark = needs_namespaces


@pytest.fixture
def client(sandbox: Sandbox) -> Client:
    return sandbox.shell()


@pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)), b"\0" * CHUNK_BYTES, b"ab" * (CHUNK_BYTES + 1)])
def test_content_is_exact(client: Client, content: bytes) -> None:
    """Content that was written is read again, by a request and by a command."""
    assert client.write_file("dir/sub/file", content) == Done("/mnt/workspace/dir/sub/file")
    assert client.read_file("dir/sub/file") == (FileInfo("/mnt/workspace/dir/sub/file", len(content), False), content)
    assert client.stdout("cat dir/sub/file") == content


def test_new_files_belong_to_the_user(client: Client) -> None:
    """A new file is 0644, a new directory 0755, both the sandbox user's."""
    client.write_file("/tmp/d/f", b"")
    assert client.stdout("stat -c '%a %u %g' /tmp/d /tmp/d/f") == b"755 %d 1000\n644 %d 1000\n" % (UID, UID)


def test_an_existing_file_keeps_its_mode(client: Client) -> None:
    """Replacing a file keeps permission bits and drops set-id bits."""
    client.run("touch script plain; chmod 4755 script; chmod 600 plain")
    client.write_file("script", b"x")
    client.write_file("plain", b"x")
    assert client.stdout("stat -c %a script plain") == b"755\n600\n"


def test_replacing_is_atomic(client: Client) -> None:
    """A reader sees the old file or the new one, and a client that leaves in between leaves the old one alone."""
    client.write_file("f", b"old")
    client.request(WriteFile("f"))
    client.send(Kind.DATA, b"new")
    client.send(Kind.CANCEL)
    assert code(client.next_message()) == "IO_ERROR"
    assert client.stdout("cat f; ls -A") == b"oldf\n"


def test_a_writer_that_leaves_leaves_nothing(sandbox: Sandbox) -> None:
    """Closing before END removes the temporary file."""
    client, other = sandbox.shell(), sandbox.connect()
    client.request(WriteFile("f"))
    client.send(Kind.DATA, b"new")
    client.sock.close()
    assert (
        other.stdout("i=0; while ls -A | grep -q . && test $i -lt 500; do i=$((i+1)); sleep 0.01; done; ls -A") == b""
    )


def test_a_read_stops_at_its_limit(client: Client) -> None:
    """At most max_bytes come, and the answer says whether that was all."""
    client.write_file("f", b"0123456789")
    assert client.read_file("f", 4) == (FileInfo("/mnt/workspace/f", 10, True), b"0123")
    assert client.read_file("f", 10) == (FileInfo("/mnt/workspace/f", 10, False), b"0123456789")
    assert client.read_file("f", 0) == (FileInfo("/mnt/workspace/f", 10, True), b"")


def test_large_files_do_not_starve_others(sandbox: Sandbox) -> None:
    """A connection that never reads its file holds up nobody."""
    stalled, other = sandbox.shell(), sandbox.connect()
    other.run("head -c 30000000 /dev/zero >big")
    from runner.wire.protocol import ReadFile

    stalled.request(ReadFile("big", 1 << 30))
    assert other.stdout("echo fine") == b"fine\n"
    assert len(other.read_file("big")[1]) == 30_000_000


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
        ("/etc/passwd", "PATH_OUTSIDE"),
        ("../../etc/passwd", "PATH_OUTSIDE"),
        ("/dev/zero", "PATH_OUTSIDE"),
        ("/proc/self/status", "PATH_OUTSIDE"),
        ("/proc/self/root/mnt/workspace/file", "PATH_OUTSIDE"),
        ("/run/sandkasten/1", "PATH_OUTSIDE"),
        ("out", "PATH_OUTSIDE"),
        ("loop", "PATH_OUTSIDE"),
        ("dangling", "FILE_NOT_FOUND"),
        ("", "INVALID_PATH"),
        ("a\0b", "INVALID_PATH"),
        ("\ud800", "INVALID_PATH"),
        ("x" * 256, "INVALID_PATH"),
        ("y/" * 3000, "INVALID_PATH"),
    ],
)
def test_what_cannot_be_read_has_its_code(client: Client, path: str, expected: str) -> None:
    """Each reason has its own code, nothing blocks, and the connection goes on."""
    client.run(
        "echo x >file; mkdir dir closed; mkfifo fifo; echo x >secret; chmod 0 secret; echo x >closed/file;"
        "chmod 0 closed; ln -s /etc/passwd out; ln -s loop loop; ln -s nowhere dangling;"
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
        ("file/below", "FILE_NOT_FOUND"),
        ("readonly", "PERMISSION_DENIED"),
        ("closed/new", "PERMISSION_DENIED"),
        ("/etc/new", "PATH_OUTSIDE"),
        ("/new", "PATH_OUTSIDE"),
        ("../new/file", "PATH_OUTSIDE"),
        ("/run/sandkasten/1/cmd", "PATH_OUTSIDE"),
        ("outdir/new", "PATH_OUTSIDE"),
        ("outfile", "PATH_OUTSIDE"),
        ("loop", "PATH_OUTSIDE"),
        ("dangling/new", "FILE_NOT_FOUND"),
        ("", "INVALID_PATH"),
        ("a\0b", "INVALID_PATH"),
    ],
)
def test_what_cannot_be_written_has_its_code(client: Client, path: str, expected: str) -> None:
    """Each reason has its own code, nothing is left behind, and the connection goes on."""
    client.run(
        "echo x >file; mkdir dir closed; mkfifo fifo; echo x >readonly; chmod 444 readonly; chmod 555 closed;"
        "ln -s /etc outdir; ln -s /etc/new outfile; ln -s loop loop; ln -s nowhere dangling"
    )
    before = client.stdout("find . /tmp | sort; cat readonly")
    assert code(client.write_file(path, b"data")) == expected
    assert client.stdout("find . /tmp | sort; cat readonly") == before


def test_links_that_stay_inside_are_followed(client: Client) -> None:
    """Reading and writing through a link reaches its target, which is what the answer names; the link stays."""
    client.run("mkdir real; echo old >real/file; ln -s real/file link; ln -s /tmp dir; ln -s /tmp/later later")
    assert client.write_file("link", b"new") == Done("/mnt/workspace/real/file")
    assert client.write_file("dir/f", b"tmp") == Done("/tmp/f")
    assert client.write_file("later", b"made") == Done("/tmp/later")
    assert client.stdout("cat real/file /tmp/f /tmp/later; test -L link && test -L later && echo links") == (
        b"newtmpmadelinks\n"
    )
    assert client.read_file("link") == (FileInfo("/mnt/workspace/real/file", 3, False), b"new")


def test_a_full_disk_is_told_and_cleaned_up(client: Client) -> None:
    """Running out of space is DISK_FULL, the partial file goes, and the old one stays."""
    client.run("head -c 10 /dev/zero >/home/sandbox/f")
    assert code(client.write_file("/home/sandbox/f", b"x" * (4 << 20))) == "DISK_FULL"
    assert client.stdout("stat -c %s /home/sandbox/f; ls -A /home/sandbox") == b"10\nf\n"


def test_names_that_are_no_utf8_work(client: Client) -> None:
    """File names are bytes; in messages they are surrogate-escaped."""
    name = b"x\xff\n".decode("utf-8", "surrogateescape")
    assert client.write_file(name, b"1") == Done("/mnt/workspace/" + name)
    assert client.read_file(name)[1] == b"1"


def test_a_running_program_can_be_replaced(client: Client) -> None:
    """A file that is being executed is replaced, not refused."""
    client.run("cp /bin/sleep prog; ./prog 1234 &")
    assert client.write_file("prog", b"new") == Done("/mnt/workspace/prog")


def test_the_users_rights_hold_only_for_the_file_work(client: Client) -> None:
    """After file requests PID 1 still may do its own work: the next command's files are made and its end is seen."""
    for _ in range(3):
        client.write_file("f", b"x")
        client.read_file("/etc/shadow")
        assert client.stdout("cat f") == b"x"
