"""E2B's control API: sandboxes are sessions, templates are images, metadata are labels.

A paused sandbox has no end until `connect` sets it again. `sandboxes.py` has the rest of ends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, NewType
from urllib.parse import parse_qsl, unquote

import attrs

from sandkasten.api.e2b.context import AUTO_RESUME, PREFIX, TEMPLATE, USER, Commands, EnvdRequest
from sandkasten.api.e2b.interpreter import WARM_CONTEXT, Interpreter
from sandkasten.api.e2b.sandboxes import (
    ENVD_VERSION,
    TIMEOUT_S,
    E2bTerms,
    access_token,
    age_of,
    another_end,
    domain_of,
    end_in,
    find_ports,
    go_on,
    is_paused,
    traffic_token,
)
from sandkasten.api.e2b.usage import read_metrics
from sandkasten.api.http.errors import Answer, json_answer, json_list_answer
from sandkasten.api.http.exchange import Exchange
from sandkasten.api.http.key_scope import owned_patch, owned_query, owned_spec, within_reach
from sandkasten.api.resources.fields import (
    Environment,
    Labels,
    Matching,
    add_kinds,
    bad_query,
    read_head,
    read_request,
)
from sandkasten.api.resources.network import Rules
from sandkasten.errors import (
    Conflict,
    InvalidImage,
    InvalidRequest,
    NetworkNotSupported,
    NotInstalled,
    RouteNotFound,
    SessionNotFound,
)
from sandkasten.log import rfc3339
from sandkasten.model import IMAGE_REFERENCE, AtEnd, PauseSpec, Session, SessionPatch, SessionSpec, Status
from sandkasten.model.keys import Access
from sandkasten.model.lifecycle import WHOLE
from sandkasten.model.listing import LabelSelector, SessionQuery, parse_cursor
from sandkasten.model.network import EVERY_PORT, Network, NetworkMode, PreviewAccess, PreviewSpec
from sandkasten.model.session import FOREVER_S, MAX_SPAN_S

Seconds = NewType("Seconds", float)
IdempotencyKey = NewType("IdempotencyKey", str)
Anything = NewType("Anything", object)
_EVERYWHERE = frozenset({"0.0.0.0/0", "::/0", "*"})


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SPAN_S:
        raise ValueError(f"must be a number of seconds up to {MAX_SPAN_S:.0f}")
    return float(value)


add_kinds(
    {
        Seconds: _seconds,
        Anything: lambda value: value,
        IdempotencyKey: Matching(re.compile(r"[A-Za-z0-9_-]{1,255}\Z"), "must be 1 to 255 of a-z, 0-9 and '-'"),
    }
)

# Requests -------------------------------------------------------------------------------------------------------------


@attrs.frozen
class AutoResume:
    """Whether a request to a paused sandbox resumes it."""

    enabled: bool = False


@attrs.frozen
class NetworkTerms:
    """A sandbox's way out, and whether its ports need a token. `denyOut` with everything in it leaves what `allowOut`
    names."""

    aliases: ClassVar[Mapping[str, str]] = {
        "allowOut": "allow_out",
        "denyOut": "deny_out",
        "allowPublicTraffic": "allow_public_traffic",
    }
    allow_out: Rules | None = None
    deny_out: Rules | None = None
    allow_public_traffic: bool | None = None

    def to_network(self, *, is_open: bool) -> Network:
        """Return the model's network; `is_open`: what no rule names may be reached."""
        allow, deny = self.allow_out or (), self.deny_out or ()
        if is_open and not _EVERYWHERE & set(deny):
            return Network(NetworkMode.OPEN, deny=deny)
        return Network(NetworkMode.ALLOW, allow=allow) if allow else Network(NetworkMode.NONE)


@attrs.frozen
class NewSandbox:
    """A sandbox to create."""

    aliases: ClassVar[Mapping[str, str]] = {
        "templateID": "template",
        "envVars": "env",
        "autoPause": "auto_pause",
        "autoResume": "auto_resume",
        "allowInternetAccess": "allow_internet_access",
        "volumeMounts": "volumes",
    }
    template: str = "base"
    timeout: Seconds = Seconds(TIMEOUT_S)
    metadata: Labels | None = None
    env: Environment | None = attrs.field(default=None, repr=False)
    auto_pause: bool | None = None
    auto_resume: AutoResume | None = None
    allow_internet_access: bool | None = None
    network: NetworkTerms | None = None
    volumes: Anything | None = None
    iam: Anything | None = None
    mcp: Anything | None = None


