"""An nsinit and the PID 1s of any number of sandboxes, in the test's own process: they answer, and build nothing.

Real are the daemon's whole tree, its database and both wire contracts; what is not there is the kernel's part. A
teardown takes its time, so that many at once are seen.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from nsinit.wire import protocol
from sandkasten.host.paths import RUNNER_SOCKET, DataPaths
from sandkasten.links.fds import OwnedFd
from sandkasten.links.processes import ChildProcess
from tests.fakes.files import ScriptedFiles
from tests.fakes.runner import Script, ScriptedRun, ScriptedRunner

TEARDOWN_S = 0.005
_SCAN = 64


class FakeNsinit:
    """Sandboxes that run; `peak` is how many teardowns were under way at a time.

    `identities` are those that ran before. `script` gives each command its script by its text; `runners` are the PID 1s
    of the sandboxes that were built, by session.
    """

    def __init__(self, data_dir: Path, identities: dict[str, protocol.Identity], nursery: trio.Nursery) -> None:
        self._paths = DataPaths(data_dir)
        self._cgroups = data_dir / "cgroups"
        self._files, self._workspaces, self._drafts = data_dir / "files", data_dir / "workspaces", data_dir / "drafts"
        self._alive = dict(identities)
        self._nursery = nursery
        self._lives: dict[str, socket.socket] = {}
        self._watched: dict[str, socket.socket] = {}
        self._listeners: dict[str, trio.CancelScope] = {}
        self._numbers = itertools.count(len(identities) + 2)
        self._under_way = 0
        self.peak = 0
        self.torn_down: list[str] = []
        self.plans: list[protocol.SandboxPlan] = []
        self.quotas: dict[str, protocol.DiskLimits] = {}
        """Quotas of workspaces, by workspace."""
        self.requests: list[object] = []
        self.refusals: dict[type, protocol.Failed] = {}
        """Answers, by type of request: the next request of that type is refused with the answer instead of being done.
        """
        self.adoption_gates: dict[str, trio.Event] = {}
        """By session, events to wait for before its sandbox is handed over to another daemon."""
        self.disk_refused: dict[str, str] = {}
        """Why sessions have no disk limits here, by mechanism."""
        self.frozen: set[str] = set()
        self.oom_kills = protocol.OomKills(0, "")
        self.scripts: dict[str, Script] = {}
        self.runners: dict[str, ScriptedRunner] = {}
        self.runs: list[ScriptedRun] = []
        """Of all sandboxes, in the order in which they were begun."""
        self.run_opened = trio.Event()

    async def start(self) -> ChildProcess:
        """A `StartNsinit`."""
        for directory in (self._workspaces, self._drafts):
            directory.mkdir(exist_ok=True)
        await self._serve_runners()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._nursery.start_soon(self._serve, trio.socket.from_stdlib_socket(theirs))
        return ChildProcess(ours)

    async def kill(self, session_id: str) -> None:
        """End a sandbox's PID 1 as if by itself."""
        await self.runners[session_id].die()
        self._lives.pop(session_id).close()

    def count(self, session_id: str, counters: dict[str, str]) -> None:
        """Change counters of a session's cgroup, by the names of their files."""
        self._write_counters(self._cgroups / session_id, counters)

    def workspace(self, workspace_id: str, *, draft: bool = False) -> Path:
        """Return the directory of a persistent workspace."""
        return (self._drafts if draft else self._workspaces) / workspace_id

    async def _serve(self, sock: trio.socket.SocketType) -> None:
        with sock:
            while data := await sock.recv(protocol.MAX_DATAGRAM_BYTES):
                self._nursery.start_soon(self._answer, sock, protocol.REQUESTS.decode(data))

    async def _answer(self, sock: trio.socket.SocketType, request: Any) -> None:
        self.requests.append(request)
        fds: list[OwnedFd] = []
        refusal = self.refusals.pop(type(request), None)
        answer = await self._do(request, fds) if refusal is None else replace(refusal, seq=request.seq)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(fd.fileno().to_bytes(4, "little") for fd in fds))]
        try:
            await sock.sendmsg([protocol.ANSWERS.encode(answer)], rights if fds else [])
        except OSError:
            return  # nobody listens any more
        finally:
            for fd in fds:
                fd.close()

    async def _do(self, request: Any, fds: list[OwnedFd]) -> object:
        match request:
            case protocol.Start(seq=seq):
                self._write_counters(self._cgroups, {"memory.current": "8192", "pids.current": "4"})
                directories = dict.fromkeys(("unified", "memory", "cpu", "pids"), str(self._cgroups))
                disk: protocol.DiskMode = "none" if self.disk_refused else "project"
                return protocol.Ready(seq, os.getpid(), "v2", directories, disk=disk, disk_refused=self.disk_refused)
            case protocol.Scan(seq, after):
                return self._scan(seq, after)
            case protocol.Build(seq, plan):
                place = plan.workspace_id and self.workspace(plan.workspace_id, draft=plan.workspace_draft)
                if place and not place.exists():
                    if plan.image_kind == "files":
                        return protocol.Failed(seq, "workspace", str(place), errno.ENOENT, "there is none")
                    place.mkdir()
                self._alive[plan.session_id] = identity = protocol.Identity(next(self._numbers), 1, 1, 0)
                await self._build(plan, place or None)
                fds.append(self._life(plan.session_id))
                return protocol.Built(seq, plan.session_id, identity, "none", {"clone": 100})
            case protocol.Adopt(seq, session_id):
                if (gate := self.adoption_gates.get(session_id)) is not None:
                    await gate.wait()
                fds.append(self._life(session_id))
                return protocol.Adopted(seq, session_id, self._alive[session_id], "none")
            case protocol.Teardown(seq, session_id):
                await self._tear_down(session_id)
                return protocol.TornDown(seq, session_id, 0, 0, 0)
            case protocol.SetFrozen(seq, session_id, frozen):
                (self.frozen.add if frozen else self.frozen.discard)(session_id)
                return protocol.Ok(seq)
            case protocol.MakeRunCgroup(seq):
                fds.append(OwnedFd(os.open("/dev/null", os.O_RDONLY)))
                return protocol.RunCgroupMade(seq, "clone")
            case protocol.FindOomKills(seq):
                return replace(self.oom_kills, seq=seq)
            case protocol.AskDisk(seq):
                return protocol.DiskUse(seq, 4096, -1, 1, -1)
            case protocol.ListWorkspaces(seq, after):
                later = sorted(each.name for each in self._workspaces.iterdir() if each.name > after)
                return protocol.WorkspacesListed(seq, tuple(later[:_SCAN]), more=len(later) > _SCAN)
            case protocol.AskQuota(seq, workspace_id):
                return protocol.QuotaFound(seq, self.quotas.get(workspace_id))
            case protocol.MakeWorkspace(seq, workspace_id, draft, quota):
                self.workspace(workspace_id, draft=draft).mkdir(exist_ok=True)
                if quota is not None and not draft:
                    self.quotas[workspace_id] = quota
            case protocol.GrowWorkspace(seq, workspace_id, size_bytes):
                self.quotas[workspace_id] = replace(self.quotas[workspace_id], size_bytes=size_bytes)
            case protocol.PublishWorkspace(seq, workspace_id, may_replace):
                place = self.workspace(workspace_id)
                if place.exists() and not may_replace:
                    return protocol.Failed(seq, "publish", str(place), errno.EEXIST, "there is one")
                shutil.rmtree(place, ignore_errors=True)
                self.workspace(workspace_id, draft=True).rename(place)
            case protocol.DiscardWorkspace(seq, workspace_id, draft):
                shutil.rmtree(self.workspace(workspace_id, draft=draft), ignore_errors=True)
                if not draft:
                    self.quotas.pop(workspace_id, None)
            case protocol.DeleteImage(seq):
                return protocol.Ok(seq)
            case protocol.CollectLayers(seq):
                return protocol.LayersCollected(seq, 0, 0)
            case protocol.FindLeftovers(seq):
                return protocol.LeftoversFound(seq, ())
            case protocol.Prepare() | protocol.MountImage():
                return protocol.Failed(request.seq, "fake", "", 0, "nothing is made beforehand here")
        return protocol.Ok(request.seq)

    def _life(self, session_id: str) -> OwnedFd:
        """Return what becomes readable when a sandbox's PID 1 dies, as its pidfd does; of one found, it never does."""
        if session_id not in self.runners:
            return OwnedFd(os.pidfd_open(os.getpid()))
        if session_id in self._lives:  # another daemon attaches
            return OwnedFd(os.dup(self._watched[session_id].fileno()))
        ours, theirs = socket.socketpair()
        self._lives[session_id], self._watched[session_id] = theirs, ours
        return OwnedFd(os.dup(ours.fileno()))

    def _scan(self, seq: int, after: str) -> protocol.Scanned:
        later = sorted(session_id for session_id in self._alive if session_id > after)
        found = (protocol.Found(each, self._alive[each], has_cgroup=True, has_files=True) for each in later[:_SCAN])
        return protocol.Scanned(seq, tuple(found), more=len(later) > _SCAN)

    async def _build(self, plan: protocol.SandboxPlan, workspace: Path | None) -> None:
        self.plans.append(plan)
        self._write_counters(self._cgroups / plan.session_id, _counters(plan.limits))
        is_files = plan.image_kind == "files"
        files = ScriptedFiles(self._files / plan.session_id, workspace, files_only=is_files)
        runner = self.runners[plan.session_id] = ScriptedRunner(self._nursery, files, self._script_of, self._note_run)
        run_dir = self._paths.run_dir(plan.session_id)
        run_dir.mkdir(parents=True)
        sock = await _bound(run_dir, RUNNER_SOCKET)
        sock.listen(16)
        self._listeners[plan.session_id] = scope = trio.CancelScope()
        self._nursery.start_soon(_listen, scope, sock, runner)

    def _write_counters(self, directory: Path, counters: dict[str, str]) -> None:
        """Write plain files where the kernel has a cgroup's."""
        directory.mkdir(exist_ok=True)
        for name, text in counters.items():
            (directory / name).write_text(f"{text}\n")

    def _script_of(self, command: str) -> Script:
        return self.scripts.get(command, Script())

    def _note_run(self, run: ScriptedRun) -> None:
        self.runs.append(run)
        self.run_opened.set()

    async def _tear_down(self, session_id: str) -> None:
        self._under_way += 1
        self.peak = max(self.peak, self._under_way)
        await trio.sleep(TEARDOWN_S)
        self._under_way -= 1
        self._alive.pop(session_id, None)
        self.torn_down.append(session_id)
        if session_id in self._listeners:
            self._listeners.pop(session_id).cancel()
            await self.runners[session_id].die()
            shutil.rmtree(self._cgroups / session_id)
            shutil.rmtree(self._files / session_id, ignore_errors=True)
            shutil.rmtree(self._paths.run_dir(session_id), ignore_errors=True)
        for ends in (self._lives, self._watched):
            if session_id in ends:
                ends.pop(session_id).close()

    async def _serve_runners(self) -> None:
        """One socket with a name in the directory of every session that ran before."""
        directory = self._paths.root / "runners"
        strangers = self._alive.keys() - self.runners.keys()
        if not strangers or directory.exists():
            return
        directory.mkdir()
        sock = await _bound(directory, "all")
        sock.listen(4096)
        for session_id in strangers:
            self._paths.run_dir(session_id).mkdir(parents=True)
            (self._paths.run_dir(session_id) / RUNNER_SOCKET).hardlink_to(directory / "all")
        runner = ScriptedRunner(self._nursery, ScriptedFiles(self._files))
        self._nursery.start_soon(_listen, trio.CancelScope(), sock, runner)


