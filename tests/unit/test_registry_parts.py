"""References of images and the file of credentials for registries: what is read, and what is refused."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path

import pytest

from sandkasten.config import ConfigError
from sandkasten.errors import InvalidReference
from sandkasten.images.registry.credentials import Credentials, read_credentials, write_credentials
from sandkasten.images.registry.documents import Blob, Manifest, read_configuration
from sandkasten.images.registry.reference import Reference, parse_reference

HEX = "a" * 64
GOOD = {
    "debian": ("docker.io", "library/debian", "latest", None),
    "debian:bookworm": ("docker.io", "library/debian", "bookworm", None),
    "owner/image": ("docker.io", "owner/image", "latest", None),
    "docker.io/debian": ("docker.io", "library/debian", "latest", None),
    "index.docker.io/owner/x:1": ("docker.io", "owner/x", "1", None),
    "localhost/x": ("localhost", "x", "latest", None),
    "localhost:5000/x:2": ("localhost:5000", "x", "2", None),
    "127.0.0.1:5000/a/b/c:v1.0_x-y": ("127.0.0.1:5000", "a/b/c", "v1.0_x-y", None),
    "[::1]:5000/x": ("[::1]:5000", "x", "latest", None),
    "[::1]/x": ("[::1]", "x", "latest", None),
    "GHCR.io/owner/x": ("ghcr.io", "owner/x", "latest", None),
    f"quay.io/o/x@sha256:{HEX}": ("quay.io", "o/x", None, f"sha256:{HEX}"),
    f"quay.io/o/x:tag@sha256:{HEX}": ("quay.io", "o/x", "tag", f"sha256:{HEX}"),
    "a.b:5000": ("docker.io", "library/a.b", "5000", None),
    "a.b/x__y/z--1.2": ("a.b", "x__y/z--1.2", "latest", None),
}
BAD = (
    *(
        "",
        " ",
        "https://quay.io/x",
        "x:",
        "x@",
        f"x@sha256:{HEX[1:]}",
        f"x@sha256:{HEX.upper()}",
        f"x@md5:{HEX}",
        ":tag",
    ),
    *(
        "X",
        "x/Y",
        "x//y",
        "/x",
        "x/",
        "x_",
        "-x",
        "x..y",
        "x___y",
        "x:.tag",
        "x:-tag",
        f"x:{'t' * 129}",
        "x:a b",
        "x\0",
    ),
    *("a.b:0/x", "a.b:65536/x", "a.b:/x", "a.b:port/x", "[::g]/x", "[127.0.0.1]/x", "a..b/x", "-a.b/x", "user@a.b/x"),
    *("a.b/" + "x" * 256, "é", "x\n", "../x", "a.b/../x", "a.b/x/.", "[::1]:5000"),
)


@pytest.mark.parametrize(("text", "parts"), GOOD.items(), ids=str)
def test_a_reference_is_read_as_docker_reads_it(text: str, parts: tuple[str, ...]) -> None:
    """Registry, repository, tag and digest are those of the reference, and its full form is read as the same."""
    found = parse_reference(text)
    assert found == Reference(*parts)
    assert parse_reference(str(found)) == found


@pytest.mark.parametrize("text", BAD, ids=repr)
def test_what_is_no_reference_is_refused_with_the_part_at_fault(text: str) -> None:
    """The message is one line of ASCII, also of a text that is neither."""
    with pytest.raises(InvalidReference) as refused:
        parse_reference(text)
    assert refused.value.message.isascii()
    assert refused.value.message.isprintable()


def test_the_name_of_an_image_is_the_last_part_of_its_repository() -> None:
    """If that is no name for an image here, the caller must give one."""
    assert parse_reference("quay.io/owner/python:3").name == "python"
    with pytest.raises(InvalidReference, match="give one"):
        _ = parse_reference("quay.io/" + "x" * 65).name


OWNER = (os.getuid(), os.getgid())


def test_what_is_written_is_read_again_in_dockers_form(tmp_path: Path) -> None:
    """Entries of other registries, and fields that mean nothing here, stay; Docker Hub has the key that Docker uses."""
    path = tmp_path / "auth.json"
    assert read_credentials(path, "a.example") is None
    path.write_text(json.dumps({"credsStore": "x", "auths": {"other": {"auth": base64.b64encode(b"o:p").decode()}}}))
    path.chmod(0o600)
    for registry in ("a.example:5000", "docker.io"):
        write_credentials(path, registry, Credentials("me", "p:w é"), owner=OWNER)
        assert read_credentials(path, registry) == Credentials("me", "p:w é")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_credentials(path, "other") == Credentials("o", "p")
    content = json.loads(path.read_text())
    assert content["credsStore"] == "x"
    assert set(content["auths"]) == {"other", "a.example:5000", "https://index.docker.io/v1/"}
    assert [each.name for each in tmp_path.iterdir()] == ["auth.json"]


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000, '{"auths": {"a.b": {"auth": "!!"}}}'])
def test_a_file_that_is_none_is_refused_without_its_content(tmp_path: Path, content: str) -> None:
    """The message names the path."""
    path = tmp_path / "auth.json"
    path.touch(mode=0o600)
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"auth\.json") as refused:
        read_credentials(path, "a.b")
    assert "!!" not in str(refused.value)


def test_a_file_that_others_can_read_or_a_link_is_refused(tmp_path: Path) -> None:
    """A password in it may have been read already, and a link may lead to a file of somebody else's."""
    path, link = tmp_path / "auth.json", tmp_path / "link"
    path.write_text("{}")
    path.chmod(0o640)
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_credentials(path, "a.b")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="link"):
        read_credentials(link, "a.b")


# Documents ------------------------------------------------------------------------------------------------------------

EMPTY = {"created_by": "ENV A=1", "empty_layer": True}
LONG = "x" * 5000


@pytest.mark.parametrize(
    ("said", "history"),
    [
        ([{"created_by": "FROM"}, EMPTY, {"created_by": LONG}], ("FROM", LONG[:400])),
        ([{"comment": "no word"}, {"created_by": "RUN"}], ("RUN",)),
        ([{"created_by": "RUN"}, {}], ("RUN", "")),
        ([{"created_by": "of one layer alone"}], ()),
        ([{"created_by": ["RUN"]}, {"created_by": 1}], ()),
        *((each, ()) for each in (None, "RUN", {"a": 1}, [1, "2"])),
    ],
)
def test_the_history_says_what_has_made_each_layer_or_nothing(said: object, history: tuple[str, ...]) -> None:
    """Entries without a layer are left out, long ones are cut, and unknown ones are empty but for those at the bottom.
    A list that fits no layers, or is none, is no reason to refuse the image."""
    digests = [f"sha256:{each * 64}" for each in "ab"]
    config = {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": digests}, "history": said}
    manifest = Manifest(Blob(digests[0], 1), [Blob(each, 1) for each in digests])
    assert read_configuration(json.dumps(config).encode(), manifest).config.history == history
