"""Costs of streams: output over a WebSocket beside a plain sender, the first byte, an interrupt, CPU per command, and
fifty streams at once. Each figure is printed with what it is compared with, from the same run.
"""

from __future__ import annotations

import os
import statistics
import struct
import time
from pathlib import Path

import trio
from trio_websocket import connect_websocket_url

from bench import daemon, measure
from bench.websocket import ExecSocket, WebSocket

MIB = 1024 * 1024
BULK_BYTES = 128 * MIB
STREAMS = 50
STREAM_BYTES = 8 * MIB
_HEADER = struct.Struct("!IBQ")
_CREDIT_BYTES = 16 * MIB
_CPU_EXECS = 200


async def print_streams(pid: int, client: daemon.Client, address: tuple[str, int], plain: tuple[str, int]) -> None:
    """Measure and print. `pid` and `address` are the daemon's, `plain` is the address of `bench.echo`."""
    session = client.call("POST", "/v1/sessions", {})["id"]
    with ExecSocket(address, session) as stream:
        stream.run(":")
        _print_first_byte(stream)
        _print_interrupt(stream)
        _print_cpu(pid, stream)
    _print_throughput(address, plain, session)
    client.call("DELETE", f"/v1/sessions/{session}")
    await _print_many(pid, client, address)


def _print_first_byte(stream: ExecSocket) -> None:
    """A command writes the time at which it writes; we look at the clock when it has come."""
    delays = []
    for _ in range(20):
        stream.start("sleep 0.02; printf $EPOCHREALTIME")
        while not isinstance(event := stream.next(), bytes):
            pass
        delays.append(time.time() - float(event))
        stream.until_exit()
    print(f"first byte after it was written: {statistics.median(delays) * 1000:.2f} ms (goal: <= 5)")


def _print_interrupt(stream: ExecSocket) -> None:
    delays = []
    for _ in range(20):
        channel = stream.start("printf x; sleep 60")
        while not isinstance(stream.next(), bytes):
            pass
        began = time.perf_counter()
        stream.say(type="signal", id=channel, signal="INT")
        stream.until_exit()
        delays.append(time.perf_counter() - began)
    print(f"interrupt to the command's end, shell ready again: {statistics.median(delays) * 1000:.1f} ms (goal: <= 20)")


def _print_cpu(pid: int, stream: ExecSocket) -> None:
    before = _cpu_s(pid)
    for _ in range(_CPU_EXECS):
        stream.run(":")
    print(f"CPU of the daemon per command over an open WebSocket: {(_cpu_s(pid) - before) / _CPU_EXECS * 1000:.2f} ms")


def _print_throughput(address: tuple[str, int], plain: tuple[str, int], session: str) -> None:
    rates: dict[str, list[float]] = {"plain": [], "exec": []}
    for _ in range(3):
        with WebSocket(plain, "/send") as sender:
            began = time.perf_counter()
            sender.send(str(BULK_BYTES))
            size = 0
            while size < BULK_BYTES:
                size += len(sender.receive())
            rates["plain"].append(size / (time.perf_counter() - began))
        with ExecSocket(address, session) as stream:
            began = time.perf_counter()
            stream.start(f"head -c {BULK_BYTES} /dev/zero", credit=_CREDIT_BYTES, max_frame=65536)
            size = stream.until_exit(credit_every=4 * MIB)
            rates["exec"].append(size / (time.perf_counter() - began))
    ours, theirs = (statistics.median(rates[name]) / 1e6 for name in ("exec", "plain"))
    print(
        f"output over a WebSocket, frames of 64 KiB: {ours:.0f} MB/s, "
        f"{ours / theirs:.0%} of a plain sender's {theirs:.0f} MB/s (goal: >= 300 MB/s, or >= 50 %)"
    )


async def _print_many(pid: int, client: daemon.Client, address: tuple[str, int]) -> None:
    sessions = [client.call("POST", "/v1/sessions", {})["id"] for _ in range(STREAMS)]
    before = measure.own_resident_bytes(pid)
    ends, peak = await _stream_all(pid, address, sessions)
    print(
        f"{STREAMS} sessions streaming {STREAM_BYTES // MIB} MiB each at once: first done after {min(ends):.1f} s, "
        f"last after {max(ends):.1f} s, daemon at most {(peak - before) / MIB:.0f} MiB larger"
    )
    for session in sessions:
        client.call("DELETE", f"/v1/sessions/{session}")


async def _stream_all(pid: int, address: tuple[str, int], sessions: list[str]) -> tuple[list[float], int]:
    ends: list[float] = []
    peak = 0
    began = time.perf_counter()

    async def stream(session: str) -> None:
        await _stream(address, session)
        ends.append(time.perf_counter() - began)

    async def watch() -> None:
        nonlocal peak
        while len(ends) < len(sessions):
            peak = max(peak, measure.own_resident_bytes(pid))
            await trio.sleep(0.05)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        for session in sessions:
            nursery.start_soon(stream, session)
    return ends, peak


async def _stream(address: tuple[str, int], session: str) -> None:
    url = f"ws://{address[0]}:{address[1]}/v1/sessions/{session}/exec/ws"
    headers = [(b"Authorization", f"Bearer {daemon.KEY}".encode())]
    async with trio.open_nursery() as nursery:
        socket = await connect_websocket_url(nursery, url, extra_headers=headers)
        await socket.send_message(
            f'{{"type": "start", "id": 1, "cmd": "head -c {STREAM_BYTES} /dev/zero", "credit": {STREAM_BYTES}}}'
        )
        while True:
            message = await socket.get_message()
            if isinstance(message, str) and '"exit"' in message:
                break
        await socket.aclose()
        nursery.cancel_scope.cancel()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