async def _bound(directory: Path, name: str) -> trio.socket.SocketType:
    """Return a socket with a name in a directory, whose own path may be longer than the 107 bytes of unix(7)."""
    directory_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    sock = trio.socket.socket(socket.AF_UNIX)
    try:
        await sock.bind(f"/proc/self/fd/{directory_fd}/{name}")
    finally:
        os.close(directory_fd)
    return sock


async def _listen(scope: trio.CancelScope, sock: trio.socket.SocketType, runner: ScriptedRunner) -> None:
    with scope:
        await trio.serve_listeners(runner.serve, [trio.SocketListener(sock)])


def _counters(limits: protocol.Limits) -> dict[str, str]:
    """Return the counters of a session's cgroup v2 that used little."""
    return {
        "memory.current": "1024",
        "memory.peak": "2048",
        "memory.max": str(limits.memory_bytes),
        "memory.events": "oom_kill 0",
        "memory.pressure": "some avg10=0.50 avg60=0.10 avg300=0.00 total=7",
        "cpu.stat": "usage_usec 99\nnr_periods 1\nnr_throttled 0\nthrottled_usec 0",
        "cpu.max": f"{limits.cpu_quota_us} {limits.cpu_period_us}",
        "pids.current": "2",
        "pids.max": str(limits.pids),
        "pids.events": "max 0",
    }


def identities_of(session_ids: Sequence[str]) -> dict[str, protocol.Identity]:
    """Return who the PID 1 of each is."""
    return {session_id: protocol.Identity(number, 1, number, 0) for number, session_id in enumerate(session_ids, 2)}
