"""The configuration as frozen values with their defaults and limits.

Owns the range of each setting; `files.py` owns the sources of settings. A value that asks for protection or behaviour
that this version lacks is refused here, never ignored. Knows no file and no environment.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import attrs

from egress.policy import parse_proxy, parse_rule
from sandkasten.installation import API_KEY_NAME, DEFAULT_DATA_DIR
from sandkasten.model import (
    ACCOUNT,
    ACCOUNT_RULE,
    EXEC_MODES,
    FIXED_BOUNDS,
    IMAGE_REFERENCE,
    LIMIT_BOUNDS,
    MAX_SPAN_S,
    MAX_TTL_S,
    SECCOMP_NAME,
    SECCOMP_PROFILES,
    STATEFUL,
    STOP_GRACE_BOUNDS_MS,
    Limits,
)
from sandkasten.model.network import NetworkMode
from sandkasten.model.node import PROTECTIONS, Need

MIB = 1024 * 1024

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]  # the shape attrs asks for


@attrs.frozen
class SettingCheck:
    """A validator, and in words what passes it: docs/settings.py writes these into the reference of settings."""

    passes: str
    check: Validator

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        self.check(instance, attribute, value)


def _between(low: float, high: float) -> SettingCheck:
    def check(_instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
        if not low <= value <= high:  # written so that NaN fails, too
            raise ValueError(f"{attribute.name} must be between {low} and {high}, not {value}")

    return SettingCheck(f"{low:.15g} to {high:.15g}", check)


def _none_or(check: SettingCheck) -> SettingCheck:
    def check_unless_none(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is not None:
            check(instance, attribute, value)

    return SettingCheck(f"none, or {check.passes}", check_unless_none)


def _zero_or(check: SettingCheck) -> SettingCheck:
    def check_unless_zero(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value != 0:
            check(instance, attribute, value)

    return SettingCheck(f"0, or {check.passes}", check_unless_zero)


def _only(available: object, *later: object) -> SettingCheck:
    def check(_instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value in later:
            raise ValueError(f"{attribute.name}: {value!r} is not available; the one choice is {available!r}")
        if value != available:
            raise ValueError(f"{attribute.name} must be {available!r}, not {value!r}")

    return SettingCheck(f"`{str(available).lower()}`", check)


def _one_of(*choices: str, later: tuple[str, ...] = ()) -> SettingCheck:
    def check(_instance: object, attribute: attrs.Attribute[Any], value: str) -> None:
        if value in later:
            raise ValueError(f"{attribute.name}: {value!r} is not available; there are {', '.join(choices)}")
        if value not in choices:
            raise ValueError(f"{attribute.name} must be one of {', '.join(choices)}, not {value!r}")

    return SettingCheck(", ".join(f"`{choice}`" for choice in choices), check)


def _image_names(_instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    names = [value] if isinstance(value, str) else [*value, *value.values()] if isinstance(value, Mapping) else value
    for name in names:  # type: ignore[attr-defined]  # every field that uses this is one of the three shapes
        if not IMAGE_REFERENCE.match(str(name)):
            raise ValueError(f"{attribute.name}: {name!r} is not an image name")


def _image_values(_instance: object, attribute: attrs.Attribute[Any], value: Mapping[str, str]) -> None:
    for name, image in value.items():
        if not 0 < len(name) <= _MAX_TEMPLATE_CHARS or not IMAGE_REFERENCE.match(str(image)):
            raise ValueError(f"{attribute.name}: {name!r}: {image!r} is no template with the name of an image")


_MAX_TEMPLATE_CHARS = 256
"""Longest name of a template, which is a label of its sandboxes."""


def _filters(_instance: object, attribute: attrs.Attribute[Any], value: str | tuple[str, ...]) -> None:
    for name in (value,) if isinstance(value, str) else value:
        if not SECCOMP_NAME.match(name):
            raise ValueError(f"{attribute.name}: {name!r} is no name of a system call filter")


def _absolute(value: str | Path) -> Path:
    return Path(os.path.abspath(value))


def _absolute_or_none(value: str | Path | None) -> Path | None:
    return None if value is None else _absolute(value)


def _strings(value: Iterable[str]) -> tuple[str, ...]:
    return tuple(value)


def _frozen_mapping(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(value))


def _redact(value: object) -> str:
    return "None" if value is None else "'***'"


@attrs.frozen
class Defaults:
    """Defaults of a session's settings. `cpu_limit` is in cores; 0 inodes: one for each 4 KiB."""

    cpu_limit: float = attrs.field(default=1.0, validator=_between(*LIMIT_BOUNDS["cpu"]))
    mem_limit_mb: int = attrs.field(default=512, validator=_between(*LIMIT_BOUNDS["memory_mb"]))
    pids_limit: int = attrs.field(default=256, validator=_between(*LIMIT_BOUNDS["pids"]))
    disk_limit_mb: int = attrs.field(default=2048, validator=_between(*LIMIT_BOUNDS["disk_mb"]))
    disk_inodes_limit: int = attrs.field(default=200_000, validator=_between(*LIMIT_BOUNDS["disk_inodes"]))
    open_files_limit: int = attrs.field(default=65_536, validator=_between(*FIXED_BOUNDS["open_files"]), kw_only=True)
    tmp_limit_mb: int = attrs.field(default=1024, validator=_between(*FIXED_BOUNDS["tmp_mb"]), kw_only=True)
    tmp_inodes: int = attrs.field(default=0, validator=_between(0, FIXED_BOUNDS["tmp_inodes"][1]), kw_only=True)
    shm_limit_mb: int = attrs.field(default=64, validator=_between(*FIXED_BOUNDS["shm_mb"]), kw_only=True)
    shm_inodes: int = attrs.field(default=0, validator=_between(0, FIXED_BOUNDS["shm_inodes"][1]), kw_only=True)
    max_exec_timeout_ms: int = attrs.field(default=120_000, validator=_between(1, 7 * 86_400_000))
    network_mode: str = attrs.field(default="none", validator=_one_of(*NetworkMode, later=("proxy", "host")))
    readonly_rootfs: bool = False
    exec_mode: str = attrs.field(default=STATEFUL, validator=_one_of(*EXEC_MODES))
    stop_grace_ms: int = attrs.field(default=0, validator=_between(*STOP_GRACE_BOUNDS_MS), kw_only=True)
    shell_prefer: Literal["bash", "sh"] = attrs.field(default="bash", validator=_one_of("bash", "sh"))

    @property
    def limits(self) -> Limits:
        """The default limits as a value of the model."""
        return Limits(
            cpu=self.cpu_limit,
            memory_mb=self.mem_limit_mb,
            pids=self.pids_limit,
            disk_mb=self.disk_limit_mb,
            disk_inodes=self.disk_inodes_limit,
        )


