"""File requests in a sandbox with programs: any path, another user, the session's rules, and kinds that would hang."""

from __future__ import annotations

import io
import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from nsinit.kernel import constants as k
from nsinit.kernel import syscalls
from runner.files.operations import perform
from runner.wire.protocol import (
    ANSWERS,
    CHUNK_BYTES,
    MAX_WATCHES,
    ChangeMode,
    ChangeOwner,
    Done,
    EditFiles,
    FileChange,
    FileEntry,
    FileMatch,
    FilePart,
    FilePut,
    FileStats,
    FoundFiles,
    GetFile,
    GlobFiles,
    Kind,
    ListFiles,
    Listing,
    MoveFile,
    Pack,
    Packed,
    PutFile,
    RemoveFile,
    Searched,
    SearchFiles,
    StatFile,
    StatFiles,
    Unmatched,
    Unpack,
    WatchFiles,
    Watching,
)
from tests.kernel.runner_harness import UID, Client, Sandbox, code, needs_namespaces, wait_until
from tests.unit.test_runner_entries import work_in

pytestmark = needs_namespaces


@pytest.fixture
def client(sandbox: Sandbox) -> Client:
    return sandbox.shell()


def test_any_path_of_the_user_is_found(client: Client) -> None:
    """Outside of the three roots, too; what the user may not enter stays closed."""
    entry = client.ask(StatFile("/etc/passwd"))
    assert isinstance(entry, FileEntry)
    assert (entry.path, entry.kind, entry.owner, entry.user_name) == ("/etc/passwd", "file", 0, "root")
    listing = client.ask(ListFiles("/etc"))
    assert isinstance(listing, Listing)
    assert "passwd" in [each.name for each in listing.entries]
    client.run("mkdir closed; chmod 0 closed")
    assert code(client.ask(ListFiles("closed"))) == "PERMISSION_DENIED"
    assert code(client.ask(RemoveFile("/etc/passwd"))) == "PERMISSION_DENIED"
    many = client.ask(StatFiles(("closed/f", "/proc/self", "closed")))
    assert isinstance(many, FileStats)
    assert [each and each.kind for each in many.entries] == [None, None, "directory"]


@pytest.mark.parametrize("path", ["/proc", "/proc/self/environ", "/sys/kernel", "link"])
def test_the_kernels_files_are_refused_at_once(client: Client, path: str) -> None:
    """By whatever way they are reached."""
    client.run("ln -s /proc link")
    assert code(client.ask(ListFiles(path))) == "NOT_A_FILE"


def test_kinds_that_would_hang_are_described(client: Client) -> None:
    """A FIFO without a writer and a device: entries like others, at once."""
    client.run("mkfifo fifo")
    began = time.monotonic()
    answer: Any = client.ask(StatFiles(("fifo", "/dev/null", "missing")))
    assert isinstance(answer, FileStats)
    assert [each and each.kind for each in answer.entries] == ["other", "other", None]
    assert time.monotonic() - began < 5


def test_names_of_any_bytes_are_listed_and_removed(client: Client) -> None:
    """Surrogate-escaped on the wire, both ways."""
    client.run("touch $'\\xff\\x80' $'new\\nline'")
    listing = client.ask(ListFiles("."))
    assert isinstance(listing, Listing)
    assert [each.name for each in listing.entries] == ["new\nline", "\udcff\udc80"]
    for each in listing.entries:
        client.ask(RemoveFile(each.name))
    assert client.stdout("ls -A") == b""


def test_a_request_is_made_as_its_user(client: Client) -> None:
    """Another user of the image sees what that user may see; a session that was built without root has none."""
    client.run("mkdir mine; chmod 700 mine; touch mine/f")
    assert code(client.ask(ListFiles("mine", user=str(UID + 1)))) == "PERMISSION_DENIED"
    assert isinstance(client.ask(ListFiles("mine", user=str(UID))), Listing)
    assert code(client.ask(ListFiles("mine", user="root"))) == "NO_SUCH_USER"
    assert code(client.ask(ListFiles("mine", user="nobody-here"))) == "NO_SUCH_USER"


def put(client: Client, path: str, content: bytes, **options: Any) -> Any:
    client.request(PutFile(path, **options))
    for start in range(0, len(content), CHUNK_BYTES):
        client.send(Kind.DATA, content[start : start + CHUNK_BYTES])
    client.send(Kind.END)
    return client.next_message()


def get(client: Client, path: str, **options: Any) -> tuple[Any, bytes]:
    """Return the head, or the refusal, and the content."""
    client.request(GetFile(path, **options))
    head, content = client.next_message(), bytearray()
    while isinstance(head, FilePart):
        kind, body = client.next_frame()
        if kind is not Kind.DATA:
            break
        content += body
    return head, bytes(content)


