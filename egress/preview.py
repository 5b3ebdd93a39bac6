"""Requests to previews as they go inside, and answers as they come out. On h11, no input, no output.

The name in `Host` says which session and which port is meant. A token is taken off in every form before the request
goes in, so what runs there never sees one; what says who asked is written anew. An answer loses cookies that would hold
for other names, since all previews of a node have neighbouring ones.

Sources: RFC 9110, 7.6.1 (fields of one connection); RFC 6265, 4.1.2 and 5.2.3 (Domain), and its successor's `__Host-`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs
import h11

from egress.knocking import MAX_TOKENS

TOKEN_HEADER, E2B_TOKEN_HEADER = b"x-sandkasten-preview-token", b"e2b-traffic-access-token"
"""The second one is what programs for E2B send; docs/e2b.md."""
TOKEN_PARAMETER = b"_sandkasten_token"
COOKIE, SECURE_COOKIE = b"_sandkasten_preview", b"__Host-sandkasten_preview"
"""The cookie's name without and with TLS. The second one can't be set for several names at once."""

_TOKEN = re.compile(rb"[A-Za-z0-9_-]{16,128}")
_LABEL = re.compile(rb"([1-9][0-9]{0,4})-([0-9a-f]{16,32})")
_PORT = re.compile(rb"(:[1-9][0-9]{0,4})?")
_OF_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"http2-settings"}
)
_BODY_FIELDS = frozenset({b"content-length", b"transfer-encoding"})
_FRAMING = _BODY_FIELDS | {b"host"}
"""Fields that `Connection` can't name away: two readers would see two requests."""

_OF_SITE = frozenset({b"clear-site-data", b"x-robots-tag"})
"""Fields of answers that hold for more than the one preview: the first empties the browser's cookies of all of them."""

_OF_PROXIES = frozenset({b"forwarded", b"x-real-ip", TOKEN_HEADER, E2B_TOKEN_HEADER})

Headers = list[tuple[bytes, bytes]]


class VisitRefused(Exception):
    """A request that goes nowhere: status of HTTP, error code, and a sentence for whoever sent it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@attrs.frozen
class Visit:
    """A request on its way in. `redirect`: its URL without the token in the query, to which a browser is sent with a
    cookie in place of it; None if the request goes in itself."""

    session_id: str
    port: int
    tokens: tuple[str, ...]
    request: h11.Request
    redirect: bytes | None = None
    is_upgrade: bool = False
    has_body: bool = False


@attrs.frozen
class Site:
    """The names of all previews. `domain`: their last labels; None: `localhost`, without TLS."""

    domain: str | None = None

    @property
    def scheme(self) -> bytes:
        return b"http" if self.domain is None else b"https"

    @property
    def cookie(self) -> bytes:
        return COOKIE if self.domain is None else SECURE_COOKIE

    def read(self, request: h11.Request, client: str) -> Visit:
        """Return the visit that a request from the address `client` is.

        Raises:
            VisitRefused: the request names no preview, or two readers could read it in two ways.
        """
        names = [name for name, _ in request.headers]
        if request.http_version not in (b"1.0", b"1.1") or names.count(b"host") != 1:
            raise VisitRefused(400, "INVALID_REQUEST", "this takes HTTP/1.0 and HTTP/1.1, with one Host")
        if request.method == b"CONNECT" or not request.target.startswith((b"/", b"*")):
            raise VisitRefused(400, "INVALID_REQUEST", "this is no proxy")
        if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
            raise VisitRefused(400, "INVALID_REQUEST", "Transfer-Encoding beside a Content-Length, or in HTTP/1.0")
        fields = dict(request.headers)
        host = fields[b"host"].lower()
        session_id, port = self._place(host)
        target, in_query = _without_token(request.target)
        if TOKEN_PARAMETER + b"=" in target:  # in the path, or behind a `#`: the server in the session would see it
            raise VisitRefused(400, "INVALID_REQUEST", "the token is no parameter of the query")
        in_header = [value for name, value in request.headers if name in (TOKEN_HEADER, E2B_TOKEN_HEADER)]
        headers, in_cookies = self._without_cookie(request.headers.raw_items())
        if fields.get(b"origin", b"").lower() not in (b"", self.scheme + b"://" + host):
            in_cookies = []  # a page elsewhere sent the request, and the browser added the cookie by itself
        is_upgrade = _is_websocket(request)
        is_redirected = bool(in_query) and request.method in (b"GET", b"HEAD") and not is_upgrade
        # A link stands for itself: by another token that lets in, a link with a void one would replace a good cookie.
        found = in_query if is_redirected else (*in_header, *in_query, *in_cookies)
        tokens = [each.decode() for each in found if _TOKEN.fullmatch(each)]
        return Visit(
            session_id,
            port,
            tuple(tokens[:MAX_TOKENS]),
            h11.Request(
                method=request.method,
                target=target,
                headers=[
                    *_kept(headers, is_upgrade),
                    *([] if is_upgrade else [(b"Connection", b"close")]),
                    *self._forwarded(host, client),
                ],
            ),
            self.scheme + b"://" + host + target if is_redirected else None,
            is_upgrade,
            not _BODY_FIELDS.isdisjoint(names),
        )

    def cookie_for(self, token: str, lasts_s: float) -> bytes:
        """Return the value of `Set-Cookie` that keeps a token in a browser, for this one name."""
        secure = b"" if self.domain is None else b"; Secure"
        return b"%b=%b; Path=/; HttpOnly; SameSite=Lax; Max-Age=%d%b" % (
            self.cookie,
            token.encode(),
            max(int(lasts_s), 1),
            secure,
        )

    def _place(self, host: bytes) -> tuple[str, int]:
        """Return session and port of a Host: `<port>-<session>.<domain>`, maybe with the listener's port."""
        label, dot, rest = host.partition(b".")
        match, domain = _LABEL.fullmatch(label), (self.domain or "localhost").encode()
        is_ours = dot and rest.startswith(domain) and _PORT.fullmatch(rest[len(domain) :])
        if match is None or not is_ours or int(match[1]) > 0xFFFF:
            raise VisitRefused(
                404, "NOT_FOUND", "this name is no preview's: they are <port>-<session>." + domain.decode()
            )
        return match[2].decode(), int(match[1])

    def _without_cookie(self, headers: Iterable[tuple[bytes, bytes]]) -> tuple[Headers, list[bytes]]:
        kept, tokens = Headers(), list[bytes]()
        for name, value in headers:
            if name.lower() == b"cookie":
                pairs = [each.strip().partition(b"=") for each in value.split(b";")]
                tokens += [content for key, _, content in pairs if key == self.cookie]
                value = b"; ".join(b"".join(each) for each in pairs if each[0] not in (COOKIE, SECURE_COOKIE))
                if not value:
                    continue
            kept.append((name, value))
        return kept, tokens

    def _forwarded(self, host: bytes, client: str) -> Headers:
        return [
            (b"X-Forwarded-For", client.encode()),
            (b"X-Forwarded-Host", host),
            (b"X-Forwarded-Proto", self.scheme),
        ]