@attrs.frozen
class Maximum:
    """Upper bounds of the settings that a request may ask for. A time of None: unbounded."""

    cpu_limit: float = attrs.field(default=LIMIT_BOUNDS["cpu"][1], validator=_between(*LIMIT_BOUNDS["cpu"]))
    mem_limit_mb: int = attrs.field(default=16 * 2**20, validator=_between(*LIMIT_BOUNDS["memory_mb"]))
    pids_limit: int = attrs.field(default=4 * 2**20, validator=_between(*LIMIT_BOUNDS["pids"]))
    open_files_limit: int = attrs.field(default=2**20, validator=_between(*FIXED_BOUNDS["open_files"]))
    tmp_limit_mb: int = attrs.field(default=8 * 2**20, validator=_between(*FIXED_BOUNDS["tmp_mb"]))
    shm_limit_mb: int = attrs.field(default=4 * 2**20, validator=_between(*FIXED_BOUNDS["shm_mb"]))
    idle_timeout_seconds: int | None = attrs.field(default=None, validator=_none_or(_between(1, MAX_SPAN_S)))
    max_lifetime_seconds: int | None = attrs.field(default=None, validator=_none_or(_between(1, MAX_SPAN_S)))


def _not_below_defaults(instance: Any, _attribute: attrs.Attribute[Any], maximum: Maximum) -> None:  # instance: Config
    for name in attrs.fields_dict(Maximum).keys() & attrs.fields_dict(Defaults).keys():
        default, most = getattr(instance.defaults, name), getattr(maximum, name)
        if default > most:
            raise ValueError(f"maximum.{name} is {most}, less than defaults.{name}, which is {default}")
    idle, ttl = maximum.idle_timeout_seconds, instance.session_ttl_seconds
    if idle is not None and ttl > idle:
        raise ValueError(f"maximum.idle_timeout_seconds is {idle}, less than session_ttl_seconds, which is {ttl}")


