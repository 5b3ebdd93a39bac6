"""The image store without privilege: names, aliases, life of files, and what counts as a root file system."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sandkasten.errors import InvalidImage, InvalidReference
from sandkasten.images import rootfs
from sandkasten.images.catalog import Catalog, Image, now
from sandkasten.images.registry.reference import parse_reference
from sandkasten.images.removal import remove_tree


def add(catalog: Catalog, name: str, *, replace: bool = False) -> Image:
    """Put a small valid image into the store."""
    with catalog.building(name) as directory:
        make_rootfs(directory / "rootfs")
        image = Image(name=name, kind="rootfs", created_at=now(), source="test")
        return catalog.publish(directory, image, replace=replace)


def make_rootfs(path: Path) -> None:
    (path / "etc").mkdir(parents=True)
    (path / "bin").mkdir()
    (path / "bin/sh").touch(0o755)


def remove(path: Path) -> None:
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        remove_tree(fd, path.name)
    finally:
        os.close(fd)


def test_an_alias_leads_to_its_image_until_one_of_that_name_exists(tmp_path: Path) -> None:
    """`python` is `base-1` as long as there is no image called `python`."""
    catalog = Catalog(tmp_path, aliases={"python": "base-1"})
    add(catalog, "base-1")
    assert catalog.get("python").name == "base-1"
    assert catalog.aliases_of("base-1") == ["python"]
    add(catalog, "python")
    assert catalog.get("python").name == "python"
    assert catalog.aliases_of("base-1") == []


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", ".retired", "-x", "a" * 65, "a\n", "ä", "a b", "/etc", "a//b", "a/", "a/../b", "a/.b"),
        *("a:", "a:.x", "a:-x", "a:x/../../y", "a:x:y", f"a:{'t' * 129}", "a@", "a@sha256:12", f"a@SHA256:{'0' * 64}"),
        *(f"a@sha256:{'0' * 65}", f"a@sha256:{'0' * 64}:x", "http://a/b", f"h/{'p' * 511}", "[" * 9000, "a/b" * 9000),
    ],
)
def test_malformed_names_are_refused(tmp_path: Path, name: str) -> None:
    """No name can lead out of the store or to its private directories."""
    with pytest.raises(InvalidImage, match="malformed"):
        Catalog(tmp_path).get(name)


def pulled(catalog: Catalog, text: str, name: str | None = None, *, digest: str = "") -> str:
    """Put an image into the store as a pull of that reference does; return its name."""
    reference = parse_reference(text)
    name = catalog.name_for(reference, name)
    described: dict[str, object] = {
        "kind": "rootfs",
        "created_at": f"{len(catalog.images())}",
        "source": str(reference),
        "digest": reference.digest or digest or f"sha256:{len(text):064x}",
        "tags": [reference.tag] if reference.tag else [],
    }
    with catalog.building(name) as directory:
        make_rootfs(directory / "rootfs")
        return catalog.publish(directory, Image(name=name, **described), replace=True).name  # type: ignore[arg-type]


DIGEST = f"sha256:{'ab' * 32}"


def test_tags_of_one_repository_are_images_side_by_side(tmp_path: Path) -> None:
    """The first tag is called as the repository, others by repository and tag; NAME:TAG leads to each, and one that is
    pulled again to its own, also when the first has gone. So does what was pulled, in full, by tag and by digest."""
    catalog = Catalog(tmp_path, aliases={"stable": "debian:trixie", "team:base": "debian"})
    assert pulled(catalog, "debian:bookworm") == "debian"
    assert pulled(catalog, "debian:trixie") == "debian-trixie"
    assert pulled(catalog, f"debian@{DIGEST}") == "debian-abababababab"
    assert pulled(catalog, "ghcr.io/team/app") == "app"
    assert pulled(catalog, "ghcr.io/team/app:v2", "Tools") == "Tools"
    meant = {
        "debian": "debian",
        "debian:bookworm": "debian",
        "debian:trixie": "debian-trixie",
        "library/debian:trixie": "debian-trixie",
        "docker.io/library/debian:trixie": "debian-trixie",
        f"debian@{DIGEST}": "debian-abababababab",
        f"debian:trixie@{DIGEST}": "debian-abababababab",
        "app:latest": "app",
        "ghcr.io/team/app": "app",
        "ghcr.io/team/app:v2": "Tools",
        "Tools:v2": "Tools",
        "stable": "debian-trixie",
        "team:base": "debian",
    }
    assert {name: catalog.get(name).name for name in meant} == meant
    assert catalog.aliases_of("debian-trixie") == ["stable"]
    assert catalog.get("debian-trixie").references == ["debian:trixie"]
    assert pulled(catalog, "debian:trixie") == "debian-trixie"
    catalog.delete("debian:bookworm")
    assert pulled(catalog, "debian:trixie") == "debian-trixie"
    for name, words in (
        ("debian", "; there is debian:trixie$"),
        ("debian:bookworm", "; there is debian:trixie$"),
        ("app:v2", "; there is app:latest$"),
        (f"app@{DIGEST}", "; there is app:latest$"),
        ("other.example/team/app", "; there is app:latest$"),
        ("none:x", "'none:x'$"),
    ):
        with pytest.raises(InvalidImage, match=f"there is no image.*{words}"):
            catalog.get(name)
    assert pulled(catalog, "debian:bookworm") == "debian"


def test_no_two_images_own_one_tag_of_a_name(tmp_path: Path) -> None:
    """A pull that would give an image the tag of another is refused, and one of another repository does not go beside:
    its name is taken."""
    catalog = Catalog(tmp_path)
    pulled(catalog, "debian:bookworm")
    pulled(catalog, "debian:trixie")
    for text, name in (("debian:trixie", "debian"), ("x.example/debian:trixie", "debian")):
        with pytest.raises(InvalidImage, match="debian:trixie is image 'debian-trixie'"):
            catalog.name_for(parse_reference(text), name)
    assert catalog.name_for(parse_reference("x.example/debian:sid"), None) == "debian"
    catalog.delete("debian")
    with pytest.raises(InvalidImage, match="debian:trixie is image 'debian-trixie'"):
        catalog.name_for(parse_reference("x.example/debian:trixie"), None)
    pulled(catalog, "x.example/debian:trixie", "debian-trixie-2")
    pulled(catalog, "foo:1", "bar-1")  # a name of this form is no tag of bar
    with pytest.raises(InvalidImage, match="no image 'bar:1'"):
        catalog.get("bar:1")
    pulled(catalog, f"bar:{'t' * 100}")
    with pytest.raises(InvalidReference, match="give one"):
        pulled(catalog, f"bar:{'u' * 100}")
    add(catalog, "app")
    assert catalog.name_for(parse_reference("app:1"), None) == "app", "imported: taken without --replace"
    other = {"new": parse_reference("new:1")}
    assert catalog.name_for(parse_reference("new:2"), None, under_way=other) == "new-2"


def test_what_is_made_here_may_have_a_tag(tmp_path: Path) -> None:
    """The first tag is called by the name, others by name and tag, beside images of the name that were pulled or have
    no tag; a tag that is there keeps its image. NAME:TAG leads to each, and to no image that is only called so."""
    catalog = Catalog(tmp_path)

    def made(text: str) -> str:
        name, repository, tag = catalog.place_for(text)
        with catalog.building(name) as directory:
            make_rootfs(directory / "rootfs")
            described: dict[str, object] = {"tags": [tag] if tag else [], "repository": repository}
            image = Image(name, "rootfs", now(), "", **described)  # type: ignore[arg-type]
            return catalog.publish(directory, image, replace=True).name

    add(catalog, "plain")
    pulled(catalog, "debian:trixie")
    given = ("app:v1", "app:v2", "app:v2", "app:v1", "plain:v1", "debian:mine", "debian:trixie", "app-v3", "new-1:1")
    called = ("app", "app-v2", "app-v2", "app", "plain-v1", "debian-mine", "debian", "app-v3", "new-1")
    assert tuple(made(text) for text in given) == called
    for text, name in zip(given[:6], called[:6], strict=True):
        assert catalog.get(text).name == name
        assert text in catalog.get(name).references
    for text in ("app:v3", "new:1"):
        with pytest.raises(InvalidImage, match="no image"):
            catalog.get(text)
    add(catalog, "plain-mine")
    with pytest.raises(InvalidImage, match="there is an image 'plain-mine' already"):
        catalog.place_for("plain:mine")
    for text in ("a:b:c", "a/b:c", f"a@{DIGEST}", "a:", "-a:b", f"app:{'t' * 100}"):
        with pytest.raises(InvalidImage, match="malformed"):
            catalog.place_for(text)


def test_a_stamp_changes_with_what_a_reference_means(tmp_path: Path) -> None:
    """Answers that were resolved before are good as long as the stamp is."""
    catalog = Catalog(tmp_path, aliases={"stable": "debian:trixie"})
    stamps = {name: catalog.stamp(name) for name in ("debian", "debian:trixie", "stable", "other")}
    pulled(catalog, "debian:trixie")
    changed = [name for name, stamp in stamps.items() if catalog.stamp(name) != stamp]
    assert changed == ["debian", "debian:trixie", "stable"]
    before = catalog.stamp("stable")
    assert catalog.stamp("stable") == before
    pulled(catalog, "debian:trixie", digest=DIGEST)
    assert catalog.stamp("stable") != before


def test_allowed_references_hold_for_the_image(tmp_path: Path) -> None:
    """Images that a reference in the list means may be used by any name, and nsinit is told these: also before there
    is such an image."""
    catalog = Catalog(tmp_path, allowed=["debian:trixie", "ghcr.io/team/app:v2"], aliases={"stable": "debian:trixie"})
    assert catalog.names_of(["debian:trixie", "stable", f"x@{DIGEST}", "own"]) == [
        *("debian-trixie", "stable", "x-abababababab", "own")
    ]
    pulled(catalog, "debian:bookworm")
    pulled(catalog, "debian:trixie")
    for name in ("debian:trixie", "debian-trixie", "docker.io/library/debian:trixie", "stable"):
        assert catalog.get(name).name == "debian-trixie"
    with pytest.raises(InvalidImage, match="not allowed"):
        catalog.get("debian:bookworm")
    assert [each.name for each in catalog.allowed()] == ["debian-trixie"]
    pulled(catalog, "ghcr.io/team/app:v2")
    assert catalog.names_of(["debian:trixie", "ghcr.io/team/app:v2"]) == ["debian-trixie", "app"]


def test_allowed_images_hold_for_name_or_target(tmp_path: Path) -> None:
    """A list of allowed images admits what it names, directly or through an alias."""
    add(Catalog(tmp_path), "one")
    add(Catalog(tmp_path), "two")
    aliases = {"python": "one", "other": "two"}
    assert Catalog(tmp_path, aliases=aliases, allowed=["one"]).get("python").name == "one"
    assert Catalog(tmp_path, aliases=aliases, allowed=["python"]).get("python").name == "one"
    with pytest.raises(InvalidImage, match="not allowed"):
        Catalog(tmp_path, aliases=aliases, allowed=["one"]).get("other")


def test_half_written_images_are_not_listed(tmp_path: Path) -> None:
    """A directory without a readable description is no image."""
    catalog = Catalog(tmp_path)
    add(catalog, "good")
    (tmp_path / "images/half").mkdir()
    (tmp_path / "images/bad").mkdir()
    (tmp_path / "images/bad/meta.json").write_text("{")
    assert [image.name for image in catalog.images()] == ["good"]


def test_a_description_of_other_types_is_no_image(tmp_path: Path) -> None:
    """A daemon that was broken into writes descriptions: none makes the catalogue fail, or name a path."""
    catalog = Catalog(tmp_path)
    digest = f"sha256:{'a' * 64}"
    good: dict[str, object] = {
        "kind": "layers",
        "created_at": "",
        "source": "",
        "layers": [digest],
        "config": {"env": {"A": "b"}},
    }
    changes: list[Any] = [  # JSON objects
        {"layers": ["../../etc"]},
        {"layers": 7},
        {"kind": "other"},
        {"source": ["x"]},
        {"size_bytes": "x"},
        {"config": []},
        {"config": {"env": {"A": 1}}},
        {"config": {"user": None}},
        {"unknown": 1},
    ]
    for number, change in enumerate(changes):
        (tmp_path / f"images/bad{number}").mkdir(parents=True)
        (tmp_path / f"images/bad{number}/meta.json").write_text(json.dumps(good | change))
    (tmp_path / "images/deep").mkdir()
    (tmp_path / "images/deep/meta.json").write_text("[" * 100_000)
    (tmp_path / "images/good").mkdir()
    (tmp_path / "images/good/meta.json").write_text(json.dumps(good))
    (image,) = catalog.images()
    assert (image.name, image.layers, image.config.env) == ("good", (digest,), {"A": "b"})
    assert catalog.trees("good") == [tmp_path / "layers" / ("a" * 64) / "fs"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """The files built so far go away with the exception."""
    catalog = Catalog(tmp_path)

    def build() -> None:
        with catalog.building("x") as directory:
            make_rootfs(directory / "rootfs")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        build()
    assert os.listdir(tmp_path / "images") == []


def test_a_taken_name_is_refused_and_the_image_kept(tmp_path: Path) -> None:
    """Publishing does not replace unless asked to."""
    catalog = Catalog(tmp_path)
    first = add(catalog, "x")
    with pytest.raises(InvalidImage, match="already"):
        add(catalog, "x")
    assert catalog.get("x") == first
    assert sorted(os.listdir(tmp_path / "images")) == ["x"]


def test_files_of_a_deleted_image_stay_while_a_session_exists(tmp_path: Path) -> None:
    """The lower layer of a running session is not pulled away."""
    catalog = Catalog(tmp_path)
    add(catalog, "x")
    session = tmp_path / "sessions" / "abc"
    session.mkdir(parents=True)
    assert catalog.delete("x") is False
    (kept,) = (tmp_path / "images/.retired").iterdir()
    assert (kept / "rootfs/bin/sh").exists()
    session.rmdir()
    assert catalog.sweep() is True
    assert list((tmp_path / "images/.retired").iterdir()) == []


def test_a_sweep_takes_what_was_cut_short_and_not_what_is_being_built(tmp_path: Path) -> None:
    """A build of another process is locked; one whose process died is not."""
    catalog = Catalog(tmp_path)
    with catalog.building("x") as directory:
        (directory.parent / ".new-dead/rootfs").mkdir(parents=True)
        assert catalog.sweep() is True
        assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_an_alias_can_not_be_deleted(tmp_path: Path) -> None:
    """The answer names the image it stands for."""
    catalog = Catalog(tmp_path, aliases={"python": "x"})
    add(catalog, "x")
    with pytest.raises(InvalidImage, match="alias of image 'x'"):
        catalog.delete("python")
    assert catalog.get("x").name == "x"


def test_the_description_survives_a_round_trip(tmp_path: Path) -> None:
    """An image is read as it was published."""
    catalog = Catalog(tmp_path)
    image = add(catalog, "x")
    assert catalog.get("x") == image
    assert json.loads((tmp_path / "images/x/meta.json").read_text())["kind"] == "rootfs"


@pytest.mark.slow
def test_removal_is_deep_and_follows_nothing(tmp_path: Path) -> None:
    """A chain of 3000 directories and links to outside are removed; what the links name is not touched."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "link").symlink_to(outside)
    fd = os.open(victim, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.symlink(outside, "link", dir_fd=below)
        os.close(fd)
        fd = below
    os.close(fd)
    (victim / ".lifted-0").touch()
    remove(victim)
    remove(victim)
    assert os.listdir(tmp_path) == ["outside"]
    assert os.listdir(outside) == ["kept"]


def test_a_link_in_place_of_the_tree_is_refused(tmp_path: Path) -> None:
    """The name itself is not followed, either."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real/kept").touch()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(NotADirectoryError):
        remove(tmp_path / "link")
    assert (tmp_path / "real/kept").exists()


def test_a_plain_root_has_no_problems(tmp_path: Path) -> None:
    """/etc and an executable shell are enough; missing mount points are made at create."""
    make_rootfs(tmp_path)
    assert rootfs.find_problems(str(tmp_path)) == []


@pytest.mark.parametrize("name", rootfs.MOUNT_POINTS)
def test_a_mount_point_that_is_a_link_is_a_problem(tmp_path: Path, name: str) -> None:
    """Mounting there would land elsewhere."""
    make_rootfs(tmp_path)
    (tmp_path / name).symlink_to("/etc")
    assert rootfs.find_problems(str(tmp_path)) == [f"/{name} is no plain directory, so nothing can be mounted there"]


def test_links_to_the_shell_resolve_inside_the_image(tmp_path: Path) -> None:
    """An absolute link and `..` mean the image's root, and a link that leads outside only leads to nothing."""
    make_rootfs(tmp_path)
    shell = tmp_path / "bin/sh"
    shell.unlink()
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt/busybox").touch(0o755)
    for target in ("/opt/busybox", "../../../../opt/busybox"):
        shell.symlink_to(target)
        assert rootfs.find_problems(str(tmp_path)) == []
        shell.unlink()
    shell.symlink_to("/usr/bin/env")
    assert rootfs.find_problems(str(tmp_path)) == ["there is no shell (/bin/bash or /bin/sh)"]
    shell.unlink()
    shell.symlink_to("sh")
    assert rootfs.find_problems(str(tmp_path)) == ["there is no shell (/bin/bash or /bin/sh)"]


def test_an_archive_of_layers_is_named_as_such(tmp_path: Path) -> None:
    """A user who gives such an archive as a root file system is told what takes it."""
    (tmp_path / "manifest.json").touch()
    (problem,) = rootfs.find_problems(str(tmp_path))
    assert "archive of layers" in problem
