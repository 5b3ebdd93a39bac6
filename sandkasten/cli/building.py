"""`sandkasten image build -f FILE`: an image by a Dockerfile, whose commands run in sessions of the server."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sandkasten.building.builder import Builder, BuildTerms, BuildWatch
from sandkasten.building.context import BuildContext
from sandkasten.building.dockerfile import MAX_BYTES, BuildError, Dockerfile, read_dockerfile
from sandkasten.cli.client import BAD_ARGUMENTS
from sandkasten.cli.common import Stop, printable_line
from sandkasten.cli.output import print_json, size_text, tell
from sandkasten.cli.runs import env_of, network_of
from sandkasten.sdk import waiting

if TYPE_CHECKING:
    from sandkasten.sdk import SandboxClient

_FAILED = 1
_STDERR = 2


class _ToStandardError(BuildWatch):
    """Teller of a build on standard error: lines of ours, and the output of commands as it is."""

    def told(self, line: str) -> None:
        tell(line)

    async def written(self, data: bytes) -> None:
        from sandkasten.cli.terminal import write_all

        await write_all(_STDERR, data)


async def build_by_file(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Build an image by a Dockerfile."""
    if wrong := [name for name in ("recipe", "source", "include", "mirror") if getattr(arguments, name) is not None]:
        option = "--from" if wrong == ["source"] else f"--{wrong[0]}"
        raise Stop(f"{option} is for images of Debian packages, not for a Dockerfile", BAD_ARGUMENTS)
    if arguments.name is None:
        raise Stop("the image's name is missing: --name NAME", BAD_ARGUMENTS)
    limits = {"cpu": arguments.cpus, "memory_mb": arguments.memory, "disk_mb": arguments.disk}
    try:
        dockerfile, context, title = await waiting.in_thread(_read, arguments)
        terms = BuildTerms(
            name=arguments.name,
            title=title,
            arguments=env_of(arguments.build_arg),
            network=network_of(arguments) or {"mode": "none"},
            limits={name: value for name, value in limits.items() if value is not None},
            target=arguments.target,
            has_cache=not (arguments.no_cache or arguments.squash),
            squash=arguments.squash,
            replace=arguments.replace,
            debug=arguments.debug,
        )
        made = await Builder(client, dockerfile, context, terms, _ToStandardError()).build()
    except BuildError as error:
        raise Stop(str(error), _FAILED) from None
    if arguments.json:
        print_json(made)
    else:
        print(f"{printable_line(made.name)}: {len(made.layers)} layers, {size_text(made.size_bytes)}")
    return 0


def _read(arguments: argparse.Namespace) -> tuple[Dockerfile, BuildContext, str]:
    """Return the Dockerfile, the directory to copy from, and the name of the former. Raises `BuildError`, `OSError`."""
    directory = None if arguments.directory is None else Path(arguments.directory)
    if arguments.file == "-":
        place, title, content = None, "standard input", sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        place = (directory or Path()) / "Dockerfile" if arguments.file is None else Path(arguments.file)
        title = os.fspath(place)
        with place.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    dockerfile = read_dockerfile(content, title)
    try:
        context = BuildContext(None) if directory is None else BuildContext.of(directory, place)
    except ValueError as error:
        raise BuildError(f"{directory}: .dockerignore: {error}") from None
    return dockerfile, context, title