@attrs.frozen
class SecuritySettings:
    """System call filters. `seccomp` is the default of sessions, `seccomp_allowed` the further ones that a session may
    ask for; `seccomp_profiles` is a directory of the operator's own filters. `own_filters`: daemon, launcher, nsinit
    and its helpers are under filters of their own.
    """

    seccomp: Literal["off"] | str = attrs.field(default="strict", validator=_filters)  # YAML reads `off` as false
    seccomp_allowed: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_filters)
    seccomp_profiles: Path | None = attrs.field(default=None, converter=_absolute_or_none)
    own_filters: bool = True

    def __attrs_post_init__(self) -> None:
        own = [name for name in (self.seccomp, *self.seccomp_allowed) if name not in SECCOMP_PROFILES]
        if own and self.seccomp_profiles is None:
            raise ValueError(
                f"seccomp: {own[0]!r} is none of {', '.join(SECCOMP_PROFILES)}; seccomp_profiles is not set"
            )


def _protections(_instance: object, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    for name in value:
        if name not in PROTECTIONS:
            raise ValueError(f"{attribute.name}: {name!r} is no protection; there are {', '.join(PROTECTIONS)}")
        if attribute.name == "allow_missing" and PROTECTIONS[name] is Need.ESSENTIAL:
            raise ValueError(f"allow_missing: no sandbox can be made without {name}")


def _bridge_range(_instance: object, attribute: attrs.Attribute[Any], value: str) -> None:
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError:
        raise ValueError(f"{attribute.name}: {value!r} is no IPv4 network such as 10.213.0.0/16") from None
    if not 8 <= network.prefixlen <= 29:
        raise ValueError(f"{attribute.name}: a prefix of 8 to 29 bits, not {value!r}")


def _resolvers(_instance: object, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    for text in value:
        try:
            ipaddress.IPv4Address(text)
        except ValueError:
            raise ValueError(f"{attribute.name}: {text!r} is no IPv4 address") from None


@attrs.frozen
class IsolationSettings:
    """Protections by name: `required` ones must be fully on, `allow_missing` ones may be missing though the start is
    refused without them by default. `root_inside`: commands may run as the session's root. `merge_pages`: the kernel
    may merge equal pages of the PID 1s of sessions. `allow_bridge`: sessions may have the network mode `bridge`, with
    addresses of `bridge_range`; `bridge_resolvers` are their name servers, and without any those of the machine.
    """

    root_inside: bool = True
    merge_pages: bool = False
    allow_bridge: bool = False
    bridge_range: str = attrs.field(default="10.213.0.0/16", validator=_bridge_range)
    bridge_resolvers: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_resolvers)
    required: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_protections)
    allow_missing: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_protections)

    def __attrs_post_init__(self) -> None:
        for name in self.required:
            if name in self.allow_missing:
                raise ValueError(f"required and allow_missing both name {name}")


@attrs.frozen
class DiskSettings:
    """Disk limits of sessions, and the reserve of the data directory's disk.

    No session is created while less than `reserve_percent` of the bytes or inodes, or less than `reserve_mb`, is free.
    `io_weight` and the maxima in a second are those of each session; 0 is no limit.
    """

    mode: Literal["auto", "project", "btrfs", "loop", "tmpfs", "none"] = attrs.field(
        default="auto", validator=_one_of("auto", "project", "btrfs", "loop", "tmpfs", "none")
    )
    max_mb: int = attrs.field(default=102_400, validator=_between(*LIMIT_BOUNDS["disk_mb"]))
    max_inodes: int = attrs.field(default=10_000_000, validator=_between(*LIMIT_BOUNDS["disk_inodes"]))
    reserve_percent: float = attrs.field(default=5.0, validator=_between(0, 90))
    reserve_mb: int = attrs.field(default=256, validator=_between(0, MIB * MIB))
    io_weight: int = attrs.field(default=100, validator=_between(1, 10_000))
    max_read_mb_per_second: int = attrs.field(default=0, validator=_between(0, MIB))
    max_write_mb_per_second: int = attrs.field(default=0, validator=_between(0, MIB))
    max_reads_per_second: int = attrs.field(default=0, validator=_between(0, 1_000_000_000))
    max_writes_per_second: int = attrs.field(default=0, validator=_between(0, 1_000_000_000))