def answer_outside(answer: h11.Response | h11.InformationalResponse) -> h11.Response | h11.InformationalResponse:
    """Return an answer from inside as it goes to the client."""
    is_switch = answer.status_code == 101
    headers = _kept(answer.headers.raw_items(), is_switch)
    headers = [
        (name, value)
        for name, value in headers
        if name.lower() not in _OF_SITE and not (name.lower() == b"set-cookie" and _reaches_others(value))
    ]
    if isinstance(answer, h11.Response):
        headers.append((b"X-Robots-Tag", b"noindex"))
    return type(answer)(status_code=answer.status_code, headers=headers, reason=answer.reason)


def _kept(headers: Iterable[tuple[bytes, bytes]], is_upgrade: bool) -> Headers:
    """Return the fields that go on; those about the connection are made anew, or left out."""
    given = list(headers)
    named = {
        token.strip().lower() for name, value in given if name.lower() == b"connection" for token in value.split(b",")
    }
    dropped = (named - _FRAMING) | _OF_CONNECTION | _OF_PROXIES
    kept = [
        (name, value)
        for name, value in given
        if name.lower() not in dropped and not name.lower().startswith((b"x-forwarded-", b"proxy-auth"))
    ]
    return [*kept, (b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")] if is_upgrade else kept


def _is_websocket(request: h11.Request) -> bool:
    upgrade = [value.strip().lower() for name, value in request.headers if name == b"upgrade"]
    return upgrade == [b"websocket"] and request.method == b"GET" and request.http_version == b"1.1"


def _without_token(target: bytes) -> tuple[bytes, list[bytes]]:
    """Return a target without the parameter that is the token, and what that was."""
    path, mark, query = target.partition(b"?")
    parts = [each.partition(b"=") for each in query.split(b"&")]
    tokens = [value for name, _, value in parts if name == TOKEN_PARAMETER]
    if not tokens:
        return target, []
    rest = b"&".join(b"".join(each) for each in parts if each[0] != TOKEN_PARAMETER)
    return path + (mark + rest if rest else b""), tokens


def _reaches_others(set_cookie: bytes) -> bool:
    """Whether a cookie would hold for other names than the one that sets it, or takes the place of ours."""
    pair, *attributes = set_cookie.lower().split(b";")
    # Anywhere in the pair: a browser sends a cookie without a name, "=NAME=1", as it would send ours.
    return any(each.lower() in pair for each in (COOKIE, SECURE_COOKIE)) or any(
        b"domain" in each.partition(b"=")[0] for each in attributes
    )
