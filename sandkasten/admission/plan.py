"""From a spec to nsinit's plan: `SessionSpec + Config + image → Resolved → SandboxPlan`. Pure.

`resolve` fills in defaults and refuses values out of range, with the bad field in the error's details. Limits are of
two kinds. Those in `LIMIT_BOUNDS` can change while a session lives. Those in `FIXED_BOUNDS` can't, since running
processes have inherited open-file limits, and `/tmp` and `/dev/shm` are mounted with their sizes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

import attrs

from nsinit.wire import protocol
from nsinit.wire.protocol import ImageKind, SandboxPlan
from sandkasten.admission.network import resolve_network
from sandkasten.admission.secrets import NO_SECRETS, SecretTexts, check_secret_env
from sandkasten.config import Config, Defaults, DiskSettings, Maximum
from sandkasten.errors import InvalidImage, InvalidRequest
from sandkasten.model import (
    ACCOUNT,
    ACCOUNT_RULE,
    EXEC_MODES,
    FIXED_BOUNDS,
    FOREVER_S,
    IMAGE_REFERENCE,
    LIMIT_BOUNDS,
    MAX_SPAN_S,
    SECCOMP_PROFILES,
    STOP_GRACE_BOUNDS_MS,
    WORKSPACE_ID,
    AtEnd,
    Limits,
    SessionOptions,
    SessionSpec,
    StreamsMode,
)
from sandkasten.model.image import ImageConfig
from sandkasten.model.network import Network
from sandkasten.model.workspace import WorkspaceMode

_MIB = 1024 * 1024
_BYTES_PER_INODE = 4096
_MIN_INODES = 1024
CPU_PERIOD_US = 100_000
_MIN_CPU_QUOTA_US = 1_000
_TMPFS_SHARES = {"tmp_mb": 2, "shm_mb": 4}
"""Divisors: each size is at most that part of the memory, so that a full one is "no space left", not an OOM kill."""

_MAXIMUM_OF = {
    "cpu": "cpu_limit",
    "memory_mb": "mem_limit_mb",
    "pids": "pids_limit",
    "open_files": "open_files_limit",
    "tmp_mb": "tmp_limit_mb",
    "shm_mb": "shm_limit_mb",
}


@attrs.frozen
class Resolved:
    """A session's settings with every default filled in. `image` is the name in the request, which may be an alias."""

    image: str
    ttl_s: float
    max_lifetime_s: float
    limits: Limits
    readonly_rootfs: bool
    shell: str
    options: SessionOptions
    network: Network
    warm: str | None = None
    secrets: SecretTexts = NO_SECRETS
    """Secrets that the network names, once they were asked for."""
    image_env: Mapping[str, str] = attrs.field(factory=dict)
    """The image's variables, once the image is known."""
    image_dir: str | None = None
    """The image's directory for programs, once the image is known."""

    def environment(self, session_id: str, spec: SessionSpec) -> Mapping[str, str]:
        """Return the environment of a session that is made with these settings, besides the image's variables."""
        return self.secrets.environment(session_id, self.network, spec.env, spec.secret_env)

    def of_image(self, config: ImageConfig) -> Resolved:
        """Return the settings with what an image says where nothing was asked for: user, variables, directory.

        A root that the session may not have is nobody: such an image has the usual user. Variables that no shell takes
        are left out. All of them reach programs alone, and no process of ours.
        """
        user = self.options.user or config.user or None
        if user and user == config.user and user.partition(":")[0] in _ROOT and not self.options.root_inside:
            user = self.options.user
        env = {name: value for name, value in config.env.items() if _is_variable(name, value)}
        options = attrs.evolve(self.options, user=user)
        return attrs.evolve(self, options=options, image_env=env, image_dir=config.working_dir or None)


