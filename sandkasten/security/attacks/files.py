"""Attacks on the file interface: links, races, special files, paths that lead out, files left behind for the host.

Made from outside, through the supervisor, against files that a program inside prepared. A refusal must be an error that
says so, and content that is read must be the session's own.

Sources: openat2(2), symlink(7), renameat2(2) RENAME_EXCHANGE.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import trio

from sandkasten.errors import SandkastenError
from sandkasten.host.paths import DataPaths
from sandkasten.model import ExecSpec
from sandkasten.security.attacks.field import Field
from sandkasten.security.probes.attempt import CANARY, Answers, NotApplicable, attempt, collect

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MAX_BYTES = 1 << 20
_ROUNDS = 30
_REFUSED = ("PathOutside", "FileNotFound", "PermissionDenied", "NotAFile", "IsADirectory", "InvalidRequest")
_FLIP = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.chdir("/workspace")
os.makedirs("flip", exist_ok=True)
open("flip/secret", "w").write("mine")
os.symlink({target!r}, "flop")
print("ready", flush=True)
while True:
    libc.renameat2(-100, b"flip", -100, b"flop", 2)
"""
"""Program that exchanges a directory and a symbolic link as fast as it can."""
EXCHANGE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.chdir("/workspace")
while True:
    libc.renameat2(-100, b"flip", -100, b"flop", 2)
    for name in ("flip", "flop"):
        try:
            os.link("kept", name)
        except OSError:
            pass
"""
"""Program that exchanges a file and a hard link to `kept`, and renews the link when it was replaced."""


async def _read(field: Field, session_id: str, path: str) -> str:
    """Return the result of reading a file: the name of the refusal, or the owner of the content."""
    try:
        async with field.supervisor.files(session_id).open_read(path, max_bytes=_MAX_BYTES) as reader:
            content = b"".join([piece async for piece in reader])
    except SandkastenError as error:
        return type(error).__name__
    return "the host's file" if CANARY.encode() in content else f"{len(content)} bytes"


async def _write(field: Field, session_id: str, path: str) -> str:
    try:
        async with field.supervisor.files(session_id).open_write(path) as writer:
            await writer.send(b"evil")
            await writer.commit()
    except SandkastenError as error:
        return type(error).__name__
    return "written"


async def _read_all(field: Field, session_id: str, paths: Sequence[str]) -> Answers:
    return {path: await _read(field, session_id, path) for path in paths}


@attempt("files.symlink", "have the daemon follow a link out of the session", "CVE-2018-15664", _REFUSED)
async def follow_link(field: Field) -> Answers:
    """Links by an absolute path, by `..` and through `/proc` lead to files of the host: access to each is refused."""
    async with field.session() as session_id:
        secret = field.outside / "secret"
        links = {"a": str(secret), "b": "../../../../../../etc/shadow", "c": "/proc/1/environ", "d": str(secret.parent)}
        await field.run(session_id, "cd /workspace; " + "; ".join(f"ln -s {to} {name}" for name, to in links.items()))
        read = await _read_all(field, session_id, [*links, "d/secret"])
        return {**read, "write": await _write(field, session_id, "d/secret")}


@attempt(
    "files.symlink-race",
    "exchange a directory for a link while the daemon reads and writes",
    "CVE-2018-15664",
    ("own file or refused",),
)
async def race_link(field: Field) -> Answers:
    """Race: a directory at the look is a link to the host's when it is opened."""
    seen: set[str] = set()
    async with field.session() as session_id, trio.open_nursery() as nursery:
        nursery.start_soon(_flip, field, session_id, str(field.outside))
        await _wait_file(field, session_id, "/workspace/flip/secret")
        for _ in range(_ROUNDS):
            seen.add(await _read(field, session_id, "flip/secret"))
            seen.add(await _write(field, session_id, "flip/written"))
        nursery.cancel_scope.cancel()
    allowed = {*_REFUSED, "4 bytes", "0 bytes", "written"}
    harmed = changed(field.outside)
    odd = sorted(seen - allowed) + harmed
    return {f"{2 * _ROUNDS} tries": ", ".join(odd) or "own file or refused"}


async def _flip(field: Field, session_id: str, target: str) -> None:
    await field.python(session_id, _FLIP.format(target=target), timeout_s=20)


