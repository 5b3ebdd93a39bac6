"""Performance of a Dockerfile: sessions for RUN and COPY, a commit for each, and a last one with the configuration.

What a step makes is an image with a name made of all that the step depends on (`build-cache.…`); a build that comes to
the same name begins from it. So the cache is in the server's store, and `image prune` empties it. A session has one
step and the image below, and ends with the step, whatever happens.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import posixpath
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sandkasten import errors
from sandkasten.building.context import BuildContext, Source, written
from sandkasten.building.dockerfile import (
    SEVERAL,
    BuildError,
    Dockerfile,
    DockerInstruction,
)
from sandkasten.building.ignoring import is_pattern
from sandkasten.building.words import expand, expand_document
from sandkasten.image_names import BUILD_CACHE, NEW_IMAGE
from sandkasten.sdk import waiting

if TYPE_CHECKING:
    from sandkasten.sdk import SandboxClient, Session
    from sandkasten.sdk.types import ImageInfo

_SHELL = ("/bin/sh", "-c")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
_OUTSIDE = ("/proc", "/dev", "/sys", "/tmp", "/run", "/workspace")
"""Directories that no layer has anything of: a session has mounts there."""
_IDLE_S = 600
"""Time after which a session ends whose builder is gone without a word."""
_END_S = 30.0
"""Time for the end of a session, or for the removal of what a build has made for itself."""
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?(?:/(tcp|udp|sctp))?\Z")
_MAX_PORT = 65535
_SIGNALS = 128
_LABEL = "sandkasten.build"
_BUILD = "image build"
"""The history of a layer that is of more than one instruction, or of WORKDIR."""
_MAX_ACCOUNT_BYTES = 1024 * 1024
_NUMBER = re.compile(r"[0-9]{1,5}\Z")
_KEY_DIGITS = 48


@dataclass(frozen=True)
class BuildTerms:
    """Terms of a build beside its Dockerfile. `arguments` are values for ARG. `network` and `limits` are of the
    sessions. `target` is a stage's name or number, by default the last. `has_cache` is whether steps are taken from the
    cache and kept there; with `squash` all steps have one session, and the image one layer more than that below. With
    `debug` the session of a step that failed is left to the person."""

    name: str
    title: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=lambda: {"mode": "none"})
    limits: Mapping[str, float] = field(default_factory=dict)
    target: str = ""
    has_cache: bool = True
    squash: bool = False
    replace: bool = False
    debug: bool = False


class BuildWatch:
    """Listener to a build: `told` gets lines for the person, `written` the output of RUN."""

    def told(self, line: str) -> None:
        """Take a line that tells a person of the build's progress."""

    async def written(self, data: bytes) -> None:
        """Take output of a RUN."""


@dataclass
class _StageState:
    """A stage as far as it is built: the image so far, the key of all that led there, and the configuration."""

    image: str
    key: str
    env: dict[str, str]
    user: str
    working_dir: str
    ports: list[str]
    entrypoint: Sequence[str]
    cmd: Sequence[str]
    has_own_cmd: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    shell: Sequence[str] = _SHELL
    pending: list[str] = field(default_factory=list)
    """Directories of WORKDIR that are to be made with the next step."""

    def lookup(self, name: str) -> str | None:
        if name in self.env:
            return self.env[name]
        return self.arguments.get(name, _PATH if name == "PATH" else None)

    def config(self) -> dict[str, Any]:
        """Return the configuration of an image of this stage, as the request for a commit has it."""
        return {
            "env": self.env,
            "labels": self.labels,
            "user": self.user,
            "working_dir": self.working_dir,
            "entrypoint": list(self.entrypoint),
            "cmd": list(self.cmd),
        } | ({"exposed_ports": self.ports} if self.ports else {})


