"""The child of `sandkasten image pull | import` that reads what strangers made: what a registry says, and archives. It
has given root away before this is imported."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import trio

from sandkasten.admission.budget import disk_floor_bytes
from sandkasten.config import Config, ConfigError
from sandkasten.crash import Crash
from sandkasten.errors import SandkastenError, leaf_of
from sandkasten.host.paths import DataPaths, credentials_file
from sandkasten.images.archive_source import ArchiveImport
from sandkasten.images.registry.blobs import Blobs
from sandkasten.images.registry.client import RegistryClient
from sandkasten.images.registry.credentials import Credentials, read_credentials
from sandkasten.images.registry.documents import Platform
from sandkasten.images.registry.pulling import NewImage, Pull, PullTerms
from sandkasten.images.registry.reference import Reference
from sandkasten.images.registry.source import RegistrySource
from sandkasten.model.job import LayerPhase, LayerProgress

_MESSAGE_BYTES = 1 << 20
_SHOW_S = 0.1


class ParentStore:
    """A `pulling.PullTarget` of the process at the other end of a socket. It answers one request at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._turn = sock, trio.Lock()
        self._phases: Sequence[LayerPhase] = ()
        self._next_show = 0.0

    async def has_layer(self, diff_id: str) -> bool:
        """See `PullTarget`."""
        return bool((await self._ask({"kind": "has", "layer": diff_id}))["has"])

    async def unpack_layer(self, blob_fd: int, diff_id: str) -> str:
        """See `PullTarget`."""
        return str((await self._ask({"kind": "unpack", "layer": diff_id}, [blob_fd]))["layer"])

    async def publish_image(self, image: NewImage) -> None:
        """See `PullTarget`."""
        await self._ask({"kind": "publish", "image": attrs.asdict(image)})

    def tell(self, **said: Any) -> None:  # JSON values
        """Say something that has no answer."""
        self._sock.send(json.dumps(said).encode())

    def show(self, layers: Sequence[LayerProgress]) -> None:
        """Tell the progress of the layers."""
        phases, now = [each.phase for each in layers], trio.current_time()
        if phases == self._phases and now < self._next_show:
            return
        rows = [(each.layer, each.done_bytes, each.total_bytes, each.phase) for each in layers]
        said = json.dumps({"kind": "progress", "layers": rows}).encode()
        # While the other process unpacks a layer, it reads nothing: downloads go on, and a later look tells of them.
        with contextlib.suppress(BlockingIOError):
            self._sock.send(said, socket.MSG_DONTWAIT)
            self._phases, self._next_show = phases, now + _SHOW_S

    async def _ask(self, said: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:  # JSON values
        async with self._turn:
            socket.send_fds(self._sock, [json.dumps(said).encode()], fds)
            await trio.lowlevel.wait_readable(self._sock)
            answer: dict[str, Any] = json.loads(self._sock.recv(_MESSAGE_BYTES) or b'{"code": ""}')
        if "code" in answer:
            raise (leaf_of(answer["code"]) or SandkastenError)(answer.get("message", "the other process has ended"))
        return answer


def pull_in_child(
    sock: socket.socket, config: Config, reference: Reference, platform: Platform, name: str, *, replace: bool
) -> None:
    """Pull, and tell the other process how it ended."""

    async def work(store: ParentStore, blobs: Blobs) -> None:
        path = credentials_file(config)
        client = RegistryClient(
            reference.registry, config.images, credentials_of=lambda registry: read_credentials(path, registry)
        )
        try:
            pull = Pull(RegistrySource(reference, client, blobs), _terms(config, store, name, platform, replace))
            store.tell(kind="done", digest=(await pull.run()).digest)
        finally:
            await client.aclose()

    _work(sock, config, work)


def _terms(config: Config, store: ParentStore, name: str, platform: Platform, replace: bool) -> PullTerms:
    return PullTerms(
        name=name,
        platform=platform,
        store=store,
        settings=config.images,
        replace=replace,
        on_progress=store.show,
        crash=Crash(config.testing.crash_at),
    )


def import_in_child(
    sock: socket.socket,
    config: Config,
    fd: int,
    title: str,
    ref: str | None,
    name: str,
    platform: Platform,
    *,
    replace: bool,
) -> None:
    """Import an archive of images, and tell the other process how it ended, or that the file is no such archive. An
    empty name is the archive's."""

    async def work(store: ParentStore, blobs: Blobs) -> None:
        importing = ArchiveImport(fd, title, ref, blobs, _terms(config, store, name, platform, replace))
        async with importing.opened() as archive:
            if archive is None:
                store.tell(kind="rootfs")
            else:
                store.tell(kind="done", digest=(await importing.pull(archive).run()).digest)

    _work(sock, config, work)


def _work(sock: socket.socket, config: Config, work: Callable[[ParentStore, Blobs], Awaitable[None]]) -> None:
    store = ParentStore(sock)
    blobs = Blobs(DataPaths(config.data_dir).blobs, floor_bytes=disk_floor_bytes(config.data_dir, config.disk))
    try:
        blobs.sweep(config.images.part_keep_hours * 3600)
        trio.run(work, store, blobs)
    except (SandkastenError, ConfigError, OSError) as error:
        store.tell(kind="failed", code=getattr(error, "code", SandkastenError.code), message=str(error))


def check_in_child(sock: socket.socket, config: Config, registry: str, credentials: Credentials) -> None:
    """Ask a registry whether it takes the credentials, and tell the other process: an empty object if so."""
    answer = {}
    try:
        trio.run(_check, config, registry, credentials)
    except SandkastenError as error:
        answer = {"code": error.code, "message": error.message}
    sock.send(json.dumps(answer).encode())


async def _check(config: Config, registry: str, credentials: Credentials) -> None:
    client = RegistryClient(registry, config.images, credentials_of=lambda _: credentials)
    try:
        await client.check_login()
    finally:
        await client.aclose()
