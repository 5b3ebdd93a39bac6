"""Requests for files over real connections: clients that leave, bodies that are refused, names of any bytes, large
holes; and what is left of it in the session."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runner.files.worker import IDLE_S
from tests.e2e.daemon import KEY, Daemon, running_daemon
from tests.leaks import descendants
from tests.waiting import patience

MIB, GIB = 1 << 20, 1 << 30
PATIENCE_S = 20.0
NAMES = {
    "a newline": (b"a\nb", "a\nb"),
    "no UTF-8": (b"a\xff\xfeb", "a\0ff\0feb"),
    "an option": (b"-rf", "-rf"),
    "quotes": (b"a'\"`$(id)\\", "a'\"`$(id)\\"),
    "control characters": (b"\x01\x1b[2J\x7f", "\x01\x1b[2J\x7f"),
    "signs of a query": (b"a?b=c&d#e%41+f", "a?b=c&d#e%41+f"),
    "the longest": (b"n" * 255, "n" * 255),
    "dots and spaces": (b" .. ", " .. "),
    "right to left": ("\u202ea\u2028".encode(), "\u202ea\u2028"),
}
"""Names of files: their bytes, and their spelling in a path."""


@pytest.fixture
def session(client: httpx.Client) -> str:
    return str(client.post("/v1/sessions", json={}).json()["id"])


@pytest.fixture
def place(session: str) -> str:
    return f"/v1/sessions/{session}/fs"


def workers(daemon: Daemon) -> list[int]:
    """Return the pids of the daemon's file workers: forks of a PID 1 that run no program."""
    inits = {pid for pid, name in descendants(daemon.process.pid) if name == "sandkasten-init"}
    return [pid for pid in inits if _parent_of(pid) in inits]


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it ended meanwhile
        return 0


