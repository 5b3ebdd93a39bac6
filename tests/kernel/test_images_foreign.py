"""Sessions on images of a single program: little is there, or something is damaged."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import trio

from sandkasten.actors.services.nsinit import ThreadLink
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config
from sandkasten.errors import ShellFailed
from sandkasten.images.catalog import Catalog
from sandkasten.images.importing import import_tar
from sandkasten.images.layers import Layers
from sandkasten.model import Cause, ExecSpec, SessionSpec
from sandkasten.model.image import ImageConfig


async def run(supervisor: LocalSupervisor, image: str, command: str) -> str:
    """Run a command in a new session of `image` and return what it printed."""
    session = await supervisor.create(SessionSpec(image=image))
    try:
        result = await supervisor.exec(session.id, ExecSpec(command))
    finally:
        await supervisor.destroy(session.id)
    return result.output.decode()


def busybox_tar(path: Path, *, links: Sequence[str] = ("bin/sh", "bin/id", "bin/ls", "bin/cat")) -> Path:
    found = shutil.which("busybox")
    if found is None:
        pytest.skip("needs busybox")
    with tarfile.open(path, "w") as archive:
        program = tarfile.TarInfo("bin/busybox")
        program.mode, content = 0o755, Path(found).read_bytes()
        program.size = len(content)
        archive.addfile(program, io.BytesIO(content))
        for name in links:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        etc = tarfile.TarInfo("etc")
        etc.type, etc.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(etc)
    return path


async def test_an_image_of_one_program_has_a_stateful_shell(
    supervisor: LocalSupervisor, config: Config, tmp_path: Path
) -> None:
    """No bash, no passwd, no /tmp in the archive: `sh` is used, state persists, and the user is the sandbox's."""
    import_tar(Catalog(config.data_dir), "tiny", busybox_tar(tmp_path / "tiny.tar"))
    session = await supervisor.create(SessionSpec(image="tiny"))
    await supervisor.exec(session.id, ExecSpec("cd /tmp; kept=yes"))
    result = await supervisor.exec(session.id, ExecSpec("echo $kept; pwd; id -u; ls /bin; echo x > /workspace/f"))
    await supervisor.destroy(session.id)
    assert result.end.exit_code == 0
    assert result.output.decode().split() == ["yes", "/tmp", "1000", "busybox", "cat", "id", "ls", "sh"]


async def test_an_image_without_any_other_program_runs_builtins(
    supervisor: LocalSupervisor, config: Config, tmp_path: Path
) -> None:
    """State, time limits, interrupts and files need no coreutils; a command that is missing says so."""
    import_tar(Catalog(config.data_dir), "bare", busybox_tar(tmp_path / "bare.tar", links=("bin/sh",)))
    session = await supervisor.create(SessionSpec(image="bare"))
    await supervisor.exec(session.id, ExecSpec("cd /tmp; kept=yes; PATH=/nowhere"))
    looping = await supervisor.exec(session.id, ExecSpec("while :; do :; done", timeout_ms=200))
    assert looping.end.cause is Cause.TIMED_OUT
    result = await supervisor.exec(session.id, ExecSpec("echo $kept; pwd; echo x > file; gcc"))
    assert result.stdout == b"yes\n/tmp\n"
    assert result.end.exit_code == 127
    async with supervisor.files(session.id).open_read("/tmp/file", max_bytes=10) as reader:
        assert b"".join([piece async for piece in reader]) == b"x\n"
    missing = await supervisor.exec(session.id, ExecSpec(argv=("ls",)))
    assert missing.end.exit_code == 127
    await supervisor.destroy(session.id)


async def test_an_image_without_a_shell_runs_programs(
    supervisor: LocalSupervisor, config: Config, tmp_path: Path
) -> None:
    """As images called distroless: programs by `argv`, background processes and files work; what needs a shell fails in
    words that name the way, and the session goes on."""
    import_tar(Catalog(config.data_dir), "bare", busybox_tar(tmp_path / "bare.tar", links=("bin/sh",)))
    (tree,) = Catalog(config.data_dir).trees("bare")
    (tree / "bin/sh").unlink()
    (tree / "bin/busybox").rename(tree / "cat")
    session = await supervisor.create(SessionSpec(image="bare"))
    for spec in (ExecSpec("true"), ExecSpec("true", stateless=True)):
        with pytest.raises(ShellFailed, match=r"has no shell.* give argv"):
            await supervisor.exec(session.id, spec)
    async with supervisor.files(session.id).open_write("/workspace/f") as writer:
        await writer.send(b"content")
        await writer.commit()
    result = await supervisor.exec(session.id, ExecSpec(argv=("/cat", "/workspace/f")))
    assert (result.stdout, session.cwd) == (b"content", "/workspace")
    await supervisor.destroy(session.id)


async def test_a_session_begins_as_its_image_says(supervisor: LocalSupervisor, config: Config, tmp_path: Path) -> None:
    """Variables, user and directory of an image's configuration hold where the create asks for no others, for the shell
    and for programs; a directory that is not there is the workspace. The daemon's own nsinit takes layers and publishes
    the image."""
    accounts = {"etc/passwd": b"app:x:70:71::/srv:/bin/sh\n", "etc/group": b"web:x:72:\nzero:x:0:\n", "srv/here": b""}
    with tarfile.open(tmp_path / "top.tar", "w") as archive:
        for name, content in accounts.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    tars = busybox_tar(tmp_path / "base.tar"), tmp_path / "top.tar"
    env = {"BOTH": "image", "ONE": "image", "BASH_ENV": "/nowhere", "not a name": "x"}
    said = ImageConfig(env=env, user="app", working_dir="/srv")

    def publish(name: str, config_of_image: ImageConfig) -> None:
        store = Layers(config.data_dir, ThreadLink(supervisor._nsinit))
        layers = []
        for tar in tars:
            with tar.open("rb") as file:
                layers.append(store.unpack_layer(file.fileno()).diff_id)
        store.publish_image(name, layers=layers, config=config_of_image)

    await trio.to_thread.run_sync(publish, "said", said)
    await trio.to_thread.run_sync(publish, "root", attrs.evolve(said, user="root", working_dir="/gone"))
    await trio.to_thread.run_sync(publish, "group", attrs.evolve(said, user="app:web"))
    script = "echo $BOTH $ONE $BASH_ENV; id -u; id -g; pwd"
    spec = SessionSpec(image="said", env={"BOTH": "session"}, root_inside=False)
    for asked, expected in (
        (spec, "session image /nowhere 70 71 /srv"),
        (attrs.evolve(spec, user="sandbox"), "session image /nowhere 1000 1000 /srv"),
        (attrs.evolve(spec, image="group"), "session image /nowhere 70 72 /srv"),
        (attrs.evolve(spec, user="70:web"), "session image /nowhere 70 72 /srv"),
        (attrs.evolve(spec, image="root"), "session image /nowhere 1000 1000 /workspace"),
    ):
        session = await supervisor.create(asked)
        assert session.cwd == expected.split()[-1]
        result = await supervisor.exec(session.id, ExecSpec(script))
        assert result.output.decode().split() == expected.split()
        program = await supervisor.exec(session.id, ExecSpec(argv=("/bin/sh", "-c", "pwd")))
        assert program.output.decode().split() == expected.split()[-1:]
        await supervisor.destroy(session.id)