@attrs.frozen
class NewSandboxHead:
    """The idempotency key of a create."""

    idempotency_key: IdempotencyKey | None = None


@attrs.frozen
class EndChange:
    """An end, in seconds from now."""

    timeout: Seconds


@attrs.frozen
class WakeRequest:
    """An end that a sandbox gets if its own is earlier, or if it is resumed."""

    timeout: Seconds = Seconds(TIMEOUT_S)


@attrs.frozen
class NetworkTermsChange(NetworkTerms):
    """A way out in place of the present one."""

    allow_internet_access: bool | None = None


# Answers --------------------------------------------------------------------------------------------------------------


def _metadata(session: Session) -> dict[str, str]:
    return {name: value for name, value in session.labels.items() if not name.startswith(PREFIX)}


def _template_of(session: Session) -> str:
    return session.labels.get(TEMPLATE, session.image)


async def _sandbox(exchange: Exchange, settings: E2bTerms, session: Session) -> dict[str, Any]:
    ports = await find_ports(exchange.supervisor, session.id)
    traffic = None if ports is None else ports.token
    return {
        "sandboxID": session.id,
        "templateID": _template_of(session),
        "clientID": exchange.supervisor.node_id,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": access_token(settings.key, session.id),
        "trafficAccessToken": traffic or traffic_token(settings.key, session.id),
        "domain": None if ports is None else domain_of(ports),
    }


def _info(exchange: Exchange, session: Session) -> dict[str, Any]:
    limits = session.limits
    end = None if session.max_lifetime_s == FOREVER_S else session.created_at.timestamp() + session.max_lifetime_s
    if session.pause is not None:
        end = session.pause.since.timestamp()
    return {
        "sandboxID": session.id,
        "templateID": _template_of(session),
        "alias": _template_of(session),
        "clientID": exchange.supervisor.node_id,
        "startedAt": rfc3339(session.created_at),
        "endAt": rfc3339(datetime(9999, 12, 31, tzinfo=UTC) if end is None else datetime.fromtimestamp(end, UTC)),
        "cpuCount": math.ceil(limits.cpu),
        "memoryMB": limits.memory_mb,
        "diskSizeMB": limits.disk_mb,
        "state": "paused" if session.status is Status.PAUSED else "running",
        "envdVersion": ENVD_VERSION,
        "metadata": _metadata(session),
    }


async def _detail(exchange: Exchange, settings: E2bTerms, session: Session) -> dict[str, Any]:
    ports = await find_ports(exchange.supervisor, session.id)
    may_act = exchange.key.access >= Access.WRITE  # who may only read gets no token, which opens everything inside
    return {
        **_info(exchange, session),
        **({"envdAccessToken": access_token(settings.key, session.id)} if may_act else {}),
        "domain": None if ports is None else domain_of(ports),
        "allowInternetAccess": session.network.mode not in (NetworkMode.NONE, NetworkMode.ALLOW),
        "lifecycle": {
            "onTimeout": "pause" if session.options.at_end == AtEnd.PAUSE else "kill",
            "autoResume": AUTO_RESUME in session.labels,
        },
    }


# Handlers -------------------------------------------------------------------------------------------------------------


