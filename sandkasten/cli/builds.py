"""`sandkasten image commit`: images made of sessions, through a server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sandkasten.cli.client import find_session
from sandkasten.cli.output import print_json

if TYPE_CHECKING:
    from sandkasten.sdk import SandboxClient


async def commit(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Make an image of a session."""
    session = await find_session(client, arguments.session)
    made = await session.commit(arguments.name, replace=arguments.replace)
    if arguments.json:
        print_json(made)
    else:
        print(made.name)
    return 0