def resolve(spec: SessionSpec, config: Config) -> Resolved:
    """Fill in defaults and refuse values out of range.

    Raises:
        InvalidRequest: the bad field is in `details`.
        InvalidImage: the name is malformed or not allowed.
        InvalidRule: as `resolve_network`.
    """
    image = spec.image or config.default_image
    if not IMAGE_REFERENCE.match(image):
        raise InvalidImage("malformed image name", image=image[:64])
    if spec.workspace_id is not None:
        if not config.workspace.enabled:
            raise InvalidRequest("workspaces are switched off", workspace_id="not available")
        if not WORKSPACE_ID.match(spec.workspace_id):
            raise InvalidRequest("malformed workspace id", workspace_id="2 to 64 of a-z 0-9 . _ - (ends a-z 0-9)")
    if spec.workspace_mode is not None:
        if spec.workspace_mode not in set(WorkspaceMode):
            raise InvalidRequest("no such mode", workspace_mode=f"must be one of {', '.join(WorkspaceMode)}")
        if spec.workspace_id is None:
            raise InvalidRequest("a mode needs a workspace", workspace_mode="without workspace_id")
    check_spans(config.maximum, ttl_s=spec.ttl_s or None, max_lifetime_s=spec.max_lifetime_s)
    exec_mode = spec.exec_mode or config.defaults.exec_mode
    if exec_mode not in EXEC_MODES:
        raise InvalidRequest("no such mode", exec_mode=f"must be one of {', '.join(EXEC_MODES)}")
    stop_grace_ms = config.defaults.stop_grace_ms if spec.stop_grace_ms is None else spec.stop_grace_ms
    low, high = STOP_GRACE_BOUNDS_MS
    if not low <= stop_grace_ms <= high:
        raise InvalidRequest("no such time to stop", stop_grace_ms=f"must be between {low} and {high}")
    limits = spec.limits or config.defaults.limits
    check_limits(limits)
    check_disk_limits(limits, config.disk)
    limits = fill_fixed(limits, config.defaults)
    check_maximum(limits, config.maximum)
    network = resolve_network(spec.network, config)
    check_secret_env(spec.secret_env, network)
    return Resolved(
        image=image,
        ttl_s=spec.ttl_s or float(config.session_ttl_seconds),
        max_lifetime_s=spec.max_lifetime_s or float(config.maximum.max_lifetime_seconds or FOREVER_S),
        limits=limits,
        readonly_rootfs=config.defaults.readonly_rootfs if spec.readonly_rootfs is None else spec.readonly_rootfs,
        shell=spec.shell or config.defaults.shell_prefer,
        options=attrs.evolve(_options(spec, config, exec_mode), stop_grace_ms=stop_grace_ms),
        network=network,
        warm=spec.warm,
    )


def _options(spec: SessionSpec, config: Config, exec_mode: str) -> SessionOptions:
    possible = config.isolation.root_inside
    if spec.root_inside and not possible:
        raise InvalidRequest("root inside is switched off here", root_inside="not available")
    if spec.account is not None and not ACCOUNT.match(spec.account):
        raise InvalidRequest("no name of an account", account=ACCOUNT_RULE)
    return SessionOptions(
        exec_mode=exec_mode,
        user=spec.user,
        root_inside=possible if spec.root_inside is None else spec.root_inside,
        filesystem=spec.filesystem,
        seccomp=_seccomp(spec.seccomp, config),
        workspace_mode=WorkspaceMode(spec.workspace_mode or WorkspaceMode.SHARED).value,
        streams=_streams(spec.streams),
        at_end=AtEnd(spec.at_end or AtEnd.DESTROY).value,
        account=spec.account,
    )


def _streams(asked: str | None) -> str | None:
    if asked not in (None, *StreamsMode):
        raise InvalidRequest("no such mode", streams=f"must be one of {', '.join(StreamsMode)}")
    return None if asked is None else StreamsMode(asked).value


def _seccomp(asked: str | None, config: Config) -> str:
    """Return the name of the system call filter. Sessions may ask for `strict` and for those the operator allows."""
    allowed = dict.fromkeys((config.security.seccomp, SECCOMP_PROFILES[0], *config.security.seccomp_allowed))
    if asked is not None and asked not in allowed:
        raise InvalidRequest(
            "this system call filter is not allowed here",
            seccomp=f"must be one of {', '.join(allowed)} (the operator may add to security.seccomp_allowed)",
        )
    return asked or config.security.seccomp


# Bounds


