"""`sandkasten image pull` and `login`, with and without a daemon, against a registry of the test's own."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import signal
import stat
import subprocess
from functools import partial
from pathlib import Path

import httpx
import pytest
import trio

from sandkasten.crash import Point
from sandkasten.host.account import find_account
from sandkasten.images.catalog import Catalog
from sandkasten.images.registry.documents import Platform
from tests.cli.conftest import Command
from tests.e2e.daemon import KEY, running_daemon
from tests.e2e.seed import SCRIPT, completed
from tests.e2e.seed import Command as Forked
from tests.kernel.test_images_foreign import busybox_tar
from tests.registry import Asked, Registry, Said, digest_of, layer, serving
from tests.waiting import patience, until

PASSWORD = "hunter2-secret"
PULL_POINTS = [point for point in Point if point.startswith("image.pull.")]


async def command(
    data_dir: Path, *arguments: str, stdin: str = "", crash_at: str = ""
) -> subprocess.CompletedProcess[bytes]:
    """Run the command to its end, on one data directory."""
    crash = {"SANDKASTEN_CRASH_AT": crash_at, "SANDKASTEN_CRASH_POINTS": "true"} if crash_at else {}
    crash["SANDKASTEN_API_KEY"] = KEY
    run = partial(completed, given=stdin.encode(), timeout_s=patience(60), env=os.environ | crash)
    return await trio.to_thread.run_sync(lambda: run("image", *arguments, "--data-dir", data_dir))


def wants_password(registry: Registry) -> None:
    """Have a registry want a name and a password."""
    wanted = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()

    def answer(asked: Asked) -> Said | None:
        if asked.headers.get("authorization") == wanted:
            return None
        return Said(401, headers={"www-authenticate": 'Basic realm="x"'})

    registry.answer = answer


async def test_a_pull_without_a_daemon_speaks_to_the_registry_without_root(tmp_path: Path) -> None:
    """A login is kept once the registry has taken it, closed to others; then the pull works, prints a line for each
    layer, and leaves an image and no blob. The directory of blobs is not root's, since who loads them is not."""
    data_dir, account = tmp_path / "data", find_account("auto")
    data_dir.mkdir(mode=0o755)
    async with serving() as registry:
        tar = busybox_tar(tmp_path / "x.tar").read_bytes()
        digest = registry.push([tar, layer({"etc/word": b"one"})])
        wants_password(registry)
        login = ("login", registry.name, "--username", "me")
        refused = await command(data_dir, *login, stdin="wrong\n")
        assert (refused.returncode, b"401" in refused.stderr) == (1, True), refused.stderr
        missing = await command(data_dir, "pull", registry.reference())
        assert (missing.returncode, b"name and a password" in missing.stderr) == (1, True), missing.stderr
        kept = await command(data_dir, *login, stdin=f"{PASSWORD}\n")
        assert kept.returncode == 0, kept.stderr
        done = await command(data_dir, "pull", registry.reference(), "--name", "tiny")
        assert (done.returncode, done.stdout.decode()) == (0, f"tiny: {digest}\n"), done.stderr
        again = await command(data_dir, "pull", registry.reference(), "--name", "tiny", "--replace", "--json")
        assert json.loads(again.stdout) == {"name": "tiny", "digest": digest}
    said = json.loads((await command(data_dir, "inspect", "tiny")).stdout)
    assert (said["digest"], said["tags"], said["platform"]) == (digest, ["latest"], str(Platform.own()))
    pruned = await command(data_dir, "prune", "--json")
    assert json.loads(pruned.stdout) == {"layers": 0, "blobs": 0, "images": 0, "freed_bytes": 0}, pruned.stderr
    lines = done.stderr.decode().splitlines()
    assert sorted(line[:19] for line in lines[1:]) == sorted(each["digest"][:19] for each in _layers(registry))
    assert PASSWORD not in "".join(str(each) for each in (refused, missing, kept, done, again))
    found = Catalog(data_dir).get("tiny")
    assert (found.kind, found.digest, found.source, len(found.layers)) == ("layers", digest, registry.reference(), 2)
    blobs, file = data_dir / "blobs", data_dir / "registries.json"
    assert (os.listdir(blobs), blobs.stat().st_uid) == ([], account.uid)
    assert (stat.S_IMODE(file.stat().st_mode), file.stat().st_uid) == (0o600, account.uid)


