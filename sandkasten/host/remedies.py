"""Fixes that this machine can run. A fix is text with its commands in backquotes.

A command that is missing here gets the installation of its package in front, in the words of this machine's package
manager. Fixes are written for Debian; the tables below name what other systems call the same.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where root finds programs. Not the caller's PATH: an ordinary user's may lack the directories of administration."""

COMMAND = re.compile(r"`([^`]+)`")
_DEBIAN = "apt-get install"
_INSTALLERS = (_DEBIAN, "dnf install", "zypper install", "pacman -S", "apk add")

PACKAGES: Mapping[str, str] = {
    "apparmor_parser": "apparmor",
    "modprobe": "kmod",
    "swapoff": "mount",
    "sysctl": "procps",
    "tune2fs": "e2fsprogs",
}
"""Debian's package of each command that a fix names and a small system may lack."""

_OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "dnf install": {"mount": "util-linux", "procps": "procps-ng"},
    "zypper install": {"mount": "util-linux"},
    "pacman -S": {"mount": "util-linux", "procps": "procps-ng"},
    "apk add": {"mount": "util-linux"},
}

Which = Callable[[str], str | None]
"""Returns the path of a program, None if there is none."""


def find_program(name: str) -> str | None:
    """Return the path of a program that root would find."""
    return shutil.which(name, path=SEARCH_PATH)


def runnable(fix: str, which: Which = find_program) -> str:
    """Return the fix with commands that can be typed on this machine."""
    return COMMAND.sub(lambda match: _command(match[1], which), fix)


def _command(command: str, which: Which) -> str:
    if command.startswith(_DEBIAN):
        return _install(command.removeprefix(_DEBIAN).strip(), which)
    word = command.split(" ")[0]
    if word == "sandkasten" and which(word) is None:
        here = shlex.quote(str(Path(sys.executable).with_name(word)))
        return f"`{here}{command.removeprefix(word)}`"
    if word in PACKAGES and which(word) is None:
        return f"{_install(PACKAGES[word], which)}, then `{command}`"
    return f"`{command}`"


def _install(package: str, which: Which) -> str:
    for installer in _INSTALLERS:
        if which(installer.split(" ")[0]) is not None:
            return f"`{installer} {_OTHER_NAMES.get(installer, {}).get(package, package)}`"
    return f"install the package {package}"
