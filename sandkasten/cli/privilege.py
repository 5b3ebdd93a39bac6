"""The privileged part of a start: open, hand over, start the launcher, drop root, so that the daemon need not be root.

The order matters. The lock comes first, so that no other process is at work in the data directory; then the work that
only root can do; then the launcher, which stays root; then this process keeps nothing but the daemon's user. Before the
drop there is no thread, no key in memory that was not in the configuration, and no connection.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

import sandkasten
from nsinit.tools.drop import NotDropped, confine, drop_privilege
from nsinit.wire.launching import Allowance, LaunchForParent, describe_profiles
from nsinit.wire.protocol import DiskLimits, SeccompProfile
from sandkasten import app
from sandkasten.admission.network import bridge_terms
from sandkasten.admission.plan import CPU_PERIOD_US
from sandkasten.api.http.listen import EarlySockets, listen_early
from sandkasten.cli.common import Stop
from sandkasten.config import Config, ConfigError
from sandkasten.config.values import MIB
from sandkasten.host.account import Account, find_account
from sandkasten.host.data_dir import hand_over
from sandkasten.host.paths import DataPaths
from sandkasten.host.resolvers import machine_resolvers
from sandkasten.images.catalog import Catalog, share_store
from sandkasten.links.processes import (
    Launcher,
    StartEgress,
    StartNsinit,
    connect_to,
    open_launcher,
    start_as_child,
    start_egress_as_child,
    start_egress_at,
)
from sandkasten.model import SECCOMP_PROFILES
from sandkasten.model.network import NetworkMode


@attrs.frozen
class Means:
    """The daemon's means in place of privilege."""

    start_nsinit: StartNsinit
    start_egress: StartEgress | None = None
    """None where nobody is root, and there is no service apart."""
    early: EarlySockets | None = None
    launcher: Launcher | None = None


def account_of(config: Config) -> Account:
    """Return the configured account. Raises `Stop`."""
    try:
        return find_account(config.user)
    except ConfigError as error:
        raise Stop(str(error)) from None


def set_up(config: Config, account: Account) -> None:
    """Do a start's work on disk as root, for a daemon of `account`.

    Raises:
        ConfigError, SandkastenError, OSError.
    """
    hand_over(config, account)
    share_store(DataPaths(config.data_dir).images, account.gid)
    app.prepare_images(Catalog(config.data_dir, aliases=config.image_aliases))


@contextlib.contextmanager
def means(config: Config, profiles: Sequence[SeccompProfile] = (), *, serves: bool = True) -> Iterator[Means]:
    """Give up root as far as the configuration says, and yield the means to work with; without `serves` no socket.
    `profiles`: the operator's own filters, the only ones that nsinit will take.

    Raises:
        Stop: the daemon can't run without privilege here; the message is one sentence.
    """
    if os.geteuid() != 0:
        _confine(config)
        yield _of_service(config)
        return
    account = account_of(config)
    if account.is_root:
        set_up(config, account)
        yield Means(_start_nsinit(config), start_egress_as_child)
    elif config.nsinit_socket is not None:
        hand_over(config, account)
        _drop(config, account)
        _confine(config)
        yield _of_service(config)
    else:
        set_up(config, account)
        with _kept(config, account, allowance_of(config, profiles), config.listen if serves else ()) as kept:
            yield kept


def allowance_of(config: Config, profiles: Sequence[SeccompProfile]) -> Allowance:
    """Return the most that a daemon with this configuration asks nsinit for."""
    most, disk, security = config.maximum, config.disk, config.security
    return Allowance(
        profiles=tuple(dict.fromkeys((security.seccomp, SECCOMP_PROFILES[0], *security.seccomp_allowed))),
        own_profiles=describe_profiles(profiles),
        images=tuple(Catalog(config.data_dir, aliases=config.image_aliases).names_of(config.allowed_images)),
        root_inside=config.isolation.root_inside,
        memory_bytes=most.mem_limit_mb * MIB,
        pids=most.pids_limit,
        cpu_quota_us=round(most.cpu_limit * CPU_PERIOD_US),
        disk=DiskLimits(disk.max_mb * MIB, disk.max_inodes),
        quota_bytes=max(config.workspace_quota_mb, disk.max_mb) * MIB,
        open_files=most.open_files_limit,
        tmp_bytes=most.tmp_limit_mb * MIB,
        shm_bytes=most.shm_limit_mb * MIB,
        merge_pages=config.isolation.merge_pages,
        way_out=NetworkMode(config.egress.max_mode) is not NetworkMode.NONE,
        bridge=bridge_terms(config, machine_resolvers()),
    )


def _of_service(config: Config) -> Means:
    path = config.nsinit_socket
    return Means(_start_nsinit(config), None if path is None else start_egress_at(path))


def _start_nsinit(config: Config) -> StartNsinit:
    return start_as_child if config.nsinit_socket is None else connect_to(config.nsinit_socket)


@contextlib.contextmanager
def _kept(config: Config, account: Account, allowance: Allowance, listen: Sequence[str]) -> Iterator[Means]:
    early = listen_early(listen, loopback_only=False)  # the command line always has a key
    try:
        what = LaunchForParent(
            str(config.data_dir),
            account.gid,
            allowance,
            os.getpid(),
            tuple(early.unix_paths),
            config.security.own_filters,
            config.egress.permit,
            str(config.egress.ca_file or ""),
            config.egress.upstream_proxy or "",
        )
        launcher = open_launcher(what)
        try:
            launcher.start_ahead()
            _drop(config, account)
            _confine(config)
            yield Means(launcher.start_nsinit, launcher.start_egress, early, launcher)
        finally:
            early.close()
            launcher.close()
    finally:
        early.close()


def give_away(config: Config, account: Account) -> None:
    """Become a process of `account` without privilege, for work on the network. Raises `Stop`."""
    _drop(config, account)
    _confine(config)


def _confine(config: Config) -> None:
    """Put the daemon under the filter of its own calls, while it has one thread: those to come inherit the filter."""
    if config.security.own_filters:
        confine()


def _drop(config: Config, account: Account) -> None:
    code = Path(sandkasten.__file__).parent.parent
    needed = [config.data_dir, config.db_path.parent, code, Path(sys.prefix), Path(sys.base_prefix)]
    if config.nsinit_socket is not None:
        needed.append(config.nsinit_socket.parent)
    try:
        drop_privilege(account.uid, account.gid, keep_reachable=[str(path) for path in needed])
    except NotDropped as error:
        raise Stop(f"can't give root away: {error}") from error
    for path in (config.data_dir, code / "sandkasten" / "__init__.py"):
        if not os.access(path, os.R_OK):
            raise Stop(
                f"user {account.name} can't read {path}: let others enter the directories above it and read it, "
                "or set `user: root`"
            )
