"""Measurements: one function for each section, in the order of `SECTIONS`.

A section measures into `Bench.table`, where every row keeps its raw samples and failures, and puts figures that are no
samples into `Bench.facts`. Every answer is verified: a command's output or exit status, a create's source. Rows that
are compared are measured in random blocks, in which each of them comes once.
"""

from __future__ import annotations

import base64
import inspect
import math
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from bench import daemon, echo, measure
from bench.clients import clients
from bench.e2b import e2b
from bench.files import HEALTHZ as SMALL_HEALTHZ
from bench.files import (
    LARGE,
    SMALL,
    measure_large,
    measure_large_memory,
    measure_list,
    measure_small,
    measure_sparse,
)
from bench.images import images
from bench.links import AT_ONCE, Link, end_all, for_each, links, make_many
from bench.peers import Peer, RunningContainer, start_container
from bench.protections import measure_protections
from bench.rollouts import trace
from bench.sampling import Row, Table, blocks, closed_loop, in_a_row, open_loop, percentile
from bench.thousand import cpu_ns, measure_thousand
from bench.ways_out import measure_ways_out
from bench.websocket import ExecSocket, WebSocket
from sandkasten.app import open_supervisor
from sandkasten.config import Config
from sandkasten.model import ExecSpec, ProcessSpec, SessionSpec, WaitFor
from sandkasten.supervisor import Supervisor

MIB = 1024 * 1024
COLD, SANDBOX_POOL, POOL = "no pool", "sandbox pool", "session pool"
POOL_SIZE = 100
_ALONE = {"SANDKASTEN_SERVER_POOL_SANDBOXES": "0"}
KINDS: Mapping[str, Mapping[str, str]] = {
    COLD: _ALONE,
    SANDBOX_POOL: {},
    POOL: {**_ALONE, "SANDKASTEN_POOL_ENABLED": "true", "SANDKASTEN_POOL_IMAGES": f"python={POOL_SIZE}"},
}
"""Settings of the daemon of each kind of create."""

BUBBLEWRAP = "peer: bubblewrap"
HEALTHZ, ECHO, DESTROY = "GET /healthz", "WebSocket echo", "destroy, HTTP"
EXEC_CPU = "daemon CPU per exec, builtin, HTTP"
HEALTHZ_BESIDE = f"{HEALTHZ}, beside creates"
OUTPUT, PLAIN_OUTPUT = "output over a WebSocket, MB/s", "output of a plain sender, MB/s"
_SETTLE_S, _BREATH_S, _ADOPTED_S = 0.03, 0.002, 60.0
_QUIET_S, _BATCH = 0.3, 10
"""Before processor time is read, and how much of it is one sample."""
_WORD = "echo ok"
_COMMANDS: Mapping[str, tuple[str, bytes]] = {
    "builtin": (":", b""),
    "/bin/true": ("/bin/true", b""),
    "ls": ("ls -d /etc", b"/etc\n"),
    "python3 -c pass": ("python3 -c pass", b""),
}
"""Classes of commands, each with the output that it must give."""

_LINKS_CLOSED = (1, 2, 4, 8, 16, 32)
_SHARES = (0.25, 0.5, 0.75, 0.9)
_BULK_BYTES, _CREDIT_BYTES = 128 * MIB, 16 * MIB
_STREAMS, _STREAM_BYTES = 50, 8 * MIB
_MIB_PER_SESSION = 8
SIZES = (10, 100, 300, 600, 1000)


def create_row(kind: str) -> str:
    return f"create, {kind}"


def create_cpu_row(kind: str) -> str:
    return f"machine CPU per create and destroy, {kind}"


def first_row(kind: str) -> str:
    """The row that is compared with peers: from nothing to the output of a command."""
    return f"create and first command, {kind}"


def burst_row(kind: str, size: int, which: str) -> str:
    return f"{create_row(kind)}, {size} at once: {which}"


def exec_row(name: str, way: str) -> str:
    return f"exec {name}, {way}"


def dense_row(sessions: int, way: str) -> str:
    """The row of commands to one of so many sessions, or to all of them in turn."""
    return f"exec builtin, HTTP, {sessions} sessions, {way}"


def noisy_row(neighbours: str) -> str:
    return f"exec /bin/true, library, {neighbours}"