class Builder:
    """One build of a Dockerfile."""

    def __init__(
        self, client: SandboxClient, dockerfile: Dockerfile, context: BuildContext, terms: BuildTerms, watch: BuildWatch
    ) -> None:
        self._client, self._file, self._context = client, dockerfile, context
        self._terms, self._watch = terms, watch
        self._escape = dockerfile.escape
        self._used: set[str] = set()
        self._images = [self._expanded(each.start, each.image, self._globals().get) for each in dockerfile.stages]
        self._stages = self._needed(self._target())
        self._steps = sum(1 + len(dockerfile.stages[number].steps) for number in self._stages)
        self._step = 0
        self._built: dict[int, _StageState] = {}
        self._own: list[str] = []
        self._salt = "" if terms.has_cache else secrets.token_hex(16)

    # What is built ----------------------------------------------------------------------------------------------------

    def _target(self) -> int:
        stages, target = self._file.stages, self._terms.target
        if not target:
            return len(stages) - 1
        for number, stage in enumerate(stages):
            if target.lower() == stage.name or target == str(number):
                return number
        raise BuildError(f"{self._terms.title}: there is no stage {target!r}")

    def _needed(self, target: int) -> list[int]:
        """Return the numbers of the stages that a stage is made of, in order, with its own."""
        needed, pending = set[int](), [target]
        while pending:
            number = pending.pop()
            needed.add(number)
            stage = self._file.stages[number]
            names = [self._images[number], *(each.flags["from"] for each in stage.steps if "from" in each.flags)]
            pending += [found for name in names if (found := self._stage_of(name, number)) is not None]
        return sorted(needed)

    def _stage_of(self, name: str, before: int) -> int | None:
        """Return the number of the stage before another that a name means; None: an image is meant."""
        for number, stage in enumerate(self._file.stages[:before]):
            if name and name.lower() == stage.name:
                return number
        return int(name) if name.isdecimal() and len(name) < 6 and int(name) < before else None

    def _at(self, line: DockerInstruction) -> str:
        return f"{self._terms.title}:{line.line}"

    def _failure(self, line: DockerInstruction, why: object) -> BuildError:
        return BuildError(f"{self._at(line)}: {why}")

    # The build --------------------------------------------------------------------------------------------------------

    async def build(self) -> ImageInfo:
        """Build the image, and return it.

        Raises:
            BuildError: the Dockerfile asks for what can't be, or a command of it has failed.
            SandkastenError: the server refuses a step; the watch was told which.
        """
        await self._check_name()
        try:
            for number in self._stages:
                with self._telling_place(self._file.stages[number].start):
                    state = await self._begin(number)
                async with self._sessions(state) as sessions:
                    await self._perform(number, state, sessions)
                    if number == self._stages[-1]:
                        made = await sessions.publish(self._terms.name, state)
        finally:
            await self._forget_own()
        for name in sorted(set(self._terms.arguments) - self._used):
            self._watch.told(f"no ARG has taken --build-arg {name}")
        return await self._client.get_image(made)

    async def _check_name(self) -> None:
        """Refuse a name that the image can't have, before the work."""
        name = self._terms.name
        if not NEW_IMAGE.match(name) or name.startswith(BUILD_CACHE):
            raise BuildError(
                f"{name!r} is no name for an image: 1 to 64 letters, digits, '.', '_' and '-', or NAME:TAG"
            )
        if self._terms.replace:
            return
        with contextlib.suppress(errors.InvalidImage):
            found = await self._client.get_image(name)
            if name in (found.name, *found.references):
                raise BuildError(f"there is an image {name!r} already: --replace takes its place")

    async def _forget_own(self) -> None:
        """Remove the images of steps that are for this build alone, within a bounded time."""
        with waiting.shield(_END_S):
            for name in reversed(self._own):
                with contextlib.suppress(errors.SandkastenError):
                    await self._client.delete_image(name)

    @contextlib.contextmanager
    def _telling_place(self, line: DockerInstruction) -> Iterator[None]:
        """Say where the build stood when the server refuses something."""
        try:
            yield
        except errors.SandkastenError:
            self._watch.told(f"{self._at(line)}: {line.shown}")
            raise

    def _tell_step(self, line: DockerInstruction, note: str = "") -> None:
        self._watch.told(f"[{self._step}/{self._steps}] {line.shown}{note}")

    async def _begin(self, number: int) -> _StageState:
        """Return the state of a stage at its FROM."""
        self._step += 1
        stage = self._file.stages[number]
        self._tell_step(stage.start)
        before = self._stage_of(self._images[number], number)
        if before is not None:
            found = self._built[before]
            state = replace(found, arguments={}, env=dict(found.env), labels=dict(found.labels), has_own_cmd=False)
            state.ports, state.pending = list(found.ports), list(found.pending)
        else:
            state = await self._state_of(stage.start, self._images[number])
        return state

    async def _state_of(self, line: DockerInstruction, name: str) -> _StageState:
        """Return the state of a stage that begins with an image of the server."""
        if not name:
            raise self._failure(line, "the image has no name: a variable has no value")
        if name == "scratch":
            raise self._failure(line, "scratch has no system to run anything in: begin with an image")
        try:
            image = await self._client.get_image(name)
        except errors.InvalidImage:
            raise self._failure(line, f"the server has no image {name!r}: `sandkasten image pull` gets it") from None
        if image.kind == "host":
            raise self._failure(line, f"image {name!r} is the server's own /usr, which no image is made of")
        config = image.config
        identity = [each["digest"] for each in image.layers] or [image.name, image.created_at]
        return _StageState(
            image=image.name,
            key=_key("image", identity, config, self._salt),
            env=dict(config["env"]),
            user=config["user"],
            working_dir=config["working_dir"],
            ports=list(config["exposed_ports"]),
            entrypoint=config["entrypoint"],
            cmd=config["cmd"],
        )

    def _globals(self) -> dict[str, str]:
        """Return the ARGs before the first FROM."""
        found: dict[str, str] = {}
        for line in self._file.arguments:
            self._take_arguments(line, found, found.get, {})
        return found

    def _take_arguments(
        self,
        line: DockerInstruction,
        into: dict[str, str],
        lookup: Callable[[str], str | None],
        outer: Mapping[str, str],
    ) -> None:
        for name, value in line.pairs:
            if name in self._terms.arguments:
                self._used.add(name)
                into[name] = self._terms.arguments[name]
            elif value is not None:
                into[name] = self._expanded(line, value, lookup)
            elif name in outer:
                into[name] = outer[name]

    def _expanded(self, line: DockerInstruction, text: str, lookup: Callable[[str], str | None]) -> str:
        try:
            return expand(text, lookup, self._escape)
        except ValueError as error:
            raise self._failure(line, error) from None

    def _document(self, line: DockerInstruction, content: str, state: _StageState) -> str:
        try:
            return expand_document(content, state.lookup, self._escape)
        except ValueError as error:
            raise self._failure(line, error) from None

    async def _perform(self, number: int, state: _StageState, sessions: _Sessions) -> None:
        for line in self._file.stages[number].steps:
            self._step += 1
            with self._telling_place(line):
                if line.name == "RUN":
                    await self._run(line, state, sessions)
                elif line.name == "COPY":
                    await self._copy(line, number, state, sessions)
                else:
                    self._tell_step(line)
                    self._configure(line, state)
        self._built[number] = state
        if number != self._stages[-1] and self._terms.squash:
            state.image = await sessions.keep(_key("stage", state.key, secrets.token_hex(16)), state, _BUILD)

    def _configure(self, line: DockerInstruction, state: _StageState) -> None:
        """Perform an instruction that changes the configuration alone."""

        def words() -> list[str]:
            return [self._expanded(line, each, state.lookup) for each in line.words]

        match line.name:
            case "ARG":
                self._take_arguments(line, state.arguments, state.lookup, self._globals())
            case "ENV" | "LABEL":
                made = {
                    self._expanded(line, name, state.lookup): self._expanded(line, value or "", state.lookup)
                    for name, value in line.pairs
                }
                (state.env if line.name == "ENV" else state.labels).update(made)
            case "USER":
                state.user = self._expanded(line, line.text, state.lookup)
            case "WORKDIR":
                path = self._expanded(line, line.text, state.lookup)
                state.working_dir = _normal(posixpath.join("/", state.working_dir, path))
                state.pending.append(state.working_dir)
            case "EXPOSE":
                try:
                    state.ports = sorted({*state.ports, *(port for each in words() for port in _ports(each))})
                except ValueError as error:
                    raise self._failure(line, error) from None
            case "SHELL":
                state.shell = tuple(line.words)
            case "CMD":
                state.cmd, state.has_own_cmd = self._command(line, state), True
            case "ENTRYPOINT":
                state.entrypoint = self._command(line, state)
                if not state.has_own_cmd:  # that of the image below is for another program
                    state.cmd = ()

    def _command(self, line: DockerInstruction, state: _StageState) -> tuple[str, ...]:
        return tuple(line.words) if line.is_exec else (*state.shell, line.text)

    # RUN --------------------------------------------------------------------------------------------------------------

    async def _run(self, line: DockerInstruction, state: _StageState, sessions: _Sessions) -> None:
        argv = self._command(replace(line, text=_script(line)), state)
        env = {"PATH": _PATH} | state.arguments | state.env
        inputs = [argv, env, state.user, state.working_dir, state.pending, dict(self._terms.network)]

        async def work(session: Session) -> None:
            proxies = {name: value for name, value in self._terms.arguments.items() if name.upper() in _PROXIES}
            self._used.update(proxies)
            user = await _user(session, state.user) or "root"
            run = await session.process(
                list(argv),
                env=proxies | env,
                cwd=state.working_dir or "/",
                user=user,
                merged=True,
                keep_alive=True,
                raw=True,
            )
            try:
                with contextlib.suppress(errors.ExecEnded):
                    await run.close_input()
                async for piece in run:
                    await self._watch.written(piece.data)  # type: ignore[arg-type]  # the run is raw
                end = await run.wait()
            finally:
                if run.end is None:
                    with waiting.shield(_END_S), contextlib.suppress(errors.SandkastenError):
                        await run.cancel(now=True)
            if end.exit_code:
                how = f"signal {end.exit_code - _SIGNALS}" if end.exit_code > _SIGNALS else f"status {end.exit_code}"
                cause = "" if end.cause in (None, "exited", "signalled") else f" ({end.cause})"
                raise self._failure(line, f"ended with {how}{cause}: {line.shown}")

        await self._layer(line, state, sessions, "run", inputs, work)

    # COPY -------------------------------------------------------------------------------------------------------------

    async def _copy(self, line: DockerInstruction, number: int, state: _StageState, sessions: _Sessions) -> None:
        *names, target = (self._expanded(line, each, state.lookup) for each in line.words)
        path = posixpath.join("/", state.working_dir, target)
        is_directory = target.endswith("/") or posixpath.basename(target) in ("", ".", "..")
        path = _normal(path)
        if len(names) + len(line.documents) > 1 and not is_directory:
            raise self._failure(line, SEVERAL)
        if path in _OUTSIDE or path.startswith(tuple(f"{each}/" for each in _OUTSIDE)):
            raise self._failure(line, f"{path} is no part of an image: sessions have mounts there")
        flags = {name: self._expanded(line, value, state.lookup) for name, value in line.flags.items()}
        owner = flags.get("chown", "")
        try:
            mode = int(flags["chmod"], 8) if "chmod" in flags else None
        except ValueError:
            raise self._failure(line, f"--chmod={flags['chmod']} is no set of permissions") from None
        place = _Destination(path, is_directory, owner, mode)
        inputs: list[Any] = [target, state.working_dir, state.pending, owner, mode]
        if "from" in flags:
            before = self._stage_of(flags["from"], number)
            other = await self._state_of(line, flags["from"]) if before is None else self._built[before]

            async def transfer(session: Session) -> None:
                await self._transfer(session, other.image, names, place)

            await self._layer(line, state, sessions, "copy from", [*inputs, names, other.key], transfer)
            return
        documents = [
            (each.name, each.content if each.is_literal else self._document(line, each.content, state))
            for each in line.documents
        ]
        with written(documents) as files:
            try:
                sources = [each for name in names for each in await waiting.in_thread(self._context.find, name)] + files
                digest = await waiting.in_thread(self._context.digest, sources, mode)
            except ValueError as error:
                raise self._failure(line, error) from None

            async def work(session: Session) -> None:
                await self._send(line, session, sources, place, digest)

            await self._layer(line, state, sessions, "copy", [*inputs, names, digest, len(sources)], work)

    async def _send(
        self, line: DockerInstruction, session: Session, sources: Sequence[Source], place: _Destination, digest: str
    ) -> None:
        """Copy files of the context into a session."""
        owner = await _owner(session, place.owner)
        top, name = await _make_directory(
            session, place, owner, of_file=not sources[0].is_directory and len(sources) == 1
        )
        sent = hashlib.sha256()
        archive = self._context.pack(sources, name, place.mode, sent)
        await session.files.unpack(_in_thread(archive), top, uid=owner[0], gid=owner[1], user="root")
        if sent.hexdigest() != digest:
            raise self._failure(line, "the files were changed while they were copied")

    async def _transfer(self, session: Session, image: str, names: Sequence[str], place: _Destination) -> None:
        """Copy files of an image into a session, through this process. Raises `ValueError`: a source means nothing."""
        owner = await _owner(session, place.owner)
        async with await self._client.create_session(
            image=image,
            user="root",
            network={"mode": "none"},
            idle_timeout_seconds=_IDLE_S,
            labels={_LABEL: self._terms.name},
        ) as source:
            paths = [each for name in names for each in await _paths(source, name)]
            for path in paths:
                info = await source.files.stat(path, follow=True, user="root")
                of_file = not info.is_dir and len(paths) == 1
                top, name = await _make_directory(session, place, owner, of_file=of_file)
                if info.is_dir:
                    async with source.files.archive(path, user="root") as stream:
                        await session.files.unpack(stream, top, uid=owner[0], gid=owner[1], user="root")
                    continue
                target = posixpath.join(top, name or posixpath.basename(path))
                mode = int(info.mode, 8) & 0o777 if place.mode is None else place.mode
                async with source.files.open(path, user="root") as stream:
                    await session.files.write(target, stream, mode=mode, user="root")
                if owner[0] is not None:
                    await session.files.chown(target, uid=owner[0], gid=owner[1], user="root")

    # Layers -----------------------------------------------------------------------------------------------------------

    async def _layer(
        self,
        line: DockerInstruction,
        state: _StageState,
        sessions: _Sessions,
        kind: str,
        inputs: Sequence[Any],
        work: Callable[[Session], Awaitable[None]],
    ) -> None:
        """Perform a step that makes a layer, unless the cache has it."""
        state.key = _key(kind, state.key, *inputs)
        if self._terms.squash:
            self._tell_step(line)
            await self._work(line, work, await sessions.ready(state))
            return
        name = BUILD_CACHE + state.key[:_KEY_DIGITS]
        if self._terms.has_cache and await sessions.has(name):
            self._tell_step(line, " (as before)")
            state.image, state.pending = name, []
            return
        self._tell_step(line)
        await self._work(line, work, await sessions.ready(state))
        state.image = await sessions.keep(state.key, state, line.shown)

    async def _work(
        self, line: DockerInstruction, work: Callable[[Session], Awaitable[None]], session: Session
    ) -> None:
        try:
            await work(session)
        except ValueError as error:
            raise self._failure(line, error) from None

    @contextlib.asynccontextmanager
    async def _sessions(self, state: _StageState) -> AsyncIterator[_Sessions]:
        sessions = _Sessions(self._client, self._terms, self._own)
        try:
            yield sessions
        except BuildError:
            if self._terms.debug and (left := sessions.leave()):
                self._watch.told(f"the session is left for {_IDLE_S // 60} minutes: sandkasten shell {left}")
            raise
        finally:
            await sessions.end()


