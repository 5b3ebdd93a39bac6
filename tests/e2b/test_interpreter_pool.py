"""Sandboxes of a pool whose kernels run before anybody asks for them: frozen, thawed, over a restart of the daemon."""

from __future__ import annotations

import ast
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio

from sandkasten.actors.node import session_pools
from sandkasten.api.e2b.context import TEMPLATE, USER
from sandkasten.api.e2b.interpreter import WARM_CONTEXT, warm_pools
from sandkasten.api.e2b.sandboxes import INTERPRETER_TEMPLATE, E2bTerms
from sandkasten.app import StopOrder, open_tree, prepare_images
from sandkasten.config import Config, PoolSettings, PoolSize, ServerSettings
from sandkasten.config.seccomp import load_filters
from sandkasten.host import examine
from sandkasten.host.data_dir import make_data_dir
from sandkasten.images.catalog import Catalog
from sandkasten.links.processes import start_as_child
from sandkasten.model import SessionSpec
from tests.e2b.conftest import publish_interpreter
from tests.e2e.daemon import KEY, Daemon, running_daemon
from tests.waiting import patience, until

pytestmark = pytest.mark.kernel

_LOOK = """
import os, time
stat = open('/proc/self/stat').read().rpartition(')')[2].split()  # proc(5): starttime is the 22nd field
int(stat[19]) / os.sysconf('SC_CLK_TCK'), os.getpid(), os.environ.get('A'), os.getcwd(), time.tzname[0]
"""


class Client:
    """A client of one sandbox, which a daemon serves."""

    def __init__(self, daemon: Daemon, sandbox_id: str) -> None:
        self._url = daemon.wait_url()
        asked = httpx.get(f"{self._url}/sandboxes/{sandbox_id}", headers={"X-API-KEY": KEY})
        token = asked.raise_for_status().json()["envdAccessToken"]
        self._headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "49999", "X-Access-Token": token}

    def ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        url, timeout = f"{self._url}{path}", patience(60)
        return httpx.request(method, url, json=body, headers=self._headers, timeout=timeout).raise_for_status()

    def run(self, code: str, **variables: str) -> Any:
        """Run code and return the value of its last line, None without one."""
        answer = self.ask("POST", "/execute", {"code": code, "env_vars": variables})
        told = [json.loads(line) for line in answer.text.splitlines()]
        assert not [each for each in told if each["type"] == "error"], told
        return next((ast.literal_eval(each["text"]) for each in told if each["type"] == "result"), None)


def now() -> float:
    """Return the time since the machine's boot, as `_LOOK` has it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def test_the_first_code_finds_a_kernel_that_is_older_than_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members were frozen with their kernels. One is claimed by E2B's API of the next daemon: its first code runs
    in the kernel that was there, with the variables of the create, which code may remove and a restart brings back. The
    other was claimed before, with a variable that Python reads as it begins: it has a kernel that began after that."""
    monkeypatch.setattr(session_pools, "FREEZE_AFTER_S", 0.1)
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory:
        images = {INTERPRETER_TEMPLATE: PoolSize(2, account=USER)}
        config = Config(
            data_dir=Path(directory) / "data",
            server=ServerSettings(pool_sandboxes=0),
            pool=PoolSettings(enabled=True, images=images),
        )
        make_data_dir(config.data_dir)
        prepare_images(Catalog(config.data_dir))
        publish_interpreter(config.data_dir)
        warm = warm_pools(images, E2bTerms(key=b""))
        machine = await trio.to_thread.run_sync(partial(examine.examine, config.data_dir, config=config))
        order, filters = StopOrder(ends_sessions=False), load_filters(config.security)
        async with open_tree(config, machine, filters, start_as_child, order, warm=warm) as supervisor:

            async def are_frozen() -> bool:
                (pool,) = await supervisor.pools()
                assert pool.error is None
                return pool.frozen == 2

            await until(are_frozen)
            spec = SessionSpec(image=INTERPRETER_TEMPLATE, account=USER, warm=WARM_CONTEXT.spec.process_id)
            spec = attrs.evolve(spec, env={"A": "1", "TZ": "JST-9"}, labels={TEMPLATE: INTERPRETER_TEMPLATE})
            asked_at = now()
            claimed = await supervisor.create(spec)
            assert claimed.acquire_source == "pool"
            await supervisor.drain()  # nobody needs another member
        file = Path(directory) / "daemon.yaml"
        pool = {"enabled": True, "images": {INTERPRETER_TEMPLATE: {"size": 1, "account": USER}}}
        file.write_text(json.dumps({"e2b": {"enabled": True}, "pool": pool}))
        with running_daemon(config.data_dir, "--config", str(file)) as daemon:
            await trio.to_thread.run_sync(_use, daemon, claimed.id, asked_at)


def _use(daemon: Daemon, claimed_id: str, claimed_at: float) -> None:
    with daemon.client() as client:
        (member,) = client.get("/v1/sessions?status=pool_idle").json()
        client.post("/v1/node/undrain").raise_for_status()
        body, asked_at = {"templateID": INTERPRETER_TEMPLATE, "envVars": {"A": "3"}}, now()
        made = client.post("/sandboxes", json=body, headers={"X-API-KEY": KEY}).raise_for_status().json()
        assert made["sandboxID"] == member["id"]
        client.post("/v1/node/drain").raise_for_status()
    box = Client(daemon, member["id"])
    since, pid, *rest = box.run(_LOOK)
    assert (since < asked_at, rest) == (True, ["3", "/home/user", "UTC"])
    assert box.run(_LOOK, A="2")[1:3] == (pid, "2")
    box.run("del os.environ['A']")
    assert box.run(_LOOK)[1:3] == (pid, None)
    (context,) = box.ask("GET", "/contexts").json()
    box.ask("POST", f"/contexts/{context['id']}/restart")
    assert box.run(_LOOK)[2] == "3"
    since, _, *rest = Client(daemon, claimed_id).run(_LOOK)
    assert (since > claimed_at, rest) == (True, ["1", "/home/user", "JST"])
