"""`make bench`: one run, interleaved repeats, medians and ratios. Absolute times orient; ratios are what counts.

Every round measures every row once, so a noisy second on the machine falls on all of them. Options: --rounds N,
--sessions N (for the memory slope), --quick.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import subprocess
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import trio

from bench import daemon, echo, measure, rivals
from bench.neighbours import print_neighbours
from bench.protections import print_protections
from bench.streams import print_streams
from bench.websocket import ExecSocket, WebSocket
from sandkasten.app import open_supervisor
from sandkasten.config import Config, ServerSettings
from sandkasten.host import examine
from sandkasten.images.catalog import Catalog
from sandkasten.images.host import ensure_host_image
from sandkasten.model import ExecSpec, SessionSpec
from sandkasten.supervisor import Supervisor

COMMANDS = {"builtin (:)": ":", "/bin/true": "/bin/true", "python3 -c pass": "python3 -c pass"}
BURST = 100
SETTLE_S = 0.05
"""Pause before a create and before its rivals, so that work left over from the row before falls on neither."""
IN_A_ROW = 20
"""Repeats of the fastest operations in each round, one after another."""

FORK, TRUE, RTT, HEALTHZ = "fork and wait, this process", "/bin/true", "loopback round trip", "GET /healthz"
CREATE, COLD, CREATE_HTTP = "create, in-process", "create, in-process, no pool sandbox ready", "create, HTTP"
ECHO, WARM = "WebSocket echo, one after another", "exec builtin (:), in-process, one after another"
OPEN = "exec builtin (:), open WebSocket, one after another"
DESTROY, DESTROY_HTTP, FIRST = "destroy, in-process", "destroy, HTTP", "create to first output, HTTP"


def exec_row(name: str, where: str) -> str:
    return f"exec {name}, {where}"


_ECHO_TEXT = "x" * 600
"""Text about as long as a command's `started` and `exit` messages together."""

RATIOS = {
    CREATE: "bwrap",
    COLD: "bwrap",
    CREATE_HTTP: "bwrap",
    FIRST: "bwrap",
    "runc": "bwrap",
    exec_row("builtin (:)", "HTTP"): HEALTHZ,
    exec_row("/bin/true", "in-process"): TRUE,
    exec_row("/bin/true", "HTTP"): HEALTHZ,
    OPEN: ECHO,
}
"""Row to the row it is divided by."""

