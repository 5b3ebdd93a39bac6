"""Requests to one registry and its mirrors: authentication, redirects, proxies, tries. One client serves one pull.

A client sends credentials to the registry, and to the token server that the registry names, and nowhere else. Plain
HTTP, and special addresses, are for those whom the operator named.

Sources: OCI distribution specification 1.1; distribution project, "Token Authentication Specification"; RFC 9110 §11.6,
§15.4; RFC 6750 §3.
"""

from __future__ import annotations

import hashlib
import random
import re
import ssl
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

import attrs
import httpcore2
import orjson
import trio

from sandkasten.config import ImagesSettings
from sandkasten.errors import DigestMismatch, RegistryRefused, RegistryUnauthorized, TooLarge
from sandkasten.images.registry.credentials import Credentials
from sandkasten.images.registry.dialing import AddressRefused, CheckedBackend, refusal
from sandkasten.images.registry.documents import MAX_DOCUMENT_BYTES, MEDIA_TYPES
from sandkasten.images.registry.reference import DIGEST, HUB, Reference

T = TypeVar("T")

_HUB_HOST = "registry-1.docker.io"
_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAX_CONNECTIONS = 16
_MAX_SMALL_BYTES = 64 << 10
_MAX_TOKEN_CHARS = 32 << 10
_TOKEN_S, _TOKEN_MARGIN_S = 60, 30
_CLOSE_S = 5.0
_LONGEST_WAIT_S = 30.0
_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}\Z")
_CHALLENGE = re.compile(r"\s*(Bearer|Basic)\b\s*(.*)", re.IGNORECASE | re.DOTALL)
_PARAMETER = re.compile(r'([a-zA-Z_]+)\s*=\s*(?:"([^"\\]*)"|([^\s",]+))')
_LOSSES = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, httpcore2.ProxyError)
_VISIBLE = re.compile(r"[\x21-\x7e]+\Z")
_PORTS: Final[Mapping[str, int]] = {"http": 80, "https": 443}


@attrs.frozen
class Patience:
    """Bounds of a client's tries. `silence_s`: a connection on which nothing comes for so long is lost."""

    tries: int = 5
    first_wait_s: float = 0.5
    silence_s: float = 30.0


@attrs.frozen
class _Source:
    """A registry's or mirror's address: `base` is a URL without a slash at its end, `registry` its name in the file of
    credentials."""

    base: str
    registry: str
    is_last: bool


class RegistryAnswer:
    """An answer whose body is read piece by piece."""

    def __init__(self, response: httpcore2.Response, url: str) -> None:
        self.status = response.status
        self.headers = {name.decode("latin-1").lower(): each.decode("latin-1") for name, each in response.headers}
        self._stream: Any = response.aiter_stream()  # a generator, though its type says less
        self._response, self.host, self.origin = response, urlsplit(url).netloc, _origin(url)

    async def read(self) -> bytes:
        """Return the next piece of the body, empty at its end. Raises `RegistryRefused` when the connection is lost."""
        try:
            piece: bytes = await anext(self._stream, b"")
        except _LOSSES as error:
            raise _lost(self.host, error) from error
        return piece

    async def whole(self, limit: int) -> bytes:
        """Return the whole body. Raises `TooLarge` as soon as it is larger than `limit`."""
        length = self.headers.get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            raise TooLarge(f"{self.host} sends a document of {length} bytes", limit=limit)
        data = bytearray()
        while piece := await self.read():
            data += piece
            if len(data) > limit:
                raise TooLarge(f"{self.host} sends a document of more than {limit} bytes", limit=limit)
        return bytes(data)

    async def aclose(self) -> None:
        """Close the connection, if there is more to read."""
        with trio.move_on_after(_CLOSE_S, shield=True):
            await self._stream.aclose()
            await self._response.aclose()


