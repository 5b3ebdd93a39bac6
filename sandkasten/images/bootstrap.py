"""A system of Debian packages made by `mmdebstrap` and imported on the way, for the command line of root alone.

mmdebstrap runs in a process and mount namespace of its own, which ends with this process, and its mounts and programs
with it. Where root has subordinate ids, the packages' scripts run as those and have no power over the machine. Else
they run as root: they are signed by the distribution that this machine is made of, or that the operator names.
The archive goes to nsinit's jail as any other: this process reads no byte of it. Blocking: call it from a thread.
Sources: mmdebstrap(1); sources.list(5); subuid(5); unshare(1); setpriv(1); dpkg(1), --path-exclude.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import attrs

from sandkasten.config import ConfigError
from sandkasten.crash import Crash
from sandkasten.errors import InvalidImage
from sandkasten.images.catalog import Catalog, Image, check_name
from sandkasten.images.importing import publish_layer
from sandkasten.images.layers import LayerMeta, open_store
from sandkasten.images.recipes import Recipe
from sandkasten.images.registry.documents import Platform

Told = Callable[[int, int, str], None]
"""Takes the number of a step, how many there are, and its name. Called from another thread."""

STEPS = {
    "running apt-get update": "reading lists of packages",
    "downloading packages": "downloading packages",
    "extracting archives": "unpacking the least system",
    "installing essential": "installing the least system",
    "installing remaining": "installing packages",
    "running --customize-hook": "running the recipe's commands",
    "cleaning": "cleaning up",
    "creating tarball": "making the image",
}
"""Words of mmdebstrap as it begins a step, and the step's name for people."""
_COMPONENTS = {"debian": "main", "ubuntu": "main universe"}
_SOURCE = re.compile(r"([a-z][a-z0-9-]*):([a-z][a-z0-9.-]*)\Z")
_URL = re.compile(r"(https?|file)://[^\s\[\]@]+\Z")
_LEAST_IDS = 65536
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROXIES = ("http_proxy", "https_proxy", "no_proxy")
_LINES_KEPT = 200
_ERRORS_TOLD = 5
_REPEATS = re.compile(r"=<\$fd>.* failed$|^mmdebstrap failed to run$")


@attrs.frozen
class PackageSource:
    """A release, and where its packages come from: files or lines in the form of sources.list(5)."""

    distribution: str
    release: str
    entries: Sequence[str]

    def __str__(self) -> str:
        return f"{self.distribution}:{self.release}"


def find_source(wanted: str = "", mirror: str | None = None, *, etc: Path = Path("/etc")) -> PackageSource:
    """Return where the packages of DISTRIBUTION:RELEASE come from: by default this machine's own release, from where
    this machine has its packages.

    Raises:
        ConfigError: the release or the mirror is malformed, or the machine has no source of that release.
    """
    own_distribution, own_release = _own_release(etc)
    distribution, release = own_distribution, own_release
    if wanted:
        match = _SOURCE.match(wanted)
        if match is None:
            raise ConfigError(f"{wanted[:64]!r} is no release: DISTRIBUTION:RELEASE, such as debian:bookworm")
        distribution, release = match.groups()
    if mirror is not None:
        if not _URL.match(mirror):  # a password would be in the arguments of programs, and in the image
            raise ConfigError("the mirror is a URL of http, https or file, without a name or a password in it")
        if distribution not in _COMPONENTS:
            raise ConfigError(f"a mirror is one of {' or '.join(_COMPONENTS)}, not of {distribution!r}")
        return PackageSource(distribution, release, (f"deb {mirror} {release} {_COMPONENTS[distribution]}",))
    entries = _machine_sources(etc / "apt", release) if distribution == own_distribution else []
    if not entries:
        raise ConfigError(f"apt of this machine has no source of {distribution}:{release}: name one with --mirror URL")
    return PackageSource(distribution, release, tuple(map(str, entries)))


def _own_release(etc: Path) -> tuple[str, str]:
    try:
        lines = (etc / "os-release").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    said = {name: value.strip("\"'") for name, _, value in (line.partition("=") for line in lines)}
    if not said.get("ID") or not said.get("VERSION_CODENAME"):
        return "", ""
    return said["ID"], said["VERSION_CODENAME"]