@attrs.define
class Bench:
    """One run. `share` scales all counts and durations: 1 for the report, less to try that everything works."""

    scratch: Path
    chance: random.Random
    share: float
    table: Table = attrs.field(factory=Table)
    facts: dict[str, Any] = attrs.field(factory=dict)
    peers: Sequence[Peer] = ()
    deadline: float = math.inf
    """The end of the section's time (`time.monotonic`), after which no round begins."""

    cut: list[str] = attrs.field(factory=list)
    """Loops that stopped there, each with the rounds that it made."""

    def count(self, full: int, least: int = 2) -> int:
        return max(least, round(full * self.share))

    def seconds(self, full: float) -> float:
        return max(0.3, full * self.share)

    def rounds(self, names: Sequence[str], full: int, least: int = 2) -> Iterator[str]:
        """Yield the names in random blocks, as many as `count` says, or as there is time for, but one at least."""
        for done in range(count := self.count(full, least)):
            if done and time.monotonic() > self.deadline:
                self.cut.append(f"{', '.join(names)}: {done} of {count} rounds")
                return
            yield from blocks(names, 1, self.chance)


Work = Callable[[Bench], Awaitable[None]]


@attrs.frozen
class Section:
    """A part of the report, and the seconds of a whole run that its loops may take."""

    work: Work
    budget_s: float


# Clients ------------------------------------------------------------------------------------------------------------


def _exec(client: daemon.Client, session: str, command: str = _WORD, output: bytes = b"ok\n") -> None:
    daemon.verify(client.call("POST", f"/v1/sessions/{session}/exec", {"cmd": command}), output)


def _talk(stream: ExecSocket, command: str, output: bytes) -> None:
    stream.start(command)
    got = b""
    while True:
        event = stream.next()
        if isinstance(event, bytes):
            got += event
        elif event["type"] == "exit":
            if event["exit_code"] != 0 or got != output:
                raise RuntimeError(f"a wrong answer: {event}, {got!r}")
            return


def _new(client: daemon.Client, kind: str = SANDBOX_POOL) -> str:
    made = client.call("POST", "/v1/sessions", {})
    _verify_source(made, kind)
    return str(made["id"])


def _verify_source(made: Mapping[str, Any], kind: str) -> None:
    if (kind == POOL) != (made["acquire_source"] == "pool"):
        raise RuntimeError(f"a create from {made['acquire_source']}: {made.get('acquire_detail')}")


def _wait_full(client: daemon.Client) -> None:
    for pool in client.call("GET", "/v1/pools"):
        while pool["ready"] < pool["wanted"]:
            time.sleep(0.05)
            (pool,) = client.call("GET", "/v1/pools")


@contextmanager
def _daemons(bench: Bench, name: str) -> Iterator[Mapping[str, tuple[int, tuple[str, int], daemon.Client]]]:
    """Run a daemon of each kind of create; yield pid, address and client of each."""
    with ExitStack() as stack:
        found = {}
        for kind, settings in KINDS.items():
            pid, address = stack.enter_context(
                daemon.running(bench.scratch / f"{name}-{kind.replace(' ', '-')}", **_sized(bench, settings))
            )
            found[kind] = pid, address, stack.enter_context(daemon.Client(address))
        yield found


def _sized(bench: Bench, settings: Mapping[str, str]) -> Mapping[str, str]:
    size = bench.count(POOL_SIZE, 10)
    return {name: value.replace(f"={POOL_SIZE}", f"={size}") for name, value in settings.items()}


# Sections -----------------------------------------------------------------------------------------------------------


async def calibrate(bench: Bench) -> None:
    """The machine itself: fork, a program's start, a system call, a copy of memory, a round trip, a request that asks
    nothing."""
    table = bench.table
    block = bytearray(64 * MIB)
    copied = bytearray(block)  # so that the copy that is timed meets no page for the first time
    with (
        daemon.running(bench.scratch / "calibrate") as (_pid, address),
        daemon.Client(address) as client,
        measure.loopback() as round_trip,
    ):
        works: dict[str, Callable[[], object]] = {
            "fork of the benchmark's own process, and wait": measure.fork_and_wait,
            "/bin/true": measure.run_true,
            "loopback round trip": round_trip,
            HEALTHZ: partial(client.call, "GET", "/healthz"),
        }
        for name in bench.rounds(list(works), 100):
            with table.timed(f"calibration: {name}"):
                works[name]()
    began = time.perf_counter()
    for _ in range(100_000):
        os.getppid()
    bench.facts["system call, ns"] = round((time.perf_counter() - began) * 1e4)
    began = time.perf_counter()
    copied[:] = block
    bench.facts["copy of memory, GB/s"] = round(len(copied) / (time.perf_counter() - began) / 1e9, 1)


