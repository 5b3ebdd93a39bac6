"""The whole way: HTTP in, a real sandbox below, HTTP out."""

from __future__ import annotations

import base64
import json
import time

import httpx
import pytest

from tests.e2e.daemon import Daemon


@pytest.fixture
def session(client: httpx.Client) -> str:
    answer = client.post("/v1/sessions", json={})
    assert answer.status_code == 201, answer.text
    session_id: str = answer.json()["id"]
    return session_id


def _exec(client: httpx.Client, session: str, cmd: str, **fields: object) -> httpx.Response:
    return client.post(f"/v1/sessions/{session}/exec", json={"cmd": cmd, **fields})


def test_a_first_session(client: httpx.Client) -> None:
    """The session of the README: create, run, write, read, list, stats, delete."""
    created = client.post("/v1/sessions", json={"image": "python", "ttl_seconds": 600})
    assert created.status_code == 201
    assert created.json()["status"] == "running"
    assert created.json()["cwd"] == "/workspace"
    url = f"/v1/sessions/{created.json()['id']}"
    ran = client.post(f"{url}/exec", json={"cmd": "python3 -c 'print(6*7)'"}).json()
    assert (ran["exit_code"], ran["output"], ran["cwd"], ran["truncated"]) == (0, "42\n", "/workspace", False)
    assert client.post(f"{url}/fs/write", json={"path": "a/b.txt", "text": "hello"}).json()["ok"] is True
    read = client.get(f"{url}/fs/read", params={"path": "a/b.txt"}).json()
    assert base64.b64decode(read["content_base64"]) == b"hello"
    assert read["truncated"] is False
    assert [each["id"] for each in client.get("/v1/sessions").json()] == [created.json()["id"]]
    assert client.get(f"{url}/stats").json()["memory_bytes"] > 0
    assert client.delete(url).json() == {"ok": True}
    assert client.delete(url).json() == {"ok": True}
    assert client.get(url).json()["status"] == "destroyed"
    gone = client.post(f"{url}/exec", json={"cmd": "true"})
    assert (gone.status_code, gone.json()["error_code"]) == (410, "SESSION_EXPIRED")


def test_state_persists_between_requests(client: httpx.Client, session: str) -> None:
    """Directory, variables, functions and aliases are there at the next request."""
    _exec(client, session, "cd /tmp; export A=1; b=2; f() { echo f$1; }; alias g='echo g'")
    answer = _exec(client, session, "echo $A $b; f 3; g; pwd").json()
    assert answer["output"] == "1 2\nf3\ng\n/tmp\n"


def test_a_timeout_is_504_with_the_output_so_far_and_the_shell_lives(client: httpx.Client, session: str) -> None:
    """A command that ran out of time is answered 504 with its output so far, or as a result when asked for; the shell
    lives.
    """
    answer = _exec(client, session, "x=1; echo before; sleep 30; echo never", timeout_ms=300)
    assert answer.status_code == 504
    assert answer.json()["error_code"] == "COMMAND_TIMEOUT"
    assert answer.json()["details"]["output"] == "before\n"
    answer = _exec(client, session, "echo $x; sleep 30", timeout_ms=300, on_timeout="result")
    assert answer.status_code == 200
    assert (answer.json()["timed_out"], answer.json()["exit_code"], answer.json()["output"]) == (True, 124, "1\n")
    assert _exec(client, session, "echo $x").json()["output"] == "1\n"


@pytest.mark.parametrize(
    ("cmd", "exit_code", "output"),
    [
        ("exit 3", 3, ""),
        ("exec sleep 0.1", 0, ""),
        ("kill -9 $$", 137, ""),
        ("set -e; false", 1, ""),
        ("cat", 0, ""),
        ("read x; echo $?", 0, "1\n"),
        ("printf 'no newline'", 0, "no newline"),
        ("head -c 3 /dev/zero | od -An -c", 0, "  \\0  \\0  \\0\n"),
        ("nosuchcommand 2>/dev/null", 127, ""),
        ("umask; echo $HOME; hostname | cut -c1-3; pwd", 0, "0022\n/home/sandbox\nsk-\n/workspace\n"),
    ],
)
def test_awkward_commands_end_and_the_next_one_works(
    client: httpx.Client, session: str, cmd: str, exit_code: int, output: str
) -> None:
    """An awkward command has its true status, and the session goes on."""
    answer = _exec(client, session, cmd).json()
    assert (answer["exit_code"], answer["output"]) == (exit_code, output)
    assert _exec(client, session, "echo next").json()["output"] == "next\n"