class _Sessions:
    """The session of the step that is being performed, made when a step needs it."""

    def __init__(self, client: SandboxClient, terms: BuildTerms, own: list[str]) -> None:
        self._client, self._terms, self._own = client, terms, own
        self._session: Session | None = None

    async def ready(self, state: _StageState) -> Session:
        """Return a session on the image so far, with the directories of WORKDIR."""
        if self._session is None:
            self._session = await self._client.create_session(
                image=state.image,
                user="root",
                network=self._terms.network,
                limits=self._terms.limits or None,
                idle_timeout_seconds=_IDLE_S,
                labels={_LABEL: self._terms.name},
            )
            if state.working_dir.startswith("/"):
                state.pending.append(state.working_dir)
        for path in dict.fromkeys(state.pending):
            await self._session.files.mkdir(path, user="root")
        state.pending = []
        return self._session

    async def keep(self, key: str, state: _StageState, created_by: str) -> str:
        """Make an image of the session under the name of a step, and end the session; return the name."""
        name = BUILD_CACHE + key[:_KEY_DIGITS]
        session = await self.ready(state)
        if not self._terms.has_cache or self._terms.squash:
            self._own.append(name)
        try:
            await session.commit(name, created_by=created_by)
        except errors.InvalidImage:
            # Another build that came to the same step was first.
            if not await self.has(name):
                raise
        await self.end()
        return name

    async def has(self, name: str) -> bool:
        """Return whether there is an image of that very name."""
        try:
            return (await self._client.get_image(name)).name == name
        except errors.InvalidImage:
            return False

    async def publish(self, name: str, state: _StageState) -> str:
        """Make the image that is built; return its name."""
        session = await self.ready(state)
        try:
            config = state.config() | {"user": await _user(session, state.user)}
        except ValueError as error:
            raise BuildError(f"{self._terms.title}: USER {state.user}: {error}") from None
        made = await session.commit(name, config=config, replace=self._terms.replace, created_by=_BUILD)
        await self.end()
        return made.name

    def leave(self) -> str:
        """Let the session be; return its id, empty where there is none."""
        session, self._session = self._session, None
        return "" if session is None else session.id

    async def end(self) -> None:
        """End the session, if there is one; within a bounded time for a caller that is cancelled."""
        session, self._session = self._session, None
        if session is not None:
            with waiting.shield(_END_S):
                await session.destroy()


