"""The `sandkasten` command: the table of verbs, the one that is asked for, and what becomes of its failure.

Imports the module of that verb alone, which imports what is heavy when it runs: so `--help` and `version` answer at
once. A verb's parser stands beside its function, as `add_VERB`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from sandkasten.cli.common import Stop

VERBS: dict[str, tuple[str, str]] = {
    "run": ("runs", "run a command in a session of its own"),
    "shell": ("runs", "sit down at a shell of a session"),
    "exec": ("runs", "run a command in a session's persistent shell"),
    "ps": ("sessions", "list sessions"),
    "info": ("sessions", "show all about a session"),
    "top": ("sessions", "show what sessions use, live"),
    "rm": ("sessions", "end sessions"),
    "pause": ("sessions", "freeze sessions"),
    "resume": ("sessions", "let paused sessions go on"),
    "extend": ("sessions", "let a session live longer"),
    "network": ("sessions", "let a session reach a host, or not"),
    "logs": ("runs", "show the output of runs"),
    "cp": ("transfer", "copy files and directories into a session and out of it"),
    "port": ("transfer", "forward local ports to those of a session"),
    "events": ("nodes", "show what happens on the node or in a session"),
    "node": ("nodes", "show the node"),
    "drain": ("nodes", "refuse new sessions, or take them again"),
    "workspace": ("nodes", "look after workspaces"),
    "secret": ("secrets", "look after values that sessions use and never see"),
    "mcp": ("nodes", "speak MCP on standard input and output"),
    "context": ("context", "choose the server that the verbs above speak to"),
    "completion": ("completion", "print the completion script of a shell"),
    "serve": ("operator", "run the daemon in the foreground"),
    "nsinit": ("operator", "run nsinit, which makes sandboxes, as a service apart"),
    "install-service": ("operator", "put systemd's units of this installation in place"),
    "init": ("operator", "make configuration, key and default image if missing"),
    "doctor": ("operator", "check whether this machine can run sandboxes"),
    "security": ("operator", "list weaknesses of this installation, and attack it"),
    "image": ("operator", "look after images"),
    "key": ("operator", "look after API keys"),
    "version": ("main", "print the version"),
}
"""Each verb with the module of its parser and what is said of it. The client verbs come first."""
BROKEN_PIPE = 128 + 13
"""Exit status as of a command that SIGPIPE ended."""
_WITH_COMMAND = ("run", "exec")
"""Verbs whose words behind `--` are a command, in which nothing is ours."""

_OURS = {
    "sandkasten",
    *(f"{prefix}{name}" for prefix in ("", "sandkasten_") for name in ("nsinit", "runner", "egress")),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status; a process of its own ends with the verb."""
    words = list(sys.argv[1:] if argv is None else argv)
    command_words: list[str] = []
    if words and words[0] in _WITH_COMMAND and "--" in words:
        at = words.index("--")
        words, command_words = words[:at], words[at + 1 :]
    if argv is None:
        _open_standard_files()
    arguments, unknown = make_parser(words[0] if words else None).parse_known_args(words)
    if unknown:
        advice = "; the command comes behind --" if words[0] in _WITH_COMMAND and not command_words else ""
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
    arguments.words = command_words
    status = _perform(arguments)
    if argv is None:
        # Not waited for: a thread whose terminal takes nothing, and the interpreter's end, which frees each object by
        # itself: 40 ms of a client verb, 0.4 s of a daemon.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    return status


def _open_standard_files() -> None:
    """Put /dev/null where standard input, output or error is closed, lest a connection get that descriptor."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free, so `fd`; inherited, as the others are
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115


def _perform(arguments: argparse.Namespace) -> int:
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        status = command(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # nobody reads any more; what Python still has goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)
        return BROKEN_PIPE
    except Stop as reason:
        reason.tell()
        return reason.status
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OURS:
            raise
        print(
            f"sandkasten: this command needs the server, whose package {error.name} is not installed: "
            "pip install 'sandkasten-runtime[server,mcp]'",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130


class _PrintVersion(argparse.Action):
    """Prints the version. argparse's own action needs the text beforehand, which would cost every call a search."""

    def __call__(self, parser: argparse.ArgumentParser, *_arguments: object) -> None:
        _version(argparse.Namespace(json=False))
        parser.exit()


def make_parser(verb: str | None) -> argparse.ArgumentParser:
    """Return the parser of all verbs, with the arguments of one."""
    parser = argparse.ArgumentParser(prog="sandkasten", description="Sandboxes for agents: a small Linux per session.")
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, about) in VERBS.items():
        own = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        if name == verb:
            own.set_defaults(parser=own)
            add_arguments(own, name)
    return parser


def add_arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    """Have a verb's module add its arguments and its command."""
    module = VERBS[verb][0]
    home = sys.modules[__name__] if module == "main" else import_module(f"sandkasten.cli.{module}")
    getattr(home, f"add_{verb.replace('-', '_')}")(parser)


def add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_version)


def _version(arguments: argparse.Namespace) -> int:
    from importlib.metadata import version

    found = version("sandkasten-runtime")
    if arguments.json:
        from sandkasten.cli.output import print_json

        print_json({"version": found})
    else:
        print(found)
    return 0