@pytest.mark.parametrize("cmd", ["echo 'unclosed", "cat <<EOF\nnever ended", "if true; then"])
def test_unfinished_syntax_is_an_error_and_not_a_hang(client: httpx.Client, session: str, cmd: str) -> None:
    """A command with unfinished syntax ends with the shell's message; the next command works."""
    answer = _exec(client, session, cmd, timeout_ms=5000).json()
    assert answer["cause"] == "exited"
    assert _exec(client, session, "echo next").json()["output"] == "next\n"


def test_a_stream_arrives_as_it_is_written(client: httpx.Client, session: str) -> None:
    """Chunks come before the command ends; the last event carries its result."""
    began = time.monotonic()
    events: list[tuple[float, str, dict[str, object]]] = []
    body = {"cmd": "echo one; sleep 0.5; echo two >&2; exit 4"}
    with client.stream("POST", f"/v1/sessions/{session}/exec/stream", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                events.append((time.monotonic() - began, name, json.loads(line[6:])))
    assert [name for _, name, _ in events] == ["chunk", "chunk", "done"]
    assert [event["chunk"] for _, _, event in events[:2]] == ["one\n", "two\n"]
    assert events[0][0] < 0.45
    assert events[2][2]["exit_code"] == 4


def test_large_output_keeps_head_and_tail(client: httpx.Client, session: str) -> None:
    """100 MB are counted, capped, and cost no more than the cap."""
    answer = _exec(client, session, "echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last").json()
    assert answer["bytes_total"] == 100_000_000 + len("first\n\nlast\n")
    assert answer["truncated"] is True
    assert answer["output"].startswith("first\nxxx")
    assert answer["output"].endswith("xxx\nlast\n")
    assert len(answer["output"]) <= 5 * 1024 * 1024 + len("\n… 94.8 MB left out …\n")
    assert answer["output"].count("\n… 94.8 MB left out …\n") == 1
    assert _exec(client, session, "echo next").json()["output"] == "next\n"


def test_a_command_of_a_mebibyte_runs_and_more_is_refused(client: httpx.Client, session: str) -> None:
    """A command of exactly the limit runs; a longer one is refused, and the refusal names the limit."""
    mebibyte = 1024 * 1024
    frame = len("x=''; echo ${#x}")
    fits = "x='" + "y" * (mebibyte - frame) + "'; echo ${#x}"
    assert len(fits) == mebibyte
    assert _exec(client, session, fits).json()["output"] == f"{mebibyte - frame}\n"
    refused = _exec(client, session, fits + " ")
    assert (refused.status_code, refused.json()["error_code"]) == (413, "TOO_LARGE")
    assert refused.json()["details"]["max_cmd_bytes"] == mebibyte


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("missing", 404, "FILE_NOT_FOUND"),
        ("/proc/self/environ", 409, "NOT_A_FILE"),
        ("../proc/self/environ", 409, "NOT_A_FILE"),
        ("link", 409, "NOT_A_FILE"),
        ("/dev/zero", 409, "NOT_A_FILE"),
        ("loop", 400, "PATH_OUTSIDE"),
        ("fifo", 409, "NOT_A_FILE"),
        ("/workspace", 409, "IS_DIRECTORY"),
        ("secret", 403, "PERMISSION_DENIED"),
        ("", 400, "INVALID_REQUEST"),
        ("a\0b", 400, "INVALID_REQUEST"),
        ("file/below", 404, "FILE_NOT_FOUND"),
    ],
)
def test_bad_paths_have_typed_answers(client: httpx.Client, session: str, path: str, status: int, code: str) -> None:
    """A bad path is refused with the code of its defect, and nothing hangs."""
    _exec(
        client,
        session,
        "ln -s /proc/version link; ln -s loop loop; mkfifo fifo; touch file; touch secret; chmod 0 secret",
    )
    answer = client.get(f"/v1/sessions/{session}/fs/read", params={"path": path})
    assert (answer.status_code, answer.json()["error_code"]) == (status, code)
    assert _exec(client, session, "echo next").json()["output"] == "next\n"


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/workspace", 409, "IS_DIRECTORY"),
        ("/workspace/", 409, "IS_DIRECTORY"),
        ("/tmp", 409, "IS_DIRECTORY"),
        ("/home/sandbox/.", 409, "IS_DIRECTORY"),
        ("directory", 409, "IS_DIRECTORY"),
        ("new/", 409, "IS_DIRECTORY"),
        ("..", 409, "IS_DIRECTORY"),
        ("/", 409, "IS_DIRECTORY"),
        ("/etc", 409, "IS_DIRECTORY"),
        ("link", 403, "PERMISSION_DENIED"),
        ("/proc/sys/kernel/hostname", 409, "NOT_A_FILE"),
        ("fifo", 409, "NOT_A_FILE"),
        ("file/below", 404, "FILE_NOT_FOUND"),
    ],
)
def test_bad_places_to_write_have_the_same_answers_as_to_read(
    client: httpx.Client, session: str, path: str, status: int, code: str
) -> None:
    """Writing to a bad path is refused with the same code as reading, to any directory too, and nothing is made on the
    way.
    """
    _exec(client, session, "ln -s /etc/passwd link; mkfifo fifo; touch file; mkdir directory")
    answer = client.post(f"/v1/sessions/{session}/fs/write", json={"path": path, "text": "no"})
    assert (answer.status_code, answer.json()["error_code"]) == (status, code)
    assert _exec(client, session, "ls").json()["output"] == "directory\nfifo\nfile\nlink\n"