@attrs.frozen
class Control:
    """The handlers of the control API."""

    settings: E2bTerms
    interpreter: Interpreter
    commands: Commands

    async def create(self, exchange: Exchange) -> Answer:
        """Create a sandbox, with the account that programs of E2B expect."""
        request = await read_request(exchange, NewSandbox)
        exchange.ignore(())
        for name in ("volumes", "iam", "mcp"):
            if getattr(request, name):
                raise NotInstalled(f"sandboxes of this server can't be made with {name}")
        image = await self._image_of(exchange, request.template)
        has_kernel = self.settings.has_kernel(image)
        spec = SessionSpec(
            image=image,
            ttl_s=self.settings.max_idle_s or FOREVER_S,
            max_lifetime_s=max(request.timeout, 1.0),
            at_end=AtEnd.PAUSE if request.auto_pause else AtEnd.DESTROY,
            labels=_labels_of(request),
            env=request.env or {},
            account=USER,
            network=self._network_of(exchange, request.network, request.allow_internet_access),
            idempotency_key=read_head(exchange, NewSandboxHead).idempotency_key,
            publish=self._ports_of(request),
            warm=WARM_CONTEXT.spec.process_id if has_kernel else None,
        )
        spec = owned_spec(exchange.key, spec, default_network=NetworkMode.NONE)
        try:
            session = await exchange.supervisor.create(spec)
        except NetworkNotSupported:
            if request.network is not None:
                raise
            session = await exchange.supervisor.create(attrs.evolve(spec, network=Network(NetworkMode.NONE)))
        if has_kernel:
            await self.interpreter.warm(EnvdRequest(exchange, session, None, self.commands))
        return json_answer(await _sandbox(exchange, self.settings, session), status=201)

    async def _image_of(self, exchange: Exchange, template: str) -> str:
        """Return the image of a template. Raises `RouteNotFound`, whose status is that of a template not there."""
        name = self.settings.templates.get(template, template)
        try:
            if IMAGE_REFERENCE.match(name):
                await exchange.supervisor.image(name)
                return name
        except InvalidImage:
            pass
        images = [image.name for image in await exchange.supervisor.images()]
        known = ", ".join(sorted({*self.settings.templates, *images}))
        raise RouteNotFound(f"template {template[:100]!r} not found; there are {known}")

    def _network_of(self, exchange: Exchange, asked: NetworkTerms | None, may_reach: bool | None) -> Network:
        """Return the network of a sandbox. A way out is permission, not demand: who may have none gets none."""
        network = (asked or NetworkTerms()).to_network(is_open=may_reach is not False)
        most = [self.settings.widest, *([] if exchange.key.max_network is None else [exchange.key.max_network])]
        return Network(NetworkMode.NONE) if any(network.mode.exceeds(each) for each in most) else network

    def _ports_of(self, request: NewSandbox) -> tuple[PreviewSpec, ...]:
        """Return the preview of every port, as long as the sandbox; open for all unless the client says otherwise."""
        if not self.settings.has_ports:
            return ()
        is_public = request.network is None or request.network.allow_public_traffic is not False
        access = PreviewAccess.PUBLIC if is_public else PreviewAccess.TOKEN
        may_resume = request.auto_resume is not None and request.auto_resume.enabled
        return (PreviewSpec(EVERY_PORT, round(MAX_SPAN_S), access, resume=may_resume),)

    async def get(self, exchange: Exchange) -> Answer:
        """Read a sandbox."""
        return json_answer(await _detail(exchange, self.settings, await self._session(exchange)))

    async def _session(self, exchange: Exchange) -> Session:
        """Return the session of a request. Raises `SessionNotFound` for one that has ended, too."""
        session = await exchange.supervisor.get(exchange.session_id)
        if session.status not in WHOLE:
            raise SessionNotFound(f"sandbox {session.id} not found")
        return session

    async def list_running(self, exchange: Exchange) -> Answer:
        """List the sandboxes that run."""
        return await self._list(exchange, frozenset({Status.RUNNING}))

    async def list_all(self, exchange: Exchange) -> Answer:
        """List the sandboxes, paused ones included, page by page."""
        return await self._list(exchange, WHOLE)

    async def _list(self, exchange: Exchange, statuses: frozenset[Status]) -> Answer:
        query = exchange.query
        labels = [*_selectors(query.get("metadata", ""))]
        labels.append(LabelSelector(TEMPLATE, query.get("template") or None))
        states = [state for text in exchange.query_all("state") for state in text.split(",") if state]
        if states:
            statuses = frozenset(status for status in statuses if status.value in states)
        limit = query.get("limit", "100")
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 0 < int(limit) <= 1000):
            raise bad_query("limit", "must be between 1 and 1000")
        try:
            after = parse_cursor(query["nextToken"]) if query.get("nextToken") else None
            since = datetime.fromisoformat(query["startedAfter"]) if query.get("startedAfter") else None
        except ValueError as error:
            raise bad_query("nextToken" if query.get("nextToken") else "startedAfter", str(error)) from None
        if since is not None and since.tzinfo is None:
            since = since.replace(tzinfo=UTC)
        wanted = SessionQuery(statuses=statuses, labels=tuple(labels), after=after, limit=int(limit))
        page = await exchange.supervisor.find(owned_query(exchange.key, wanted))
        headers = () if page.next is None else (("x-next-token", page.next.cursor),)
        sessions = within_reach(exchange.key, page.sessions)
        if since is not None:
            sessions = [session for session in sessions if session.created_at >= since]
        return await json_list_answer((_info(exchange, session) for session in sessions), headers=headers)

    async def kill(self, exchange: Exchange) -> Answer:
        """End a sandbox."""
        await self._session(exchange)
        await exchange.supervisor.destroy(exchange.session_id)
        return _DONE

    async def set_timeout(self, exchange: Exchange) -> Answer:
        """Set the end of a sandbox."""
        request = await read_request(exchange, EndChange)
        session = await self._session(exchange)
        if self._is_paused(session):
            raise SessionNotFound(f"sandbox {session.id} is paused, and has no end")
        await end_in(exchange.supervisor, session, request.timeout)
        return _DONE

    async def connect(self, exchange: Exchange) -> Answer:
        """Resume a sandbox if it is paused, and have it live so long at least."""
        request = await read_request(exchange, WakeRequest)
        session = await self._session(exchange)
        is_resumed = session.status is Status.PAUSED
        if is_resumed:
            session = await go_on(self.settings, exchange.supervisor, session, request.timeout)
        if session.max_lifetime_s < age_of(session) + request.timeout:
            session = await end_in(exchange.supervisor, session, request.timeout)
        return json_answer(await _sandbox(exchange, self.settings, session), status=201 if is_resumed else 200)

    async def pause(self, exchange: Exchange) -> Answer:
        """Pause a sandbox, which has no end until it is resumed, unless the operator bounds lifetimes."""
        await exchange.drop_body()
        session = await self._session(exchange)
        if self._is_paused(session):
            raise Conflict(f"sandbox {session.id} is paused already")
        supervisor = exchange.supervisor
        async with another_end(supervisor, session, self.settings.longest_s):
            await supervisor.pause(session.id, PauseSpec(stop_lease=True))
        return _DONE

    def _is_paused(self, session: Session) -> bool:
        return is_paused(self.settings, session)

    async def update_network(self, exchange: Exchange) -> Answer:
        """Change what a sandbox may reach."""
        request = await read_request(exchange, NetworkTermsChange)
        await self._session(exchange)
        network = self._network_of(exchange, request, request.allow_internet_access)
        await exchange.supervisor.update(exchange.session_id, owned_patch(exchange.key, SessionPatch(network=network)))
        return _DONE

    async def metrics(self, exchange: Exchange) -> Answer:
        """Read what a sandbox used in the last hour, and uses now. The disk's use is only known of now."""
        start, end = (_unix_time(exchange, name) for name in ("start", "end"))
        session = await self._session(exchange)
        found = await read_metrics(exchange.supervisor, session)
        last = math.inf if end is None else end
        return await json_list_answer(each for each in found if (start or 0) <= each["timestampUnix"] <= last)

    async def missing(self, exchange: Exchange) -> Answer:
        """Refuse what this server does not have. Raises `NotInstalled`."""
        await exchange.drop_body()
        raise NotInstalled(
            "this server has no snapshots, forks, volumes, secrets or builds of templates for E2B's clients"
        )


_DONE = Answer(204, b"")


def _unix_time(exchange: Exchange, name: str) -> int | None:
    text = exchange.query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise bad_query(name, "must be a time in Unix seconds")
    return int(text)


def _labels_of(request: NewSandbox) -> Mapping[str, str]:
    metadata: Mapping[str, str] = request.metadata or {}
    if any(name.startswith(PREFIX) for name in metadata):
        raise InvalidRequest(f"names of metadata that begin with {PREFIX!r} are the server's", metadata="is refused")
    resumes = {AUTO_RESUME: "true"} if request.auto_resume is not None and request.auto_resume.enabled else {}
    return {**metadata, TEMPLATE: request.template, **resumes}


def _selectors(text: str) -> Iterator[LabelSelector]:
    """Yield the selectors of a list's metadata, which clients encode once more than the query that holds them."""
    try:
        fields: Sequence[tuple[str, str]] = parse_qsl(text, keep_blank_values=True, max_num_fields=64)
    except ValueError:
        raise bad_query("metadata", "has too many names") from None
    for name, value in fields:
        yield LabelSelector(unquote(name), unquote(value))