@dataclass(frozen=True)
class _Destination:
    """Destination of a COPY, and whose its files are: an owner is a name or a number, of a user or of user:group."""

    path: str
    is_directory: bool
    owner: str
    mode: int | None


_Owner = tuple[int | None, int | None]
"""User and group that copied files are given to; None for root."""


def _key(*inputs: Any) -> str:  # JSON values
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _normal(path: str) -> str:
    """Return an absolute path in its shortest form; POSIX gives two slashes at the begin a meaning of their own."""
    return "/" + posixpath.normpath(path).lstrip("/")


def _ports(text: str) -> list[str]:
    """Return what EXPOSE names: a port or a range, of TCP unless it says another. Raises `ValueError`."""
    found = _PORTS.match(text)
    if found is None or not 0 < int(found[1]) <= int(found[2] or found[1]) <= _MAX_PORT:
        raise ValueError(f"{text!r} is neither a port nor a range of ports")
    ports = range(int(found[1]), int(found[2] or found[1]) + 1)
    return [f"{port}/{found[3] or 'tcp'}" for port in ports]


def _script(line: DockerInstruction) -> str:
    """Return the shell form of RUN; here-documents stand behind the command, where a shell reads them."""
    if not line.documents:
        return line.text
    (first, *_) = line.documents
    if len(line.documents) == 1 and line.text.lstrip("<-").strip("'\"") == first.name:
        return first.content
    return "\n".join([line.text, *(f"{each.content}{each.name}" for each in line.documents)]) + "\n"


