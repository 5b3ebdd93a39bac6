"""Tokens of previews, and what a request and an answer are on the other side of the gateway."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from egress.preview import Site, VisitRefused, answer_outside
from sandkasten.admission.previews import is_admitted, preview_key, sign_preview
from sandkasten.config import PreviewSettings
from sandkasten.model.network import Preview, PreviewAccess

KEY = preview_key(b"k" * 32)
SESSION = "0123456789abcdef01234567"
PREVIEW = Preview(8000, PreviewAccess.TOKEN, "e1", datetime(2030, 1, 1, tzinfo=UTC))
HOST = (b"Host", b"8000-" + SESSION.encode() + b".localhost:8090")


@pytest.mark.parametrize(
    "changed",
    [
        {"port": 8001},
        {"epoch": "e2"},
        {"expires_at": PREVIEW.expires_at + timedelta(milliseconds=1)},
    ],
)
def test_a_token_is_for_one_opening_of_one_port(changed: dict[str, Any]) -> None:
    """Of another port, opening or end it is void; so is that of another session, and that of another key."""
    token = sign_preview(KEY, SESSION, PREVIEW)
    assert is_admitted(KEY, SESSION, PREVIEW, ["x", token])
    assert not is_admitted(KEY, SESSION, attrs.evolve(PREVIEW, **changed), [token])
    assert not is_admitted(KEY, "f" * 24, PREVIEW, [token])
    assert not is_admitted(preview_key(b"l" * 32), SESSION, PREVIEW, [token])
    assert not is_admitted(KEY, SESSION, PREVIEW, [])


def test_a_public_preview_needs_no_token() -> None:
    """A public preview is open without one, and its token opens none with the access `token`."""
    public = attrs.evolve(PREVIEW, access=PreviewAccess.PUBLIC)
    assert is_admitted(KEY, SESSION, public, [])
    assert not is_admitted(KEY, SESSION, PREVIEW, [sign_preview(KEY, SESSION, public)])


@given(st.binary(max_size=400))
def test_any_request_is_read_or_refused(data: bytes) -> None:
    """A request of any bytes that h11 takes is read or refused, and no token is left in what is read."""
    connection = h11.Connection(h11.SERVER)
    head = b"GET /%b HTTP/1.1\r\n%b: %b\r\n" % (data[:80].split(b"\r")[0], *HOST)
    try:
        connection.receive_data(head + data[80:] + b"\r\n\r\n")
        request = connection.next_event()
        if isinstance(request, h11.Request):
            visit = Site().read(request, "127.0.0.1")
            assert b"_sandkasten_token=" not in visit.request.target
            assert h11.Connection(h11.CLIENT).send(visit.request)
    except (h11.RemoteProtocolError, VisitRefused):
        pass


@pytest.mark.parametrize("target", [b"/#_sandkasten_token=t", b"/a/_sandkasten_token=t", b"/?a=1#b_sandkasten_token=t"])
def test_a_token_that_is_no_parameter_goes_to_no_server(target: bytes) -> None:
    """Such a target is refused: what is not found as the token is not taken off."""
    with pytest.raises(VisitRefused, match="parameter"):
        Site().read(h11.Request(method="GET", target=target, headers=[HOST]), "::1")


@pytest.mark.parametrize("named", [b"host", b"content-length", b"transfer-encoding"])
def test_connection_names_no_field_of_the_framing_away(named: bytes) -> None:
    """A field that says where a message ends goes inside, whatever `Connection` says of it."""
    fields = {b"content-length": b"3"} if named != b"transfer-encoding" else {named: b"chunked"}
    request = h11.Request(method="POST", target="/", headers=[HOST, (b"Connection", named), *fields.items()])
    inside = Site().read(request, "::1").request
    assert {name for name, _ in inside.headers} >= {b"host", *fields}


def test_an_answer_is_one_of_http_1_1() -> None:
    """Fields of an old server about its connection stay behind."""
    old = h11.Response(
        status_code=200, headers=[(b"Connection", b"keep-alive"), (b"Keep-Alive", b"9")], http_version=b"1.0"
    )
    answer = answer_outside(old)
    assert answer.http_version == b"1.1"
    assert [name for name, _ in answer.headers] == [b"x-robots-tag"]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"listen": "unix:/x"}, {"listen": "8090"}, {"listen": "h:99999"}, {"domain": "A.b"}, {"domain": "*.b"}),
        *({"publish": "localhost"}, {"publish": "127.0.0.1:80"}, {"publish_ports": "80-2000"}),
        *({"publish_ports": "3000"}, {"publish_ports": "3000-2000"}, {"publish_ports": "3000-70000"}),
    ],
)
def test_an_address_or_a_name_that_is_none_is_refused(wrong: dict[str, str]) -> None:
    """The error names the setting."""
    with pytest.raises(ValueError, match=f"preview.{next(iter(wrong))}"):
        PreviewSettings(**wrong)
