"""Findings about an installation: weaknesses of its settings, its files and its machine. Changes nothing.

`find_weaknesses` puts the findings of three groups of checks together. Settings of the kernel are rows of
`host/checks.py`. `cli/security.py` prints the findings.

Sources: Documentation/admin-guide/sysctl/{kernel,vm,fs}.rst, core(5), Documentation/admin-guide/hw-vuln/index.rst.
"""

from __future__ import annotations

import enum
import ipaddress
import math
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

import attrs

from egress.policy import InvalidRule, parse_rule
from sandkasten.config import MIB, Config, ConfigError, EgressSettings
from sandkasten.host.account import ROOT, Account, find_account
from sandkasten.host.checks import SYSCTLS, Host, find_mount, nearest, read, read_host
from sandkasten.host.data_dir import SHARED_MODE
from sandkasten.host.remedies import runnable
from sandkasten.images.catalog import Catalog
from sandkasten.model.network import NetworkMode

MIN_KEY_BITS = 96.0
_MANY_PIDS = 4096
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")
_MAX_ENTRIES = 200_000
_MANY_ADDRESSES = 256
_NODE_NETWORKS = tuple(map(ipaddress.ip_network, ("127.0.0.0/8", "::1/128", "169.254.0.0/16", "fe80::/10")))
_OTHERS = 0o077


