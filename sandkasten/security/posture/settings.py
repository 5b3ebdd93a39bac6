"""What the configuration gives away: values in, findings out. Machine and disk are `machine.py`'s and `places.py`'s."""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from collections.abc import Iterator

from sandkasten.config import MIB, Config
from sandkasten.security.posture.finding import Finding, high, low, medium

MIN_KEY_BITS = 96.0
_MANY_PIDS = 4096
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")


def check_settings(config: Config, *, memory_bytes: int, cpus: int, free_bytes: int) -> Iterator[Finding]:
    """Yield what is wrong with the settings for a machine of that size."""
    for address in config.listen:
        yield from check_address(address)
    yield from check_key(config.api_key)
    for origin in config.allowed_origins:
        yield from check_origin(origin)
    yield from check_protections(config)
    yield from check_limits(config, memory_bytes=memory_bytes, cpus=cpus, free_bytes=free_bytes)


def check_address(address: str) -> Iterator[Finding]:
    """The daemon speaks plain HTTP, so beyond loopback the key and every output can be read on the way."""
    if address.startswith("unix:") or is_loopback(address.rpartition(":")[0]):
        return
    yield high(
        "listen.plain-http",
        f"listens on {address}, beyond this machine, without TLS",
        "whoever sees the traffic reads the API key, and with it runs commands in every session",
        "listen: [127.0.0.1:8080], with a TLS proxy in front for others",
    )


def is_loopback(host: str) -> bool:
    """Return whether a host of `listen` is reached from this machine alone."""
    if host in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_key(key: str | None) -> Iterator[Finding]:
    """A key that is guessed or copied from an example opens everything."""
    if key is not None and (bits := key_bits(key)) < MIN_KEY_BITS:
        yield high(
            "key.weak",
            f"the API key is worth about {bits:.0f} bits",
            "a key that can be guessed opens every session; nothing slows an attacker down for long",
            "remove api_key from the configuration and the environment: a good one is then made in the data directory",
        )


def key_bits(key: str) -> float:
    """Return the Shannon entropy of a key's own characters; of a random key it is a little too low."""
    counts = Counter(key)
    return -sum(count * math.log2(count / len(key)) for count in counts.values())


def check_origin(origin: str) -> Iterator[Finding]:
    """Pages of an allowed origin may open WebSockets; of a plain one, so may whoever is on the way."""
    scheme, _, rest = origin.partition("://")
    if scheme == "http" and not is_loopback(rest.rpartition(":")[0] or rest):
        yield medium(
            "origins.plain-http",
            f"pages of {origin} may open WebSockets",
            "whoever sits between a browser and that page can put a script of their own into it",
            f"allowed_origins: [https{origin.removeprefix('http')}]",
        )


def check_protections(config: Config) -> Iterator[Finding]:
    """What the operator switched off, or made weaker than it is by default."""
    profile = str(config.security.seccomp)
    if profile == "off":
        yield high(
            "seccomp.off",
            "no system call filter is asked for",
            "every system call of the kernel is in reach: io_uring, keyrings, rare sockets, foreign architectures",
            "security.seccomp: strict",
        )
    elif profile != "strict":
        yield medium(
            "seccomp.weak",
            f"the system call filter is {profile!r}",
            "calls that the strict profile refuses reach the kernel",
            "security.seccomp: strict",
        )
    if config.disk.mode == "none":
        yield high(
            "disk.none",
            "sessions write to the data directory's disk without a limit",
            "one session can fill the disk that all sessions and the database are on",
            "disk.mode: auto",
        )
    for name in config.isolation.allow_missing:
        yield medium(
            "isolation.allow-missing",
            f"sandboxes are made without {name} where the machine lacks it",
            "what it holds back, nothing else may",
            f"isolation.allow_missing without {name}; `sandkasten doctor` says how to get it",
        )
    mode = str(config.defaults.network_mode)
    if mode in ("host", "bridge"):
        report = high if mode == "host" else medium
        yield report(
            f"network.{mode}",
            f"sessions get the network mode {mode!r}",
            "a session can reach what this machine reaches: other services, private networks, the metadata service",
            "defaults.network_mode: none",
        )
    if config.server.log_level == "debug":
        yield low(
            "log.debug",
            "the log level is debug",
            "commands are logged, and people put secrets into commands",
            "server.log_level: info",
        )
    if config.runs.allow_unlimited:
        yield low(
            "runs.unlimited",
            "commands without a time limit are allowed",
            "a command that never ends holds its session's resources until somebody looks",
            "runs.allow_unlimited: false",
        )


def check_limits(config: Config, *, memory_bytes: int, cpus: int, free_bytes: int) -> Iterator[Finding]:
    """Limits that one session alone could use to take the machine down."""
    defaults = config.defaults
    if memory_bytes and defaults.mem_limit_mb * MIB > memory_bytes // 2:
        yield medium(
            "limits.memory",
            f"a session may use {defaults.mem_limit_mb} MiB of this machine's {memory_bytes // MIB}",
            "two sessions, or one and the daemon, can bring the machine to its out-of-memory killer",
            f"defaults.mem_limit_mb: {max(64, memory_bytes // MIB // 8)}",
        )
    if defaults.pids_limit > _MANY_PIDS:
        yield medium(
            "limits.pids",
            f"a session may have {defaults.pids_limit} processes",
            "a fork bomb in one session can use up the machine's process ids and its scheduler",
            "defaults.pids_limit: 256",
        )
    if cpus and defaults.cpu_limit > cpus:
        yield low(
            "limits.cpu",
            f"a session may use {defaults.cpu_limit:g} of {cpus} cores",
            "one session can keep every core busy",
            f"defaults.cpu_limit: {max(1, cpus // 2)}",
        )
    if free_bytes and defaults.disk_limit_mb * MIB > free_bytes:
        yield medium(
            "limits.disk",
            f"a session may write {defaults.disk_limit_mb} MiB, and {free_bytes // MIB} are free",
            "one session can fill the disk that all sessions and the database are on",
            f"defaults.disk_limit_mb: {max(16, free_bytes // MIB // 8)}",
        )
