"""`sandkasten nsinit --listen PATH`: nsinit as a service apart, for a daemon that is never root.

Does a start's work on disk as root, opens the socket, to which only the daemon's user may connect, and becomes the
launcher (`nsinit/tools/launcher.py`), which starts an nsinit for each connection. Sources: unix(7); sd_notify(3).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from nsinit.spawn import CHANNEL_FD, ENVIRONMENT, launcher_command
from nsinit.wire.launching import AUTO, NOTIFY_FD, LaunchForUser
from sandkasten import app
from sandkasten.api.http.listen import ListenError, bind_unix
from sandkasten.cli.common import Stop, load, make_data_dir, require_root
from sandkasten.cli.privilege import account_of, allowance_of, set_up
from sandkasten.config import ConfigError
from sandkasten.config.seccomp import load_filters
from sandkasten.errors import SandkastenError
from sandkasten.host import examine
from sandkasten.host.account import Account
from sandkasten.host.examine import write_machine
from sandkasten.host.notify import open_notifier
from sandkasten.host.paths import DataPaths

_HIGH_FD = 64


def nsinit(arguments: argparse.Namespace) -> int:
    """Prepare, and become the launcher; returns only by an exception."""
    config = load(arguments)
    require_root()
    path = arguments.socket or config.nsinit_socket
    if path is None:
        raise Stop("say where to listen: --listen PATH, or nsinit_socket in the configuration")
    notifier = open_notifier(os.environ)
    account = account_of(config)
    if account.is_root:
        raise Stop("user: root needs no service apart; name an account for the daemon")
    make_data_dir(config.data_dir)
    machine = examine.examine(config.data_dir, config=config)
    try:
        app.require_protections(config, machine)
        allowance = allowance_of(config, load_filters(config.security))
        set_up(config, account)
        write_machine(DataPaths(config.data_dir).machine, machine, gid=account.gid)
    except (ConfigError, SandkastenError) as error:
        raise Stop(str(error)) from None
    listener = _listen(path, account)
    print(f"listening on {path} for user {account.name}", flush=True)
    notifier.ready(f"listening on {path} for user {account.name}")
    is_told = notifier.fileno() >= 0
    _hand_down({CHANNEL_FD: listener.fileno()} | ({NOTIFY_FD: notifier.fileno()} if is_told else {}))
    what = LaunchForUser(
        str(config.data_dir),
        account.gid,
        allowance,
        account.uid,
        NOTIFY_FD if is_told else -1,
        notifier.beat_s or 0.0,
        config.security.own_filters,
        arguments.cgroup or AUTO,
        config.egress.permit,
        str(config.egress.ca_file or ""),
        config.egress.upstream_proxy or "",
    )
    command = launcher_command(what.encode())
    os.execve(command[0], command, ENVIRONMENT)


def _listen(path: Path, account: Account) -> socket.socket:
    """Open the socket; root owns it until it is handed to the daemon's user."""
    try:
        listener = bind_unix(os.fspath(path), kind=socket.SOCK_SEQPACKET)
    except ListenError as error:
        raise Stop(str(error)) from None
    # connect(2) needs write permission on the socket file, which its owner has.
    os.chown(path, account.uid, account.gid, follow_symlinks=False)
    listener.setblocking(True)  # the launcher waits in accept(2)
    return listener


def _hand_down(places: Mapping[int, int]) -> None:
    """Put descriptors where the launcher looks for them; first out of each other's way."""
    # A target number may be another one's present number, so all are moved above the targets first.
    safe = {place: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for place, fd in places.items()}
    for place, fd in safe.items():
        os.dup2(fd, place)