class Severity(enum.StrEnum):
    """Severity of a finding. `high`: an attacker needs nothing more. `medium`: one layer less. `low`: worth knowing."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


_ORDER = (Severity.HIGH, Severity.MEDIUM, Severity.LOW)


@attrs.frozen
class Finding:
    """One weakness: the observation (`what`), the reason (`why`), and the exact fix."""

    id: str
    severity: Severity
    what: str
    why: str
    fix: str


def high(name: str, what: str, why: str, fix: str) -> Finding:
    return Finding(name, Severity.HIGH, what, why, fix)


def medium(name: str, what: str, why: str, fix: str) -> Finding:
    return Finding(name, Severity.MEDIUM, what, why, fix)


def low(name: str, what: str, why: str, fix: str) -> Finding:
    return Finding(name, Severity.LOW, what, why, fix)


def in_order(findings: list[Finding]) -> list[Finding]:
    """Return the findings by severity, the gravest first, otherwise in their order."""
    return sorted(findings, key=lambda each: _ORDER.index(each.severity))


def find_weaknesses(config: Config, config_path: Path | None) -> list[Finding]:
    """Return all findings, the gravest first."""
    settings = check_settings(
        config,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        cpus=len(os.sched_getaffinity(0)),
        free_bytes=shutil.disk_usage(nearest(config.data_dir)).free,
    )
    found = [*settings, *check_places(config, config_path), *check_machine(config.data_dir)]
    return in_order([attrs.evolve(each, fix=runnable(each.fix)) for each in found])


# Settings


def check_settings(config: Config, *, memory_bytes: int, cpus: int, free_bytes: int) -> Iterator[Finding]:
    """Yield the weaknesses of the settings on a machine of that size."""
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
    """Pages of an allowed origin may open WebSockets, and anybody on the way can change a page of a plain origin."""
    scheme, _, rest = origin.partition("://")
    if scheme == "http" and not is_loopback(rest.rpartition(":")[0] or rest):
        yield medium(
            "origins.plain-http",
            f"pages of {origin} may open WebSockets",
            "whoever sits between a browser and that page can put a script of their own into it",
            f"allowed_origins: [https{origin.removeprefix('http')}]",
        )


def check_protections(config: Config) -> Iterator[Finding]:
    """Protections that the operator switched off or weakened."""
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
    if config.defaults.network_mode == NetworkMode.OPEN:
        yield medium(
            "network.open",
            "sessions that ask for nothing get the network mode 'open'",
            "whatever a session holds, a program in it can send to any public address",
            "defaults.network_mode: none",
        )
    if config.may_bridge:
        yield medium(
            "network.bridge",
            "sessions may have the network mode 'bridge'",
            "packets of a session reach the node's kernel and public addresses by every protocol of IPv4",
            "isolation.allow_bridge: false, or keys with --max-network open",
        )
    yield from check_egress(config.egress_in_force)
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


def check_egress(settings: EgressSettings) -> Iterator[Finding]:
    """Settings that let sessions reach much, as far as `max_mode` lets them reach anything."""
    most = NetworkMode(settings.max_mode)
    if most is NetworkMode.NONE:
        return
    if most is NetworkMode.OPEN and settings.permit:
        yield medium(
            "egress.open-permit",
            f"egress.max_mode is 'open', and {settings.permit[0]} is permitted",
            "a session with the mode 'open' reaches what is permitted without a rule that names it",
            "egress.max_mode: allow, or keys with --max-network allow",
        )
    for text in settings.permit:
        network = ipaddress.ip_network(text)
        if any(network.overlaps(each) for each in _NODE_NETWORKS if each.version == network.version):
            yield high(
                "egress.permit-node",
                f"sessions may be let out to {text}, where the node itself or a metadata service answers",
                "services that trust the node answer a session: databases on loopback, credentials of the machine",
                f"egress.permit without {text}",
            )
        elif network.num_addresses > _MANY_ADDRESSES:
            yield medium(
                "egress.permit-wide",
                f"sessions may be let out to {text}, which has {network.num_addresses} addresses",
                "whatever else is in that network is in reach of a session with the mode 'open', or by a rule",
                "egress.permit: the addresses of the servers that are meant",
            )
    for name, rules in settings.groups.items():
        if wide := [rule for rule in rules if is_wide(rule)]:
            yield low(
                "egress.group-wide",
                f"the group @{name} has the rule {wide[0]}",
                "a session that is given the group reaches hosts that nobody has thought of",
                f"egress.groups.{name}: the hosts that are meant",
            )


def is_wide(text: str) -> bool:
    """Whether a rule allows whatever anybody may have registered: a suffix of one label, or a large network."""
    try:
        host = parse_rule(text).host
    except InvalidRule:
        return False  # the configuration has no such rule
    if isinstance(host, str):
        return host.startswith("*.") and host.count(".") == 1
    return host.num_addresses > _MANY_ADDRESSES


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
    if config.workspace.enabled and not config.workspace_quota_mb:
        yield medium(
            "limits.workspaces",
            "workspaces are made without a quota",
            "a session with such a workspace can fill the disk that all sessions and the database are on",
            f"workspace.default_quota_mb: {defaults.disk_limit_mb}",
        )
    if free_bytes and defaults.disk_limit_mb * MIB > free_bytes:
        yield medium(
            "limits.disk",
            f"a session may write {defaults.disk_limit_mb} MiB, and {free_bytes // MIB} are free",
            "one session can fill the disk that all sessions and the database are on",
            f"defaults.disk_limit_mb: {max(16, free_bytes // MIB // 8)}",
        )


# Files and directories


def check_places(config: Config, config_path: Path | None) -> Iterator[Finding]:
    """Yield the weaknesses of files and directories; a missing one has none."""
    account = _account(config)
    yield from check_key_file(config.api_key_path, account)
    if config_path is not None:
        yield from check_config_file(config_path, holds_key=config.api_key is not None)
    yield from check_directory(config.data_dir, account)
    for address in config.listen:
        if address.startswith("unix:"):
            yield from check_above(Path(address.removeprefix("unix:")), "listen.socket-directory")
    yield from check_images(config)
    yield from check_workspaces(config)


def check_workspaces(config: Config) -> Iterator[Finding]:
    """Workspaces from before there was a default quota keep having none; the operator's word for it is asked."""
    if not config.workspace_quota_mb:
        return
    try:
        unlimited = sorted(os.listdir(config.data_dir / "workspaces"))
    except OSError:
        return  # there are none, or this user may not look
    if unlimited:
        yield medium(
            "workspaces.no-quota",
            f"{len(unlimited)} workspaces have no quota, the first is {unlimited[0]}",
            "a session with such a workspace can fill the disk that all sessions and the database are on",
            "make each anew with quota_bytes, export the old one and import it there with replace=true",
        )


