"""The file of credentials for registries: Docker's form, closed to others."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path

import pytest

from sandkasten.config import ConfigError
from sandkasten.images.registry.credentials import Credentials, read_credentials, write_credentials

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
    """It may have been read already, or lead to a file of somebody else's."""
    path, link = tmp_path / "auth.json", tmp_path / "link"
    path.write_text("{}")
    path.chmod(0o640)
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_credentials(path, "a.b")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="link"):
        read_credentials(link, "a.b")
