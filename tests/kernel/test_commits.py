"""Commits through the supervisor: what becomes an image, what is refused, and that the session goes on."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import trio

from sandkasten.actors.services import commits
from sandkasten.actors.services.layers import NsinitLayers
from sandkasten.actors.tree import LocalSupervisor
from sandkasten.config import Config
from sandkasten.errors import Conflict, InvalidImage, SessionPaused
from sandkasten.images.layers import open_store
from sandkasten.model import ExecSpec, PauseSpec, SessionSpec, Status
from sandkasten.model.image import CommitSpec, ConfigChanges, ImageConfig
from sandkasten.model.job import ImportSpec
from tests.kernel.test_archive_import import imported
from tests.kernel.test_layers import base_layer
from tests.waiting import until

pytestmark = pytest.mark.kernel


@pytest.fixture
async def image(supervisor: LocalSupervisor, config: Config) -> str:
    def make() -> None:
        with open_store(config.data_dir) as store, tempfile.TemporaryFile() as file:
            file.write(base_layer())
            file.seek(0)
            layer = store.unpack_layer(file.fileno())
            said = ImageConfig(env={"KEPT": "1"}, cmd=("sh",), labels={"a": "1"})
            store.publish_image("below", layers=[layer.diff_id], config=said)

    await trio.to_thread.run_sync(make)
    return "below"


async def root_session(supervisor: LocalSupervisor, image: str) -> str:
    return (await supervisor.create(SessionSpec(image=image, user="root"))).id


async def told(supervisor: LocalSupervisor, image: str, command: str) -> str:
    """Return what a command prints in a session of its own."""
    session = await supervisor.create(SessionSpec(image=image, user="root"))
    try:
        return (await supervisor.exec(session.id, ExecSpec(command))).output.decode()
    finally:
        await supervisor.destroy(session.id)


async def test_an_image_is_made_of_a_session_which_goes_on(
    supervisor: LocalSupervisor, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session on the new image has the files, the deletions and the configuration; the committed one goes on with its
    shell. A commit of that session adds a layer, if it has changed something. A paused session stays paused. A taken
    name is refused, and taken over on request. A second tag of a name is an image beside the first."""
    session_id = await root_session(supervisor, image)
    await supervisor.exec(
        session_id, ExecSpec("cd /; kept=yes; busybox rm bin/id; echo made > made; echo no > /tmp/no")
    )
    config = ConfigChanges(env={"MORE": "2"}, user="0", cmd=("echo", "hi"), labels={"b": "2"}, working_dir="/bin")
    made = await supervisor.commit_session(session_id, CommitSpec("made", config))
    assert (made.config.env, made.config.labels) == ({"KEPT": "1", "MORE": "2"}, {"a": "1", "b": "2"})
    assert (made.config.cmd, made.config.working_dir, made.kind, len(made.layers)) == (
        ("echo", "hi"),
        "/bin",
        "layers",
        2,
    )
    going_on = await supervisor.exec(session_id, ExecSpec("echo $kept"))
    assert (going_on.output, (await supervisor.get(session_id)).status) == (b"yes\n", Status.RUNNING)
    seen = await told(supervisor, "made", "cat /made; ls /bin/id /tmp/no 2>&1 | busybox wc -l; pwd; echo $KEPT$MORE")
    assert seen == "made\n2\n/bin\n12\n"
    with pytest.raises(InvalidImage, match="there is an image 'made' already"):
        await supervisor.commit_session(session_id, CommitSpec("made"))
    await supervisor.pause(session_id, PauseSpec(auto_resume=False))
    again = await supervisor.commit_session(session_id, CommitSpec("made", replace=True))
    assert (await supervisor.get(session_id)).status is Status.PAUSED
    assert (again.layers[:1], again.config.labels) == (made.layers[:1], {"a": "1"})
    upper = await root_session(supervisor, "made")
    same = await supervisor.commit_session(upper, CommitSpec("same", ConfigChanges(cmd=())))
    assert (same.layers, same.config.cmd) == (again.layers, ())
    await supervisor.exec(upper, ExecSpec("echo more > /more"))
    assert len((await supervisor.commit_session(upper, CommitSpec("upper"))).layers) == 3
    tagged = [await supervisor.commit_session(upper, CommitSpec(f"app:v{number}")) for number in (1, 2)]
    assert [(each.name, each.references) for each in tagged] == [("app", ["app:v1"]), ("app-v2", ["app:v2"])]
    with pytest.raises(InvalidImage, match="there is an image 'app-v2' already"):
        await supervisor.commit_session(upper, CommitSpec("app:v2"))
    assert (await supervisor.commit_session(upper, CommitSpec("app:v2", replace=True))).name == "app-v2"