def _machine_sources(apt: Path, release: str) -> list[Path]:
    """Return the files, in either of apt's formats, that offer a release or its updates from a `main` component.

    Raises:
        ConfigError: one of them has a password, which would be in the image.
    """
    suites = rf"{re.escape(release)}(-updates|-security|/updates)?"
    one_line = re.compile(rf"^deb\s+(\[[^\]]*\]\s+)?\S+\s+{suites}\s+(.*\s)?main(\s|$)", re.MULTILINE)
    fields = re.compile(rf"^Suites:(.*\s)?{suites}(\s|$)", re.MULTILINE)
    main = re.compile(r"^Components:(.*\s)?main(\s|$)", re.MULTILINE)
    files = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    found = []
    for path in files:
        if path.suffix not in (".list", ".sources") or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        if one_line.search(text) or (fields.search(text) and main.search(text)):
            if re.search(r"://[^/\s]*@", text):
                raise ConfigError(f"{path} has a password, which the image would show: name a source with --mirror URL")
            found.append(path)
    return found


def build_system(
    catalog: Catalog,
    name: str,
    recipe: Recipe,
    source: PackageSource,
    *,
    replace: bool = False,
    reserve_bytes: int = 0,
    told: Told = lambda _number, _all, _name: None,
    crash: Crash | None = None,
) -> tuple[Image, LayerMeta]:
    """Make image `name`; return it and its one layer. `reserve_bytes`: the room that the disk keeps. A build that
    fails leaves nothing.

    Raises:
        ConfigError: the machine has no mmdebstrap.
        InvalidImage: the name is malformed or taken, mmdebstrap failed, or what it made is no usable root.
        DiskFull: the disk has no room for it.
        NsinitLost: nsinit died.
    """
    crash = crash or Crash()
    check_name(name)
    if not replace and any(image.name == name for image in catalog.images()):
        raise InvalidImage(f"there is an image {name!r} already: --replace takes its place", image=name)
    with open_store(catalog.data_dir, crash_at=crash.take_foreign()) as store:
        with system_archive(recipe, source, told) as (archive, wait):
            try:
                layer = store.unpack_layer(archive.fileno(), reserve_bytes=reserve_bytes)
            except InvalidImage:
                if not os.read(archive.fileno(), 1):  # at its end: if the maker failed, it says more
                    wait()
                raise
            try:
                wait()
            except InvalidImage:
                if layer.is_new:
                    store.collect(grace_s=0, only=[layer.diff_id])
                raise
        return publish_layer(
            catalog,
            store,
            name,
            layer,
            source=str(source),
            config=recipe.config,
            platform=str(Platform.own()),
            replace=replace,
            crash=crash,
        ), layer


@contextlib.contextmanager
def system_archive(recipe: Recipe, source: PackageSource, told: Told) -> Iterator[tuple[IO[bytes], Callable[[], None]]]:
    """Start mmdebstrap; yield the tar archive that it writes, and a function that waits for its end and raises
    `InvalidImage` if it failed. When the block is left, all its programs have ended, and its files are gone.

    Raises:
        ConfigError: the machine has no mmdebstrap.
    """
    if shutil.which("mmdebstrap", path=_PATH) is None:
        raise ConfigError("images of Debian packages are made by mmdebstrap: apt-get install mmdebstrap")
    # Not in the data directory, which is the daemon's: root must not work where others can rename.
    with tempfile.TemporaryDirectory(
        prefix="sandkasten-build-", dir=os.environ.get("TMPDIR") or "/var/tmp"
    ) as directory:
        os.chmod(directory, 0o711)  # apt downloads as a user of its own
        process = subprocess.Popen(
            _command(recipe, source),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(directory),
            cwd="/",
            umask=0o022,
            start_new_session=True,  # Ctrl-C is for this process, which ends all of them
        )
        assert process.stdout is not None
        assert process.stderr is not None
        kept: deque[str] = deque(maxlen=_LINES_KEPT)
        listener = threading.Thread(target=_listen, args=(process.stderr, told, kept), daemon=True)
        listener.start()

        def wait() -> None:
            status = process.wait()
            listener.join()  # every program of it has the other end, so the last has ended
            if status:
                raise InvalidImage(f"mmdebstrap failed: {reason_of([*kept]) or f'status {status}'}")

        try:
            yield process.stdout, wait
        finally:
            process.stdout.close()
            process.kill()
            process.wait()
            listener.join()
            process.stderr.close()


