"""`sandkasten image pull | login`: by the daemon where one serves that may change images, and else right here, without
root on the network.

Here, a child that has given root away speaks to the registry and keeps the blobs; `image import` has such a child, too.
It asks this process, which stays root, for what a pull needs of the store: each request is one message on a socket
between the two, a layer with the descriptor of its blob. This process trusts the child with nothing but bytes: nsinit's
jail says which layer they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from sandkasten.cli.client import FAULT, INTERRUPTED, is_elsewhere, verb
from sandkasten.cli.common import Stop, load_installed, printable_line, require_root
from sandkasten.cli.output import Progress, print_json, size_text

if TYPE_CHECKING:
    from sandkasten.config import Config
    from sandkasten.images.layers import Layers
    from sandkasten.sdk import SandboxClient
    from sandkasten.sdk.types import JobInfo

_MESSAGE_BYTES = 4 << 20
_CANCEL_S = 10.0
_MAX_PASSWORD_CHARS = 64 << 10
_SO_SNDBUFFORCE = 32
"""Size of a socket's buffer beyond `net.core.wmem_max`, for root (socket(7))."""


def pull(arguments: argparse.Namespace) -> int:
    """Pull an image."""
    if is_elsewhere(arguments) or os.geteuid() != 0:
        return verb(pull_there)(arguments)
    config = load_installed(arguments)
    return verb(pull_there)(arguments) if is_left_to_daemon(config) else _pull_here(arguments, config)


def is_served(config: Config) -> bool:
    """Whether a daemon has the data directory. Raises `Stop` where that can't be found out."""
    from sandkasten.host.leftovers import CantLook, has_daemon

    try:
        return has_daemon(config.data_dir)
    except CantLook as error:
        raise Stop(f"can't find out whether a daemon serves: {error}") from error


def is_left_to_daemon(config: Config) -> bool:
    """Whether a daemon has the data directory, and may change images: one without root may not where `allowed_images`
    is set (`nsinit.wire.launching.Allowance`). Raises `Stop`."""
    from sandkasten.cli.privilege import account_of

    return is_served(config) and (not config.allowed_images or account_of(config).is_root)


class Shown:
    """Progress of a pull for a person: a bar on a terminal, else a line for each layer that is done."""

    def __init__(self, title: str, *, as_json: bool) -> None:
        self._bar, self._as_json = Progress(title, is_off=as_json), as_json
        self._told: set[str] = set()

    def show(self, layers: Sequence[tuple[str, int, int, str]]) -> None:
        """Show layers, each with its digest, the bytes that came, all of them, and its phase."""
        self._bar(sum(each[1] for each in layers), sum(each[2] for each in layers) or None)
        if self._as_json or sys.stderr.isatty():
            return
        for digest, _, total, phase in layers:
            if phase in ("done", "present") and digest not in self._told:
                self._told.add(digest)
                what = "is there" if phase == "present" else size_text(total)
                print(f"{printable_line(digest)[:19]} {what}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the last state."""
        self._bar.close()


async def pull_there(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Have a server pull an image, and wait for it."""
    job = await client.pull_image(
        arguments.reference, name=arguments.name, platform=arguments.platform, replace=arguments.replace
    )
    return await follow(arguments, client, job, arguments.reference)


async def follow(arguments: argparse.Namespace, client: SandboxClient, job: JobInfo, title: str) -> int:
    """Wait for a server's job, and print the image; a verb that is interrupted cancels the job."""
    from sandkasten.sdk import waiting

    shown = Shown(title, as_json=arguments.json)
    try:
        with contextlib.closing(shown):
            async for found in client.follow_job(job.id):
                job = found
                shown.show([(each.layer, each.done_bytes, each.total_bytes, each.phase) for each in job.progress])
    finally:
        if not job.has_ended:
            with waiting.shield(_CANCEL_S):
                await client.cancel_job(job.id)
    if job.error is not None:
        raise Stop(f"{job.error['error_code']}: {job.error['message']}", FAULT)
    return _tell_done(arguments, job.name, job.digest or "")


def _tell_done(arguments: argparse.Namespace, name: str, digest: str) -> int:
    if arguments.json:
        print_json({"name": name, "digest": digest})
    else:
        print(f"{printable_line(name)}: {printable_line(digest)}")
    return 0


# Without a daemon -----------------------------------------------------------------------------------------------------


def _pull_here(arguments: argparse.Namespace, config: Config) -> int:
    from sandkasten.errors import SandkastenError
    from sandkasten.images.catalog import Catalog
    from sandkasten.images.layers import open_store
    from sandkasten.images.registry.documents import Platform
    from sandkasten.images.registry.reference import parse_reference

    require_root()
    shown = Shown(arguments.reference, as_json=arguments.json)
    try:
        reference = parse_reference(arguments.reference)
        platform = Platform.own() if arguments.platform is None else Platform.parse(arguments.platform)
        catalog = Catalog(config.data_dir)
        name = catalog.name_for(reference, arguments.name)
        if not arguments.replace:
            catalog.require_free(name)

        def work(sock: socket.socket) -> None:
            from sandkasten.cli.pull_child import pull_in_child

            pull_in_child(sock, config, reference, platform, name, replace=arguments.replace)

        with (
            without_root(config, work, is_served=is_served(config)) as sock,
            contextlib.closing(shown),
            open_store(config.data_dir) as store,
        ):
            done = serve_child(sock, store, config, name, shown, replace=arguments.replace)
    except SandkastenError as error:
        raise Stop(str(error)) from None
    except KeyboardInterrupt:
        raise Stop("interrupted; the same pull goes on with what came", INTERRUPTED) from None
    return _tell_done(arguments, name, done.digest if done else "")


@contextlib.contextmanager
def without_root(
    config: Config, work: Callable[[socket.socket], None], *, is_served: bool = False
) -> Iterator[socket.socket]:
    """Run `work` in a child that has given root away, with one end of a socket; yield the other. The child is ended
    when the block is left. `is_served`: a daemon has the data directory."""
    from sandkasten.cli.privilege import account_of, give_away
    from sandkasten.config import ConfigError
    from sandkasten.host.data_dir import hand_over, locked
    from sandkasten.host.paths import DataPaths

    account = account_of(config)
    try:
        if not is_served:  # else the daemon's start has done it
            with locked(config.data_dir):
                DataPaths(config.data_dir).blobs.mkdir(mode=0o700, exist_ok=True)
                hand_over(config, account)
    except (ConfigError, OSError) as error:
        raise Stop(str(error)) from None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _MESSAGE_BYTES)
    pid = os.fork()
    if pid == 0:
        status = FAULT
        try:
            ours.close()
            if not account.is_root:
                give_away(config, account)
            work(theirs)
            status = 0
        except Stop as stop:
            stop.tell()
        except KeyboardInterrupt:
            status = INTERRUPTED
        finally:
            os._exit(status)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)  # not reaped yet, so the pid is still the child's
        os.waitpid(pid, 0)