def until(is_so: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
    give_up_at = time.monotonic() + patience(within_s)
    while not is_so():
        assert time.monotonic() < give_up_at
        threading.Event().wait(0.02)


def run(client: httpx.Client, session: str, command: str) -> str:
    answer = client.post(f"/v1/sessions/{session}/exec", json={"cmd": command}).json()
    assert answer["exit_code"] == 0, answer
    return str(answer["output"])


class Wire:
    """A connection on which requests are written by hand."""

    def __init__(self, daemon: Daemon) -> None:
        host, port = daemon.wait_url().removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=patience(PATIENCE_S))
        self._received = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def send_head(self, method: str, path: str, *headers: str) -> None:
        lines = (f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}", *headers, "", "")
        self.socket.sendall("\r\n".join(lines).encode())

    def head(self) -> tuple[int, dict[str, str]]:
        """Return status and headers of the next answer."""
        while b"\r\n\r\n" not in self._received:
            piece = self.socket.recv(65536)
            assert piece, self._received
            self._received += piece
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        return int(first.split()[1]), {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}

    def body(self, size: int) -> bytes:
        while len(self._received) < size:
            piece = self.socket.recv(65536)
            assert piece
            self._received += piece
        body, self._received = self._received[:size], self._received[size:]
        return body

    def is_closed(self) -> bool:
        """Whether the daemon ends the connection, sooner or later."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass
        return True


# Bodies that are refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "condition", "status"),
    [("f", 'If-Match: "other"', 412), ("f", "If-None-Match: *", 412), ("/etc/f", "X: y", 403), ("d", "X: y", 409)],
)
def test_a_body_that_is_refused_is_not_read(
    daemon: Daemon, client: httpx.Client, session: str, place: str, path: str, condition: str, status: int
) -> None:
    """The answer comes while the client still sends, and the connection ends; the file stays, and nothing beside it.
    More than the buffers on the way hold is never taken."""
    run(client, session, "printf old > f; mkdir d")
    with Wire(daemon) as wire:
        wire.send_head("PUT", f"{place}/file?path={path}", condition, f"Content-Length: {GIB}")
        wire.socket.setblocking(False)
        sent, give_up_at = 0, time.monotonic() + patience(PATIENCE_S)
        while not _has_answer(wire.socket):
            assert time.monotonic() < give_up_at
            try:
                sent += wire.socket.send(bytes(MIB))
            except BlockingIOError:
                threading.Event().wait(0.01)
            except ConnectionError:
                break
        wire.socket.settimeout(patience(PATIENCE_S))
        told, headers = wire.head()
        assert (told, headers["connection"]) == (status, "close")
        assert wire.is_closed()
        assert sent < GIB // 2
    assert run(client, session, "cat f; ls -A") == "oldd\nf\n"


def _has_answer(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def test_a_connection_goes_on_after_a_small_body_was_refused(
    daemon: Daemon, client: httpx.Client, session: str, place: str
) -> None:
    """A body that was read whole before the refusal leaves the connection as it was; else the answer says `close`."""
    run(client, session, "printf old > f")
    with Wire(daemon) as wire:
        wire.send_head("PUT", f"{place}/file?path=f", 'If-Match: "other"', "Content-Length: 3")
        wire.socket.sendall(b"new")
        status, headers = wire.head()
        assert status == 412
        assert json.loads(wire.body(int(headers["content-length"])))["details"]["etag"]
        if headers.get("connection") == "close":
            assert wire.is_closed()
            return
        wire.send_head("GET", f"{place}/file?path=f")
        status, headers = wire.head()
        assert (status, wire.body(int(headers["content-length"]))) == (200, b"old")


# Clients that leave ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        ("GET", "watch?path=/&recursive=true", {}),
        ("POST", "search", {"path": "/", "pattern": "(x+x+)+y", "regex": True, "everything": True}),
        ("GET", "file?path=big", {}),
        ("GET", "archive?path=/usr&format=tar.zst", {}),
        ("GET", "list?path=/&depth=32&glob=nothing", {}),
        ("POST", "glob", {"path": "/", "pattern": "**/nothing"}),
        ("GET", "view?path=big", {}),
        ("GET", "stat?path=big&digest=sha256", {}),
        ("POST", "copy", {"from": "/usr", "to": "copy"}),
    ],
    ids=["watch", "search", "file", "archive", "list", "glob", "view", "digest", "copy"],
)
def test_what_a_client_leaves_ends(
    daemon: Daemon, client: httpx.Client, session: str, place: str, request_: tuple[str, str, dict[str, Any]]
) -> None:
    """The worker ends, sooner than one that has nothing to do; the session's processes and files are those of before,
    and no connection or descriptor stays."""
    run(client, session, "truncate -s 400G big")
    until(lambda: not workers(daemon))
    before = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
    method, target, body = request_
    for _ in range(3):
        with Wire(daemon) as wire:
            content = json.dumps(body).encode() if body else b""
            headers = (f"Content-Length: {len(content)}", "Content-Type: application/json") if body else ()
            wire.send_head(method, f"{place}/{target}", *headers)
            wire.socket.sendall(content)
            until(lambda: bool(workers(daemon)))
        until(lambda: not workers(daemon), within_s=IDLE_S - 1)
    assert run(client, session, "ls -A") == "big\n"
    # Two may be those of a session's idle connections, which any request makes.
    until(lambda: len(os.listdir(f"/proc/{daemon.process.pid}/fd")) <= before + 2)


def test_a_client_that_leaves_an_upload_leaves_the_old_file(
    daemon: Daemon, client: httpx.Client, session: str, place: str
) -> None:
    """Nothing of what came is left, under no name."""
    run(client, session, "printf old > f")
    with Wire(daemon) as wire:
        wire.send_head("PUT", f"{place}/file?path=f", f"Content-Length: {GIB}")
        wire.socket.sendall(bytes(8 * MIB))
    until(lambda: not workers(daemon))
    assert run(client, session, "cat f; ls -A; du -s . | cut -f 1") == "oldf\n8\n"


def test_requests_for_files_are_processes_of_the_session(client: httpx.Client) -> None:
    """Where no more may start a request is refused, and one that comes when some have ended is served."""
    session = str(client.post("/v1/sessions", json={"limits": {"pids": 16}}).json()["id"])
    base = f"/v1/sessions/{session}"
    fill = "import os, time\ntry:\n while os.fork(): pass\nexcept OSError: print('full', flush=True)\ntime.sleep(1000)"
    assert client.post(f"{base}/processes", json={"argv": ["python3", "-c", fill], "process_id": "p"}).is_success
    assert client.post(f"{base}/processes/p/wait", json={"pattern": "full"}).json()["happened"]
    refused = client.post(f"{base}/fs/write", json={"path": "f", "text": "x"})
    assert (refused.status_code, refused.json()["error_code"], refused.json()["retryable"]) == (503, "CAPACITY", True)
    client.delete(f"{base}/processes/p")
    assert client.post(f"{base}/fs/write", json={"path": "f", "text": "x"}).status_code == 200


def test_a_workspace_that_is_deleted_while_it_is_watched(daemon: Daemon, client: httpx.Client) -> None:
    """The deletion waits for no watcher if it is forced, and is refused otherwise; the watcher is told, and what served
    it is gone."""
    place = "/v1/workspaces/watched"
    assert client.post(f"{place}/fs/write", json={"path": "f", "text": "x"}).status_code == 200
    with client.stream("GET", f"{place}/fs/watch") as watching:
        lines = watching.iter_lines()
        assert next(lines) == "event: ready"
        refused = client.delete(place)
        assert (refused.status_code, refused.json()["error_code"]) == (409, "WORKSPACE_BUSY")
        assert client.put(f"{place}/fs/file?path=g", content=b"y").status_code == 201
        assert any('"type":"create"' in line and "/g" in line for line in _some(lines, 20))
        assert client.delete(place, params={"force": "true"}).json() == {"ok": True}
        assert any(line.startswith("event: error") for line in lines)
    assert client.get(f"{place}/fs/file?path=f").status_code == 404
    until(lambda: not workers(daemon))


def _some(lines: Iterator[str], count: int) -> Iterator[str]:
    for _ in range(count):
        yield next(lines)


# Large ones -----------------------------------------------------------------------------------------------------------


def test_a_file_of_ten_gibibytes_goes_both_ways(daemon: Daemon, client: httpx.Client, session: str, place: str) -> None:
    """A hole of which the first part is fetched and the last byte is found; and as much as is sent for a second of a
    body of that size, which is too large for the session's disk. No process holds more than some pieces of it."""
    run(client, session, f"truncate -s {10 * GIB} big; printf x >> big")
    with Wire(daemon) as wire:
        wire.send_head("GET", f"{place}/file?path=big")
        status, headers = wire.head()
        assert (status, int(headers["content-length"])) == (200, 10 * GIB + 1)
        for _ in range(64):
            assert wire.body(MIB) == bytes(MIB)
        (worker,) = workers(daemon)
        peaks = [_peak_mib(pid) for pid in (daemon.process.pid, worker, _parent_of(worker))]
    last = client.get(f"{place}/file?path=big", headers={"Range": f"bytes={10 * GIB}-"})
    assert (last.status_code, last.content) == (206, b"x")
    with Wire(daemon) as wire:
        wire.send_head("PUT", f"{place}/file?path=other", f"Content-Length: {10 * GIB}")
        until_s = time.monotonic() + 1
        while time.monotonic() < until_s:
            wire.socket.sendall(bytes(MIB))
        (worker,) = workers(daemon)
        peaks += [_peak_mib(pid) for pid in (daemon.process.pid, worker, _parent_of(worker))]
    assert max(peaks) < 160, peaks
    assert run(client, session, "ls") == "big\n"


