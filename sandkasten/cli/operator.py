"""Parsers of the operator's verbs: `serve`, `nsinit`, `install-service`, `init`, `doctor`, `security`, `image`, `key`.

Each works on this machine's installation itself, and loads its module, with the server's packages, when it runs; so
help needs none of them.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from sandkasten.cli.build import add_build
from sandkasten.cli.client import add_client_options, add_session, is_elsewhere, verb
from sandkasten.cli.common import span_seconds


def _late(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    """Return a command whose module is imported when it runs."""

    def command(arguments: argparse.Namespace) -> int:
        work: Callable[[argparse.Namespace], int] = getattr(import_module(f"sandkasten.cli.{module}"), function)
        return work(arguments)

    return command


def _here_or_there(module: str, elsewhere: str, *, here: str = "run") -> Callable[[argparse.Namespace], int]:
    """Return a command that asks a server, if one is named, and else looks at this machine's installation."""

    def command(arguments: argparse.Namespace) -> int:
        if not is_elsewhere(arguments):
            return _late(module, here)(arguments)
        return verb(getattr(import_module("sandkasten.cli.nodes"), elsewhere))(arguments)

    return command


def add_installation_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose an installation of this machine."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file")
    parser.add_argument("--data-dir", metavar="DIR", help="where images, sessions and the database are")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON: one object, or one a line")


def _serve(arguments: argparse.Namespace) -> int:
    gc.disable()  # a tenth of the imports' time, for no garbage: `serve` has a heap of its own (`heap.py`)
    return _late("serve", "serve")(arguments)


def add_serve(parser: argparse.ArgumentParser) -> None:
    add_installation_options(parser)
    parser.add_argument("--listen", action="append", metavar="ADDRESS", help="HOST:PORT or unix:/PATH; may be repeated")
    parser.add_argument("--stop-sessions", action="store_true", help="end all sessions at a stop, whatever signal")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    parser.set_defaults(command=_serve)


def add_nsinit(parser: argparse.ArgumentParser) -> None:
    add_installation_options(parser)
    parser.add_argument("--listen", dest="socket", type=Path, metavar="PATH", help="where the daemon connects")
    parser.add_argument(
        "--cgroup", metavar="PATH", help="where the sandboxes' cgroups are made, below each hierarchy's mount point"
    )
    parser.set_defaults(command=_late("nsinit", "nsinit"))


def add_install_service(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--destdir", type=Path, metavar="DIR", help="write below DIR, and leave systemd alone")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.set_defaults(command=_late("service", "install_service"))


def add_init(parser: argparse.ArgumentParser) -> None:
    add_installation_options(parser)
    parser.set_defaults(command=_late("init", "init"))


def add_doctor(parser: argparse.ArgumentParser) -> None:
    add_installation_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--fix", action="store_true", help="adopt and finish sessions, remove leftovers, without serving"
    )
    parser.set_defaults(command=_late("doctor", "doctor"))


def add_security(parser: argparse.ArgumentParser) -> None:
    add_installation_options(parser)
    parser.add_argument("--attack", action="store_true", help="make the attempts of the catalogue, in own sessions")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--user", action="append", choices=("sandbox", "root"), help="attack as; default: both")
    parser.add_argument("--only", action="append", metavar="ID", help="attempts whose id begins so; may be repeated")
    parser.add_argument("--patience", type=float, default=1.0, metavar="FACTOR", help="stretch all time limits")
    parser.set_defaults(command=_late("security", "security"))