async def creates(bench: Bench) -> None:
    """One create after another, peers between them; the processor time of a create and its destroy."""
    with _daemons(bench, "create") as kinds:
        able = {peer.name: peer for peer in bench.peers if not peer.reason}
        for name in bench.rounds([*able, *kinds, HEALTHZ_BESIDE], 80):
            _wait_full(kinds[POOL][2])  # a refill would compete with the next row
            await trio.sleep(_SETTLE_S)
            if name in able:
                with bench.table.timed(f"peer: {name}"):
                    able[name].run()
            elif name == HEALTHZ_BESIDE:
                with bench.table.timed(name):
                    kinds[POOL][2].call("GET", "/healthz")
            else:
                await _create_once(bench, name, kinds[name][2])
        for kind in bench.rounds(list(kinds), 6, 1):
            client = kinds[kind][2]
            _wait_full(client)
            await trio.sleep(_QUIET_S)
            before = measure.busy_s()
            for _ in range(_BATCH):
                client.call("DELETE", f"/v1/sessions/{_new(client, kind)}")
            _wait_full(client)
            bench.table.row(create_cpu_row(kind)).values.append((measure.busy_s() - before) / _BATCH * 1000)


async def _create_once(bench: Bench, kind: str, client: daemon.Client) -> None:
    session = ""
    with bench.table.timed(first_row(kind)):
        with bench.table.timed(create_row(kind)):
            session = _new(client, kind)
        _exec(client, session)
    with bench.table.timed(DESTROY):
        client.call("DELETE", f"/v1/sessions/{session}")


async def staggered(bench: Bench) -> None:
    """Creates at an even rate, whether earlier ones were answered or not."""
    with _daemons(bench, "staggered") as kinds:
        for kind in bench.rounds(list(kinds), 4, 1):
            address = kinds[kind][1]
            _wait_full(kinds[POOL][2])
            row, began = bench.table.row(f"{create_row(kind)}, one each 100 ms"), trio.current_time() + 0.2
            dues = [began + number * 0.1 for number in range(bench.count(20, 4))]
            await end_all(address, await _create_at(row, kind, address, dues))


async def bursts(bench: Bench) -> None:
    """Creates at once: when each of them is answered, and the last. A burst larger than the pool has to wait for
    ordinary creates."""
    with _daemons(bench, "burst") as kinds:
        for full, rounds in ((10, 10), (100, 4), (300, 2)):
            size = bench.count(full, 3)
            for kind in bench.rounds(list(kinds), rounds, 1):
                address = kinds[kind][1]
                _wait_full(kinds[POOL][2])
                await trio.sleep(_SETTLE_S)
                each = bench.table.row(burst_row(kind, size, "each"))
                last = bench.table.row(burst_row(kind, size, "all"))
                began, before = trio.current_time(), len(each.errors)
                expected = kind if full <= POOL_SIZE else ""
                made = await _create_at(each, expected, address, [began] * size)
                if len(each.errors) > before:
                    last.errors.append(f"{len(each.errors) - before} of {size} failed")
                else:
                    last.values.append(max(each.values[-size:]))
                await end_all(address, made)


async def _create_at(row: Row, kind: str, address: tuple[str, int], dues: Sequence[float]) -> Sequence[str]:
    """Send a create at each of the times, over connections that are open; return the sessions. A latency counts from
    the intended time. An empty `kind` is any."""
    made: list[str] = []

    async def create(link: Link, due: float) -> None:
        await trio.sleep_until(due)
        try:
            session = await link.call("POST", "/v1/sessions", {})
            took = trio.current_time() - due
            made.append(session["id"])
            if kind:
                _verify_source(session, kind)
        except Exception as error:  # noqa: BLE001 - a failure of the row
            row.errors.append(str(error)[:200])
        else:
            row.values.append(took * 1000)

    async with links(address, len(dues)) as opened, trio.open_nursery() as nursery:
        late = max(0.0, trio.current_time() - dues[0])  # opening the connections takes a moment
        for link, due in zip(opened, dues, strict=True):
            nursery.start_soon(create, link, due + late)
    return made