def test_a_file_whose_connection_breaks_three_times_each_way_arrives_whole(
    daemon: Daemon, client: httpx.Client, place: str
) -> None:
    """The client goes on where it was, both ways. A campaign has a file of 5 GiB."""
    send_and_fetch(daemon, client, place, 384)


def send_and_fetch(daemon: Daemon, client: httpx.Client, place: str, count: int) -> None:
    """Check a file of some MiB whose connection breaks three times each way: the digest is that of the whole at the
    commit and after the last part, and the daemon and the file workers hold some pieces of it at a time."""
    block, step = os.urandom(MIB), count // 4 - 6
    expected, whole = hashlib.sha256(), hashlib.sha256()
    for number in range(count):
        expected.update(number.to_bytes(8, "big") + block[8:])
    digest = expected.hexdigest()
    begun = client.post(f"{place}/uploads", json={"path": "f", "size": count * MIB, "sha256": digest}).json()
    upload, offset = f"{place}/uploads/{begun['upload_id']}", 0
    peaks: list[int] = []
    Path(f"/proc/{daemon.process.pid}/clear_refs").write_text("5")  # the peak begins anew: proc_pid_clear_refs(5)
    idle_mib = _peak_mib(daemon.process.pid)
    for part in range(4):
        with Wire(daemon) as wire:
            rest = count * MIB - offset
            wire.send_head("PATCH", upload, f"Upload-Offset: {offset}", f"Content-Length: {rest}")
            for number in range(offset // MIB, count if part == 3 else step * (part + 1)):
                piece = number.to_bytes(8, "big") + block[8:]
                wire.socket.sendall(piece[offset % MIB if number == offset // MIB else 0 :])
            peaks += map(_peak_mib, workers(daemon))
            if part == 3:
                assert wire.head()[0] == 200
        until(lambda: client.patch(upload, headers={"Upload-Offset": str(_offset(client, upload))}).status_code == 200)
        before, offset = offset, _offset(client, upload)
        assert offset > before
    put = client.post(f"{upload}/commit")
    assert (put.status_code, put.json()["size"]) == (201, count * MIB), put.text
    offset = 0
    for part in range(4):
        with Wire(daemon) as wire:
            wire.send_head("GET", f"{place}/file?path=f", f"Range: bytes={offset}-")
            assert wire.head()[0] == 206
            size = count * MIB - offset if part == 3 else step * MIB + 7
            for start in range(0, size, MIB):
                whole.update(wire.body(min(MIB, size - start)))
            peaks += map(_peak_mib, workers(daemon))
            offset += size
    assert whole.hexdigest() == digest
    assert 0 < max(peaks) < 64, peaks
    assert _peak_mib(daemon.process.pid) - idle_mib < 64


def test_an_upload_goes_on_after_the_daemon_was_killed(data_dir: Path) -> None:
    """With what had come of the part that was under way."""
    content = os.urandom(8 * MIB)
    with running_daemon(data_dir) as first, first.client() as client:
        place = f"/v1/sessions/{client.post('/v1/sessions', json={'ttl_seconds': 600}).json()['id']}/fs"
        begun = client.post(
            f"{place}/uploads", json={"path": "f", "sha256": hashlib.sha256(content).hexdigest()}
        ).json()
        upload = f"{place}/uploads/{begun['upload_id']}"
        with Wire(first) as wire:
            wire.send_head("PATCH", upload, "Upload-Offset: 0", f"Content-Length: {len(content)}")
            wire.socket.sendall(content[: len(content) // 2])
            until(lambda: _offset(client, upload) > 0)
            first.process.kill()
            first.process.wait()
    with running_daemon(data_dir) as second, second.client() as client:

        def is_taken() -> bool:
            offset = int(client.head(upload).headers["upload-offset"])
            assert 0 < offset <= len(content) // 2
            rest = client.patch(upload, headers={"Upload-Offset": str(offset)}, content=content[offset:])
            return rest.status_code == 200  # 409: the request of before has its last bytes still

        until(is_taken)
        assert client.post(f"{upload}/commit").status_code == 201
        assert client.get(f"{place}/file?path=f").content == content
        assert client.get(f"{place}/list").json()["entries"][0]["name"] == "f"
        assert client.delete(place.removesuffix("/fs")).is_success


def _offset(client: httpx.Client, upload: str) -> int:
    return int(client.get(upload).json()["offset"])


def _peak_mib(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024
    except OSError:  # it ended meanwhile
        return 0


def test_a_body_that_the_disk_has_no_room_for_is_refused_on_the_way(
    daemon: Daemon, client: httpx.Client, place: str
) -> None:
    """The answer comes when the disk is full, and what was written is given back."""
    small = str(client.post("/v1/sessions", json={"limits": {"disk_mb": 64}}).json()["id"])
    with Wire(daemon) as wire:
        wire.send_head("PUT", f"/v1/sessions/{small}/fs/file?path=f", f"Content-Length: {GIB}")
        try:
            for _ in range(GIB // MIB):
                wire.socket.sendall(bytes(MIB))
                if _arrived(wire.socket):
                    break
        except ConnectionError:
            pass
        assert wire.head()[0] == 507
    assert client.put(f"/v1/sessions/{small}/fs/file?path=f", content=bytes(MIB)).status_code == 201


def _arrived(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return _has_answer(connection)
    finally:
        connection.settimeout(patience(PATIENCE_S))


# Archives -------------------------------------------------------------------------------------------------------------


FILE, DIRECTORY, LINK = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE


def tar_of(**members: tuple[bytes, int, bytes]) -> bytes:
    """Return an archive of members: type, mode, and content, of a link where it leads."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name, (kind, mode, content) in members.items():
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, mode
            if kind == tarfile.REGTYPE:
                member.size = len(content)
            else:
                member.linkname = content.decode()
            made.addfile(member, io.BytesIO(content))
    return out.getvalue()


def test_an_archive_that_the_disk_has_no_room_for_leaves_the_old_files(client: httpx.Client) -> None:
    """Files that the archive would have replaced stay whole, and nothing is left beside them."""
    session = str(client.post("/v1/sessions", json={"limits": {"disk_mb": 64}}).json()["id"])
    run(client, session, "printf old > f")
    answer = client.post(f"/v1/sessions/{session}/fs/archive", content=tar_of(f=(FILE, 0o644, bytes(80 * MIB))))
    assert (answer.status_code, answer.json()["error_code"]) == (507, "DISK_FULL"), answer.text
    assert run(client, session, "cat f; ls -A") == "oldf\n"


def test_a_client_that_leaves_an_archive_leaves_the_old_file(
    daemon: Daemon, client: httpx.Client, session: str, place: str
) -> None:
    """In the midst of a file that it would have replaced."""
    run(client, session, "printf old > f")
    archive = tar_of(f=(FILE, 0o644, bytes(16 * MIB)))
    with Wire(daemon) as wire:
        wire.send_head("POST", f"{place}/archive", f"Content-Length: {len(archive)}")
        wire.socket.sendall(archive[: 8 * MIB])
        until(lambda: bool(workers(daemon)))
    until(lambda: not workers(daemon))
    assert run(client, session, "cat f; ls -A") == "oldf\n"


def test_directories_of_others_keep_their_modes(client: httpx.Client, session: str, place: str) -> None:
    """A member for one that is there changes it if it is the user's; the rest of the archive is unpacked as ever."""
    there = {"path": "/tmp/theirs", "mode": "1777", "user": "root"}
    assert client.post(f"{place}/mkdir", json=there).is_success
    content = tar_of(theirs=(DIRECTORY, 0o755, b""), mine=(DIRECTORY, 0o755, b""), **{"theirs/f": (FILE, 0o600, b"x")})
    answer = client.post(f"{place}/archive", params={"path": "/tmp"}, content=content)
    assert (answer.status_code, answer.json().get("entries")) == (201, 3), answer.text
    assert run(client, session, "cd /tmp; stat -c '%a %U' mine theirs theirs/f; cat theirs/f") == (
        "755 sandbox\n1777 root\n600 sandbox\nx"
    )


def test_an_archive_is_given_to_whom_root_says(client: httpx.Client, session: str, place: str) -> None:
    """Files, directories, links and what their paths imply; root's archive of `/tmp` leaves the sticky bit on it."""
    members = {"tmp": (DIRECTORY, 0o1777, b""), "tmp/d": (DIRECTORY, 0o750, b""), "tmp/d/f": (FILE, 0o640, b"x")}
    content = tar_of(**members, **{"tmp/d/link": (LINK, 0o777, b"f"), "tmp/implied/f": (FILE, 0o640, b"x")})
    given: dict[str, str | int] = {"path": "/", "uid": 5, "gid": 6}
    refused = client.post(f"{place}/archive", params={**given, "path": "d"}, content=content)
    assert (refused.status_code, refused.json()["message"]) == (400, "operation not permitted: tmp"), refused.text
    answer = client.post(f"{place}/archive", params={**given, "user": "root"}, content=content)
    assert answer.status_code == 201, answer.text
    answers = [
        client.get(f"{place}/stat", params={"path": f"/tmp/{name}", "user": "root"}).json()
        for name in ("d", "d/f", "d/link", "implied", "implied/f")
    ]
    assert [(each["uid"], each["gid"]) for each in answers] == [(5, 6)] * 5
    assert run(client, session, "stat -c '%a %u:%g' /tmp") == "1777 0:0\n"


def test_root_gives_files_away(client: httpx.Client, session: str, place: str) -> None:
    """User and group as they are named, of a directory and all below; nobody else gives any."""
    run(client, session, "mkdir -p d/e; touch d/e/f; ln -s /etc/passwd d/link")
    body = {"path": "d", "uid": 5, "gid": 6, "recursive": True}
    refused = client.post(f"{place}/chown", json=body)
    assert (refused.status_code, refused.json()["error_code"]) == (403, "PERMISSION_DENIED")
    assert client.post(f"{place}/chown", json={**body, "user": "root"}).json() == {"ok": True, "path": "/workspace/d"}
    assert run(client, session, "stat -c %u:%g d d/e d/e/f") == "5:6\n" * 3
    assert run(client, session, "stat -c %u:%g /etc/passwd") == "0:0\n"
    alone = {"path": "d/e/f", "gid": 7, "user": "root"}
    assert client.post(f"{place}/chown", json=alone).is_success
    assert run(client, session, "stat -c %u:%g d/e/f") == "5:7\n"
    mode = {"path": "d", "mode": "0701", "recursive": True}
    assert client.post(f"{place}/chmod", json=mode).status_code == 403
    assert client.post(f"{place}/chmod", json={**mode, "user": "root"}).json() == {"ok": True, "path": "/workspace/d"}
    assert run(client, session, "stat -c %a d d/e d/e/f; stat -c %a /etc/passwd") == "701\n" * 3 + "644\n"


# Names and places -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["session", "workspace"])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_any_name_is_served(client: httpx.Client, session: str, kind: str, name: str) -> None:
    """All that is done with a file is done by the spelling of its path, and told by it."""
    place = f"/v1/sessions/{session}/fs" if kind == "session" else "/v1/workspaces/names/fs"
    raw, spelled = NAMES[name]
    path = f"/workspace/d/{spelled}"
    put = client.put(f"{place}/file", params={"path": path}, content=b"text\n")
    assert (put.status_code, put.json()["path"]) == (201, path)
    assert client.get(f"{place}/file", params={"path": path}).content == b"text\n"
    assert client.get(f"{place}/stat", params={"path": path}).json()["path"] == path
    (entry,) = client.get(f"{place}/list", params={"path": "d"}).json()["entries"]
    assert (entry["path"], entry["size"]) == (path, 5)
    assert client.post(f"{place}/glob", json={"path": "d", "pattern": "*"}).json()["paths"] == [path]
    found = client.post(f"{place}/search", json={"path": "d", "pattern": "text"}).text.splitlines()
    assert json.loads(found[0])["path"] == path
    edit = {"op": "replace", "path": path, "old": "text", "new": "word"}
    edited = client.post(f"{place}/edit", json={"edits": [edit]})
    assert edited.status_code == 200, edited.text
    assert client.get(f"{place}/view", params={"path": path}).json()["text"] == "     1\tword\n"
    assert client.post(f"{place}/write", json={"path": path, "text": "again"}).json()["path"] == path
    assert client.get(f"{place}/read", params={"path": path}).json()["path"] == path
    sent = client.post(f"{place}/upload", files={"file": ("g", b"")}, data={"path": f"/workspace/u/{spelled}"})
    assert sent.json()["paths"] == [f"{'/workspace/' if kind == 'session' else ''}u/{spelled}/g"]
    if kind == "workspace":
        (made,) = client.get(place, params={"path": f"u/{spelled}"}).json()["entries"]
        assert made["name"] == "g"
        packed = client.get(f"{place}/download", params={"path": f"u/{spelled}"})
        assert packed.status_code == 200, packed.text
    copy = f"/workspace/e/{spelled}"
    assert client.post(f"{place}/mkdir", json={"path": "e"}).status_code == 200
    assert client.post(f"{place}/copy", json={"from": path, "to": copy}).json()["path"] == copy
    assert client.delete(place, params={"path": path}).json()["path"] == path
    assert client.post(f"{place}/move", json={"from": copy, "to": path}).json()["path"] == path
    with tarfile.open(fileobj=io.BytesIO(client.get(f"{place}/archive", params={"path": "d"}).content)) as archive:
        assert [os.fsencode(each) for each in archive.getnames()] == [raw]
    assert client.delete(place, params={"path": "/workspace/d", "recursive": "true"}).status_code == 200
    assert client.delete(place, params={"path": "/workspace/e", "recursive": "true"}).status_code == 200
    if kind == "workspace":  # what serves its files would be there for seconds
        assert client.delete("/v1/workspaces/names").status_code == 200


def test_the_first_routes_reach_what_the_user_may(client: httpx.Client, session: str, place: str) -> None:
    """Files of the image are read, and others than those of three directories are written; the kernel's are refused by
    their kind, and what the user may not write stays as it is."""
    read = client.get(f"{place}/read", params={"path": "/etc/os-release"})
    assert read.json()["path"] == "/usr/lib/os-release"
    assert client.post(f"{place}/write", json={"path": "/dev/shm/f", "text": "x"}).json()["path"] == "/dev/shm/f"
    sent = client.post(f"{place}/upload", files={"file": ("g", b"y")}, data={"path": "/dev/shm"})
    assert sent.json() == {"ok": True, "paths": ["/dev/shm/g"]}
    assert run(client, session, "cat /dev/shm/f /dev/shm/g") == "xy"
    denied = client.post(f"{place}/write", json={"path": "/usr/local/bin/f", "text": "x"})
    assert (denied.status_code, denied.json()["error_code"]) == (403, "PERMISSION_DENIED")
    refusals = {"/proc/self/environ": (409, "NOT_A_FILE"), "/proc/meminfo": (409, "NOT_A_FILE")}
    for path, refusal in {**refusals, "/proc/self/root/etc/passwd": (400, "PATH_OUTSIDE")}.items():
        for answer in (
            client.get(f"{place}/read", params={"path": path}),
            client.post(f"{place}/write", json={"path": path, "text": "x"}),
        ):
            assert (answer.status_code, answer.json()["error_code"]) == refusal, answer.text
    there = {"path": "f", "cwd": "/usr/local/bin", "user": "root"}
    answer = client.post(f"{place}/write", json={**there, "text": "x"})
    assert (answer.status_code, answer.json()["path"]) == (200, "/usr/local/bin/f"), answer.text
    assert run(client, session, "stat -c %U /usr/local/bin/f") == "root\n"
    assert client.get(f"{place}/read", params=there).json()["content_base64"] == "eA=="
    root = str(client.post("/v1/sessions", json={"user": "root"}).json()["id"])
    answer = client.post(f"/v1/sessions/{root}/fs/write", json={"path": "/usr/local/bin/f", "text": "x"})
    assert answer.status_code == 200, answer.text
