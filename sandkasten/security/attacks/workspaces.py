"""Attacks on the files of workspaces, while a program in a session of the same workspace changes them.

The daemon lists, reads, writes, removes, packs and unpacks these files without a session, in a sandbox that serves
them. The attacks try that sandbox, and through it the host. A refusal must be an error that says so.

Sources: openat2(2), renameat2(2) RENAME_EXCHANGE, CVE descriptions, tar(5).
"""

from __future__ import annotations

import io
import os
import secrets
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import trio

from runner.wire.protocol import Done, ListFiles, Listing, Pack, Packed, RemoveFile
from sandkasten.errors import ClientError, PermissionDenied, SandboxError, SandkastenError, WorkInterrupted
from sandkasten.security.attacks.archives import HOSTILE, Member, find_wrong, make_tar, tree
from sandkasten.security.attacks.field import Field
from sandkasten.security.attacks.files import EXCHANGE, changed
from sandkasten.security.probes.attempt import CANARY, Answers, Attempt, NotApplicable, attempt, collect

_MAX_BYTES = 1 << 20
_ROUNDS = 12
_ROUNDS_S = 6.0
"""Seconds of each race; a slow machine makes fewer rounds."""
_HARMLESS = ("refused", "harmless")
_OWN = "own files or refused"
_FLIP = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
os.chdir("/workspace")
def mend():
    there = [name for name in ("flip", "flop") if os.path.lexists(name)]
    for name in {"flip", "flop"} - set(there):
        if any(os.path.islink(each) for each in there):
            os.mkdir(name)
            open(f"{name}/own", "w").write("mine")
        else:
            os.symlink(TARGET, name)
        return
while True:
    try:
        mend()
    except OSError:
        pass
    libc.renameat2(-100, b"flip", -100, b"flop", 2)
    time.sleep(0)
"""
"""Program that exchanges a directory and a symbolic link for ever, and makes removed ones again."""
_RESIZE = """
import os, tarfile
forged = tarfile.TarInfo("evil").tobuf() * 1024
fd = os.open("/workspace/data", os.O_CREAT | os.O_RDWR, 0o644)
while True:
    os.ftruncate(fd, 0)
    os.pwrite(fd, forged[: 512 * (os.getpid() % 7 + 1)], 0)
    os.pwrite(fd, forged, 0)
"""
"""Program whose file grows and shrinks, and holds headers of an archive."""
_SPECIAL = """
import os, socket
os.chdir("/workspace")
os.mkfifo("fifo")
os.symlink("/dev/zero", "zero")
os.symlink("loop", "loop")
socket.socket(socket.AF_UNIX).bind("socket")
open("own", "w").write("mine")
os.mkdir("closed", 0)
"""
_DEEP = """
import os
os.chdir("/workspace")
for _ in range(1200):
    os.mkdir("d" * 20)
    os.chdir("d" * 20)