async def _wait_file(field: Field, session_id: str, path: str) -> None:
    with trio.move_on_after(5 * field.patience):
        while await _read(field, session_id, path) == "FileNotFound":  # noqa: ASYNC110 - a program inside makes it
            await trio.sleep(0.01)


def changed(directory: Path) -> list[str]:
    """Return the changes in the forbidden directory."""
    names = sorted(os.listdir(directory))
    content = (directory / "secret").read_bytes()
    wrong = [] if names == ["secret"] else [f"outside has {', '.join(names)}"]
    return wrong if content.startswith(CANARY.encode()) else [*wrong, "the host's file was changed"]


@attempt("files.hard-link", "change a file of the image by a hard link to it", "hard-link attack", ("unchanged",))
async def change_by_hard_link(field: Field) -> Answers:
    """Writing replaces a name and never writes through a link: the linked file keeps its content."""
    async with field.session() as session_id:
        made = "cd /workspace; echo first > a; ln a b; ln /etc/passwd p 2>/dev/null; true"
        await field.run(session_id, made)
        before = (await field.run(session_id, "cat /etc/passwd")).stdout
        await _write(field, session_id, "b")
        await _write(field, session_id, "p")
        own = (await field.run(session_id, "cat /workspace/a")).stdout
        after = (await field.run(session_id, "cat /etc/passwd")).stdout
        return {
            "own link": "unchanged" if own == b"first\n" else "written through",
            "/etc/passwd": "unchanged" if after == before else "changed",
        }


@attempt("files.hard-link-race", "have a write go through a hard link", "CWE-62", ("unchanged",))
async def race_hard_link(field: Field) -> Answers:
    """Race: the written name is, every other moment, that of a file which must not change."""
    async with field.session() as session_id:
        await field.run(session_id, "cd /workspace; echo first > kept; echo mine > flop; ln kept flip")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_exchange, field, session_id)
            for _ in range(_ROUNDS):
                await _write(field, session_id, "flip")
            nursery.cancel_scope.cancel()
        kept = (await field.run(session_id, "cat /workspace/kept")).stdout
    return {f"{_ROUNDS} writes": "unchanged" if kept == b"first\n" else f"{kept[:20]!r}"}


async def _exchange(field: Field, session_id: str) -> None:
    await field.python(session_id, EXCHANGE, timeout_s=20)


@attempt(
    "files.special",
    "hang or feed the daemon with a FIFO, a socket, a device, a directory",
    "denial of service",
    _REFUSED,
)
async def read_special(field: Field) -> Answers:
    """Only regular files are read: a FIFO or socket would have the daemon wait, and a device would never end."""
    program = (
        "import os, socket; os.chdir('/workspace'); os.mkfifo('fifo'); os.symlink('/dev/zero', 'zero');"
        "os.symlink('/dev/tty', 'tty'); socket.socket(socket.AF_UNIX).bind('socket'); os.mkdir('directory')"
    )
    async with field.session() as session_id:
        await field.python(session_id, program)
        paths = ("fifo", "zero", "tty", "socket", "directory", "/dev/zero", "/dev/ptmx", "/proc/kmsg")
        return await _read_all(field, session_id, paths)


@attempt("files.paths", "name files out of the session", "path traversal", (*_REFUSED, "nothing outside"))
async def name_outside(field: Field) -> Answers:
    """Paths that go up from the root stay there, so a write may succeed: in the session."""
    async with field.session() as session_id:
        secret = str(field.outside / "secret")
        up = "../" * 30
        paths = (secret, f"{up}{secret[1:]}", f"/workspace/{up}{secret[1:]}", "a\0b", "", "/" + "x/" * 3000, "\ud800")
        answers = {ascii(path)[:24] + str(n): await _read(field, session_id, path) for n, path in enumerate(paths)}
        await _write(field, session_id, f"{up}{secret[1:]}")
        return {**answers, "write": ", ".join(changed(field.outside)) or "nothing outside"}


@attempt(
    "files.of-pid1", "read what PID 1 sees of itself: its environment, memory, descriptors", "confused deputy", _REFUSED
)
async def read_as_pid_1(field: Field) -> Answers:
    """The runner opens the files, so `/proc/self` is the runner's own: the path must be refused before."""
    names = ("self/environ", "self/mem", "self/maps", "1/environ", "self/root/etc/shadow", "self/fd/3", "self/exe",
             "thread-self/environ", "self/task/1/environ")  # fmt: skip
    async with field.session() as session_id:
        return await _read_all(field, session_id, [f"/proc/{name}" for name in names])


