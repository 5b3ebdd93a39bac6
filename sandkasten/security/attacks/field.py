"""The field of all attempts: a supervisor of its own, a session to attack from, a neighbour, a witness, canaries.

Owns everything that must be gone afterwards. The data directory is a temporary one beside the configured one, on the
same file system, with the configured protections; the installation's own sessions are not touched.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path

import attrs
import orjson
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.app import open_supervisor
from sandkasten.config import Config, PoolSettings, PreviewSettings, ServerSettings
from sandkasten.errors import Capacity, EgressUnavailable, NetworkNotSupported
from sandkasten.images.removal import remove_tree
from sandkasten.model import ExecResult, ExecSpec, Limits, ProcessSpec, SessionSpec, WaitFor
from sandkasten.model.network import Network, NetworkMode
from sandkasten.security.attacks.package import pack_probes
from sandkasten.security.probes.attempt import CANARY, NotApplicable, OutsideFacts
from sandkasten.security.probes.neighbour import PLANTED

SANDBOX, ROOT = "sandbox", "root"
USERS = (SANDBOX, ROOT)
PROBES = "/tmp/probes.zip"
SMALL = Limits(cpu=0.5, memory_mb=96, pids=48, disk_mb=24, disk_inodes=2000)
"""Limits of a session whose limits are tried."""

_ORDINARY = Limits(cpu=1.0, memory_mb=256, pids=128, disk_mb=64)
_QUOTA_MB = 256
"""Quota of the attempts' workspaces, at most: so much of the machine's disk is filled."""
_PLANT_S = 10.0
_MAX_IMPORT_MB = 4
"""Bound that ends a bomb before the disk is full."""
_PORT = 47808


@attrs.frozen
class Field:
    """The means of an attack. `patience` stretches every time limit, for slow machines."""

    supervisor: LocalSupervisor
    config: Config
    neighbour: str
    witness: str
    outside: Path
    target: OutsideFacts
    patience: float
    user: str = SANDBOX

    @property
    def exec_user(self) -> str | None:
        """User name for a command; None is the sandbox user."""
        return None if self.user == SANDBOX else self.user

    @asynccontextmanager
    async def session(
        self,
        limits: Limits = _ORDINARY,
        *,
        workspace_id: str | None = None,
        network: Network | None = None,
        secret_env: Mapping[str, str] | None = None,
    ) -> AsyncIterator[str]:
        """Make a session for the block, destroyed afterwards; yield its id. The `network` is none by default.

        Raises:
            NotApplicable: this machine can give no session that network.
        """
        spec = SessionSpec(
            image="host",
            limits=limits,
            workspace_id=workspace_id,
            network=network or Network(),
            secret_env=secret_env or {},
        )
        try:
            session = await self.supervisor.create(spec)
        except (EgressUnavailable, NetworkNotSupported) as error:
            raise NotApplicable(str(error)) from None
        try:
            yield session.id
        finally:
            with trio.move_on_after(30 * self.patience, shield=True):
                await self._destroy(session.id)

    async def _destroy(self, session_id: str) -> None:
        """End a session, and wait for an end that takes longer than one request."""
        while True:
            try:
                await self.supervisor.destroy(session_id)
                return
            except Capacity:
                await trio.sleep(0.1)

    async def run(self, session_id: str, command: str, *, timeout_s: float = 10.0) -> ExecResult:
        """Run a shell command as the attacking user."""
        timeout_ms = round(timeout_s * self.patience * 1000)
        spec = ExecSpec(command, stateless=True, user=self.exec_user, timeout_ms=timeout_ms)
        return await self.supervisor.exec(session_id, spec)

    async def python(self, session_id: str, program: str, *, timeout_s: float = 10.0) -> ExecResult:
        """Run a Python program as the attacking user."""
        timeout_ms = round(timeout_s * self.patience * 1000)
        argv = ("python3", "-I", "-S", "-c", program)
        return await self.supervisor.exec(session_id, ExecSpec(argv=argv, user=self.exec_user, timeout_ms=timeout_ms))

    async def probe(self, session_id: str, *names: str, timeout_s: float) -> ExecResult:
        """Run the packed attempts `names`."""
        await put(self.supervisor, session_id, PROBES, pack_probes())
        argv = ("python3", "-I", "-B", PROBES, orjson.dumps(asdict(self.target)).decode(), *names)
        timeout_ms = round(timeout_s * self.patience * 1000)
        return await self.supervisor.exec(session_id, ExecSpec(argv=argv, user=self.exec_user, timeout_ms=timeout_ms))

    async def ask_witness(self, answer_s: float = 5.0) -> str:
        """Return `answers` if the witness still runs a command in good time."""
        with trio.move_on_after(answer_s * self.patience):
            result = await self.supervisor.exec(self.witness, ExecSpec("echo here"))
            return "answers" if result.stdout == b"here\n" else f"says {result.output[:80]!r}"
        return f"silent for {answer_s * self.patience:.0f} s"


async def put(supervisor: LocalSupervisor, session_id: str, path: str, content: bytes) -> None:
    """Write a file by the file interface."""
    async with supervisor.files(session_id).open_write(path) as writer:
        await writer.send(content)
        await writer.commit()


@asynccontextmanager
async def open_field(config: Config, *, patience: float = 1.0) -> AsyncIterator[Field]:
    """Make the field for the block, and remove all of it afterwards."""
    with _directories(config.data_dir) as (data_dir, outside):
        quota_mb = min(config.workspace_quota_mb, _QUOTA_MB)
        own = attrs.evolve(
            config,
            data_dir=data_dir,
            db_path=data_dir / "sandkasten.db",
            default_image="host",
            allowed_images=(),
            sessions_on_stop="destroy",
            api_key=secret(),
            pool=PoolSettings(),
            server=ServerSettings(pool_sandboxes=0),
            preview=PreviewSettings("127.0.0.1:0", publish="127.0.0.1"),
            egress=attrs.evolve(
                config.egress, max_mode=(NetworkMode.BRIDGE if config.may_bridge else NetworkMode.OPEN).value
            ),
            defaults=attrs.evolve(config.defaults, network_mode=NetworkMode.NONE.value),
            workspace=attrs.evolve(config.workspace, max_import_mb=_MAX_IMPORT_MB, default_quota_mb=quota_mb),
        )
        async with open_supervisor(own) as supervisor:
            target = OutsideFacts(
                outside_pid=os.getpid(),
                outside_paths=(str(outside / "secret"), str(data_dir)),
                neighbour_port=_PORT,
                abstract_name=f"neighbour-{secrets.token_hex(4)}",
                ipc_key=secrets.randbits(30),
            )
            witness = await supervisor.create(SessionSpec(image="host", limits=_ORDINARY))
            neighbour = await supervisor.create(SessionSpec(image="host", limits=_ORDINARY))
            field = Field(supervisor, own, neighbour.id, witness.id, outside, target, patience)
            await _plant(field)
            yield field


async def _plant(field: Field) -> None:
    await put(field.supervisor, field.neighbour, PROBES, pack_probes())
    argv = ("python3", "-I", "-B", PROBES, orjson.dumps(asdict(field.target)).decode(), "plant")
    spec = ProcessSpec(argv=argv, env={"NEIGHBOUR_SECRET": secret()}, process_id="neighbour")
    process = await field.supervisor.start_process(field.neighbour, spec)
    waited = await field.supervisor.wait_process(
        field.neighbour, process.exec_id, WaitFor(pattern=PLANTED), timeout_s=_PLANT_S * field.patience
    )
    if not waited.happened:
        raise RuntimeError(f"the neighbour could not be prepared: {waited.run.last_line}")


def secret() -> str:
    """Return a new secret, recognizable by its beginning."""
    return CANARY + secrets.token_hex(16)


@contextmanager
def _directories(configured: Path) -> Iterator[tuple[Path, Path]]:
    """Make the data directory, on the file system of the configured one, and a forbidden directory beside it."""
    parent = configured if configured.is_dir() else Path(tempfile.gettempdir())
    base = Path(tempfile.mkdtemp(prefix="sandkasten-attack-", dir=parent))
    try:
        outside = base / "outside"
        outside.mkdir(mode=0o755)
        (outside / "secret").write_text(secret())
        (base / "data").mkdir(mode=0o700)
        yield base / "data", outside
    finally:
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_tree(fd, base.name)
        finally:
            os.close(fd)
