"""An nsinit and the PID 1s of any number of sandboxes, in the test's own process: they answer, and build nothing.

Real are the daemon's whole tree, its database and both wire contracts; what is not there is the kernel's part. A
teardown takes its time, so that many at once are seen.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import trio

from nsinit.wire import protocol
from runner.wire import protocol as runner_protocol
from sandkasten.host.paths import RUNNER_SOCKET, DataPaths
from sandkasten.links.fds import OwnedFd
from sandkasten.links.nsinit import NsinitProcess

TEARDOWN_S = 0.005
_SCAN = 64
_READ_BYTES = 64 * 1024


class FakeNsinit:
    """Sandboxes that run; `peak` is how many teardowns were under way at a time."""

    def __init__(self, data_dir: Path, identities: dict[str, protocol.Identity], nursery: trio.Nursery) -> None:
        self._paths = DataPaths(data_dir)
        self._alive = dict(identities)
        self._nursery = nursery
        self._under_way = 0
        self.peak = 0
        self.torn_down: list[str] = []

    async def start(self) -> NsinitProcess:
        """A `StartNsinit`."""
        await self._serve_runners()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._nursery.start_soon(self._serve, trio.socket.from_stdlib_socket(theirs))
        return NsinitProcess(ours)

    async def _serve(self, sock: trio.socket.SocketType) -> None:
        with sock:
            while data := await sock.recv(protocol.MAX_DATAGRAM_BYTES):
                self._nursery.start_soon(self._answer, sock, protocol.REQUESTS.decode(data))

    async def _answer(self, sock: trio.socket.SocketType, request: object) -> None:
        fds: list[OwnedFd] = []
        match request:
            case protocol.Start(seq=seq):
                answer: object = protocol.Ready(seq, os.getpid(), "v2", {})
            case protocol.Scan(seq, after):
                answer = self._scan(seq, after)
            case protocol.Attach(seq, session_id):
                fds.append(OwnedFd(os.pidfd_open(os.getpid())))  # of one that does not die
                answer = protocol.Attached(seq, session_id, self._alive[session_id], "none")
            case protocol.Teardown(seq, session_id):
                await self._tear_down(session_id)
                answer = protocol.TornDown(seq, session_id, 0, 0, 0)
            case protocol.ListWorkspaces(seq):
                answer = protocol.WorkspacesListed(seq, ())
            case _:
                answer = protocol.Failed(request.seq, "fake", "", 0, "not here")  # type: ignore[attr-defined]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(fd.fileno().to_bytes(4, "little") for fd in fds))]
        try:
            await sock.sendmsg([protocol.ANSWERS.encode(answer)], rights if fds else [])
        except OSError:
            return  # nobody listens any more
        finally:
            for fd in fds:
                fd.close()

    def _scan(self, seq: int, after: str) -> protocol.Scanned:
        later = sorted(session_id for session_id in self._alive if session_id > after)
        found = (protocol.Found(each, self._alive[each], has_cgroup=True, has_files=True) for each in later[:_SCAN])
        return protocol.Scanned(seq, tuple(found), more=len(later) > _SCAN)

    async def _tear_down(self, session_id: str) -> None:
        self._under_way += 1
        self.peak = max(self.peak, self._under_way)
        await trio.sleep(TEARDOWN_S)
        self._under_way -= 1
        self._alive.pop(session_id, None)
        self.torn_down.append(session_id)

    async def _serve_runners(self) -> None:
        """One socket with a name in the directory of every session."""
        directory = self._paths.root / "runners"
        directory.mkdir()
        sock = trio.socket.socket(socket.AF_UNIX)
        await sock.bind(str(directory / "all"))
        sock.listen(4096)
        for session_id in self._alive:
            self._paths.run_dir(session_id).mkdir(parents=True)
            (self._paths.run_dir(session_id) / RUNNER_SOCKET).hardlink_to(directory / "all")
        self._nursery.start_soon(trio.serve_listeners, _serve_runner, [trio.SocketListener(sock)])


async def _serve_runner(stream: trio.SocketStream) -> None:
    decoder = runner_protocol.FrameDecoder(runner_protocol.FROM_DAEMON, max_body_bytes=runner_protocol.MAX_FRAME_BYTES)
    try:
        async with stream:
            while data := await stream.receive_some(_READ_BYTES):
                decoder.feed(data)
                for _kind, body in decoder:
                    await stream.send_all(_reply(runner_protocol.REQUESTS.decode(body)))
    except trio.BrokenResourceError:
        return  # its session has ended


def _reply(request: object) -> bytes:
    match request:
        case runner_protocol.Hello():
            answer: object = runner_protocol.HelloReply("/bin/sh", "/workspace", (), runner_protocol.PROTOCOL_VERSION)
        case runner_protocol.ListRuns():
            answer = runner_protocol.RunList((), more=False)
        case _:
            answer = runner_protocol.Done()
    return runner_protocol.encode_frame(runner_protocol.Kind.REPLY, runner_protocol.ANSWERS.encode(answer))


def identities_of(session_ids: Sequence[str]) -> dict[str, protocol.Identity]:
    """Return who the PID 1 of each is."""
    return {session_id: protocol.Identity(number, 1, number, 0) for number, session_id in enumerate(session_ids, 2)}