async def _make_directory(session: Session, place: _Destination, owner: _Owner, *, of_file: bool) -> tuple[str, str]:
    """Make the directory that a copy goes to; return it, and the name of a file that gets another one, else none."""
    path, name = place.path, ""
    if of_file and not place.is_directory and not await _is_directory(session, path):
        path, name = posixpath.split(path)
    missing, above = [], path
    while above != "/" and not await session.files.exists(above, user="root"):
        missing.append(above)
        above = posixpath.dirname(above)
    for each in reversed(missing):
        await session.files.mkdir(each, user="root")
        if owner[0] is not None:
            await session.files.chown(each, uid=owner[0], gid=owner[1], user="root")
    return path, name


async def _paths(session: Session, source: str) -> list[str]:
    """Return the paths that a source of `COPY --from` means. Raises `ValueError`: none."""
    path = _normal(posixpath.join("/", source))
    if is_pattern(path):
        if found := await session.files.glob(path.lstrip("/"), "/", user="root"):
            return found
    elif await session.files.exists(path, user="root"):
        return [path]
    raise ValueError(f"the image has no {source!r}")


async def _is_directory(session: Session, path: str) -> bool:
    try:
        return (await session.files.stat(path, follow=True, user="root")).is_dir
    except errors.FileNotFound:
        return False