@attempt("files.endless", "have the daemon read a file of a tebibyte", "exhaustion", ("bounded", *_REFUSED))
async def read_endless(field: Field) -> Answers:
    """A read ends at the number of bytes asked for, whatever the size of the file."""
    async with field.session() as session_id:
        await field.run(session_id, "truncate -s 1T /workspace/huge || truncate -s 1G /workspace/huge")
        seen = await _read(field, session_id, "huge")
        return {"huge": "bounded" if seen in (f"{_MAX_BYTES} bytes", "TooLarge") else seen}


@attempt(
    "files.left-behind",
    "leave a setuid file of the host's root for the host's users",
    "setuid escalation",
    ("the session's ids",),
)
async def leave_setuid(field: Field) -> Answers:
    """Files on the host's disk have ids of the session's own range, in a directory that only root enters."""
    async with field.session() as session_id:
        await field.run(session_id, "cp /bin/sh /workspace/left; chmod 6755 /workspace/left; mkdir -m 777 /tmp/open")
        found = await trio.to_thread.run_sync(_owners, field.config.data_dir / "sessions" / session_id, "left")
        mode = (await trio.Path(field.config.data_dir).stat()).st_mode & 0o077
    answers = {name: "the session's ids" if uid >= 65536 else f"uid {uid}" for name, uid in found.items()}
    return {**answers, "data directory": "the session's ids" if not mode else f"open to others: {mode:o}"}


def _owners(root: Path, name: str) -> dict[str, int]:
    return {
        os.path.relpath(os.path.join(directory, each), root): os.lstat(os.path.join(directory, each)).st_uid
        for directory, _, names in os.walk(root)
        for each in names
        if each == name
    }


@attempt("files.image", "change the image that the next session gets", "tampering between sessions", ("unchanged",))
async def change_image(field: Field) -> Answers:
    """As root, the session may change its own view; the files below stay as they are."""
    change = (
        "for f in /etc/passwd /etc/hosts /usr/bin/env /bin/sh; do echo evil >> $f; rm -f $f; done; "
        "echo evil > /etc/profile; mkdir /evil; true"
    )
    look = "cat /etc/passwd /etc/hosts | grep -c evil; ls -d /evil 2>/dev/null; test -x /usr/bin/env && test -x /bin/sh"
    async with field.session() as session_id:
        await field.run(session_id, f"( {change} ) 2>/dev/null")
    async with field.session() as session_id:
        seen = await field.run(session_id, look)
    held = seen.stdout == b"0\n" and seen.end.exit_code == 0
    return {"next session": "unchanged" if held else f"{seen.stdout!r} and status {seen.end.exit_code}"}


@attempt(
    "files.no-name",
    "find session files by the socket directory of the daemon",
    "information leak",
    ("nothing", *_REFUSED),
)
async def find_socket_directory(field: Field) -> Answers:
    """The path of the runner's socket on the host means nothing in the session."""
    async with field.session() as session_id:
        path = DataPaths(field.config.data_dir).run_dir(session_id)
        return {"socket": await _read(field, session_id, f"{path}/r.sock")}


@attempt("files.counters", "watch a neighbour work by the machine's counters", "side channel", ("unchanged", "another"))
async def read_counters(field: Field) -> Answers:
    """The machine's counters, which the neighbour's work moves, and the machine's boot are known to the host."""
    look = "cat /proc/stat /proc/vmstat"
    async with field.session() as session_id:
        host_before = await trio.Path("/proc/stat").read_text()
        before = await field.run(session_id, look)
        await field.supervisor.exec(field.neighbour, ExecSpec("i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"))
        after, boot = await field.run(session_id, look), await field.run(session_id, f"cat {_BOOT_ID}")
    if await trio.Path("/proc/stat").read_text() == host_before:
        raise NotApplicable("the machine has no counters")
    return {
        "counters": "unchanged" if before.stdout and before.stdout == after.stdout else "changed",
        "boot": "another" if boot.stdout.decode() != await trio.Path(_BOOT_ID).read_text() else "the machine's",
    }


FILES = collect(globals())