@attrs.frozen
class AdmissionSettings:
    """The node's budget. A ratio bounds the sum of the limits of all live sessions, as a multiple of the node's total;
    0: not counted. No session is made while less than the reserve is free, either.

    Memory and processes without a ratio (None): eight and ten times the total, and at least as much as the limits of
    the default sessions add up to that the machine has room for while they rest, `server.max_sessions` at most
    (`admission.budget.promisable`).

    Processes: one session has at most its limit, and all together leave the machine a tenth (`cgroup.tree.bound_pids`).
    By default 1000 sessions of 256 are admitted where `kernel.pid_max` is 32768. There some 115 of them that use all of
    their limit at once leave no process to the others; `doctor` names the line that makes the pool large enough, and a
    ratio of 1 admits only as many as fit.
    """

    cpu_overcommit: float = attrs.field(default=0.0, validator=_between(0, 100_000))
    memory_overcommit: float | None = attrs.field(default=None, validator=_none_or(_between(0, 100_000)))
    pids_overcommit: float | None = attrs.field(default=None, validator=_none_or(_between(0, 100_000)))
    disk_overcommit: float = attrs.field(default=0.0, validator=_between(0, 100_000))
    reserve_percent: float = attrs.field(default=5.0, validator=_between(0, 90))
    reserve_memory_mb: int = attrs.field(default=128, validator=_between(0, MIB * MIB))


MAX_POOL = 10_000


@attrs.frozen
class PoolSize:
    """The number of sessions to keep ready of one image, and the most while creates come so fast that the pool runs
    empty between two refills (None: `size`). Creates with that `account` are served, or those without one."""

    size: int = attrs.field(validator=_between(0, MAX_POOL))
    max: int | None = attrs.field(default=None, validator=_none_or(_between(0, MAX_POOL)))
    account: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.account is not None and not ACCOUNT.match(self.account):
            raise ValueError(f"account {ACCOUNT_RULE}")
        if self.most < self.size:
            raise ValueError(f"max is {self.max}, less than size, which is {self.size}")

    @property
    def most(self) -> int:
        return self.size if self.max is None else self.max


def _registries(_instance: object, attribute: attrs.Attribute[Any], value: Iterable[str]) -> None:
    for each in value:
        if not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?", each):
            raise ValueError(f"{attribute.name}: {each!r} is no registry such as example.org or example.org:5000")


def _mirrors(instance: object, attribute: attrs.Attribute[Any], value: Mapping[str, tuple[str, ...]]) -> None:
    _registries(instance, attribute, value)
    for url in (url for urls in value.values() for url in urls):
        if not re.fullmatch(r"https?://(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?", url):
            raise ValueError(f"{attribute.name}: {url!r} is no URL such as https://mirror.example.org")


def _lists_by_name(value: Mapping[str, Iterable[str]]) -> Mapping[str, tuple[str, ...]]:
    return MappingProxyType({name: tuple([each] if isinstance(each, str) else each) for name, each in value.items()})


@attrs.frozen
class ImagesSettings:
    """Pulls of images from registries. A registry is written HOST, with any port, or HOST:PORT. `insecure_registries`
    are spoken to by plain HTTP; `allow_private` may have private addresses, as those and mirrors may."""

    insecure_registries: tuple[str, ...] = attrs.field(
        default=("localhost", "127.0.0.1"), converter=_strings, validator=_registries
    )
    allow_private: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_registries)
    mirrors: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_lists_by_name, validator=_mirrors)
    credentials_file: Path | None = attrs.field(default=None, converter=_absolute_or_none)
    max_layers: int = attrs.field(default=127, validator=_between(1, 127))
    max_pull_mb: int = attrs.field(default=16_384, validator=_between(1, 1_048_576))
    part_keep_hours: float = attrs.field(default=24.0, validator=_between(0, 8760))


@attrs.frozen
class PoolSettings:
    """Session pools, by image name. A member older than `max_age_seconds` is replaced."""

    enabled: bool = False
    images: Mapping[str, PoolSize] = attrs.field(factory=dict, converter=_frozen_mapping)
    max_age_seconds: int = attrs.field(default=3600, validator=_between(1, 30 * 86_400))

    def __attrs_post_init__(self) -> None:
        for name in self.images:
            if not IMAGE_REFERENCE.match(name):
                raise ValueError(f"images: {name!r} is not an image name")

    @property
    def in_force(self) -> Mapping[str, PoolSize]:
        """The pools that this configuration asks for."""
        return {name: size for name, size in self.images.items() if self.enabled and size.most}


