"""Attacks on previews: by a server in a session, at whoever visits it, at the gateway and at other sessions; and by a
client that has no token.

The server writes down what it heard, so what a client got through is known from where it would have arrived. A
neighbour's preview must answer throughout. Sources: RFC 9112, 11 (response splitting, request smuggling); RFC 6265.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import attrs
import trio

from sandkasten.errors import PreviewsOff
from sandkasten.model import ProcessSpec, WaitFor
from sandkasten.model.network import PreviewAccess, PreviewSpec
from sandkasten.security.attacks.field import Field
from sandkasten.security.probes.attempt import Answers, NotApplicable, attempt, collect

_PORT = 8000
_GOOD = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood"
_HOSTILE = (
    *(
        "",
        "\0" * 9000,
        "SSH-2.0-x\r\n",
        "HTTP/1.1 200 OK\r\n" * 900,
        "HTTP/1.1 999999 x\r\n\r\n",
        "HTTP/9.9 200 OK\r\n\r\n",
    ),
    *("HTTP/1.1 200 OK\r\nX: " + "a" * 200_000 + "\r\n\r\n", "HTTP/1.1 200 OK\r\n" + "A: b\r\n" * 9000 + "\r\n"),
    *(
        "HTTP/1.1 100 x\r\n\r\n" * 9000,
        "HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x04evil",
    ),
    "HTTP/1.1 200 OK\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    "HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nevil",
    "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood" + _GOOD.replace("good", "evil"),
    "HTTP/1.1 204 OK\r\nContent-Length: 0\r\n\r\n" + _GOOD.replace("good", "evil"),
)
"""Answers that a parser may trip over, or that a client may take for two."""

_SERVER = """
import json, os, socket, threading
answers = json.load(open("/tmp/answers"))
def serve(client, answer):
    heard, client_ended = b"", False
    client.settimeout(3)
    try:
        while b"\\r\\n\\r\\n" not in heard:
            if not (data := client.recv(65536)):
                break
            heard += data
        with open("/tmp/heard", "ab") as file:
            file.write(heard)
        client.sendall(answer.encode("latin-1"))
        while data := client.recv(65536):
            with open("/tmp/heard", "ab") as file:
                file.write(data)
    except OSError:
        pass
    client.close()
server = socket.create_server(("127.0.0.1", 8000), backlog=64)
number = 0
while True:
    client, _ = server.accept()
    threading.Thread(target=serve, args=(client, answers[number % len(answers)])).start()
    number += 1
