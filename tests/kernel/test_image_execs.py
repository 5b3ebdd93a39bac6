"""The same commands in sessions on images of two C libraries: one static program, and a Debian with the GNU one."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config
from sandkasten.images.catalog import Catalog
from sandkasten.images.importing import import_tar
from sandkasten.model import Cause, ExecResult, ExecSpec, SessionSpec, StreamsMode
from tests import debian
from tests.kernel.test_images_foreign import busybox_tar
from tests.waiting import patience

NAMES = ("cat", "env", "grep", "head", "id", "kill", "ls", "printf", "seq", "sh", "sleep", "sort", "stat", "tr")
APPLETS = tuple(f"bin/{name}" for name in NAMES)


@attrs.frozen
class Row:
    """A command and what comes of it: bytes of both streams, status, and cause of its end."""

    name: str
    spec: ExecSpec
    stdout: bytes = b""
    exit_code: int = 0
    cause: Cause = Cause.EXITED
    stderr: bytes = b""


AS_USER = "id -u; echo $HOME; echo x > /workspace/f && ls /workspace; echo x 2>/dev/null > /etc/y"
AS_ROOT = "id -u; echo $HOME; echo x > /etc/x && stat -c %u /etc/x"
ROWS = (
    Row("status", ExecSpec("sh -c 'exit 7'"), exit_code=7),
    Row("streams", ExecSpec("echo out; echo err >&2", streams=StreamsMode.SEPARATE), b"out\n", stderr=b"err\n"),
    Row("state", ExecSpec("cd /tmp; kept=yes; export SHOWN=too; f() { echo in f; }")),
    Row("state, seen", ExecSpec("echo $kept; pwd; env | sort | grep ^SHOWN; f"), b"yes\n/tmp\nSHOWN=too\nin f\n"),
    Row("stateless", ExecSpec("echo ${kept:-no}; pwd", stateless=True), b"no\n/workspace\n"),
    Row("argv", ExecSpec(argv=("printf", "%s|", "a b", "$HOME", "*")), b"a b|$HOME|*|"),
    Row("input", ExecSpec("tr a-z A-Z", stdin=b"from outside\n"), b"FROM OUTSIDE\n"),
    Row("pipe", ExecSpec("seq 100000 | sort -n | head -n 2"), b"1\n2\n"),
    Row("much", ExecSpec("head -c 300000 /dev/zero"), bytes(300_000)),
    Row("text", ExecSpec("printf 'gr\\303\\274n'"), "grün".encode()),
    Row("missing", ExecSpec("no-such-program 2>/dev/null"), exit_code=127),
    Row("signal", ExecSpec(argv=("sh", "-c", "kill -TERM $$")), exit_code=143, cause=Cause.SIGNALLED),
    Row("time limit", ExecSpec("sleep 600", timeout_ms=300), exit_code=124, cause=Cause.TIMED_OUT),
    Row("user", ExecSpec(AS_USER, stateless=True), b"1000\n/home/sandbox\nf\n", exit_code=1),
    Row("root", ExecSpec(AS_ROOT, user="root", stateless=True), b"0\n/root\n0\n"),
    Row("background", ExecSpec("(sleep 600 & kill $!; wait $!; echo $?) 2>/dev/null", stateless=True), b"143\n"),
)
OF_A_DEBIAN = (
    "id -un; dpkg-query -W -f '${Package}\\n' dpkg; stat -c %a:%U /usr/bin/su /etc/shadow; "
    "command -v python3 || echo no python"
)


def tar_of(image: str, directory: Path) -> Path:
    """Return the image's archive."""
    if image == "busybox":
        return busybox_tar(directory / "tiny.tar", links=APPLETS)
    try:
        return debian.minbase_tar()
    except debian.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("image", ["busybox", "debian"])
async def test_commands_end_alike_on_both_libraries(
    supervisor: LocalSupervisor, config: Config, tmp_path: Path, image: str
) -> None:
    """One session an image; each row's streams, status and cause are the same in both. The Debian has its own files,
    accounts and database of packages besides, and set-id files that are none any more."""
    _, counts = import_tar(Catalog(config.data_dir), image, tar_of(image, tmp_path))
    session = await supervisor.create(SessionSpec(image=image))

    async def found(spec: ExecSpec) -> ExecResult:
        with trio.fail_after(patience(30)):
            return await supervisor.exec(session.id, spec)

    others = {}
    for row in ROWS:
        result = await found(row.spec)
        outcome = (result.stdout, result.stderr, result.end.exit_code, result.end.cause)
        if outcome != (row.stdout, row.stderr, row.exit_code, row.cause):
            others[row.name] = outcome
    assert not others
    if image == "debian":
        assert counts.entries > 1000
        assert counts.privileged >= 5  # su, mount, passwd and friends
        result = await found(ExecSpec(OF_A_DEBIAN))
        assert result.stdout == b"sandbox\ndpkg\n755:root\n640:root\nno python\n"
    await supervisor.destroy(session.id)