@attrs.frozen
class WorkspaceSettings:
    """Persistent workspaces. `default_quota_mb` is the quota of a workspace that is made without one (None: as much as
    `defaults.disk_limit_mb`; 0: no quota); `max_import_mb` bounds the unpacked size of an imported archive.
    """

    enabled: bool = True
    default_quota_mb: int | None = attrs.field(
        default=None, validator=_none_or(_zero_or(_between(*LIMIT_BOUNDS["disk_mb"])))
    )
    max_import_mb: int = attrs.field(default=10 * 1024, validator=_between(1, MIB * MIB))
    persist_by_default: bool = attrs.field(default=False, validator=_only(False, True))


GROUP_MARK = "@"
"""First sign of a rule that stands for the rules of a group."""

BUILT_IN_GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "python": ("pypi.org", "files.pythonhosted.org"),
        "npm": ("registry.npmjs.org", "registry.yarnpkg.com"),
        "debian": ("deb.debian.org", "security.debian.org"),
        "github": ("github.com:22,80,443", "api.github.com", "codeload.github.com", "*.githubusercontent.com"),
    }
)
"""Groups that every server has: the public package indexes. An operator's group of the same name replaces one."""

_GROUP_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}\Z")


def _networks(_instance: object, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    for text in value:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise ValueError(f"{attribute.name}: {error}") from None


def _rules(_instance: object, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    for text in value:
        try:
            parse_rule(text)
        except ValueError as error:
            raise ValueError(f"{attribute.name}: {error}") from None


def _groups(instance: object, attribute: attrs.Attribute[Any], value: Mapping[str, tuple[str, ...]]) -> None:
    for name, rules in value.items():
        if not _GROUP_NAME.match(name):
            raise ValueError(f"{attribute.name}: {name!r} is no name of a group")
        _rules(instance, attribute, rules)


def _upstream_proxy(_instance: object, _attribute: attrs.Attribute[Any], value: str | None) -> None:
    if value is not None:
        try:
            parse_proxy(value)
        except ValueError as error:
            raise ValueError(f"egress.upstream_proxy: {error}") from None


@attrs.frozen
class EgressSettings:
    """The way out of sessions. No session has a mode beyond `max_mode`. `permit` are private networks that may be
    reached, where a session's rules allow it; `always_deny` are rules that hold in every session. `groups` are rules by
    a name, which a session's rules call `@name`. `ask_timeout_s` is the longest time that a connection waits in the
    mode `ask`. `ca_file`: authorities besides the machine's, in PEM, that hosts of secrets may have certificates of.
    `upstream_proxy`: a proxy, as `http://ADDRESS:PORT`, that all connections go through; the first line of
    `upstream_proxy_auth` is `user:password` for it.
    """

    max_mode: str = attrs.field(default=NetworkMode.BRIDGE.value, validator=_one_of(*NetworkMode))
    ask_timeout_s: int = attrs.field(default=30, validator=_between(1, 600))
    permit: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_networks)
    always_deny: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_rules)
    groups: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_frozen_mapping, validator=_groups)
    ca_file: Path | None = attrs.field(default=None, converter=_absolute_or_none)
    upstream_proxy: str | None = attrs.field(default=None, validator=_upstream_proxy)
    upstream_proxy_auth: Path | None = attrs.field(default=None, converter=_absolute_or_none)

    @property
    def groups_in_force(self) -> Mapping[str, tuple[str, ...]]:
        """The operator's groups, and the built-in ones with other names."""
        return {**BUILT_IN_GROUPS, **self.groups}


def _preview_listen(_instance: object, _attribute: attrs.Attribute[Any], value: str | None) -> None:
    if value is not None:
        if value.startswith("unix:"):
            raise ValueError(f"preview.listen: {value!r} is no HOST:PORT")
        _check_address("preview.listen", value)


def _preview_domain(_instance: object, _attribute: attrs.Attribute[Any], value: str | None) -> None:
    if value is not None and not re.fullmatch(r"(?:[a-z0-9_-]{1,63}\.)*[a-z0-9-]{1,63}", value):
        raise ValueError(f"preview.domain: {value!r} is no name in lower case such as preview.example.org")


_LOWEST_PUBLISHED = 1024


def _publish(_instance: object, _attribute: attrs.Attribute[Any], value: str | None) -> None:
    if value is not None:
        try:
            ipaddress.ip_address(value)
        except ValueError:
            raise ValueError(f"preview.publish: {value!r} is no address such as 127.0.0.1") from None


def _publish_ports(instance: PreviewSettings, _attribute: attrs.Attribute[Any], value: str) -> None:
    if not re.fullmatch(r"[1-9][0-9]{3,4}-[1-9][0-9]{3,4}", value) or not instance.publish_range:
        raise ValueError(f"preview.publish_ports: {value!r} is no range of ports from {_LOWEST_PUBLISHED} on")


