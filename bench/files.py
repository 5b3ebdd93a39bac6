"""Files over HTTP: a large one both ways beside a plain socket, a sparse one, many small ones, a long list.

The client of a large file is a process of its own (`python -m bench.files`), so that its memory is told apart. A plain
socket does the same without a daemon: one process reads or writes the file, another one has the other end.
"""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench import daemon
from bench.sampling import Table

MIB = 1024 * 1024
PIECE_BYTES = 256 * 1024
BLOCK = bytes(range(256)) * (PIECE_BYTES // 256)
SMALL_BYTES = 1000
_TRANSFER_S = 600
LARGE = HTTP, PLAIN = "HTTP", "plain socket"
SMALL, HEALTHZ, PAGE = "small file, HTTP", "GET /healthz, beside small files", "page of a long list, HTTP"


def measure_small(table: Table, client: daemon.Client, place: str, rounds: Iterator[str], count: int) -> dict[str, Any]:
    """Read small files, each once, one request after another; return figures of all of them as one archive."""
    names = [f"f{number:05}" for number in range(count)]
    content = os.urandom(SMALL_BYTES)
    began = time.perf_counter()
    client.text("POST", f"{place}/archive?path=small", _archive(names, content))
    up_ms = (time.perf_counter() - began) * 1000 / count
    began = time.perf_counter()
    found = client.text("GET", f"{place}/archive?path=small")
    down_ms = (time.perf_counter() - began) * 1000 / count
    with tarfile.open(fileobj=io.BytesIO(found)) as archive:
        if len(archive.getnames()) != count:
            raise RuntimeError("another archive came back")
    unread = iter(names)
    for row in rounds:
        with table.timed(row):
            if row == HEALTHZ:
                client.text("GET", "/healthz")
            elif client.text("GET", f"{place}/file?path=small/{next(unread)}") != content:
                raise RuntimeError("another content came back")
    return {
        f"archive of {count} small files, up, ms each": round(up_ms, 3),
        f"archive of {count} small files, down, ms each": round(down_ms, 3),
    }


def measure_list(table: Table, client: daemon.Client, session: str, count: int) -> dict[str, Any]:
    """List a directory with many entries, page by page."""
    program = f"import os\nos.mkdir('long')\nfor n in range({count}): os.close(os.open(f'long/{{n:06}}', os.O_CREAT))"
    made = client.call("POST", f"/v1/sessions/{session}/exec", {"argv": ["python3", "-c", program]})
    if made["exit_code"] != 0:
        raise RuntimeError(str(made))
    found, cursor, began = 0, "", time.perf_counter()
    while cursor is not None:
        with table.timed(PAGE):
            page = client.call("GET", f"/v1/sessions/{session}/fs/list?path=long&cursor={quote(cursor)}")
        found, cursor = found + len(page["entries"]), page.get("next_cursor")
    if found != count:
        raise RuntimeError(f"{found} of {count} entries")
    return {
        f"list of {count} entries, s": round(time.perf_counter() - began, 2),
        f"list of {count} entries, peak of a file worker, MiB": max(_peaks(session)),
    }


# One large file -------------------------------------------------------------------------------------------------------


def large_row(way: str, kind: str) -> str:
    """Return the name of a row of rates; `kind` is one of `LARGE`."""
    return f"large file {way}, {kind}, MB/s"


def measure_large(
    table: Table, address: tuple[str, int], session: str, scratch: Path, rounds: Iterator[str], size: int
) -> None:
    """Send a file and fetch it again, over HTTP and over a plain socket, in the order of `rounds`."""
    for kind in rounds:
        for way in ("up", "down"):
            if kind == HTTP:
                seconds, _ = _transfer(way, address, _large(session), size)
            else:
                with _plain(way, scratch / "plain", size) as plain:
                    seconds, _ = _transfer(way, plain, "", size)
            table.row(large_row(way, kind)).values.append(size / seconds / 1e6)
    (scratch / "plain").unlink()


def _large(session: str) -> str:
    return f"/v1/sessions/{session}/fs/file?path=large"


def measure_large_memory(pid: int, address: tuple[str, int], session: str, size: int) -> dict[str, Any]:
    """Send a file and fetch it again; return the peaks of memory."""
    facts: dict[str, Any] = {"large file whose memory is measured, MiB": size // MIB}
    for way in ("up", "down"):
        for each in (pid, *_members(session)):
            Path(f"/proc/{each}/clear_refs").write_text("5")  # the peak begins anew (proc_pid_clear_refs(5))
        idle_mib = _peak_mib(pid)
        _, client_mib = _transfer(way, address, _large(session), size)
        facts[f"large file {way}, peak of the client, MiB"] = client_mib
        facts[f"large file {way}, peak of the daemon, MiB"] = _peak_mib(pid)
        facts[f"large file {way}, growth of the daemon, MiB"] = _peak_mib(pid) - idle_mib
        init, *others = _peaks(session)
        facts[f"large file {way}, peak of PID 1, MiB"] = init
        facts[f"large file {way}, peak of a file worker, MiB"] = max(others)
    return facts


def measure_sparse(client: daemon.Client, address: tuple[str, int], session: str, size: int) -> dict[str, Any]:
    """Fetch a file of nothing but a hole, and send as many zeros."""
    path = f"/v1/sessions/{session}/fs/file?path=sparse"
    client.call("POST", f"/v1/sessions/{session}/exec", {"cmd": f"rm -f large; truncate -s {size} sparse"})
    rates = {way: round(size / _transfer(way, address, path, size)[0] / 1e6) for way in ("down", "up")}
    client.call("POST", f"/v1/sessions/{session}/exec", {"cmd": "rm sparse"})
    return {"sparse file, MiB": size // MIB, **{f"sparse file {way}, MB/s": rate for way, rate in rates.items()}}


def _transfer(way: str, address: tuple[str, int], path: str, size: int) -> tuple[float, int]:
    """Have another process send or fetch a file; return the seconds, and the process's peak in MiB."""
    command = [sys.executable, "-m", "bench.files", way, address[0], str(address[1]), path, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TRANSFER_S)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    seconds, peak_mib = json.loads(done.stdout)
    return seconds, peak_mib


@contextmanager
def _plain(way: str, path: Path, size: int) -> Iterator[tuple[str, int]]:
    """Serve one connection in a process of its own: write what comes to a file, or send the file."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pid = os.fork()
        if pid == 0:
            _serve_plain(server, way, path, size)
        yield server.getsockname()
    os.waitpid(pid, 0)


def _serve_plain(server: socket.socket, way: str, path: Path, size: int) -> None:
    connection, _ = server.accept()
    with path.open("wb" if way == "up" else "rb", buffering=0) as file:
        if way == "up":
            _drain(connection, size, file)
            connection.sendall(b"HTTP/1.1 201\r\n\r\n")
        else:
            while piece := file.read(PIECE_BYTES):
                connection.sendall(piece)
    os._exit(0)


def _drain(connection: socket.socket, size: int, file: io.RawIOBase | None = None) -> None:
    """Receive a number of bytes, into a file if there is one."""
    room = memoryview(bytearray(PIECE_BYTES))
    while size:
        piece = room[: connection.recv_into(room[: min(size, PIECE_BYTES)])]
        if not piece:
            raise ConnectionError("the file ended early")
        size -= len(piece)
        if file is not None:
            file.write(piece)


def _members(session: str) -> list[int]:
    """Return the pids of a session's processes that are PID 1 or forks of it, PID 1 first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_ours = session in (entry / "cgroup").read_text()
                if is_ours and (entry / "comm").read_text() == "sandkasten-init\n":
                    found.append(int(entry.name))
            except OSError:
                continue  # the process ended meanwhile
    return sorted(found)


def _peaks(session: str) -> list[int]:
    return [_peak_mib(pid) for pid in _members(session)]


def _peak_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def _archive(names: list[str], content: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


# The client of one large file -----------------------------------------------------------------------------------------


def main() -> None:
    """Send or fetch a file, and print the seconds and the peak of this process. Without a path the socket is plain."""
    way, host, port, path, size = *sys.argv[1:5], int(sys.argv[5])
    with socket.create_connection((host, int(port))) as connection:
        began = time.perf_counter()
        if path:
            method = "PUT" if way == "up" else "GET"
            length = f"Content-Length: {size}\r\n" if way == "up" else ""
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {daemon.KEY}\r\n{length}\r\n"
            connection.sendall(head.encode())
        if way == "up":
            for start in range(0, size, PIECE_BYTES):
                connection.sendall(BLOCK[: min(PIECE_BYTES, size - start)])
        if path or way == "up":
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += connection.recv(1)
            if not answer.startswith(b"HTTP/1.1 2"):
                raise RuntimeError(answer.decode())
        if way == "down":
            _drain(connection, size)
        seconds = time.perf_counter() - began
    print(json.dumps([seconds, _peak_mib(os.getpid())]))


if __name__ == "__main__":
    main()
