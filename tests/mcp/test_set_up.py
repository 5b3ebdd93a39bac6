"""The set-up of clients as README.md and docs/mcp.md tell it, by the official client, and the page's table of tools."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from sandkasten.mcp.tools import TOOLS, chosen
from tests.e2e.conftest import daemon as daemon  # one daemon for this file
from tests.e2e.daemon import KEY, SCRIPT, Daemon
from tests.mcp.test_server import on_asyncio
from tests.waiting import patience

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/mcp.md")


def servers(page: str) -> Mapping[str, Mapping[str, Any]]:  # JSON objects
    """Return the server that each client's configuration names; of Claude Code what its command line says."""
    text = (ROOT / page).read_text()
    blocks = [json.loads(each) for each in re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    desktop, cursor, code = (each for each in blocks if {"mcpServers", "servers"} & each.keys())
    (line,) = re.findall(r"^claude mcp add (.*)$", text, re.MULTILINE)
    # Behind --header, which takes all words that follow, Claude Code finds neither name nor URL.
    *options, name, url, flag, header = shlex.split(line.replace("$KEY", "KEY"))
    assert (options, name, flag) == (["--transport", "http"], "sandkasten", "--header")
    return {
        "Claude Desktop": desktop["mcpServers"]["sandkasten"],
        "Claude Code": {"url": url, "headers": dict([header.split(": ")])},
        "Cursor": cursor["mcpServers"]["sandkasten"],
        "VS Code": code["servers"]["sandkasten"],
    }


def here(values: Mapping[str, str], daemon: Daemon) -> dict[str, str]:
    """Return values with the key and the address of this daemon."""
    return {
        name: value.replace("KEY", KEY).replace("http://127.0.0.1:8080", daemon.wait_url())
        for name, value in values.items()
    }


async def names(client: Client) -> list[str]:
    return [tool.name for tool in (await client.list_tools()).tools]


@pytest.mark.parametrize("page", PAGES)
@on_asyncio
async def test_claude_desktop_starts_the_command(daemon: Daemon, tmp_path: Path, page: str) -> None:
    """Anywhere, without a file of the person's, and by its path, since such a program has another PATH."""
    told = servers(page)["Claude Desktop"]
    assert told["command"] == "/path/to/.venv/bin/sandkasten"
    environment = {**here(told["env"], daemon), "HOME": str(tmp_path), "PATH": "/nowhere"}
    server = StdioServerParameters(command=str(SCRIPT), args=told["args"], env=environment, cwd="/")
    async with Client(server) as client:
        assert await names(client) == [tool.name for tool in chosen(None)]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("program", ["Claude Code", "Cursor", "VS Code"])
@on_asyncio
async def test_a_client_connects_to_the_url(daemon: Daemon, page: str, program: str) -> None:
    """With the headers that it is given."""
    told = servers(page)[program]
    async with httpx2.AsyncClient(headers=here(told["headers"], daemon), timeout=patience(30)) as http:
        url = here({"url": told["url"]}, daemon)["url"]
        async with Client(streamable_http_client(url, http_client=http)) as client:
            assert await names(client) == [tool.name for tool in chosen(None)]


def test_the_table_of_tools_is_that_of_the_server() -> None:
    """Every tool and its parameters, but `sandbox`, which all have; the values of a parameter stand behind a colon."""
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \| ([^|]*) \|", (ROOT / "docs/mcp.md").read_text(), re.MULTILINE)
    told: dict[str, set[str]] = {}
    for tools, parameters in rows:
        told[tools.replace("`", "")] = set(re.findall(r"`(\w+)`", re.sub(r": [^;]*", "", parameters)))
    assert {name for row in told for name in row.split(", ")} == set(TOOLS)
    for row, parameters in told.items():
        assert parameters == {each for name in row.split(", ") for each in TOOLS[name].properties}, row
