"""`cp` and `port`: files and directories both ways, archives on pipes, and connections to a session's ports."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import socket
import struct
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import httpx
import pytest

from tests.cli.conftest import Command
from tests.waiting import patience

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2].joinpath("docs/network.md").read_text()
(RECIPE,) = re.findall(r"^```\n(sandkasten exec .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_a_file_is_copied_both_ways(command: Command, session: str, tmp_path: Path) -> None:
    """Content and permission bits; a directory that is there gets the file, and another name is its new one."""
    source = tmp_path / "tool"
    source.write_bytes(bytes(range(256)) * 9)
    source.chmod(0o755)
    command.out("cp", source, f"{session}:/tmp")
    command.out("cp", source, f"{session}:new/name")
    assert command.out("exec", session, "--", "stat -c '%n %a %s' /tmp/tool new/name") == (
        "/tmp/tool 755 2304\nnew/name 755 2304\n"
    )
    command.out("cp", ":/tmp/tool", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert (tmp_path / "back").stat().st_mode & 0o777 == 0o755
    (tmp_path / "into").mkdir()
    command.out("cp", "kind=shared:new/name", tmp_path / "into")
    assert (tmp_path / "into/name").read_bytes() == source.read_bytes()


def test_a_name_that_is_no_text_is_copied_both_ways(command: Command, session: str, tmp_path: Path) -> None:
    """Any byte but NUL and the slash, of a file, in a directory, and in an archive."""
    name = os.fsdecode(b"caf\xe9 \xff")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / name).write_bytes(b"\xff")
    for source in (tmp_path / "src", tmp_path / "src" / name):
        command.out("cp", source, f"{session}:")
    assert command.out("exec", session, "--", "cat src/caf* caf* | od -An -tx1") == " ff ff\n"
    (tmp_path / "out").mkdir()
    for path in ("src", name):
        command.out("cp", f"{session}:{path}", tmp_path / "out")
    for found in (tmp_path / "out", tmp_path / "out/src"):
        assert (found / name).read_bytes() == b"\xff"
    archive = command.run("cp", f"{session}:{name}", "-").stdout.encode("utf-8", "surrogateescape")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert tar.getnames() == [name]
    assert command.out("ps", "-q", "-l", name) == ""
    for words in (("exec", session, "--", name), ("run", "-v", name, "--", "true"), ("workspace", "rm", name)):
        done = command.run(*words)
        assert (done.returncode, "Traceback" in done.stderr) == (125, False), done


def test_a_directory_is_copied_both_ways(command: Command, session: str, tmp_path: Path) -> None:
    """Into a directory that is there, under a new name, or what is in the directory."""
    (tmp_path / "src/sub").mkdir(parents=True)
    (tmp_path / "src/sub/a").write_text("a")
    (tmp_path / "src/link").symlink_to("sub/a")
    for target in (".", "copy", "copy"):
        command.out("cp", tmp_path / "src", f"{session}:{target}")
    command.out("cp", f"{tmp_path}/src/.", f"{session}:flat")
    found = command.out("exec", session, "--", "find src copy flat -type f -o -type l").split()
    assert sorted(found) == sorted(
        [f"{top}/{name}" for top in ("copy", "copy/src", "flat", "src") for name in ("link", "sub/a")]
    )
    command.out("cp", f"{session}:src", tmp_path / "out")
    command.out("cp", f"{session}:src/.", tmp_path / "out")
    assert (tmp_path / "out/sub/a").read_text() == "a"
    assert os.readlink(tmp_path / "out/link") == "sub/a"
    assert not (tmp_path / "out/src").exists()
    assert command.json("cp", f"{session}:src", f"{tmp_path}/out")["path"] == f"{tmp_path}/out/src"


def test_what_is_left_out_of_a_copy_is_said(command: Command, session: str, tmp_path: Path) -> None:
    """A link that leads out of the directory, to a person and to a program; nothing is said of a whole copy."""
    command.out("exec", session, "--", "mkdir -p odd whole; echo a > whole/a; ln -s /etc/passwd odd/l")
    done = command.run("cp", f"{session}:odd", tmp_path)
    assert (done.returncode, done.stderr.startswith("sandkasten: 1 left out: ")) == (0, True), done
    command.out("cp", f"{session}:whole", tmp_path)


def test_what_is_no_file_here_is_written_to(command: Command, session: str, tmp_path: Path) -> None:
    """A FIFO, or a device such as /dev/null, is not replaced."""
    os.mkfifo(tmp_path / "fifo")
    command.out("exec", session, "--", "echo content > f")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        command.out("cp", f"{session}:f", tmp_path / "fifo")
        assert os.read(reader, 100) == b"content\n"
    finally:
        os.close(reader)
    assert (tmp_path / "fifo").is_fifo()


def test_a_link_inside_chooses_no_name_here(command: Command, session: str, tmp_path: Path) -> None:
    """A copy is called as the person typed it, and as a tar, too; a path without a name needs one here."""
    script = "cd /tmp; mkdir .ssh; echo evil | tee .bashrc .ssh/keys; ln -s .bashrc report; ln -s .ssh out"
    command.out("exec", session, "--", script)
    for source in ("report", "out", "out/"):
        command.out("cp", f"{session}:/tmp/{source}", f"{tmp_path}/")
    command.out("cp", f"{session}:/tmp/out/.", f"{tmp_path}/flat/")
    found = {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_file()}
    assert found == {"report", "out/keys", "flat/keys"}
    archive = io.BytesIO(command.out("cp", f"{session}:/tmp/report", "-").encode())
    with tarfile.open(fileobj=archive) as tar:
        assert tar.getnames() == ["report"]
    for source in ("/", "/tmp/.."):
        done = command.run("cp", f"{session}:{source}", tmp_path)
        assert (done.returncode, "give DST one" in done.stderr) == (2, True), done


def test_a_tar_goes_in_and_out_on_pipes(command: Command, session: str) -> None:
    """A directory's, and that of a single file; a terminal gets none."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("deep/file")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"hello"))
    assert command.run("cp", "-", f"{session}:/tmp/x", stdin=archive.getvalue()).returncode == 0
    for path, name in (("/tmp/x", "deep/file"), ("/tmp/x/deep/file", "file")):
        with command.started("cp", f"{session}:{path}", "-") as process:
            assert process.stdout is not None
            with tarfile.open(fileobj=io.BytesIO(process.stdout.read())) as tar:
                content = tar.extractfile(name)
                assert content is not None
                assert content.read() == b"hello"
            assert process.wait() == 0
    with command.terminal("cp", f"{session}:/tmp/x", "-") as terminal:
        assert terminal.wait() == 2
        assert b"standard output is a terminal" in terminal.seen


