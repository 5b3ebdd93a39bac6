"""Sandbox for inspect-ai: `Task(sandbox="sandkasten")`, found by the entry point of this distribution.

Each sample gets a session of its own, ended by the sample's clean-up. The server comes from `SANDKASTEN_URL` and
`SANDKASTEN_API_KEY`: a configuration is written to the log of the evaluation, so no key belongs there.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, cast, overload

import anyio
import anyio.to_thread
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from inspect_ai.util._sandbox.environment import SandboxUnavailableError
from pydantic import BaseModel, ConfigDict

from sandkasten import errors
from sandkasten.sdk import Run, SandboxClient, Session
from sandkasten.sdk.types import UNSET, ExecBytes, RunEnd

log = logging.getLogger(__name__)

LABEL = "inspect"
"""Label of the sessions; its value is the task's name."""
CLEANUP_S = 10.0
"""Time that the end of a session may take, also for an evaluation that is cancelled."""
_INLINE_CHARS = 64 * 1024
_CANT_EXECUTE = 126
_GONE = (
    *(errors.SessionExpired, errors.SessionNotFound, errors.SessionPaused, errors.SandboxError),
    *(errors.Unavailable, errors.ConnectionFailed, errors.Unauthorized),
)


class SandkastenSandboxConfig(BaseModel):
    """Settings of a sample's session; docs/api.md#sessions explains the fields, and None is the server's default."""

    model_config = ConfigDict(frozen=True)

    image: str = "python"
    env: dict[str, str] | None = None
    limits: dict[str, float] | None = None
    network: dict[str, Any] | None = None
    user: str | None = None
    idle_timeout_seconds: float | None = None

    def __hash__(self) -> int:
        """Return a hash, by which inspect groups samples of one configuration; that of pydantic fails for dicts."""
        return hash(self.model_dump_json())


