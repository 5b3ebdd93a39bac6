"""`sandkasten secret`: values that sessions use and never see. A value is read from a file or from standard input: a
command line is seen by everybody on the machine, and kept by shells."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sandkasten.cli.client import BAD_ARGUMENTS, add_client_options, verb
from sandkasten.cli.common import Stop, printable_line
from sandkasten.cli.output import print_json, print_table

if TYPE_CHECKING:
    from sandkasten.sdk import SandboxClient

_MAX_CHARS = 8192
"""More than the server takes, which says so."""


def add_secret(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(required=True)
    add = verbs.add_parser("add", help="keep a value, in place of one of that name")
    add.add_argument("name", metavar="NAME")
    add.add_argument("--host", metavar="HOST[:PORT,...]", action="append", required=True, dest="hosts")
    add.add_argument("--placeholder", metavar="TEXT", help="what sessions see, if a client checks its form")
    add.add_argument("--file", metavar="PATH", default="-", help="where the value is; standard input without")
    add_client_options(add)
    add.set_defaults(command=verb(add_value))
    listing = verbs.add_parser("list", help="list names and hosts")
    add_client_options(listing)
    listing.set_defaults(command=verb(list_secrets))
    rm = verbs.add_parser("rm", help="forget a value")
    rm.add_argument("name", metavar="NAME")
    add_client_options(rm)
    rm.set_defaults(command=verb(remove))


async def add_value(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Keep a value. One end of a line behind it is not part of it."""
    try:
        if arguments.file == "-":
            text = sys.stdin.read(_MAX_CHARS)
        else:
            with Path(arguments.file).open() as file:  # noqa: ASYNC230 - a small file, and nothing else runs
                text = file.read(_MAX_CHARS)
    except (OSError, UnicodeDecodeError) as error:
        raise Stop(f"the value can't be read: {error}", BAD_ARGUMENTS) from None
    kept = await client.put_secret(
        arguments.name, text.removesuffix("\n").removesuffix("\r"), arguments.hosts, placeholder=arguments.placeholder
    )
    if arguments.json:
        print_json(kept)
    return 0


async def list_secrets(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """List the secrets, without their values."""
    found = await client.secrets()
    if arguments.json:
        for each in found:
            print_json(each)
        return 0
    rows = [(each.name, " ".join(each.hosts), printable_line(each.placeholder or "")) for each in found]
    print_table(("NAME", "HOSTS", "PLACEHOLDER"), rows)
    return 0


async def remove(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Forget a secret."""
    await client.delete_secret(arguments.name)
    return 0