async def test_a_pull_beside_a_daemon_is_the_daemons(tmp_path: Path) -> None:
    """The command follows the daemon's job to its end and says how that ended; a session gets the image. Another tag is
    an image beside it: it runs what it was made to run, by its tag, and is not removed while a session has it. Its
    session becomes an image by a commit."""
    data_dir = tmp_path / "data"
    async with serving() as registry:
        digest = registry.push([busybox_tar(tmp_path / "x.tar").read_bytes(), layer({"etc/word": b"one"})])
        with running_daemon(data_dir) as daemon, daemon.client() as client:
            await trio.to_thread.run_sync(daemon.wait_url)
            done = await command(data_dir, "pull", registry.reference())
            assert (done.returncode, done.stdout.decode()) == (0, f"image: {digest}\n"), done.stderr
            (job,) = (await trio.to_thread.run_sync(client.get, "/v1/jobs")).json()["jobs"]
            assert (job["state"], job["reference"]) == ("done", registry.reference())
            failed = await command(data_dir, "pull", registry.reference(":none"))
            assert (failed.returncode, b"MANIFEST_UNKNOWN" in failed.stderr) == (125, True), failed.stderr

            def look() -> str:
                session = client.post("/v1/sessions", json={"image": "image"}).json()["id"]
                answer = client.post(f"/v1/sessions/{session}/exec", json={"cmd": "cat /etc/word"}).json()
                client.delete(f"/v1/sessions/{session}")
                return str(answer["output"])

            assert await trio.to_thread.run_sync(look) == "one"
            busybox = busybox_tar(tmp_path / "x.tar").read_bytes()
            second = registry.push([busybox, layer({"etc/word": b"two"})], tag="v2")
            done = await command(data_dir, "pull", registry.reference(":v2"))
            assert (done.returncode, done.stdout.decode()) == (0, f"image-v2: {second}\n"), done.stderr
            words = [str(SCRIPT), "run", "image:v2", "--data-dir", str(data_dir)]
            env = os.environ | {"SANDKASTEN_API_KEY": KEY}
            run = await trio.run_process(words, stdin=b"cat /etc/word", capture_stdout=True, env=env)
            assert run.stdout == b"two"
            post = partial(client.post, "/v1/sessions", json={"image": "image:v2"})
            session = (await trio.to_thread.run_sync(post)).json()["id"]
            said = json.loads((await command(data_dir, "inspect", registry.reference(":v2"))).stdout)
            assert (said["name"], said["references"]) == ("image-v2", ["image:v2"])
            assert said["in_use"] == {"sessions": [session], "pools": []}
            kept = await command(data_dir, "rm", "image:v2")
            assert (kept.returncode, b"the image is in use: 1 sessions" in kept.stderr) == (125, True), kept.stderr
            made = await command(data_dir, "commit", session, "--name", "mine", "--json")
            assert (made.returncode, json.loads(made.stdout)["name"]) == (0, "mine"), made.stderr
            words[2:3] = ["mine"]
            run = await trio.run_process(words, stdin=b"cat /etc/word", capture_stdout=True, env=env)
            assert run.stdout == b"two"
            await trio.to_thread.run_sync(client.delete, f"/v1/sessions/{session}")
            assert (await command(data_dir, "rm", "image:v2")).returncode == 0
            assert [each.name for each in Catalog(data_dir).images()] == ["host", "image", "mine"]


