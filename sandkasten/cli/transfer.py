"""`sandkasten cp | port`: files and directories, and TCP connections, between here and a session.

`port` needs no route of the server's: each connection is a process inside, a relay of a few lines, whose input and
output are the connection. It needs python3 or bash in the image; with bash alone, a client that closes only its own
side of the connection is not told to the server inside. So it works with a server anywhere, and only its key lets in;
`--publish` carries without a process inside, and listens on the server's machine, for whoever is there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tarfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sandkasten.cli.client import BAD_ARGUMENTS, FAULT, LAST, add_client_options, add_session, find_session, verb
from sandkasten.cli.common import Stop, printable_line
from sandkasten.cli.output import Progress, print_json, print_table, tell, write_held
from sandkasten.cli.runs import kill, port_pair

if TYPE_CHECKING:
    from anyio.abc import SocketStream

    from sandkasten.sdk import FileStream, Run, SandboxClient, Session
    from sandkasten.sdk.types import FileInfo, Preview, UnpackedArchive

_PLACE = re.compile(r"(?P<session>|[^/:.][^/:]*):(?P<path>.*)", re.DOTALL)
"""A path in a session; without a name the last one used, since a word that begins with - would be an option."""
_PIPE = "-"
_PUBLISHED_S = 300
"""Seconds for which a port is published at a time."""
_CLOSE_S = 5.0


# cp


def add_cp(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Copy a file or a directory. One side is SESSION:PATH (:PATH in the last session used), the other a path here, "
        "or - for a tar on standard input or output. A directory goes into one that is there, and takes the new name "
        "otherwise; DIR/. is what is in DIR."
    )
    parser.add_argument("source", metavar="SRC", help="SESSION:PATH, PATH or -")
    parser.add_argument("target", metavar="DST", help="SESSION:PATH, PATH or -")
    parser.add_argument("-u", "--user", metavar="USER", help="user inside, such as root")
    add_client_options(parser)
    parser.set_defaults(command=verb(cp))


async def cp(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Copy into a session, or out of one."""
    source, target = _PLACE.fullmatch(arguments.source), _PLACE.fullmatch(arguments.target)
    if (source is None) == (target is None):
        raise Stop("one of SRC and DST must be SESSION:PATH; a path here with a colon is written ./PATH", BAD_ARGUMENTS)
    progress = Progress(arguments.source, is_off=arguments.json)
    with contextlib.closing(progress):
        if target is not None:
            session = await find_session(client, target["session"] or LAST)
            path = await _into(session, arguments.source, target["path"] or ".", arguments.user, progress)
        else:
            assert source is not None
            session = await find_session(client, source["session"] or LAST)
            path = await _out_of(session, source["path"] or ".", arguments.target, arguments.user, progress)
    if arguments.json and arguments.target != _PIPE:
        print_json({"path": path, "bytes": progress.moved})
    return 0


async def _into(session: Session, source: str, target: str, user: str | None, progress: Progress) -> str:
    if source == _PIPE:
        _say_skipped(await session.files.unpack(pipe(), target, user=user, progress=progress), progress)
        return target
    name, is_content = _local_name(source)
    there = await _remote(session, target, user)
    if target.endswith("/") or (there is not None and there.is_dir and not is_content):
        target = f"{target.rstrip('/')}/{name}"
    await session.files.copy_in(Path(source), target, user=user, progress=progress)
    return target


def _local_name(source: str) -> tuple[str, bool]:
    """Return the name of a file or directory, and whether the content of the directory is meant. Raises `Stop`."""
    path = Path(source)
    if not path.exists():
        raise Stop(f"there is no {printable_line(source)}", FAULT)
    return path.resolve().name, path.is_dir() and _means_content(source)


def _means_content(path: str) -> bool:
    return path == "." or path.endswith("/.")


async def _out_of(session: Session, source: str, target: str, user: str | None, progress: Progress) -> str:
    found = await _remote(session, source, user)
    if found is None:
        raise Stop(f"there is no {printable_line(source)} in session {session.id}", FAULT)
    if target == _PIPE:
        if found.is_dir:
            async with session.files.archive(source, user=user) as stream:
                await save(stream, _PIPE, progress)
        else:
            async with session.files.open(source, user=user) as stream:
                await _save_as_tar(stream, found, _name_of(source), progress)
        return _PIPE
    target = _local_target(target, source)
    _say_skipped(await session.files.copy_out(source, target, user=user, progress=progress), progress)
    return target


