"""A session: commands, runs, shells, files and what the session itself can do."""

# Made from sandkasten/sdk/session.py by tests/sdk/twin.py, not to be edited.
from __future__ import annotations

import base64
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

from sandkasten import errors
from sandkasten.sdk.types import (
    UNSET,
    EgressPage,
    ExecBytes,
    ExecChunk,
    ExecResult,
    ImageInfo,
    NetworkInfo,
    Port,
    Preview,
    ReadResult,
    RunInfo,
    SessionInfo,
    SessionStats,
    ShellInfo,
    Unset,
)
from sandkasten.sdk.wire import (
    Decoder,
    command,
    exec_bytes,
    exec_patience_s,
    exec_result,
    given,
    new_id,
    part,
    set_values,
)
from sandkasten.sync import waiting
from sandkasten.sync.channels import RunLink, without_id
from sandkasten.sync.files import Files, Progress
from sandkasten.sync.run import CANCEL_S, Run, give_up, may_go_on
from sandkasten.sync.streams import Events
from sandkasten.sync.terminal import Terminal
from sandkasten.sync.transport import Endpoint, HasTransport

log = logging.getLogger("sandkasten.sdk")

DEFAULT_TIMEOUT_MS = 30_000


class Session:
    """A session with a persistent shell and files.

    `with client.create_session() as session:` ends the session at the end of the block. Paths may be
    relative to `/workspace`. Every method may raise the errors of `sandkasten.errors`; those named below are special.
    """

    def __init__(self, client: HasTransport, session_id: str) -> None:
        """Internal: use `SandboxClient.create_session` or `SandboxClient.get_session`."""
        self._client = client
        self._id = session_id
        self._endpoint = Endpoint(client._transport, f"/v1/sessions/{part(session_id)}")
        self._link = RunLink.of(self._endpoint)

    @property
    def id(self) -> str:
        """The id of the session."""
        return self._id

    @property
    def files(self) -> Files:
        """The files of the session, of any size."""
        return Files(self._endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.destroy()
        except errors.SandkastenError as failure:
            if error is None:
                raise
            log.warning("session %s was not ended: %s", self._id, failure)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """End the session within a bounded time, for a caller that is cancelled."""
        with waiting.shield(CANCEL_S):
            try:
                self._endpoint.transport.send(self._endpoint.call("DELETE"), within_s=CANCEL_S)
            except errors.SandkastenError as failure:
                log.warning("session %s was not ended: %s", self._id, failure)

    # Commands ---------------------------------------------------------------------------------------------------------

    def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_ms: int | None = DEFAULT_TIMEOUT_MS,
        raw_output: bool = False,
        separate: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        shell: str | None = None,
        stateless: bool | None = None,
        user: str | None = None,
        on_timeout: Literal["error", "result"] = "error",
        queue_timeout_ms: int | None = None,
        exec_id: str | None = None,
    ) -> ExecResult:
        """Run a command and return its result.

        Args:
            cmd: a script for the session's persistent shell, or a program with its arguments (a list).
            timeout_ms: the command's time; 0 is the server's maximum, None is no limit, where the server allows it.
            raw_output: keep escape sequences and CRLF in the output.
            separate: also fill `stdout` and `stderr` of the result.
            cwd, env, stdin: for this command alone.
            shell: a persistent shell of this name (`Session.shell` opens one).
            stateless: run the script in a fresh shell beside the persistent ones.
            user: the user of a program or a stateless script, such as `root`.
            on_timeout: raise `errors.CommandTimeout`, or return a result that says `timed_out`.
            queue_timeout_ms: the longest wait for the shell, then `errors.ShellBusy`; by default the command's time.
            exec_id: an id of the caller's; a later call with the same id and command joins the run.

        The call is repeated when the connection is lost, and the command runs once. When the caller gives up (is
        cancelled, or its time is over), the command is cancelled.

        Raises:
            CommandTimeout: the command ran out of time; `details` has its output until then.
        """
        fields = {"output_fields": ["output", "stdout", "stderr"]} if separate else {}
        body = (
            fields
            | _options(cwd, env, shell, stateless, user)
            | given(
                raw_output=raw_output or None, stdin=stdin, on_timeout=on_timeout, queue_timeout_ms=queue_timeout_ms
            )
        )
        return exec_result(self._execute(cmd, timeout_ms, body, exec_id))

    def exec_bytes(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_ms: int | None = DEFAULT_TIMEOUT_MS,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        shell: str | None = None,
        stateless: bool | None = None,
        user: str | None = None,
        on_timeout: Literal["error", "result"] = "error",
        exec_id: str | None = None,
    ) -> ExecBytes:
        """Run a command and return its output as exact bytes, each stream by itself. Otherwise as `exec`."""
        body = {"output_fields": ["stdout", "stderr"], "encoding": "base64"} | given(stdin=stdin, on_timeout=on_timeout)
        body |= _options(cwd, env, shell, stateless, user)
        return exec_bytes(self._execute(cmd, timeout_ms, body, exec_id))

    def _execute(
        self, cmd: str | Sequence[str], timeout_ms: int | None, options: dict[str, Any], exec_id: str | None
    ) -> dict[str, Any]:  # JSON objects
        patience_s = exec_patience_s(timeout_ms, options.get("queue_timeout_ms"))
        while True:
            chosen = exec_id or (new_id() if self._link.has_ids else None)
            body = command(cmd) | {"timeout_ms": timeout_ms} | options
            body |= {"exec_id": chosen, "on_disconnect": "detach"} if chosen else {}
            try:
                return dict(self._endpoint.ask("POST", "/exec", body, patience_s=patience_s, repeat=chosen is not None))
            except errors.ExecIdsExhausted:
                if exec_id is not None or chosen is None:
                    raise
                self._link.go_on_without_ids()
            except BaseException as error:
                if chosen is not None and may_go_on(error):
                    give_up(self._endpoint, chosen)
                raise

    def exec_stream(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_ms: int | None = DEFAULT_TIMEOUT_MS,
        raw_output: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        shell: str | None = None,
        stateless: bool | None = None,
        user: str | None = None,
        exec_id: str | None = None,
    ) -> Iterator[ExecChunk]:
        """Run a command and yield its output as it comes; the last piece has `done` and the end of the command.

        Arguments as of `exec`. A lost connection is resumed where it broke off. A caller that leaves the loop early
        cancels the command; `with contextlib.closing(...)` around the loop makes that happen at once.

        Raises:
            SandkastenStreamError: the stream ended with an error, such as `CommandTimeout`.
        """
        body = {"timeout_ms": timeout_ms, "on_timeout": "error"} | given(stdin=stdin)
        body |= _options(cwd, env, shell, stateless, user)
        run = self._make_run(cmd, exec_id, body, raw=True, detach=False)
        decoder = Decoder(clean=not raw_output)
        with run:
            while (piece := run._next_piece()) is not None:
                if (output := decoder.feed(piece.stream, piece.data, piece.seq)) is not None:
                    yield ExecChunk(str(output.data), piece.timestamp, stream=output.stream)
            for output in decoder.rest():
                yield ExecChunk(str(output.data), int(time.time() * 1000), stream=output.stream)
            end = run.wait()
            yield ExecChunk("", 0, True, end.exit_code, end.cwd, end.duration_ms, end=end)

    def _make_run(
        self, cmd: str | Sequence[str], exec_id: str | None, options: dict[str, Any], *, raw: bool, detach: bool
    ) -> Run:
        body = command(cmd) | options
        if exec_id is None and not self._link.has_ids:
            return Run(self._link, "", begin=without_id(body), raw=raw, detach=detach)
        chosen = exec_id or new_id()
        begin = body | {"exec_id": chosen, "on_disconnect": "detach"}
        return Run(self._link, chosen, begin=begin, has_own_id=exec_id is None, raw=raw, detach=detach)

    # Runs -------------------------------------------------------------------------------------------------------------

    def start(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_ms: int | None = 0,
        stdin: bool | str = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        shell: str | None = None,
        stateless: bool | None = None,
        user: str | None = None,
        tty: tuple[int, int] | None = None,
        merged: bool | None = None,
        raw: bool = False,
        detach: bool = False,
        exec_id: str | None = None,
    ) -> Run:
        """Return a command that begins with `with` or the first piece of output that is asked for.

        Both return once the server has the command, which may then wait for its shell.

        Args:
            timeout_ms: the command's time; 0 is the server's maximum.
            stdin: input of the command; True keeps it open for `Run.send`.
            tty: columns and rows of a terminal for the command.
            merged: both streams are one pipe, in exact order.
            raw: output is bytes, not text.
            detach: the command goes on when the block is left.

        The other arguments are those of `exec`. For what has no limit in time, see `process`.
        """
        options = {"timeout_ms": timeout_ms, "on_timeout": "result"} | _options(cwd, env, shell, stateless, user)
        options |= given(stdin=stdin or None, tty=_size(tty), streams=_streams(merged))
        return self._make_run(cmd, exec_id, options, raw=raw, detach=detach)

    def process(
        self,
        cmd: str | Sequence[str] | None = None,
        *,
        process_id: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        tty: tuple[int, int] | None = None,
        merged: bool | None = None,
        keep_alive: bool = False,
        raw: bool = False,
        timeout_ms: int | None = None,
        stdin: bool = True,
    ) -> Run:
        """Start a process in the background, beside the shells, and return its run.

        Without `cmd` the process is the command that the session's image has. Its input is open, or with `stdin=False`
        empty. It ends with the session, by `Run.cancel`, or after `timeout_ms`, None for never; `keep_alive` makes it
        hold off the session's idle timeout. Used in `with`, the process goes on when the block is left.
        """
        chosen = process_id or new_id()
        body = (
            ({} if cmd is None else command(cmd))
            | {"process_id": chosen, "keep_alive": keep_alive}
            | given(
                cwd=cwd,
                env=None if env is None else dict(env),
                user=user,
                tty=_size(tty),
                streams=_streams(merged),
                timeout_ms=timeout_ms,
                stdin=None if stdin else False,
            )
        )
        try:
            self._endpoint.ask("POST", "/processes", body)
        except BaseException as error:
            if may_go_on(error):
                give_up(self._endpoint, chosen)
            raise
        return Run(self._link, chosen, begin=None, raw=raw, detach=True)

    def run(self, exec_id: str, *, raw: bool = False) -> Run:
        """Return the run of that id, whoever began it. Nothing is asked of the server before it is used."""
        return Run(self._link, exec_id, begin=None, raw=raw, detach=True)

    def runs(
        self,
        *,
        kind: Literal["command", "process", "terminal"] | None = None,
        state: Literal["queued", "running", "ended"] | None = None,
        limit: int | None = None,
    ) -> list[RunInfo]:
        """Return the latest runs that are kept, oldest first."""
        query = given(kind=kind, state=state, limit=limit)
        return [RunInfo.take(each) for each in (self._endpoint.ask("GET", "/execs", query=query))["execs"]]

    def processes(
        self, *, state: Literal["queued", "running", "ended"] | None = None, limit: int | None = None
    ) -> list[RunInfo]:
        """Return the latest background processes that are kept, oldest first."""
        answer = self._endpoint.ask("GET", "/processes", query=given(state=state, limit=limit))
        return [RunInfo.take(each) for each in answer["processes"]]

    def ports(self) -> list[Port]:
        """Return the TCP ports on which processes of the session listen."""
        return [Port.take(each) for each in (self._endpoint.ask("GET", "/ports"))["ports"]]

    def shells(self) -> list[ShellInfo]:
        """Return the persistent shells, the default one first."""
        return [ShellInfo.take(each) for each in (self._endpoint.ask("GET", "/shells"))["shells"]]

    def shell(
        self,
        name: str,
        *,
        program: Literal["bash", "sh"] | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> ShellInfo:
        """Open a further persistent shell; commands reach it by `exec(..., shell=name)`.

        Raises:
            Conflict: there is a shell of that name.
            Uncertain: the connection was lost.
        """
        body = given(name=name, shell=program, cwd=cwd, env=None if env is None else dict(env), user=user)
        return ShellInfo.take(self._endpoint.ask("POST", "/shells", body, repeat=False))

    def close_shell(self, name: str) -> None:
        """Close a shell that `shell` opened, with the command that runs in it."""
        self._endpoint.ask("DELETE", f"/shells/{part(name)}")

    def terminal(
        self,
        *,
        cols: int = 80,
        rows: int = 24,
        shell: str | None = None,
        terminal_id: str | None = None,
        read_only: bool = False,
        take_over: bool = False,
        cwd: str | None = None,
        user: str | None = None,
    ) -> Terminal:
        """Return a terminal, opened by `with`: of a new shell, or one more viewer.

        Args:
            shell: view this persistent shell; `take_over` types into it from the start.
            terminal_id: join this open terminal.
            read_only: view without input.
            cwd, user: of a new shell.
        """
        query = given(cols=cols, rows=rows, shell=shell, terminal_id=terminal_id, cwd=cwd, user=user)
        query |= given(read_only=read_only or None, take_over=take_over or None)
        return Terminal(self._endpoint, query)

    # Files, as the published client has them --------------------------------------------------------------------------

    def write(self, path: str, content: str | bytes) -> None:
        """Write a small file, replacing one that is there; missing directories are made. See `files.write`."""
        data = content.encode() if isinstance(content, str) else content
        body = {"path": path, "content_base64": base64.b64encode(data).decode("ascii")}
        self._endpoint.ask("POST", "/fs/write", body)

    def read(self, path: str, *, max_bytes: int | None = None) -> ReadResult:
        """Return the content of a small file, at most `max_bytes` of it (by default 10 MiB). See `files.read_bytes`."""
        answer = self._endpoint.ask("GET", "/fs/read", query={"path": path, "max_bytes": max_bytes})
        return ReadResult(
            base64.b64decode(answer["content_base64"]), answer.get("path", path), bool(answer["truncated"])
        )

    def upload(
        self,
        file: str | Path | BinaryIO,
        *,
        dest_path: str = "/workspace",
        filename: str | None = None,
        progress: Progress | None = None,
    ) -> list[str]:
        """Upload a local file, by its path or as an open file, into a directory. Return the paths of the new files.

        Raises:
            FileNotFoundError: there is no such local file.
            ValueError: an open file without a name needs `filename`.
        """
        if isinstance(file, str | Path):
            file = Path(file)
            if not waiting.in_thread(file.is_file):
                raise FileNotFoundError(f"there is no file {file}")
            name = filename or file.name
        else:
            name = filename or Path(str(getattr(file, "name", "") or "")).name
            if not name:
                raise ValueError("give the filename of an open file that has no name")
        written = self.files.write(f"{dest_path.rstrip('/')}/{Path(name).name}", file, progress=progress)
        return [written.path]

    # The session itself -----------------------------------------------------------------------------------------------

    def info(self) -> SessionInfo:
        """Return the session as the server describes it, also after its end."""
        return SessionInfo.take(self._endpoint.ask("GET", ""))

    def stats(self) -> SessionStats:
        """Return the session's use of resources."""
        return SessionStats.take(self._endpoint.ask("GET", "/stats"))

    def update(
        self,
        *,
        idle_timeout_seconds: float | Unset | None = UNSET,
        max_lifetime_seconds: float | Unset | None = UNSET,
        labels: Mapping[str, str] | Unset = UNSET,
        limits: Mapping[str, float] | Unset = UNSET,
        env: Mapping[str, str | Mapping[str, str] | None] | Unset = UNSET,
        network: str | Mapping[str, Any] | Unset = UNSET,
        if_revision: int | Unset = UNSET,
    ) -> SessionInfo:
        """Change the session: all that is given, or nothing and an error.

        None means never for a time, and removes a variable. `network` is whole, or a mode; `if_revision` refuses the
        change unless the network is at that revision.

        Raises:
            Conflict: the network is at another revision, which `details` has.
        """
        body = set_values(
            idle_timeout_seconds=idle_timeout_seconds,
            max_lifetime_seconds=max_lifetime_seconds,
            labels=labels if isinstance(labels, Unset) else dict(labels),
            limits=limits if isinstance(limits, Unset) else dict(limits),
            env=env if isinstance(env, Unset) else dict(env),
            network=network if isinstance(network, Unset | str) else dict(network),
            if_revision=if_revision,
        )
        return SessionInfo.take(self._endpoint.ask("PATCH", "", body))

    def network(self) -> NetworkInfo:
        """Return the session's network and the counters of its way out."""
        return NetworkInfo.take(self._endpoint.ask("GET", "/network"))

    def add_rules(self, *, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> SessionInfo:
        """Add rules to those of the session's network, as an answer to an event `egress.ask` does; the rest of the
        network stays as it is, also when somebody else changes it meanwhile.

        Raises:
            InvalidRule: one is no rule, or they are too many together.
        """
        while True:
            network = dict(self._endpoint.ask("GET", "/network"))
            revision = network.pop("revision")
            del network["counters"]
            for name, more in (("allow", allow), ("deny", deny)):
                network[name] = list(dict.fromkeys((*network[name], *more)))
            try:
                return self.update(network=network, if_revision=revision)
            except errors.Conflict:
                continue

    def egress_log(
        self,
        *,
        after: str | None = None,
        verdict: Literal["allowed", "denied", "asked"] | None = None,
        host: str | None = None,
        limit: int | None = None,
    ) -> EgressPage:
        """Return what the session reached for behind the cursor `after`, or from the oldest entry that is kept."""
        query = given(after=after, verdict=verdict, host=host, limit=limit)
        return EgressPage.take(self._endpoint.ask("GET", "/egress", query=query))

    def preview(
        self,
        port: int,
        *,
        ttl_seconds: int | None = None,
        access: Literal["token", "public", "local"] | None = None,
        keep_alive: bool = False,
        resume: bool = False,
        host_port: int | None = None,
    ) -> Preview:
        """Open a preview of a port, in place of one that it has: HTTP and WebSockets from outside reach what listens
        there, with the token of the answer, or without one if access is `public`. With `local`, programs on the
        server's machine reach it by plain TCP, on the port `host_port` or any free one.

        Raises:
            PreviewsOff: the node serves none of that kind.
            Conflict: the port of the server's machine is taken.
        """
        asked = {"keep_alive": keep_alive, "resume": resume}
        body = given(port=port, ttl_seconds=ttl_seconds, access=access, host_port=host_port, **asked)
        return Preview.take(self._endpoint.ask("POST", "/previews", body))

    def previews(self) -> list[Preview]:
        """Return the open previews, without their tokens."""
        return [Preview.take(each) for each in (self._endpoint.ask("GET", "/previews"))["previews"]]

    def close_preview(self, port: int) -> None:
        """Close a preview; its token is void from then on. Raises `PreviewNotFound`."""
        self._endpoint.ask("DELETE", f"/previews/{port}")

    def pause(self, *, auto_resume: bool = True, stop_lease: bool = False) -> SessionInfo:
        """Freeze every process of the session.

        With `auto_resume` the next request that needs them resumes the session; `stop_lease` suspends the idle timeout.
        """
        body = {"auto_resume": auto_resume, "stop_lease": stop_lease}
        return SessionInfo.take(self._endpoint.ask("POST", "/pause", body))

    def resume(self) -> SessionInfo:
        """Thaw the processes of a paused session."""
        return SessionInfo.take(self._endpoint.ask("POST", "/resume"))

    def commit(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | None = None,  # JSON values
        replace: bool = False,
        created_by: str | None = None,
        squash: bool = False,
    ) -> ImageInfo:
        """Make an image of what the session has changed above its own. The session stands still for as long as the copy
        takes. Needs an administrator's key.

        Args:
            name: of the new image, NAME or NAME:TAG.
            config: what is other than in the session's image: `env`, `working_dir`, `user`, `entrypoint`, `cmd`,
                `labels`, `exposed_ports`.
            replace: take the place of an image of that name.
            created_by: what the image's history says of the layer.
            squash: make one layer of this and of what earlier commits have added to the image that they began with.

        Raises:
            InvalidImage: the name is taken, or the session's image is the machine's own.
            LayerRefused: the session has what no layer can have.
            Conflict: the session went on, or ended, before all was copied.
        """
        body = given(name=name, config=config, replace=replace or None, created_by=created_by, squash=squash or None)
        made = self._endpoint.ask("POST", "/commit", body, patience_s=None)
        return ImageInfo(made["name"])

    def destroy(self) -> None:
        """End the session. May be repeated."""
        self._link.close()
        self._endpoint.ask("DELETE", "")

    def diagnostics(self) -> dict[str, Any]:  # JSON values
        """Return a diagnosis of the session, as docs/observability.md describes it."""
        return dict(self._endpoint.ask("GET", "/diagnostics"))

    def watch_events(self, *, cursor: str | None = None, types: Sequence[str] = (), follow: bool = True) -> Events:
        """Return the events of the session. Arguments as of `SandboxClient.events`."""
        return Events(self._endpoint.below("/events"), cursor, types, follow=follow)


def _options(
    cwd: str | None, env: Mapping[str, str] | None, shell: str | None, stateless: bool | None, user: str | None
) -> dict[str, Any]:  # JSON values
    """Return the fields that say where and as whom a command runs."""
    mode = None if stateless is None else "stateless" if stateless else "stateful"
    return given(cwd=cwd, env=None if env is None else dict(env), shell=shell, mode=mode, user=user)


def _size(tty: tuple[int, int] | None) -> dict[str, int] | None:
    return None if tty is None else {"cols": tty[0], "rows": tty[1]}


def _streams(merged: bool | None) -> str | None:
    return None if merged is None else "merged" if merged else "separate"