async def _in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what an iterator gives that reads local files."""
    while data := await waiting.in_thread(next, pieces, b""):
        yield data


async def _owner(session: Session, owner: str) -> _Owner:
    """Return the ids of `USER[:GROUP]`, names or numbers; of a user alone with the user's own group. Of no text: None.

    Raises:
        ValueError: the image has no such user or group.
    """
    if not owner:
        return None, None
    user, _, group = owner.partition(":")
    account = await _account(session, "/etc/passwd", user)
    uid = int(account[2])
    if not group:
        return uid, int(account[3])
    return uid, int((await _account(session, "/etc/group", group))[2])


async def _user(session: Session, user: str) -> str:
    """Return a user as sessions take one: of user and group their numbers. Raises `ValueError`: there is no such."""
    return "{}:{}".format(*await _owner(session, user)) if ":" in user else user


async def _account(session: Session, path: str, name: str) -> list[str]:
    """Return the first row of a file of accounts (passwd(5), group(5)) that has a name or number; for a number of no
    account, a row as of one. Raises `ValueError`."""
    rows: list[list[str]] = []
    with contextlib.suppress(errors.FileNotFound, errors.RangeNotSatisfiable):  # an empty file has no first byte
        content = await session.files.read_bytes(path, user="root", length=_MAX_ACCOUNT_BYTES)
        rows = [line.split(":") for line in content.decode("utf-8", "replace").splitlines()]
    for row in rows:
        if len(row) >= 4 and name in (row[0], row[2]) and row[2].isdecimal():
            return row if row[3].isdecimal() else [*row[:3], row[2]]
    if _NUMBER.match(name):
        return ["", "", name, name]
    raise ValueError(f"the image has no {name!r} in {path}")