_FIRST_COUNT = 50
"""Sessions before memory is first measured, so that memory which is needed only once is in use by then."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sessions", type=int, default=300, help="up to how many idle sessions memory is measured")
    parser.add_argument("--protections", action="store_true", help="nothing but what each protection costs")
    parser.add_argument("--neighbours", action="store_true", help="nothing but commands beside a session that is noisy")
    parser.add_argument("--quick", action="store_true", help="5 rounds, 80 sessions")
    arguments = parser.parse_args()
    rounds, sessions = (5, 80) if arguments.quick else (arguments.rounds, max(80, arguments.sessions))
    with tempfile.TemporaryDirectory(prefix="sandkasten-bench-") as scratch:
        if arguments.protections:
            trio.run(print_protections, Path(scratch), rounds)
        elif arguments.neighbours:
            trio.run(print_neighbours, Path(scratch), rounds)
        else:
            trio.run(_bench, Path(scratch), rounds, sessions)


async def _bench(scratch: Path, rounds: int, sessions: int) -> None:
    samples = measure.Samples()
    catalog = Catalog(scratch / "rivals")
    ensure_host_image(catalog)
    rootfs = catalog.rootfs_path("host")
    compared = [rivals.bubblewrap(rootfs, scratch), rivals.runc(rootfs, scratch)]
    with ExitStack() as stack:
        round_trip = stack.enter_context(measure.loopback())
        pid, address = stack.enter_context(daemon.running(scratch / "daemon"))
        client = stack.enter_context(daemon.Client(address))
        plain = stack.enter_context(echo.running())
        async with AsyncExitStack() as opened:
            ready = await opened.enter_async_context(open_supervisor(_config(scratch / "ready", pool_sandboxes=2)))
            cold = await opened.enter_async_context(open_supervisor(_config(scratch / "cold", pool_sandboxes=0)))
            _print_header(scratch, compared)
            for number in range(rounds + 1):
                kept = samples if number else measure.Samples()  # the first round warms up
                _measure_machine(kept, round_trip, client, compared)
                await _measure_sessions(kept, ready, cold)
                _measure_http(kept, client, address)
                _measure_websocket(kept, client, address, plain)
        _print_rows(samples)
        print()
        await print_streams(pid, client, address, plain)
        burst_ms = await _create_at_once(address)
        print(f"\n{BURST} creates at once over HTTP, all answered after {burst_ms:.0f} ms (goal: < 1000 ms)")
        _destroy_all(client)
        _print_memory(pid, client, sessions)
        _destroy_all(client)
    await print_protections(scratch / "protections", rounds)
    await print_neighbours(scratch / "neighbours", rounds)


def _config(data_dir: Path, *, pool_sandboxes: int) -> Config:
    return Config(data_dir=data_dir, server=ServerSettings(pool_sandboxes=pool_sandboxes))


def _measure_machine(
    samples: measure.Samples, round_trip: object, client: daemon.Client, compared: list[rivals.Rival]
) -> None:
    assert callable(round_trip)
    for row, action in ((FORK, measure.fork_and_wait), (TRUE, measure.run_true), (RTT, round_trip)):
        with samples.timed(row):
            action()
    with samples.timed(HEALTHZ):
        client.call("GET", "/healthz")
    for rival in compared:
        if not rival.reason:
            time.sleep(SETTLE_S)
            with samples.timed(rival.name):
                rival.run()


async def _measure_sessions(samples: measure.Samples, ready: Supervisor, cold: Supervisor) -> None:
    await trio.sleep(SETTLE_S)
    with samples.timed(COLD):
        session = await cold.create(SessionSpec())
    await cold.destroy(session.id)
    await trio.sleep(SETTLE_S)
    with samples.timed(CREATE):
        session = await ready.create(SessionSpec())
    await ready.exec(session.id, ExecSpec(":"))
    for name, command in COMMANDS.items():
        with samples.timed(exec_row(name, "in-process")):
            await ready.exec(session.id, ExecSpec(command))
    for _ in range(IN_A_ROW):
        with samples.timed(WARM):
            await ready.exec(session.id, ExecSpec(":"))
    with samples.timed(DESTROY):
        await ready.destroy(session.id)


def _measure_http(samples: measure.Samples, client: daemon.Client, address: tuple[str, int]) -> None:
    time.sleep(SETTLE_S)
    with samples.timed(CREATE_HTTP):
        session = client.call("POST", "/v1/sessions", {})
    place = f"/v1/sessions/{session['id']}"
    client.call("POST", f"{place}/exec", {"cmd": ":"})
    for name, command in COMMANDS.items():
        with samples.timed(exec_row(name, "HTTP")):
            client.call("POST", f"{place}/exec", {"cmd": command})
    with samples.timed(DESTROY_HTTP):
        client.call("DELETE", place)
    time.sleep(SETTLE_S)
    with daemon.Client(address) as other, samples.timed(FIRST):
        session = other.call("POST", "/v1/sessions", {})
        other.wait_for("POST", f"/v1/sessions/{session['id']}/exec/stream", {"cmd": "echo x"}, b"event: chunk")
    client.call("DELETE", f"/v1/sessions/{session['id']}")


def _measure_websocket(
    samples: measure.Samples, client: daemon.Client, address: tuple[str, int], plain: tuple[str, int]
) -> None:
    session = client.call("POST", "/v1/sessions", {})["id"]
    with ExecSocket(address, session) as stream, WebSocket(plain, "/echo") as back:
        stream.run(":")
        for _ in range(IN_A_ROW):
            with samples.timed(ECHO):
                back.send(_ECHO_TEXT)
                back.receive()
            with samples.timed(OPEN):
                stream.run(":")
    client.call("DELETE", f"/v1/sessions/{session}")


async def _create_at_once(address: tuple[str, int]) -> float:
    """Return after how many milliseconds the last of `BURST` simultaneous creates was answered."""
    streams = [await trio.open_tcp_stream(*address) for _ in range(BURST)]

    async def create(stream: trio.SocketStream) -> None:
        await stream.send_all(daemon.encode("POST", "/v1/sessions", {}))
        data = b""
        while daemon.decode(data) is None:
            data += await stream.receive_some()

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(create, stream)
    took = time.perf_counter() - began
    for stream in streams:
        await stream.aclose()
    return took * 1000


def _destroy_all(client: daemon.Client) -> None:
    for session in client.call("GET", "/v1/sessions"):
        client.call("DELETE", f"/v1/sessions/{session['id']}")


def _print_memory(pid: int, client: daemon.Client, sessions: int) -> None:
    """Grow to `sessions` idle sessions that have each run a command, and print the slope."""
    processes: list[tuple[float, float]] = []
    kernel: list[tuple[float, float]] = []
    for count in range(1, sessions + 1):
        session = client.call("POST", "/v1/sessions", {})
        client.call("POST", f"/v1/sessions/{session['id']}/exec", {"cmd": ":"})
        if count >= _FIRST_COUNT and count % 10 == 0:
            processes.append((count, measure.resident_bytes(pid)))
            kernel.append((count, measure.kernel_bytes()))
    each, inside = measure.slope(processes) / 1024**2, measure.slope(kernel) / 1024**2
    print(f"memory per idle session, slope over {_FIRST_COUNT} to {sessions}: {each + inside:.2f} MiB (goal: <= 3.5)")
    print(f"  {each:.2f} MiB processes (PSS of daemon, fork server, sandboxes)")
    print(f"  {inside:.2f} MiB kernel and tmpfs (slab, stacks, page tables, per-cpu, shmem; machine-wide)")


def _print_header(scratch: Path, compared: list[rivals.Rival]) -> None:
    cgroups = next((check.seen for check in examine.probe(scratch).checks if check.id == "cgroups"), "unknown")
    print(f"date      {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    machine = f"Linux {platform.release()} {platform.machine()}"
    print(f"machine   {machine}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    print(f"cgroups   {cgroups}")
    packages = ", ".join(f"{name} {version(name)}" for name in ("trio", "quart", "hypercorn"))
    print(f"versions  sandkasten {version('sandkasten-runtime')}, Python {platform.python_version()}, {packages}")
    for rival in compared:
        about = rival.reason or subprocess.run([rival.name, "--version"], capture_output=True, text=True).stdout
        print(f"{rival.name:<9} {about.splitlines()[0]}")
        if not rival.reason:
            print(f"          {' '.join(rival.command)}")


def _print_rows(samples: measure.Samples) -> None:
    print(f"\n{'':<52} {'n':>4} {'median ms':>10} {'p95 ms':>9}  ratio")
    for row in samples.rows():
        base = RATIOS.get(row, "")
        ratio = samples.median(row) / samples.median(base) if base else math.nan
        shown = "" if math.isnan(ratio) else f"{ratio:.2f} x {base}"
        print(f"{row:<52} {samples.count(row):>4} {samples.median(row):>10.3f} {samples.p95(row):>9.3f}  {shown}")


if __name__ == "__main__":
    main()