async def test_root_changes_images_beside_a_daemon_that_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `allowed_images`, a daemon without root refuses a pull before it asks the registry, and commits and
    removals. Root's command line pulls and removes beside it; a session gets the image, and keeps it."""
    monkeypatch.setenv("SANDKASTEN_ALLOWED_IMAGES", "host,image")
    data_dir = tmp_path / "data"
    async with serving() as registry:
        digest = registry.push([busybox_tar(tmp_path / "x.tar").read_bytes()])
        with running_daemon(data_dir) as daemon, daemon.client() as client:

            async def asked(method: str, path: str, body: object = None) -> httpx.Response:
                return await trio.to_thread.run_sync(partial(client.request, method, path, json=body))

            refused = [await asked("POST", "/v1/images/pull", {"reference": registry.reference()})]
            assert registry.asked == []
            done = await command(data_dir, "pull", registry.reference())
            assert (done.returncode, done.stdout.decode()) == (0, f"image: {digest}\n"), done.stderr
            session = (await asked("POST", "/v1/sessions", {"image": "image"})).json()["id"]
            refused.append(await asked("POST", f"/v1/sessions/{session}/commit", {"name": "mine"}))
            refused.append(await asked("DELETE", "/v1/images/image"))
            assert [(each.status_code, "as root" in each.text) for each in refused] == [(400, True)] * 3
            kept = await command(data_dir, "rm", "image")
            assert (kept.returncode, b"a session has the image" in kept.stderr) == (1, True), kept.stderr
            await asked("DELETE", f"/v1/sessions/{session}")
            assert (await command(data_dir, "rm", "image")).returncode == 0
            assert [each.name for each in Catalog(data_dir).images()] == ["host"]