def check_spans(maximum: Maximum, *, ttl_s: float | None, max_lifetime_s: float | None) -> None:
    """Refuse times to live out of range or above the operator's maximum. None: not in the request.

    Raises:
        InvalidRequest: each bad time is in `details`.
    """
    asked = {
        "idle_timeout_seconds": (ttl_s, maximum.idle_timeout_seconds),
        "max_lifetime_seconds": (max_lifetime_s, maximum.max_lifetime_seconds),
    }
    found = {name: _problem(span_s, most_s) for name, (span_s, most_s) in asked.items() if span_s is not None}
    problems = {name: problem for name, problem in found.items() if problem is not None}
    if problems:
        raise InvalidRequest("the session can't live as long as that", **problems)


def _problem(span_s: float, most_s: int | None) -> str | None:
    if span_s == FOREVER_S:
        return None if most_s is None else f"must not be null on this server, and at most {most_s}"
    if not 0 < span_s <= MAX_SPAN_S:  # written so that NaN fails, too
        return f"must be more than 0 and at most {MAX_SPAN_S:.0f}"
    if most_s is not None and span_s > most_s:
        return f"must be at most {most_s} on this server"
    return None


def check_limits(limits: Limits) -> None:
    """Refuse limits out of the kernel's range. Raises `InvalidRequest` with each bad one in `details`."""
    problems = {}
    for name, (low, high) in LIMIT_BOUNDS.items():
        value = getattr(limits, name)
        kinds, what = ((int, float), "a number") if name == "cpu" else ((int,), "an integer")
        if not isinstance(value, kinds) or isinstance(value, bool):
            problems[f"limits.{name}"] = f"must be {what}"
        elif not low <= value <= high:  # written so that NaN fails, too
            problems[f"limits.{name}"] = f"must be between {low} and {high}"
    if problems:
        raise InvalidRequest("limits out of range", **problems)


def check_disk_limits(limits: Limits, disk: DiskSettings) -> None:
    """Refuse more disk than the configuration allows. Raises `InvalidRequest`."""
    if limits.disk_mb > disk.max_mb:
        raise InvalidRequest("limits out of range", **{"limits.disk_mb": f"at most {disk.max_mb}"})
    if limits.disk_inodes > disk.max_inodes:
        raise InvalidRequest("limits out of range", **{"limits.disk_inodes": f"at most {disk.max_inodes}"})


def check_maximum(limits: Limits, maximum: Maximum) -> None:
    """Refuse limits above the operator's maximum. Raises `InvalidRequest`."""
    most = {name: getattr(maximum, setting) for name, setting in _MAXIMUM_OF.items()}
    asked = {name: getattr(limits, name) for name in most}
    problems = {
        f"limits.{name}": f"must be at most {most[name]} on this server"
        for name, value in asked.items()
        if value is not None and value > most[name]
    }
    if problems:
        raise InvalidRequest("limits above this server's maximum", **problems)


def bounds_in_force(maximum: Maximum, disk: DiskSettings) -> Mapping[str, tuple[float, float]]:
    """Return the lowest and highest value of each limit that a request may name on this server."""
    most = {name: getattr(maximum, setting) for name, setting in _MAXIMUM_OF.items()}
    most |= {"disk_mb": disk.max_mb, "disk_inodes": disk.max_inodes}
    bounds = {**LIMIT_BOUNDS, **FIXED_BOUNDS}
    return {name: (low, min(high, most.get(name, high))) for name, (low, high) in bounds.items()}


