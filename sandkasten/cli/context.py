"""`sandkasten context add | use | list | rm`: the servers that client verbs may speak to, by name.

A key is read from the terminal or from standard input, never from the command line, where other users see it.
"""

from __future__ import annotations

import argparse
import getpass
import os
import sys
from pathlib import Path

from sandkasten.cli.client import BAD_ARGUMENTS, FAULT
from sandkasten.cli.common import Stop, printable_line
from sandkasten.cli.output import print_json, print_table
from sandkasten.contexts import LOCAL, NAME, Contexts, NamedServer, changed_contexts, read_contexts
from sandkasten.installation import ConfigError


def add_context(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True)
    add = actions.add_parser("add", help="name a server, and choose it if it is the first")
    add.add_argument("name", metavar="NAME")
    add.add_argument("url", metavar="URL", help="http://HOST:PORT, https://HOST, or unix:/PATH")
    key = add.add_mutually_exclusive_group()
    key.add_argument("--key-command", metavar="COMMAND", help="what prints the key, each time: 'pass show sandkasten'")
    key.add_argument("--key-file", metavar="FILE", help="the file that has the key, read each time")
    key.add_argument("--no-key", action="store_true", help="the server asks for none")
    use = actions.add_parser("use", help=f"choose a server; {LOCAL!r} is the one of this machine")
    use.add_argument("name", metavar="NAME")
    listing = actions.add_parser("list", help="show all servers")
    remove = actions.add_parser("rm", help="forget a server")
    remove.add_argument("name", metavar="NAME")
    for name, action in (("add", add), ("use", use), ("list", listing), ("rm", remove)):
        action.add_argument("--json", action="store_true", help="print JSON: one object, or one a line")
        action.set_defaults(command=run, action=name)


def run(arguments: argparse.Namespace) -> int:
    """Perform one action and return its exit status."""
    try:
        if arguments.action == "list":
            return _list(read_contexts(os.environ), as_json=arguments.json)
        added = _named(arguments) if arguments.action == "add" else None  # asks for the key, perhaps
        with changed_contexts(os.environ) as contexts:
            _change(contexts, arguments.action, arguments.name, added)
    except ConfigError as error:
        raise Stop(str(error), FAULT) from None
    if arguments.json:
        print_json({"current": contexts.current or LOCAL})
    else:
        print(f"client verbs speak to {contexts.current or LOCAL}")
    return 0


def _change(contexts: Contexts, action: str, name: str, added: NamedServer | None) -> None:
    if added is not None:
        contexts.by_name[name] = added
        contexts.current = contexts.current or name
    elif action == "use":
        _known(contexts, name, LOCAL)
        contexts.current = None if name == LOCAL else name
    else:
        _known(contexts, name)
        del contexts.by_name[name]
        contexts.current = None if contexts.current == name else contexts.current


def _known(contexts: Contexts, name: str, *others: str) -> None:
    if name not in contexts.by_name and name not in others:
        raise Stop(
            f"there is no context {printable_line(name)!r}: `sandkasten context list` shows those there are", FAULT
        )


def _named(arguments: argparse.Namespace) -> NamedServer:
    """Return the server that the arguments describe. Raises `Stop`."""
    if not NAME.match(arguments.name) or arguments.name == LOCAL:
        raise Stop(f"NAME: letters, digits and . _ -, at most 64, and not {LOCAL!r}", BAD_ARGUMENTS)
    if not arguments.url.startswith(("http://", "https://", "unix:/")):
        raise Stop("URL: http://HOST:PORT, https://HOST, or unix:/PATH", BAD_ARGUMENTS)
    file = arguments.key_file and str(Path(arguments.key_file).absolute())
    has_source = arguments.no_key or file or arguments.key_command
    return NamedServer(arguments.url, None if has_source else _ask_for_key(), file, arguments.key_command)


def _ask_for_key() -> str | None:
    key = getpass.getpass("API key (empty for none): ") if sys.stdin.isatty() else sys.stdin.readline()
    return key.strip() or None


def _list(contexts: Contexts, *, as_json: bool) -> int:
    rows = []
    for name, each in {**contexts.by_name, LOCAL: NamedServer("")}.items():
        is_current = (contexts.current or LOCAL) == name
        key = each.api_key_command or each.api_key_file or ("in the file" if each.api_key else None)
        if as_json:
            print_json({"name": name, "url": each.url or None, "key": key, "current": is_current})
        rows.append(("*" if is_current else "", name, each.url or "the installation of this machine", key))
    if not as_json:
        print_table(("CURRENT", "NAME", "URL", "KEY"), rows)
    return 0