def reason_of(lines: Sequence[str]) -> str:
    """Return the errors that apt told first, or the last line of a command that failed; mmdebstrap's own errors behind
    them only repeat its arguments."""
    errors = [line.removeprefix("E: ") for line in lines if line.startswith("E: ")]
    if errors and "command failed: " in errors[0]:
        others = [line for line in lines if line and line[1:3] != ": "]
        return f"a command of the recipe failed: {others[-1]}" if others else errors[0]
    return "; ".join([line for line in errors if not _REPEATS.search(line)][:_ERRORS_TOLD] or errors[:1])


def _listen(said: IO[bytes], told: Told, kept: deque[str]) -> None:
    names = list(STEPS.values())
    reached = 0
    for raw in said:
        line = raw.decode(errors="replace").rstrip()
        kept.append(line)
        for beginning, name in STEPS.items():
            number = names.index(name) + 1
            if line.startswith(f"I: {beginning}") and number > reached:
                reached = number
                with contextlib.suppress(OSError):  # where nobody reads any more, mmdebstrap must not wait
                    told(number, len(names), name)


def _command(recipe: Recipe, source: PackageSource) -> list[str]:
    """Return the arguments that make the system. The processes end with their parent, all of them at once."""
    hooks = [f'chroot "$1" env -u TMPDIR HOME=/root sh -ec {shlex.quote(step)} >&2' for step in recipe.run]
    hooks.append('rm -f "$1/etc/hostname" "$1/etc/resolv.conf"')  # the machine's own, which mmdebstrap copies
    return [
        *("setpriv", "--pdeathsig", "KILL"),
        *("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"),
        *("mmdebstrap", f"--mode={'unshare' if has_subordinate_ids() else 'root'}"),
        *("--variant=minbase", "--format=tar", "--skip=output/dev"),
        *(f"--include={each}" for each in recipe.include),
        "--dpkgopt=force-unsafe-io",  # dpkg(1): no fsync(2) for each file, here and in sessions, which end with a crash
        *(f"--dpkgopt=path-exclude={each}" for each in recipe.exclude),
        *(f"--customize-hook={each}" for each in hooks),
        *(source.release, "-", *source.entries),
    ]


def has_subordinate_ids(etc: Path = Path("/etc")) -> bool:
    """Whether root may map ids enough for a system, so that mmdebstrap needs no root (subuid(5), subgid(5))."""
    if shutil.which("newuidmap", path=_PATH) is None:
        return False
    for name in ("subuid", "subgid"):
        try:
            lines = [line.split(":") for line in (etc / name).read_text().splitlines()]
        except OSError:
            return False
        counts = (int(line[2]) for line in lines if len(line) == 3 and line[0] in ("root", "0") and line[2].isdigit())
        if max(counts, default=0) < _LEAST_IDS:
            return False
    return True


def _environment(directory: str) -> dict[str, str]:
    """Return the environment of mmdebstrap, and of scripts of packages: nothing of this process but its proxies, or
    else those of apt (apt.conf(5), Acquire::http::Proxy)."""
    proxies = {name: value for name in _PROXIES if (value := os.environ.get(name) or os.environ.get(name.upper()))}
    for scheme in ("http", "https"):
        command = ("apt-config", "dump", "--no-empty", "--format", "%v%n", f"Acquire::{scheme}::Proxy")
        with contextlib.suppress(OSError):
            found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
            if found and found != "DIRECT":
                proxies.setdefault(f"{scheme}_proxy", found.splitlines()[0])
    return {"PATH": _PATH, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", "TMPDIR": directory, **proxies}