def half(registry: Registry, tar: bytes) -> None:
    """Have a registry send half of a blob, and then nothing."""
    said = Said(200, tar[: len(tar) // 2], length=len(tar), hold=True)
    registry.answer = lambda asked: said if digest_of(tar) in asked.path else None


async def come(data_dir: Path, tar: bytes) -> None:
    """Wait until some of a blob is on the disk."""
    part = data_dir / "blobs" / f"{digest_of(tar)[7:]}.part"

    async def has_come() -> bool:
        return part.exists() and part.stat().st_size > 0

    await until(has_come)


async def test_a_pull_on_a_terminal_shows_a_bar_and_ends_by_a_key(tmp_path: Path) -> None:
    """Without a daemon. What came is kept, nothing else is left, and the same pull goes on with the rest."""
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o755)
    tar = layer({"large": os.urandom(4 << 20)})
    person = Command.of(tmp_path, data_dir)
    async with serving() as registry:
        registry.push([tar])
        half(registry, tar)
        words = ("image", "pull", registry.reference())

        def ended(*, by_key: bool) -> tuple[int, str]:
            with person.terminal(*words, cols=120) as screen:
                if by_key:
                    screen.wait_for("░ +0 %  0 B of 4.0 MiB")
                    trio.from_thread.run(come, data_dir, tar)
                    screen.type("\x03")
                return screen.wait(), screen.seen.decode()

        status, seen = await trio.to_thread.run_sync(partial(ended, by_key=True))
        assert (status, "interrupted; the same pull goes on" in seen) == (130, True), seen
        assert os.listdir(data_dir / "blobs") == [f"{digest_of(tar)[7:]}.part"]
        assert (os.listdir(data_dir / "layers"), Catalog(data_dir).images()) == ([], [])
        registry.answer = lambda _: None
        status, seen = await trio.to_thread.run_sync(partial(ended, by_key=False))
        assert status == 0, seen
        assert re.search("█ 100 %  4.0 MiB of 4.0 MiB.*image: sha256:", seen, re.DOTALL) is not None, seen
        assert "range" in registry.asked[-1].headers


async def test_an_interrupted_pull_beside_a_daemon_cancels_its_job(tmp_path: Path) -> None:
    """The job has ended when the command has."""
    data_dir = tmp_path / "data"
    tar = layer({"large": os.urandom(4 << 20)})
    async with serving() as registry:
        registry.push([tar])
        half(registry, tar)
        with running_daemon(data_dir) as daemon, daemon.client() as client:
            await trio.to_thread.run_sync(daemon.wait_url)
            words = ("image", "pull", registry.reference(), "--data-dir", data_dir)
            env, pipe = os.environ | {"SANDKASTEN_API_KEY": KEY}, subprocess.PIPE
            with Forked(words, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
                await come(data_dir, tar)
                process.send_signal(signal.SIGINT)
                said = await trio.to_thread.run_sync(partial(process.communicate, timeout=patience(20)))
            assert process.returncode == 130, said
            (job,) = (await trio.to_thread.run_sync(client.get, "/v1/jobs")).json()["jobs"]
            assert (job["state"], job["name"]) == ("cancelled", "image")
            assert [each.name for each in Catalog(data_dir).images()] == ["host"]
            assert os.listdir(data_dir / "layers") == []


async def test_a_download_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    """The process that loads does not go on by itself, with the file locked against the next pull."""
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o755)
    async with serving() as registry:
        registry.push([b""])
        config = json.loads(registry.manifests["latest"])["config"]
        registry.push_manifest(config, [{"digest": digest_of(b""), "size": 1 << 30}], "latest")
        drip = Said(200, bytes(64 << 10), endless=True, pause_s=0.02)
        registry.answer = lambda asked: drip if digest_of(b"") in asked.path else None
        words = ("image", "pull", registry.reference(), "--data-dir", data_dir)
        with Forked(words, env=os.environ, stdin=subprocess.DEVNULL) as process:
            await come(data_dir, b"")
            process.kill()

        async def is_free() -> bool:
            with (data_dir / "blobs" / f"{digest_of(b'')[7:]}.part").open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            return True

        await until(is_free)


@pytest.mark.parametrize("point", [*PULL_POINTS, ""])
async def test_a_pull_of_a_daemon_that_is_killed_goes_on_in_the_next(tmp_path: Path, point: str) -> None:
    """At each crash point, and in a download: the job is failed as interrupted, no image is there before it has its
    name, and what came is not loaded again."""
    data_dir = tmp_path / "data"
    crash = {"SANDKASTEN_CRASH_AT": point, "SANDKASTEN_CRASH_POINTS": "true"} if point else {}
    async with serving() as registry:
        tar = layer({"large": os.urandom(4 << 20)})
        registry.push([tar])
        if not point:
            half(registry, tar)
        with running_daemon(data_dir, **crash) as daemon, daemon.client() as client:
            await trio.to_thread.run_sync(daemon.wait_url)
            body = {"reference": registry.reference()}
            with contextlib.suppress(httpx.TransportError):  # the daemon may be gone before it answers
                await trio.to_thread.run_sync(partial(client.post, "/v1/images/pull", json=body))
            if not point:
                await come(data_dir, tar)
                daemon.process.kill()
            status = await trio.to_thread.run_sync(partial(daemon.process.wait, patience(20)))
            assert status == -signal.SIGKILL, daemon.log
        registry.answer = lambda _: None
        with running_daemon(data_dir) as daemon, daemon.client() as client:
            await trio.to_thread.run_sync(daemon.wait_url)
            (job,) = (await trio.to_thread.run_sync(client.get, "/v1/jobs")).json()["jobs"]
            assert (job["state"], job["error"]["error_code"]) == ("failed", "INTERRUPTED")
            is_there = point.endswith("published")
            assert ("image" in [each.name for each in Catalog(data_dir).images()]) == is_there
            done = await command(data_dir, "pull", registry.reference(), "--replace")
            assert done.returncode == 0, done.stderr
        blobs = [each for each in registry.asked if digest_of(tar) in each.path]
        assert len(blobs) == (1 if point else 2)
        assert [each for each in blobs[1:] if "range" not in each.headers] == []
    assert os.listdir(data_dir / "blobs") == []
    assert [name for name in os.listdir(data_dir / "layers") if name.startswith("+")] == []


@pytest.mark.parametrize("point", PULL_POINTS)
async def test_a_pull_that_is_killed_goes_on_in_the_next(tmp_path: Path, point: str) -> None:
    """At each crash point: no image is there before it has its name, no draft stays, and what came is not loaded
    again."""
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o755)
    async with serving() as registry:
        tar = busybox_tar(tmp_path / "x.tar").read_bytes()
        registry.push([tar])
        killed = await command(data_dir, "pull", registry.reference(), crash_at=point)
        assert killed.returncode == 1, killed.stderr
        is_there = point.endswith("published")
        assert ("image" in [each.name for each in Catalog(data_dir).images()]) == is_there
        done = await command(data_dir, "pull", registry.reference(), "--replace")
        assert done.returncode == 0, done.stderr
        assert registry.count(digest_of(tar)) == 1
    assert os.listdir(data_dir / "blobs") == []
    assert [name for name in os.listdir(data_dir / "layers") if name.startswith("+")] == []


def _layers(registry: Registry) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(registry.manifests["latest"])["layers"]
    return found