def fill_fixed(limits: Limits, defaults: Defaults) -> Limits:
    """Return `limits` with every fixed limit filled in. The others were checked before.

    Raises:
        InvalidRequest: a fixed limit is out of range, or more than its share of the memory.
    """
    problems = _bad_values(limits)
    for name, parts in _TMPFS_SHARES.items():
        asked = getattr(limits, name)
        if f"limits.{name}" not in problems and asked is not None and asked * parts > limits.memory_mb:
            problems[f"limits.{name}"] = f"must be at most 1/{parts} of memory_mb: what is in there counts as memory"
    if problems:
        raise InvalidRequest("limits out of range", **problems)
    tmp_mb = limits.tmp_mb or min(defaults.tmp_limit_mb, limits.memory_mb // 2)
    shm_mb = limits.shm_mb or min(defaults.shm_limit_mb, limits.memory_mb // 4)
    return attrs.evolve(
        limits,
        open_files=limits.open_files or defaults.open_files_limit,
        tmp_mb=tmp_mb,
        tmp_inodes=limits.tmp_inodes or defaults.tmp_inodes or _usual_inodes(tmp_mb),
        shm_mb=shm_mb,
        shm_inodes=limits.shm_inodes or defaults.shm_inodes or _usual_inodes(shm_mb),
    )


def keep_fixed(limits: Limits, current: Limits) -> Limits:
    """Return the `limits` of a change with the present fixed ones. Raises `InvalidRequest` if a fixed one differs."""
    kept = {name: getattr(current, name) for name in FIXED_BOUNDS}
    asked = {name: getattr(limits, name) for name in FIXED_BOUNDS}
    problems = {
        f"limits.{name}": "is fixed when the session is made"
        for name, value in asked.items()
        if value is not None and value != kept[name]
    }
    if problems:
        raise InvalidRequest("these limits can't change", **problems)
    return attrs.evolve(limits, **kept)


def _bad_values(limits: Limits) -> dict[str, str]:
    problems = {}
    for name, (low, high) in FIXED_BOUNDS.items():
        value = getattr(limits, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            problems[f"limits.{name}"] = "must be an integer"
        elif value is not None and not low <= value <= high:
            problems[f"limits.{name}"] = f"must be between {low} and {high}"
    return problems


def _usual_inodes(size_mb: int) -> int:
    return max(size_mb * _MIB // _BYTES_PER_INODE, _MIN_INODES)


# The plan


_ROOT = ("root", "0")
_VARIABLE = re.compile(r"(?!__sk_)[A-Za-z_][A-Za-z0-9_]*")


def _is_variable(name: str, value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return _VARIABLE.fullmatch(name) is not None and "\0" not in value


def plan_sandbox(
    session_id: str,
    resolved: Resolved,
    *,
    workspace_id: str | None,
    image: str,
    image_kind: ImageKind,
    layers: Sequence[str] = (),
) -> SandboxPlan:
    """Return the plan for nsinit; `image` is the image's own name, never an alias."""
    limits = resolved.limits
    return SandboxPlan(
        session_id=session_id,
        image=image,
        image_kind=image_kind,
        limits=plan_limits(resolved.limits),
        workspace_id=workspace_id,
        readonly_rootfs=resolved.readonly_rootfs,
        seccomp=resolved.options.seccomp,
        disk=plan_disk(resolved.limits),
        tmp_bytes=(limits.tmp_mb or 0) * _MIB,
        tmp_inodes=limits.tmp_inodes or 0,
        shm_bytes=(limits.shm_mb or 0) * _MIB,
        shm_inodes=limits.shm_inodes or 0,
        open_files=limits.open_files or 0,
        root_inside=resolved.options.root_inside,
        layers=tuple(layers),
        account=resolved.options.account or "",
    )


def plan_disk(limits: Limits) -> protocol.DiskLimits:
    """Return the disk limits in the kernel's units."""
    return protocol.DiskLimits(size_bytes=limits.disk_mb * _MIB, inodes=limits.disk_inodes)


def plan_limits(limits: Limits) -> protocol.Limits:
    """Return the limits in the kernel's units."""
    quota_us = max(round(limits.cpu * CPU_PERIOD_US), _MIN_CPU_QUOTA_US)
    return protocol.Limits(
        memory_bytes=limits.memory_mb * _MIB, pids=limits.pids, cpu_quota_us=quota_us, cpu_period_us=CPU_PERIOD_US
    )


def spec_digest(spec: SessionSpec) -> str:
    """Return a digest of a spec, for idempotency keys; irreversible, since `env` may hold secrets.

    Fields with their default are left out, so that a field of a later version does not change the digest. No network is
    left out, too: clients have always been able to ask for none. The caller is part of the key, not of the digest, and
    `warm` is a hint.
    """
    default = attrs.asdict(SessionSpec())
    network = None if spec.network == Network() else spec.network
    asked = attrs.asdict(attrs.evolve(spec, network=network, warm=None, idempotency_key=None, key_id=None))
    said = {name: value for name, value in asked.items() if value != default[name]}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