"""


@asynccontextmanager
async def new_workspace(field: Field) -> AsyncIterator[str]:
    """Make a workspace for the block, deleted afterwards with its sessions; yield its id.

    Raises:
        NotApplicable: this installation has no workspaces.
    """
    if not field.config.workspace.enabled:
        raise NotApplicable("workspaces are switched off")
    workspace_id = f"attack-{secrets.token_hex(4)}"
    try:
        yield workspace_id
    finally:
        with trio.move_on_after(30 * field.patience, shield=True):
            try:
                await field.supervisor.delete_workspace(workspace_id, force=True)
            except SandkastenError:
                pass  # the workspace was never made


async def _beside(field: Field, program: str, waits_for: str, work: Callable[[str], Awaitable[str]]) -> Answers:
    """Repeat some work on a workspace beside a program that changes its files."""
    seen: set[str] = set()
    rounds = 0
    async with (
        new_workspace(field) as workspace_id,
        field.session(workspace_id=workspace_id) as session_id,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_run, field, session_id, program)
        with trio.move_on_after(5 * field.patience):
            while waits_for not in await _names(field, workspace_id):  # noqa: ASYNC110 - made by a program inside
                await trio.sleep(0.01)
        give_up_at = trio.current_time() + _ROUNDS_S * field.patience
        while rounds < _ROUNDS and (not rounds or trio.current_time() < give_up_at):
            try:
                seen.add(await work(workspace_id))
            except SandkastenError as error:
                seen.add(_OWN if _is_refusal(error) else f"{type(error).__name__}: {error}")
            rounds += 1
        nursery.cancel_scope.cancel()
    odd = sorted(seen - {_OWN}) + changed(field.outside)
    return {f"{rounds} times": ", ".join(odd) or _OWN}


def _is_refusal(error: SandkastenError) -> bool:
    """Whether an error is about the files, and not about the sandbox that serves them."""
    return isinstance(error, ClientError | WorkInterrupted) or type(error) is SandboxError


async def _run(field: Field, session_id: str, program: str) -> None:
    await field.python(session_id, program.replace("TARGET", repr(str(field.outside))), timeout_s=20)


async def _names(field: Field, workspace_id: str, path: str = ".") -> set[str]:
    listing = await field.supervisor.workspace_files(workspace_id).ask(ListFiles(path), Listing)
    return {each.name for each in listing.entries}


async def _read(field: Field, workspace_id: str, path: str) -> bytes:
    async with field.supervisor.workspace_files(workspace_id).open_read(path, max_bytes=_MAX_BYTES) as reader:
        return b"".join([piece async for piece in reader])


async def _write(field: Field, workspace_id: str, path: str) -> None:
    """Write a file, unless refused: files of the session's root are not the daemon's to replace."""
    try:
        async with field.supervisor.workspace_files(workspace_id, make=True).open_write(path) as writer:
            await writer.send(b"evil")
            await writer.commit()
    except PermissionDenied:
        pass


async def _pack(field: Field, workspace_id: str) -> bytes:
    async with field.supervisor.workspace_files(workspace_id).stream(Pack(".")) as stream:
        archive = b"".join([piece async for piece in stream])
        await stream.answer(Packed)
    return archive


async def _remove(field: Field, workspace_id: str, path: str) -> None:
    await field.supervisor.workspace_files(workspace_id).ask(RemoveFile(path, recursive=True), Done, patience_s=600)


@attempt("workspaces.list-race", "exchange a directory for a link while it is listed", "CVE-2018-15664", (_OWN,))
async def race_list(field: Field) -> Answers:
    async def work(workspace_id: str) -> str:
        names = await _names(field, workspace_id, "flip")
        return _OWN if names <= {"own"} else f"listed {', '.join(sorted(names))}"

    return await _beside(field, _FLIP, "flop", work)


@attempt("workspaces.read-race", "exchange a directory for a link while it is read from", "CVE-2018-15664", (_OWN,))
async def race_read(field: Field) -> Answers:
    async def work(workspace_id: str) -> str:
        content = await _read(field, workspace_id, "flip/secret")
        return "read the host's file" if CANARY.encode() in content else _OWN

    return await _beside(field, _FLIP, "flop", work)


@attempt("workspaces.write-race", "exchange a directory for a link while it is written to", "CVE-2021-30465", (_OWN,))
async def race_write(field: Field) -> Answers:
    async def work(workspace_id: str) -> str:
        await _write(field, workspace_id, "flip/secret")
        return _OWN

    return await _beside(field, _FLIP, "flop", work)


@attempt("workspaces.remove-race", "exchange a directory for a link while it is removed", "CVE-2022-21658", (_OWN,))
async def race_remove(field: Field) -> Answers:
    """A removal that looks first and enters by name afterwards would empty the link's target."""

    async def work(workspace_id: str) -> str:
        await _remove(field, workspace_id, "flip")
        return _OWN

    return await _beside(field, _FLIP, "flop", work)


@attempt("workspaces.export-race", "exchange a directory for a link while it is packed", "CVE-2018-15664", (_OWN,))
async def race_export(field: Field) -> Answers:
    async def work(workspace_id: str) -> str:
        packed = await _pack(field, workspace_id)
        names = _members(packed)
        is_own = names <= {"flip", "flop", "flip/own", "flop/own"} and CANARY.encode() not in packed
        return _OWN if is_own else f"packed {', '.join(sorted(names))}"

    return await _beside(field, _FLIP, "flop", work)


@attempt(
    "workspaces.export-forgery",
    "smuggle members into an archive by a file that grows while it is packed",
    "CWE-367",
    (_OWN,),
)
async def forge_export(field: Field) -> Answers:
    async def work(workspace_id: str) -> str:
        names = _members(await _pack(field, workspace_id))
        return _OWN if names <= {"data"} else f"packed {', '.join(sorted(names))}"

    return await _beside(field, _RESIZE, "data", work)