def test_progress_is_told_on_a_terminal(command: Command, session: str, tmp_path: Path) -> None:
    """In one line that is drawn anew; not with --json."""
    (tmp_path / "big").write_bytes(bytes(20 * 2**20))
    with command.terminal("cp", str(tmp_path / "big"), f"{session}:/tmp/big") as terminal:
        assert terminal.wait() == 0
        assert b"100 %  20.0 MiB of 20.0 MiB" in terminal.seen
    with command.terminal("cp", "--json", f"{session}:/tmp/big", str(tmp_path / "back")) as terminal:
        assert terminal.wait() == 0
        assert terminal.seen.count(b"\n") == 1


@pytest.mark.parametrize(
    ("source", "target", "status", "words"),
    [
        ("a", "b", 2, "must be SESSION:PATH"),
        (":a", ":b", 2, "must be SESSION:PATH"),
        ("nowhere", ":b", 125, "there is no nowhere"),
        (":nowhere", "b", 125, "there is no nowhere in session"),
        (":/etc/passwd", "/proc/x", 125, "/proc"),
    ],
)
def test_a_copy_that_can_t_be_is_a_sentence(
    command: Command, session: str, source: str, target: str, status: int, words: str
) -> None:
    """Bad arguments are told from what is not there."""
    command.out("info", session)
    done = command.run("cp", source, target)
    assert (done.returncode, done.stderr.count("\n"), words in done.stderr) == (status, 1, True), done


SERVER = (
    "import socket\n"
    "server = socket.create_server(('127.0.0.1', 8000))\n"
    "while True:\n"
    "    link, _ = server.accept()\n"
    "    data = b''.join(iter(lambda: link.recv(65536), b''))\n"
    "    link.sendall(data[::-1]); link.close()\n"
)
"""Returns what comes, backwards, once the client has ended its side."""


def test_a_port_is_forwarded(command: Command, session: str) -> None:
    """Bytes both ways, each side's end, several connections, one of them reset; and listed when something listens."""
    command.out("exec", "-d", session, "--", "python3", "-c", SERVER)
    _wait_listening(command, session)
    assert command.out("port", session).splitlines()[1].split() == ["8000", "127.0.0.1"]
    with command.started("port", session, "0:8000", "0:9") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        ports = [int(re.findall(rb":(\d+) leads", process.stdout.readline())[0]) for _ in range(2)]
        data = bytes(range(256)) * 1000
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", ports[0]), timeout=patience(20)) as link:
                link.sendall(data)
                link.shutdown(socket.SHUT_WR)
                assert b"".join(iter(lambda: link.recv(65536), b"")) == data[::-1]
        with socket.create_connection(("127.0.0.1", ports[1]), timeout=patience(20)) as link:
            assert link.recv(1) == b""
        assert b"port 9: Connection refused" in process.stderr.readline()
        with socket.create_connection(("127.0.0.1", ports[0]), timeout=patience(20)) as link:
            link.sendall(data)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # to be closed with RST
        hanging = socket.create_connection(("127.0.0.1", ports[0]), timeout=patience(20))
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
        hanging.close()
    assert len(command.json("info", session)["runs"]) == 1