def _say_skipped(made: UnpackedArchive, progress: Progress) -> None:
    if made.skipped:
        progress.close()
        tell(f"{made.skipped} left out: what is neither a file, a directory nor a link, or leads out of the directory")


def _local_target(target: str, source: str) -> str:
    """Return what a copy is called here. A directory that exists here receives the copy, unless content is meant."""
    if _means_content(source) or not (target.endswith("/") or os.path.isdir(target)):
        return target
    return os.path.join(target, _name_of(source))


def _name_of(source: str) -> str:
    """Return the name in a path as the person typed it: a link in the session could give another. Raises `Stop`."""
    name = os.path.basename(source.rstrip("/"))
    if name in ("", ".", ".."):
        raise Stop(f"{printable_line(source)} has no name to be copied under: give DST one", BAD_ARGUMENTS)
    return name


async def _remote(session: Session, path: str, user: str | None) -> FileInfo | None:
    from sandkasten import errors

    try:
        return await session.files.stat(path, follow=True, user=user)
    except errors.FileNotFound:
        return None


async def pipe() -> AsyncIterator[bytes]:
    """Yield what comes on standard input."""
    from sandkasten.cli.terminal import IN, read_some

    while data := await read_some(IN):
        yield data


async def save(stream: AsyncIterator[bytes], file: str, progress: Progress) -> int:
    """Write pieces to standard output (`-`), or to a file that takes its name when it is whole; return their bytes.

    Raises:
        Stop: standard output is a terminal.
        OSError: the file can't be written.
    """
    from sandkasten.cli.terminal import OUT, write_all
    from sandkasten.sdk import files

    if file == _PIPE and os.isatty(OUT):
        raise Stop("standard output is a terminal, and this is an archive: send it to a file", BAD_ARGUMENTS)
    with contextlib.closing(progress):
        pieces = files.counted(stream, progress)
        if file != _PIPE:
            await files.save(pieces, Path(file), None)
        else:
            async for data in pieces:
                await write_all(OUT, data)
    return progress.moved


async def _save_as_tar(stream: FileStream, info: FileInfo, name: str, progress: Progress) -> None:
    """Write a file to standard output as a tar with one member."""
    from sandkasten.sdk.archives import MODE_BITS

    member = tarfile.TarInfo(name)
    member.size, member.mode = info.size, int(info.mode, 8) & MODE_BITS

    async def pieces() -> AsyncIterator[bytes]:
        yield member.tobuf(tarfile.PAX_FORMAT)
        left = info.size
        async for data in stream:
            if len(data) > left:
                break
            left -= len(data)
            yield data
        if left:
            raise Stop(f"{printable_line(info.path)} changed while it was read", FAULT)
        yield bytes(-info.size % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)

    await save(pieces(), _PIPE, progress)


# port


def add_port(parser: argparse.ArgumentParser) -> None:
    add_session(parser)
    parser.add_argument("ports", nargs="*", metavar="[LOCAL:]REMOTE", help="without any: list what listens")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--preview", action="store_true", help="print a URL for each REMOTE instead, for an hour")
    way.add_argument("--publish", action="store_true", help="listen on the server's machine instead, until ^C")
    parser.add_argument("--address", default="127.0.0.1", metavar="HOST", help="where to listen (127.0.0.1)")
    add_client_options(parser)
    parser.set_defaults(command=verb(port))


