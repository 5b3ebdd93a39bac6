"""Re-checks every name and number of a request: nsinit does not trust the daemon either.

Pure: looks at no file and changes nothing. A name that passes can be joined to a path and used as one component.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Network

from nsinit.kernel.seccomp.profile import PROFILE_NAME
from nsinit.wire.protocol import (
    MAX_BRIDGE_PORTS,
    MAX_BRIDGE_RULES,
    MAX_IMAGE_LAYERS,
    MAX_SOCKETS,
    MAX_STOP_GRACE_MS,
    MAX_TERMINALS,
    BridgeRule,
    BridgeTerms,
    DiskLimits,
    IoLimits,
    Limits,
    SandboxPlan,
)

_SESSION_ID = re.compile(r"[0-9a-f]{16,32}")
_WORKSPACE_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}[a-z0-9]")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----\n(?:[A-Za-z0-9+/=]{1,64}\n){1,64}-----END CERTIFICATE-----\n\Z")
_ACCOUNT = re.compile(r"(?!root\Z)[a-z_][a-z0-9_-]{0,31}|")
_IMAGE_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_RUN_CGROUP_NAME = re.compile(r"[a-z0-9-]{1,32}")
_NODE_ID = re.compile(r"[0-9a-z][0-9a-z-]{7,63}")

MIN_MEMORY_BYTES = 4 * 1024 * 1024
MAX_BYTES = 1 << 46
MAX_IO_WEIGHT = 10_000
MAX_PIDS = 1 << 22
MIN_QUOTA_US, MAX_QUOTA_US = 1_000, 1 << 40
"""Below 1 ms the kernel refuses a cpu quota."""
MAX_INODES = 1 << 31
MIN_OPEN_FILES, MAX_OPEN_FILES = 1024, 1 << 20
"""PID 1 itself needs the lowest number when it runs as many commands as it may."""
MIN_DISK_BYTES, MAX_DISK_BYTES = 16 << 20, 1 << 44
"""Below, an ext4 has no room for its own tables; above, no block numbers."""
MIN_DISK_INODES, MAX_DISK_INODES = 256, 1 << 32
MIN_BRIDGE_PREFIX, MAX_BRIDGE_PREFIX = 8, 29
"""In all rules of a session together, each of which is a rule of the kernel for TCP and one for UDP."""
MIN_PERIOD_US, MAX_PERIOD_US = 1_000, 1_000_000


class InvalidName(ValueError):
    """A value of a request is not one nsinit works with."""


def is_session_id(text: str) -> bool:
    """Whether `text` is a well-formed session id."""
    return _SESSION_ID.fullmatch(text) is not None


def check_session_id(text: str) -> None:
    """Raise `InvalidName` unless `text` is a session id."""
    _match(_SESSION_ID, text, "session id")


def is_workspace_id(text: str) -> bool:
    """Whether `text` is a well-formed workspace id."""
    return _WORKSPACE_ID.fullmatch(text) is not None


def check_workspace_id(text: str) -> None:
    """Raise `InvalidName` unless `text` is a workspace id."""
    _match(_WORKSPACE_ID, text, "workspace id")


def check_run_cgroup_name(text: str) -> None:
    """Raise `InvalidName` unless `text` is the name of a run cgroup. Without a dot it is no file of the kernel's but
    v1's `tasks`, which fails the request since it is no directory."""
    _match(_RUN_CGROUP_NAME, text, "name of a run cgroup")


def check_image_name(text: str) -> None:
    """Raise `InvalidName` unless `text` is the name of an image."""
    _match(_IMAGE_NAME, text, "image name")


def is_digest(text: str) -> bool:
    """Whether `text` is the digest of a layer."""
    return _DIGEST.fullmatch(text) is not None


def check_digests(digests: tuple[str, ...]) -> None:
    """Raise `InvalidName` unless all are digests."""
    for each in digests:
        _match(_DIGEST, each, "digest")


def check_digest(text: str) -> None:
    """Raise `InvalidName` unless `text` is a digest, or empty."""
    check_digests((text,) if text else ())


def check_layer_or_image(text: str) -> None:
    """Raise `InvalidName` unless `text` is a digest, or the name of an image."""
    if not is_digest(text):
        check_image_name(text)


def check_base_layers(count: int) -> None:
    """Raise `InvalidName` unless an image can have so many layers, or none."""
    _range("layers", count, 0, MAX_IMAGE_LAYERS)


def check_image_layers(digests: tuple[str, ...]) -> None:
    """Raise `InvalidName` unless these can be the layers of an image."""
    _range("layers", len(digests), 1, MAX_IMAGE_LAYERS)
    check_digests(digests)


def check_bytes(number: int) -> None:
    """Raise `InvalidName` unless a disk can have so many bytes."""
    _range("bytes", number, 0, MAX_BYTES)


def check_entries(number: int) -> None:
    """Raise `InvalidName` unless a file system can have so many entries."""
    _range("entries", number, 1, MAX_INODES)


def check_grace(seconds: int) -> None:
    """Raise `InvalidName` unless layers may be kept for so long."""
    _range("grace", seconds, 0, MAX_INODES)


def check_node_id(text: str) -> None:
    """Raise `InvalidName` unless `text` is a node id."""
    _match(_NODE_ID, text, "node id")


def check_data_dir(path: str) -> None:
    """Raise `InvalidName` unless `path` is absolute, normalised and not the root."""
    parts = path.split("/")
    if not path.startswith("/") or len(parts) < 2 or any(part in {"", ".", ".."} for part in parts[1:]) or "\0" in path:
        raise InvalidName(f"data directory must be an absolute normalised path: {path[:80]!r}")


