"""The `sandkasten` command: arguments, one function per subcommand, one sentence on stderr for a failure.

Imports nothing heavy: each subcommand loads its own imports, so `--help` and `version` answer at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sandkasten.cli.common import Stop

_OURS = {"sandkasten", "nsinit", "runner", "sandkasten_nsinit", "sandkasten_runner"}


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
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OURS:
            raise
        print(
            f"sandkasten: this command needs the server, whose package {error.name} is not installed: "
            "pip install 'sandkasten-runtime[server]'",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130


class _PrintVersion(argparse.Action):
    """Prints the version. argparse's own action needs the text beforehand, which would cost every call a search."""

    def __call__(self, parser: argparse.ArgumentParser, *_arguments: object) -> None:
        _version(argparse.Namespace())
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, metavar="FILE", help="configuration file")
    common.add_argument("--data-dir", metavar="DIR", help="where images, sessions and the database are")

    parser = argparse.ArgumentParser(prog="sandkasten", description="Sandboxes for agents: a small Linux per session.")
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", parents=[common], help="run the daemon in the foreground")
    serve.add_argument("--listen", action="append", metavar="ADDRESS", help="HOST:PORT or unix:/PATH; may be repeated")
    serve.add_argument("--stop-sessions", action="store_true", help="end all sessions at a stop, whatever signal")
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    serve.set_defaults(command=_serve)

    nsinit = commands.add_parser(
        "nsinit", parents=[common], help="run nsinit, which makes sandboxes, as a service apart"
    )
    nsinit.add_argument("--listen", dest="socket", type=Path, metavar="PATH", help="where the daemon connects")
    nsinit.add_argument(
        "--cgroup", metavar="PATH", help="where the sandboxes' cgroups are made, below each hierarchy's mount point"
    )
    nsinit.set_defaults(command=_nsinit)

    service = commands.add_parser("install-service", help="put systemd's units of this installation in place")
    service.add_argument("--destdir", type=Path, metavar="DIR", help="write below DIR, and leave systemd alone")
    service.add_argument("--dry-run", action="store_true", help="say what would be done")
    service.set_defaults(command=_install_service)

    init = commands.add_parser("init", parents=[common], help="make configuration, key and default image if missing")
    init.set_defaults(command=_init)

    doctor = commands.add_parser("doctor", parents=[common], help="check whether this machine can run sandboxes")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument(
        "--fix", action="store_true", help="adopt and finish sessions, remove leftovers, without serving"
    )
    doctor.set_defaults(command=_doctor)

    security = commands.add_parser(
        "security", parents=[common], help="list weaknesses of this installation, and attack it"
    )
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

    _add_key(commands, common)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(command=_version)
    return parser


def _add_key(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    key = commands.add_parser("key", help="look after API keys")
    actions = key.add_subparsers(metavar="ACTION", required=True)
    create = actions.add_parser("create", parents=[common], help="make a key and print it, once")
    create.add_argument("--name", required=True, help="name of the key")
    access = create.add_mutually_exclusive_group()
    access.add_argument("--read-only", action="store_true", help="the key may look and change nothing")
    access.add_argument("--admin", action="store_true", help="the key may do everything, the node and keys included")
    create.add_argument(
        "--label", metavar="NAME=VALUE", help="confine the key to sessions and workspaces with this label"
    )
    create.add_argument("--expires", metavar="SPAN", help="end of the key from now: 90m, 12h, 30d, 8w")
    create.add_argument("--max-sessions", type=int, metavar="N", help="live sessions at a time")
    create.add_argument("--max-cpu", type=float, metavar="CORES", help="cores of the key's live sessions together")
    create.add_argument(
        "--max-memory-mb", type=int, metavar="MB", help="memory limits of the key's live sessions together"
    )
    create.add_argument("--max-disk-mb", type=int, metavar="MB", help="disk limits of the key's live sessions together")
    create.add_argument("--max-execs", type=int, metavar="N", help="commands, processes and terminals at a time")
    create.add_argument("--creates-per-minute", type=int, metavar="N")
    create.add_argument("--requests-per-second", type=int, metavar="N")
    create.set_defaults(command=_key, action="create")
    listing = actions.add_parser("list", parents=[common], help="show all keys")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(command=_key, action="list")
    revoke = actions.add_parser("revoke", parents=[common], help="end a key, for what is under way as well")
    revoke.add_argument("key", metavar="ID_OR_NAME")
    revoke.set_defaults(command=_key, action="revoke")


def _key(arguments: argparse.Namespace) -> int:
    from sandkasten.cli.keys import run

    return run(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    from sandkasten.cli.serve import serve

    return serve(arguments)


def _nsinit(arguments: argparse.Namespace) -> int:
    from sandkasten.cli.nsinit import nsinit

    return nsinit(arguments)


def _install_service(arguments: argparse.Namespace) -> int:
    from sandkasten.cli.service import install_service

    return install_service(arguments)


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