async def port(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Forward ports until ^C, publish or open previews of them, or list those on which a session listens."""
    wanted = [port_pair(each) for each in arguments.ports]
    session = await find_session(client, arguments.session)
    if arguments.preview:
        if any(local != remote for local, remote in wanted) or not wanted:
            raise Stop("--preview takes ports of the session: REMOTE…", BAD_ARGUMENTS)
        for _, remote in wanted:
            opened = await session.preview(remote)
            if arguments.json:
                print_json({"port": remote, "url": opened.link, "expires_at": opened.expires_at})
            else:
                print(opened.link)
        return 0
    if not wanted:
        found = await session.ports()
        if arguments.json:
            for each in found:
                print_json(each)
        else:
            print_table(("PORT", "ADDRESS"), [(each.port, each.address) for each in found])
        return 0

    if arguments.publish:
        return await _publish(arguments, session, wanted)

    import anyio

    async with anyio.create_task_group() as tasks:
        for local, remote in wanted:
            try:
                listener = await anyio.create_tcp_listener(local_host=arguments.address, local_port=local)
            except OSError as error:
                raise Stop(f"can't listen on {arguments.address}:{local}: {error.strerror or error}", FAULT) from None
            bound = listener.extra(anyio.abc.SocketAttribute.local_port)
            if arguments.json:
                print_json({"address": arguments.address, "local": bound, "remote": remote})
            else:
                print(f"{arguments.address}:{bound} leads to port {remote} of {printable_line(session.id)}")
            await write_held()
            relay = _Forwarding(session, remote)
            tasks.start_soon(listener.serve, relay.carry)
    return 0


async def _publish(arguments: argparse.Namespace, session: Session, wanted: Sequence[tuple[int, int]]) -> int:
    """Publish ports until ^C; they end by themselves soon after this program, if it can't close them."""
    import anyio

    from sandkasten import errors

    opened: dict[int, Preview] = {}
    try:
        for local, remote in wanted:
            made = opened[remote] = await session.preview(
                remote, access="local", host_port=local, ttl_seconds=_PUBLISHED_S
            )
            if arguments.json:
                print_json({"url": made.url, "local": made.host_port, "remote": remote})
            else:
                print(f"{made.url} on the server's machine leads to port {remote} of {printable_line(session.id)}")
            await write_held()
        while True:
            await anyio.sleep(_PUBLISHED_S / 3)
            for remote, made in opened.items():
                await session.preview(remote, access="local", host_port=made.host_port, ttl_seconds=_PUBLISHED_S)
    finally:
        with anyio.move_on_after(_CLOSE_S, shield=True), contextlib.suppress(errors.SandkastenError):
            for remote in opened:
                await session.close_preview(remote)


_PYTHON_RELAY = """\
import os, socket, sys, threading
reasons = []
for host in ("127.0.0.1", "::1"):
    try:
        link = socket.create_connection((host, int(sys.argv[1])))
        break
    except OSError as error:
        reasons.append(error.strerror)
else:
    sys.exit(reasons[0])
def up():
    while data := os.read(0, 65536):
        link.sendall(data)
    link.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := link.recv(65536):
    while data:
        data = data[os.write(1, data):]
"""
_BASH_RELAY = 'exec 3<>"/dev/tcp/127.0.0.1/$1" || exit; cat >&3 & exec cat <&3'
_RELAY = """\
command -v python3 >/dev/null && exec python3 -c "$1" "$3"
command -v bash >/dev/null && exec bash -c "$2" bash "$3"
echo "the image has neither python3 nor bash, one of which port needs" >&2
exit 127
"""


class _Forwarding:
    """Connections to one port of a session."""

    def __init__(self, session: Session, remote: int) -> None:
        self._session, self._remote = session, remote

    async def carry(self, stream: SocketStream) -> None:
        """Carry one connection until both sides have ended, or either is gone."""
        import anyio

        from sandkasten import errors

        argv = ["sh", "-c", _RELAY, "relay", _PYTHON_RELAY, _BASH_RELAY, str(self._remote)]
        try:
            async with stream:
                run = await self._session.process(argv, raw=True, merged=False)
                try:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._up, stream, run)
                        await self._down(stream, run)
                        tasks.cancel_scope.cancel()
                finally:
                    await kill(run)
        except* errors.SandkastenError as group:
            for error in group.exceptions:
                tell(f"port {self._remote}: {error}")
        except* (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the local side is gone

    async def _up(self, stream: SocketStream, run: Run) -> None:
        import anyio

        from sandkasten import errors

        with contextlib.suppress(errors.ExecEnded):
            with contextlib.suppress(anyio.EndOfStream):
                while True:
                    await run.send(await stream.receive())
            await run.close_input()

    async def _down(self, stream: SocketStream, run: Run) -> None:
        async with run:
            async for piece in run:
                assert isinstance(piece.data, bytes)
                if piece.stream == "stdout":
                    await stream.send(piece.data)
                else:
                    said = piece.data.decode("utf-8", "replace").strip()
                    tell(f"port {self._remote}: {said}")