@attrs.frozen
class PreviewSettings:
    """Previews: from outside to servers in sessions. Over HTTP, off unless `listen` is an address for it; `domain` are
    the last labels of their names, and a proxy with TLS stands before the listener then. As plain TCP, off unless
    `publish` is an address, with one of `publish_ports` for each."""

    listen: str | None = attrs.field(default=None, validator=_preview_listen)
    domain: str | None = attrs.field(default=None, validator=_preview_domain)
    publish: str | None = attrs.field(default=None, validator=_publish)
    publish_ports: str = attrs.field(default=f"{_LOWEST_PUBLISHED}-65535", validator=_publish_ports)

    @property
    def publish_range(self) -> range:
        """The ports of the node that may be published; empty if `publish_ports` is no range."""
        low, high = (int(each) for each in self.publish_ports.split("-"))
        return range(low, high + 1) if low >= _LOWEST_PUBLISHED and high <= 0xFFFF else range(0)


@attrs.frozen
class E2bSettings:
    """E2B's API on the same addresses. `templates` are names of images by names of templates."""

    enabled: bool = False
    templates: Mapping[str, str] = attrs.field(factory=dict, converter=_frozen_mapping, validator=_image_values)


@attrs.frozen
class DashboardSettings:
    enabled: bool = True


@attrs.frozen
class ServerSettings:
    """Limits of the daemon itself. Sizes in bytes, durations in seconds; `pool_sandboxes` are sandboxes made ahead."""

    max_sessions: int = attrs.field(default=1000, validator=_between(1, 100_000))
    max_connections: int = attrs.field(default=1000, validator=_between(1, 1_000_000))
    max_command_bytes: int = attrs.field(default=MIB, validator=_between(1, MIB))
    max_json_bytes: int = attrs.field(default=16 * MIB, validator=_between(1024, 256 * MIB))
    max_upload_bytes: int = attrs.field(default=1024 * MIB, validator=_between(1024, MIB * MIB))
    max_read_bytes: int = attrs.field(default=100 * MIB, validator=_between(1024, 1024 * MIB))
    output_cap_bytes: int = attrs.field(default=5 * MIB, validator=_between(4096, 256 * MIB))
    pool_sandboxes: int = attrs.field(default=2, validator=_between(0, 64))
    shell_queue_length: int = attrs.field(default=32, validator=_between(1, 10_000))
    write_timeout_s: float = attrs.field(default=30.0, validator=_between(0.1, 3600))
    head_timeout_s: float = attrs.field(default=10.0, validator=_between(0.1, 3600))
    keep_alive_timeout_s: float = attrs.field(default=75.0, validator=_between(0.1, 3600))
    drain_timeout_s: float = attrs.field(default=30.0, validator=_between(0, 3600))
    graceful_timeout_s: float = attrs.field(default=5.0, validator=_between(0.1, 600))
    log_level: Literal["debug", "info", "warning", "error"] = attrs.field(
        default="info", validator=_one_of("debug", "info", "warning", "error")
    )
    log_format: Literal["json", "text"] = attrs.field(default="json", validator=_one_of("json", "text"))


@attrs.frozen
class RunsSettings:
    """Commands, processes and terminals. The graces are the times that each rung of the kill ladder waits for the one
    before.

    The output and the record of an ended run are kept for `keep_seconds`, or until newer runs of its session need the
    `keep_mb`, or until all sessions together take `records_memory_mb` or `spool_disk_mb` and its own takes most. A
    session remembers `max_exec_ids` ids that clients chose for runs that are not kept any more, and then takes no new
    ones. `allow_unlimited`: a client may ask for a command without time limit. `pass_traceparent`: processes of a run
    find the trace of its request in the variable `TRACEPARENT`.
    """

    interrupt_grace_ms: int = attrs.field(default=200, validator=_between(0, 3_600_000))
    terminate_grace_ms: int = attrs.field(default=300, validator=_between(0, 3_600_000))
    kill_grace_ms: int = attrs.field(default=300, validator=_between(0, 3_600_000))
    allow_unlimited: bool = False
    keep_seconds: int = attrs.field(default=900, validator=_between(1, 7 * 86_400))
    keep_mb: int = attrs.field(default=64, validator=_between(1, 1024 * 1024))
    pass_traceparent: bool = False
    spool_memory_mb: int = attrs.field(default=64, validator=_between(1, 1024 * 1024))
    spool_disk_mb: int = attrs.field(default=4096, validator=_between(1, 1024 * 1024 * 1024))
    records_memory_mb: int = attrs.field(default=256, validator=_between(1, 1024 * 1024))
    max_exec_ids: int = attrs.field(default=1_000_000, validator=_between(1, 100_000_000))