def _account(config: Config) -> Account:
    """Return the account, besides root, that the daemon's files may belong to."""
    try:
        return find_account(config.user)
    except ConfigError:
        return ROOT  # no daemon starts with that account


def check_key_file(path: Path, account: Account = ROOT) -> Iterator[Finding]:
    """The key must be a plain file that only its owner can read: root, the daemon's account, or this process's user."""
    try:
        status = path.lstat()
    except OSError:
        return
    if not stat.S_ISREG(status.st_mode):
        yield high(
            "key.not-a-file",
            f"{path} is no regular file",
            "whoever can change what it leads to chooses the key",
            f"`rm {quote(str(path))}`, and restart: a new key is made",
        )
    elif status.st_mode & _OTHERS or status.st_uid not in (0, os.geteuid(), account.uid):
        yield high(
            "key.mode",
            f"{path} has mode {stat.S_IMODE(status.st_mode):o} and owner {status.st_uid}",
            "others on this machine can read or change the key",
            f"`rm {quote(str(path))}`, and restart: a new key is made",
        )


def check_config_file(path: Path, *, holds_key: bool) -> Iterator[Finding]:
    """A writer of the configuration decides about the protections; a reader has the key if the file holds it."""
    try:
        status = path.stat()
    except OSError:
        return
    if status.st_mode & 0o022 or status.st_uid not in (0, os.geteuid()):
        yield high(
            "config.writable",
            f"{path} has mode {stat.S_IMODE(status.st_mode):o} and owner {status.st_uid}",
            "others can switch every protection off",
            f"`chown root {quote(str(path))}; chmod 600 {quote(str(path))}`",
        )
    elif holds_key and status.st_mode & 0o044:
        yield high(
            "config.readable",
            f"others may read {path}, and a key is configured",
            "if the key is in that file, everybody on this machine has it",
            f"`chmod 600 {quote(str(path))}`",
        )
    yield from check_above(path, "config.directory")


def check_directory(path: Path, account: Account = ROOT) -> Iterator[Finding]:
    """The directory is the wall around files of sessions with any mode. One of root's that is sticky may be writable
    for the daemon's group.
    """
    try:
        status = path.stat()
    except OSError:
        return
    seen = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    is_shared = not account.is_root and seen == (SHARED_MODE, 0, account.gid)
    if not is_shared and (status.st_mode & _OTHERS or status.st_uid not in (0, os.geteuid())):
        yield high(
            "data.mode",
            f"{path} has mode {stat.S_IMODE(status.st_mode):o} and owner {status.st_uid}",
            "others on this machine can enter it: sessions' files, images and setuid files in them",
            f"`chmod 700 {quote(str(path))}`",
        )
    yield from check_above(path, "data.above")


def check_above(path: Path, name: str) -> Iterator[Finding]:
    """Users who may write a directory above can put another one in its place."""
    for parent in path.absolute().parents:
        try:
            mode = parent.stat().st_mode
        except OSError:
            continue
        if mode & 0o022 and not mode & stat.S_ISVTX:
            yield high(
                name,
                f"{parent}, above {path}, has mode {stat.S_IMODE(mode):o}",
                "others can rename what is in there and put their own in its place",
                f"`chmod go-w {quote(str(parent))}`",
            )


def check_images(config: Config) -> Iterator[Finding]:
    """Setuid files are inert inside; an image full of them is worth knowing nevertheless."""
    catalog = Catalog(config.data_dir, aliases=config.image_aliases)
    try:
        images = catalog.images()
    except OSError:
        return
    for image in images:
        if found := privileged_files(catalog.trees(image.name)[0]):
            yield low(
                "image.setuid",
                f"image {image.name!r} has {len(found)} setuid or setgid files, such as {found[0]}",
                "inside they give nothing (nosuid, no_new_privs); on this machine only the data directory's mode"
                " keeps its users away from them",
                f"`sandkasten image rm {image.name}`, then `sandkasten image import`, which drops the bits",
            )