async def test_a_prune_leaves_the_layer_of_a_commit_or_an_import(
    supervisor: LocalSupervisor, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one that comes as soon as the layer has its name, which nobody knows before, and takes layers of any age."""
    unpack_layer, counts = NsinitLayers.unpack_layer, []

    async def then_prune(self: NsinitLayers, blob_fd: int, diff_id: str) -> str:
        made = await unpack_layer(self, blob_fd, diff_id)
        counts.append((await supervisor.prune_images(older_than_s=0)).layers)
        return made

    monkeypatch.setattr(NsinitLayers, "unpack_layer", then_prune)
    session_id = await root_session(supervisor, image)
    await supervisor.exec(session_id, ExecSpec("echo made > /made"))
    await supervisor.commit_session(session_id, CommitSpec("made"))
    done = await imported(supervisor, ImportSpec("imported"), base_layer() + b"\0" * 512)
    assert (done.error, counts) == (None, [0, 0])


async def test_a_chain_of_commits_goes_on_for_ever(
    supervisor: LocalSupervisor, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an image can't have one layer more, and on request, what commits have added is one layer above those that
    the first of them began with; sessions see what they saw, and the history has one entry for it. An image that came
    with as many layers as there may be becomes one layer. Images and sessions on the layers of before stay."""
    monkeypatch.setattr(commits, "MAX_IMAGE_LAYERS", 3)
    (base,) = (await supervisor.image(image)).layers
    counts, session_id = [], ""
    for number in range(4):
        session_id = await root_session(supervisor, f"chain{number}" if number else image)
        command = f"echo {number} >> /all; echo > /only{number}; busybox rm -f /only{number - 1} /bin/id"
        await supervisor.exec(session_id, ExecSpec(command))
        made = await supervisor.commit_session(session_id, CommitSpec(f"chain{number + 1}", created_by=f"{number}"))
        counts.append((len(made.layers), made.config.history))
        assert made.layers[0] == base
    assert counts == [(2, ("0",)), (3, ("0", "1")), (2, ("2",)), (3, ("2", "3"))]
    look, seen = "cat /all; ls /only* /bin/id 2>&1 | busybox wc -l", "0\n1\n2\n3\n2\n"
    squashed = await supervisor.commit_session(session_id, CommitSpec("squashed", created_by="all", squash=True))
    assert (squashed.layers[0], len(squashed.layers), squashed.config.history) == (base, 2, ("all",))
    assert (await supervisor.exec(session_id, ExecSpec(look))).output.decode() == seen
    monkeypatch.setattr(commits, "MAX_IMAGE_LAYERS", 1)
    full = await supervisor.commit_session(session_id, CommitSpec("full"))
    assert (len(full.layers), full.config.history) == (1, ("commit",))
    for name in ("chain4", "squashed", "full"):
        assert await told(supervisor, name, look) == seen


async def test_no_image_is_made_of_the_machines_own_or_of_another_than_the_sessions(
    supervisor: LocalSupervisor, image: str, config: Config
) -> None:
    """Refused before the session stands still: the image `host`, and malformed names. Refused after: a session whose
    image has another content by now."""
    host = await supervisor.create(SessionSpec(image="host"))
    with pytest.raises(InvalidImage, match="'host' is the machine's own /usr"):
        await supervisor.commit_session(host.id, CommitSpec("copy"))
    session_id = await root_session(supervisor, image)
    with pytest.raises(InvalidImage, match="malformed"):
        await supervisor.commit_session(session_id, CommitSpec("../copy"))
    other = await root_session(supervisor, image)
    await supervisor.commit_session(other, CommitSpec(image, replace=True))
    with pytest.raises(InvalidImage, match="another one than when the session was made"):
        await supervisor.commit_session(session_id, CommitSpec("copy"))


async def test_a_session_that_is_committed_stands_still_until_that_is_done(
    supervisor: LocalSupervisor, image: str, config: Config
) -> None:
    """Requests for the session's processes are refused meanwhile, and so is a resume. A pause that is asked for
    meanwhile outlives the commit. The session's end ends the commit: no image and no draft of a layer is left."""
    session_id = await root_session(supervisor, image)
    await supervisor.exec(session_id, ExecSpec("busybox head -c 209715200 /dev/zero > /full", timeout_ms=60_000))

    async def is_paused() -> bool:
        return (await supervisor.get(session_id)).status is Status.PAUSED

    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.commit_session, session_id, CommitSpec("whole"))
        await until(is_paused)
        with pytest.raises(SessionPaused):
            await supervisor.exec(session_id, ExecSpec("echo no"))
        with pytest.raises(Conflict, match="stands still while it is copied"):
            await supervisor.resume(session_id)
        await supervisor.pause(session_id)
    assert await is_paused()
    assert (await supervisor.image("whole")).layers
    await supervisor.resume(session_id)

    async def commit() -> None:
        with pytest.raises(Conflict, match="went on, or ended"):
            await supervisor.commit_session(session_id, CommitSpec("torn"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(commit)
        await until(lambda: _is_unpacking(config.data_dir))
        await supervisor.destroy(session_id)
    with pytest.raises(InvalidImage):
        await supervisor.image("torn")

    async def is_clean() -> bool:
        return not list((config.data_dir / "layers").glob("+new-*"))

    await until(is_clean)


async def _is_unpacking(data_dir: Path) -> bool:
    return bool(list((data_dir / "layers").glob("+new-*/fs/full")))
