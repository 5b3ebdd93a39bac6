"""The `sandkasten` command: arguments in, one function per subcommand, one sentence on stderr when it can't go on.

Imports nothing heavy: each subcommand loads what it needs, so `--help` and `version` answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandkasten.config import Config


class Stop(Exception):
    """Nothing more can be done; the message is what the person at the terminal should read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except Stop as reason:
        for line in str(reason).splitlines():
            print(f"sandkasten: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _PrintVersion(argparse.Action):
    """argparse's own action wants the text beforehand, which costs every other call the search for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_arguments: object) -> None:
        _version(argparse.Namespace())
        parser.exit()


def load(arguments: argparse.Namespace) -> Config:
    """Read the configuration with what the command line says on top."""
    from sandkasten.config import ConfigError
    from sandkasten.configfile import find_file, load_config

    given = vars(arguments)
    overrides = {key: given.get(key) for key in ("data_dir", "listen")}
    overrides["server.log_level"] = given.get("log_level")
    try:
        return load_config(find_file(arguments.config, os.environ), environ=os.environ, overrides=overrides)
    except ConfigError as error:
        raise Stop(str(error)) from None


def require_root() -> None:
    """Refuse to go on without the privilege to make sandboxes."""
    if os.geteuid() != 0:
        raise Stop("making sandboxes needs root: run this with sudo, or as root in a virtual machine")


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, metavar="FILE", help="configuration file")
    common.add_argument("--data-dir", metavar="DIR", help="where images, sessions and the database are")

    parser = argparse.ArgumentParser(prog="sandkasten", description="Sandboxes for agents: a small Linux per session.")
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", parents=[common], help="run the daemon in the foreground")
    serve.add_argument("--listen", action="append", metavar="ADDRESS", help="HOST:PORT or unix:/PATH; may be repeated")
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    serve.set_defaults(command=_serve)

    nsinit = commands.add_parser("nsinit", parents=[common], help="run what makes sandboxes as a service of its own")
    nsinit.add_argument("--listen", dest="socket", type=Path, metavar="PATH", help="where the daemon connects")
    nsinit.set_defaults(command=_nsinit)

    init = commands.add_parser("init", parents=[common], help="make configuration, key and default image if missing")
    init.set_defaults(command=_init)

    doctor = commands.add_parser("doctor", parents=[common], help="say whether this machine can run sandboxes")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(command=_doctor)

    security = commands.add_parser("security", parents=[common], help="say what is weak here, and attack it")
    security.add_argument("--attack", action="store_true", help="make the attempts of the catalogue, in own sessions")
    security.add_argument("--json", action="store_true", help="print JSON")
    security.add_argument("--user", action="append", choices=("sandbox", "root"), help="attack as; default: both")
    security.add_argument("--only", action="append", metavar="ID", help="attempts whose id begins so; may be repeated")
    security.add_argument("--patience", type=float, default=1.0, metavar="FACTOR", help="stretch all time limits")
    security.set_defaults(command=_security)

    image = commands.add_parser("image", help="look after images")
    actions = image.add_subparsers(metavar="ACTION", required=True)
    for name, about in (("list", "show all images"), ("validate", "check an image"), ("delete", "remove an image")):
        action = actions.add_parser(name, parents=[common], help=about)
        if name != "list":
            action.add_argument("name")
        action.set_defaults(command=_image, action=name)
    importing = actions.add_parser("import", parents=[common], help="make an image of a tar archive")
    importing.add_argument("--name", required=True)
    importing.add_argument("--tar", required=True, type=Path, metavar="FILE")
    importing.set_defaults(command=_image, action="import")

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(command=_version)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    from sandkasten.cli.serve import serve

    return serve(arguments)


def _nsinit(arguments: argparse.Namespace) -> int:
    from sandkasten.cli.nsinit import nsinit

    return nsinit(arguments)


def _init(arguments: argparse.Namespace) -> int:
    from sandkasten.cli.init import init

    return init(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from sandkasten.cli.doctor import doctor

    return doctor(arguments)


def _security(arguments: argparse.Namespace) -> int:
    from sandkasten.cli.security import security

    return security(arguments)


def _image(arguments: argparse.Namespace) -> int:
    from sandkasten.cli.image import run

    return run(arguments)


def _version(_arguments: argparse.Namespace) -> int:
    from importlib.metadata import version

    print(version("sandkasten-runtime"))
    return 0
