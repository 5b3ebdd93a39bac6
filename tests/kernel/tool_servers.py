"""Servers that package managers, git and clients of databases speak to: handlers for `tests/kernel/world.py`.

Those of git and ssh are the real ones, where the machine has them. Sources: git-http-backend(1), git-daemon(1),
sshd(8), sshd_config(5); PEP 503; PostgreSQL manual, "Message Flow" and "Message Formats"; Redis serialization protocol.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import socket
import ssl
import struct
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests import debian
from tests.kernel.world import Handler

Reply = tuple[int, Mapping[str, str], bytes]

_SSL_REQUEST = struct.pack("!II", 8, 80877103)
_GREETING = "installed"
_AS_SSHD_WANTS = (  # sshd(8), FILES: an empty directory, and a user without privileges
    "mount -t tmpfs -o mode=755 none /run && mkdir /run/sshd && grep -v ^sshd: /etc/passwd > /run/passwd && "
    "echo sshd:x:65530:65534::/run/sshd:/usr/sbin/nologin >> /run/passwd && "
    'mount --bind /run/passwd /etc/passwd && exec "$@"'
)


class Authority:
    """A certificate authority of the test's own, and one certificate for names of its servers."""

    def __init__(self, directory: Path, *names: str) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl")
        ca, ca_key, leaf, key = (str(directory / name) for name in ("ca.pem", "ca.key", "leaf.pem", "leaf.key"))
        new: tuple[str, ...] = ("openssl", "req", "-x509", "-days", "2", "-nodes", "-newkey", "ec", "-pkeyopt")
        new += ("ec_paramgen_curve:prime256v1", "-subj", "/CN=a test", "-addext")
        _run(*new, "keyUsage=critical,keyCertSign", "-keyout", ca_key, "-out", ca)
        alternatives = "subjectAltName=" + ",".join(f"DNS:{name}" for name in names)
        sign = ("-CA", ca, "-CAkey", ca_key, "-addext", "basicConstraints=critical,CA:FALSE")
        _run(*new, alternatives, *sign, "-keyout", key, "-out", leaf)
        self.certificate = Path(ca).read_text()
        self._pair = leaf, key

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._pair)
        return context

    def wrapped(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return the server's end of TLS on a connection."""
        return self._new_context().wrap_socket(connection, server_side=True)

    def by_name(self, handlers: Mapping[str, Handler]) -> Handler:
        """Return a server that has another handler for each server name."""

        def handle(connection: socket.socket) -> None:
            asked: list[str] = []
            context = self._new_context()
            context.sni_callback = lambda _socket, name, _context: asked.append(name)
            with context.wrap_socket(connection, server_side=True) as stream:
                handlers[asked[0]](stream)

        return handle

    def over_tls(self, handle: Handler) -> Handler:
        """Return a server that speaks TLS first."""

        def wrap_and_handle(connection: socket.socket) -> None:
            with self.wrapped(connection) as stream:
                handle(stream)

        return wrap_and_handle


def _run(*command: str, **settings: str) -> None:
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **settings})


# HTTP ---------------------------------------------------------------------------------------------------------------


