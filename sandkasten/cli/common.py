"""Parts that every subcommand shares: a refusal with one sentence, the configuration, root, and printable text.

Imports nothing heavy, so that `--help` and `version` answer at once. Text that comes from the machine (a path may hold
any byte) passes `printable` before a terminal gets it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandkasten.config import Config

_SPAN = re.compile(r"([1-9]\d{0,5})([smhdw])\Z")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def printable(text: str) -> str:
    """Return a text with escapes such as `\\x1b` for unprintable characters other than line breaks."""
    return "\n".join(map(printable_line, text.split("\n")))


def printable_line(text: str) -> str:
    """Return a line with escapes such as `\\x1b` and `\\u202e` for unprintable characters."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


class Stop(Exception):
    """End of the command; the message is for the person at the terminal, `status` the exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status

    def tell(self) -> None:
        """Print the message on standard error, each line behind the command's name."""
        for line in str(self).splitlines():
            print(f"sandkasten: {printable_line(line)}", file=sys.stderr)


def span_seconds(text: str) -> int:
    """Return the seconds of a span such as `90m` or `30d`. Raises `ValueError`."""
    match = _SPAN.match(text)
    if match is None:
        raise ValueError("a number and one of s, m, h, d, w, such as 30d")
    return int(match[1]) * _UNIT_S[match[2]]


def load(arguments: argparse.Namespace) -> Config:
    """Read the configuration and apply the command line to it. `arguments.config` is the file that was found."""
    from sandkasten.config import ConfigError
    from sandkasten.config.files import load_config
    from sandkasten.installation import find_file

    given = vars(arguments)
    overrides = {key: given.get(key) for key in ("data_dir", "listen")}
    overrides["server.log_level"] = given.get("log_level")
    try:
        arguments.config = find_file(arguments.config, os.environ)
        return load_config(arguments.config, environ=os.environ, overrides=overrides)
    except ConfigError as error:
        raise Stop(str(error)) from None


def load_installed(arguments: argparse.Namespace) -> Config:
    """Read the configuration of an installation that `init` or a start has made, and name it on stderr.

    Raises:
        Stop: the configuration has mistakes, or there is no data directory; the command makes none, since it would be
            another than the running daemon's.
    """
    config = load(arguments)
    name_installation(arguments, config)
    if not os.path.isdir(config.data_dir):
        raise Stop(
            f"there is no data directory {config.data_dir}: name the daemon's --config, or run `sandkasten init`"
        )
    return config


def name_installation(arguments: argparse.Namespace, config: Config) -> None:
    """Print on stderr which configuration, as `load` found it, and which data directory the command works on."""
    missing = "" if os.path.isdir(config.data_dir) else ", which does not exist"
    line = f"configuration {arguments.config or 'without a file'}, data directory {config.data_dir}{missing}"
    print(f"sandkasten: {printable_line(line)}", file=sys.stderr, flush=True)


def require_root() -> None:
    """Refuse to go on without the privilege to make sandboxes."""
    if os.geteuid() != 0:
        raise Stop("making sandboxes needs root: run this with sudo, or as root in a virtual machine")


def make_data_dir(path: Path) -> None:
    """Make the data directory, closed to other users, also if it was open before."""
    from sandkasten.host import data_dir

    try:
        data_dir.make_data_dir(path)
    except OSError as error:
        raise Stop(f"can't use {path} as data directory: {error.strerror}") from None