def add_image(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True)
    listing = actions.add_parser("list", help="show all images, of this machine or of a server elsewhere")
    listing.add_argument("--context", metavar="NAME", help="a server of `sandkasten context list`")
    listing.set_defaults(command=_here_or_there("image", "list_images"), action="list")
    validate = actions.add_parser("validate", help="check an image")
    validate.add_argument("--deep", action="store_true", help="read all files of its layers, and compare them")
    remove = actions.add_parser("rm", aliases=["delete"], help="remove an image")
    inspect = actions.add_parser("inspect", help="print an image as JSON")
    prune = actions.add_parser("prune", help="remove layers that no image and no session has")
    prune.add_argument("--older-than", type=span_seconds, default="1h", metavar="SPAN", help="time unused, such as 12h")
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed")
    prune.set_defaults(command=_here_or_there("image", "prune_images"), action="prune")
    for name, action in (("validate", validate), ("rm", remove), ("inspect", inspect)):
        action.add_argument("name", metavar="IMAGE", help="a name, a reference such as debian:trixie, an alias")
        action.set_defaults(command=_late("image", "run"), action=name)
    remove.set_defaults(command=_here_or_there("image", "remove_image"))
    inspect.set_defaults(command=_here_or_there("image", "inspect_image"))
    importing = actions.add_parser("import", help="make an image of an archive")
    importing.add_argument(
        "file", nargs="?", metavar="FILE", help="of docker save, OCI layout, rootfs tar; - for stdin"
    )
    importing.add_argument("--name", help="the image's name here; by default the one in an archive of images")
    importing.add_argument("--ref", help="which image of an archive of several")
    importing.add_argument("--platform", metavar="OS/ARCH", help="by default that of the machine")
    importing.add_argument("--replace", action="store_true", help="take the place of an image of that name")
    importing.add_argument("--tar", type=Path, metavar="FILE", help="the tar of a root file system, or a pipe of it")
    importing.set_defaults(command=_here_or_there("image", "import_image"), action="import")
    exporting = actions.add_parser("export", help="write an image as a tar of an OCI layout")
    exporting.add_argument("name")
    exporting.add_argument("-o", "--output", default="-", metavar="FILE", help="by default standard output")
    exporting.add_argument("--compression", choices=("gzip", "zstd", "none"), default="gzip", help="of the layers")
    exporting.set_defaults(command=_here_or_there("exporting", "export_image", here="export"))
    for action in (prune, remove, inspect, importing, exporting):
        action.add_argument("--context", metavar="NAME", help="a server of `sandkasten context list`")
    pulling = actions.add_parser("pull", help="get an image from a registry")
    pulling.add_argument("reference", metavar="REF", help="such as debian:bookworm, or HOST/NAME@sha256:...")
    pulling.add_argument("--name", help="the image's name here; by default the last part of REF, or with its tag")
    pulling.add_argument("--platform", metavar="OS/ARCH", help="by default that of the machine")
    pulling.add_argument("--replace", action="store_true", help="take the place of an image of that name")
    pulling.add_argument("--context", metavar="NAME", help="a server of `sandkasten context list`")
    pulling.set_defaults(command=_late("pull", "pull"))
    building = add_build(actions)
    commit = actions.add_parser("commit", help="make an image of a session")
    add_session(commit)
    commit.add_argument("--name", required=True, help="the image's name, or NAME:TAG")
    commit.add_argument("--replace", action="store_true", help="take the place of an image of that name")
    commit.add_argument("--squash", action="store_true", help="one layer of this and of earlier commits")
    add_client_options(commit)
    commit.set_defaults(command=lambda arguments: verb(import_module("sandkasten.cli.nodes").commit_session)(arguments))
    login = actions.add_parser("login", help="keep a name and a password for a registry; the password from stdin")
    login.add_argument("registry", metavar="REGISTRY")
    login.add_argument("--username", required=True)
    login.set_defaults(command=_late("pull", "login"))
    for action in (pulling, building, login, exporting):
        add_installation_options(action)
    for action in (pulling, building):
        _add_json(action)
    for action in (listing, validate, remove, importing, prune, inspect):
        _add_json(action)
        add_installation_options(action)


def add_key(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True)
    create = actions.add_parser("create", help="make a key and print it, once")
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
    create.add_argument(
        "--max-network",
        choices=("none", "allow", "ask", "open", "bridge"),
        help="widest network that the key may ask for",
    )
    create.set_defaults(command=_late("keys", "run"), action="create")
    listing = actions.add_parser("list", help="show all keys, of this machine or of a server elsewhere")
    listing.add_argument("--context", metavar="NAME", help="a server of `sandkasten context list`")
    listing.set_defaults(command=_here_or_there("keys", "list_keys"), action="list")
    revoke = actions.add_parser("revoke", help="end a key, for what is under way as well")
    revoke.add_argument("key", metavar="ID_OR_NAME")
    revoke.set_defaults(command=_late("keys", "run"), action="revoke")
    for action in (create, listing, revoke):
        _add_json(action)
        add_installation_options(action)