class RegistryClient:
    """See the module's docstring. `credentials_of(registry)` is asked when a registry wants some."""

    def __init__(
        self,
        registry: str,
        settings: ImagesSettings,
        *,
        credentials_of: Callable[[str], Credentials | None],
        patience: Patience | None = None,
    ) -> None:
        self.patience = patience or Patience()
        self._settings, self._credentials_of = settings, credentials_of
        scheme = "http" if _is_listed(settings.insecure_registries, registry) else "https"
        host = _HUB_HOST if registry == HUB else registry
        mirrors = [url.rstrip("/") for url in settings.mirrors.get(registry, ())]
        self._places = [
            *(_Source(url, urlsplit(url).netloc, is_last=False) for url in mirrors),
            _Source(f"{scheme}://{host}", registry, is_last=True),
        ]
        is_named = scheme == "http" or _is_listed(settings.allow_private, registry)
        self._trusted = {_origin(url)[1:] for url in [*mirrors, *([self._places[-1].base] if is_named else [])]}
        self._plain = {_origin(place.base) for place in self._places if place.base.startswith("http:")}
        self._pools: dict[str | None, httpcore2.AsyncConnectionPool] = {}
        self._tokens: dict[tuple[str, str], tuple[str, float]] = {}
        self._logging_in = trio.Lock()

    @property
    def has_mirrors(self) -> bool:
        """Whether others are asked before the registry."""
        return len(self._places) > 1

    async def aclose(self) -> None:
        """Close all connections."""
        with trio.move_on_after(_CLOSE_S, shield=True):
            for pool in self._pools.values():
                await pool.aclose()

    # What a pull asks for ---------------------------------------------------------------------------------------

    async def check_login(self) -> None:
        """Ask the registry whether the credentials are good. Raises `RegistryUnauthorized`, `RegistryRefused`."""

        async def ask(place: _Source) -> None:
            async with self._opened(place, "", "/v2/", {}):
                pass

        await self._try(self._places[-1], ask)

    async def manifest(self, reference: Reference, target: str) -> tuple[str, bytes]:
        """Return the digest and the bytes of a manifest or index; `target` is a tag or a digest.

        Raises:
            DigestMismatch: the bytes are not those of the digest.
            TooLarge, RegistryRefused, RegistryUnauthorized.
        """
        headers = {"accept": ", ".join(MEDIA_TYPES)}

        async def ask(place: _Source) -> tuple[str, bytes]:
            path = f"/v2/{reference.repository}/manifests/{target}"
            async with self._opened(place, reference.repository, path, headers) as answer:
                data = await answer.whole(MAX_DOCUMENT_BYTES)
                said = answer.headers.get("docker-content-digest", "")
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            wanted = target if DIGEST.match(target) else said
            if DIGEST.match(wanted) and wanted != digest:
                raise DigestMismatch(f"the manifest has the digest {digest}, not {wanted}")
            return digest, data

        return await self._from_any(ask)

    async def small_blob(self, repository: str, digest: str, size: int) -> bytes:
        """Return a blob as a whole. Raises as `manifest`."""

        async def ask(place: _Source) -> bytes:
            async with self._opened(place, repository, f"/v2/{repository}/blobs/{digest}", {}) as answer:
                data = await answer.whole(size)
            if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest or len(data) != size:
                raise DigestMismatch(f"the blob {digest} is another, or shorter", digest=digest)
            return data

        return await self._from_any(ask)

    async def read_blob(
        self,
        repository: str,
        digest: str,
        headers: Callable[[], Mapping[str, str]],
        take: Callable[[RegistryAnswer], Awaitable[T]],
        *,
        by_mirrors: bool = True,
    ) -> T:
        """Return what `take` makes of a blob; at each try it is asked for with the present `headers`, such as a range.

        Raises:
            RegistryRefused, RegistryUnauthorized, and whatever `take` raises.
        """

        async def ask(place: _Source) -> T:
            async with self._opened(place, repository, f"/v2/{repository}/blobs/{digest}", headers()) as answer:
                return await take(answer)

        return await (self._from_any(ask) if by_mirrors else self._try(self._places[-1], ask))

    # Places and tries -------------------------------------------------------------------------------------------

    async def _from_any(self, ask: Callable[[_Source], Awaitable[T]]) -> T:
        for place in self._places[:-1]:
            try:
                return await ask(place)
            except (RegistryRefused, RegistryUnauthorized, DigestMismatch, TooLarge):
                continue  # the next mirror, or the registry itself, whose errors count
        return await self._try(self._places[-1], ask)

    async def _try(self, place: _Source, ask: Callable[[_Source], Awaitable[T]]) -> T:
        wait_s = self.patience.first_wait_s
        for left in reversed(range(self.patience.tries)):
            try:
                return await ask(place)
            except RegistryRefused as error:
                if not (error.retryable and left):
                    raise
                advice_s = min(float(error.details.get("retry_after_s", 0)), _LONGEST_WAIT_S)
                await trio.sleep(max(advice_s, wait_s * random.uniform(0.5, 1.0)))
                wait_s *= 2
        raise AssertionError("a try returns or raises")

    # One request ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _opened(
        self, place: _Source, repository: str, path: str, headers: Mapping[str, str]
    ) -> AsyncIterator[RegistryAnswer]:
        """Open an answer with a status below 300; log in when the registry asks for it, once. The target of a redirect
        can't ask: the place that it named as token server would get the registry's password."""
        url = place.base + path
        used = self._token(place, repository)
        answer = await self._follow(url, headers, used)
        try:
            if answer.status == 401 and answer.origin == _origin(url):
                challenge = answer.headers.get("www-authenticate", "")
                await answer.aclose()
                await self._log_in(place, repository, challenge, used)
                answer = await self._follow(url, headers, self._token(place, repository))
            if answer.status >= 300:
                raise await _refused(answer)
            yield answer
        finally:
            await answer.aclose()

    def _token(self, place: _Source, repository: str) -> str | None:
        header, until = self._tokens.get((place.base, repository), (None, 0.0))
        return header if trio.current_time() < until else None

    async def _follow(self, url: str, headers: Mapping[str, str], authorization: str | None) -> RegistryAnswer:
        """Send a GET and follow its redirects; only the first place gets `authorization`."""
        first = _origin(url)
        for _ in range(_MAX_REDIRECTS + 1):
            self._check(url)
            auth = {"authorization": authorization} if authorization and _origin(url) == first else {}
            answer = await self._send(url, {**headers, **auth})
            if answer.status not in _REDIRECTS:
                return answer
            await answer.aclose()
            url = _joined(url, answer.headers.get("location", ""))
        raise _final(f"{urlsplit(url).netloc} redirects more than {_MAX_REDIRECTS} times")

    def _check(self, url: str) -> None:
        """Refuse a URL that is not to be asked. Names are judged by their addresses when they are resolved."""
        scheme, host, port = _origin(url)
        if scheme != "https" and (scheme, host, port) not in self._plain and not self._may_be_plain(scheme, host, port):
            raise _final(f"{host}:{port} is to be asked by {scheme or 'no'} protocol, which is not secure")
        if not self._is_trusted(host, port) and (reason := refusal(host)) is not None:
            raise _final(_of_address(f"{host}: {reason}"))

    def _may_be_plain(self, scheme: str, host: str, port: int) -> bool:
        name = f"{host}:{port}"
        settings = self._settings
        return (
            scheme == "http"
            and _is_listed(settings.insecure_registries, name)
            and _is_listed(settings.allow_private, name)
        )

    def _is_trusted(self, host: str, port: int) -> bool:
        return (host, port) in self._trusted or _is_listed(self._settings.allow_private, f"{host}:{port}")

    async def _send(self, url: str, headers: Mapping[str, str]) -> RegistryAnswer:
        parts = urlsplit(url)
        _, host, port = _origin(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not (host.isascii() and target.isascii()):
            raise _final(f"{host} can't be asked: the address is not ASCII")
        literal = f"[{host}]" if ":" in host else host
        fields = {
            "host": literal if port == _PORTS[parts.scheme] else f"{literal}:{port}",
            "accept-encoding": "identity",
        }
        fields |= {"user-agent": "sandkasten", **headers}
        request = httpcore2.Request(
            "GET",
            httpcore2.URL(scheme=parts.scheme.encode(), host=host.encode(), port=port, target=target.encode()),
            headers=[(name.encode(), text.encode("latin-1")) for name, text in fields.items()],
            extensions={"timeout": {"connect": 10.0, "read": self.patience.silence_s, "write": 10.0, "pool": None}},
        )
        try:
            return RegistryAnswer(await self._pool(parts.scheme, host).handle_async_request(request), url)
        except AddressRefused as error:
            raise _final(_of_address(str(error))) from error
        except (
            httpcore2.NetworkError,
            httpcore2.ProtocolError,
            httpcore2.TimeoutException,
            httpcore2.ProxyError,
        ) as error:
            raise _lost(host, error) from error

    def _pool(self, scheme: str, host: str) -> httpcore2.AsyncConnectionPool:
        proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(scheme)
        if host == "localhost" or refusal(host):
            proxy = None  # a proxy elsewhere has other private addresses
        if proxy not in self._pools:
            via = None
            trusted: Callable[[str, int], bool] = self._is_trusted
            if proxy is not None:
                parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
                auth = (parts.username, parts.password or "") if parts.username else None
                bare = parts._replace(netloc=parts.netloc.rpartition("@")[2])
                via = httpcore2.Proxy(bare.geturl(), auth=auth)
                trusted = _anybody  # a proxy is the operator's, and resolves by itself
            self._pools[proxy] = httpcore2.AsyncConnectionPool(
                proxy=via, max_connections=_MAX_CONNECTIONS, network_backend=CheckedBackend(trusted)
            )
        return self._pools[proxy]

    # Logging in -------------------------------------------------------------------------------------------------

    async def _log_in(self, place: _Source, repository: str, challenge: str, stale: str | None) -> None:
        async with self._logging_in:
            if (present := self._token(place, repository)) is not None and present != stale:
                return  # another download has renewed it
            self._tokens.pop((place.base, repository), None)
            credentials = self._credentials_of(place.registry)
            kind, fields = _read_challenge(challenge)
            if kind == "basic" and credentials is not None:
                self._tokens[place.base, repository] = credentials.basic, float("inf")
            elif kind == "bearer" and fields.get("realm"):
                token, lasts_s = await self._fetch_token(fields, repository, credentials)
                until = trio.current_time() + max(lasts_s - _TOKEN_MARGIN_S, 1)
                self._tokens[place.base, repository] = f"Bearer {token}", until
            else:
                raise RegistryUnauthorized(f"{place.registry} wants a name and a password", registry=place.registry)

    async def _fetch_token(
        self, fields: Mapping[str, str], repository: str, credentials: Credentials | None
    ) -> tuple[str, float]:
        query = {"service": fields["service"]} if "service" in fields else {}
        if repository:
            query["scope"] = f"repository:{repository}:pull"
        realm = fields["realm"]
        _origin(realm)  # raises where it is no URL
        url = f"{realm}{'&' if urlsplit(realm).query else '?'}{urlencode(query)}"
        answer = await self._follow(url, {}, None if credentials is None else credentials.basic)
        try:
            if answer.status in (401, 403):
                raise RegistryUnauthorized(f"{urlsplit(realm).netloc} refuses the credentials", status=answer.status)
            if answer.status >= 300:
                raise await _refused(answer)
            data = await answer.whole(_MAX_SMALL_BYTES)
        finally:
            await answer.aclose()
        try:
            value = orjson.loads(data)
            token = value.get("token") or value["access_token"]
            lasts_s = float(value.get("expires_in") or _TOKEN_S)
            is_good = len(token) <= _MAX_TOKEN_CHARS and _VISIBLE.match(token) is not None
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
            is_good = False
        if not is_good:
            raise _final(f"{urlsplit(realm).netloc} sent no token")
        return token, lasts_s


def _anybody(_host: str, _port: int) -> bool:
    return True


def _is_listed(registries: Sequence[str], registry: str) -> bool:
    """Whether a registry, HOST or HOST:PORT, is in a list of the configuration."""
    parts = urlsplit(f"//{registry}")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return host in registries or registry in registries


def _origin(url: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        raise _final("the registry names an address that is none") from None


def _joined(url: str, location: str) -> str:
    try:
        target = urljoin(url, location)
        parts = urlsplit(target)
    except ValueError:
        parts = urlsplit("")
    if not location or not parts.hostname or parts.username is not None:
        raise _final(f"{urlsplit(url).netloc} redirects to no address")
    return parts._replace(fragment="").geturl()


def _read_challenge(header: str) -> tuple[str, Mapping[str, str]]:
    match = _CHALLENGE.match(header[:4096])
    if match is None:
        return "", {}
    return match[1].lower(), {name.lower(): quoted or bare for name, quoted, bare in _PARAMETER.findall(match[2])}


async def _refused(answer: RegistryAnswer) -> RegistryRefused | RegistryUnauthorized:
    """Return the error of a refusal, with the codes of its body: the text may say anything."""
    try:
        found = orjson.loads(await answer.whole(_MAX_SMALL_BYTES))["errors"]
        codes = [each["code"] for each in found[:5] if _CODE.match(each["code"])]
    except (orjson.JSONDecodeError, KeyError, TypeError, TooLarge, RegistryRefused):
        codes = []
    said = f" ({', '.join(codes)})" if codes else ""
    message = f"{answer.host} answers {answer.status}{said}"
    if answer.status in (401, 403):
        return RegistryUnauthorized(message, status=answer.status, codes=codes or None)
    advice = answer.headers.get("retry-after", "")
    advice_s = int(advice) if re.fullmatch("[0-9]{1,5}", advice) else None
    error = RegistryRefused(message, status=answer.status, codes=codes or None, retry_after_s=advice_s)
    error.retryable = answer.status in _PASSING
    return error


def _lost(host: str, error: Exception) -> RegistryRefused:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _final(f"{host} has no good certificate: {cause.verify_message}")
        cause = cause.__cause__ or cause.__context__
    return RegistryRefused(f"the connection to {host} was lost or can't be made ({error or type(error).__name__})")


def _final(message: str) -> RegistryRefused:
    error = RegistryRefused(message)
    error.retryable = False
    return error


def _of_address(reason: str) -> str:
    return f"{reason}; a registry there must be in images.allow_private"
