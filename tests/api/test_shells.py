"""Named shells, and the session's variables."""

from __future__ import annotations

import functools

import pytest
import trio

from runner.wire import protocol
from tests.api.harness import running_front
from tests.api.test_exec import make_session
from tests.fakes.runner import Script


async def test_a_shell_is_opened_listed_used_and_closed() -> None:
    """The default one comes first and stays."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        body = {"name": "build", "shell": "sh", "cwd": "/tmp", "env": {"A": "1"}}
        answer = await client.post(f"{url}/shells", json=body)
        view: dict[str, object] = {"name": "build", "cwd": "/tmp", "running": None, "queued": []}
        assert (answer.status_code, answer.json()) == (201, view)
        (opened,) = [each for each in running.tree.runner.requests if isinstance(each, protocol.OpenShell)]
        assert (opened.name, opened.shell, opened.cwd, dict(opened.env)["A"]) == ("build", "sh", "/tmp", "1")
        listed = (await client.get(f"{url}/shells")).json()["shells"]
        assert [shell["name"] for shell in listed] == ["default", "build"]
        assert (await client.post(f"{url}/exec", json={"cmd": "a", "shell": "build"})).status_code == 200
        request = running.tree.runs[-1].request
        assert isinstance(request, protocol.Exec)
        assert request.shell == "build"
        closed = await client.delete(f"{url}/shells/build")
        assert (closed.status_code, closed.json()) == (200, {"ok": True})
        for answer in (
            await client.delete(f"{url}/shells/build"),
            await client.post(f"{url}/exec", json={"cmd": "a", "shell": "build"}),
        ):
            assert (answer.status_code, answer.json()["error_code"]) == (404, "SHELL_NOT_FOUND")


async def test_a_shell_shows_what_keeps_it_busy() -> None:
    """The run, and the ids of those that wait; closing it ends them."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        await client.post(f"{url}/shells", json={"name": "build"})
        running.tree.scripts.update({"long": Script(hold=trio.Event()), "next": Script(turn=trio.Event())})
        async with trio.open_nursery() as nursery:
            for command in ("long", "next"):
                running.tree.run_opened = trio.Event()
                body = {"cmd": command, "exec_id": command, "shell": "build"}
                nursery.start_soon(functools.partial(client.post, f"{url}/exec", json=body))
                await running.tree.run_opened.wait()
            (_, build) = (await client.get(f"{url}/shells")).json()["shells"]
            assert (build["running"]["exec_id"], build["running"]["state"]) == ("long", "running")
            assert build["queued"] == ["next"]
            await client.delete(f"{url}/shells/build")
            assert [run.cancelled.is_set() for run in running.tree.runs] == [True, True]
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "-a"}, "name"),
        ({"name": "a" * 33}, "name"),
        ({"name": 5}, "name"),
        ({"name": "a", "shell": "fish"}, "shell"),
        ({"name": "a", "cwd": ""}, "cwd"),
        ({"name": "a", "env": {"A=": ""}}, "env"),
    ],
)
async def test_a_bad_shell_is_refused_by_name(body: dict[str, object], field: str) -> None:
    """No shell is opened."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        answer = await client.post(f"{url}/shells", json=body)
        assert (answer.status_code, list(answer.json()["details"])) == (400, [field])
        assert len((await client.get(f"{url}/shells")).json()["shells"]) == 1


async def test_a_name_is_taken_once() -> None:
    """409, for the default one, too, which can't be closed (400)."""
    async with running_front() as running, running.client() as client:
        url = await make_session(running, client)
        await client.post(f"{url}/shells", json={"name": "build"})
        for name in ("build", "default"):
            answer = await client.post(f"{url}/shells", json={"name": name})
            assert (answer.status_code, answer.json()["error_code"]) == (409, "CONFLICT")
        answer = await client.delete(f"{url}/shells/default")
        assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_REQUEST")


async def test_variables_of_a_session_are_changed() -> None:
    """A null removes one; the answer never shows them."""
    async with running_front() as running, running.client() as client:
        session = (await client.post("/v1/sessions", json={"env": {"A": "1", "B": "2"}})).json()
        answer = await client.patch(f"/v1/sessions/{session['id']}", json={"env": {"A": None, "C": "3"}})
        assert answer.status_code == 200
        assert "env" not in answer.json()
        (setup,) = [each for each in running.tree.runner.requests if isinstance(each, protocol.Setup)]
        assert {"A": "1", "B": "2"}.items() <= setup.env.items()
        assert running.tree.runner.requests[-1] == protocol.SetEnv({"A": None, "C": "3"})
