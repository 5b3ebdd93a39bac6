"""File rules of a session: where its commands may write, and where from they may read and execute."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace

import pytest

from nsinit.kernel import landlock
from runner.wire.protocol import (
    BeginUpload,
    CopyFile,
    Done,
    EditFiles,
    FileRequest,
    GetFile,
    ListFiles,
    MakeDirectory,
    MoveFile,
    Pack,
    PutFile,
    RemoveFile,
    SearchFiles,
    Unpack,
    ViewFile,
)
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.errors import InvalidRequest, PermissionDenied
from sandkasten.model import ExecSpec, FileRules, SessionSpec
from tests.file_requests import listed, looked_at, read, refusal_of, written

ABI = landlock.probe_abi()
needs_rules = pytest.mark.skipif(ABI < landlock.FILES_ABI, reason=f"needs Landlock ABI 3, not {ABI}")

TRY = """
touch made 2>/dev/null && echo made; echo x 2>/dev/null >> kept && echo written; : 2>/dev/null > kept && echo emptied
mkdir d 2>/dev/null && echo directory; mv kept moved 2>/dev/null && echo moved
rm -f kept moved 2>/dev/null && echo removed
"""


async def output(supervisor: LocalSupervisor, session_id: str, command: str, **how: object) -> list[str]:
    result = await supervisor.exec(session_id, ExecSpec(command, **how))  # type: ignore[arg-type]
    return result.output.decode().split()


@needs_rules
@pytest.mark.parametrize("user", [None, "root"])
async def test_commands_write_only_where_it_is_allowed(supervisor: LocalSupervisor, user: str | None) -> None:
    """Making, changing, emptying, renaming and removing files work below the writable paths and nowhere else, root or
    not.
    """
    await written(supervisor.workspace_files("given", make=True), "kept", b"content")
    rules = FileRules(writable=("/tmp",))
    session = await supervisor.create(SessionSpec(filesystem=rules, user=user, workspace_id="given"))
    all_of_it = ["made", "written", "emptied", "directory", "moved", "removed"]
    assert await output(supervisor, session.id, f"cd /tmp; echo > kept; {TRY}") == all_of_it
    for how in ({}, {"stateless": True}):
        assert await output(supervisor, session.id, f"cd /workspace; {TRY} cat kept", **how) == ["content"]
    assert await output(supervisor, session.id, "mv /tmp/d /workspace/ 2>/dev/null; ls /workspace") == ["kept"]
    assert await output(
        supervisor, session.id, "echo > /dev/null; echo x > /dev/stdout; head -c1 /dev/zero | wc -c"
    ) == [
        *("x", "1"),
    ]
    await supervisor.destroy(session.id)


@needs_rules
async def test_commands_read_and_execute_only_where_it_is_allowed(supervisor: LocalSupervisor) -> None:
    """Writable paths are readable too; a link from an allowed path to a forbidden one can't be followed."""
    rules = FileRules(readable=("/usr", "/etc/passwd"), writable=("/workspace",))
    session = await supervisor.create(SessionSpec(filesystem=rules))
    script = """
cat /etc/passwd >/dev/null && echo passwd; cat /etc/group 2>/dev/null >/dev/null && echo group
ls /etc 2>/dev/null; ls /tmp 2>/dev/null && echo tmp; cp /bin/true /workspace/t && /workspace/t && echo own
ln -s /etc/group link; cat link 2>/dev/null >/dev/null && echo link
python3 -c 'print("python")'
"""
    assert await output(supervisor, session.id, script) == ["passwd", "own", "python"]
    await supervisor.destroy(session.id)