@sandboxenv(name="sandkasten")
class SandkastenSandboxEnvironment(SandboxEnvironment):
    """A session as inspect uses it: commands are programs beside the session's shells.

    The configuration is a `SandkastenSandboxConfig`, or the name of an image.
    """

    _open: ClassVar[dict[str, SandkastenSandboxEnvironment]] = {}
    """Environments that were made and not ended, by the id of their session."""

    def __init__(self, task_name: str, client: SandboxClient, session: Session) -> None:
        """Internal: inspect calls `sample_init`."""
        super().__init__()
        self._task_name, self._client, self.session = task_name, client, session
        self._open[session.id] = self

    # Life -------------------------------------------------------------------------------------------------------------

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Make the session of a sample."""
        if isinstance(config, str):
            config = SandkastenSandboxConfig(image=config)
        chosen = config if isinstance(config, SandkastenSandboxConfig) else SandkastenSandboxConfig()
        idle_s = chosen.idle_timeout_seconds
        client = await anyio.to_thread.run_sync(SandboxClient.from_env)
        try:
            session = await client.create_session(
                image=chosen.image,
                env=chosen.env,
                limits=chosen.limits,
                network=chosen.network,
                user=chosen.user,
                idle_timeout_seconds=UNSET if idle_s is None else idle_s,
                labels={LABEL: _label(task_name)},
            )
        except BaseException:
            with anyio.move_on_after(CLEANUP_S, shield=True):
                await client.close()
            raise
        return {"default": cls(task_name, client, session)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """End the session of a sample."""
        for each in environments.values():
            await each.as_type(cls)._close(is_end=True)

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        """End what a sample has left, or with `--no-sandbox-cleanup` leave it, and say how it is reached and ended."""
        for each in [each for each in cls._open.values() if each._task_name == task_name]:
            await each._close(is_end=cleanup)
            if not cleanup:
                name = each.session.id
                print(f"sandbox kept: `sandkasten shell {name}`; `inspect sandbox cleanup sandkasten {name}` ends it")

    async def _close(self, *, is_end: bool) -> None:
        self._open.pop(self.session.id, None)
        try:
            with anyio.move_on_after(CLEANUP_S, shield=True):
                if is_end:
                    await self.session.destroy()
        except errors.SandkastenError as error:
            log.warning("session %s was not ended: %s", self.session.id, error)
        finally:
            with anyio.move_on_after(CLEANUP_S, shield=True):
                await self._client.close()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """End the session of that id, or all that evaluations have left."""
        async with await anyio.to_thread.run_sync(SandboxClient.from_env) as client:
            async for each in client.sessions(label=LABEL):
                if id in (None, each.id):
                    await (await client.get_session(each.id)).destroy()
                    print(f"ended {each.id} of {each.labels[LABEL]!a}")  # anybody may have set the label

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the configuration that a log has."""
        return SandkastenSandboxConfig(**config)

    def default_polling_interval(self) -> float:
        """Return the seconds between two looks of inspect's services into the sandbox."""
        return 0.2

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Return the command by which a person gets a terminal. Raises `ConnectionError` if the session has ended."""
        try:
            status = (await self.session.info()).status
        except errors.SandkastenError as error:
            raise ConnectionError(str(error)) from error
        if status not in ("running", "paused"):
            raise ConnectionError(f"the session is {status}")
        as_user = f" --user {user}" if user else ""
        return SandboxConnection(type="sandkasten", command=f"sandkasten shell{as_user} {self.session.id}")

    # Commands ---------------------------------------------------------------------------------------------------------

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a program.

        A command that is out of time is not repeated, whatever `timeout_retry` says: here no time is lost on the way.
        The server has a maximum, which holds without a `timeout`, too.
        """
        options: dict[str, Any] = {"timeout_ms": 1000 * (timeout or 0), "cwd": cwd, "env": env, "user": user}
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        end: ExecBytes | RunEnd
        try:
            with _unavailable():
                if input is None or (isinstance(input, str) and len(input) <= _INLINE_CHARS):
                    result = await self.session.exec_bytes(cmd, stdin=input, on_timeout="result", **options)
                    end, outputs = result, await self._outputs(result, limit)
                else:
                    data = input.encode() if isinstance(input, str) else input
                    end, outputs = await self._with_input(cmd, data, limit, options)
        except errors.ClientError as error:
            if "user" in error.details:
                raise SandboxUserUnsupportedError(str(error)) from error
            return ExecResult(False, _CANT_EXECUTE, "", str(error))
        if end.timed_out:
            raise TimeoutError(f"the command was out of time after {end.duration_ms / 1000:.1f} s")
        stdout, stderr = (each.decode("utf-8", "replace") for each in outputs)
        if end.exit_code == _CANT_EXECUTE and re.match(r"sandkasten: .*: Permission denied\n\Z", stderr, re.DOTALL):
            raise PermissionError(stderr.strip())
        for text, data in zip((stdout, stderr), outputs, strict=True):
            if len(data) > limit:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, text[:limit])
        if end.cause not in ("exited", "signalled"):
            stderr += f"\n[{end.cause}]\n"
        return ExecResult(end.exit_code == 0, end.exit_code, stdout, stderr)

    async def _outputs(self, result: ExecBytes, limit: int) -> tuple[bytes, bytes]:
        """Return both streams, a byte more than the limit of one that has more."""
        if not result.truncated:
            return result.stdout, result.stderr
        run = self.session.run(result.exec_id)
        try:
            stdout = await run.kept_output("stdout", max_bytes=limit + 1)
            return stdout, await run.kept_output("stderr", max_bytes=limit + 1)
        except (errors.ExecGone, errors.ExecNotFound) as error:  # more than the server keeps
            text = result.stdout.decode("utf-8", "replace")
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, text) from error

    async def _with_input(
        self, cmd: list[str], data: bytes, limit: int, options: dict[str, Any]
    ) -> tuple[RunEnd, tuple[bytes, bytes]]:
        """Run a program while its input is sent and its output read, so that neither waits for the other."""
        found = {"stdout": bytearray(), "stderr": bytearray()}
        failures: list[errors.SandkastenError] = []  # not through the group, which would wrap them
        async with self.session.start(cmd, stdin=True, raw=True, **options) as run, anyio.create_task_group() as group:

            async def feed() -> None:
                try:
                    await _feed(run, data)
                except errors.SandkastenError as error:
                    failures.append(error)
                    group.cancel_scope.cancel()

            group.start_soon(feed)
            try:
                async for output in run:
                    kept = found[output.stream]
                    kept += bytes(cast("bytes", output.data))[: limit + 1 - len(kept)]
            except errors.SandkastenError as error:
                failures.append(error)
            group.cancel_scope.cancel()
        if run.end is None:
            raise failures[0]
        return run.end, (bytes(found["stdout"]), bytes(found["stderr"]))

    # Files ------------------------------------------------------------------------------------------------------------

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, replaced in one step; missing directories are made."""
        with _file_errors():
            await self.session.files.write(file, contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Return the content of a file, text as it is, with its line ends."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        data = bytearray()
        with _file_errors():
            async with self.session.files.open(file) as stream:
                async for piece in stream:
                    data += piece
                    if max(len(data), stream.size or 0) > limit:
                        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode("utf-8") if text else bytes(data)


async def _feed(run: Run, data: bytes) -> None:
    """Send all input. What the program does not take before it ends is dropped."""
    try:
        if data:
            await run.send(data)
        await run.close_input()
    except (errors.ExecEnded, errors.ExecGone):
        pass


def _label(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:63].strip("-") or "task"


@contextmanager
def _unavailable() -> Iterator[None]:
    """Tell failures of the sandbox itself from those of the command."""
    try:
        yield
    except (TimeoutError, errors.DiskFull):
        raise
    except _GONE as error:
        raise SandboxUnavailableError(str(error)) from error


@contextmanager
def _file_errors() -> Iterator[None]:
    try:
        with _unavailable():
            yield
    except (errors.FileNotFound, errors.NotADirectory) as error:
        raise FileNotFoundError(str(error)) from error
    except errors.IsADirectory as error:
        raise IsADirectoryError(str(error)) from error
    except errors.DiskFull as error:
        raise OSError(errno.ENOSPC, str(error)) from error
    except (errors.PermissionDenied, errors.PathOutside, errors.NotAFile) as error:
        raise PermissionError(str(error)) from error