async def execs(bench: Bench) -> None:
    """Commands by class and way in, one after another, and the `exec` of the peers that have one."""
    with ExitStack() as stack:
        _, address = stack.enter_context(daemon.running(bench.scratch / "exec"))
        client = stack.enter_context(daemon.Client(address))
        session = _new(client)
        stream = stack.enter_context(ExecSocket(address, session))
        back = stack.enter_context(WebSocket(stack.enter_context(echo.running()), "/echo"))
        containers = _containers(bench, stack)
        async with open_supervisor(Config(data_dir=bench.scratch / "library")) as library:
            ours = (await library.create(SessionSpec())).id

            async def call_library(command: str, output: bytes) -> None:
                result = await library.exec(ours, ExecSpec(command))
                if result.end.exit_code != 0 or result.stdout != output:
                    raise RuntimeError(f"a wrong answer: {result}")

            works: dict[str, Callable[[], object]] = {
                HEALTHZ: partial(client.call, "GET", "/healthz"),
                "/bin/true": measure.run_true,
                ECHO: back.echo,
                **{f"peer: {each.runtime} exec": each.exec for each in containers},
            }
            for name, (command, output) in _COMMANDS.items():
                works[exec_row(name, "HTTP")] = partial(_exec, client, session, command, output)
                works[exec_row(name, "WebSocket")] = partial(_talk, stream, command, output)
                works[exec_row(name, "library")] = partial(call_library, command, output)

            async def take_time(name: str, table: Table, row: str) -> None:
                with table.timed(row):
                    if inspect.isawaitable(waiting := works[name]()):
                        await waiting

            for name in works:  # the first time loads programs and pages
                await take_time(name, Table(), name)
            for name in bench.rounds(list(works), 200):
                await trio.sleep(_BREATH_S)  # whatever the last row left to the supervisor's own tasks
                await take_time(name, bench.table, name)
            for name in (HEALTHZ, ECHO, *(exec_row("builtin", way) for way in ("HTTP", "WebSocket", "library"))):
                for _ in bench.rounds([name], 1000):  # caches are warm then, and no processor rests
                    await take_time(name, bench.table, in_a_row(name))
        _measure_cpu_per_exec(bench)


def _containers(bench: Bench, stack: ExitStack) -> Sequence[RunningContainer]:
    found = []
    for peer in bench.peers:
        if peer.name in ("runc", "crun", "runsc") and not peer.reason:
            try:
                container = start_container(peer.name, bench.scratch / "peers")
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                bench.table.row(f"peer: {peer.name} exec").errors.append(str(error)[:200])
            else:
                stack.callback(container.remove)
                found.append(container)
    return found


def _measure_cpu_per_exec(bench: Bench) -> None:
    with daemon.running(bench.scratch / "cpu") as (pid, address), daemon.Client(address) as client:
        session = _new(client)
        _exec(client, session)
        for name in bench.rounds([EXEC_CPU], 30):
            before = cpu_ns(pid)
            for _ in range(_BATCH):
                _exec(client, session, ":", b"")
            bench.table.row(name).values.append((cpu_ns(pid) - before) / _BATCH / 1e6)


