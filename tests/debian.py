"""Parts of the distribution's archive for tests: made or fetched once, kept in the user's cache, never required.

Uses the machine's own apt sources and names no host. Raises `Unavailable` with the reason where something can't be had;
tests skip with it. Sources: apt-get(8), mmdebstrap(1).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandkasten.config import ConfigError
from sandkasten.errors import InvalidImage
from sandkasten.images.bootstrap import PackageSource, find_source, system_archive
from sandkasten.images.recipes import Recipe, load_recipe
from tests.waiting import patience

_BUILD_S = 600


class Unavailable(Exception):
    """The machine can't provide it; the message is the reason to skip."""


def cache_dir() -> Path:
    """Return the directory for what is dear to make; it may be removed at any time."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sandkasten"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


@contextmanager
def exclusive(name: str) -> Iterator[Path]:
    """Hold the cache entry `name` against other test runs and return its path."""
    with (cache_dir() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache_dir() / name


def minbase_tar() -> Path:
    """Return a tar of the smallest system of this machine's own release."""
    if shutil.which("mmdebstrap") is None:
        raise Unavailable("needs mmdebstrap")
    suite = codename()
    with exclusive(f"minbase-{suite}.tar") as path:
        if not path.exists():
            made = path.with_name(f".{path.name}.part")
            run(
                "mmdebstrap",
                "--quiet",
                "--mode=root",
                "--variant=minbase",
                "--format=tar",
                suite,
                made,
                *source().entries,
            )
            made.rename(path)
        return path


def recipe_tar(name: str) -> tuple[Path, Recipe]:
    """Return a tar of the system that a shipped recipe makes, and the recipe."""
    recipe = load_recipe(name)[1]
    with exclusive(f"recipe-{name}-{codename()}-{recipe.digest[:16]}.tar") as path:
        if not path.exists():
            made = path.with_name(f".{path.name}.part")
            try:
                with system_archive(recipe, source(), lambda *_: None) as (archive, wait), made.open("wb") as file:
                    shutil.copyfileobj(archive, file)
                    wait()
            except (ConfigError, InvalidImage) as error:
                raise Unavailable(str(error)) from error
            for older in path.parent.glob(f"recipe-{name}-*.tar"):
                older.unlink()
            made.rename(path)
        return path, recipe


def program(package: str, path: str) -> Path:
    """Return a program of a package that is not installed, so that no service of it starts. Its libraries are the
    machine's."""
    with exclusive(f"{package}-{codename()}") as directory:
        if not (directory / path).exists():
            directory.mkdir(exist_ok=True)
            run("apt-get", "-q", "download", package, cwd=directory)
            (archive,) = directory.glob("*.deb")
            run("dpkg-deb", "--extract", archive, directory)
            archive.unlink()
        return directory / path


def codename() -> str:
    """Return the release this machine runs."""
    match = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE)
    if match is None:
        raise Unavailable("needs a Debian or Ubuntu machine")
    return match[1]


def source() -> PackageSource:
    """Return where this machine has packages of its release from."""
    try:
        return find_source()
    except ConfigError as error:
        raise Unavailable(str(error)) from error


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return its output; raise `Unavailable` with its last line if it fails."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=patience(_BUILD_S), check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{command[0]} failed: {last}")
    return done.stdout
