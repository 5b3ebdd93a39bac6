"""E2B's code interpreter SDK as published, unchanged, against the real daemon."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.e2b.conftest import Scenarios, publish_interpreter
from tests.e2e.daemon import KEY, Daemon
from tests.waiting import patience


@pytest.fixture(scope="module")
def image(daemon: Daemon) -> None:
    """The machine's own system with ipykernel, as the template that the SDK asks for."""
    publish_interpreter(daemon.data_dir)


_RESULTS = {
    "text": ["m", ["é\n"], ["e\n"], ["é\n"], None, 1],
    "state": "2",
    "program": "user /home/user /home/user",
    "error": ["ZeroDivisionError", "division by zero", True],
    "variables": ["here", None, "b"],
    "large output": 3_000_001,
    "too large a result": [0, "a result of 9000018 bytes is not shown: "],
    "plot": ["iVBORw0KGgo", "line", "T", "s", [[0, 1], [1, 3]]],
    "formats": [["html"], ["markdown"], ["latex"], ["json"], ["svg"], ["application/x-own", "data"]],
    "own": ["own", {"a": 1}],
    "context": ["python", "/home/user/w", "/home/user/w"],
    "apart": "NameError",
    "listed": [2, True, []],
    "restarted": "NameError",
    "died": ["KernelDied", "2"],
}
"""Results of the scenarios that are the same in every language."""

_OF_PYTHON = {
    "refused": ["NotFoundException", "SandboxException", "SandboxException", "NotFoundException", "NotFoundException"],
    "time limit": ["TimeoutException", "goes on"],
}
_OF_JAVASCRIPT = {
    "refused": ["NotFoundError", "SandboxError", "SandboxError", "NotFoundError", "NotFoundError"],
    "time limit": ["TimeoutError", "goes on"],
}


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize("language", ["python", "python, async", "javascript"])
def test_code_runs_unchanged(language: str, run: Callable[..., Scenarios]) -> None:
    """Code, its output, results and errors, contexts, restarts and time limits are what each SDK expects."""
    expected = {**_RESULTS, **(_OF_JAVASCRIPT if language == "javascript" else _OF_PYTHON)}
    assert run(language, "interpreter") == expected


@pytest.mark.usefixtures("image")
def test_frameworks_run_unchanged(run: Callable[..., Scenarios]) -> None:
    """OpenAI's Agents SDK, LangChain's deepagents and smolagents work in sandboxes by their own E2B backends."""
    assert run("python", "frameworks") == {
        "openai_agents": ["done", ["user", "one"], ["more"], True],
        "langchain": ["done", ["48", "user"], True],
        "smolagents": [42, "/home/user"],
    }


@pytest.fixture
def sandbox(daemon: Daemon) -> Iterator[dict[str, Any]]:
    """A sandbox without a kernel, as the create of E2B's API answers it."""
    with daemon.client() as client:
        url, asked = f"{daemon.wait_url()}/sandboxes", {"templateID": "host"}
        made = httpx.post(url, json=asked, headers={"X-API-KEY": KEY}, timeout=patience(60)).json()
        yield made
        client.delete(f"/v1/sessions/{made['sandboxID']}")


def _ask(
    daemon: Daemon,
    sandbox: dict[str, Any],
    path: str,
    port: str = "49999",
    context: str | None = None,
    **tokens: str,
) -> httpx.Response:
    """Ask a port of a sandbox, with headers of the names of the tokens."""
    headers = {"E2b-Sandbox-Id": sandbox["sandboxID"], "E2b-Sandbox-Port": port}
    headers |= {name.replace("_", "-"): token for name, token in tokens.items()}
    url = f"{daemon.wait_url()}{path}"
    if path == "/contexts":
        return httpx.get(url, headers=headers)
    return httpx.post(url, json={"code": "1", "context_id": context}, headers=headers, timeout=patience(60))


_READ = r"""read -r; read -r order; id=${order#*'"id":"'}; id=${id%%'"'*}; """
_LIES = {
    r"tr '\0' x </dev/zero": ["KernelLied: the context wrote a line of more than 8389632 bytes; the context was ended"],
    "echo $id oops; cat": ["KernelLied: the context wrote a line that is not JSON; the context was ended"],
    "echo $id '[1]'; cat": ["KernelLied: the context wrote a line without a type; the context was ended"],
    "exit 3": ["KernelGone: the context has ended: exited"],
    """echo '* {"type": "failed", "reason": "no way"}'; exit 1""": ["KernelGone: the context has ended: no way"],
    """echo other '{"type": "error"}'; echo half; echo $id '{"type": "end"}'; cat""": [],
}
"""Ends of programs that have the id of a request, and the errors that the client gets."""


def test_a_context_is_not_believed(daemon: Daemon, sandbox: dict[str, Any]) -> None:
    """A process in a sandbox that takes itself for a context is told of, and ended, when it writes a line without end
    or one that is not JSON. Of one that ends, its own reason is told. What it says to requests that nobody made has no
    effect."""
    session = f"/v1/sessions/{sandbox['sandboxID']}"
    told = []
    with daemon.client() as client:
        for number, lie in enumerate(_LIES):
            process = {"argv": ["/bin/bash", "-c", _READ + lie], "process_id": f"e2b-kernel-{number}"}
            client.post(f"{session}/processes", json=process).raise_for_status()
            answer = _ask(daemon, sandbox, "/execute", context=str(number), X_Access_Token=sandbox["envdAccessToken"])
            told.append(["{name}: {value}".format(**json.loads(line)) for line in answer.text.splitlines()])
        assert told == list(_LIES.values())
    left = _ask(daemon, sandbox, "/contexts", X_Access_Token=sandbox["envdAccessToken"]).json()
    assert [each["id"] for each in left] == ["5"]


def test_who_may_run_code(daemon: Daemon, sandbox: dict[str, Any]) -> None:
    """The sandbox's token lets a client run code, as does the one for its ports, which opens nothing else. Where the
    image has no kernel, code is refused with a text that says what is missing."""
    own, traffic = sandbox["envdAccessToken"], sandbox["trafficAccessToken"]
    assert _ask(daemon, sandbox, "/contexts").status_code == 401
    assert _ask(daemon, sandbox, "/contexts", E2b_Traffic_Access_Token=own).status_code == 401
    assert _ask(daemon, sandbox, "/contexts", E2b_Traffic_Access_Token=traffic).json() == []
    assert _ask(daemon, sandbox, "/process.Process/List", "49983", E2b_Traffic_Access_Token=traffic).status_code == 401
    refused = _ask(daemon, sandbox, "/execute", X_Access_Token=own)
    assert (refused.status_code, "jupyter_client" in refused.text) == (501, True)