async def streams(bench: Bench) -> None:
    """Output over a WebSocket beside a plain sender; the first byte; an interrupt."""
    with ExitStack() as stack:
        _, address = stack.enter_context(daemon.running(bench.scratch / "streams"))
        client = stack.enter_context(daemon.Client(address))
        plain = stack.enter_context(echo.running())
        session, size = _new(client), bench.count(_BULK_BYTES // MIB) * MIB
        for name in bench.rounds([PLAIN_OUTPUT, OUTPUT], 10, 1):
            began = time.perf_counter()
            got = _send_plain(plain, size) if name == PLAIN_OUTPUT else _send_ours(address, session, size)
            if got != size:
                raise RuntimeError(f"{got} bytes of {size} came")
            bench.table.row(name).values.append(got / (time.perf_counter() - began) / 1e6)
        with ExecSocket(address, session) as stream:
            _talk(stream, ":", b"")
            for name in bench.rounds(["interrupt", "first byte"], 100):
                if name == "interrupt":
                    _interrupt(bench, stream)
                else:
                    _first_byte(bench, stream)


def _send_plain(plain: tuple[str, int], size: int) -> int:
    got = 0
    with WebSocket(plain, "/send") as sender:
        sender.send(str(size))
        while got < size:
            got += len(sender.receive())
    return got


def _send_ours(address: tuple[str, int], session: str, size: int) -> int:
    with ExecSocket(address, session) as stream:
        stream.start(f"head -c {size} /dev/zero", credit=_CREDIT_BYTES, max_frame=65536)
        return stream.until_exit(credit_every=4 * MIB)


def _interrupt(bench: Bench, stream: ExecSocket) -> None:
    """From the signal to the end of the command."""
    channel = stream.start("printf x; sleep 60")
    while not isinstance(stream.next(), bytes):
        pass
    with bench.table.timed("interrupt, WebSocket"):
        stream.say(type="signal", id=channel, signal="INT")
        while not isinstance(event := stream.next(), dict) or event["type"] != "exit":
            pass
        if event["exit_code"] != 128 + signal.SIGINT:
            raise RuntimeError(f"another end: {event}")


def _first_byte(bench: Bench, stream: ExecSocket) -> None:
    """The command writes the time at which it writes."""
    stream.start("sleep 0.02; printf $EPOCHREALTIME")
    while not isinstance(event := stream.next(), bytes):
        pass
    bench.table.row("first byte after it was written, WebSocket").values.append((time.time() - float(event)) * 1000)
    stream.until_exit()


async def many_streams(bench: Bench) -> None:
    """Sessions that stream at once to clients that read: how long, and how much larger the daemon grows."""
    with daemon.running(bench.scratch / "many") as (pid, address):
        sessions = await make_many(address, bench.count(_STREAMS, 3))
        peak = before = measure.own_resident_bytes(pid)
        row = bench.table.row(f"{len(sessions)} streams of {_STREAM_BYTES // MIB} MiB at once: each")
        began = trio.current_time()

        async def stream(session: str) -> None:
            got = await trio.to_thread.run_sync(_send_ours, address, session, _STREAM_BYTES)
            if got == _STREAM_BYTES:
                row.values.append((trio.current_time() - began) * 1000)
            else:
                row.errors.append(f"{got} bytes came")

        async with trio.open_nursery() as nursery:
            for session in sessions:
                nursery.start_soon(stream, session)
            while len(row.values) + len(row.errors) < len(sessions):
                peak = max(peak, measure.own_resident_bytes(pid))
                await trio.sleep(0.05)
        bench.facts["streams at once: growth of the daemon for each, MiB"] = round(
            (peak - before) / MIB / len(sessions), 2
        )
        await end_all(address, sessions)


async def files(bench: Bench) -> None:
    """Files written and read over HTTP."""
    settings = {"SANDKASTEN_DISK_LIMIT_MB": "12288"}
    with daemon.running(bench.scratch / "files", **settings) as (pid, address), daemon.Client(address) as client:
        session = _new(client)
        place = f"/v1/sessions/{session}/fs"
        sizes = {"1 KiB": 1024, "1 MiB": MIB}
        for name in bench.rounds(list(sizes), 100):
            content = base64.b64encode(os.urandom(sizes[name])).decode()
            with bench.table.timed(f"file of {name}, write"):
                client.call("POST", f"{place}/write", {"path": "f", "content_base64": content})
            with bench.table.timed(f"file of {name}, read"):
                if client.call("GET", f"{place}/read?path=f")["content_base64"] != content:
                    raise RuntimeError("another content came back")
        count, entries = bench.count(1000), bench.count(100_000)
        rounds = bench.rounds([SMALL, SMALL_HEALTHZ], 1000)
        bench.facts |= measure_small(bench.table, client, place, rounds, count)
        bench.facts |= measure_list(bench.table, client, session, entries)
        kinds, size = bench.rounds(LARGE, 5, 1), bench.count(1024) * MIB
        measure_large(bench.table, address, session, bench.scratch, kinds, size)
        bench.facts["large file whose rate is measured, MiB"] = size // MIB
        bench.facts |= measure_large_memory(pid, address, session, bench.count(5 * 1024) * MIB)
        bench.facts |= measure_sparse(client, address, session, bench.count(10 * 1024) * MIB)


async def pauses(bench: Bench) -> None:
    """A pause, and the first command after it."""
    with daemon.running(bench.scratch / "pause") as (_pid, address), daemon.Client(address) as client:
        session = _new(client)
        _exec(client, session)
        for _ in bench.rounds(["pause"], 100):
            with bench.table.timed("pause, HTTP"):
                if client.call("POST", f"/v1/sessions/{session}/pause", {})["status"] != "paused":
                    raise RuntimeError("not paused")
            with bench.table.timed("resume by a command, HTTP"):
                _exec(client, session)


async def load(bench: Bench) -> None:
    """Commands of many clients, each with a session: as fast as answers come, then at rates below the knee."""
    with daemon.running(bench.scratch / "load") as (_pid, address):
        most = bench.count(_LINKS_CLOSED[-1], 4)
        sessions = await make_many(address, most)
        async with links(address, most) as opened:

            async def request(number: int) -> None:
                answer = await opened[number].call("POST", f"/v1/sessions/{sessions[number]}/exec", {"cmd": ":"})
                daemon.verify(answer, b"")

            curve = []
            for number in range(most):
                await request(number)
            for clients in (each for each in _LINKS_CLOSED if each <= most):
                row, rate = await closed_loop(request, clients, bench.seconds(5))
                bench.table.rows[f"load, closed, {clients} clients"] = row
                curve.append((clients, round(rate, 1)))
            knee = max(rate for _, rate in curve)
            bench.facts["load, closed: clients and commands per second"] = curve
            bench.facts["load, knee, commands per second"] = knee
            for share in _SHARES:
                row = await open_loop(request, most, knee * share, bench.seconds(10), bench.chance)
                bench.table.rows[f"load, open, {share:.0%} of the knee"] = row
        await end_all(address, sessions)


async def density(bench: Bench) -> None:
    """One daemon at growing numbers of sessions, as memory allows, in the end with ways out."""
    sizes = SIZES if bench.share == 1 else [10, 12]
    lines: list[Mapping[str, float]] = []
    bench.facts |= {"density": lines, "density stopped at": f"{sizes[-1]} sessions, as planned"}
    quiet_s, execs = bench.seconds(10), bench.count(500, 50)
    steps = measure_thousand(bench.scratch / "density", sizes, quiet_s=quiet_s, execs=execs)
    with closing(steps):
        while len(lines) < len(sizes):
            done = lines[-1]["sessions"] if lines else 0
            wanted, free = sizes[len(lines)] - done, measure.available_bytes() // MIB
            if wanted * _MIB_PER_SESSION > free:
                bench.facts["density stopped at"] = f"{done} sessions: {free} MiB left, not enough for {wanted} more"
                return
            if lines and time.monotonic() > bench.deadline:
                bench.facts["density stopped at"] = f"{done} sessions: out of time"
                return
            try:
                step = next(steps)
            except Exception as error:
                bench.facts["density stopped at"] = f"{done} sessions: {error}"[:300]
                raise
            for way, values in step.exec_ms.items():
                bench.table.row(dense_row(step.sessions, way)).values += values
            line = {
                "sessions": step.sessions,
                "idle daemon, % of a core": round(step.idle_daemon, 2),
                "idle, all processes, % of a core": round(step.idle_tree, 2),
                "daemon, MiB": round(step.resident_mib, 1),
                "daemon CPU per exec, one, ms": round(statistics.median(step.exec_cpu_ms["one"]), 3),
                "daemon CPU per exec, all, ms": round(statistics.median(step.exec_cpu_ms["all"]), 3),
                "exec p50, one, ms": round(percentile(step.exec_ms["one"], 50), 2),
                "exec p99, one, ms": round(percentile(step.exec_ms["one"], 99), 2),
                "exec p50, all, ms": round(percentile(step.exec_ms["all"], 50), 2),
                "exec p99, all, ms": round(percentile(step.exec_ms["all"], 99), 2),
                "create p50, ms": round(statistics.median(step.create_ms), 1),
                "create, daemon CPU, ms": round(step.create_cpu_ms, 1),
                "destroy p50, ms": round(statistics.median(step.destroy_ms), 1),
                "destroy, daemon CPU, ms": round(step.destroy_cpu_ms, 1),
                "list p50, ms": round(statistics.median(step.list_ms), 1),
                "metrics p50, ms": round(statistics.median(step.metrics_ms), 1),
            }
            lines.append(line)
            bench.facts |= step.ways_out


_MERGED, _SCANS = "memory per idle session, pages merged", 3  # a page is merged by the second look that finds it equal


async def memory(bench: Bench) -> None:
    """The slope of memory over idle sessions that have each run a command; again with merged pages, where they are."""
    await _measure_memory(bench, "memory per idle session", None)
    try:
        with measure.merging() as scans:
            await _measure_memory(bench, _MERGED, scans, SANDKASTEN_ISOLATION_MERGE_PAGES="true")
    except OSError as error:
        bench.facts[_MERGED] = f"not measured: {error}"


async def _measure_memory(bench: Bench, name: str, scans: Callable[[], int] | None, **settings: str) -> None:
    with daemon.running(bench.scratch / name, **settings) as (pid, address), daemon.Client(address) as client:
        points: list[tuple[float, float, float]] = []
        first, last = bench.count(50, 3), bench.count(200, 9)
        for count in range(1, last + 1):
            _exec(client, _new(client))
            if count < first or (last - count) % bench.count(15):
                continue
            seen = scans() if scans else 0
            while scans and scans() < seen + _SCANS:  # noqa: ASYNC110 - the kernel tells by a count alone
                await trio.sleep(0.1)
            points.append((count, measure.resident_bytes(pid), measure.kernel_bytes()))
            if len(points) > 1 and time.monotonic() > bench.deadline:
                bench.cut.append(f"{name}: {count} of {last} sessions")
                break
        ours, inside = (measure.slope([(point[0], point[at]) for point in points]) / MIB for at in (1, 2))
        for part, size in ("", ours + inside), (", processes", ours), (", kernel and tmpfs", inside):
            bench.facts[f"{name}{part}, MiB"] = round(size, 2)
        await end_all(address, [each["id"] for each in client.call("GET", "/v1/sessions")])


@attrs.frozen
class Noise:
    """A command that `sessions` sessions run at the same time."""

    sessions: int
    command: str


IDLE = "neighbours idle"
_WRITE = "while :; do dd if=/dev/zero of=/workspace/big bs=1M count=256 conv={} 2>/dev/null; done"
NOISES = {
    IDLE: Noise(4, "sleep 600"),
    "four compute": Noise(4, "while :; do :; done"),
    "four write": Noise(4, _WRITE.format("notrunc")),
    "four write and fsync": Noise(4, _WRITE.format("fsync")),
    "four fsync small files": Noise(
        4,
        'python3 -c \'import os\nwhile True:\n for n in range(100):\n  f = os.open(f"/workspace/{n}", 577, 438); '
        "os.write(f, bytes(4096)); os.fsync(f); os.close(f)'",
    ),
    "one in a loop of sync": Noise(1, "python3 -c 'import os\nwhile True: os.sync()'"),
}
_BEGIN_S = 1.0


@asynccontextmanager
async def make_noise(supervisor: Supervisor, sessions: Sequence[str], command: str) -> AsyncIterator[None]:
    """Have each of the sessions run a command for as long as the block runs."""
    begun = [(each, (await supervisor.start_process(each, ProcessSpec(command))).exec_id) for each in sessions]
    await trio.sleep(_BEGIN_S)
    try:
        yield
    finally:
        for session_id, exec_id in begun:
            await supervisor.cancel_exec(session_id, exec_id, now=True)
        for session_id, exec_id in begun:
            await supervisor.wait_process(session_id, exec_id, WaitFor(exit=True), timeout_s=60)


async def neighbours(bench: Bench) -> None:
    """`/bin/true` in one session while others are noisy."""
    async with open_supervisor(Config(data_dir=bench.scratch / "neighbours")) as supervisor:
        measured = (await supervisor.create(SessionSpec())).id
        most = max(noise.sessions for noise in NOISES.values())
        noisy = [(await supervisor.create(SessionSpec())).id for _ in range(most)]
        names = list(NOISES) if bench.share == 1 else [IDLE, "four compute"]
        for name in bench.rounds(names, 4, 1):
            noise = NOISES[name]
            async with make_noise(supervisor, noisy[: noise.sessions], noise.command):
                for _ in range(bench.count(50, 3)):
                    with bench.table.timed(noisy_row(name)):
                        result = await supervisor.exec(measured, ExecSpec("/bin/true"))
                        if result.end.exit_code != 0:
                            raise RuntimeError(f"a wrong answer: {result}")


async def protections(bench: Bench) -> None:
    """Sessions with each protection and without it, and the steps that a create consists of."""
    await measure_protections(bench.scratch / "protections", bench.table, bench.facts, partial(bench.rounds, full=30))


async def restarts(bench: Bench) -> None:
    """A daemon that ends and starts again beside its live sessions; times from the start of the process, of three
    restarts one after the other."""
    facts: list[Mapping[str, float]] = []
    bench.facts["restarts"] = facts
    for size in (0, 300, 1000) if bench.share == 1 else (0, 300):
        count, data_dir = bench.count(size, 4) if size else 0, bench.scratch / f"restart-{size}"
        with daemon.running_and_leaving(data_dir) as (_pid, address):
            sessions = await make_many(address, count)

            async def leave(link: Link, number: int, sessions: Sequence[str] = sessions) -> None:
                daemon.verify(
                    await link.call("POST", f"/v1/sessions/{sessions[number]}/exec", {"cmd": f"x={number}"}), b""
                )

            await for_each(address, count, AT_ONCE, leave)
        for number in range(rounds := bench.count(3, 1) if size else 1):
            run = daemon.running_with_log if number == rounds - 1 else daemon.running_and_leaving_with_log
            facts.append(await _restart(bench, run, data_dir, sessions))


async def _restart(bench: Bench, run: daemon.WithLog, data_dir: Path, sessions: Sequence[str]) -> Mapping[str, float]:
    """Start a daemon beside its sessions, and return the seconds until it has done each of these."""
    began, log, count = time.perf_counter(), data_dir.with_suffix(".log"), len(sessions)
    with run(data_dir, log) as (_pid, address), daemon.Client(address) as client:
        found: dict[str, float] = {"sessions": count}

        def take(name: str) -> None:
            found[f"{name}, s"] = round(time.perf_counter() - began, 2)

        client.call("GET", "/healthz")
        take("first answer")
        if count:
            number = bench.chance.randrange(count)
            _exec(client, sessions[number], "echo $x", f"{number}\n".encode())
            take("first command")
        with trio.fail_after(_ADOPTED_S):
            while b'"reconciled"' not in log.read_bytes():  # noqa: ASYNC110 - a file gives no event
                await trio.sleep(0.02)
        take("all adopted")

        async def ask(link: Link, number: int) -> None:
            answer = await link.call("POST", f"/v1/sessions/{sessions[number]}/exec", {"cmd": "echo $x"})
            daemon.verify(answer, f"{number}\n".encode())

        await for_each(address, count, AT_ONCE, ask)
        take("a command in every session")
    return found


async def ways_out(bench: Bench) -> None:
    """Ways out of sessions: making, connects and bytes beside a veth pair with NAT, restarts."""
    bench.facts |= await measure_ways_out(bench.table, bench.share, bench.chance.randrange(10**6))


SECTIONS: Mapping[str, Section] = {
    "calibrate": Section(calibrate, 20),
    "create": Section(creates, 210),
    "staggered": Section(staggered, 60),
    "burst": Section(bursts, 180),
    "exec": Section(execs, 120),
    "stream": Section(streams, 40),
    "streams": Section(many_streams, 30),
    "file": Section(files, 150),
    "sdk": Section(clients, 60),
    "e2b": Section(e2b, 60),
    "pause": Section(pauses, 20),
    "load": Section(load, 90),
    "memory": Section(memory, 90),
    "density": Section(density, 230),
    "neighbour": Section(neighbours, 150),
    "protection": Section(protections, 60),
    "restart": Section(restarts, 180),
    "trace": Section(trace, 90),
    "network": Section(ways_out, 130),
    "image": Section(images, 180),
}
