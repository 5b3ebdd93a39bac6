"""A server in memory, for tests of programs that use the client: sessions, files and scripted commands, no sandbox.

    with FakeServer() as server:
        server.answer("pytest -q", "3 passed\\n")
        with sandkasten.sync.SandboxClient(base_url=server.url) as client:
            assert client.create_session().exec("pytest -q").ok

Sessions, their files, idempotency keys, ids of commands, streams and errors are as the real server's. Commands run
nowhere: the test says what each does. Routes that the fake lacks are answered 404. The standard library serves, in
threads of its own, so clients of every kind can be tested.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from sandkasten import errors

WORKSPACE = "/workspace"
_TTL_S = 1800
_NOT_FOUND_CODE = 127


def _spell_base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode("ascii")


@dataclass(frozen=True)
class Said:
    """Script of a command: its output, and how it ends after `seconds`; `cwd` is where the shell is then."""

    stdout: str = ""
    exit_code: int = 0
    stderr: str = ""
    seconds: float = 0.0
    cwd: str | None = None


@dataclass
class FakeSession:
    """A session: its files by their absolute paths, None for a directory, and the commands that ran in it."""

    id: str
    image: str = "python"
    labels: dict[str, str] = field(default_factory=dict)
    workspace_id: str | None = None
    status: str = "running"
    cwd: str = WORKSPACE
    files: dict[str, bytes | None] = field(default_factory=lambda: {WORKSPACE: None})
    commands: list[str] = field(default_factory=list)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    runs: dict[str, tuple[object, dict[str, Any]]] = field(default_factory=dict)
    """Ended commands by their ids, each with its request."""

    def place(self, path: str) -> str:
        """Return an absolute path without `.` and `..`; a relative one begins at /workspace."""
        parts: list[str] = []
        for part in (PurePosixPath(WORKSPACE) / path).parts[1:]:
            parts = parts[:-1] if part == ".." else [*parts, part]
        return "/" + "/".join(parts)

    def read(self, path: str) -> bytes:
        """Return the content of a file. Raises `FileNotFound`, `IsADirectory`."""
        place = self.place(path)
        if place not in self.files:
            raise FakeRefusal(404, errors.FileNotFound("there is no such file", path=place))
        if (content := self.files[place]) is None:
            raise FakeRefusal(409, errors.IsADirectory("the path is a directory", path=place))
        return content

    def write(self, path: str, content: bytes | None) -> str:
        """Write a file, or with None make a directory, and those above; return the absolute path."""
        place = self.place(path)
        for parent in PurePosixPath(place).parents:
            self.files.setdefault(str(parent), None)
        self.files[place] = content
        return place


class FakeRefusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, error: errors.SandkastenError) -> None:
        super().__init__(error.message)
        self.status, self.error = status, error


Run = Callable[[str, FakeSession], Said]


class FakeServer:
    """A server on a loopback port for as long as the context is open. Tests look at `sessions` and change them."""

    def __init__(self, run: Run | None = None) -> None:
        """Make a server whose commands `run` answers; what it raises as `KeyError` is a command that is not found."""
        self.sessions: dict[str, FakeSession] = {}
        self._answers: dict[str, Said] = {}
        self._run = run
        self._keys: dict[str, tuple[str, object]] = {}
        self._refusals: list[FakeRefusal] = []
        self._lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, command: str, stdout: str = "", **said: Any) -> None:  # fields of Said
        """Say what a command does, from now on."""
        self._answers[command] = Said(stdout, **said)

    def refuse(self, status: int, error: errors.SandkastenError, times: int = 1) -> None:
        """Answer the next requests with an error of the server, such as 503 and `errors.Capacity("full")`."""
        self._refusals += [FakeRefusal(status, error)] * times

    # What requests do -------------------------------------------------------------------------------------------------

    def handle(self, request: FakeRequest) -> FakeReply:
        """Answer a request. Raises `FakeRefusal`."""
        with self._lock:
            if self._refusals:
                raise self._refusals.pop(0)
            for method, pattern, work in _ROUTES:
                if method == request.method and (found := pattern.fullmatch(request.path)):
                    if "id" not in found.groupdict():
                        return work(self, request)
                    return work(self, request, self._session(found["id"]), *found.groups()[1:])
        raise FakeRefusal(404, errors.RouteNotFound("the fake server has no such route"))

    def _session(self, session_id: str) -> FakeSession:
        if (session := self.sessions.get(session_id)) is None:
            raise FakeRefusal(404, errors.SessionNotFound("there is no such session"))
        return session

    def _create(self, request: FakeRequest) -> FakeReply:
        body, key = request.value, request.headers.get("idempotency-key", "")
        made_id, earlier = self._keys.get(key, ("", body))
        if earlier != body:
            raise FakeRefusal(409, errors.Conflict("the idempotency key was used before with another request"))
        if (session := self.sessions.get(made_id)) is None:
            names = ("image", "labels", "workspace_id")
            session = FakeSession(secrets.token_hex(12), **{name: body[name] for name in names if body.get(name)})
            self.sessions[session.id] = session
            self._keys |= {key: (session.id, body)} if key else {}
        _live(session)
        return FakeReply(_body_of(session), 201)

    def _list(self, request: FakeRequest) -> FakeReply:
        wanted = [each for name, each in request.query if name == "label"]
        live = [each for each in reversed(self.sessions.values()) if each.status == "running"]
        return FakeReply([_body_of(each) for each in live if all(_has(each, label) for label in wanted)])

    def _get(self, _request: FakeRequest, session: FakeSession) -> FakeReply:
        return FakeReply(_body_of(session))

    def _destroy(self, _request: FakeRequest, session: FakeSession) -> FakeReply:
        session.status = "destroyed"
        return FakeReply({"ok": True})

    def _stats(self, _request: FakeRequest, session: FakeSession) -> FakeReply:
        _live(session)
        size = sum(len(each or b"") for each in session.files.values())
        return FakeReply({"memory_bytes": size, "memory_limit": 512 * 1024 * 1024, "cpu_usage_usec": 0})

    def _exec(self, request: FakeRequest, session: FakeSession) -> FakeReply:
        end, said = self._execute(request.value, session)
        if end["timed_out"] and request.value.get("on_timeout") != "result":
            raise FakeRefusal(504, errors.CommandTimeout("the command ran out of time", **end, output=said.stdout))
        texts = {"output": said.stdout + said.stderr, "stdout": said.stdout, "stderr": said.stderr}
        spell = _spell_base64 if request.value.get("encoding") == "base64" else str
        output = {name: spell(texts[name]) for name in request.value.get("output_fields", ["output"])}
        total = len(texts["output"].encode())
        return FakeReply(end | output | {"truncated": False, "bytes_total": total, "bytes_omitted": 0})

    def _stream(self, request: FakeRequest, session: FakeSession) -> FakeReply:
        end, said = self._execute(request.value, session)
        chunks = [(name, text) for name, text in (("stdout", said.stdout), ("stderr", said.stderr)) if text]
        seen = int(request.headers.get("last-event-id", "0"))
        spell = _spell_base64 if request.value.get("encoding") == "base64" else str
        events = ""
        for number, (name, text) in enumerate(chunks[seen:], start=seen + 1):
            data = json.dumps({"chunk": spell(text), "timestamp": int(time.time() * 1000), "stream": name})
            events += f"event: chunk\nid: {number}\ndata: {data}\n\n"
        return FakeReply(
            f"{events}event: done\ndata: {json.dumps(end)}\n\n".encode(), headers={"content-type": _EVENTS}
        )

    def _execute(self, body: Mapping[str, Any], session: FakeSession) -> tuple[dict[str, Any], Said]:
        """Run a command, unless it ran under its id, and return its end."""
        _live(session)
        command = body.get("cmd") or " ".join(body.get("argv", ()))
        exec_id = body.get("exec_id") or f"run-{secrets.token_hex(8)}"
        asked = {name: body.get(name) for name in ("cmd", "argv", "cwd", "env", "stdin", "shell")}
        if exec_id not in session.runs:
            session.commands.append(command)
            said = self._said(command, session)
            timeout_ms = body.get("timeout_ms") or 120_000
            is_late = said.seconds * 1000 > timeout_ms
            session.cwd = said.cwd or session.cwd
            end = {
                "exit_code": 124 if is_late else said.exit_code,
                "cause": "timed_out" if is_late else "exited",
                "cwd": session.cwd,
                "duration_ms": min(int(said.seconds * 1000), timeout_ms),
                "exec_id": exec_id,
                "timed_out": is_late,
                "timeout_ms": timeout_ms,
                "shell_restarted": False,
                "queued_ms": 0,
                "usage": {"cpu_ms": 0, "peak_memory_bytes": -1, "written_bytes": -1},
            }
            session.runs[exec_id] = asked, {"end": end, "said": said}
        earlier, kept = session.runs[exec_id]
        if earlier != asked:
            raise FakeRefusal(409, errors.Conflict("the exec_id was used before with another command"))
        return kept["end"], kept["said"]

    def _said(self, command: str, session: FakeSession) -> Said:
        if command in self._answers:
            return self._answers[command]
        try:
            if self._run is not None:
                return self._run(command, session)
        except KeyError:
            pass
        return Said(exit_code=_NOT_FOUND_CODE, stderr=f"{command.split(' ')[0]}: command not found\n")

    # Files ------------------------------------------------------------------------------------------------------------

    def _write(self, request: FakeRequest, session: FakeSession) -> FakeReply:
        _live(session)
        text = request.value.get("text")
        content = base64.b64decode(request.value.get("content_base64", "")) if text is None else text.encode()
        return FakeReply({"ok": True, "path": session.write(request.value["path"], content)})

    def _read(self, request: FakeRequest, session: FakeSession) -> FakeReply:
        _live(session)
        query = dict(request.query)
        content = session.read(query["path"])
        most = int(query.get("max_bytes", 10 * 1024 * 1024))
        text = base64.b64encode(content[:most]).decode()
        return FakeReply(
            {"path": session.place(query["path"]), "content_base64": text, "truncated": len(content) > most}
        )

    def _put(self, request: FakeRequest, session: FakeSession) -> FakeReply:
        _live(session)
        place = session.place(dict(request.query)["path"])
        is_new = place not in session.files
        if not is_new and request.headers.get("if-none-match") == "*":
            raise FakeRefusal(412, errors.PreconditionFailed("there is a file", etag=_etag(session.files[place])))
        session.write(place, request.body)
        return FakeReply(
            {"path": place, "etag": _etag(request.body), "size": len(request.body)}, 201 if is_new else 200
        )

    def _content(self, request: FakeRequest, session: FakeSession) -> FakeReply:
        _live(session)
        content = session.read(dict(request.query)["path"])
        headers = {"content-type": "application/octet-stream", "etag": _etag(content)}
        if (part := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))) is None:
            return FakeReply(content, headers=headers)
        start = int(part[1])
        if start >= len(content):
            raise FakeRefusal(416, errors.RangeNotSatisfiable("the part begins behind the end", size=len(content)))
        return FakeReply(content[start : int(part[2]) + 1 if part[2] else None], 206, headers)

    def _entries(self, request: FakeRequest, session: FakeSession) -> FakeReply:
        _live(session)
        query = dict(request.query)
        top = session.place(query.get("path", ""))
        _entry(session, top)
        depth = int(query.get("depth", 1))
        found = [
            _entry(session, place)
            for place in sorted(session.files)
            if place.startswith(f"{top.rstrip('/')}/") and place[len(top) :].strip("/").count("/") < depth
        ]
        return FakeReply({"path": top, "entries": [each for each in found if each["path"] != "/"]})

    def _stat(self, request: FakeRequest, session: FakeSession) -> FakeReply:
        _live(session)
        return FakeReply(_entry(session, session.place(dict(request.query).get("path", ""))))

    def _stat_many(self, request: FakeRequest, session: FakeSession) -> FakeReply:
        _live(session)
        places = [session.place(path) for path in request.value["paths"]]
        return FakeReply({"entries": [_entry(session, place) if place in session.files else None for place in places]})

    def _mkdir(self, request: FakeRequest, session: FakeSession) -> FakeReply:
        _live(session)
        return FakeReply({"ok": True, "path": session.write(request.value["path"], None)})

    def _remove(self, request: FakeRequest, session: FakeSession) -> FakeReply:
        _live(session)
        query = dict(request.query)
        place = session.place(query["path"])
        _entry(session, place)
        below = [each for each in session.files if each.startswith(f"{place}/")]
        if below and query.get("recursive") != "true":
            raise FakeRefusal(409, errors.NotEmpty("the directory has entries", path=place))
        for each in [place, *below]:
            del session.files[each]
        return FakeReply({"ok": True, "path": place})

    def _health(self, _request: FakeRequest) -> FakeReply:
        return FakeReply({"status": "ok"})


@dataclass
class FakeRequest:
    """A request that has come."""

    method: str
    path: str
    query: list[tuple[str, str]]
    headers: Mapping[str, str]
    body: bytes

    @property
    def value(self) -> Any:  # a JSON object
        """The JSON of the body; an empty one is an empty object."""
        return json.loads(self.body or b"{}")


@dataclass
class FakeReply:
    """An answer: a JSON value, or bytes with headers of their own."""

    value: object
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})

    @property
    def body(self) -> bytes:
        return self.value if isinstance(self.value, bytes) else json.dumps(self.value).encode()


_EVENTS = "text/event-stream"
_SESSION = r"/v1/sessions/(?P<id>[^/]+)"
_ROUTES: list[tuple[str, re.Pattern[str], Callable[..., FakeReply]]] = [
    (method, re.compile(path), work)
    for method, path, work in (
        ("GET", "/healthz", FakeServer._health),
        ("POST", "/v1/sessions", FakeServer._create),
        ("GET", "/v1/sessions", FakeServer._list),
        ("GET", _SESSION, FakeServer._get),
        ("DELETE", _SESSION, FakeServer._destroy),
        ("GET", f"{_SESSION}/stats", FakeServer._stats),
        ("POST", f"{_SESSION}/exec", FakeServer._exec),
        ("POST", f"{_SESSION}/exec/stream", FakeServer._stream),
        ("POST", f"{_SESSION}/fs/write", FakeServer._write),
        ("GET", f"{_SESSION}/fs/read", FakeServer._read),
        ("PUT", f"{_SESSION}/fs/file", FakeServer._put),
        ("GET", f"{_SESSION}/fs/file", FakeServer._content),
        ("GET", f"{_SESSION}/fs/list", FakeServer._entries),
        ("GET", f"{_SESSION}/fs/stat", FakeServer._stat),
        ("POST", f"{_SESSION}/fs/stat", FakeServer._stat_many),
        ("POST", f"{_SESSION}/fs/mkdir", FakeServer._mkdir),
        ("DELETE", f"{_SESSION}/fs", FakeServer._remove),
    )
]


def _live(session: FakeSession) -> None:
    if session.status != "running":
        details = {"status": session.status, "end_reason": "user", "reason": "destroyed by request"}
        raise FakeRefusal(410, errors.SessionExpired("the session has ended", **details))


def _has(session: FakeSession, label: str) -> bool:
    name, sign, value = label.partition("=")
    return session.labels.get(name) == value if sign else name in session.labels


def _body_of(session: FakeSession) -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "id": session.id,
        "image": session.image,
        "status": session.status,
        "cwd": session.cwd,
        "labels": session.labels,
        "created_at": _time(session.created_at),
        "last_activity": _time(now),
        "expires_at": _time(now + timedelta(seconds=_TTL_S)),
        "ttl_seconds": _TTL_S,
        "idle_timeout_seconds": _TTL_S,
    } | ({"workspace_id": session.workspace_id} if session.workspace_id else {})


def _time(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _etag(content: bytes | None) -> str:
    import hashlib

    return f'"{hashlib.sha256(content or b"").hexdigest()[:16]}"'


def _entry(session: FakeSession, place: str) -> dict[str, Any]:
    if place not in session.files:
        raise FakeRefusal(404, errors.FileNotFound("there is no such file", path=place))
    content = session.files[place]
    is_directory = content is None
    return {
        "name": PurePosixPath(place).name,
        "path": place,
        "is_dir": is_directory,
        "type": "directory" if is_directory else "file",
        "size": len(content or b""),
        "mode": "0755" if is_directory else "0644",
        "uid": 1000,
        "gid": 1000,
        "owner": 1000,
        "user": "sandbox",
        "group": "sandbox",
        "modified_at": _time(session.created_at),
        "etag": _etag(content),
    }


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing on the standard error of the tests."""

        def _answer(self) -> None:
            url = urlsplit(self.path)
            body = self._read_body()
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = FakeRequest(self.command, unquote(url.path), parse_qsl(url.query), headers, body)
            try:
                reply = server.handle(request)
            except FakeRefusal as refusal:
                error = refusal.error
                value = {"error_code": error.code, "message": error.message, "retryable": error.retryable}
                reply = FakeReply(value | {"details": dict(error.details), "request_id": "fake"}, refusal.status)
            self.send_response(reply.status)
            for name, each in {**reply.headers, "content-length": str(len(reply.body))}.items():
                self.send_header(name, each)
            self.end_headers()
            self.wfile.write(reply.body)

        def _read_body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 - names that http.server calls

    return Handler
