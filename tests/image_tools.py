"""The distribution's own registry on loopback, and its tools for images, extracted from their packages.

Sources: docker-registry's config.yml; umoci(1); skopeo-copy(1).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import trio

from tests import debian
from tests.waiting import patience


@attrs.frozen
class Tools:
    """The registry at `place`, and the tools that make and push images."""

    place: str
    umoci: Path
    skopeo: Path
    libraries: str
    directory: Path

    async def answers(self) -> bool:
        """Whether the registry takes connections by now."""
        host, _, port = self.place.partition(":")
        try:
            async with await trio.open_tcp_stream(host, int(port)):
                return True
        except OSError:
            return False

    def make(self, *arguments: str | Path) -> None:
        """Run umoci."""
        self._run(self.umoci, *arguments)

    def copy(self, *arguments: str | Path) -> None:
        """Run `skopeo copy`."""
        self._run(self.skopeo, "--insecure-policy", "copy", *arguments)

    def push(self, tag: str, *options: str) -> str:
        """Push the image of that tag; return its digest."""
        target = f"docker://{self.place}/team/image:{tag}"
        flags = ("--dest-tls-verify=false", f"--digestfile={self.directory}/digest")
        self.copy(*flags, *options, f"oci:{self.directory}/layout:{tag}", target)
        return (self.directory / "digest").read_text().strip()

    def _run(self, *command: str | Path) -> None:
        done = subprocess.run(
            command,
            env=os.environ | {"LD_LIBRARY_PATH": self.libraries},
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=False,
        )
        assert done.returncode == 0, done.stderr


@contextmanager
def running(directory: Path, *, users: str = "") -> Iterator[Tools]:
    """Run the registry, whose files are in `directory`. `users`: a file of htpasswd(1), with bcrypt, whose names and
    passwords it wants. Raises `debian.Unavailable`."""
    libraries = f"usr/lib/{os.uname().machine}-linux-gnu"
    server = debian.program("docker-registry", "usr/bin/docker-registry")
    umoci, skopeo = debian.program("umoci", "usr/bin/umoci"), debian.program("skopeo", "usr/bin/skopeo")
    found = [debian.program(name, libraries) for name in ("libgpgme11", "libassuan0")]
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    config = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(directory / "registry")}},
        "http": {"addr": place},
        "log": {"level": "error"},
    }
    if users:
        (directory / "users").write_text(users)
        config["auth"] = {"htpasswd": {"realm": "x", "path": str(directory / "users")}}
    (directory / "config.yml").write_text(json.dumps(config))
    with (directory / "registry.log").open("wb") as log:
        process = subprocess.Popen([server, "serve", directory / "config.yml"], stdout=log, stderr=log)
    try:
        yield Tools(place, umoci, skopeo, ":".join(map(str, found)), directory)
    finally:
        process.kill()
        process.wait(patience())