def check_cgroup_parent(path: str) -> None:
    """Raise `InvalidName` unless `path` is `auto` or a relative or absolute path without `.` and `..`."""
    if any(part in {"", ".", ".."} for part in path.strip("/").split("/")) and path.strip("/"):
        raise InvalidName(f"cgroup parent must be a plain path: {path[:80]!r}")


def check_limits(limits: Limits) -> None:
    """Raise `InvalidName` unless every limit is one the kernel can take."""
    _range("memory_bytes", limits.memory_bytes, MIN_MEMORY_BYTES, MAX_BYTES)
    _range("pids", limits.pids, 2, MAX_PIDS)
    _range("cpu_quota_us", limits.cpu_quota_us, MIN_QUOTA_US, MAX_QUOTA_US)
    _range("cpu_period_us", limits.cpu_period_us, MIN_PERIOD_US, MAX_PERIOD_US)


def check_disk(disk: DiskLimits) -> None:
    """Raise `InvalidName` unless every disk mechanism can have these limits."""
    _range("disk size_bytes", disk.size_bytes, MIN_DISK_BYTES, MAX_DISK_BYTES)
    _range("disk inodes", disk.inodes, MIN_DISK_INODES, MAX_DISK_INODES)


def check_io(io: IoLimits) -> None:
    """Raise `InvalidName` unless every disk scheduler can have these limits."""
    _range("io weight", io.weight, 1, MAX_IO_WEIGHT)
    for name in ("read_bps", "write_bps", "read_iops", "write_iops"):
        _range(f"io {name}", getattr(io, name), 0, MAX_BYTES)


def check_disk_floor(floor_bytes: int) -> None:
    """Raise `InvalidName` unless it can be the room that a disk keeps."""
    _range("disk floor", floor_bytes, 0, MAX_BYTES)


def check_terminals(number: int) -> None:
    """Raise `InvalidName` unless each sandbox may have so many terminals."""
    _range("terminals", number, 1, MAX_TERMINALS)


def check_stop_grace(grace_ms: int) -> None:
    """Raise `InvalidName` unless processes may have so long to end."""
    _range("stop grace", grace_ms, 1, MAX_STOP_GRACE_MS)


def check_socket_count(count: int) -> None:
    """Raise `InvalidName` unless so many sockets may be asked for at once."""
    _range("sockets", count, 1, MAX_SOCKETS)


def check_bridge_terms(terms: BridgeTerms) -> None:
    """Raise `InvalidName` unless bridges can be made on these terms."""
    if not MIN_BRIDGE_PREFIX <= _network(terms.range).prefixlen <= MAX_BRIDGE_PREFIX or not terms.refused:
        raise InvalidName(f"no terms of a bridge: {terms.range[:40]!r}, {len(terms.refused)} networks refused")
    for text in (*terms.refused, *terms.resolvers):
        _network(text)


def check_bridge_rules(rules: tuple[BridgeRule, ...]) -> None:
    """Raise `InvalidName` unless a bridge can have these rules."""
    _range("rules", len(rules), 0, MAX_BRIDGE_RULES)
    _range("ports of rules", sum(len(each.ports) for each in rules), 0, MAX_BRIDGE_PORTS)
    for rule in rules:
        _network(rule.network)
        for port in rule.ports:
            _range("port", port, 1, 65535)


def _network(text: str) -> IPv4Network:
    try:
        return IPv4Network(text)
    except ValueError:
        raise InvalidName(f"invalid IPv4 network: {text[:80]!r}") from None


def check_certificate(certificate: str) -> None:
    """Raise `InvalidName` unless the text has the form of one certificate in PEM (RFC 7468)."""
    _match(_CERTIFICATE, certificate, "certificate")


def check_plan(plan: SandboxPlan) -> None:
    """Raise `InvalidName` unless every field of the plan is acceptable."""
    check_session_id(plan.session_id)
    check_image_name(plan.image)
    if plan.image_kind == "layers":
        check_image_layers(plan.layers)
    elif plan.layers:
        raise InvalidName("an image of another kind has no layers")
    if plan.workspace_id is not None:
        check_workspace_id(plan.workspace_id)
    if plan.image_kind == "files" and (plan.workspace_id is None or plan.root_inside):
        raise InvalidName("a plan for files needs a workspace, and no root")
    if plan.workspace_draft and plan.image_kind != "files":
        raise InvalidName("no session gets a draft")
    check_limits(plan.limits)
    _match(_ACCOUNT, plan.account, "account")
    _match(PROFILE_NAME, plan.seccomp, "seccomp profile")
    check_disk(plan.disk)
    _range("tmp_bytes", plan.tmp_bytes, 4096, MAX_BYTES)
    _range("shm_bytes", plan.shm_bytes, 4096, MAX_BYTES)
    _range("tmp_inodes", plan.tmp_inodes, 0, MAX_INODES)
    _range("shm_inodes", plan.shm_inodes, 0, MAX_INODES)
    _range("open_files", plan.open_files, MIN_OPEN_FILES, MAX_OPEN_FILES)


def _match(pattern: re.Pattern[str], text: str, what: str) -> None:
    if pattern.fullmatch(text) is None:
        raise InvalidName(f"invalid {what}: {text[:80]!r}")


def _range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidName(f"{name} must be between {low} and {high}, got {value}")