@contextmanager
def _published(command: Command, session: str, remote: int) -> Iterator[tuple[int, Popen[bytes]]]:
    """Have a port published; yield the port of the server's machine, and the command, which is ended."""
    with command.started("port", "--publish", session, f"0:{remote}") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield int(re.findall(rb"tcp://127.0.0.1:(\d+) on the server's", line)[0]), process
        process.terminate()


@pytest.fixture(scope="module")
def _network_maker(command: Command) -> None:
    """A helper of nsinit's, which is there from the first connection on and is no leak of a test."""
    session = command.out("run", "-d").strip()
    with (
        contextlib.suppress(ConnectionResetError),
        _published(command, session, 9) as (port, _),
        socket.create_connection(("127.0.0.1", port), timeout=patience(20)) as link,
    ):
        link.recv(1)
    command.out("rm", session)


@pytest.mark.usefixtures("_network_maker")
def test_a_port_is_published(command: Command, session: str) -> None:
    """With `--publish` a port of the server's machine leads inside until ^C, and is free again then; one that is taken
    is a sentence."""
    command.out("exec", "-d", session, "--", "python3", "-c", SERVER)
    _wait_listening(command, session)
    with _published(command, session, 8000) as (port, process):
        with socket.create_connection(("127.0.0.1", port), timeout=patience(20)) as link:
            link.sendall(b"abc")
            link.shutdown(socket.SHUT_WR)
            assert b"".join(iter(lambda: link.recv(65536), b"")) == b"cba"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
    with socket.create_server(("127.0.0.1", port)):
        done = command.run("port", "--publish", session, f"{port}:8000")
    assert (done.returncode, done.stderr.count("\n"), "Address already in use" in done.stderr) == (125, 1, True), done


@pytest.mark.usefixtures("_network_maker")
def test_a_new_session_has_published_ports(command: Command) -> None:
    """The port of the server's machine is there before the command runs, and gone with the session; where it is taken,
    there is a sentence and no session."""
    with command.started("run", "--publish", "0:8000", "--", "python3", "-c", SERVER) as process:
        assert process.stderr is not None
        (port,) = map(int, re.findall(rb"port (\d+) of the server's", process.stderr.readline()))
        data = b""
        while data != b"cba":  # until the program listens, a connection is reset
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=patience(20)) as link,
            ):
                link.sendall(b"abc")
                link.shutdown(socket.SHUT_WR)
                data = b"".join(iter(lambda: link.recv(65536), b""))
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
    before = len(command.lines("ps"))
    with socket.create_server(("127.0.0.1", port)):
        done = command.run("run", "-d", "--publish", f"{port}:8000")
    assert (done.returncode, "Address already in use" in done.stderr, len(command.lines("ps"))) == (
        125,
        True,
        before,
    ), done


def test_a_port_has_a_link(command: Command, session: str) -> None:
    """With `--preview` each port of the session is a URL with its token, and no local port is taken for one."""
    links = command.out("port", "--preview", session, "8000", "8001").splitlines()
    assert [re.sub(r"localhost:\d+/\?_sandkasten_token=[\w-]{43}$", "", each) for each in links] == [
        f"http://{port}-{session}." for port in (8000, 8001)
    ]
    for wrong in ((), ("1:80",)):
        assert command.run("port", "--preview", session, *wrong).returncode == 2


@pytest.mark.usefixtures("_network_maker")
def test_the_recipe_of_a_server_in_a_browser_works_as_it_stands(command: Command, session: str) -> None:
    """The lines of docs/network.md start a server, and print a URL that leads to it and lets in."""
    begin, link = (shlex.split(each.replace("SESSION", session))[1:] for each in RECIPE.splitlines())
    command.out(*begin)
    _wait_listening(command, session)
    url = httpx.URL(command.out(*link).strip())
    with httpx.Client(headers={"Host": url.netloc.decode()}) as browser:  # a browser resolves names below localhost
        at = url.copy_with(host="127.0.0.1")
        cookie = browser.get(at).headers["Set-Cookie"].partition(";")[0]
        assert "Directory listing" in browser.get(at.copy_with(query=None), headers={"Cookie": cookie}).text


def test_a_connection_that_can_t_be_carried_is_closed(command: Command, session: str) -> None:
    """Where the session has ended meanwhile, the program here does not wait for ever."""
    with command.started("port", session, "0:80") as process:
        assert process.stdout is not None
        port = int(re.findall(rb":(\d+) leads", process.stdout.readline())[0])
        command.out("rm", session)
        with socket.create_connection(("127.0.0.1", port), timeout=patience(5)) as link:
            assert link.recv(1) == b""
        process.terminate()


def _wait_listening(command: Command, session: str) -> None:
    for _ in range(100):
        if command.lines("port", session):
            return
    raise AssertionError("nothing listens")


def test_ports_that_are_none_are_refused(command: Command, session: str) -> None:
    """Before anything listens; a port that is taken here is a sentence, too."""
    for ports in ("x", "0", "70000", "1:2:3", ":5"):
        assert command.run("port", session, ports).returncode == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = command.run("port", session, f"{taken.getsockname()[1]}:80")
    assert (done.returncode, done.stderr.count("\n")) == (125, 1)
