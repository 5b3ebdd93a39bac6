"""`sandkasten nsinit --listen PATH`: nsinit as a service of its own, for a daemon that never was root.

Does as root what a start does on disk, opens the socket, which only the daemon's user may connect to, and becomes the
keeper (`nsinit/keeper.py`), which starts an nsinit for whoever connects. Sources: unix(7); sd_notify(3).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from pathlib import Path

from nsinit.keeping import KeepForUser
from nsinit.spawn import CHANNEL_FD, ENVIRONMENT, keeper_command
from sandkasten import app
from sandkasten.api.listen import ListenError, bind_unix
from sandkasten.cli.key import make_data_dir
from sandkasten.cli.main import Stop, load, require_root
from sandkasten.cli.privilege import account_of, set_up
from sandkasten.config import ConfigError
from sandkasten.errors import SandkastenError
from sandkasten.runtime import precheck
from sandkasten.runtime.account import Account
from sandkasten.runtime.machine_file import write_machine
from sandkasten.runtime.paths import DataPaths


def nsinit(arguments: argparse.Namespace) -> int:
    """Prepare, and become the keeper; returns only by an exception."""
    config = load(arguments)
    require_root()
    path = arguments.socket or config.nsinit_socket
    if path is None:
        raise Stop("say where to listen: --listen PATH, or nsinit_socket in the configuration")
    account = account_of(config)
    if account.is_root:
        raise Stop("user: root needs no service apart; name an account for the daemon")
    make_data_dir(config.data_dir)
    machine = precheck.examine(config.data_dir)
    try:
        app.require_protections(config, machine)
        set_up(config, account)
        write_machine(DataPaths(config.data_dir).machine, machine, gid=account.gid)
    except (ConfigError, SandkastenError) as error:
        raise Stop(str(error)) from None
    listener = _listen(path, account)
    os.dup2(listener.fileno(), CHANNEL_FD)
    os.set_inheritable(CHANNEL_FD, True)  # dup2(2) leaves that alone if it was this one already
    print(f"listening on {path} for user {account.name}", flush=True)
    _tell_service_manager()
    command = keeper_command(KeepForUser(str(config.data_dir), account.gid, account.uid).encode())
    os.execve(command[0], command, ENVIRONMENT)


def _listen(path: Path, account: Account) -> socket.socket:
    """Open the socket; it is nobody's but root's until it is the daemon's."""
    try:
        listener = bind_unix(os.fspath(path), kind=socket.SOCK_SEQPACKET)
    except ListenError as error:
        raise Stop(str(error)) from None
    os.chown(path, account.uid, account.gid, follow_symlinks=False)
    listener.setblocking(True)
    return listener


def _tell_service_manager() -> None:
    """Say that daemons can connect (sd_notify(3)), if somebody wants to know."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith(("/", "@")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.sendto(b"READY=1", address.replace("@", "\0", 1))