READ: Mapping[str, FileRequest] = {
    "get": GetFile("f"),
    "list": ListFiles("."),
    "view": ViewFile("f"),
    "search": SearchFiles("f", "x"),
    "pack": Pack("."),
    "copy from": CopyFile("f", "/tmp/copy"),
    "move from": MoveFile("/etc/passwd", "/tmp/moved"),
}
WRITE: Mapping[str, FileRequest] = {
    "put": PutFile("new"),
    "upload": BeginUpload("new", "0" * 32),
    "make": MakeDirectory("new"),
    "move": MoveFile("f", "new"),
    "copy": CopyFile("/tmp/own", "new"),
    "edit": EditFiles(),
    "unpack": Unpack(10, 1000),
    "remove": RemoveFile("f"),
}


EDIT = json.dumps([{"path": "f", "op": "replace", "old": "x", "new": "y"}]).encode()


@needs_rules
@pytest.mark.parametrize("asks", [None, "root"])
@pytest.mark.parametrize("user", [None, "root"])
async def test_requests_for_files_keep_to_the_rules(
    supervisor: LocalSupervisor, user: str | None, asks: str | None
) -> None:
    """A link that a command leaves leads the holder of the key nowhere, whoever the session's user is, and whoever a
    request is made as."""
    await written(supervisor.workspace_files("given", make=True), "f", b"x")
    closed = FileRules(readable=("/usr", "/etc", "/tmp"), writable=("/tmp",))
    session = await supervisor.create(SessionSpec(filesystem=closed, user=user, workspace_id="given"))
    files = supervisor.files(session.id)
    await supervisor.exec(session.id, ExecSpec("cd /tmp; echo x > own; ln -s /workspace/f link; ln -s /workspace out"))
    contents = {"put": b"y", "edit": EDIT, "unpack": archive("new")}
    told = {
        name: await refusal_of(files, replace(request, user=asks), contents.get(name))
        for name, request in {**READ, **WRITE}.items()
    }
    assert told == dict.fromkeys({**READ, **WRITE}, "PERMISSION_DENIED")
    assert await refusal_of(files, GetFile("/tmp/link", user=asks)) == "PERMISSION_DENIED"
    assert await refusal_of(files, PutFile("/tmp/out/new", user=asks), b"y") == "PERMISSION_DENIED"
    assert await refusal_of(files, GetFile("/tmp/own", user=asks)) == "done"
    assert await refusal_of(files, PutFile("/tmp/own", user=asks), b"y") == "done"
    assert await refusal_of(files, GetFile("/etc/passwd", user=asks)) == "done"
    assert {each.name for each in (await listed(files, "/tmp")).entries} == {"own", "link", "out"}
    assert (await looked_at(files, "/workspace/f")).size_bytes == 1  # names can be looked up
    await supervisor.destroy(session.id)
    assert await read(supervisor.workspace_files("given"), "f") == b"x"
    assert [each.name for each in (await listed(supervisor.workspace_files("given"))).entries] == ["f"]


@needs_rules
async def test_a_move_of_what_can_not_be_removed_is_undone(supervisor: LocalSupervisor) -> None:
    """Only the kernel knows the rules: the copy is gone again, and all of the original is there."""
    for name in ("kept/f", "half/d/f"):
        await written(supervisor.workspace_files("given", make=True), name, b"x")
    rules = FileRules(readable=("/usr", "/workspace"), writable=("/tmp", "/workspace/half/d"))
    session = await supervisor.create(SessionSpec(filesystem=rules, workspace_id="given"))
    files = supervisor.files(session.id)
    for name in ("kept", "half"):
        assert await refusal_of(files, MoveFile(name, f"/tmp/{name}")) == "PERMISSION_DENIED"
    found = await output(supervisor, session.id, "cd /workspace; find . -mindepth 1; find /tmp -mindepth 1")
    assert sorted(found) == ["./half", "./half/d", "./half/d/f", "./kept", "./kept/f"]
    await supervisor.destroy(session.id)