@pytest.mark.parametrize("size", [0, 1, 1024 * 1024, 1024 * 1024 + 1, 9_000_000])
def test_content_is_exact_by_either_way(client: Client, size: int) -> None:
    """Small files are sent by PID 1, larger ones by a worker; parts are parts."""
    content = (bytes(range(251)) * (size // 251 + 1))[:size]
    answer = put(client, "d/f", content, mode=0o640)
    assert isinstance(answer, FilePut)
    assert (answer.size_bytes, answer.created) == (size, True)
    head, got = get(client, "d/f")
    assert (head.result, head.count, got == content) == ("whole", size, True)
    assert get(client, "d/f", start=size // 2)[1] == content[size // 2 :]
    assert client.stdout("stat -c '%a %u' d/f; ls -A d") == b"640 %d\nf\n" % UID


def test_a_sparse_file_of_any_size_is_read_in_parts(client: Client) -> None:
    """The end of 10 GiB comes at once, and the beginning needs nobody to have the rest."""
    client.run("truncate -s 10G big && echo end >>big")
    size = 10 * 2**30 + 4
    head, got = get(client, "big", end=4)
    assert (head.size_bytes, head.offset, got) == (size, size - 4, b"end\n")
    client.request(GetFile("big"))
    assert client.next_message().count == size
    client.sock.close()  # in the middle: the worker ends


@pytest.mark.parametrize(
    ("path", "expected"), [("fifo", "NOT_A_FILE"), ("/dev/zero", "NOT_A_FILE"), (".", "IS_DIRECTORY")]
)
def test_only_regular_files_have_content(client: Client, path: str, expected: str) -> None:
    """Reading and replacing anything else is refused at once."""
    client.run("mkfifo fifo")
    assert code(get(client, path)[0]) == expected
    assert code(put(client, path, b"x")) == expected
    assert code(get(client, "/proc/self/status")[0]) == "NOT_A_FILE"
    assert code(put(client, "/proc/self/comm", b"x")) == "NOT_A_FILE"


def test_a_conditional_write_keeps_what_another_wrote(sandbox: Sandbox) -> None:
    """The old version is compared when the content is there, too: a change meanwhile is not overwritten."""
    client, second = sandbox.shell(), sandbox.connect()
    client.run("echo one >f; sleep 0.1")
    stat = client.ask(StatFile("f"))
    assert isinstance(stat, FileEntry)
    client.request(PutFile("f", if_match=(stat.etag,)))
    client.send(Kind.DATA, b"mine")
    second.run("echo two >f")
    client.send(Kind.END)
    assert isinstance(client.next_message(), Unmatched)
    assert second.stdout("cat f; ls -A") == b"two\nf\n"


def test_a_move_between_file_systems_copies_and_removes(client: Client) -> None:
    """A tree goes from one tmpfs to another, and only from there; the user's own rights decide."""
    client.run("mkdir -p d/e; echo x >d/e/f; ln -s f d/e/l; chmod 750 d/e")
    answer = client.ask(MoveFile("d", "/tmp/moved"))
    assert answer == Done("/tmp/moved")
    assert client.stdout("ls -A; stat -c '%n %a' /tmp/moved/e; cat /tmp/moved/e/l; ls -A /tmp") == (
        b"/tmp/moved/e 750\nx\nmoved\n"
    )
    assert code(client.ask(MoveFile("/tmp/moved", "/etc/moved"))) == "PERMISSION_DENIED"
    assert client.stdout("cat /tmp/moved/e/f") == b"x\n"
    client.run("mkdir -p g/h; touch g/f g/h/f; chmod 500 g/h")
    for source in ("/etc/passwd", "g"):  # a part of which can't be removed: not copied either
        assert code(client.ask(MoveFile(source, "/tmp/refused"))) == "PERMISSION_DENIED"
    assert client.stdout("find g -type f | sort; ls -A /tmp; chmod 700 g/h") == b"g/f\ng/h/f\nmoved\n"


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/new", "closed"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_an_edit_that_is_not_allowed_is_refused(client: Client, path: str, dry_run: bool) -> None:
    """Of a file, or in a directory, of another user; or by its own mode. A trial is refused as well."""
    client.run("echo x > closed; chmod 400 closed")
    kind = {"op": "create", "text": "x"} if path == "/etc/new" else {"op": "insert", "line": 0, "text": "x"}
    client.request(EditFiles(dry_run))
    client.send(Kind.DATA, json.dumps([{"path": path, **kind}]).encode())
    client.send(Kind.END)
    assert code(client.next_message()) == "PERMISSION_DENIED"
    assert client.stdout("cat closed; ls -A") == b"x\nclosed\n"


def test_only_root_gives_files_away(client: Client) -> None:
    """The sandbox user may set a mode of its own files, and no owner but itself."""
    client.run("touch f")
    assert client.ask(ChangeMode("f", 0o600)) == Done("/mnt/workspace/f")
    assert code(client.ask(ChangeOwner("f", owner=0))) == "PERMISSION_DENIED"
    assert code(client.ask(ChangeMode("/etc/passwd", 0o666))) == "PERMISSION_DENIED"
    assert client.stdout("stat -c '%a %u' f") == b"600 %d\n" % UID


def test_a_change_of_the_root_leaves_the_kernels_files_alone(tmp_path: Path) -> None:
    """No file of /proc takes a mode: a change that went there would be refused, even to root."""
    for name in ("proc", "d"):
        (tmp_path / name).mkdir()
    pid = os.fork()
    if pid == 0:
        try:
            syscalls.unshare(k.CLONE_NEWNS)
            syscalls.mount("", "/", flags=k.MS_REC | k.MS_PRIVATE)
            syscalls.mount("/proc", str(tmp_path / "proc"), flags=k.MS_BIND)
            os.chroot(tmp_path)
            perform(ChangeMode("/", 0o700, recursive=True), work_in(Path("/"), anywhere=True))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700


def collect(client: Client, request: object) -> tuple[bytes, Any]:
    """Return the content and the answer."""
    client.request(request)
    content = bytearray()
    while (frame := client.next_frame())[0] is Kind.DATA:
        content += frame[1]
    return bytes(content), ANSWERS.decode(frame[1])


def search(client: Client, pattern: str, path: str, **options: Any) -> tuple[list[FileMatch], Any]:
    """Return the matches and the answer."""
    content, answer = collect(client, SearchFiles(path, pattern, **options))
    return [ANSWERS.decode(line) for line in content.splitlines()], answer


def test_files_and_lines_are_found_without_a_program(client: Client) -> None:
    """From the root on, as the user and never in the kernel's files; a costly expression is stopped in the middle."""
    client.run(
        "mkdir -p d/e; printf 'one\\nneedle\\n' > d/e/f.txt; mkdir closed; printf needle > closed/f; chmod 0 closed"
    )
    for path, pattern, paths in (("/", "{etc/passwd,proc/*/status}", ("etc/passwd",)), (".", "**/f*", ("d/e/f.txt",))):
        found = client.ask(GlobFiles(path, pattern))
        assert isinstance(found, FoundFiles)
        assert found.paths == paths
    matches, totals = search(client, "^nee", ".", regex=True, context=1)
    assert [(each.path.endswith("/d/e/f.txt"), each.line, each.before) for each in matches] == [(True, 2, ("one",))]
    assert isinstance(totals, Searched)
    client.run("head -c 300 /dev/zero | tr '\\0' a > costly")
    _, totals = search(client, "^(a+)+!", "costly", regex=True, max_ms=500)
    assert (totals.timed_out, totals.searched) == (True, 1)
    assert code(search(client, "x", "/proc/self/environ")[1]) == "NOT_A_FILE"


def test_zip_archives_are_made_and_taken_inside(client: Client) -> None:
    """With all that zipfile needs at hand, though nothing can be imported there; anywhere the user may write."""
    client.run("mkdir -p d/e; echo x > d/e/f; ln -s f d/e/l; mkdir closed; touch closed/f; chmod 0 closed/f")
    content, answer = collect(client, Pack("d", "zip"))
    assert answer == Packed(2, 2, 1)
    with zipfile.ZipFile(io.BytesIO(content)) as made:
        assert (made.namelist(), made.testzip()) == (["e/", "e/f"], None)
    assert code(collect(client, Pack("closed", "zip"))[1]) == "PERMISSION_DENIED"
    old = content.replace(b"e/f", b"e/\x81")  # a name in code page 437
    client.request(Unpack(10, 1000, "/tmp/new/deep", "zip"))
    client.send(Kind.DATA, old)
    client.send(Kind.END)
    assert client.next_message() == Packed(2, 2, 0)
    assert client.stdout("cat /tmp/new/deep/e/ü; stat -c %u /tmp/new/deep") == b"x\n%d\n" % UID
    client.request(Unpack(10, 1000, "/etc/new"))
    client.send(Kind.END)
    assert code(client.next_message()) == "PERMISSION_DENIED"


def test_changes_are_told_until_the_client_leaves(client: Client, sandbox: Sandbox) -> None:
    """Of any path, as the user; eight at a time, and a place is free again when a client has left."""
    client.run("mkdir closed; chmod 0 closed")
    assert code(client.ask(WatchFiles("closed"))) == "PERMISSION_DENIED"
    assert code(client.ask(WatchFiles("/proc/self"))) == "NOT_A_FILE"
    watching = [sandbox.connect() for _ in range(MAX_WATCHES)]
    for each in watching:
        each.request(WatchFiles("/tmp", recursive=True))
        assert each.next_message() == Watching("/tmp")
    assert code(client.ask(WatchFiles("/tmp"))) == "TOO_MANY"
    client.run("mkdir -p /tmp/d/e; echo x > /tmp/d/e/f")
    wanted = {FileChange("create", "/tmp/d"), FileChange("create", "/tmp/d/e"), FileChange("create", "/tmp/d/e/f")}
    told: set[object] = set()
    while not told >= wanted:
        kind, body = watching[0].next_frame()
        assert kind is Kind.DATA
        told |= {ANSWERS.decode(line) for line in body.splitlines() if line}
    watching.pop().sock.close()
    wait_until(lambda: code_or_none(sandbox, WatchFiles("/tmp")) is None)


def code_or_none(sandbox: Sandbox, request: WatchFiles) -> str | None:
    """Return how a watch is refused, None if it begins; it ends at once."""
    client = sandbox.connect()
    try:
        client.request(request)
        answer = client.next_message()
        return None if isinstance(answer, Watching) else code(answer)
    finally:
        client.sock.close()