def test_uploads_are_exact_and_the_sandbox_user_owns_them(client: httpx.Client, session: str) -> None:
    """Uploads of binary content, of several files, and into a new directory arrive exactly and belong to the sandbox
    user.
    """
    data = bytes(range(256)) * 1000
    files = [("files", ("one.bin", data)), ("files", ("../../two.bin", b""))]
    answer = client.post(f"/v1/sessions/{session}/fs/upload", data={"path": "in/put"}, files=files)
    assert answer.json() == {"ok": True, "paths": ["/workspace/in/put/one.bin", "/workspace/in/put/two.bin"]}
    listed = _exec(client, session, "stat -c '%n %s %U %a' in/put/*").json()["output"]
    assert listed == "in/put/one.bin 256000 sandbox 644\nin/put/two.bin 0 sandbox 644\n"
    read = client.get(f"/v1/sessions/{session}/fs/read", params={"path": "in/put/one.bin"}).json()
    assert base64.b64decode(read["content_base64"]) == data


def test_health_needs_no_key_and_everything_else_does(daemon: Daemon) -> None:
    """A request without a key is answered 401, with a request id like every other answer; health checks need no key."""
    with httpx.Client(base_url=daemon.wait_url()) as anonymous:
        assert anonymous.get("/healthz").json()["status"] == "ok"
        refused = anonymous.get("/v1/sessions")
        assert (refused.status_code, refused.json()["error_code"]) == (401, "UNAUTHORIZED")
        assert refused.json()["request_id"] == refused.headers["x-request-id"]


def test_readiness_checks_store_fork_server_and_disk(client: httpx.Client) -> None:
    """The readiness answer names each check."""
    answer = client.get("/readyz")
    assert answer.status_code == 200
    assert {"store", "nsinit", "disk"} <= answer.json()["checks"].keys()


def test_the_log_names_sessions_and_requests_and_hides_commands_and_keys(
    client: httpx.Client, session: str, daemon: Daemon
) -> None:
    """The log names sessions and requests, and holds neither the API key nor commands and variables of clients."""
    body = {"cmd": "echo a-private-command", "env": {"TOKEN": "a-private-value"}}
    client.post(f"/v1/sessions/{session}/exec", json=body, headers={"X-Request-ID": "traced-request"})
    daemon.wait_log(f'"session_id": "{session}", "request_id": "traced-request"')
    text = "\n".join(daemon.log)
    assert session in text
    assert "a-private" not in text
    assert "test-key-0123456789" not in text


def test_a_session_says_that_it_is_about_to_end(client: httpx.Client) -> None:
    """A session within a minute of its end says so with the reason; activity in it puts the end off."""
    session = client.post("/v1/sessions", json={"ttl_seconds": 61}).json()["id"]
    from_the_first = {"types": "session.expiring", "cursor": "0"}  # which comes a second after the answer
    with client.stream("GET", f"/v1/sessions/{session}/events", params=from_the_first) as events:
        told = next(line for line in events.iter_lines() if line.startswith("data: "))
    event = json.loads(told.removeprefix("data: "))
    assert (event["type"], event["session_id"]) == ("session.expiring", session)
    assert (event["data"]["end_reason"], event["data"]["remaining_s"]) == ("idle", 60)