def archive(name: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        made.addfile(tarfile.TarInfo(name))
    return file.getvalue()


@needs_rules
async def test_a_file_can_be_written_where_none_can_be_read(supervisor: LocalSupervisor) -> None:
    """As a command that only writes could."""
    session = await supervisor.create(SessionSpec(filesystem=FileRules(readable=("/usr", "/etc"))))
    files = supervisor.files(session.id)
    assert await written(files, "f", b"x") == "/workspace/f"
    assert await refusal_of(files, GetFile("f")) == "PERMISSION_DENIED"
    await supervisor.destroy(session.id)


@pytest.mark.parametrize(
    "request_",
    [
        RemoveFile("/tmp", recursive=True, user="root"),
        RemoveFile("/workspace", recursive=True),
        RemoveFile("/home/sandbox", recursive=True),
        MoveFile("/tmp", "/t", user="root"),
    ],
)
async def test_mount_points_stay_where_they_are(supervisor: LocalSupervisor, request_: RemoveFile | MoveFile) -> None:
    """Not even the session's root removes or moves one, and is told so before anything in it is gone. The user's home
    may be none, and is as safe in a directory of root."""
    session = await supervisor.create(SessionSpec())
    files = supervisor.files(session.id)
    kept = [await written(files, f"{top}/d/kept", b"x") for top in ("/tmp", "/workspace", "/home/sandbox")]
    with pytest.raises(PermissionDenied):
        await files.ask(request_, Done)
    assert await output(supervisor, session.id, "stat -c %m /tmp") == ["/tmp"]
    assert [await read(files, each) for each in kept] == [b"x"] * 3
    await supervisor.destroy(session.id)


@needs_rules
async def test_a_directory_that_can_not_be_removed_keeps_what_is_in_it(supervisor: LocalSupervisor) -> None:
    """Neither where the file rules close the directory above, nor where its mode does."""
    await written(supervisor.workspace_files("given", make=True), "d/kept", b"x")
    rules = FileRules(readable=("/usr", "/workspace"), writable=("/tmp", "/workspace/d"))
    session = await supervisor.create(SessionSpec(filesystem=rules, workspace_id="given"))
    files = supervisor.files(session.id)
    assert await refusal_of(files, RemoveFile("d", recursive=True)) == "PERMISSION_DENIED"
    assert await read(files, "d/kept") == b"x"
    await supervisor.exec(
        session.id, ExecSpec("mkdir -p /tmp/above/d; echo x > /tmp/above/d/kept; chmod 555 /tmp/above")
    )
    assert await refusal_of(files, RemoveFile("/tmp/above/d", recursive=True)) == "PERMISSION_DENIED"
    assert await read(files, "/tmp/above/d/kept") == b"x\n"
    await supervisor.destroy(session.id)


@needs_rules
@pytest.mark.parametrize("path", ["/no/such/place", "/proc/self/root", "relative", "/tmp/\n"])
async def test_a_rule_that_can_not_be_kept_is_refused(supervisor: LocalSupervisor, path: str) -> None:
    """A rule with a missing path, a path through a link of the kernel's, or a senseless path: no session is made, and
    no weaker rule is used.
    """
    for rules in (FileRules(readable=("/usr", path)), FileRules(writable=(path,))):
        with pytest.raises(InvalidRequest) as refused:
            await supervisor.create(SessionSpec(filesystem=rules))
        assert refused.value.details == {"filesystem": "can't be kept here"}


async def test_a_kernel_without_whole_rules_refuses_the_session(supervisor: LocalSupervisor) -> None:
    """Landlock before ABI 3 lets a file be emptied where nothing may be written: a session with file rules is refused
    there.
    """
    spec = SessionSpec(filesystem=FileRules(writable=("/tmp",)))
    if landlock.FILES_ABI <= ABI:
        session = await supervisor.create(spec)
        assert await output(supervisor, session.id, "touch /workspace/x 2>/dev/null || echo refused") == ["refused"]
        await supervisor.destroy(session.id)
    else:
        with pytest.raises(InvalidRequest):
            await supervisor.create(spec)
