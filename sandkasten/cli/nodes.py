"""`sandkasten node | drain | events | workspace`, lists of images and keys, and commits: what is not one session's."""

from __future__ import annotations

import argparse
import contextlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sandkasten.cli.client import BAD_ARGUMENTS, FAULT, SHORT_ID, add_client_options, add_session, find_session, verb
from sandkasten.cli.common import Stop, printable_line
from sandkasten.cli.output import (
    Progress,
    labels_text,
    pairs,
    print_json,
    print_table,
    since_text,
    size_text,
    write_held,
)
from sandkasten.cli.runs import labels_of

if TYPE_CHECKING:
    from sandkasten.model.image import Pruned
    from sandkasten.sdk import SandboxClient
    from sandkasten.sdk.types import Event, NodeInfo, PrunedImages, WorkspaceInfo

_OLDEST = "0"


def add_node(parser: argparse.ArgumentParser) -> None:
    add_client_options(parser)
    parser.set_defaults(command=verb(node))


async def node(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Show the node: its state, capacity and images."""
    return _show(await client.node(), arguments)


def add_mcp(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--session", metavar="NAME", default="default", help="name of the sandbox that is meant")
    parser.add_argument("--tools", metavar="NAME,...", help="the tools to offer, if not the usual ones")
    add_client_options(parser, json=False)
    parser.set_defaults(command=verb(mcp))


async def mcp(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Be an MCP server for the program that started this one."""
    if find_spec("mcp") is None:
        raise Stop("MCP needs an extra: pip install 'sandkasten-runtime[mcp]'", FAULT)
    from sandkasten.mcp.server import serve_stdio

    try:
        tools = None if arguments.tools is None else arguments.tools.split(",")
        await serve_stdio(client, sandbox=arguments.session, tools=tools)
    except ValueError as error:
        raise Stop(str(error), BAD_ARGUMENTS) from None
    return 0


def add_drain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--undo", action="store_true", help="take new sessions again")
    add_client_options(parser)
    parser.set_defaults(command=verb(drain))


async def drain(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Refuse new sessions; live ones go on."""
    return _show(await (client.undrain() if arguments.undo else client.drain()), arguments)


def _show(info: NodeInfo, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json(info)
        return 0
    pairs(
        {
            "id": info.id,
            "status": info.status,
            "up": since_text(info.started_at),
            "sessions": ", ".join(f"{count} {status}" for status, count in info.sessions.items() if count) or "none",
            "waiting creates": info.queued,
            "images": ", ".join(info.images),
        }
    )
    print()
    columns = ("total", "budget", "committed", "used", "free")
    names = {"totals": "total"}
    rows = []
    for part, title, is_bytes in _CAPACITY:
        figures = {names.get(name, name): each.get(part) for name, each in info.capacity.items()}
        shown = (size_text(figures.get(name)) if is_bytes else figures.get(name) for name in columns)
        rows.append((title, *shown))
    print_table(("", *map(str.upper, columns)), rows)
    return 0


_CAPACITY = (
    ("sessions", "sessions", False),
    ("cpu", "cpu", False),
    ("memory_bytes", "memory", True),
    ("disk_bytes", "disk", True),
    ("pids", "processes", False),
)


# events


def add_events(parser: argparse.ArgumentParser) -> None:
    add_session(parser, nargs="?")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what happens; else print what is kept")
    parser.add_argument("--since", metavar="CURSOR", help="begin behind this event; 0 is the oldest one that is kept")
    parser.add_argument("--type", action="append", default=[], metavar="TYPE", help="such as exec.ended; may repeat")
    add_client_options(parser)
    parser.set_defaults(command=verb(show_events))


async def show_events(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Print events, one a line."""
    cursor = arguments.since or (None if arguments.follow else _OLDEST)
    if arguments.session is None:
        events = client.events(cursor=cursor, types=arguments.type, follow=arguments.follow)
    else:
        session = await find_session(client, arguments.session, ended=True)
        events = session.watch_events(cursor=cursor, types=arguments.type, follow=arguments.follow)
    async with events:
        async for event in events:
            if arguments.json:
                print_json(event)
            else:
                _print_event(event)
            await write_held()
    return 0


def _print_event(event: Event) -> None:
    data = " ".join(f"{name}={value}" for name, value in event.data.items() if value is not None)
    print(printable_line(f"{event.time}  {event.session_id[:SHORT_ID] or '-':<{SHORT_ID}}  {event.type:<18} {data}"))


# Workspaces


def add_workspace(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True)
    listing = actions.add_parser("list", help="show all workspaces")
    listing.add_argument("-l", "--label", metavar="NAME=VALUE", help="only those with this label")
    listing.add_argument("--usage", action="store_true", help="count their files")
    listing.set_defaults(command=verb(list_workspaces))
    create = actions.add_parser("create", help="make a workspace, or change one that is there")
    create.add_argument("-l", "--label", action="append", default=[], metavar="NAME=VALUE")
    create.set_defaults(command=verb(create_workspace))
    remove = actions.add_parser("rm", help="remove a workspace with all its files")
    remove.add_argument("--force", action="store_true", help="end the sessions that use it")
    remove.set_defaults(command=verb(remove_workspace))
    export = actions.add_parser("export", help="write a workspace as an archive")
    export.set_defaults(command=verb(export_workspace))
    importing = actions.add_parser("import", help="make a workspace of an archive")
    importing.add_argument("--replace", action="store_true", help="replace one that is there")
    importing.set_defaults(command=verb(import_workspace))
    for action in (create, remove, export, importing):
        action.add_argument("workspace", metavar="ID")
    for action in (export, importing):
        action.add_argument("file", metavar="FILE", help="tar or tar.zst (by its name), or - for tar on a pipe")
    for action in (listing, create, remove, export, importing):
        add_client_options(action)


async def list_workspaces(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """List workspaces by id."""
    found = await client.list_workspaces(label=arguments.label, usage=arguments.usage)
    if arguments.json:
        for each in found:
            print_json(each)
    else:
        headers = ("ID", "USED", "SESSIONS", "QUOTA", *(("FILES", "SIZE") if arguments.usage else ()), "LABELS")
        print_table(headers, [_row(each, usage=arguments.usage) for each in found])
    return 0


def _row(info: WorkspaceInfo, *, usage: bool) -> tuple[object, ...]:
    counted = info.usage or {}
    figures = (counted.get("files"), size_text(counted.get("size_bytes"))) if usage else ()
    used = f"{since_text(info.last_used)} ago" if info.last_used else ""
    return (info.id, used, info.active_session_count, size_text(info.quota_bytes), *figures, labels_text(info.labels))


async def create_workspace(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Make a workspace."""
    labels = labels_of(arguments.label)
    info = await client.workspace(arguments.workspace).create(labels=labels or None)
    if arguments.json:
        print_json(info)
    else:
        print(printable_line(info.id))
    return 0


async def remove_workspace(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Remove a workspace."""
    await client.delete_workspace(arguments.workspace, force=arguments.force)
    if arguments.json:
        print_json({"id": arguments.workspace, "ok": True})
    else:
        print(arguments.workspace)
    return 0


async def export_workspace(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Write the archive of a workspace; a file takes its name when it is whole."""
    from sandkasten.cli.transfer import save

    is_zstd = str(arguments.file).endswith(".zst")
    stream = client.workspace(arguments.workspace).export(format="tar.zst" if is_zstd else "tar")
    async with stream:
        size = await save(stream, arguments.file, Progress(arguments.workspace, is_off=arguments.json))
    if arguments.json and arguments.file != "-":
        print_json({"id": arguments.workspace, "size_bytes": size})
    return 0


async def import_workspace(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Make a workspace of an archive."""
    from sandkasten.cli.transfer import pipe

    progress = Progress(arguments.workspace, is_off=arguments.json)
    source = pipe() if arguments.file == "-" else Path(arguments.file)
    with contextlib.closing(progress):
        workspace = client.workspace(arguments.workspace)
        made = await workspace.import_archive(source, replace=arguments.replace, progress=progress)
    if arguments.json:
        print_json(made)
    else:
        skipped = f", {made.skipped} left out" if made.skipped else ""
        print(f"{arguments.workspace}: {made.entries} entries, {size_text(made.size_bytes)}{skipped}", file=sys.stderr)
    return 0


# Lists over HTTP


async def list_images(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """List the images of the server."""
    found = await client.list_images()
    if arguments.json:
        for each in found:
            print_json(each)
        return 0
    rows = []
    for image in found:
        size = size_text(image.size_bytes) if image.size_bytes else "-"
        also = ", ".join([*image.references, *image.alias_names])
        rows.append((image.name, image.kind, size, image.created_at, image.source, also))
    print_table(("NAME", "KIND", "SIZE", "CREATED", "SOURCE", "ALSO"), rows)
    return 0


async def inspect_image(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Print an image of the server as JSON."""
    print_json(await client.get_image(arguments.name))
    return 0


async def remove_image(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Delete an image of the server."""
    await client.delete_image(arguments.name)
    if arguments.json:
        print_json({"name": arguments.name, "ok": True, "files_gone": True})
    else:
        print(f"{printable_line(arguments.name)}: deleted")
    return 0


async def prune_images(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Remove what no image and no session of the server has."""
    found = await client.prune_images(older_than_s=arguments.older_than, dry_run=arguments.dry_run)
    tell_pruned(arguments, found)
    return 0


def tell_pruned(arguments: argparse.Namespace, found: PrunedImages | Pruned) -> None:
    """Print what a prune has removed, or would remove."""
    if arguments.json:
        names = ("layers", "blobs", "images", "freed_bytes")
        print_json({name: getattr(found, name) for name in names})
        return
    steps = f"{found.images} kept steps of builds, " if found.images else ""
    print(f"{steps}{found.layers} layers, {found.blobs} broken downloads, {size_text(found.freed_bytes)}")


async def export_image(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Write the archive of an image of the server; a file takes its name when it is whole."""
    from sandkasten.cli.transfer import save

    async with client.export_image(arguments.name, compression=arguments.compression) as stream:
        await save(stream, arguments.output, Progress(arguments.name))
    return 0


async def import_image(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Send an archive to the server, and wait for the image."""
    from sandkasten.cli.pull import follow
    from sandkasten.cli.transfer import pipe

    file = arguments.file or arguments.tar
    if arguments.name is None or file is None or None not in (arguments.file, arguments.tar):
        raise Stop("a server elsewhere takes one file, and a --name", BAD_ARGUMENTS)
    terms = {"ref": arguments.ref, "platform": arguments.platform, "replace": arguments.replace}
    with contextlib.closing(Progress(arguments.name, is_off=arguments.json)) as progress:
        source = pipe() if file == "-" else Path(file)
        job = await client.import_image(source, arguments.name, progress=progress, **terms)
    return await follow(arguments, client, job, arguments.name)


async def commit_session(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """Make an image of a session."""
    session = await find_session(client, arguments.session)
    made = await session.commit(arguments.name, replace=arguments.replace, squash=arguments.squash)
    if arguments.json:
        print_json(made)
    else:
        print(made.name)
    return 0


async def list_keys(arguments: argparse.Namespace, client: SandboxClient) -> int:
    """List the API keys of the server with their use. Needs an administrator's key."""
    keys = await client.keys()
    if arguments.json:
        for each in keys:
            print_json(each)
        return 0
    rows = []
    for each in keys:
        label = each["label"] or {}
        used = since_text(each["last_used_at"]) if each["last_used_at"] else ""
        bounds = each["quota"] | {"network": each.get("max_network")}
        quota = {name: value for name, value in bounds.items() if value is not None}
        rows.append(
            (each["id"], each["name"], each["access"], labels_text(label), each["expires_at"], used, labels_text(quota))
        )
    print_table(("ID", "NAME", "ACCESS", "LABEL", "EXPIRES", "USED AGO", "QUOTA"), rows)
    return 0