def site(reply: Callable[[BaseHTTPRequestHandler], Reply]) -> Handler:
    """Return a server of HTTP/1.1 with connections that stay open."""

    class Exchange(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = reply(self)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_POST = do_HEAD = do_GET  # noqa: N815 - names of the standard library's

        def log_message(self, *_: object) -> None:
            pass

    return lambda connection: Exchange(connection, ("", 0), None)  # type: ignore[arg-type]


def files(tree: Mapping[str, bytes]) -> Handler:
    """Return a site of these paths and bytes."""

    def reply(exchange: BaseHTTPRequestHandler) -> Reply:
        body = tree.get(exchange.path)
        kind = "text/html" if exchange.path.endswith("/") else "application/octet-stream"
        return (404, {}, b"") if body is None else (200, {"Content-Type": kind}, body)

    return site(reply)


def python_index() -> Handler:
    """Return a package index with the one package `greeter`."""
    name, info = "greeter-1-py3-none-any.whl", "greeter-1.dist-info"
    parts = {
        "greeter.py": f"WORD = {_GREETING!r}\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: greeter\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    parts[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in (*parts, f"{info}/RECORD"))
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in parts.items():
            archive.writestr(path, text)
    return files({"/simple/greeter/": f'<a href="/{name}">{name}</a>'.encode(), f"/{name}": wheel.getvalue()})


def npm_registry(origin: str) -> Handler:
    """Return a registry with the one package `greeter`; `origin` is the URL that it is reached by."""
    manifest = {"name": "greeter", "version": "1.0.0", "main": "index.js"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        contents = {"package.json": json.dumps(manifest), "index.js": f"module.exports = {_GREETING!r}"}
        for name, text in contents.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    tarball = packed.getvalue()
    digest = base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    path = "/greeter/-/greeter-1.0.0.tgz"
    version = {**manifest, "dist": {"tarball": f"{origin}{path}", "integrity": f"sha512-{digest}"}}
    document = {"name": "greeter", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    return files({"/greeter": json.dumps(document).encode(), path: tarball})


def debian_archive(directory: Path) -> Handler:
    """Return a flat archive, without signatures, with the one package `greeter`."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("needs dpkg-deb")
    tree, package = directory / "tree", directory / "greeter.deb"
    (tree / "DEBIAN").mkdir(parents=True, exist_ok=True)
    (tree / "usr/bin").mkdir(parents=True)
    control = (
        "Package: greeter\nVersion: 1\nArchitecture: all\nMaintainer: Nobody <nobody@example.org>\n"
        "Description: says a word\n"
    )
    (tree / "DEBIAN/control").write_text(control)
    (tree / "usr/bin/greeter").write_text(f"#!/bin/sh\necho {_GREETING}\n")
    (tree / "usr/bin/greeter").chmod(0o755)
    _run("dpkg-deb", "--root-owner-group", "--build", str(tree), str(package))
    data = package.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    index = f"{control}Filename: ./greeter.deb\nSize: {len(data)}\nSHA256: {digest}\n"
    return files({"/./Packages": index.encode(), "/Packages": index.encode(), "/./greeter.deb": data,
                  "/greeter.deb": data})  # fmt: skip


# Git ----------------------------------------------------------------------------------------------------------------


def git_repository(directory: Path) -> Path:
    """Make the repository `greeter.git` with one commit in a directory, which is returned."""
    repository = str(directory / "greeter.git")
    _run("git", "init", "-q", "--bare", "-b", "main", repository)
    _run("git", "-C", repository, "config", "http.receivepack", "true")
    tree = directory / "tree"
    _run("git", "init", "-q", "-b", "main", str(tree))
    (tree / "word").write_text(f"{_GREETING}\n")
    _run("git", "-C", str(tree), "add", "word")
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    _run("git", "-C", str(tree), *who, "commit", "-q", "-m", "a word")
    _run("git", "-C", str(tree), "push", "-q", repository, "main")
    return directory


def git_over_http(root: Path) -> Handler:
    """Return git's own server of HTTP, over the repositories below `root`."""

    def reply(exchange: BaseHTTPRequestHandler) -> Reply:
        path, _, query = exchange.path.partition("?")
        headers = exchange.headers
        settings = {
            "GIT_PROJECT_ROOT": str(root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REQUEST_METHOD": exchange.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REMOTE_USER": "nobody",
            "CONTENT_TYPE": headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": headers.get("Git-Protocol", ""),
        }
        body = exchange.rfile.read(int(headers.get("Content-Length", "0")))
        answer = subprocess.run(
            ["git", "http-backend"], input=body, env={**os.environ, **settings}, stdout=subprocess.PIPE, check=True
        ).stdout
        head, _, content = answer.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        return int(fields.pop("Status", "200").split()[0]), fields, content

    return site(reply)


def program(*command: str) -> Handler:
    """Return a server that is a program of its own for each connection, which is its standard input and output."""

    def handle(connection: socket.socket) -> None:
        subprocess.run(command, stdin=connection.fileno(), stdout=connection.fileno(), check=False)

    return handle


def git_daemon(root: Path) -> Handler:
    """Return git's own server of git://."""
    return program("git", "daemon", "--inetd", "--export-all", f"--base-path={root}", str(root))


def ssh_server(directory: Path) -> tuple[Handler, str, str]:
    """Return a server that lets root in by a key, with that key and the line of `known_hosts` for `git.example`."""
    sshd, libraries = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin"), ""
    if sshd is None:
        try:
            sshd = str(debian.program("openssh-server", "usr/sbin/sshd"))
            libraries = str(debian.program("libwrap0", f"usr/lib/{os.uname().machine}-linux-gnu"))
        except debian.Unavailable as reason:
            pytest.skip(f"needs sshd on this machine: {reason}")
    for name in ("host", "user"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(directory / name))
    settings = {
        "HostKey": directory / "host",
        "AuthorizedKeysFile": directory / "user.pub",
        "PermitRootLogin": "yes",
        "StrictModes": "no",
        "UsePAM": "no",
        "PrintMotd": "no",
    }
    (directory / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    command = ("env", f"LD_LIBRARY_PATH={libraries}", sshd, "-i", "-f", str(directory / "sshd_config"))
    handler = program("unshare", "-m", "sh", "-c", _AS_SSHD_WANTS, "sh", *command)
    return handler, (directory / "user").read_text(), f"git.example {(directory / 'host.pub').read_text()}"


# Databases ----------------------------------------------------------------------------------------------------------


def postgres(authority: Authority) -> Handler:
    """Return a server of PostgreSQL's protocol that insists on TLS and answers each query with one word."""

    def handle(connection: socket.socket) -> None:
        while (request := _exactly(connection, 8)) != _SSL_REQUEST:  # the client may ask for GSSAPI first
            assert request[:4] == _SSL_REQUEST[:4], "a start without TLS"
            connection.sendall(b"N")
        connection.sendall(b"S")
        with authority.wrapped(connection) as stream:
            _answer_queries(stream)

    return handle


def _answer_queries(stream: socket.socket) -> None:
    _exactly(stream, int.from_bytes(_exactly(stream, 4), "big") - 4)
    ready = _message(b"Z", b"I")
    stream.sendall(_message(b"R", bytes(4)) + ready)
    column = b"word\0" + struct.pack("!IhIhih", 0, 0, 25, -1, -1, 0)
    word = _GREETING.encode()
    row = struct.pack("!hI", 1, len(word)) + word
    answer = _message(b"T", struct.pack("!h", 1) + column) + _message(b"D", row) + _message(b"C", b"SELECT 1\0")
    while _exactly(stream, 1) == b"Q":
        _exactly(stream, int.from_bytes(_exactly(stream, 4), "big") - 4)
        stream.sendall(answer + ready)


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data


def redis(connection: socket.socket) -> None:
    """Answer commands of Redis, those on one line too: PING, and none else."""
    with connection.makefile("rwb") as stream:
        while line := stream.readline():
            words = line.split()
            if line.startswith(b"*"):
                words = [stream.read(int(stream.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            stream.write(b"+PONG\r\n" if words[0].upper() == b"PING" else b"-ERR unknown command\r\n")
            stream.flush()
