"""Session pools over HTTP: a create from the pool against `healthz`, a burst as large as the pool, processor time.

`measure_pool` starts a daemon with a full pool and returns the figures; run as a program it prints them. Every create
is checked to come from the pool: one that misses is an error, not a slow sample.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import trio

from bench import daemon, measure

IMAGE, SIZE = "python", 100
HEALTHZ, POOL = "healthz", "create from the pool"
_PAUSE_S = 0.05


@attrs.frozen
class PoolFigures:
    """Medians in milliseconds and their ratio, the time until the last answer of each burst, and the processor time of
    the daemon and of all of the machine for one create of a burst, in milliseconds. The machine's has a refill in it
    now and then, and whatever else runs there. `frozen_ms`: of creates that took a frozen member."""

    healthz_ms: float
    create_ms: float
    create_p95_ms: float
    frozen_ms: float
    ratio: float
    bursts_ms: list[float]
    daemon_cpu_ms: float
    machine_cpu_ms: float


def measure_pool(data_dir: Path, *, rounds: int = 200, bursts: int = 3) -> PoolFigures:
    """Run a daemon with a pool of `SIZE`, and measure."""
    settings = {"SANDKASTEN_POOL_ENABLED": "true", "SANDKASTEN_POOL_IMAGES": f"{IMAGE}={SIZE}"}
    samples = measure.Samples()
    with daemon.running(data_dir, **settings) as (pid, address), daemon.Client(address) as client:
        for done in range(rounds):
            if done % (SIZE // 2) == 0:
                _wait_full(client)
            with samples.timed(HEALTHZ):
                client.call("GET", "/healthz")
            _create(client, samples, POOL)
        _wait_full(client)
        took_ms, daemon_cpu_ms, machine_cpu_ms = [], [], []
        for _ in range(bursts):
            own, machine = _cpu_ms(pid), _machine_cpu_ms()
            took_ms.append(trio.run(_create_at_once, address))
            daemon_cpu_ms.append((_cpu_ms(pid) - own) / SIZE)
            machine_cpu_ms.append((_machine_cpu_ms() - machine) / SIZE)
            for session in client.call("GET", "/v1/sessions"):
                client.call("DELETE", f"/v1/sessions/{session['id']}")
            _wait_full(client)
        _wait_full(client, is_frozen=True)
        for _ in range(SIZE // 2):
            _create(client, samples, "frozen")
    healthz_ms, create_ms = samples.median(HEALTHZ), samples.median(POOL)
    return PoolFigures(
        healthz_ms=healthz_ms,
        create_ms=create_ms,
        create_p95_ms=samples.p95(POOL),
        frozen_ms=samples.median("frozen"),
        ratio=create_ms / healthz_ms,
        bursts_ms=took_ms,
        daemon_cpu_ms=min(daemon_cpu_ms),
        machine_cpu_ms=min(machine_cpu_ms),
    )


def _create(client: daemon.Client, samples: measure.Samples, row: str) -> None:
    with samples.timed(row):
        session = client.call("POST", "/v1/sessions", {})
    _check(session)
    client.call("DELETE", f"/v1/sessions/{session['id']}")


def _wait_full(client: daemon.Client, *, is_frozen: bool = False) -> None:
    while True:
        (pool,) = client.call("GET", "/v1/pools")
        if pool["ready"] == SIZE and (not is_frozen or pool["frozen"] == SIZE):
            break
        time.sleep(_PAUSE_S)


async def _create_at_once(address: tuple[str, int]) -> float:
    """Return after how many milliseconds the last of `SIZE` simultaneous creates was answered."""
    streams = [await trio.open_tcp_stream(*address) for _ in range(SIZE)]

    async def create(stream: trio.SocketStream) -> None:
        await stream.send_all(daemon.encode("POST", "/v1/sessions", {}))
        data = b""
        while (answer := daemon.decode(data)) is None:
            data += await stream.receive_some()
        _check(answer)

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(create, stream)
    took = time.perf_counter() - began
    for stream in streams:
        await stream.aclose()
    return took * 1000


def _check(session: Any) -> None:  # JSON
    if session["acquire_source"] != "pool":
        raise RuntimeError(f"a create missed the pool: {session.get('acquire_detail')}")


def _cpu_ms(pid: int) -> float:
    """Return the processor time that a process used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def _machine_cpu_ms() -> float:
    """Return the processor time that all processes of the machine used so far."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    busy = sum(int(field) for position, field in enumerate(fields) if position not in (3, 4))  # idle, iowait
    return busy * 1000 / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory(prefix="sandkasten-bench-") as scratch:
        for name, value in attrs.asdict(measure_pool(Path(scratch))).items():
            print(f"{name:16} {value if isinstance(value, list) else round(value, 3)}")


if __name__ == "__main__":
    main()