@attrs.frozen
class ImageDone:
    """An image that a child has brought, by the name that it got; `digest` is its manifest's."""

    name: str
    digest: str


def serve_child(
    sock: socket.socket, store: Layers, config: Config, name: str | None, shown: Shown, *, replace: bool
) -> ImageDone | None:
    """Do what the child asks for, up to the end of its work; return what came of it, None where there was no archive of
    images. The name, and whether it may be taken from another image, are the person's choice and not the child's; with
    None the child names a new image.

    Raises:
        SandkastenError: the work failed.
    """
    from sandkasten.admission.budget import disk_floor_bytes
    from sandkasten.errors import InvalidImage, SandkastenError, leaf_of
    from sandkasten.images.catalog import HOST
    from sandkasten.images.layers import MAX_BYTES, MAX_ENTRIES

    reserve_bytes = disk_floor_bytes(config.data_dir, config.disk)
    published = name or ""
    while True:
        data, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 1)
        try:
            if not data:
                raise SandkastenError("the process that reads the image has ended")
            said: dict[str, Any] = json.loads(data)  # JSON values
            answer: dict[str, Any] = {}
            try:
                match said["kind"]:
                    case "progress":
                        shown.show([tuple(each) for each in said["layers"]])
                        continue
                    case "done":
                        return ImageDone(published, str(said["digest"]))
                    case "rootfs":
                        return None
                    case "failed":
                        leaf = leaf_of(said["code"]) or SandkastenError
                        raise leaf(said["message"])
                    case "has":
                        answer["has"] = store.has(said["layer"])
                    case "unpack":
                        bounds = {"max_bytes": MAX_BYTES, "max_entries": MAX_ENTRIES, "reserve_bytes": reserve_bytes}
                        answer["layer"] = store.unpack_layer(fds[0], said["layer"], **bounds).diff_id
                    case "publish":
                        own = name or str(said["image"]["name"])
                        if name is None and (published or own in {HOST, *config.image_aliases}):
                            raise InvalidImage(f"image {own!r} would be taken for another one: give a --name")
                        published = own
                        _publish(store, said["image"], published, replace=replace and name is not None)
            except SandkastenError as error:
                if said["kind"] == "failed":
                    raise
                answer = {"code": error.code, "message": error.message}
            sock.send(json.dumps(answer).encode())
        finally:
            for fd in fds:
                os.close(fd)


def _publish(store: Layers, said: Mapping[str, Any], name: str, *, replace: bool) -> None:
    from sandkasten.images.catalog import check_name
    from sandkasten.model.image import ImageConfig

    check_name(name)
    store.publish_image(
        name,
        layers=said["layers"],
        config=ImageConfig.from_stored(said["config"]),
        digest=said["digest"],
        source=said["source"],
        platform=said["platform"],
        tags=said["tags"],
        replace=replace,
    )


# Names and passwords --------------------------------------------------------------------------------------------------


def login(arguments: argparse.Namespace) -> int:
    """Keep a name and a password for a registry, once the registry has taken them. The password is a line of standard
    input: a command line is seen by everybody on the machine."""
    from sandkasten.cli.privilege import account_of
    from sandkasten.config import ConfigError
    from sandkasten.errors import SandkastenError, leaf_of
    from sandkasten.host.paths import credentials_file
    from sandkasten.images.registry.credentials import Credentials, write_credentials
    from sandkasten.images.registry.reference import parse_reference

    require_root()
    config = load_installed(arguments)
    password = sys.stdin.readline(_MAX_PASSWORD_CHARS).rstrip("\r\n")
    if not password or ":" in arguments.username:
        raise Stop("the password is a line of standard input, and a name has no colon")
    try:
        registry = parse_reference(f"{arguments.registry}/x").registry
        credentials = Credentials(arguments.username, password)

        def work(sock: socket.socket) -> None:
            from sandkasten.cli.pull_child import check_in_child

            check_in_child(sock, config, registry, credentials)

        with without_root(config, work) as sock:
            answer = json.loads(sock.recv(_MESSAGE_BYTES) or b'{"code": "", "message": "the check of it has ended"}')
        if answer:
            raise (leaf_of(answer["code"]) or SandkastenError)(answer["message"])
        account = account_of(config)
        write_credentials(credentials_file(config), registry, credentials, owner=(account.uid, account.gid))
    except (SandkastenError, ConfigError) as error:
        raise Stop(str(error)) from None
    print(f"{registry}: logged in as {printable_line(arguments.username)}")
    return 0