def _members(packed: bytes) -> set[str]:
    """Return the names in an archive, which must be complete."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        return {each.name for each in archive.getmembers()}


@attempt("workspaces.hard-link-race", "have a write go through a hard link", "CWE-62", ("unchanged",))
async def race_hard_link(field: Field) -> Answers:
    """Race: the written name is, every other moment, that of a file which must not change."""
    async with new_workspace(field) as workspace_id, field.session(workspace_id=workspace_id) as session_id:
        await field.run(session_id, "cd /workspace; echo first > kept; echo mine > flop; ln kept flip")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_run, field, session_id, EXCHANGE)
            for _ in range(_ROUNDS):
                await _write(field, workspace_id, "flip")
            nursery.cancel_scope.cancel()
        kept = await _read(field, workspace_id, "kept")
    return {f"{_ROUNDS} writes": "unchanged" if kept == b"first\n" else f"{kept[:20]!r}"}


@attempt(
    "workspaces.special",
    "hang what serves the files with a FIFO, a socket, endless devices and links",
    "denial of service",
    ("refused", "left out", "counted", "answers"),
)
async def serve_special(field: Field) -> Answers:
    async with new_workspace(field) as workspace_id, field.session(workspace_id=workspace_id) as session_id:
        await field.python(session_id, _SPECIAL)
        answers = {}
        for path in ("fifo", "zero", "loop", "socket", "closed/x", "fifo/x"):
            try:
                answers[path] = f"{len(await _read(field, workspace_id, path))} bytes"
            except SandkastenError as error:
                answers[path] = "refused" if _is_refusal(error) else type(error).__name__
        await field.run(session_id, "rmdir /workspace/closed")
        names = _members(await _pack(field, workspace_id))
        usage = (await field.supervisor.workspace(workspace_id, measure=True)).usage
        return {
            **answers,
            "export": "left out" if names == {"zero", "loop", "own"} else f"packed {', '.join(sorted(names))}",
            "measure": "counted" if usage is not None and usage.complete else "not counted",
            "witness": await field.ask_witness(),
        }


@attempt(
    "workspaces.deep-tree",
    "leave a tree that can be neither measured, packed nor removed",
    "CWE-674",
    ("done", "refused", "answers", "gone"),
)
async def serve_deep_tree(field: Field) -> Answers:
    answers: dict[str, str] = {}
    async with new_workspace(field) as workspace_id:
        async with field.session(workspace_id=workspace_id) as session_id:
            await field.python(session_id, _DEEP)
        supervisor = field.supervisor
        works: dict[str, Callable[[], Awaitable[object]]] = {
            "measure": lambda: supervisor.workspace(workspace_id, measure=True),
            "export": lambda: _pack(field, workspace_id),
            "remove": lambda: _remove(field, workspace_id, "d" * 20),
        }
        for name, work in works.items():
            try:
                await work()
                answers[name] = "done"
            except SandkastenError as error:
                answers[name] = "refused" if _is_refusal(error) else type(error).__name__
        answers["witness"] = await field.ask_witness()
    with trio.move_on_after(5 * field.patience):
        while await trio.to_thread.run_sync(_find_left, field):  # noqa: ASYNC110 - removed by a process that tells nobody
            await trio.sleep(0.02)
        answers["directory"] = "gone"
    return {"directory": "still there", **answers}


def _find_left(field: Field) -> list[str]:
    """Return the directories of workspaces, and those in the trash."""
    return [name for place in ("workspaces", "volumes", "trash") for name in os.listdir(field.config.data_dir / place)]


# Archives that become workspaces ----------------------------------------------------------------------------------


async def _import(field: Field, members: Sequence[Member]) -> Answers:
    before = await trio.to_thread.run_sync(tree, field.outside)
    archive = await trio.to_thread.run_sync(make_tar, members)
    async with new_workspace(field) as workspace_id:
        said = "imported"
        place = field.config.data_dir / "workspaces" / workspace_id
        await trio.Path(place).mkdir()  # one without a quota: what comes in its place can be examined from outside
        try:
            async with field.supervisor.open_unpack(workspace_id, replace=True) as writer:
                await writer.send(archive)
                await writer.commit()
        except SandkastenError as error:
            said = "refused" if _is_refusal(error) else type(error).__name__
        if said == "imported":
            wrong = await trio.to_thread.run_sync(find_wrong, place)
            said = f"left {', '.join(wrong)}" if wrong else await _use(field, workspace_id)
    after = await trio.to_thread.run_sync(tree, field.outside)
    return {"import": said, "outside": "harmless" if after == before else f"changed: {sorted(after)}"}


async def _use(field: Field, workspace_id: str) -> str:
    """Read the unpacked files by a session and by the daemon."""
    async with field.session(workspace_id=workspace_id) as session_id:
        shown = await field.run(session_id, "cd /workspace; cat -- * */* 2>/dev/null | head -c 1000000")
    packed = await _pack(field, workspace_id)
    return "saw the host's file" if CANARY.encode() in shown.stdout + packed else "harmless"


def _attempt(name: str, what: str, stands_for: str, make: Callable[[str], Sequence[Member]]) -> Attempt:
    async def run(field: Field) -> Answers:
        return await _import(field, make(str(field.outside)))

    what = f"import a workspace with {what}"
    return attempt(f"imports.{name}", what, stands_for, _HARMLESS, users=("",))(run)


_OF_IMAGES = ("members", "mount-points", "libraries")
"""Attempts without a meaning where no root file system is made."""
IMPORTS = tuple(_attempt(name, *each) for name, each in HOSTILE.items() if name not in _OF_IMAGES)
WORKSPACES = (*collect(globals()), *IMPORTS)
