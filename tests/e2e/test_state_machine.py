"""Any sequence of requests, kills of the daemon included, against a model that knows what must be true afterwards.

The model is small: which sessions live, what is in their files, shells and workspaces, who is paused. Hypothesis says
what happens next; one daemon after the other serves the same data directory.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tests.e2e.daemon import Daemon, running_daemon
from tests.kernel.harness import wait_until

RESTARTS = 2
"""Kills of the daemon in one sequence, at most: a start takes as long as a hundred requests."""
AT_ONCE = 4
NAMES = st.sampled_from(["a", "b.txt", "with space", "ünïcode"])
CONTENTS = st.binary(max_size=200)
WORDS = st.text("abcXYZ 0189'\"$`\\", max_size=12)


class Node:
    """One data directory and the daemon that serves it now."""

    def __init__(self, data_dir: Path, stack: ExitStack) -> None:
        self._data_dir, self._stack = data_dir, stack
        self._start()

    def _start(self) -> None:
        self._daemon: Daemon = self._stack.enter_context(
            running_daemon(self._data_dir, SANDKASTEN_SERVER_POOL_SANDBOXES="1")
        )
        self.http: httpx.Client = self._stack.enter_context(self._daemon.client())

    def kill_and_start(self) -> None:
        self._daemon.process.kill()
        self._daemon.process.wait()
        self._start()


@pytest.fixture
def node(data_dir: Path) -> Iterator[Node]:
    with ExitStack() as stack:
        yield Node(data_dir, stack)


@attrs.define(eq=False)
class Modelled:
    """A session as it must be. Files are those of its workspace if it has one."""

    id: str
    files: dict[str, bytes]
    variable: str = ""
    cwd: str = "/workspace"
    is_paused: bool = False
    wakes_by_itself: bool = True
    ended: str = ""


class Requests(RuleBasedStateMachine):
    """See the module's docstring."""

    node: Node
    counter = 0
    live = Bundle("live")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        Requests.counter += 1
        self._prefix = f"ws-{Requests.counter}"
        self._workspaces: dict[str, dict[str, bytes]] = {}
        self._sessions: list[Modelled] = []
        self._restarts = 0
        self._keys = 0

    # Requests ---------------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, body: object = None, **options: Any) -> httpx.Response:  # of httpx
        return self.node.http.request(method, path, json=body, **options)

    def _ok(self, method: str, path: str, body: object = None, status: int = 200) -> Any:  # JSON
        answer = self._call(method, path, body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def _run(self, session: Modelled, command: str) -> Any:  # JSON
        """Run a command in a session that lives; one that does not wake by itself is woken."""
        if session.is_paused and not session.wakes_by_itself:
            answer = self._call("POST", f"/v1/sessions/{session.id}/exec", {"cmd": command})
            assert (answer.status_code, answer.json()["error_code"]) == (409, "SESSION_PAUSED"), answer.text
            self._ok("POST", f"/v1/sessions/{session.id}/resume")
        session.is_paused = False
        return self._ok("POST", f"/v1/sessions/{session.id}/exec", {"cmd": command})

    # Rules ------------------------------------------------------------------------------------------------------

    @rule(target=live, workspace=st.sampled_from([None, "x", "y"]), repeat=st.booleans())
    def create(self, workspace: str | None, repeat: bool) -> Modelled:
        """A create repeated with its key is answered with the same session."""
        self._keys += 1
        body: dict[str, object] = {"ttl_seconds": 600, "idempotency_key": f"{self._prefix}-{self._keys}"}
        files: dict[str, bytes] = {}
        if workspace is not None:
            name = body["workspace_id"] = f"{self._prefix}-{workspace}"
            files = self._workspaces.setdefault(name, {})
        made = self._ok("POST", "/v1/sessions", body, 201)
        if repeat:
            assert self._ok("POST", "/v1/sessions", body, 201)["id"] == made["id"]
        session = Modelled(made["id"], files)
        self._sessions.append(session)
        return session

    @rule(session=live, word=WORDS)
    def set_variable(self, session: Modelled, word: str) -> None:
        quoted = "'" + word.replace("'", "'\\''") + "'"
        assert self._run(session, f"VARIABLE={quoted}; export VARIABLE")["exit_code"] == 0
        session.variable = word

    @rule(session=live, place=st.sampled_from(["/tmp", "/workspace", "/home/sandbox"]))
    def change_directory(self, session: Modelled, place: str) -> None:
        assert self._run(session, f"cd {place}")["cwd"] == place
        session.cwd = place

    @rule(session=live)
    def look_around(self, session: Modelled) -> None:
        """Variable and directory are those of the last command that changed them."""
        answer = self._run(session, 'printf "%s\\n" "$VARIABLE" "$PWD"')
        assert answer["output"] == f"{session.variable}\n{session.cwd}\n"

    @rule(session=live, status=st.integers(0, 255))
    def replace_the_shell(self, session: Modelled, status: int) -> None:
        """A shell that ends has a successor with the same exports, in the same place."""
        answer = self._run(session, f"exit {status}")
        assert (answer["exit_code"], answer["cause"]) == (status, "exited"), answer

    @rule(session=live, name=NAMES, content=CONTENTS)
    def write(self, session: Modelled, name: str, content: bytes) -> None:
        if session.is_paused and not session.wakes_by_itself:
            return
        body = {"path": name, "content_base64": base64.b64encode(content).decode()}
        self._ok("POST", f"/v1/sessions/{session.id}/fs/write", body)
        session.is_paused = False
        session.files[name] = content

    @rule(session=live, name=NAMES)
    def read(self, session: Modelled, name: str) -> None:
        if session.is_paused and not session.wakes_by_itself:
            return
        answer = self._call("GET", f"/v1/sessions/{session.id}/fs/read", params={"path": name})
        session.is_paused = False
        if name in session.files:
            assert base64.b64decode(answer.json()["content_base64"]) == session.files[name]
        else:
            assert (answer.status_code, answer.json()["error_code"]) == (404, "FILE_NOT_FOUND")

    @rule(session=live, wakes_by_itself=st.booleans())
    def pause(self, session: Modelled, wakes_by_itself: bool) -> None:
        if session.is_paused:
            return
        self._ok("POST", f"/v1/sessions/{session.id}/pause", {"auto_resume": wakes_by_itself})
        session.is_paused, session.wakes_by_itself = True, wakes_by_itself

    @rule(session=live)
    def resume(self, session: Modelled) -> None:
        self._ok("POST", f"/v1/sessions/{session.id}/resume")
        session.is_paused = False

    @rule(session=live)
    def run_at_once(self, session: Modelled) -> None:
        """Commands of one shell run one after the other, each with its own answer."""
        self._run(session, "N=0")
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = list(threads.map(lambda _: self._run(session, "N=$((N+1)); echo $N"), range(AT_ONCE)))
        assert sorted(answer["output"] for answer in answers) == [f"{number}\n" for number in range(1, AT_ONCE + 1)]

    @rule(target=ended, session=consumes(live))
    def destroy(self, session: Modelled) -> Modelled:
        assert self._ok("DELETE", f"/v1/sessions/{session.id}") == {"ok": True}
        return self._end(session, "destroyed")

    @rule(target=ended, session=consumes(live))
    def expire(self, session: Modelled) -> Modelled:
        """A lease that was shortened ends when it says."""
        self._ok("PATCH", f"/v1/sessions/{session.id}", {"ttl_seconds": 1})
        wait_until(lambda: self._ok("GET", f"/v1/sessions/{session.id}")["status"] == "expired", "it expires")
        return self._end(session, "expired")

    def _end(self, session: Modelled, status: str) -> Modelled:
        session.ended = status
        self._sessions.remove(session)
        return session

    @rule(session=ended)
    def ask_the_dead(self, session: Modelled) -> None:
        """An ended session answers with its final status; a second DELETE is no error."""
        answer = self._call("POST", f"/v1/sessions/{session.id}/exec", {"cmd": ":"})
        assert (answer.status_code, answer.json()["error_code"]) == (410, "SESSION_EXPIRED")
        assert answer.json()["details"]["status"] == session.ended
        assert self._ok("DELETE", f"/v1/sessions/{session.id}") == {"ok": True}

    @precondition(lambda self: self._restarts < RESTARTS and self._sessions)
    @rule()
    def kill_the_daemon(self) -> None:
        """A killed daemon's successor serves all living sessions unchanged."""
        self._restarts += 1
        self.node.kill_and_start()

    # Invariants -------------------------------------------------------------------------------------------------

    @invariant()
    def the_list_is_what_lives(self) -> None:
        listed = {each["id"]: each["status"] for each in self._ok("GET", "/v1/sessions")}
        assert listed == {each.id: "paused" if each.is_paused else "running" for each in self._sessions}

    def teardown(self) -> None:
        for session in self._sessions:
            self._ok("DELETE", f"/v1/sessions/{session.id}")


def test_any_sequence_of_requests_does_what_the_model_says(node: Node) -> None:
    """Create, run, write, pause, expire, destroy, kill the daemon, in any order and several at once."""
    Requests.node = node
    run_machine(
        Requests,
        settings=settings(
            max_examples=6,
            stateful_step_count=25,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # to shrink takes minutes, and a sequence is short
            suppress_health_check=list(HealthCheck),
        ),
    )