"""


@attrs.define
class _Visited:
    """A session with a server and a preview of it."""

    field: Field
    session_id: str
    port: int
    host: str
    token: str

    def request(self, *lines: str, target: str = "/", method: str = "GET", token: str | None = None) -> bytes:
        """A request to the preview, the last of its connection."""
        head = [f"{method} {target} HTTP/1.1", f"Host: {self.host}", *lines]
        head += [f"X-Sandkasten-Preview-Token: {token}"] if token else []
        return "\r\n".join([*head, "Connection: close", "", ""]).encode()

    async def talk(self, data: bytes) -> bytes:
        """Send bytes to the gateway, and return the answer up to the end of the connection, an error, or 10 s."""
        said = b""
        with trio.move_on_after(10 * self.field.patience):
            try:
                async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
                    await stream.send_all(data)
                    async for piece in stream:
                        said += piece
            except (OSError, trio.BrokenResourceError):
                pass
        return said

    async def heard(self) -> bytes:
        """Return what the server has heard."""
        return (await self.field.run(self.session_id, "cat /tmp/heard")).stdout


@asynccontextmanager
async def _site(field: Field, answers: Sequence[str]) -> AsyncIterator[_Visited]:
    """Make a session whose server gives these answers in turn.

    Raises:
        NotApplicable: this machine serves no previews.
    """
    async with field.session() as session_id:
        # JSON's list of plain texts is Python's.
        plant = f"import json\njson.dump({list(answers)!r}, open('/tmp/answers', 'w'))\nopen('/tmp/heard', 'w')"
        await field.python(session_id, plant)
        process = await field.supervisor.start_process(
            session_id, ProcessSpec(argv=("python3", "-I", "-S", "-c", _SERVER), user=field.exec_user)
        )
        ready = WaitFor(port=_PORT)
        await field.supervisor.wait_process(session_id, process.exec_id, ready, timeout_s=10 * field.patience)
        try:
            opened = await field.supervisor.open_preview(session_id, PreviewSpec(_PORT))
        except PreviewsOff as error:
            raise NotApplicable(str(error)) from None
        place = urlsplit(opened.url)
        yield _Visited(field, session_id, place.port or 0, place.netloc, opened.token or "")


@attempt("previews.server", "confuse or crash the gateway by what a server answers, and add a second answer",
         "CWE-444", ("answers", "not there"))  # fmt: skip
async def answer_badly(field: Field) -> Answers:
    async with _site(field, _HOSTILE) as attacker, _site(field, [_GOOD]) as neighbour:
        said = [await attacker.talk(attacker.request(token=attacker.token)) for _ in _HOSTILE]
        seen = await neighbour.talk(neighbour.request(token=neighbour.token))
        second = [each for each in said if each.count(b"HTTP/1.") > 1 or b"evil" in each]
        return {
            "neighbour": "answers" if seen.endswith(b"good") else f"says {seen[:60]!r}",
            "second answer": "not there" if not second else f"{second[0][:80]!r}",
        }


@attempt("previews.cookies", "set a cookie for the previews of others, and take the visitor's token", "CWE-1275",
         ("own cookies alone", "no token"))  # fmt: skip
async def take_token(field: Field) -> Answers:
    cookies = ["own=1", "a=1; Domain=localhost", "b=1; DOMAIN = .localhost", "_sandkasten_preview=1", "c=1;domain"]
    cookies += ["=_sandkasten_preview=1", "d _Sandkasten_preview=1"]
    lines = "".join(f"Set-Cookie: {each}\r\n" for each in cookies)
    async with _site(field, [f"HTTP/1.1 200 OK\r\n{lines}Content-Length: 0\r\n\r\n"]) as site:
        token, cookie = site.token, f"Cookie: a=1; _sandkasten_preview={site.token}; b=2"
        said = await site.talk(site.request(token=token))
        await site.talk(site.request(cookie, f"Connection: X-T, X-Sandkasten-Preview-Token, Host\r\nX-T: {token[:9]}"))
        await site.talk(site.request("Content-Length: 0", target=f"/?x=1&_sandkasten_token={token}", method="POST"))
        heard = await site.heard()
        kept = [line for line in said.split(b"\r\n") if line.lower().startswith(b"set-cookie")]
        is_whole = heard.count(b"HTTP/1.1\r\n") == 3
        return {
            "cookies": "own cookies alone" if kept == [b"Set-Cookie: own=1"] else f"{kept}",
            "heard": ("no token" if token.encode() not in heard else "the token") if is_whole else f"{heard[:80]!r}",
        }


@attempt("previews.no-token", "reach a server without its token, by another's, or behind a request that has it",
         "CWE-444", ("heard nothing",))  # fmt: skip
async def get_in(field: Field) -> Answers:
    """Each request names `/secret`; what the attacker may ask for is another path."""
    async with _site(field, [_GOOD]) as target, _site(field, [_GOOD]) as own:
        secret = target.request("X: y", target="/secret", token=None)
        allowed = own.request(token=own.token).replace(b"Connection: close\r\n", b"")
        chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(secret), secret)
        for each in (
            secret,
            target.request(target="/secret", token=own.token),
            target.request(f"Cookie: _sandkasten_preview={own.token}", target=f"/secret?_sandkasten_token={own.token}"),
            allowed + secret,
            allowed.replace(b"GET", b"POST")[:-2] + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk,
            allowed.replace(b"GET", b"POST")[:-2] + b"Transfer-Encoding: x, chunked\r\n\r\n" + chunk,
            allowed.replace(b"GET", b"POST")[:-2] + b"Content-Length: 0, 9\r\n\r\n" + secret,
            own.request(f"Host: {target.host}", target="/secret", token=own.token),
            f"GET http://{target.host}/secret HTTP/1.1\r\nHost: {own.host}\r\n\r\n".encode(),
        ):
            await own.talk(each)
        heard = await target.heard()
        await target.talk(target.request(target="/open", token=target.token))
        if b"/open" not in await target.heard() or b"GET / " not in await own.heard():
            return {"target": "hears nobody"}
        return {"target": "heard nothing" if not heard else f"heard {heard[:80]!r}"}


@attempt("previews.from-inside", "reach the gateway and published ports of the node from inside", "CWE-918",
         ("ECONNREFUSED",))  # fmt: skip
async def reach_gateway(field: Field) -> Answers:
    """The session's loopback is its own: nothing of the node listens there."""
    async with _site(field, [_GOOD]) as site, _site(field, [_GOOD]) as other:
        await field.supervisor.close_preview(other.session_id, _PORT)
        local = await field.supervisor.open_preview(other.session_id, PreviewSpec(_PORT, access=PreviewAccess.LOCAL))
        ports = {"gateway": site.port, "published": local.preview.host_port}
        program = (
            "import errno, json, socket\n"
            f"for name, port in {ports!r}.items():\n"
            "    with socket.socket() as client:\n"
            "        code = client.connect_ex(('127.0.0.1', port))\n"
            "        print(name, errno.errorcode.get(code, 'connected'))\n"
        )
        said = (await field.python(site.session_id, program)).stdout.decode().split()
        return {**dict.fromkeys(ports, "no answer"), **dict(zip(said[::2], said[1::2], strict=False))}


WAYS_IN = collect(globals())
