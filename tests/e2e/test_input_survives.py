"""Terminals and input when the daemon is killed in the middle: what goes on, and what says that it can't."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import trio

from tests.e2e.daemon import running_daemon
from tests.e2e.test_runs_survive import WAIT, daemon_with, kill, wait_until
from tests.e2e.test_websocket import Screen, connected, opened

MANY_BYTES = 2 << 20
"""More than all on the way to a program holds."""


def test_half_sent_input_ends_or_can_be_continued(data_dir: Path) -> None:
    """Input that came along with its command and was not all sent when the daemon died can't be completed: the command
    is cancelled and says why. Input sent by further requests can be continued: the program has got a beginning of what
    was sent and nothing else. Closed input stays closed, and the shell works.
    """
    with daemon_with(data_dir) as (first, api):
        body = {"cmd": "echo begun; sleep 1000; cat", "stdin": "x" * MANY_BYTES, "exec_id": "given"}
        api.wait_for({**body, "on_disconnect": "detach"})
        body = {"cmd": f"cat; {WAIT}; echo done", "stdin": "all of it", "exec_id": "whole", "mode": "stateless"}
        api.wait_for({**body, "on_disconnect": "detach"})
        for name, script in {"open": f"{WAIT}; cat >got; echo end", "closed": f"cat; {WAIT}; echo end"}.items():
            process = {"argv": ["sh", "-c", script], "process_id": name}
            assert api.client.post(f"{api.path}/processes", json=process).status_code == 201
        closing = {"text": "line\n", "close": True}
        assert api.client.post(f"{api.path}/execs/closed/stdin", json=closing).json() == {"ok": True}
        broken: list[Exception] = []

        def send() -> None:
            try:
                api.client.post(f"{api.path}/execs/open/stdin", json={"text": "y" * MANY_BYTES})
            except httpx.HTTPError as error:
                broken.append(error)

        sender = threading.Thread(target=send)
        sender.start()
        for name in ("given", "whole"):
            wait_until(lambda name=name: api.run(name).get("state") == "running", name)
        wait_until(lambda: api.output("given") == b"begun\n", "given")
        wait_until(lambda: api.output("whole") == b"all of it", "whole")
        wait_until(lambda: api.output("closed") == b"line\n", "closed")
        sender.join(0.5)
        assert sender.is_alive()
        kill(first)
        sender.join()
        api.join()
        assert len(broken) == 1
    with daemon_with(data_dir, api.path.rpartition("/")[2]) as (_, api):
        assert api.ended("given")["cause"] == "daemon_restarted"
        assert api.exec({"cmd": "echo fine"})["output"] == "fine\n"
        for name in ("open", "closed", "whole"):
            assert api.run(name)["state"] == "running"
        refused = api.client.post(f"{api.path}/execs/closed/stdin", json={"text": "lost"})
        assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_REQUEST")
        api.exec({"argv": ["touch", "go"]})
        on = api.client.post(f"{api.path}/execs/open/stdin", json={"text": "on\n", "close": True})
        assert on.json() == {"ok": True}
        assert [api.ended(name)["cause"] for name in ("open", "closed", "whole")] == ["exited"] * 3
        taken = api.exec({"cmd": "tr -d y <got; wc -c <got"})["output"].split()
        assert taken[0] == "on"
        assert 3 <= int(taken[1]) < MANY_BYTES
        assert api.client.delete(api.path).json() == {"ok": True}


async def test_a_terminal_goes_on_and_is_joined_again(data_dir: Path) -> None:
    """A terminal's shell outlives the daemon; who joins the terminal gets its earlier screen, and input reaches the
    same shell.
    """
    with running_daemon(data_dir) as first:
        with first.client() as http:
            session = str(http.post("/v1/sessions", json={"ttl_seconds": 600}).json()["id"])
        async with opened(first, f"/v1/sessions/{session}/terminal/ws") as person:
            terminal = (await person.hear_text("ready"))["terminal_id"]
            await person.connection.send_message(b"X=kept; echo sc''reen\n")
            await Screen(person).see(b"screen")
            await trio.to_thread.run_sync(kill, first)
    with running_daemon(data_dir) as second:
        async with connected(second, session, "terminal", f"?terminal_id={terminal}") as person:
            see = Screen(person).see
            await see(b"screen")
            await person.connection.send_message(b"echo $X-by-the-sh''ell\n")
            await see(b"kept-by-the-shell")
            await person.say("resize", cols=91, rows=17)
            await person.connection.send_message(b"stty size\n")
            await see(b"17 91")
            await person.connection.send_message(b"exit 3\n")
            await Screen(person, takes_text=True).see(b'"exit_code":3')
        with second.client() as http:
            assert http.delete(f"/v1/sessions/{session}").json() == {"ok": True}
