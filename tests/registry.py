"""A registry of the tests' own, on loopback, that can be made to lie: it answers in raw HTTP/1.1, one connection each.

`Registry.answer` is asked first for each request; None leaves it to what was pushed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import ssl
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from sandkasten.config import ImagesSettings
from sandkasten.errors import DigestMismatch
from sandkasten.images.registry.documents import Platform
from sandkasten.images.registry.pulling import NewImage

_TLS_HANDSHAKE = 22
"""First byte of a client that begins TLS (RFC 8446 §5.1)."""

REPOSITORY = "team/image"


@attrs.frozen
class Asked:
    """A request: its path with the query, and its headers by names in lower case."""

    path: str
    headers: Mapping[str, str]


@attrs.frozen
class Said:
    """An answer. `length`: what Content-Length says, None for the truth; `cut`: bytes of the body that are sent before
    the connection is reset; `endless`: the body is sent again and again, after each pause of `pause_s`; `hold`: the
    connection is left open."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = attrs.field(factory=dict)
    length: int | None = None
    cut: int | None = None
    endless: bool = False
    hold: bool = False
    pause_s: float = 0.0


def digest_of(data: bytes) -> str:
    """Return the digest of a blob."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def layer(files: Mapping[str, bytes]) -> bytes:
    """Return a tar archive of some files."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return target.getvalue()


@attrs.define(eq=False)
class Registry:
    """Content of the server, and requests that it saw."""

    port: int = 0
    blobs: dict[str, bytes] = attrs.field(factory=dict)
    manifests: dict[str, bytes] = attrs.field(factory=dict)
    asked: list[Asked] = attrs.field(factory=list)
    answer: Callable[[Asked], Said | None] = lambda _: None
    tls: ssl.SSLContext | None = None

    @property
    def name(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    def reference(self, target: str = ":latest") -> str:
        """Return the reference of the image that was pushed."""
        return f"{self.name}/{REPOSITORY}{target}"

    def push(
        self,
        layers: Sequence[bytes],
        *,
        tag: str = "latest",
        platform: Platform | None = None,
        contents: Sequence[bytes] | None = None,
    ) -> str:
        """Take an image of layers, whose uncompressed `contents` are the same unless they are given; return the digest
        of its manifest."""
        own = platform or Platform.own()
        diff_ids = [digest_of(each) for each in contents or layers]
        config: dict[str, Any] = {**attrs.asdict(own), "rootfs": {"diff_ids": diff_ids}}
        config["config"] = {"Env": ["PATH=/bin", "A=b=c"], "Cmd": ["/bin/sh"], "WorkingDir": "/srv"}
        return self.push_manifest(self.add(json.dumps(config).encode()), [self.add(each) for each in layers], tag)

    def push_manifest(self, config: Mapping[str, Any], layers: Sequence[Mapping[str, Any]], tag: str) -> str:
        """Take a manifest; return its digest."""
        return self.put(json.dumps({"schemaVersion": 2, "config": config, "layers": layers}).encode(), tag)

    def put(self, document: bytes, tag: str) -> str:
        """Take a document under its digest and a tag; return the digest."""
        digest = digest_of(document)
        self.manifests[digest] = self.manifests[tag] = document
        return digest

    def add(self, data: bytes) -> dict[str, Any]:
        """Take a blob; return its descriptor."""
        digest = digest_of(data)
        self.blobs[digest] = data
        return {"digest": digest, "size": len(data)}

    def count(self, part: str) -> int:
        """Return the number of requests whose path contains `part`."""
        return sum(part in each.path for each in self.asked)

    def honest(self, asked: Asked) -> Said:
        """Return the answer of a registry that does as the specification says."""
        path = asked.path.partition("?")[0]
        if path == "/v2/":
            return Said(200, b"{}")
        _, _, kind_and_name = path.rpartition(f"/v2/{REPOSITORY}/")
        kind, _, name = kind_and_name.partition("/")
        data = (self.manifests if kind == "manifests" else self.blobs).get(name)
        if data is None:
            code = "MANIFEST_UNKNOWN" if kind == "manifests" else "BLOB_UNKNOWN"
            return Said(404, json.dumps({"errors": [{"code": code, "message": "secret text"}]}).encode())
        if kind == "manifests":
            return Said(200, data, {"docker-content-digest": digest_of(data)})
        if match := re.fullmatch(r"bytes=([0-9]+)-", asked.headers.get("range", "")):
            first = int(match[1])
            if first >= len(data):
                return Said(416)
            return Said(206, data[first:], {"content-range": f"bytes {first}-{len(data) - 1}/{len(data)}"})
        return Said(200, data)

    async def serve(self, plain: trio.SocketStream) -> None:
        """Answer one connection."""
        stream: trio.abc.Stream = plain
        if self.tls is not None:
            stream = trio.SSLStream(plain, self.tls, server_side=True, https_compatible=True)
        async with stream:
            try:
                head = b""
                while b"\r\n\r\n" not in head:
                    piece = await stream.receive_some(65536)
                    if not piece or piece[0] == _TLS_HANDSHAKE:
                        return
                    head += piece
                first, *lines = head.decode("latin-1").split("\r\n\r\n")[0].split("\r\n")
                fields = dict(line.lower().split(": ", 1)[:1] + line.split(": ", 1)[1:] for line in lines)
                asked = Asked(first.split()[1], fields)
                self.asked.append(asked)
                await _say(stream, self.answer(asked) or self.honest(asked))
            except trio.BrokenResourceError:
                return


async def _say(stream: trio.abc.Stream, said: Said) -> None:
    headers = {"connection": "close", **said.headers}
    if not said.endless:
        headers["content-length"] = str(len(said.body) if said.length is None else said.length)
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    await stream.send_all(f"HTTP/1.1 {said.status} Word\r\n{head}\r\n".encode("latin-1"))
    body = said.body if said.cut is None else said.body[: said.cut]
    await stream.send_all(body)
    while said.endless:
        await trio.sleep(said.pause_s)
        await stream.send_all(said.body)
    while said.hold and await stream.receive_some(1):
        pass


@asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[Registry]:
    """Serve a registry on a port of loopback."""
    registry = Registry()
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
        registry.port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, registry.serve, [listener])
        yield registry
        nursery.cancel_scope.cancel()


def settings_of(**fields: Any) -> ImagesSettings:
    """Return settings with these fields."""
    return ImagesSettings(**fields)


@attrs.define(eq=False)
class MemoryStore:
    """A store of layers for tests of pulls alone: it hashes what it is given, as the jail does."""

    layers: dict[str, bytes] = attrs.field(factory=dict)
    images: dict[str, NewImage] = attrs.field(factory=dict)

    async def has_layer(self, diff_id: str) -> bool:
        return diff_id in self.layers

    async def unpack_layer(self, blob_fd: int, diff_id: str) -> str:
        data = await trio.to_thread.run_sync(lambda: b"".join(iter(lambda: os.read(blob_fd, 1 << 20), b"")))
        if digest_of(data) != (diff_id or digest_of(data)):
            raise DigestMismatch("the layer is another one")
        self.layers[digest_of(data)] = data
        return digest_of(data)

    async def publish_image(self, image: NewImage) -> None:
        assert set(image.layers) <= self.layers.keys()
        self.images[image.name] = image
