"""The Python SDK beside requests by hand, large files both ways; the command line, and MCP beside the SDK."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from bench import daemon
from bench.websocket import ExecSocket
from sandkasten.sdk import SandboxClient

if TYPE_CHECKING:
    from bench.sections import Bench

MIB = 1024 * 1024
RAW, SDK = "exec builtin beside the SDK, HTTP", "exec builtin, SDK"
MCP = "exec builtin, MCP's bash"
CLI = "exec builtin, command line"
RAW_STREAM, SDK_STREAM = "exec builtin beside the SDK, WebSocket", "exec builtin, SDK's stream"
COPY = "copy from socket to socket, MB/s"
_FILE_MIB = 1024
_PIECE_BYTES = 256 * 1024

_TRANSFER = """
import json, sys, time
from pathlib import Path
from sandkasten.sync import SandboxClient, Session

way, url, key, session, size = sys.argv[1:]
size = int(size)
with SandboxClient(base_url=url, api_key=key, timeout=600) as client:
    files, began = Session(client, session).files, time.perf_counter()
    if way == "upload":
        piece = bytes(1 << 20)
        moved = files.write("big", (piece for _ in range(size >> 20))).size
    else:
        with files.open("big") as stream:
            moved = sum(len(piece) for piece in stream)
    took_s = time.perf_counter() - began
assert moved == size, moved
# ru_maxrss is that of the parent until this process has more: getrusage(2), a fork before the exec
kib = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps({"MB/s": size / took_s / 1e6, "MiB": int(kib) / 1024}))
"""


_LIMITS = {"disk_mb": 4096}
"""Room for a file and the one that replaces it."""


async def clients(bench: Bench) -> None:
    """A command by hand, by the SDK over both ways, by MCP, and typed; a large file, beside a copy between sockets."""
    import httpx2  # these take longer to import than all the rest, and one section needs them
    import mcp
    from mcp.client.streamable_http import streamable_http_client

    async with AsyncExitStack() as tasks:
        stack = tasks.enter_context(ExitStack())
        _, address = stack.enter_context(daemon.running(bench.scratch / "sdk"))
        url = f"http://{address[0]}:{address[1]}"
        by_hand = stack.enter_context(daemon.Client(address))
        async with (
            SandboxClient(base_url=url, api_key=daemon.KEY) as client,
            await client.create_session(limits=_LIMITS) as box,
        ):
            stream = stack.enter_context(ExecSocket(address, box.id))
            over_http = await tasks.enter_async_context(
                httpx2.AsyncClient(headers={"Authorization": f"Bearer {daemon.KEY}"}, timeout=60)
            )
            model = await tasks.enter_async_context(
                mcp.Client(streamable_http_client(f"{url}/mcp", http_client=over_http))
            )

            async def execute() -> None:
                (await box.exec(":")).check()

            async def follow() -> None:
                async with box.start(":") as run:
                    (await run.wait()).check()

            async def call() -> None:
                result = await model.call_tool("bash", {"command": ":"})
                if result.is_error or result.structured_content["exit_code"] != 0:
                    raise RuntimeError(f"MCP's bash failed: {result}")

            works: Mapping[str, Callable[[], Any]] = {
                RAW: partial(by_hand.call, "POST", f"/v1/sessions/{box.id}/exec", {"cmd": ":"}),
                SDK: execute,
                MCP: call,
                RAW_STREAM: partial(_talk, stream),
                SDK_STREAM: follow,
            }
            for name in [*works, *bench.rounds(list(works), 300)]:
                await trio.sleep(0.002)
                with bench.table.timed(name):
                    if (waiting := works[name]()) is not None and name in (SDK, SDK_STREAM, MCP):
                        await waiting
            _type(bench, url, box.id)
            _transfer(bench, url, box.id)


def _type(bench: Bench, url: str, session: str) -> None:
    """Run the command line as a person does, from the start of its process to its end."""
    command = [str(Path(sys.executable).with_name("sandkasten")), "exec", session, "--", ":"]
    environment = os.environ | {"SANDKASTEN_URL": url, "SANDKASTEN_API_KEY": daemon.KEY}
    for name in bench.rounds([CLI], 30):
        with bench.table.timed(name):
            subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=True)


def _talk(stream: ExecSocket) -> None:
    stream.start(":")
    stream.until_exit()


def _transfer(bench: Bench, url: str, session: str) -> None:
    """Move a file both ways in processes of their own, whose memory is that of one transfer."""
    size = bench.count(_FILE_MIB, 16) * MIB
    peak_mib: dict[str, float] = {}
    for name in bench.rounds([COPY, "files"], 3, 1):
        if name == COPY:
            bench.table.row(COPY).values.append(_copy(size))
            continue
        for way in ("upload", "download"):
            command = [sys.executable, "-c", _TRANSFER, way, url, daemon.KEY, session, str(size)]
            done = json.loads(subprocess.check_output(command, text=True))
            bench.table.row(transfer_row(way)).values.append(done["MB/s"])
            peak_mib[way] = max(done["MiB"], peak_mib.get(way, 0))
    for way, most in peak_mib.items():
        bench.facts[f"SDK's {way}, MiB of client memory"] = round(most, 1)


def transfer_row(way: str) -> str:
    return f"SDK's {way}, MB/s"


def _copy(size: int) -> float:
    """Return the MB/s at which a process sends bytes to another over TCP, that takes them and nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pid = os.fork()
        if pid == 0:
            with socket.create_connection(server.getsockname()) as source:
                piece = bytes(_PIECE_BYTES)
                for _ in range(size // len(piece)):
                    source.sendall(piece)
            os._exit(0)
        connection, _ = server.accept()
        began, got, room = time.perf_counter(), 0, bytearray(_PIECE_BYTES)
        with connection:
            while received := connection.recv_into(room):
                got += received
        os.waitpid(pid, 0)
    if got != size:
        raise RuntimeError(f"{got} bytes of {size} came")
    return got / (time.perf_counter() - began) / 1e6
