"""The client: sessions, workspaces, events and the node of one server."""

# Made from sandkasten/sdk/client.py by tests/sdk/twin.py, not to be edited.
from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from sandkasten import errors
from sandkasten.contexts import choose_server
from sandkasten.sdk.types import (
    UNSET,
    ImageInfo,
    JobInfo,
    NodeInfo,
    PrunedImages,
    SecretInfo,
    SessionInfo,
    SystemInfo,
    UnpackedArchive,
    Unset,
    WorkspaceInfo,
)
from sandkasten.sdk.wire import HttpCall, call, given, key_id_of, new_id, part, set_values
from sandkasten.sync import waiting
from sandkasten.sync.files import Files, FileStream, Progress, Source, send_content
from sandkasten.sync.run import CANCEL_S, may_go_on
from sandkasten.sync.session import Session
from sandkasten.sync.streams import Events, JobEvents
from sandkasten.sync.transport import Endpoint, HasTransport, Transport

DEFAULT_URL = "http://localhost:8080"


class Workspace:
    """A named directory that outlives sessions, with its files, which need no session."""

    def __init__(self, client: HasTransport, workspace_id: str) -> None:
        """Internal: use `SandboxClient.workspace`."""
        self._id = workspace_id
        self._endpoint = Endpoint(client._transport, f"/v1/workspaces/{part(workspace_id)}")

    @property
    def id(self) -> str:
        """The id of the workspace."""
        return self._id

    @property
    def files(self) -> Files:
        """The files; `/` is the workspace. Writing makes the workspace."""
        return Files(self._endpoint)

    def info(self, *, usage: bool = False) -> WorkspaceInfo:
        """Return the workspace; with `usage` its files are counted. Raises `WorkspaceNotFound`."""
        return WorkspaceInfo.take(self._endpoint.ask("GET", "", query=given(usage=usage or None)))

    def create(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        quota_bytes: int | None = None,
        quota_files: int | None = None,
    ) -> WorkspaceInfo:
        """Make the workspace, or give one that is there these labels and this size."""
        body = given(labels=None if labels is None else dict(labels), quota_bytes=quota_bytes, quota_files=quota_files)
        return WorkspaceInfo.take(self._endpoint.ask("PUT", "", body))

    def delete(self, *, force: bool = False) -> None:
        """Remove the workspace with its files; `force` ends sessions that use it. Raises `WorkspaceBusy`."""
        self._endpoint.ask("DELETE", "", query=given(force=force or None))

    def export(self, *, format: Literal["tar", "tar.zst"] = "tar.zst") -> FileStream:
        """Return the whole workspace as an archive, to be read in pieces."""
        request = self._endpoint.call("GET", "/export", query={"format": format}, patience_s=None, is_transfer=True)
        return FileStream(self._endpoint.transport, request)

    def import_archive(
        self, archive: Source, *, replace: bool = False, progress: Progress | None = None
    ) -> UnpackedArchive:
        """Make the workspace of an archive (tar or tar.zst), whole or not at all; `replace` one that is there."""
        headers = {"content-type": "application/x-tar"}
        query = given(replace=replace or None)
        request = self._endpoint.call(
            "POST", "/import", query=query, headers=headers, patience_s=None, is_transfer=True, repeat=replace
        )
        return UnpackedArchive.take((self.files._upload(request, archive, progress)).value)