@attrs.frozen
class RecordsSettings:
    """Seconds that the record of an ended session, with its idempotency key, is kept."""

    keep_seconds: int = attrs.field(default=7 * 86_400, validator=_between(60, 3650 * 86_400))


@attrs.frozen
class EventsSettings:
    """The journal: the number of events that the database keeps."""

    keep: int = attrs.field(default=100_000, validator=_between(1000, 100_000_000))


@attrs.frozen
class FaultSettings:
    """Settings for tests of this program. `crash_at`: the point at which a process ends itself (see `crash.py`),
    refused unless `crash_points` is set.
    """

    crash_points: bool = False
    crash_at: str = attrs.field(default="", validator=attrs.validators.matches_re(r"([a-z_.-]+(:[1-9][0-9]{0,5})?)?"))

    def __attrs_post_init__(self) -> None:
        if self.crash_at and not self.crash_points:
            raise ValueError("crash_at: names a crash point, but crash_points is not set; never set it in production")


_NAMED_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})\Z")


def _listen(_instance: object, _attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    if not value:
        raise ValueError("listen must name at least one address")
    for address in value:
        if address.startswith("unix:"):
            if not address.startswith("unix:/") or "\0" in address:
                raise ValueError(f"listen: {address!r} must be unix: and an absolute path")
            if len(os.fsencode(address)) > 5 + 107:  # unix(7): sun_path
                raise ValueError(f"listen: the path of {address!r} is longer than 107 bytes")
            continue
        _check_address("listen", address, "neither HOST:PORT nor unix:/PATH")


def _check_address(name: str, address: str, fault: str = "no HOST:PORT") -> None:
    match = _NAMED_PORT.match(address)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"{name}: {address!r} is {fault}")
    if match["host"].startswith("["):
        try:
            ipaddress.IPv6Address(match["host"][1:-1])
        except ValueError:
            raise ValueError(f"{name}: {match['host']} is no IPv6 address") from None


def _api_key(_instance: object, _attribute: attrs.Attribute[Any], value: str | None) -> None:
    if value is not None and not re.fullmatch(r"[\x21-\x7e]+", value):
        raise ValueError("api_key must be visible ASCII without spaces")


def _is_local(address: str) -> bool:
    """Whether only this machine can reach a listening address."""
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return address.startswith("unix:") or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _origins(_instance: object, _attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    for origin in value:
        if not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]_-]+", origin):
            raise ValueError(f"allowed_origins: {origin!r} is no web origin such as https://example.org")


def _user(_instance: object, _attribute: attrs.Attribute[Any], value: str) -> None:
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}|[0-9]{1,10}", value):
        raise ValueError(f"user: {value!r} is neither an account's name nor a number, nor `auto` or `root`")


