"""The child of `sandkasten image pull` that speaks to the registry. It has given root away before this is imported."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

import attrs
import trio

from sandkasten.admission.budget import disk_floor_bytes
from sandkasten.config import Config, ConfigError
from sandkasten.crash import Crash
from sandkasten.host.paths import DataPaths, credentials_file
from sandkasten.images.registry.blobs import Blobs
from sandkasten.images.registry.client import RegistryClient
from sandkasten.images.registry.credentials import Credentials, read_credentials
from sandkasten.images.registry.documents import Platform
from sandkasten.images.registry.pulling import NewImage, Pull
from sandkasten.images.registry.reference import Reference
from sandkasten.model.errors import SandkastenError, leaf_of
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

    async def unpack_layer(self, blob_fd: int, diff_id: str) -> None:
        """See `PullTarget`."""
        await self._ask({"kind": "unpack", "layer": diff_id}, [blob_fd])

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
        self._phases, self._next_show = phases, now + _SHOW_S
        rows = [(each.layer, each.done_bytes, each.total_bytes, each.phase) for each in layers]
        self.tell(kind="progress", layers=rows)

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
    store = ParentStore(sock)
    try:
        store.tell(kind="done", digest=trio.run(_pull, store, config, reference, platform, name, replace))
    except (SandkastenError, ConfigError, OSError) as error:
        store.tell(kind="failed", code=getattr(error, "code", SandkastenError.code), message=str(error))


async def _pull(
    store: ParentStore, config: Config, reference: Reference, platform: Platform, name: str, replace: bool
) -> str:
    path = credentials_file(config)
    client = RegistryClient(
        reference.registry, config.images, credentials_of=lambda registry: read_credentials(path, registry)
    )
    blobs = Blobs(DataPaths(config.data_dir).blobs, floor_bytes=disk_floor_bytes(config.data_dir, config.disk))
    try:
        blobs.sweep(config.images.part_keep_hours * 3600)
        work = Pull(
            reference=reference,
            name=name,
            platform=platform,
            client=client,
            store=store,
            blobs=blobs,
            settings=config.images,
            replace=replace,
            on_progress=store.show,
            crash=Crash(config.testing.crash_at),
        )
        return (await work.run()).digest
    finally:
        await client.aclose()


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