class SandboxClient:
    """Client of one server. `sandkasten.SandboxClient` is for asyncio and trio, `sandkasten.sync.SandboxClient` blocks.

    `with SandboxClient(base_url=..., api_key=...) as client:` closes the connections at the end of the block.
    A client may be used by any number of tasks of one event loop, or of threads.
    """

    def __init__(
        self,
        *,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        timeout: float | None = 120.0,
        use_proxy: bool = True,
    ) -> None:
        """Make a client; nothing is connected yet.

        Args:
            base_url: `http://HOST:PORT`, `https://HOST`, or `unix:/PATH` of a socket.
            api_key: the server's key, if it has one.
            timeout: seconds that a call may take, repetitions included, beside the time of the command itself;
                of uploads and streams the time without progress. None is no limit.
            use_proxy: connect through the proxy that the environment names (`http_proxy`, `no_proxy`), if it names one.
        """
        self._transport = Transport(base_url, api_key, timeout, use_proxy=use_proxy)
        self._key_id = key_id_of(api_key)
        self._endpoint = Endpoint(self._transport, "")

    @classmethod
    def from_env(cls, *, timeout: float | None = 120.0) -> Self:
        """Return a client of the server that the environment names (`SANDKASTEN_URL`, `SANDKASTEN_API_KEY`), else of
        the one that the command line speaks to: a context's, or this machine's. A context's command for the key is run,
        and waited for, for two minutes at most: an event loop calls this in a thread.

        Raises:
            ConfigError: there is none, or its key can't be had.
        """
        server = choose_server(os.environ)
        return cls(base_url=server.url, api_key=server.api_key, timeout=timeout)

    @property
    def base_url(self) -> str:
        """The server's URL."""
        return self._transport.base_url

    @property
    def key_id(self) -> str:
        """The id of the API key, which is no secret: `SessionInfo.key_id` of what this client made."""
        return self._key_id

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Sessions ---------------------------------------------------------------------------------------------------------

    def create_session(
        self,
        *,
        image: str | None = "python",
        ttl_seconds: int | None = None,
        workspace_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str | Mapping[str, str]] | None = None,
        limits: Mapping[str, float] | None = None,
        idle_timeout_seconds: float | Unset | None = UNSET,
        max_lifetime_seconds: float | Unset | None = UNSET,
        workspace_mode: Literal["shared", "exclusive"] | None = None,
        readonly_rootfs: bool | None = None,
        shell: Literal["bash", "sh"] | None = None,
        exec_mode: Literal["stateful", "stateless"] | None = None,
        streams: Literal["separate", "merged"] | None = None,
        stop_grace_ms: int | None = None,
        at_end: Literal["destroy", "pause"] | None = None,
        seccomp: str | None = None,
        user: str | None = None,
        account: str | None = None,
        root_inside: bool | None = None,
        filesystem: Mapping[str, Sequence[str]] | None = None,
        network: str | Mapping[str, Any] | None = None,
        publish: Sequence[int | Mapping[str, Any]] | None = None,
        idempotency_key: str | None = None,
    ) -> Session:
        """Make a session. docs/api.md#sessions explains the fields.

        None is the server's default; of `idle_timeout_seconds` and `max_lifetime_seconds` it is no limit. A value in
        `env` may be `{"secret": NAME}`, for a secret that `network` names: the variable holds what stands for it.
        `publish` is of ports inside, or of objects with `port` and `host_port`; `Session.info().published` has where
        on the server's machine they are reached.

        The call is repeated when the connection is lost or the node has no room, for the client's timeout, and makes
        one session. With an `idempotency_key` of the caller's, a later call gets the same session. When the caller is
        cancelled, the session that was being made is ended, unless the key is the caller's.

        Raises:
            InvalidImage, InvalidRequest, WorkspaceBusy: as the names say.
            PreviewsOff, Conflict: the node publishes no ports, or one that is wanted is taken.
            Capacity, QuotaExceeded: no room, still, at the end of the client's timeout.
        """
        body = given(
            image=image,
            ttl_seconds=ttl_seconds,
            workspace_id=workspace_id,
            labels=None if labels is None else dict(labels),
            env=None if env is None else dict(env),
            limits=None if limits is None else dict(limits),
            workspace_mode=workspace_mode,
            readonly_rootfs=readonly_rootfs,
            shell=shell,
            exec_mode=exec_mode,
            streams=streams,
            stop_grace_ms=stop_grace_ms,
            at_end=at_end,
            seccomp=seccomp,
            user=user,
            account=account,
            root_inside=root_inside,
            filesystem=None if filesystem is None else {name: list(each) for name, each in filesystem.items()},
            network=dict(network) if isinstance(network, Mapping) else network,
            publish=[{"port": each} if isinstance(each, int) else dict(each) for each in publish or ()] or None,
        )
        body |= set_values(idle_timeout_seconds=idle_timeout_seconds, max_lifetime_seconds=max_lifetime_seconds)
        headers = {"idempotency-key": idempotency_key or new_id()}
        request = call("POST", "/v1/sessions", body, headers=headers)
        try:
            return Session(self, (self._transport.send(request)).value["id"])
        except BaseException as error:
            if idempotency_key is None and may_go_on(error):
                self._take_back(request)
            raise

    def _take_back(self, request: HttpCall) -> None:
        """End the session that a create may have made whose caller has given up: the same request names it."""
        with waiting.shield(2 * CANCEL_S):
            try:
                made = (self._transport.send(request, within_s=CANCEL_S)).value
                Session(self, made["id"])._abandon()
            except errors.SandkastenError:
                pass  # there is none, or it ends by its lease

    def get_session(self, session_id: str) -> Session:
        """Return a session by its id. Raises `SessionNotFound`."""
        self._endpoint.ask("GET", f"/v1/sessions/{part(session_id)}")
        return Session(self, session_id)

    def session(self, session_id: str) -> Session:
        """Return the session of that id. Nothing is asked of the server before it is used."""
        return Session(self, session_id)

    def list_sessions(self) -> list[SessionInfo]:
        """Return all live sessions, newest first."""
        return [each for each in self.sessions()]

    def sessions(self, *, label: str | Sequence[str] = (), status: str | None = None) -> Iterator[SessionInfo]:
        """Yield live sessions page by page, newest first.

        Args:
            label: `NAME=VALUE` or `NAME`; of several, all must match.
            status: one status, or `all`.
        """
        labels = [label] if isinstance(label, str) else list(label)
        cursor = None
        while True:
            query = [("label", each) for each in labels] + [("status", status), ("cursor", cursor)]
            answer = self._transport.send(call("GET", "/v1/sessions", query=query))
            for each in answer.value:
                yield SessionInfo.take(each)
            if not (cursor := answer.headers.get("x-next-cursor")):
                return

    # Workspaces -------------------------------------------------------------------------------------------------------

    def list_workspaces(self, *, label: str | None = None, usage: bool = False) -> list[WorkspaceInfo]:
        """Return all workspaces, by id; `label` is `NAME=VALUE`."""
        query = given(label=label, usage=usage or None)
        found: list[WorkspaceInfo] = []
        while True:
            answer = self._endpoint.ask("GET", "/v1/workspaces", query=query)
            found += [WorkspaceInfo.take(each) for each in answer["workspaces"]]
            if not (cursor := answer.get("next_cursor")):
                return found
            query["cursor"] = cursor

    def workspace(self, workspace_id: str) -> Workspace:
        """Return the workspace of that id. Nothing is asked of the server before it is used."""
        return Workspace(self, workspace_id)

    def delete_workspace(self, workspace_id: str, *, force: bool = False) -> None:
        """Remove a workspace with its files; `force` ends sessions that use it. Raises `WorkspaceBusy`."""
        self.workspace(workspace_id).delete(force=force)

    # The node ---------------------------------------------------------------------------------------------------------

    def images(self) -> list[ImageInfo]:
        """Return the images from which sessions can be made, by their names alone."""
        return [ImageInfo(name) for name in (self.node()).images]

    def list_images(self, *, label: str | Sequence[str] = ()) -> list[ImageInfo]:
        """Return the images, by name; a key that is no administrator's sees those that sessions may have.

        Args:
            label: `NAME=VALUE` or `NAME`, of the image's configuration; of several, all must match.
        """
        labels = [label] if isinstance(label, str) else list(label)
        found: list[ImageInfo] = []
        cursor = None
        while True:
            query = [("label", each) for each in labels] + [("cursor", cursor)]
            answer = self._transport.send(call("GET", "/v1/images", query=query))
            found += [ImageInfo.take(each) for each in answer.value["images"]]
            if not (cursor := answer.value.get("next_cursor")):
                return found

    def get_image(self, name: str) -> ImageInfo:
        """Return an image by its name, a reference such as `debian:trixie`, or an alias. Raises `InvalidImage`."""
        return ImageInfo.take(self._endpoint.ask("GET", f"/v1/images/{part(name)}"))

    def delete_image(self, name: str) -> None:
        """Delete an image, with the layers that no other has. Needs an administrator's key.

        Raises:
            ImageInUse: sessions or pools name it, which `details` has.
            InvalidImage: there is none of that name, or it is none of layers.
        """
        self._endpoint.ask("DELETE", f"/v1/images/{part(name)}")

    def prune_images(self, *, older_than_s: int | None = None, dry_run: bool = False) -> PrunedImages:
        """Remove the layers that no image and no session has, and broken downloads. Needs an administrator's key.

        Args:
            older_than_s: those that nobody has had for so long; by default an hour.
            dry_run: say what would be removed.
        """
        body = given(older_than_s=older_than_s, dry_run=dry_run or None)
        return PrunedImages.take(self._endpoint.ask("POST", "/v1/images/prune", body))

    def events(self, *, cursor: str | None = None, types: Sequence[str] = (), follow: bool = True) -> Events:
        """Return the events of all sessions.

        Args:
            cursor: begin behind this event; `0` is the oldest kept one. By default the next that happens is the first.
            types: only events of these types, such as `exec.ended`.
            follow: go on with what happens; else the events end with those that had happened at their beginning.
        """
        return Events(self._endpoint.below("/v1/events"), cursor, types, follow=follow)

    def node(self) -> NodeInfo:
        """Return the node: its state, capacity, images and sessions."""
        return NodeInfo.take(self._endpoint.ask("GET", "/v1/node"))

    def drain(self) -> NodeInfo:
        """Stop making sessions; live ones go on. Needs an administrator's key."""
        return NodeInfo.take(self._endpoint.ask("POST", "/v1/node/drain"))

    def undrain(self) -> NodeInfo:
        """Make sessions again."""
        return NodeInfo.take(self._endpoint.ask("POST", "/v1/node/undrain"))

    def system(self) -> SystemInfo:
        """Return what is installed and in force."""
        return SystemInfo.take(self._endpoint.ask("GET", "/v1/system"))

    def pools(self) -> list[dict[str, Any]]:  # JSON values
        """Return the session pools, as docs/api.md describes them."""
        return list(self._endpoint.ask("GET", "/v1/pools"))

    def keys(self) -> list[dict[str, Any]]:  # JSON values
        """Return the API keys with quota and use, and no part of a secret. Needs an administrator's key."""
        return list((self._endpoint.ask("GET", "/v1/keys"))["keys"])

    def pull_image(
        self,
        reference: str,
        *,
        name: str | None = None,
        platform: str | None = None,
        replace: bool = False,
        auth: tuple[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> JobInfo:
        """Begin to pull an image from a registry; follow the job with `follow_job`. Needs an administrator's key.

        Args:
            reference: such as `debian:bookworm` or `ghcr.io/owner/image@sha256:...`.
            name: the image's name on the server; by default the last part of the reference.
            platform: `OS/ARCHITECTURE` or `OS/ARCHITECTURE/VARIANT`; by default the server's.
            replace: take the place of an image of that name.
            auth: name and password for the registry, which the server does not keep.
            idempotency_key: with the same key the same pull is begun once.
        """
        body = given(reference=reference, name=name, platform=platform, replace=replace or None)
        if auth is not None:
            body["auth"] = {"username": auth[0], "password": auth[1]}
        headers = {"idempotency-key": idempotency_key or new_id()}
        begun = self._endpoint.ask("POST", "/v1/images/pull", body, headers=headers, repeat=True)
        return self.job(begun["job_id"])

    def import_image(
        self,
        archive: Source,
        name: str,
        *,
        ref: str | None = None,
        platform: str | None = None,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> JobInfo:
        """Send an archive, and begin to import it; follow the job with `follow_job`. Needs an administrator's key.

        Args:
            archive: of `docker save`, of an OCI layout, or of a root file system.
            name: the image's name on the server.
            ref: which image of an archive of several.
            platform: `OS/ARCHITECTURE` or `OS/ARCHITECTURE/VARIANT`; by default the server's.
            replace: take the place of an image of that name.
            progress: told the bytes that were sent, and their number if it is known.
        """
        query = given(name=name, ref=ref, platform=platform, replace=replace or None)
        request = self._endpoint.call("POST", "/v1/images/import", query=query, patience_s=None, is_transfer=True)
        begun = (send_content(self._endpoint.transport, request, archive, progress)).value
        return self.job(begun["job_id"])

    def export_image(self, name: str, *, compression: Literal["gzip", "zstd", "none"] = "gzip") -> FileStream:
        """Return an image as the tar of an OCI layout, to be read in pieces. Needs an administrator's key.

        Raises:
            InvalidImage: there is none of that name, or it is none of layers.
        """
        path, query = f"/v1/images/{part(name)}/export", {"compression": compression}
        request = self._endpoint.call("GET", path, query=query, patience_s=None, is_transfer=True)
        return FileStream(self._endpoint.transport, request)

    def jobs(self, *, limit: int = 100) -> list[JobInfo]:
        """Return the jobs, newest first. Needs an administrator's key."""
        found = self._endpoint.ask("GET", "/v1/jobs", query={"limit": limit})
        return [JobInfo.take(each) for each in found["jobs"]]

    def job(self, job_id: str) -> JobInfo:
        """Return a job. Raises `JobNotFound`."""
        return JobInfo.take(self._endpoint.ask("GET", f"/v1/jobs/{part(job_id)}"))

    def follow_job(self, job_id: str) -> JobEvents:
        """Return the job at each change, a few times a second, up to its end: `for job in ...`."""
        return JobEvents(self._endpoint.below(f"/v1/jobs/{part(job_id)}"))

    def cancel_job(self, job_id: str) -> JobInfo:
        """End a job, and return it as it ended. Raises `JobNotFound`."""
        return JobInfo.take(self._endpoint.ask("DELETE", f"/v1/jobs/{part(job_id)}"))

    def put_secret(self, name: str, value: str, hosts: Sequence[str], *, placeholder: str | None = None) -> SecretInfo:
        """Keep a secret on the server, in place of one of that name: sessions that name it use the value at these
        hosts, and see what stands for it. Needs an administrator's key.

        Raises:
            InvalidRequest: a field can't be that of a secret.
            SecretsOff: the server keeps none.
        """
        body = given(name=name, value=value, hosts=list(hosts), placeholder=placeholder)
        return SecretInfo.take(self._endpoint.ask("POST", "/v1/secrets", body))

    def secrets(self) -> list[SecretInfo]:
        """Return the secrets without their values. Needs an administrator's key."""
        return [SecretInfo.take(each) for each in (self._endpoint.ask("GET", "/v1/secrets"))["secrets"]]

    def delete_secret(self, name: str) -> None:
        """Forget a secret; connections that may use it end. Raises `SecretNotFound`."""
        self._endpoint.ask("DELETE", f"/v1/secrets/{part(name)}")

    def healthz(self) -> bool:
        """Return whether the server answers."""
        return bool((self._endpoint.ask("GET", "/healthz"))["status"] == "ok")
