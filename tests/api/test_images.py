"""Images over HTTP: what is listed, to whom, looked at and deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from nsinit.wire.protocol import CollectLayers, DeleteImage
from sandkasten.config import PoolSettings, PoolSize
from sandkasten.images.layers import describe
from sandkasten.model.image import ImageConfig
from tests.api.harness import running_front
from tests.api.keys import CONFINED, ISSUED, READ

DIGESTS = [f"sha256:{each * 64}" for each in "abcd"]
FULL = f"sha256:{'f' * 64}"


def put_layer(data_dir: Path, digest: str, size_bytes: int) -> None:
    """Leave the description of a layer where nsinit leaves it."""
    directory = data_dir / "layers" / digest[7:]
    directory.mkdir(parents=True)
    counts = f'{{"entries": 1, "size_bytes": {size_bytes}, "skipped": 0, "privileged": 0}}'
    (directory / "meta.json").write_text(counts)


def put_image(data_dir: Path, name: str, layers: list[str], source: str, tag: str, **labels: str) -> None:
    """Leave the description of a pulled image where nsinit leaves it."""
    directory = data_dir / "images" / name
    directory.mkdir(parents=True)
    config = ImageConfig(labels=labels, exposed_ports=("80/tcp",), entrypoint=("/serve",), cmd=("--all", "now"))
    (directory / "meta.json").write_bytes(describe(layers, config, FULL, source, "linux/amd64", [tag], 3, 60))


def names_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [each["name"] for each in answer.json()["images"]]


def refusal(answer: httpx.Response) -> tuple[int, str, dict[str, Any]]:
    said = answer.json()
    return answer.status_code, said["error_code"], said["details"]


async def test_images_are_listed_looked_at_and_kept_while_something_names_them() -> None:
    """By label and page by page; each by name, reference and alias, also one called as a request; with what is shared,
    missing, and in use. A session or a pool that names an image keeps it, by whatever name."""
    pool = PoolSettings(enabled=True, images={"debian:trixie": PoolSize(0, 1)})
    aliases = {"python": "host", "stable": "debian:trixie"}
    async with running_front(pool=pool, image_aliases=aliases) as running, running.client() as client:
        data_dir = running.supervisor._config.data_dir
        for digest, size in zip(DIGESTS[:3], (10, 20, 30), strict=True):
            put_layer(data_dir, digest, size)
        put_image(data_dir, "debian", DIGESTS[:2], "debian:bookworm", "bookworm", team="a", kind="base")
        put_image(data_dir, "debian-trixie", DIGESTS[1:3], "docker.io/library/debian:trixie", "trixie", team="b")
        put_image(data_dir, "pull", [DIGESTS[3]], "ghcr.io/team/pull:v1", "v1", team="a")

        everything = ["debian", "debian-trixie", "host", "pull"]
        assert names_of(await client.get("/v1/images")) == everything
        assert names_of(await client.get("/v1/images?label=team=a")) == ["debian", "pull"]
        assert names_of(await client.get("/v1/images?label=team&label=kind=base")) == ["debian"]
        found: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page = await client.get("/v1/images", params={"limit": 3, **({"cursor": cursor} if cursor else {})})
            found, cursor = found + names_of(page), page.json().get("next_cursor")
        assert found == everything
        assert (await client.get("/v1/images?cursor=*")).status_code == 400

        for name in ("debian-trixie", "debian:trixie", "stable", "docker.io%2Flibrary%2Fdebian:trixie"):
            session = (await client.post("/v1/sessions", json={"image": name.replace("%2F", "/")})).json()
            assert session["image"] == name.replace("%2F", "/")
            (listed,) = (await client.get("/v1/images", params={"name": session["image"]})).json()["images"]
            image = (await client.get(f"/v1/images/{name}")).json()
            assert image == listed
            assert (image["name"], image["references"], image["alias_names"]) == (
                *("debian-trixie", ["debian:trixie"]),
                ["stable"],
            )
            assert (image["size_bytes"], image["shared_bytes"], image["problems"]) == (60, 20, [])
            assert image["in_use"] == {"sessions": [session["id"]], "pools": ["debian:trixie"]}
            refused = refusal(await client.delete(f"/v1/images/{name}"))
            assert refused in (
                (409, "IMAGE_IN_USE", image["in_use"]),
                (400, "INVALID_IMAGE", {"image": "stable"}),
            )
            assert (await client.delete(f"/v1/sessions/{session['id']}")).status_code == 200
        refused = refusal(await client.delete("/v1/images", params={"name": "debian:trixie"}))
        assert refused == (409, "IMAGE_IN_USE", {"sessions": [], "pools": ["debian:trixie"]})

        image = (await client.get("/v1/images/pull")).json()
        assert (image["layers"], image["config"]["exposed_ports"]) == ([], ["80/tcp"])
        assert image["problems"] == [f"layer {DIGESTS[3]} is missing, or its description is damaged"]
        assert (await client.delete("/v1/images/ghcr.io%2Fteam%2Fpull:v1")).status_code == 200
        asked = [each for each in running.tree.nsinit.requests if isinstance(each, DeleteImage | CollectLayers)]
        assert [getattr(each, "name", getattr(each, "only", None)) for each in asked] == ["pull", (DIGESTS[3],)]
        for name in ("..%2F..%2Fetc", "a:b:c", "%FF", "a%00b"):
            assert (await client.get(f"/v1/images/{name}")).status_code in (400, 404)

        (data_dir / "blobs").mkdir(exist_ok=True)
        (data_dir / "blobs" / f"{'e' * 64}.part").write_bytes(bytes(7))
        for dry_run in (True, False):
            pruned = (await client.post("/v1/images/prune", json={"older_than_s": 0, "dry_run": dry_run})).json()
            assert (pruned["blobs"], pruned["freed_bytes"]) == (1, 7)


async def test_other_keys_see_the_images_that_sessions_may_have() -> None:
    """All of them, of a key without the right to administer; of the sessions that use them a confined key sees its
    own, and no pool."""
    pool = PoolSettings(enabled=True, images={"python": PoolSize(0, 1)})
    async with running_front(pool=pool, allowed_images=("python", "debian:trixie")) as running:
        running.ring.replace([each.key for each in ISSUED])
        data_dir = running.supervisor._config.data_dir
        put_image(data_dir, "debian", DIGESTS[:1], "debian:bookworm", "bookworm")
        put_image(data_dir, "debian-trixie", DIGESTS[:1], "debian:trixie", "trixie")
        async with running.client() as client:
            assert names_of(await client.get("/v1/images")) == ["debian", "debian-trixie", "host"]
            foreign = (await client.post("/v1/sessions", json={"labels": {"team": "b"}})).json()["id"]
        async with running.client(token=READ.token) as client:
            assert names_of(await client.get("/v1/images")) == ["debian-trixie", "host"]
        async with running.client(token=CONFINED.token) as client:
            assert names_of(await client.get("/v1/images")) == ["debian-trixie", "host"]
            own = (await client.post("/v1/sessions")).json()["id"]
            assert (await client.get("/v1/images/python")).json()["in_use"] == {"sessions": [own], "pools": []}
            assert foreign not in (await client.get("/v1/images")).text
            assert refusal(await client.get("/v1/images/debian:bookworm"))[:2] == (400, "INVALID_IMAGE")
            assert (await client.delete("/v1/images/debian")).status_code == 403


async def test_a_process_without_a_command_is_the_image_s() -> None:
    """ENTRYPOINT and CMD are one command; where there is none the command is required."""
    async with running_front() as running, running.client() as client:
        put_image(running.supervisor._config.data_dir, "debian", DIGESTS[:1], "debian:bookworm", "bookworm")
        session = (await client.post("/v1/sessions", json={"image": "debian:bookworm"})).json()["id"]
        process = await client.post(f"/v1/sessions/{session}/processes", json={})
        assert (process.status_code, process.json()["command"]) == (201, "/serve --all now")
        session = (await client.post("/v1/sessions")).json()["id"]
        refused = refusal(await client.post(f"/v1/sessions/{session}/processes", json={}))
        assert refused == (400, "INVALID_REQUEST", {"cmd": "is required"})


async def test_an_image_is_exported_for_administrators() -> None:
    """Others are refused, and so are images that are none of layers, and what is no compression; a HEAD packs
    nothing."""
    async with running_front() as running:
        running.ring.replace([each.key for each in ISSUED])
        put_image(running.supervisor._config.data_dir, "debian", DIGESTS[:1], "debian:bookworm", "bookworm")
        async with running.client(token=CONFINED.token) as client:
            assert (await client.get("/v1/images/debian/export")).status_code == 403
        async with running.client() as client:
            head = await client.head("/v1/images/debian:bookworm/export")
            said = head.headers["content-type"], head.headers["content-disposition"]
            assert (head.status_code, *said) == (200, "application/x-tar", 'attachment; filename="debian.tar"')
            refused = await client.get("/v1/images/debian/export", params={"compression": "xz"})
            assert refusal(refused)[:2] == (400, "INVALID_REQUEST")
            assert refusal(await client.get("/v1/images/host/export"))[:2] == (400, "INVALID_IMAGE")
            assert refusal(await client.get("/v1/images/none/export"))[:2] == (400, "INVALID_IMAGE")