@attrs.frozen
class Config:
    """All settings of the daemon. `api_key` None: no key is checked (the command line always makes one)."""

    listen: tuple[str, ...] = attrs.field(default=("127.0.0.1:8080",), converter=_strings, validator=_listen)
    api_key: str | None = attrs.field(default=None, repr=_redact, validator=_api_key)
    data_dir: Path = attrs.field(default=DEFAULT_DATA_DIR, converter=_absolute)
    user: str = attrs.field(default="auto", validator=_user)
    nsinit_socket: Path | None = attrs.field(default=None, converter=_absolute_or_none)
    db_path: Path = attrs.field(
        default=attrs.Factory(lambda self: self.data_dir / "sandkasten.db", takes_self=True), converter=_absolute
    )
    default_image: str = attrs.field(default="python", validator=_image_names)
    allowed_images: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_image_names)
    allowed_origins: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_origins)
    image_aliases: Mapping[str, str] = attrs.field(
        factory=lambda: {"python": "host", "base": "host"}, converter=_frozen_mapping, validator=_image_names
    )
    session_ttl_seconds: int = attrs.field(default=1800, validator=_between(1, MAX_TTL_S))
    sessions_on_stop: Literal["auto", "destroy", "keep"] = attrs.field(
        default="auto", validator=_one_of("auto", "destroy", "keep")
    )
    defaults: Defaults = attrs.field(factory=Defaults)
    maximum: Maximum = attrs.field(factory=Maximum, validator=_not_below_defaults)
    security: SecuritySettings = attrs.field(factory=SecuritySettings)
    isolation: IsolationSettings = attrs.field(factory=IsolationSettings)
    disk: DiskSettings = attrs.field(factory=DiskSettings)
    admission: AdmissionSettings = attrs.field(factory=AdmissionSettings)
    pool: PoolSettings = attrs.field(factory=PoolSettings)
    workspace: WorkspaceSettings = attrs.field(factory=WorkspaceSettings)
    images: ImagesSettings = attrs.field(factory=ImagesSettings)
    egress: EgressSettings = attrs.field(factory=EgressSettings)
    preview: PreviewSettings = attrs.field(factory=PreviewSettings)
    dashboard: DashboardSettings = attrs.field(factory=DashboardSettings)
    e2b: E2bSettings = attrs.field(factory=E2bSettings)
    runs: RunsSettings = attrs.field(factory=RunsSettings)
    events: EventsSettings = attrs.field(factory=EventsSettings)
    records: RecordsSettings = attrs.field(factory=RecordsSettings)
    server: ServerSettings = attrs.field(factory=ServerSettings)
    testing: FaultSettings = attrs.field(factory=FaultSettings)

    def __attrs_post_init__(self) -> None:
        if self.testing.crash_points and not all(_is_local(address) for address in self.listen):
            raise ValueError(
                "testing.crash_points: refused to a daemon that other machines can reach; listen on loopback only"
            )
        if NetworkMode(self.defaults.network_mode) is NetworkMode.BRIDGE and not self.isolation.allow_bridge:
            raise ValueError("defaults.network_mode: bridge is refused while isolation.allow_bridge is false")
        if NetworkMode(self.defaults.network_mode).exceeds(NetworkMode(self.egress.max_mode)):
            raise ValueError(
                f"egress.max_mode is {self.egress.max_mode}, less than defaults.network_mode, which is "
                f"{self.defaults.network_mode}"
            )
        if self.e2b.enabled and not self.isolation.root_inside:
            raise ValueError("e2b.enabled: its programs expect a root inside, and isolation.root_inside is false")
        self._check_pools()

    def _check_pools(self) -> None:
        for name in self.pool.images:
            if self.allowed_images and name not in self.allowed_images:
                raise ValueError(f"pool.images: {name!r} is not in allowed_images")
        together = sum(size.most for size in self.pool.in_force.values())
        if together > self.server.max_sessions:
            raise ValueError(
                f"pool.images: {together} sessions together, more than server.max_sessions, "
                f"which is {self.server.max_sessions}"
            )

    @property
    def egress_in_force(self) -> EgressSettings:
        """The way out with the widest mode that a session may have: `bridge` where `isolation.allow_bridge` says so."""
        is_bounded = self.isolation.allow_bridge or not NetworkMode(self.egress.max_mode).exceeds(NetworkMode.OPEN)
        return self.egress if is_bounded else attrs.evolve(self.egress, max_mode=NetworkMode.OPEN.value)

    @property
    def may_bridge(self) -> bool:
        """Whether a session may have the network mode `bridge`."""
        return self.egress_in_force.max_mode == NetworkMode.BRIDGE

    @property
    def workspace_quota_mb(self) -> int:
        """Quota of a workspace that is made without one, in MiB; 0: none."""
        given = self.workspace.default_quota_mb
        return self.defaults.disk_limit_mb if given is None else given

    @property
    def api_key_path(self) -> Path:
        """Path of the key that is made at the first start."""
        return self.data_dir / API_KEY_NAME

    def notices(self) -> list[str]:
        """Return a sentence for each accepted setting that has no effect in this version, or that weakens it."""
        notices = []
        if self.user == "root":
            notices.append("user: the daemon stays root, as configured; what breaks into it has the whole machine")
        if self.testing.crash_points:
            notices.append("testing.crash_points: this daemon may be made to crash; for tests only")
        if self.pool.images and not self.pool.enabled:
            notices.append("pool.images: has no effect, because pool.enabled is false")
        for address in self.listen:
            if not _is_local(address):
                notices.append(
                    f"listen: {address} is plain HTTP that other machines can reach; whoever is on the way reads keys, "
                    "commands and output; put a proxy with TLS before it, or listen on 127.0.0.1"
                )
        return notices