def privileged_files(root: Path) -> list[str]:
    """Return the setuid and setgid files of a tree, by their paths inside. The walk is bounded and follows no link."""
    found, seen = [], 0
    for directory, names, files in os.walk(root):
        seen += len(names) + len(files)
        if seen > _MAX_ENTRIES:
            break
        for name in files:
            try:
                mode = os.lstat(os.path.join(directory, name)).st_mode
            except OSError:
                continue
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                found.append("/" + os.path.relpath(os.path.join(directory, name), root))
    return found


# The machine


def check_machine(data_dir: Path, root: str = "/") -> Iterator[Finding]:
    """Yield the weaknesses of the machine; a file that this kernel lacks is skipped."""
    host = read_host(data_dir, root)
    yield from check_sysctls(host)
    yield from check_core_pattern(host.sysctls.get("kernel.core_pattern", ""))
    yield from check_swap(read(f"{root}proc/swaps"))
    yield from check_cpu(Path(root, "sys/devices/system/cpu/vulnerabilities"))
    yield from check_mount(host)


def check_sysctls(host: Host) -> Iterator[Finding]:
    """Yield a finding for each setting of the kernel that makes an escape easier."""
    for each in SYSCTLS:
        value = host.number(each.name)
        if each.severity and value is not None and (wanted := each.wanted(value)) != value:
            line = f"`sysctl -w {each.name}={wanted}`"
            yield Finding(
                f"sysctl.{each.name}", Severity(each.severity), f"{each.name} is {value}", each.consequence, line
            )


def check_core_pattern(pattern: str) -> Iterator[Finding]:
    """A handler of core dumps runs as root, in the host's namespaces, on data that the crashed program chose."""
    if pattern.startswith("|"):
        yield low(
            "core.pipe",
            f"core dumps go to a program: {pattern[:80]}",
            "it parses what a crashing program left; a session's core limit of 1 keeps it from being called for those",
            "`sysctl -w kernel.core_pattern=core`",
        )


def check_swap(swaps: str) -> Iterator[Finding]:
    """Sessions may not swap; the daemon's and the host's pages, keys included, can be written out."""
    used = [line.split()[0] for line in swaps.splitlines()[1:] if line.strip()]
    if used:
        yield medium(
            "swap.on",
            f"swap is on: {', '.join(used)}",
            "keys and session data of processes outside can reach the disk and stay there",
            "`swapoff -a`, or encrypt it with a key made at each start",
        )


def check_cpu(directory: Path) -> Iterator[Finding]:
    """Sessions share cores, so one may read what the processor leaks of another."""
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError:
        return
    open_ones = [name for name in names if read(str(directory / name)).startswith("Vulnerable")]
    if open_ones:
        yield medium(
            "cpu.vulnerable",
            f"the processor is open to {', '.join(open_ones)}",
            "one session may read memory of another, or of the host, through the processor",
            "update microcode and kernel, and start without mitigations=off",
        )


def check_mount(host: Host) -> Iterator[Finding]:
    """Files of sessions lie on the host under the mount options of the data directory's file system."""
    mount = find_mount(host.data_dir, host.mountinfo)
    if mount is None:
        return
    if missing := [name for name in ("nosuid", "nodev") if name not in mount.options]:
        yield low(
            "data.mount",
            f"{host.data_dir} is on {mount.point}, which is not mounted {' and '.join(missing)}",
            "files of sessions keep their bits on the host; only the data directory's mode keeps users from them",
            f"put the data directory on a file system of its own, mounted -o {','.join(missing)}",
        )
    if mount.point == "/":
        yield low(
            "data.on-root",
            f"{host.data_dir} is on the root file system",
            "what fills it up fills up the machine's system disk, too",
            "put the data directory on a file system of its own",
        )
